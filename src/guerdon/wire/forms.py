"""The forms of other servers' protocols: JSON without tensors, one address a form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest


@dataclass(slots=True, eq=False)
class Asked:
    """What one body asks: of which model (empty: the default one), what, and how its answer is written.

    `request` is None where the body has no samples; `answer` then gets a reply without results. It raises the first
    failed sample's error where the form has no place for one.
    """

    model: str
    request: ScoreRequest | None
    answer: Callable[[ScoreReply, ModelInfo], Any]


@dataclass(frozen=True, slots=True)
class Form:
    """One protocol's way to ask and to be told: `read` takes the parsed body and what stands behind the URL's `?`.

    `told` gives the status and the JSON of the answer to a request that failed.
    """

    read: Callable[[Any, Mapping[str, str]], Asked]
    told: Callable[[GuerdonError], tuple[int, Any]]


def told_plainly(error: GuerdonError) -> tuple[int, Any]:
    """An error as KServe v2's form and the trainers' have it."""
    return error.http, {"error": str(error), "kind": type(error).__name__}


def scores_of(reply: ScoreReply) -> list[Score]:
    """The reply's scores; raises the first failed row's error, its text prefixed with the row."""
    scores = []
    for i, result in enumerate(reply.results):
        if isinstance(result, GuerdonError):
            result.args = (f"row {i}: {result}",)
            raise result
        scores.append(result)
    return scores


def number(value: float) -> np.float32:
    """The number as every form writes it: float32, in the fewest digits that tell it from its neighbours."""
    return np.float32(value)


def write(answer: Any) -> bytes:
    """The answer as JSON, numpy's numbers and arrays included."""
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def parse(body: bytes) -> Any:
    """The body's JSON, whatever it is; raises InvalidRequest where it is none."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise InvalidRequest(f"the body is not valid JSON: {e}") from e


def object_of(body: Any, example: str) -> dict[str, Any]:
    """The body where it is an object; raises InvalidRequest, which shows the `example`."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a JSON {_kind(body)}; send an object such as {example}")
    return body


def _kind(value: Any) -> str:
    return {list: "list", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
