"""The reward functions that a soak serves: a correct one, and one that fails some samples and raises."""

from __future__ import annotations

import math
import random

NO_SCORE, RAISES = "(unscorable)", "(raises)"
"""A text with one of these has no score, or has none and makes the function raise."""
RAISE_SHARE = 0.01
"""The share of calls that raise for no reason."""


def length(texts: list[str]) -> list[float]:
    """Returns the length of each text."""
    return [float(len(text)) for text in texts]


def flaky(texts: list[str]) -> list[float]:
    """Does the same, but fails some samples and raises for some requests."""
    if random.random() < RAISE_SHARE or any(RAISES in text for text in texts):
        raise RuntimeError("the function has had enough")
    return [math.nan if NO_SCORE in text else float(len(text)) for text in texts]
