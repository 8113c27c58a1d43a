"""The forms of other servers' protocols: JSON without tensors, one address a form."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest, SampleFailed

_LARGEST = float(np.finfo(np.float32).max)


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


def rewarded(reply: ScoreReply, info: ModelInfo) -> list[Score]:
    """The reply's scores, as `scores_of` has them; raises InvalidRequest where the model gives no rewards."""
    if "rewards" not in info.outputs:
        raise InvalidRequest(f"{info.name} gives {', '.join(info.outputs)} and no rewards; name another model")
    return scores_of(reply)


def number(value: float) -> np.float32:
    """The number as every form writes it: float32, in the fewest digits that tell it from its neighbours.

    Raises SampleFailed where float32 has none for it: JSON would have a null in its place.
    """
    if not abs(value) <= _LARGEST:
        raise SampleFailed(f"the score {value} is not a finite number of float32")
    return np.float32(value)


def groups_of(prompts: list[str]) -> np.ndarray:
    """The group of each prompt, int64.

    A prompt has the same in whatever request it comes, since some trainers send every rollout in one of its own.
    """
    return np.array([zlib.crc32(prompt.encode()) for prompt in prompts], np.int64)


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
        raise InvalidRequest(f"the body is {kind_of(body)}; send an object such as {example}")
    return body


def model_of(body: dict[str, Any]) -> str:
    """The model that the body names, empty where it names none; raises InvalidRequest where that is no name."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest(f"model is {kind_of(model)}; send a model's name, or leave it out")
    return model or ""


def kind_of(value: Any) -> str:
    """What JSON calls such a value, with its article."""
    kinds = {list: "a list", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}
    return kinds.get(type(value), "a number")
