"""How a distribution of rewards looks, and how far it has moved from another. Pure; weights count as repetitions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

NUM_BINS = 40
_INSIDE = (0.001, 0.999)
"""What lies between these quantiles shapes the bins; the few beyond count in the outermost ones."""


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations from it, least and greatest of some numbers."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @property
    def std(self) -> float:
        """Of the population; NaN of nothing."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def __add__(self, other: Moments) -> Moments:
        """Those of both together."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * other.count / count,
            self.squares + other.squares + step**2 * self.count * other.count / count,
            min(self.least, other.least),
            max(self.most, other.most),
        )


def moments(values: np.ndarray) -> Moments:
    """Those of finite numbers, float64 `[N]`, of which there is at least one."""
    mean = float(values.mean())
    return Moments(len(values), mean, float(((values - mean) ** 2).sum()), float(values.min()), float(values.max()))


def total(parts: Iterable[Moments]) -> Moments:
    """Those of all parts together."""
    return sum(parts, Moments())


def quantiles(values: np.ndarray, weights: np.ndarray, shares: Iterable[float]) -> np.ndarray:
    """Weighted quantiles, a number a share, from the middles of the sorted weights; NaN of nothing."""
    shares = np.asarray([*shares], np.float64)
    if not len(values):
        return np.full(len(shares), np.nan)
    order = np.argsort(values, kind="stable")
    sorted_weights = weights[order]
    middles = np.cumsum(sorted_weights) - sorted_weights / 2
    return np.interp(shares, middles / sorted_weights.sum(), values[order])


def ks(a: np.ndarray, a_weights: np.ndarray, b: np.ndarray, b_weights: np.ndarray) -> float:
    """Kolmogorov's and Smirnov's distance: the largest difference of the two distribution functions, from 0 to 1.

    NaN where one of them has nothing.
    """
    if not len(a) or not len(b):
        return math.nan
    grid = np.unique(np.concatenate([a, b]))
    return float(np.abs(_distribution(a, a_weights, grid) - _distribution(b, b_weights, grid)).max())


def shift(window: Moments, reference: Moments) -> float:
    """How many of the reference's standard deviations the mean has moved; NaN where it has none, or is nothing."""
    if not window.count or not reference.count or not reference.std > 0:
        return math.nan
    return (window.mean - reference.mean) / reference.std


def edges(*sides: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The bounds of NUM_BINS even bins, float64 `[NUM_BINS + 1]`, between which nearly all numbers of each side lie.

    A side is numbers and their weights. None decides alone, however many more numbers it has.
    """
    bounds = [quantiles(values, weights, _INSIDE) for values, weights in sides if len(values)] or [np.array([0.0, 1.0])]
    low, high = float(min(low for low, _ in bounds)), float(max(high for _, high in bounds))
    if not high - low > 1e-9 * max(1.0, abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, NUM_BINS + 1)


def histogram(values: np.ndarray, weights: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The weight in each bin, float64 `[E]`; what lies beyond them counts in the outermost ones."""
    return np.histogram(np.clip(values, bounds[0], bounds[-1]), bounds, weights=weights)[0]


def pearson(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    """The weighted linear correlation; NaN where one of them does not vary."""
    if len(x) < 2:
        return math.nan
    share = weights / weights.sum()
    x, y = x - (share * x).sum(), y - (share * y).sum()
    scale = math.sqrt((share * x**2).sum() * (share * y**2).sum())
    return float((share * x * y).sum() / scale) if scale > 0 else math.nan


def spearman(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    """The weighted correlation of the ranks; NaN where one of them does not vary."""
    return pearson(ranks(x, weights), ranks(y, weights), weights) if len(x) > 1 else math.nan


def num_distinct(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    """Returns Kish's effective number of different pairs: 2 for two pairs that both come a thousand times.

    `y` is rounded to a hundredth of its range, because one sequence's reward differs a little from batch to batch.
    """
    if not len(x):
        return 0.0
    levels = np.round((y - y.min()) * 100 / max(np.ptp(y), 1e-300))
    _, places = np.unique(x + 1j * levels, return_inverse=True)
    sums = np.bincount(places, weights)
    return float(sums.sum() ** 2 / (sums**2).sum())


def ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The rank of each number, float64 `[N]`; equal ones share the middle of theirs."""
    _, places = np.unique(values, return_inverse=True)
    sums = np.bincount(places, weights)
    return (np.cumsum(sums) - sums / 2)[places]


def binned(x: np.ndarray, y: np.ndarray, weights: np.ndarray, count: int) -> list[tuple[float, float, float]]:
    """The mean of `x`, the mean of `y` and the weight of at most `count` bins of about the same weight, by `x`."""
    if not len(x):
        return []
    places = np.minimum((ranks(x, weights) / weights.sum() * count).astype(np.int64), count - 1)
    sums = [np.bincount(places, what, count) for what in (weights, weights * x, weights * y)]
    return [(at / weight, mean / weight, weight) for weight, at, mean in zip(*sums, strict=True) if weight > 0]


def _distribution(values: np.ndarray, weights: np.ndarray, grid: np.ndarray) -> np.ndarray:
    order = np.argsort(values, kind="stable")
    below = np.concatenate([[0.0], np.cumsum(weights[order])])
    return below[np.searchsorted(values[order], grid, "right")] / below[-1]
