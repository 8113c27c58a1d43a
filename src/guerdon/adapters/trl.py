"""TRL's reward functions: `GRPOTrainer(reward_funcs=reward_function("http://host:5555"), ...)`, and RLOOTrainer's.

A failed sample is None. Since TRL 1.6 a completion that no function scored has the advantage 0 and no part in its
group's baseline; before, its reward was 0 there. Where the server cannot be asked, the run ends with the GuerdonError.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S, judge
from guerdon.adapters.samples import Prompt, components_of, mean_of, none_for_nan, samples_of
from guerdon.client import Scores
from guerdon.client.reward_client import ScoreArgs

log = logging.getLogger(__name__)


class RewardFunction:
    """Asks a served model for the reward of each prompt with its completion; calls block. It can be pickled."""

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "reward_model",
        *,
        name: str | None = None,
        labels: str | None = None,
        suffix: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """TRL logs the rewards under `name`, by default the model's.

        The data set's column `labels` goes to models that take labels. `suffix` stands after each completion that is
        a text, as the EOS does that TRL strips; conversations are formatted by the server. A call is given up after
        `timeout_s`.
        """
        self.__name__ = name or model
        self._judge, self._labels, self._suffix = judge(url, model, timeout_s), labels, suffix

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        """One reward a completion, None where it has none. Raises GuerdonError where the server cannot be asked."""
        return self._told(self._judge.score(**self._asked(prompts, completions, columns)), columns)

    def _asked(self, prompts: Sequence[Prompt], completions: Sequence[Prompt], columns: dict[str, Any]) -> ScoreArgs:
        asked = samples_of(prompts, completions, self._suffix)
        return asked if self._labels is None else {**asked, "labels": columns[self._labels]}

    def _told(self, scores: Scores, columns: dict[str, Any]) -> list[float | None]:
        failed = [error for error in scores.errors if error is not None]
        if failed:
            log.warning("%s: %d of %d samples have no reward: %s", self.__name__, len(failed), len(scores), failed[0])
        # Before TRL 1.15 ranks that log other names than the rest hang, so that what failed is logged, too.
        for component, values in components_of(scores).items():
            if "log_metric" in columns:  # since 1.0, but not in TRL's asynchronous trainers
                columns["log_metric"](f"{self.__name__}/{component}", mean_of(values))
                columns["log_extra"](f"{self.__name__}/{component}", none_for_nan(values))
        return none_for_nan(scores.rewards)


class AsyncRewardFunction(RewardFunction):
    """`RewardFunction` to be awaited: since 0.27 TRL has all its async reward functions under way at once."""

    async def __call__(  # type: ignore[override]
        self, prompts: Sequence[Prompt], completions: Sequence[Prompt], **columns: Any
    ) -> list[float | None]:
        """As `RewardFunction`'s."""
        return self._told(await self._judge.score_async(**self._asked(prompts, completions, columns)), columns)

    # inspect.iscoroutinefunction, all that most versions of TRL ask, knows an object for an async function by these.
    __code__ = __call__.__code__
    __defaults__ = __kwdefaults__ = None


reward_function, async_reward_function = RewardFunction, AsyncRewardFunction
