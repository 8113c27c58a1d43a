"""The forms of other servers' protocols: JSON without tensors, one address a form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from guerdon.core import ModelInfo, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest, SampleFailed

_MOST_TEXT = 2000
_LARGEST = float(np.finfo(np.float32).max)


def check_rewards(info: ModelInfo) -> None:
    """Raises InvalidRequest where the model gives no rewards."""
    if "rewards" not in info.outputs:
        raise InvalidRequest(f"{info.name} gives {', '.join(info.outputs)} and no rewards; name another model")


@dataclass(slots=True, eq=False)
class Asked:
    """What one body asks: of which model (empty: the default one), what, and how its answer is written.

    `request` is None where the body has no samples; `answer` then gets a reply without results. It raises the first
    failed sample's error where the form has no place for one. `check` is called before anything is computed; it
    raises InvalidRequest where the model has no answer to what is asked.
    """

    model: str
    request: ScoreRequest | None
    answer: Callable[[ScoreReply, ModelInfo], Any]
    check: Callable[[ModelInfo], None] = check_rewards


@dataclass(frozen=True, slots=True)
class Form:
    """One protocol's way to ask and to be told: `read` takes the parsed body and what stands behind the URL's `?`.

    `told` gives the status and the JSON of the answer to a request that failed.
    """

    read: Callable[[Any, Mapping[str, str]], Asked]
    told: Callable[[GuerdonError], tuple[int, Any]]


def text_of(error: GuerdonError) -> str:
    """The error's text, or the beginning of a long one: some show what was sent."""
    text = str(error)
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + " ..."


def told_plainly(error: GuerdonError) -> tuple[int, Any]:
    """An error as KServe v2's form and the trainers' have it."""
    return error.http, {"error": text_of(error), "kind": type(error).__name__}


def number(value: float) -> np.float32:
    """The number as every form writes it: float32, in the fewest digits that tell it from its neighbours.

    Raises SampleFailed where float32 has none for it: JSON would have a null in its place.
    """
    if not abs(value) <= _LARGEST:
        raise SampleFailed(f"the score {value} is not a finite number of float32")
    return np.float32(value)
