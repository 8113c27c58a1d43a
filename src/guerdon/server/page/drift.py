"""Compares distributions of rewards: moments, quantiles, bins, drift, correlations. Pure; weights are repetitions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

NUM_BINS = 40
_INSIDE = (0.001, 0.999)
"""The bins span these quantiles; numbers beyond them count in the outermost bins."""


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations, minimum and maximum."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @property
    def std(self) -> float:
        """Returns the population's standard deviation; NaN if empty."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def __add__(self, other: Moments) -> Moments:
        """Merges both."""
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
    """Returns the moments of finite numbers, float64 `[N]`, N at least 1."""
    mean = float(values.mean())
    return Moments(len(values), mean, float(((values - mean) ** 2).sum()), float(values.min()), float(values.max()))


def total(parts: Iterable[Moments]) -> Moments:
    """Merges all parts."""
    return sum(parts, Moments())


def quantiles(values: np.ndarray, weights: np.ndarray, shares: Iterable[float]) -> np.ndarray:
    """Returns weighted quantiles, one per share; NaN if empty."""
    shares = np.asarray([*shares], np.float64)
    if not len(values):
        return np.full(len(shares), np.nan)
    order = np.argsort(values, kind="stable")
    sorted_weights = weights[order]
    middles = np.cumsum(sorted_weights) - sorted_weights / 2
    return np.interp(shares, middles / sorted_weights.sum(), values[order])


def ks(a: np.ndarray, a_weights: np.ndarray, b: np.ndarray, b_weights: np.ndarray) -> float:
    """Returns the Kolmogorov-Smirnov distance: the largest difference of the distribution functions, from 0 to 1.

    NaN where one of them has nothing.
    """
    if not len(a) or not len(b):
        return math.nan
    grid = np.unique(np.concatenate([a, b]))
    return float(np.abs(_distribution(a, a_weights, grid) - _distribution(b, b_weights, grid)).max())


def shift(window: Moments, reference: Moments) -> float:
    """Returns the shift of the mean in the reference's standard deviations; NaN if there is none."""
    if not window.count or not reference.count or not reference.std > 0:
        return math.nan
    return (window.mean - reference.mean) / reference.std


def edges(*sides: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Returns the bounds of NUM_BINS equal bins, float64 `[NUM_BINS + 1]`, that cover nearly all numbers of both sides.

    A side is numbers and their weights. None decides alone, however many more numbers it has.
    """
    bounds = [quantiles(values, weights, _INSIDE) for values, weights in sides if len(values)] or [np.array([0.0, 1.0])]
    low, high = float(min(low for low, _ in bounds)), float(max(high for _, high in bounds))
    if not high - low > 1e-9 * max(1.0, abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, NUM_BINS + 1)


def histogram(values: np.ndarray, weights: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Returns the weight in each bin, float64 `[E]`; numbers beyond them count in the outermost bins."""
    return np.histogram(np.clip(values, bounds[0], bounds[-1]), bounds, weights=weights)[0]


def pearson(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    """Returns the weighted Pearson correlation; NaN if one side is constant."""
    if len(x) < 2:
        return math.nan
    share = weights / weights.sum()
    x, y = x - (share * x).sum(), y - (share * y).sum()
    scale = math.sqrt((share * x**2).sum() * (share * y**2).sum())
    return float((share * x * y).sum() / scale) if scale > 0 else math.nan


def spearman(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    """Returns the weighted Spearman correlation; NaN if one side is constant."""
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
    """Returns the ranks, float64 `[N]`; ties share their mean rank."""
    _, places = np.unique(values, return_inverse=True)
    sums = np.bincount(places, weights)
    return (np.cumsum(sums) - sums / 2)[places]


def binned(x: np.ndarray, y: np.ndarray, weights: np.ndarray, count: int) -> list[tuple[float, float, float]]:
    """Splits by `x` into at most `count` bins of similar weight; returns means of `x` and `y`, and weight, of each."""
    if not len(x):
        return []
    places = np.minimum((ranks(x, weights) / weights.sum() * count).astype(np.int64), count - 1)
    sums = [np.bincount(places, what, count) for what in (weights, weights * x, weights * y)]
    return [(at / weight, mean / weight, weight) for weight, at, mean in zip(*sums, strict=True) if weight > 0]


def _distribution(values: np.ndarray, weights: np.ndarray, grid: np.ndarray) -> np.ndarray:
    order = np.argsort(values, kind="stable")
    below = np.concatenate([[0.0], np.cumsum(weights[order])])
    return below[np.searchsorted(values[order], grid, "right")] / below[-1]
