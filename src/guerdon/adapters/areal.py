"""AReaL's reward functions: `RLVRWorkflow(reward_fn=reward_function("http://host:5555"), ...)`.

A sample without a reward raises, and AReaL drops its trajectory. But AReaL gives 0 to a sample that has timed out four
times after 15 s, which include the wait for one of its few processes. `async_reward_function` has neither limit:

    class ServedWorkflow(RLVRWorkflow):
        def __init__(self, url, **settings):
            reward = async_reward_function(url)
            super().__init__(reward_fn=reward, **settings)
            self.async_reward_fn = reward
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from guerdon.adapters.judge import TIMEOUT_S, judge, make_samples, only_reward
from guerdon.client.reward_client import ScoreArgs
from guerdon.errors import ConfigError

SOON_S = 12.0
"""The time limit of a blocking call with all its tries: below AReaL's time-out, after which it gives 0."""


class ArealReward:
    """Asks a served model for the reward of one sample; calls block. It can be pickled."""

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "reward_model",
        *,
        send: Literal["text", "tokens"] = "text",
        ending: str | None = None,
        labels: str | None = None,
        timeout_s: float = SOON_S,
    ) -> None:
        """`send` chooses the samples' form: the text of prompt and completion, or the policy's token ids.

        Both end as the served model's chat template ends an answer (ChatML: `<|im_end|>` and a newline), if it has made
        the prompt: a policy stops before. A text may have another `ending`; an empty one adds nothing. The data set's
        column `labels` goes to models that take labels. A call fails after `timeout_s`.
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
        """Returns the reward; raises SampleFailed without one, and GuerdonError if the server cannot be reached."""
        sample = self._make_sample(prompt, completions, prompt_ids, completion_ids, data)
        scores = self._judge.score_in_queue(completes=self._ending is None, **sample)
        return only_reward(scores)[0]

    def _make_sample(
        self, prompt: str, completion: str, prompt_ids: Sequence[int], ids: Sequence[int], data: dict[str, Any]
    ) -> ScoreArgs:
        sample = make_samples([prompt], [completion], self._ending)
        if self._send == "tokens":
            sample.pop("texts")
            sample |= {"tokens": [[*prompt_ids, *ids]], "prompt_lengths": [len(prompt_ids)]}
        return sample if self._labels is None else {**sample, "labels": [data[self._labels]]}


class AsyncArealReward(ArealReward):
    """`ArealReward` for `await`, as AReaL's workflows await their `async_reward_fn`."""

    def __init__(self, url: str | Sequence[str], model: str = "reward_model", **more: Any) -> None:
        """Takes `ArealReward`'s arguments; the default `timeout_s` is longer."""
        super().__init__(url, model, **{"timeout_s": TIMEOUT_S, **more})

    async def __call__(  # type: ignore[override]
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
    ) -> float:
        """Returns the reward; raises as `ArealReward` does."""
        sample = self._make_sample(prompt, completions, prompt_ids, completion_ids, data)
        scores = await self._judge.score_async(completes=self._ending is None, **sample)
        return only_reward(scores)[0]


reward_function, async_reward_function = ArealReward, AsyncArealReward
