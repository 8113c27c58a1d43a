"""Bodies of plain JSON: read, written, and what is said of those that are not what was wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from guerdon.errors import InvalidRequest


def parse(body: bytes) -> Any:
    """The body's JSON, whatever it is; raises InvalidRequest where it is none."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise InvalidRequest(f"the body is not valid JSON: {e}") from e


def write(answer: Any) -> bytes:
    """The answer as JSON, numpy's numbers and arrays included."""
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


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


def check_url(query: Mapping[str, str], *known: str) -> None:
    """Raises InvalidRequest where the URL asks for what the form has not: a misspelt name would be lost in silence.

    `model` stands behind every form's URL.
    """
    for name in query:
        if name not in ("model", *known):
            raise InvalidRequest(
                f"the URL has the unknown key {name!r}; this path takes {', '.join(('model', *known))}"
            )


def kind_of(value: Any) -> str:
    """What JSON calls such a value, with its article."""
    kinds = {list: "a list", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}
    return kinds.get(type(value), "a number")
