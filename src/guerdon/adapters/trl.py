"""TRL's reward functions: `GRPOTrainer(reward_funcs=reward_function("http://host:5555"), ...)`, and RLOOTrainer's.

A failed sample is None. Since TRL 1.6 a completion that no function scored has the advantage 0 and does not count in
its group's baseline; before, it counted as 0. If the server cannot be reached, the run ends with the GuerdonError.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S, Prompt, finite_mean, judge, make_samples, named_components, none_for_nan
from guerdon.client import Scores
from guerdon.client.reward_client import ScoreArgs
from guerdon.endings import ended
from guerdon.errors import ConfigError

log = logging.getLogger(__name__)


class TrlReward:
    """Asks a served model for the reward of each prompt with its completion; calls block. It can be pickled."""

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "reward_model",
        *,
        name: str | None = None,
        labels: str | None = None,
        ending: str | None = None,
        eos_token_id: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """TRL logs the rewards under `name`, by default the model's.

        The data set's column `labels` goes to models that take labels. The server formats conversations. Texts that the
        served model's chat template has made end as it ends an answer; `ending` replaces that, such as the EOS that TRL
        strips, for models that were trained without a template. With `eos_token_id` it is appended only to completions
        whose ids end with that, which were not truncated. A call fails after `timeout_s`. Raises ConfigError for an
        `eos_token_id` without `ending`.
        """
        if eos_token_id is not None and not ending:
            raise ConfigError("eos_token_id is set without an ending", "give ending, the text of that token")
        self.__name__ = name or model
        self._judge, self._labels = judge(url, model, timeout_s), labels
        self._ending, self._eos_token_id = ending, eos_token_id

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        """Returns each completion's reward, None if it failed; raises GuerdonError if the server cannot be reached."""
        samples = self._make_samples(prompts, completions, columns)
        return self._log_and_return(self._judge.score(completes=self._ending is None, **samples), columns)

    def _make_samples(
        self, prompts: Sequence[Prompt], completions: Sequence[Prompt], columns: dict[str, Any]
    ) -> ScoreArgs:
        ending, eos = self._ending or "", self._eos_token_id
        ids = completions if eos is None else columns["completion_ids"]
        # Texts that were truncated have not ended.
        has_ended = [eos is None or [*row][-1:] == [eos] for row in ids]
        whole = [
            ended(completion, ending) if isinstance(completion, str) and ends else completion
            for completion, ends in zip(completions, has_ended, strict=True)
        ]
        samples = make_samples(prompts, whole)
        return samples if self._labels is None else {**samples, "labels": columns[self._labels]}

    def _log_and_return(self, scores: Scores, columns: dict[str, Any]) -> list[float | None]:
        failed = [error for error in scores.errors if error is not None]
        if failed:
            log.warning("%s: %d of %d samples have no reward: %s", self.__name__, len(failed), len(scores), failed[0])
        # Before TRL 1.15 all ranks must log the same names, or they hang: failed samples are logged as well.
        for component, values in named_components(scores).items():
            if "log_metric" in columns:  # since 1.0, but not in TRL's asynchronous trainers
                columns["log_metric"](f"{self.__name__}/{component}", finite_mean(values))
                columns["log_extra"](f"{self.__name__}/{component}", none_for_nan(values))
        return none_for_nan(scores.rewards)


class AsyncTrlReward(TrlReward):
    """`TrlReward` for `await`: since 0.27 TRL runs all its async reward functions concurrently."""

    async def __call__(  # type: ignore[override]
        self, prompts: Sequence[Prompt], completions: Sequence[Prompt], **columns: Any
    ) -> list[float | None]:
        """Returns what `TrlReward` returns."""
        samples = self._make_samples(prompts, completions, columns)
        return self._log_and_return(await self._judge.score_async(completes=self._ending is None, **samples), columns)

    # inspect.iscoroutinefunction, which most versions of TRL call, recognises an object as an async function by these.
    __code__ = __call__.__code__
    __defaults__ = __kwdefaults__ = None


reward_function, async_reward_function = TrlReward, AsyncTrlReward
