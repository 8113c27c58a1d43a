"""Writes labels and messages as JSON, whichever types Python, numpy, pandas or torch gave them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from guerdon.errors import InvalidRequest

_MISSING = ("NAType", "NaTType")
"""pandas' classes of missing values, by name because pandas may not be installed."""

_TO_PYTHON = ("tolist", "to_list", "as_py")
"""Methods by which torch, pandas, polars and Arrow return their values in Python's types."""

_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def write(value: Any, where: str) -> bytes:
    """Returns the value as JSON; raises InvalidRequest that names the part at fault, which begins with `where`.

    Tuples and arrays become lists, and a missing value, such as NaN or pandas' NA, becomes null. Inside lists and dicts
    NaN is refused, because a function could not distinguish it from None.
    """
    with contextlib.suppress(TypeError):  # of classes, integers of more than 64 bits, and text that is not valid UTF-8
        if b"null" not in (text := orjson.dumps(value, option=_STRICT)):  # which orjson writes for NaN as well
            return text
    try:
        plain = _to_plain(value, where, is_inside=False)
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as e:
        raise _refuse(where, f"character {e.start} of its JSON is not valid UTF-8") from e
    except RecursionError as e:
        raise _refuse(where, "it is nested too deep") from e


def _to_plain(value: Any, where: str, is_inside: bool = True) -> Any:
    """Returns the value made of JSON's types alone."""
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float | np.floating):
        if math.isfinite(value):
            return float(str(value))  # in the fewest digits: float(np.float32(0.1)) is 0.10000000149011612
        if math.isnan(value) and not is_inside:
            return None
        raise _refuse(where, f"it is {value}")
    if isinstance(value, np.generic) and value.dtype.kind in "biu":
        return value.item()
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise _refuse(where, f"its key {wrong[0]!r} is no string")
        return {str.__str__(key): _to_plain(inner, f"{where}[{str(key)!r}]") for key, inner in value.items()}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        return [_to_plain(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    kind = type(value)
    if kind.__name__ in _MISSING and not is_inside:
        return None
    if isinstance(value, np.ndarray):
        return _to_plain(value[()], where, is_inside)
    for method in _TO_PYTHON:
        if hasattr(value, method) and not isinstance(value, np.generic):
            return _to_plain(getattr(value, method)(), where, is_inside)
    raise _refuse(where, f"it is of {kind.__module__}.{kind.__name__}; send a string or a number")


def _refuse(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where} cannot be written as JSON: {why}")
