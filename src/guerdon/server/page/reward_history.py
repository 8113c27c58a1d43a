"""Keeps rewards over time: per bucket of seconds the moments of all and a uniform sample. Pure: no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from guerdon.server.page.drift import Moments, moments

SAMPLE = 256
"""Rewards kept per bucket, with the lengths of their samples."""

FINE_S, FINE_WINDOW_S = 10.0, 3600.0
COARSE_S, COARSE_WINDOW_S = 60.0, 86_400.0
FIRST_S = 3600.0
"""The start is kept for good, as a reference for drift."""

_MOST_PENDING = 65_536
_MOST_VERSIONS = 50

Part = tuple[float, Moments, np.ndarray]
"""Start of a bucket, moments of its rewards, and its sample of rewards and lengths, float32 `[K, 2]`."""


class Bucket:
    """The rewards of one bucket: the moments of all, and a uniform sample of at most SAMPLE.

    `held` has both, float32 `[K, 2]` of rewards and lengths. Immutable: replaced as a whole, so that readers in other
    threads see a consistent state. The kept ones are in random order, so that any prefix of them is a random sample,
    too.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = (Moments(), np.empty((0, 2), np.float32))

    def add(self, rows: np.ndarray, random: np.random.Generator) -> None:
        """Adds rewards and lengths, float64 `[N, 2]`, N at least 1."""
        before, kept = self.held
        room = SAMPLE - len(kept)
        if room:
            kept = random.permutation(np.concatenate([kept, rows[:room].astype(np.float32)]))
        rest = rows[room:]
        if len(rest):  # each takes a random place of all that came so far, if that is one of those kept
            first = before.count + room
            places = random.integers(0, np.arange(first + 1, first + len(rest) + 1))
            stays = places < SAMPLE
            kept = kept.copy()
            kept[places[stays]] = rest[stays]
        self.held = (before + moments(rows[:, 0]), kept)


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
    def of(cls, parts: list[Part], most: int = 20_000) -> PooledRewards:
        """Merges buckets; thins their samples to about `most` rewards in total."""
        each = max(1, -(-sum(len(kept) for _, _, kept in parts) // most))
        rows = [kept[: -(-len(kept) // each)] for _, _, kept in parts]  # they stand in no order
        numbers = np.array([len(part) for part in rows], np.int64)
        drawn = np.concatenate([np.empty((0, 2), np.float32), *rows]).astype(np.float64)
        counts = np.array([moments.count for _, moments, _ in parts], np.float64)
        times = np.array([time for time, _, _ in parts], np.float64)
        weights = np.repeat(counts / np.maximum(numbers, 1), numbers)
        told = [(time, moments) for time, moments, _ in parts]
        return cls(drawn[:, 0], drawn[:, 1], weights, np.repeat(times, numbers), told)

    @property
    def num_drawn(self) -> float:
        """Returns Kish's effective sample size."""
        squares = float((self.weights**2).sum())
        return float(self.weights.sum()) ** 2 / squares if squares else 0.0


@dataclass(frozen=True, eq=False)
class BucketsCopy:
    """An immutable copy of buckets of `step_s` seconds, by number; readable on any thread."""

    step_s: float
    buckets: Mapping[int, Bucket]

    def between(self, start: float, end: float) -> list[Part]:
        """Returns the buckets that start in the period, in order."""
        first, last = int(np.ceil(start / self.step_s)), int(np.ceil(end / self.step_s))
        found = sorted((i, bucket) for i, bucket in self.buckets.items() if first <= i < last)
        return [(i * self.step_s, *bucket.held) for i, bucket in found]


class Buckets:
    """One model's rewards in buckets of `step_s` seconds: the last `window_s` and the first `first_s`."""

    def __init__(self, step_s: float, window_s: float, first_s: float = 0.0) -> None:
        self._step_s = step_s
        self._most, self._first = int(window_s // step_s) + 2, int(first_s // step_s)
        self._buckets: dict[int, Bucket] = {}
        self._start: int | None = None

    def add(self, time: float, rows: np.ndarray, random: np.random.Generator) -> None:
        """Adds rewards and lengths, float64 `[N, 2]`, of about that time."""
        at = int(time // self._step_s)
        if at not in self._buckets:
            self._start = at if self._start is None else self._start
            spared = self._start + self._first
            for old in [i for i in self._buckets if spared <= i <= at - self._most]:
                del self._buckets[old]
            self._buckets[at] = Bucket()
        self._buckets[at].add(rows, random)

    def taken(self) -> BucketsCopy:
        """Returns all buckets."""
        return BucketsCopy(self._step_s, self._buckets.copy())


class RewardHistory:
    """The rewards of every model; noted rewards count when they are folded."""

    def __init__(self, seed: int = 0) -> None:
        self._fine: dict[str, Buckets] = {}
        self._coarse: dict[str, Buckets] = {}
        self._pending: deque[tuple[str, float, list[float], list[int]]] = deque()
        self.num_pending = 0
        """Returns the number of noted rewards that are not folded."""
        self._versions: dict[str, tuple[str, deque[tuple[float, str]]]] = {}
        self._last = 0.0
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
            self._last = max(self._last, time)
        for (name, at), parts in together.items():
            rows = np.empty((sum(len(rewards) for rewards, _ in parts), 2))
            rows[:, 0] = np.fromiter(chain.from_iterable(rewards for rewards, _ in parts), np.float64, len(rows))
            rows[:, 1] = np.fromiter(chain.from_iterable(lengths for _, lengths in parts), np.float64, len(rows))
            rows = rows[np.isfinite(rows[:, 0])]
            if len(rows):
                fine = self._fine.setdefault(name, Buckets(FINE_S, FINE_WINDOW_S))
                coarse = self._coarse.setdefault(name, Buckets(COARSE_S, COARSE_WINDOW_S, FIRST_S))
                for buckets in (fine, coarse):
                    buckets.add(at * FINE_S, rows, self._random)

    def taken(self, name: str, start: float, now: float) -> BucketsCopy:
        """Returns the model's rewards since then, in the shortest buckets that reach back so far."""
        kept = self._fine if start >= now - FINE_WINDOW_S - FINE_S else self._coarse
        return kept[name].taken() if name in kept else BucketsCopy(FINE_S, {})
