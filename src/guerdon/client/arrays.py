"""Rows of a caller's numbers, read and padded."""

from __future__ import annotations

from typing import Any

import numpy as np

from guerdon.errors import InvalidRequest


def row(name: str, values: Any, kinds: str, dtype: Any) -> np.ndarray:
    """One row in `dtype`; `kinds` are numpy's letters for what it may hold. Raises InvalidRequest for anything else."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as e:  # a tensor on a device or with a gradient, rows within a row
        raise InvalidRequest(f"{name} cannot be read as numbers: {e}") from e
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise InvalidRequest(f"{name} must be a flat list of {'integers' if kinds == 'iu' else 'numbers'}")
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def ids(name: str, rows: Any) -> list[np.ndarray]:
    """Rows of integers as int64."""
    return [row(f"{name}[{i}]", values, "iu", np.int64) for i, values in enumerate(rows)]


def padded(rows: list[np.ndarray], dtype: Any, fill: int = 0, width: int | None = None) -> np.ndarray:
    """A table `[N, width]` of the rows, `fill` behind each; as wide as the longest where no width is given."""
    table = np.full((len(rows), width or max(map(len, rows))), fill, dtype)
    for out, values in zip(table, rows, strict=True):
        out[: len(values)] = values
    return table
