"""A user's scorer, served as module:function, whose token ids make it misbehave."""

import math
import threading

import numpy as np

NAN, EXITS, RAISES, WAITS = 13, 55, 66, 77

calls: list[int] = []
"""The number of sequences of every call."""
hold = threading.Event()
"""What a sequence with WAITS waits for."""


def score(tokens: list[np.ndarray]) -> list[float]:
    """The sum of each sequence's ids."""
    calls.append(len(tokens))
    if any(EXITS in t for t in tokens):
        raise SystemExit(1)
    if any(RAISES in t for t in tokens):
        raise ValueError("a bug in the user's function")
    if any(WAITS in t for t in tokens):
        hold.wait(120)
    return [math.nan if NAN in t else float(t.sum()) for t in tokens]


def length(texts: list[str]) -> list[float]:
    """Returns the number of characters of each text."""
    return [float(len(text)) for text in texts]
