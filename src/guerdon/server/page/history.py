"""Numbers over time: buckets for an hour and wider ones for a day; rewards and their parts, kept in such buckets.

Pure: no clock.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from guerdon.server.page.drift import Moments, moments

FINE_S, FINE_WINDOW_S = 10.0, 3600.0
COARSE_S, COARSE_WINDOW_S = 60.0, 86_400.0

SAMPLE = 256
"""Rewards kept per bucket, with the lengths of their samples."""

FIRST_S = 3600.0
"""The start is kept for good, as a reference for drift."""

_MOST_PENDING = 65_536
_MOST_VERSIONS = 50

MOST_COMPONENTS = 12
"""More are left out, because a bucket's products grow with their square."""
LEAST_FOR_SHARES = 30
"""With fewer samples a period's shares are unknown."""

_COLLINEAR = 1e-6
"""Relative eigenvalue below which components count as linearly dependent; attributes are float32."""


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


# --- rewards -------------------------------------------------------------------------------------------------------


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


# --- components, criteria, attributes, and a teacher's log-probs ---------------------------------------------------


@dataclass(frozen=True, eq=False)
class CoMoments:
    """Count, means `[K+1]` and sums of products of deviations `[K+1,K+1]` of K components and the reward, float64."""

    count: int
    mean: np.ndarray
    products: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> CoMoments:
        """Returns the moments of samples, float64 `[N,K+1]` and finite, N at least 1; the last column is the reward."""
        mean = rows.mean(axis=0)
        apart = rows - mean
        return cls(len(rows), mean, apart.T @ apart)

    def __add__(self, other: CoMoments) -> CoMoments:
        """Merges both."""
        count, step = self.count + other.count, other.mean - self.mean
        return CoMoments(
            count,
            self.mean + step * (other.count / count),
            self.products + other.products + np.outer(step, step) * (self.count * other.count / count),
        )

    @property
    def std(self) -> np.ndarray:
        """Returns the population's standard deviations, `[K+1]`."""
        return np.sqrt(np.diag(self.products) / self.count)

    def shares(self) -> np.ndarray:
        """Returns each component's share of the reward's variance, `[K]`; NaN for few samples or a constant reward.

        The share is the component's coefficient in the linear regression of the reward on all components, times its
        covariance with the reward, over the reward's variance. Shares of a weighted sum add up to 1; one that works
        against the sum is negative. The effect of a clip or changing normalisation belongs to no component.
        """
        spread = np.sqrt(np.diag(self.products))
        if self.count < max(LEAST_FOR_SHARES, 2 * len(spread)) or not spread[-1] > 1e-9 * max(1.0, abs(self.mean[-1])):
            return np.full(len(spread) - 1, np.nan)
        scale = np.where(spread > 0, spread, 1.0)
        correlations = self.products / np.outer(scale, scale)
        inner, outer = correlations[:-1, :-1], correlations[:-1, -1]
        shares: np.ndarray = np.linalg.lstsq(inner, outer, rcond=_COLLINEAR)[0] * outer
        return shares


_Noted = tuple[str, float, tuple[str, ...], list[np.ndarray], list[float] | None]


class ComponentHistory:
    """The components of every model; noted ones count when they are folded."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[str, ...], TimedBuckets[CoMoments]]] = {}
        self._pending: deque[_Noted] = deque()

    def note(
        self, name: str, time: float, names: tuple[str, ...], rows: list[np.ndarray], rewards: list[float]
    ) -> None:
        """Queues a request's components, float32 `[K]` for each sample, and rewards; cheap, on the request's path."""
        self._pending.append((name, time, names, rows, rewards))

    def note_means(self, name: str, time: float, what: str, rows: list[np.ndarray]) -> None:
        """Queues `what` of a teacher's samples' tokens, float32 `[n]` each; n may be 0."""
        if rows:
            self._pending.append((name, time, (what,), rows, None))

    def fold(self, most: int | None = None) -> None:
        """Folds queued samples into the buckets, about `most` at once."""
        num_folded = 0
        together: dict[tuple[str, tuple[str, ...], int], list[np.ndarray]] = {}
        while self._pending and (most is None or num_folded < most):
            name, time, names, rows, rewards = self._pending.popleft()
            num_folded += len(rows)
            if rewards is None:
                table = _means(rows)
            else:
                shown = np.stack(rows)[:, :MOST_COMPONENTS]
                table = np.column_stack([shown.astype(np.float64), np.array(rewards, np.float64)])
            together.setdefault((name, names, int(time // FINE_S)), []).append(table)
        for (name, names, at), tables in together.items():
            table = np.concatenate(tables)
            table = table[np.isfinite(table).all(axis=1)]
            if len(table):
                if name not in self._kept or self._kept[name][0] != names:  # another checkpoint was loaded
                    self._kept[name] = (names, TimedBuckets())
                self._kept[name][1].add(at * FINE_S, CoMoments.of(table))

    def taken(self, name: str, start: float, now: float) -> TakenComponents | None:
        """Returns the model's components since then; None if none were folded."""
        if name not in self._kept:
            return None
        names, kept = self._kept[name]
        return TakenComponents(names, kept.taken(start, now))


@dataclass(frozen=True, eq=False)
class TakenComponents:
    """A copy of a model's components, readable on any thread."""

    names: tuple[str, ...]
    sums: TakenBuckets[CoMoments]

    def tell(self, start: float, step_s: float, count: int) -> dict[str, Any]:
        """Returns each component's mean, spread and share of the variance in each of `count` periods, and in all."""
        columns = self.sums.columns(start, step_s, count)
        shown = self.names[:MOST_COMPONENTS]
        told = [_tell(column, len(shown)) for column in columns]
        some = [column for column in columns if column is not None]
        whole = sum(some[1:], some[0]) if some else None
        return {
            "from": start,
            "step_s": step_s,
            "names": list(shown),
            "num_left_out": len(self.names) - len(shown),
            "count": np.array([column.count if column else 0 for column in columns]),
            **{key: np.array([one[key] for one in told]).T.copy() for key in ("mean", "std", "share")},
            "window": _tell(whole, len(shown)) | {"count": whole.count if whole else 0},
        }


def _tell(moments: CoMoments | None, num_components: int) -> dict[str, Any]:
    if moments is None:
        return dict.fromkeys(("mean", "std", "share"), np.full(num_components, np.nan))
    return {"mean": moments.mean[:-1], "std": moments.std[:-1], "share": moments.shares()}


def _means(rows: list[np.ndarray]) -> np.ndarray:
    """Returns each row's mean twice, as component and as reward, float64 `[N,2]`, without empty rows."""
    filled = [row for row in rows if len(row)]
    if not filled:
        return np.empty((0, 2))
    lengths = np.array([len(row) for row in filled])
    means = np.add.reduceat(np.concatenate(filled).astype(np.float64), np.cumsum(lengths) - lengths) / lengths
    return np.column_stack([means, means])
