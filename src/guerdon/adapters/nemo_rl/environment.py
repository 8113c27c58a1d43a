"""One turn of conversation and its reward, as NeMo-RL asks for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from guerdon.adapters.judge import judge
from guerdon.adapters.nemo_rl.settings import Log, Settings

if TYPE_CHECKING:
    from torch import Tensor


class EnvironmentReturn(NamedTuple):
    """The fields of NeMo-RL's own, in its order."""

    observations: list[dict[str, str]]
    metadata: list[Any]
    next_stop_strings: list[None]
    rewards: Tensor
    terminateds: Tensor
    answers: list[str]


class RewardEnvironment:
    """Ends every episode after one turn, with the reward of the whole conversation; may be called from any thread."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        """`cfg` is its part of the YAML's `env`: `url` (or several), `model`, `timeout_s`, `send`, `suffix`, `labels`.

        `send: messages`, the default, puts the conversation through the reward model's chat template. `send: texts`
        scores the contents as they are, one behind the other, and `suffix` behind them: for prompts that have had a
        template put around them, as NeMo-RL's own processors do. `labels` is the key of each sample's metadata that
        goes to models that take labels. Raises ConfigError for settings that do not hold.
        """
        self._settings = Settings.of(cfg)
        self._judge = judge(self._settings.url, self._settings.model, self._settings.timeout_s)
        self._first_step = threading.Lock()  # taken once, for good

    def step(
        self, message_log_batch: Sequence[Log], metadata: Sequence[Any], return_extracted_answer: bool = False
    ) -> EnvironmentReturn:
        """Rewards float32 `[B]`; raises SampleFailed where a sample got none, and what the server raised."""
        import torch  # NeMo-RL has it

        if self._first_step.acquire(blocking=False):
            self._settings.warn_of_templates(message_log_batch[0])
        samples = self._settings.samples(message_log_batch, metadata)
        rewards = self._judge.score(**samples).raise_for_failed().rewards
        nothing = [None] * len(rewards)
        return EnvironmentReturn(
            [{"role": "environment", "content": f"Environment: {reward}"} for reward in rewards],
            nothing,
            nothing,
            torch.from_numpy(rewards),
            torch.ones(len(rewards), dtype=torch.bool),
            [log[-1]["content"] for log in message_log_batch],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """The batch as it is, and the mean, deviation and bounds of its rewards."""
        rewards = np.asarray(batch["rewards"], np.float64)
        names = ("mean", "std", "min", "max")
        return batch, {f"guerdon/{name}_reward": float(getattr(rewards, name)()) for name in names}

    def shutdown(self) -> None:
        """Nothing is left to do at the end of a run, where NeMo-RL asks for it."""
