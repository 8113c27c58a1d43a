"""Functions that score, served as module:function beside a checkpoint; marks in a text make one misbehave."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

told: list[tuple[str | None, Any]] = []
"""The prompt and the label of every sample that `answer` was asked for."""
hold = threading.Event()
"""What a text with "WAIT" waits for."""
is_held = threading.Event()
"""Set while one waits."""


def brevity(texts: list[str]) -> list[float]:
    """Minus the length in hundreds of characters; no number for "NAN"."""
    if any("WAIT" in text for text in texts):
        is_held.set()
        hold.wait(10)
        is_held.clear()
    return [math.nan if "NAN" in text else -len(text) / 100 for text in texts]


def answer(texts: list[str], prompts: list[str | None], *, labels: list[Any]) -> list[float]:
    """1 where the text without its prompt is the label, else 0."""
    told.extend(zip(prompts, labels, strict=True))
    return [
        float(text.removeprefix(prompt or "") == label)
        for text, prompt, label in zip(texts, prompts, labels, strict=True)
    ]


def words(responses: list[str], labels: list[Any]) -> list[float]:
    """How often the label stands in a response, which is told without its prompt."""
    return [float(response.split().count(str(label))) for response, label in zip(responses, labels, strict=True)]


def length(tokens: list[np.ndarray]) -> list[float]:
    """The number of tokens."""
    return [float(len(row)) for row in tokens]


def unknown(texts: list[str], metadata: list[Any]) -> list[float]:
    """Wants something that nobody tells."""
    return [float(len(metadata))] * len(texts)
