"""A layer's attention mask in terms of positions, never as a `[T,T]` table.

Most masks of transformers are composed of a few functions: causal, full, and windows of either kind. A mask composed of
these is a `Reach`, which attention kernels support; all others are evaluated as they are, on a GPU Llama 4's chunks,
too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Reach = tuple[int, int]
"""Positions visible before and after a query's own, -1 for all: `(-1, 0)` is causal, `(-1, -1)` full."""
CAUSAL: Reach = (-1, 0)
FULL: Reach = (-1, -1)


@dataclass(slots=True)
class Pattern:
    """A layer's mask that is neither causal nor full.

    `allows(batch, head, query_position, key_position)` is transformers' mask function; no key further back than
    `window` is ever visible. `reach` is the same as numbers, None if the mask is not a plain window; `chunk` is the
    number of positions in a chunk if a query sees its own chunk up to itself, as in Llama 4.
    """

    allows: Callable[..., Any]
    window: int | None
    reach: Reach | None = None
    chunk: int | None = None


def packed_mask(*, mask_function: Any, local_size: int | None = None, **_: Any) -> Pattern | None:
    """Replaces transformers' masks in its registry: returns a pattern, None for causal and full masks."""
    reach = reach_of(mask_function)
    return None if reach in (CAUSAL, FULL) else Pattern(mask_function, local_size, reach, chunk_of(mask_function))


def reach_of(mask_function: Callable[..., Any]) -> Reach | None:
    """Returns the reach of a mask function; None if it is, or is composed of, an unknown one.

    Functions are recognised by their code and windows read from their closures, because transformers says nowhere else
    which kind of mask it passes, and no sample of positions could prove what a function does for all others.
    `tests/engine/test_patterns.py` fails if a version of transformers makes them otherwise.
    """
    from transformers import masking_utils as known

    if mask_function is known.causal_mask_function:
        return CAUSAL
    if mask_function is known.bidirectional_mask_function:
        return FULL
    code = getattr(mask_function, "__code__", None)
    inside = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    if code is known.and_masks().__code__:
        before = after = -1
        for reach in map(reach_of, inside[0]):
            if reach is None:
                return None
            before, after = _least(before, reach[0]), _least(after, reach[1])
        return before, after
    if code is known.sliding_window_overlay(1).__code__:
        return inside[0] - 1, -1
    if code is known.sliding_window_bidirectional_overlay(1).__code__:
        return inside[0], inside[0]
    return None


def chunk_of(mask_function: Callable[..., Any]) -> int | None:
    """Returns the chunk of a mask that is causal and chunked and nothing else; None for all others."""
    from transformers import masking_utils as known

    if getattr(mask_function, "__code__", None) is not known.and_masks().__code__:
        return None
    (parts,) = inspect.getclosurevars(mask_function).nonlocals.values()
    overlays = [part for part in parts if reach_of(part) != CAUSAL]
    if len(parts) != 2 or len(overlays) != 1:
        return None
    if getattr(overlays[0], "__code__", None) is not known.chunked_overlay(1, torch.zeros(1)).__code__:
        return None
    inside = inspect.getclosurevars(overlays[0]).nonlocals
    padding = inside["left_padding"]
    is_plain = padding.device.type == "cpu" and not padding.any()  # a GPU's would be waited for
    return inside["chunk_size"] if is_plain else None


def cut(pattern: Pattern | None, causal: bool, length: int) -> tuple[Pattern | None, Reach | None]:
    """Returns pattern and reach for sequences of at most `length` tokens; drops a pattern that masks none of them."""
    plain = CAUSAL if causal else FULL
    if pattern is None:
        return None, plain
    if pattern.reach is None:
        # It masks keys further back or in other chunks, and there are none.
        return (None, plain) if causal and pattern.window and pattern.window >= length else (pattern, None)
    before, after = (-1 if most and most >= length - 1 else most for most in pattern.reach)
    return (None, plain) if (before, after) == plain else (pattern, (before, after))


def _least(a: int, b: int) -> int:
    return max(a, b) if -1 in (a, b) else min(a, b)
