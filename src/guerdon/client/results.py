"""What calls give back: scores, and a critic's values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from guerdon.errors import SampleFailed


@dataclass(slots=True, eq=False)
class Scores:
    """The scores of one call, one entry a sample in the order sent.

    `rewards` is float32 `[B]`, NaN (never 0.0) where the sample failed; `errors[i]` then says why and is None
    elsewhere. `attributes` is float32 `[B, A]`, `values` a list of float32 `[T_i]`, `steps` a list of float32
    `[K_i]`, each None where the model gives none (the values of a text are padded with 0 to the longest of the call
    where the server does not tell how many tokens it has). `weights_version` names the weights; `queue_s` and
    `compute_s` are the seconds the server spent waiting and computing. `attribute_names` are those of the attributes'
    columns, empty where the server does not name them.
    """

    rewards: np.ndarray
    errors: list[str | None]
    attributes: np.ndarray | None = None
    values: list[np.ndarray] | None = None
    steps: list[np.ndarray] | None = None
    weights_version: str = ""
    queue_s: float = 0.0
    compute_s: float = 0.0
    attribute_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rewards)

    def __iter__(self) -> Iterator[float]:
        return iter(self.rewards.tolist())

    def raise_for_failed(self) -> Scores:
        """Returns the scores themselves; raises SampleFailed naming the first failed sample where there is one."""
        _raise_for_failed(self.errors)
        return self


@dataclass(slots=True, eq=False)
class CriticScores:
    """A critic's values for one call, one entry a sample in the order sent.

    `values` is a list of float32 `[T_i]`, one a token; `rewards` float32 `[B]` where they were asked for
    beside the critic, else None. Both are NaN where the sample failed; `errors[i]` then says why and is None
    elsewhere. `weights_version` names the critic's weights; `queue_s` and `compute_s` are the seconds the server
    spent waiting and computing.
    """

    values: list[np.ndarray]
    errors: list[str | None]
    rewards: np.ndarray | None = None
    weights_version: str = ""
    queue_s: float = 0.0
    compute_s: float = 0.0

    def __len__(self) -> int:
        return len(self.values)

    def raise_for_failed(self) -> CriticScores:
        """Returns the values themselves; raises SampleFailed naming the first failed sample where there is one."""
        _raise_for_failed(self.errors)
        return self


def _raise_for_failed(errors: list[str | None]) -> None:
    failed = [i for i, error in enumerate(errors) if error is not None]
    if failed:
        raise SampleFailed(f"{len(failed)} of {len(errors)} samples failed; row {failed[0]}: {errors[failed[0]]}")
