"""Rubrics for OpenEnv's environments: `rubric("http://host:5555", to_messages)`, and `async_rubric` for `step_async`.

A failed sample raises, and OpenEnv reports the step as failed: there is no default reward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S, judge, make_samples, only_reward
from guerdon.client import Scores
from guerdon.client.reward_client import ScoreArgs
from guerdon.core import Message
from guerdon.errors import InvalidRequest

Conversation = Callable[[Any, Any], Sequence[Message]]
"""Makes the conversation to score of an action and its observation."""
Label = Callable[[Any, Any], Any]
"""Makes a label of an action and its observation."""


def rubric(
    url: str | Sequence[str],
    to_messages: Conversation,
    model: str = "reward_model",
    *,
    to_label: Label | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Returns an `openenv.core.rubrics.Rubric` that asks a served model for a step's reward; calls block.

    `to_messages` makes the conversation to score, which ends with the assistant's message, and `to_label` the label for
    models that take labels. `components`, a dict, has those of the last reward. Calls raise SampleFailed without a
    reward, InvalidRequest for another conversation, and GuerdonError if the server cannot be reached in `timeout_s`.
    """
    return _classes()[0](url, to_messages, model, to_label, timeout_s)


def async_rubric(
    url: str | Sequence[str],
    to_messages: Conversation,
    model: str = "reward_model",
    *,
    to_label: Label | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Returns what `rubric` returns, for environments with `step_async`: calls return a coroutine."""
    return _classes()[1](url, to_messages, model, to_label, timeout_s)


@functools.cache
def _classes() -> tuple[type[Any], type[Any]]:
    from openenv.core.rubrics import Rubric

    class ServedRubric(Rubric):  # type: ignore[misc, unused-ignore]
        """Asks a served model for the reward of an action and its observation."""

        def __init__(
            self, url: Any, to_messages: Conversation, model: str, to_label: Label | None, timeout_s: float
        ) -> None:
            super().__init__()
            self._judge, self._to_messages, self._to_label = judge(url, model, timeout_s), to_messages, to_label
            self.components: dict[str, float] = {}

        def forward(self, action: Any, observation: Any) -> Any:
            """Returns the reward."""
            return self._keep(self._judge.score(**self._make_sample(action, observation)))

        def _make_sample(self, action: Any, observation: Any) -> ScoreArgs:
            messages = [*self._to_messages(action, observation)]
            if len(messages) < 2 or messages[-1].get("role") != "assistant":
                raise InvalidRequest("to_messages has to return a prompt's messages and the assistant's after them")
            sample = make_samples([messages[:-1]], [messages[-1:]])
            return sample if self._to_label is None else {**sample, "labels": [self._to_label(action, observation)]}

        def _keep(self, scores: Scores) -> float:
            reward, self.components = only_reward(scores)
            return reward

    class AsyncServedRubric(ServedRubric):
        """Asks as `ServedRubric` does, without blocking the event loop."""

        async def forward(self, action: Any, observation: Any) -> float:
            """Returns the reward."""
            return self._keep(await self._judge.score_async(**self._make_sample(action, observation)))

    return ServedRubric, AsyncServedRubric
