"""Reads rows of token ids that were padded to one width, as NeMo-Aligner's calls have them."""

from __future__ import annotations

from typing import Any

import numpy as np

from guerdon.errors import InvalidRequest


def read_rows(tokens: Any, lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns padded ids int64 `[B,T]` and the lengths `[B]` of their rows, given as arrays or tensors.

    Raises InvalidRequest if they are no integers, or a length is beyond its row: to cut there would score another text.
    """
    ids, ends = (np.asarray(given.cpu() if hasattr(given, "cpu") else given) for given in (tokens, lengths))
    if ids.ndim != 2 or ends.size != len(ids) or any(array.dtype.kind not in "iu" for array in (ids, ends)):
        shapes = f"{ids.dtype} {list(ids.shape)} and {ends.dtype} {list(ends.shape)}"
        raise InvalidRequest(f"tokens and lengths are {shapes}: give integers, [B,T] and [B]")
    ends = ends.reshape(-1).astype(np.int64)
    if len(wrong := np.flatnonzero((ends < 0) | (ends > ids.shape[1]))):
        row = wrong[0]
        raise InvalidRequest(f"row {row} of the tokens has length {ends[row]}, which is not from 0 to {ids.shape[1]}")
    return ids.astype(np.int64), ends
