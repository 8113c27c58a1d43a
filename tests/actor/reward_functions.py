"""Reward functions of a user's own, served as module:function by the tests of the actors."""

import math
import time

import numpy as np

FAILS = 13
"""A sequence that ends with this id has no finite reward."""
FAVOURITE = 42


def favourite(tokens: list[np.ndarray]) -> list[float]:
    """The share of FAVOURITE among the last eight tokens; NaN for a sequence that ends with FAILS."""
    return [math.nan if row[-1] == FAILS else float((row[-8:] == FAVOURITE).mean()) for row in tokens]


def nothing(tokens: list[np.ndarray]) -> list[float]:
    """Returns no reward for any sequence."""
    return [math.nan for _ in tokens]


def length(texts: list[str]) -> list[float]:
    """The number of characters."""
    return [float(len(text)) for text in texts]


def even(tokens: list[np.ndarray]) -> list[float]:
    """The share of even ids among the last eight tokens."""
    return [float((row[-8:] % 2 == 0).mean()) for row in tokens]


def flaky(tokens: list[np.ndarray]) -> list[float]:
    """The same; NaN for a sequence whose last id is a multiple of eight."""
    return [math.nan if row[-1] % 8 == 0 else reward for row, reward in zip(tokens, even(tokens), strict=True)]


moments: list[float] = []
"""When `noting` was called."""


def noting(tokens: list[np.ndarray]) -> list[float]:
    """The same as `even`, and notes when it was asked."""
    moments.append(time.monotonic())
    return even(tokens)
