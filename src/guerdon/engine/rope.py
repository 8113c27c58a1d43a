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
        kinds = _rope_parameters(trunk.config)
        changing = [p for p in kinds if p.get("rope_type") in ("longrope", "dynamic")]
        own = trunk.config.max_position_embeddings if changing else 0
        self._limits = sorted({p.get("original_max_position_embeddings") or own for p in changing})
        dynamic = any(p.get("rope_type") == "dynamic" for p in kinds)
        self._dynamic = [
            (module, name)
            for module in (trunk.modules() if dynamic else ())
            for name in vars(module)
            if name.endswith("max_seq_len_cached")  # one a layer type, where the types differ
        ]

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
        for module, name in self._dynamic:
            setattr(module, name, 0)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [p for p in parameters.values() if isinstance(p, dict)]
