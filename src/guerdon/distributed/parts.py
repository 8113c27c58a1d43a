"""Splits a batch over the ranks for a user's own function, and gathers the results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchParts:
    """A batch is split into `count` equal parts, of which part `index` is this rank's."""

    index: int = 0
    count: int = 1
    ranks: Ranks = ALONE

    @classmethod
    def of(cls, ranks: Ranks, count: int) -> BatchParts:
        """Returns this rank's part: Megatron's data-parallel rank if Megatron counts as many, else by neighbours.

        Without Megatron the ranks of one part lie side by side. Raises ConfigError if the ranks do not split evenly.
        """
        if count == 1:
            return WHOLE
        megatron = _megatron()
        if megatron is not None and megatron.get_data_parallel_world_size() == count:
            return WHOLE if ranks.size == 1 else cls(megatron.get_data_parallel_rank(), count, ranks)
        if ranks.size % count:
            raise ConfigError(
                f"data_parallel_size is {count}, and there are {ranks.size} processes",
                "give a number that divides theirs",
            )
        return cls(ranks.rank // (ranks.size // count), count, ranks)

    def slice(self, num_rows: int) -> slice:
        """Returns this rank's rows; `num_rows` must be a multiple of `count`."""
        size = num_rows // self.count
        return slice(self.index * size, (self.index + 1) * size)

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """Returns what `compute` gave for each part, in order. Collective; re-raises any rank's error on every rank."""
        if self.count == 1:
            return [compute()]
        with self.ranks.raise_on_all_ranks():
            own = compute()
        # Reversed, so that the first rank of a part counts.
        made = dict(reversed(self.ranks.tell_all((self.index, own))))
        return [made[index] for index in range(self.count)]


WHOLE = BatchParts()


def data_parallel_size(given: int | None) -> int:
    """Returns `given`, or Megatron's data-parallel size if Megatron is initialised in this process, else 1."""
    if given is not None:
        if given < 1:
            raise ConfigError(f"data_parallel_size is {given}", "give at least 1, or leave it out")
        return given
    megatron = _megatron()
    return 1 if megatron is None else megatron.get_data_parallel_world_size()


def _megatron() -> Any:
    """Returns Megatron's `parallel_state` if the process has initialised it."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None
