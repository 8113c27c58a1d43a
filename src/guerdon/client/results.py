"""What a score call gives back."""

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
    `[K_i]`, each None where the model gives none (the values of a text, whose tokens only the server counted, are
    padded with 0 to the longest of the call). `weights_version` names the weights; `queue_s` and
    `compute_s` are the seconds the server spent waiting and computing.
    """

    rewards: np.ndarray
    errors: list[str | None]
    attributes: np.ndarray | None = None
    values: list[np.ndarray] | None = None
    steps: list[np.ndarray] | None = None
    weights_version: str = ""
    queue_s: float = 0.0
    compute_s: float = 0.0

    def __len__(self) -> int:
        return len(self.rewards)

    def __iter__(self) -> Iterator[float]:
        return iter(self.rewards.tolist())

    def raise_for_failed(self) -> Scores:
        """Returns the scores themselves; raises SampleFailed naming the first failed sample where there is one."""
        failed = [i for i, error in enumerate(self.errors) if error is not None]
        if failed:
            first = failed[0]
            raise SampleFailed(f"{len(failed)} of {len(self)} samples failed; row {first}: {self.errors[first]}")
        return self
