"""Bodies of plain JSON: read, written, and what is said of those that are not what was wanted."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from guerdon.errors import InvalidRequest

MAX_VALUES = 1 << 24
"""More values than the JSON of one body may have: they take a gigabyte, and seconds in which nothing else is done."""

MAX_DEPTH = 64
"""Deeper than what a client may send to be kept: Python stops at about a thousand, in whatever is done with it."""

_VALUE_BYTES = 64
_MANY_VALUES = 1 << 22
_COUNTED_BYTES = 1 << 18
_CONTAINERS = frozenset((list, dict))
_SHOWN = reprlib.Repr()
_SHOWN.maxlist = _SHOWN.maxlevel = 16
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 100


def parse(body: bytes | memoryview, what: str = "the body") -> Any:
    """The JSON, whatever it is; raises InvalidRequest where it is none, or has more values than one body may have."""
    check_values([body], what)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise InvalidRequest(f"{what} is not valid JSON: {e}") from e


def check_values(texts: Sequence[bytes | memoryview], what: str) -> None:
    """Raises InvalidRequest where the JSON texts have more values together than one body may have."""
    # What is shorter cannot have so many; in most of what is longer, the marks are few.
    is_long = sum(map(len, texts)) > MAX_VALUES // 2
    if is_long and sum(map(_num_marks, texts)) > MAX_VALUES and sum(map(num_values, texts)) > MAX_VALUES:
        raise InvalidRequest(
            f"{what} has more than {MAX_VALUES:,} values as JSON; send tensors in binary form, or fewer samples"
        )


def check_depth(value: Any, what: str) -> None:
    """Raises InvalidRequest where lists and objects stand in each other so deep that others could not handle it."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer) if type(inner) in _CONTAINERS]
        if not level:
            return
    raise InvalidRequest(f"{what} is nested deeper than {MAX_DEPTH} lists and objects; send it flatter")


def num_values(text: bytes | memoryview) -> int:
    """How many values there are at most in the JSON, an object counted as four, and a list as two: they take more.

    What stands in its strings, which may be JSON again, is not counted.
    """
    count, is_inside, escape = 0, 0, b""
    for start in range(0, len(text), _COUNTED_BYTES):
        block = (escape + bytes(text[start : start + _COUNTED_BYTES])).replace(b"\\\\", b"").replace(b'\\"', b"")
        escape = b"\\" if block.endswith(b"\\") else b""  # of what the next block begins with
        found = np.frombuffer(block, np.uint8)
        inside = (np.cumsum(found == ord('"'), dtype=np.uint8) + np.uint8(is_inside)) & 1
        count += _num_marks(found[inside == 0])
        is_inside = int(inside[-1]) if len(inside) else is_inside
    return count


def _num_marks(text: bytes | memoryview | np.ndarray) -> int:
    """What `num_values` counts, in the strings as well: soon done."""
    found = np.frombuffer(text, np.uint8)
    return sum(weight * int(np.count_nonzero(found == ord(mark))) for mark, weight in ((",", 1), ("[", 2), ("{", 4)))


def memory(body: bytes | memoryview) -> int:
    """The bytes that a body takes at most about while it is read as JSON."""
    count = _num_marks(body)
    return len(body) + _VALUE_BYTES * (count if count <= _MANY_VALUES else num_values(body))


def _inside(value: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def shown(value: Any) -> str:
    """The value for an error's text: what is long or deep is not written out."""
    return _SHOWN.repr(value)


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
