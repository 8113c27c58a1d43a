"""The rewards by functions that a soak serves: one that is right, and one that has no score for some, and raises."""

from __future__ import annotations

import math
import random

NO_SCORE, RAISES = "(unscorable)", "(raises)"
"""A text with one of these has no score, or has none and makes the function raise."""
RAISE_SHARE = 0.01
"""Of the calls raise for no reason at all."""


def length(texts: list[str]) -> list[float]:
    """How long each text is."""
    return [float(len(text)) for text in texts]


def flaky(texts: list[str]) -> list[float]:
    """The same, where it gives anything."""
    if random.random() < RAISE_SHARE or any(RAISES in text for text in texts):
        raise RuntimeError("the function has had enough")
    return [math.nan if NO_SCORE in text else float(len(text)) for text in texts]
