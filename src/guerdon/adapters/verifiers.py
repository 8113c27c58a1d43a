"""Rewards for verifiers' tasks, in their `@vf.reward` methods or configurations: `reward_function("http://host:5555")`.

A failed sample raises: verifiers records it as the trace's error, and the reward has no score.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S, judge, make_samples, only_reward
from guerdon.client.reward_client import ScoreArgs
from guerdon.errors import InvalidRequest

RewardMethod = Callable[[Any, Any], Awaitable[float]]
"""Takes the task's data and a trace."""


def reward_function(
    url: str | Sequence[str], model: str = "reward_model", *, label: str = "answer", timeout_s: float = TIMEOUT_S
) -> RewardMethod:
    """Returns a coroutine function of `task` and `trace` that asks a served model for the reward of a trace.

    Scored is the trace's conversation, which has to end with the assistant's message. The label, for models that take
    labels, is the task's field `label`, if it has one. Components are recorded as metrics, `MODEL/NAME`. Raises
    SampleFailed without a reward, InvalidRequest for another conversation, and GuerdonError if the server cannot be
    reached in `timeout_s`.
    """
    asked = judge(url, model, timeout_s)

    async def reward(task: Any, trace: Any) -> float:
        from verifiers.v1.dialects.chat import message_to_wire

        if not trace.messages:
            raise InvalidRequest("the trace has no messages")
        # Those of the trace's last branch, as OpenAI's chat API has them.
        *prompt, response = [message_to_wire(message) for message in trace.messages]
        if not prompt or response["role"] != "assistant":
            raise InvalidRequest(
                f"the trace has {len(prompt) + 1} messages and ends with the {response['role']}'s, and a reward is for "
                "an assistant's answer to a prompt"
            )
        sample: ScoreArgs = {**make_samples([prompt], [[response]]), "labels": [getattr(task, label, None)]}
        value, components = only_reward(await asked.score_async(**sample))
        for name, number in components.items():
            trace.record_metric(f"{model}/{name}", number)
        return value

    return reward
