"""Rewards over time: moments of all of them, and an even sample of each, of every few seconds. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from guerdon.server.dashboard.drift import Moments, moments

SAMPLE = 256
"""How many rewards are kept of a bucket, with their samples' lengths."""

FINE_S, FINE_WINDOW_S = 10.0, 3600.0
COARSE_S, COARSE_WINDOW_S = 60.0, 86_400.0
FIRST_S = 3600.0
"""So much of the beginning is kept however long ago it was: drift is told from there."""

_MOST_PENDING = 65_536


Part = tuple[float, Moments, np.ndarray]
"""The beginning of a bucket, the moments of all its rewards, and those that are kept, float32 `[K, 2]` with lengths."""


class Bucket:
    """The rewards of one stretch of time: all are in the `moments`, at most SAMPLE of them in `kept`, evenly drawn.

    Neither is ever changed, but replaced: what was taken of them stays as it was.
    """

    __slots__ = ("kept", "moments")

    def __init__(self) -> None:
        self.moments = Moments()
        self.kept = np.empty((0, 2), np.float32)

    def add(self, rows: np.ndarray, random: np.random.Generator) -> None:
        """Adds rewards and lengths, float64 `[N, 2]` of at least one."""
        seen = self.moments.count
        self.moments += moments(rows[:, 0])
        room = SAMPLE - len(self.kept)
        if room:
            self.kept = np.concatenate([self.kept, rows[:room].astype(np.float32)])
        rest = rows[room:]
        if len(rest):  # each takes a random place of all that came so far, if that is one of those kept
            first = seen + room
            places = random.integers(0, np.arange(first + 1, first + len(rest) + 1))
            stays = places < SAMPLE
            self.kept = self.kept.copy()
            self.kept[places[stays]] = rest[stays]


@dataclass(frozen=True, eq=False)
class Pool:
    """What is known of the rewards of some time: N drawn ones, each standing for `weights` of them, and the moments.

    `rewards`, `tokens`, `weights` and `times` (the beginning of the bucket) are float64 `[N]`; `parts` are the buckets'
    times and moments.
    """

    rewards: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    times: np.ndarray
    parts: list[tuple[float, Moments]]

    @classmethod
    def of(cls, parts: list[Part], most: int = 20_000) -> Pool:
        """All of the buckets together, of each fewer where they have more than about `most` rewards together."""
        each = max(1, -(-sum(len(kept) for _, _, kept in parts) // most))
        rows = [kept[::each] for _, _, kept in parts]
        numbers = np.array([len(part) for part in rows], np.int64)
        drawn = np.concatenate([np.empty((0, 2), np.float32), *rows]).astype(np.float64)
        counts = np.array([moments.count for _, moments, _ in parts], np.float64)
        times = np.array([time for time, _, _ in parts], np.float64)
        weights = np.repeat(counts / np.maximum(numbers, 1), numbers)
        told = [(time, moments) for time, moments, _ in parts]
        return cls(drawn[:, 0], drawn[:, 1], weights, np.repeat(times, numbers), told)


class Buckets:
    """One model's rewards in stretches of `step_s` seconds, those of the last `window_s` and the first `first_s`."""

    def __init__(self, step_s: float, window_s: float, first_s: float = 0.0) -> None:
        self._step_s = step_s
        self._most, self._first = int(window_s // step_s) + 2, int(first_s // step_s)
        self._buckets: dict[int, Bucket] = {}
        self._start: int | None = None

    def add(self, time: float, rows: np.ndarray, random: np.random.Generator) -> None:
        """Adds rewards and lengths of about that time, float64 `[N, 2]`."""
        at = int(time // self._step_s)
        if at not in self._buckets:
            self._start = at if self._start is None else self._start
            spared = self._start + self._first
            for old in [i for i in self._buckets if spared <= i <= at - self._most]:
                del self._buckets[old]
            self._buckets[at] = Bucket()
        self._buckets[at].add(rows, random)

    def between(self, start: float, end: float) -> list[Part]:
        """The buckets that begin in that time, in order."""
        first, last = int(np.ceil(start / self._step_s)), int(np.ceil(end / self._step_s))
        found = sorted((i, bucket) for i, bucket in self._buckets.items() if first <= i < last)
        return [(i * self._step_s, bucket.moments, bucket.kept) for i, bucket in found]


class Scored:
    """The rewards of every model; what is noted counts once it is folded."""

    def __init__(self, seed: int = 0) -> None:
        self._fine: dict[str, Buckets] = {}
        self._coarse: dict[str, Buckets] = {}
        self._pending: list[tuple[str, float, list[float], list[int]]] = []
        self._num_pending = 0
        self._last = 0.0
        self._random = np.random.default_rng(seed)

    def note(self, name: str, time: float, rewards: list[float], lengths: list[int]) -> None:
        """Takes the rewards of one request and its samples' lengths in tokens; this is all that a request waits for."""
        self._pending.append((name, time, rewards, lengths))
        self._num_pending += len(rewards)
        if self._num_pending > _MOST_PENDING:
            self.fold()

    def fold(self) -> None:
        """Counts what was noted since the last time."""
        pending, self._pending, self._num_pending = self._pending, [], 0
        together: dict[tuple[str, int], list[tuple[list[float], list[int]]]] = {}
        for name, time, rewards, lengths in pending:
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

    def parts(self, name: str, start: float, end: float, now: float) -> list[Part]:
        """What is known of the model's rewards of that time."""
        kept = self._fine if start >= now - FINE_WINDOW_S - FINE_S else self._coarse
        return kept[name].between(start, end) if name in kept else []
