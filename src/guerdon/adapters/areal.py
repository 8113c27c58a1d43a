"""AReaL's reward functions: `RLVRWorkflow(reward_fn=reward_function("http://host:5555"), ...)`.

A sample without a reward raises, and AReaL leaves its trajectory out. But one it has four times waited 15 s for, also
for one of its few processes to be free, gets 0. `async_reward_function` has neither those nor that limit:

    class ServedWorkflow(RLVRWorkflow):
        def __init__(self, url, **settings):
            reward = async_reward_function(url)
            super().__init__(reward_fn=reward, **settings)
            self.async_reward_fn = reward
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from guerdon.adapters.judge import TIMEOUT_S, judge
from guerdon.adapters.samples import samples_of
from guerdon.client.reward_client import ScoreArgs
from guerdon.errors import ConfigError
from guerdon.messages import ended

SOON_S = 12.0
"""How long a blocking call may take, with all its tries: less than what AReaL calls 0."""


class RewardFunction:
    """Asks a served model for the reward of one sample; calls block. It can be pickled."""

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "reward_model",
        *,
        send: Literal["text", "tokens"] = "text",
        ending: str = "",
        labels: str | None = None,
        timeout_s: float = SOON_S,
    ) -> None:
        """`send` says what of prompt and completion is scored: their text, or the policy's token ids.

        A text is completed to `ending`, such as ChatML's `<|im_end|>` and newline, of which the policy stops short.

        The data set's column `labels` is told to models that take labels. A call is given up after `timeout_s`.
        """
        if send not in ("text", "tokens"):
            raise ConfigError(f"send is {send!r}", "choose text or tokens")
        if send == "tokens" and ending:
            raise ConfigError(f"ending is {ending!r}, and send is tokens", "send text, or leave the ending out")
        self._judge, self._send, self._labels = judge(url, model, timeout_s), send, labels
        self._ending = ending

    def __call__(
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
    ) -> float:
        """The reward. Raises SampleFailed where there is none, and GuerdonError where the server cannot be asked."""
        scores = self._judge.score_in_queue(**self._asked(prompt, completions, prompt_ids, completion_ids, data))
        return float(scores.raise_for_failed().rewards[0])

    def _asked(
        self, prompt: str, completion: str, prompt_ids: Sequence[int], ids: Sequence[int], data: dict[str, Any]
    ) -> ScoreArgs:
        asked = samples_of([prompt], [ended(completion, self._ending)])
        if self._send == "tokens":
            asked.pop("texts")
            asked |= {"tokens": [[*prompt_ids, *ids]], "prompt_lengths": [len(prompt_ids)]}
        return asked if self._labels is None else {**asked, "labels": [data[self._labels]]}


class AsyncRewardFunction(RewardFunction):
    """`RewardFunction` to be awaited, as AReaL's workflows await their `async_reward_fn`."""

    def __init__(self, url: str | Sequence[str], model: str = "reward_model", **more: Any) -> None:
        """As `RewardFunction`'s."""
        super().__init__(url, model, **{"timeout_s": TIMEOUT_S, **more})

    async def __call__(  # type: ignore[override]
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
    ) -> float:
        """As `RewardFunction`'s."""
        scores = await self._judge.score_async(**self._asked(prompt, completions, prompt_ids, completion_ids, data))
        return float(scores.raise_for_failed().rewards[0])


reward_function, async_reward_function = RewardFunction, AsyncRewardFunction
