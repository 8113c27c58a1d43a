"""What is under way at the servers, as NeMo-Aligner's futures: they have the results that its own have."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from guerdon.client import CriticScores, Scores
from guerdon.client.ordering import TrainFuture
from guerdon.critic_core import CheckpointInfo

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RMFuture:
    """Rewards under way."""

    scores: Future[Scores]

    def result(self) -> Tensor:
        """Rewards float32 `[B, 1]`; raises SampleFailed where a sample got none, and what the server raised."""
        return _tensor(self.scores.result().raise_for_failed().rewards[:, None])


@dataclass(frozen=True, slots=True)
class RMCriticFuture:
    """Rewards and values under way; `rewards` is None where they come with the values."""

    values: Future[CriticScores]
    rewards: Future[Scores] | None
    seq_length: int

    def result(self) -> tuple[Tensor, Tensor]:
        """Rewards float32 `[B]` and values float32 `[B, S-1]`, 0 beyond a sequence; raises as `RMFuture.result`."""
        scores = self.values.result().raise_for_failed()
        rewards = scores.rewards if self.rewards is None else self.rewards.result().raise_for_failed().rewards
        assert rewards is not None
        values = np.zeros((len(scores), self.seq_length), np.float32)
        for out, row in zip(values, scores.values, strict=True):
            out[: len(row)] = row
        return _tensor(rewards), _tensor(values[:, :-1].copy())


@dataclass(frozen=True, slots=True)
class RMTrainFuture:
    """A train request under way."""

    loss: TrainFuture[float]

    def result(self, timeout: float | None = None) -> dict[str, np.ndarray]:
        """Returns what `critic_train` answers, `loss_mean` float32 `[1]`; raises what the request failed with."""
        return {"loss_mean": np.array([self.loss.result(timeout)], np.float32)}

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the request's error, None if it succeeded."""
        return self.loss.exception(timeout)

    def done(self) -> bool:
        """Whether the request has finished."""
        return self.loss.done()


@dataclass(frozen=True, slots=True)
class SaveFuture:
    """A save under way."""

    saved: Future[CheckpointInfo | None]

    def result(self, timeout: float | None = None) -> None:
        """Returns once the critic is saved; raises what that failed with."""
        self.saved.result(timeout)


def _tensor(array: np.ndarray) -> Tensor:
    import torch  # the caller has loaded it: its tensors came in

    return torch.from_numpy(array)
