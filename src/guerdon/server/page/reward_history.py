"""Keeps rewards over time: per bucket of seconds the moments of all and a uniform sample. Pure: no clock."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from guerdon.server.page.drift import Moments, moments
from guerdon.server.page.timed_buckets import FINE_S, TakenBuckets, TimedBuckets

SAMPLE = 256
"""Rewards kept per bucket, with the lengths of their samples."""

FIRST_S = 3600.0
"""The start is kept for good, as a reference for drift."""

_MOST_PENDING = 65_536
_MOST_VERSIONS = 50


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The rewards of one bucket: the moments of all, and a uniform sample of at most SAMPLE.

    `kept`, float32 `[K, 2]`, has the sample's rewards and lengths, in random order, so that any prefix of them is a
    random sample, too.
    """

    moments: Moments = field(default_factory=Moments)
    kept: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.float32))


def _grown(rows: np.ndarray, random: np.random.Generator, before: Bucket | None) -> Bucket:
    """Returns the bucket with more rewards and lengths, float64 `[N, 2]`, N at least 1."""
    before = before or Bucket()
    kept = before.kept
    room = SAMPLE - len(kept)
    if room:
        kept = random.permutation(np.concatenate([kept, rows[:room].astype(np.float32)]))
    rest = rows[room:]
    if len(rest):  # each takes a random place of all that came so far, if that is one of those kept
        first = before.moments.count + room
        places = random.integers(0, np.arange(first + 1, first + len(rest) + 1))
        stays = places < SAMPLE
        kept = kept.copy()
        kept[places[stays]] = rest[stays]
    return Bucket(before.moments + moments(rows[:, 0]), kept)


@dataclass(frozen=True, eq=False)
class PooledRewards:
    """Rewards of a period: N sampled ones with `weights`, and the moments of all.

    `rewards`, `tokens`, `weights` and `times` (the beginning of the bucket) are float64 `[N]`; `parts` are the buckets'
    times and moments.
    """

    rewards: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    times: np.ndarray
    parts: list[tuple[float, Moments]]

    @classmethod
    def of(cls, buckets: list[tuple[float, Bucket]], most: int = 20_000) -> PooledRewards:
        """Merges buckets, each with its time; thins their samples to about `most` rewards in total."""
        each = max(1, -(-sum(len(bucket.kept) for _, bucket in buckets) // most))
        rows = [bucket.kept[: -(-len(bucket.kept) // each)] for _, bucket in buckets]  # they stand in no order
        numbers = np.array([len(part) for part in rows], np.int64)
        drawn = np.concatenate([np.empty((0, 2), np.float32), *rows]).astype(np.float64)
        counts = np.array([bucket.moments.count for _, bucket in buckets], np.float64)
        times = np.array([time for time, _ in buckets], np.float64)
        weights = np.repeat(counts / np.maximum(numbers, 1), numbers)
        told = [(time, bucket.moments) for time, bucket in buckets]
        return cls(drawn[:, 0], drawn[:, 1], weights, np.repeat(times, numbers), told)

    @property
    def num_drawn(self) -> float:
        """Returns Kish's effective sample size."""
        squares = float((self.weights**2).sum())
        return float(self.weights.sum()) ** 2 / squares if squares else 0.0


class RewardHistory:
    """The rewards of every model; noted rewards count when they are folded."""

    def __init__(self, seed: int = 0) -> None:
        self._kept: dict[str, TimedBuckets[Bucket]] = {}
        self._pending: deque[tuple[str, float, list[float], list[int]]] = deque()
        self.num_pending = 0
        """Returns the number of noted rewards that are not folded."""
        self._versions: dict[str, tuple[str, deque[tuple[float, str]]]] = {}
        self._random = np.random.default_rng(seed)

    def note(self, name: str, time: float, rewards: list[float], lengths: list[int]) -> None:
        """Queues a request's rewards and lengths in tokens; cheap, on the request's path."""
        self._pending.append((name, time, rewards, lengths))
        self.num_pending += len(rewards)
        if self.num_pending > _MOST_PENDING:
            self.fold()

    def served(self, name: str, time: float, version: str) -> None:
        """Records the weights version of an answer."""
        known = self._versions.get(name)
        if known is None:
            self._versions[name] = (version, deque(maxlen=_MOST_VERSIONS))
        elif known[0] != version:
            known[1].append((time, version))
            self._versions[name] = (version, known[1])

    def versions(self, name: str) -> list[tuple[float, str]]:
        """Returns time and version of the last weight changes, at most _MOST_VERSIONS, in order."""
        return [*self._versions[name][1]] if name in self._versions else []

    def fold(self, most: int | None = None) -> None:
        """Folds queued rewards into the buckets, about `most` at once."""
        together: dict[tuple[str, int], list[tuple[list[float], list[int]]]] = {}
        least = 0 if most is None else self.num_pending - most
        while self._pending and self.num_pending >= least:
            name, time, rewards, lengths = self._pending.popleft()
            self.num_pending -= len(rewards)
            together.setdefault((name, int(time // FINE_S)), []).append((rewards, lengths))
        for (name, at), parts in together.items():
            rows = np.empty((sum(len(rewards) for rewards, _ in parts), 2))
            rows[:, 0] = np.fromiter(chain.from_iterable(rewards for rewards, _ in parts), np.float64, len(rows))
            rows[:, 1] = np.fromiter(chain.from_iterable(lengths for _, lengths in parts), np.float64, len(rows))
            rows = rows[np.isfinite(rows[:, 0])]
            if len(rows):
                kept = self._kept.setdefault(name, TimedBuckets(FIRST_S))
                kept.put(at * FINE_S, functools.partial(_grown, rows, self._random))

    def taken(self, name: str, start: float, now: float) -> TakenBuckets[Bucket]:
        """Returns the model's rewards since then, in the shortest buckets that reach back so far."""
        return self._kept[name].taken(start, now) if name in self._kept else TakenBuckets(FINE_S, {})
