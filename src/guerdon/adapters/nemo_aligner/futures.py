"""Rewards and values under way, as NeMo-Aligner's futures: their results are torch's tensors."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from guerdon.client import Scores
from guerdon.client.results import CriticScores

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


def _tensor(array: np.ndarray) -> Tensor:
    import torch  # the caller has loaded it: its tensors came in

    return torch.from_numpy(array)
