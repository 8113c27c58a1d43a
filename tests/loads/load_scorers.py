"""Users' scorers that a load is put on."""

import threading
import time

import numpy as np

SLOW_S = 0.25
go = threading.Event()


def lengths(tokens: list[np.ndarray]) -> list[float]:
    """Takes token ids alone."""
    return [float(len(row)) for row in tokens]


def slow(tokens: list[np.ndarray]) -> list[float]:
    """Takes its time for every batch."""
    time.sleep(SLOW_S)
    return [0.0] * len(tokens)


def held(tokens: list[np.ndarray]) -> list[float]:
    """Takes its time until it may go."""
    go.wait(120)
    return [0.0] * len(tokens)
