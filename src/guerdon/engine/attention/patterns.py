"""What a layer's mask says about which keys a query sees, as positions and not as a table of `[T,T]`.

Most masks of transformers are made of a few functions: causal, full, and windows of either kind. A mask that is made of
these alone is a `Span`, which attention kernels know; all others, such as Llama 4's chunks, are evaluated as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]
"""How many positions before and after its own a query sees, -1 for all: `(-1, 0)` is causal, `(-1, -1)` full."""
CAUSAL: Span = (-1, 0)
FULL: Span = (-1, -1)


@dataclass(slots=True)
class Pattern:
    """What a layer's mask says beyond causal or full.

    `allows(batch, head, query_position, key_position)` is transformers' mask function; no key further back than
    `window` is ever seen. `span` is the same as numbers, None where the mask is no plain window.
    """

    allows: Callable[..., Any]
    window: int | None
    span: Span | None = None


def packed_mask(*, mask_function: Any, local_size: int | None = None, **_: Any) -> Pattern | None:
    """The entry for transformers' mask registry: never a `[T, T]` mask, but None where causal or full says it all."""
    span = span_of(mask_function)
    return None if span in (CAUSAL, FULL) else Pattern(mask_function, local_size, span)


def span_of(mask_function: Callable[..., Any]) -> Span | None:
    """The span that the mask function stands for; None where it is, or is made of, one that is not known here.

    A function is known by its code, and its window is the number in its closure: no sample of positions could prove
    what it does on all others.
    """
    from transformers import masking_utils as known

    if mask_function is known.causal_mask_function:
        return CAUSAL
    if mask_function is known.bidirectional_mask_function:
        return FULL
    code = getattr(mask_function, "__code__", None)
    inside = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    if code is known.and_masks().__code__:
        return _intersection(span_of(function) for function in inside[0])
    if code is known.sliding_window_overlay(1).__code__:
        return inside[0] - 1, -1
    if code is known.sliding_window_bidirectional_overlay(1).__code__:
        return inside[0], inside[0]
    return None


def cut(pattern: Pattern | None, causal: bool, length: int) -> tuple[Pattern | None, Span | None]:
    """The pattern and its span for sequences of at most `length` tokens: no pattern where it hides nothing of them."""
    plain = CAUSAL if causal else FULL
    if pattern is None:
        return None, plain
    if pattern.span is None:
        # It hides what is further back, or in another chunk, of which there is none.
        return (None, plain) if causal and pattern.window and pattern.window >= length else (pattern, None)
    before, after = (-1 if most and most >= length - 1 else most for most in pattern.span)
    return (None, plain) if (before, after) == plain else (pattern, (before, after))


def _intersection(spans: Iterable[Span | None]) -> Span | None:
    before = after = -1
    for span in spans:
        if span is None:
            return None
        before, after = _least(before, span[0]), _least(after, span[1])
    return before, after


def _least(a: int, b: int) -> int:
    return max(a, b) if -1 in (a, b) else min(a, b)
