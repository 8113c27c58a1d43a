"""Functions that score, served as module:function beside a checkpoint; marks in a text make one misbehave."""

import math
import threading
from collections.abc import Iterator
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
        hold.wait(120)
        is_held.clear()
    return [math.nan if "NAN" in text else -len(text) / 100 for text in texts]


def answer(texts: list[str], prompts: Any = None, *, labels: Any = None) -> list[float]:
    """1 where the text without its prompt is the label, else 0."""
    told.extend(zip(prompts, labels, strict=True))
    return [
        float(text.removeprefix(prompt or "") == label)
        for text, prompt, label in zip(texts, prompts, labels, strict=True)
    ]


def words(responses: list[str], labels: list[Any]) -> list[float]:
    """How often the label stands in a response; every sample needs a label and, where it is a text, its prompt."""
    return [float(response.split().count(str(label))) for response, label in zip(responses, labels, strict=True)]


def length(tokens: list[np.ndarray]) -> list[float]:
    """The number of tokens."""
    return [float(len(row)) for row in tokens]


def pairs(tokens: list[np.ndarray], prompts: list[str]) -> list[float]:
    """The number of tokens and of the prompt's characters."""
    return [float(len(row) + len(prompt)) for row, prompt in zip(tokens, prompts, strict=True)]


def average(texts: list[str]) -> Any:
    """One number for the whole batch, as a function wrongly written gives it."""
    return np.mean([len(text) for text in texts])


def single(texts: list[str]) -> list[float]:
    """One number in a list, however many texts there are."""
    return [1.0]


async def deferred(texts: list[str]) -> list[float]:
    """Numbers that have to be awaited."""
    return [1.0] * len(texts)


def generated(texts: list[str]) -> Iterator[float]:
    """Numbers that come one by one."""
    yield from (1.0 for _ in texts)


class _Deferred:
    async def __call__(self, texts: list[str]) -> list[float]:
        return [1.0] * len(texts)


called = _Deferred()


def unknown(texts: list[str], metadata: list[Any]) -> list[float]:
    """Wants something that nobody tells."""
    return [float(len(metadata))] * len(texts)
