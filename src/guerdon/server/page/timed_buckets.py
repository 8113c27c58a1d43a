"""Keeps values by their time, in buckets for an hour and in wider ones for a day. Pure: no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

FINE_S, FINE_WINDOW_S = 10.0, 3600.0
COARSE_S, COARSE_WINDOW_S = 60.0, 86_400.0


class Addable(Protocol):
    """Merges with another of its kind."""

    def __add__(self: S, other: S) -> S: ...


S = TypeVar("S", bound=Addable)
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TakenBuckets(Generic[T]):
    """A copy of buckets of `step_s` seconds, by number; readable on any thread."""

    step_s: float
    buckets: Mapping[int, T]

    def between(self, start: float, end: float) -> list[tuple[float, T]]:
        """Returns the start and the value of each bucket that starts in the period, in order."""
        first, last = math.ceil(start / self.step_s), math.ceil(end / self.step_s)
        return [(i * self.step_s, self.buckets[i]) for i in sorted(self.buckets) if first <= i < last]

    def columns(self: TakenBuckets[S], start: float, step_s: float, count: int) -> list[S | None]:
        """Returns the sums of `count` periods of `step_s` from `start`; None for those without a value."""
        sums: list[S | None] = [None] * count
        for number, value in sorted(self.buckets.items()):
            i = int((number * self.step_s - start) // step_s)
            if 0 <= i < count:
                before = sums[i]
                sums[i] = value if before is None else before + value
        return sums


class TimedBuckets(Generic[T]):
    """Values by FINE_S over the last hour, and by COARSE_S over the last day and the first `first_s` seconds.

    A bucket's value is replaced and never changed, so that a reader in another thread sees all of it.
    """

    def __init__(self, first_s: float = 0.0) -> None:
        self._kept: tuple[dict[int, T], dict[int, T]] = ({}, {})
        self._first_s = first_s

    def put(self, time: float, grow: Callable[[T | None], T]) -> None:
        """Replaces the values of that time by what `grow` makes of them, None if there is none."""
        sizes = ((FINE_S, FINE_WINDOW_S, 0.0), (COARSE_S, COARSE_WINDOW_S, self._first_s))
        for buckets, (step_s, window_s, first_s) in zip(self._kept, sizes, strict=True):
            at = int(time // step_s)
            if at not in buckets:
                spared = min(buckets, default=at) + int(first_s // step_s)
                for old in [i for i in buckets if spared <= i < at - window_s // step_s - 1]:
                    del buckets[old]
            buckets[at] = grow(buckets.get(at))

    def add(self: TimedBuckets[S], time: float, value: S) -> None:
        """Adds a value to those of that time."""
        self.put(time, lambda before: value if before is None else before + value)

    def taken(self, start: float, now: float) -> TakenBuckets[T]:
        """Returns the shortest buckets that reach back to `start`."""
        fine, coarse = self._kept
        if start >= now - FINE_WINDOW_S - FINE_S:
            return TakenBuckets(FINE_S, fine.copy())
        return TakenBuckets(COARSE_S, coarse.copy())
