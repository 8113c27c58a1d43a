"""History of rewards' parts: components, criteria, attributes; and of a teacher's log-probs. Pure: no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from guerdon.server.page.timed_buckets import FINE_S, TakenBuckets, TimedBuckets

MOST_COMPONENTS = 12
"""More are left out, because a bucket's products grow with their square."""
LEAST_FOR_SHARES = 30
"""With fewer samples a period's shares are unknown."""

_COLLINEAR = 1e-6
"""Relative eigenvalue below which components count as linearly dependent; attributes are float32."""


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
