"""Rotary embeddings whose frequencies depend on the length of the batch, kept the same as one by one.

transformers picks the frequencies of `longrope` and `dynamic` rotary embeddings by the largest position in the
batch, so that a long neighbour would change the score of a short sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


class LengthClasses:
    """Splits rows into classes that may share a batch: all of them, unless the rotary embedding forbids it."""

    def __init__(self, trunk: Any) -> None:
        config = trunk.config.get_text_config()
        changing = [p for p in _rope_parameters(config) if p.get("rope_type") in ("longrope", "dynamic")]
        # Only longrope has a limit of its own.
        known = [p.get("original_max_position_embeddings") if p["rope_type"] == "longrope" else None for p in changing]
        self._limits = sorted({limit or config.max_position_embeddings for limit in known})
        dynamic = any(p["rope_type"] == "dynamic" for p in changing)
        self._dynamic = [m for m in trunk.modules() if hasattr(m, "max_seq_len_cached")] if dynamic else []

    @property
    def depend_on_length(self) -> bool:
        """Whether what is computed for a token depends on how many tokens follow it."""
        return bool(self._limits)

    def split(self, rows: list[np.ndarray]) -> Iterator[list[int]]:
        """Lists of row numbers; the rows of one list may be computed in one forward."""
        classes: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(rows):
            classes.setdefault(self.of(len(row)), []).append(i)
        yield from classes.values()

    def of(self, length: int) -> tuple[int, int]:
        """The class of a sequence of that length."""
        above = sum(length > limit for limit in self._limits)
        # Beyond the limit a dynamic embedding has other frequencies for every length.
        return above, length if above and self._dynamic else 0

    def prepare(self) -> None:
        """Makes a dynamic embedding forget the longest sequence it has seen; else scores depend on history."""
        for module in self._dynamic:
            _as_made(module)


def _as_made(embedding: Any) -> None:
    """Gives a dynamic embedding the frequencies and the longest length that it was made with."""
    embedding.max_seq_len_cached = embedding.original_max_seq_len
    # One a layer type, where the types differ, which are not there before the first forward.
    for name in [name for name in vars(embedding) if name.endswith("_max_seq_len_cached")]:
        delattr(embedding, name)
    for name in embedding._buffers:
        if name.endswith("inv_freq") and "original" not in name:
            original = getattr(embedding, f"{name.removesuffix('inv_freq')}original_inv_freq")
            # A copy, for a longrope beside it writes over its own in place.
            embedding._buffers[name] = original.clone()


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [p for p in parameters.values() if isinstance(p, dict)]
