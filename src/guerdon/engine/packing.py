"""Packs sequences into batches: one row of tokens without padding, with each shared prefix stored once.

A packed batch is a forest in depth-first order. A segment is a run of tokens that continues its ancestors:
`[prompt, response 1, response 2, ...]` has a prompt once, directly followed by its responses, so that the descendants
of a segment are contiguous. Positions restart at every root and continue from parent to child. Without prefix sharing
every sequence is a root. Everything here is numpy and knows no model or device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from guerdon.core import MIN_SHARED
from guerdon.distributed.shards import cut, sorted_by_prefix

MAX_DEPTH = 32
"""Levels of shared prefixes. Rows that branch more often are computed apart, whatever the budget."""

Span = tuple[int, int]
"""Half-open range of token indices in a packed batch."""


def indices(spans: tuple[Span, ...]) -> np.ndarray:
    """Returns the token indices (int64) in all spans, in order."""
    return np.concatenate([np.arange(a, b) for a, b in spans])


@dataclass(slots=True)
class Segment:
    """Tokens `[start, stop)`, the first at `position`; they continue `ancestors` (root first).

    The segment's descendants are the tokens `[stop, end)`.
    """

    start: int
    stop: int
    position: int
    ancestors: tuple[Span, ...]
    end: int


@dataclass(slots=True)
class PackedBatch:
    """One row of tokens and what attention and heads need to read it.

    `tokens` and `positions` are int64 `[T]`. `rows` are the callers' row numbers in packed order, `spans` where each of
    these rows lies, `last` (int64 `[B]`) the index of each row's last token, `max_length` the longest row's length.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: list[Segment]
    rows: list[int]
    spans: list[tuple[Span, ...]]
    last: np.ndarray
    max_length: int
    cache: dict = field(default_factory=dict)
    """Tensors that attention derives once from the segments and reuses in every layer."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the forward computes."""
        return len(self.tokens)


class _Builder:
    """Packs the rows of one batch in sorted `order`, each of which begins with `shared` tokens of the one before."""

    def __init__(self, rows: list[np.ndarray], order: list[int], shared: list[int]) -> None:
        self.rows, self.order, self.shared = rows, order, shared
        self.tokens: list[np.ndarray] = []
        self.segments: list[Segment] = []
        self.packed: list[int] = []
        self.spans: list[tuple[Span, ...]] = []
        self.size = 0

    def store(self, low: int, high: int, depth: int = 0, ancestors: tuple[Span, ...] = ()) -> None:
        """Stores the rows `low..high` of the order, whose first `depth` tokens are already stored as `ancestors`."""
        if high - low == 1 or len(ancestors) == MAX_DEPTH:
            for number in self.order[low:high]:
                row, spans = self.rows[number], ancestors
                if len(row) > depth:
                    leaf = self.add(row[depth:], depth, ancestors)
                    spans = (*ancestors, (leaf.start, leaf.stop))
                self.packed.append(number)
                self.spans.append(spans)
            return
        common = min(self.shared[low + 1 : high])
        parent = None
        if common - depth >= MIN_SHARED:
            parent = self.add(self.rows[self.order[low]][depth:common], depth, ancestors)
            ancestors, depth = (*ancestors, (parent.start, parent.stop)), common
        start = low
        while start < high:
            stop = start + 1
            while stop < high and self.shared[stop] >= depth + MIN_SHARED:
                stop += 1
            self.store(start, stop, depth, ancestors)
            start = stop
        if parent is not None:
            parent.end = self.size

    def add(self, tokens: np.ndarray, position: int, ancestors: tuple[Span, ...]) -> Segment:
        stop = self.size + len(tokens)
        new = Segment(self.size, stop, position, ancestors, stop)
        self.tokens.append(tokens)
        self.segments.append(new)
        self.size = stop
        return new

    def build(self) -> PackedBatch:
        positions = [np.arange(s.position, s.position + s.stop - s.start) for s in self.segments]
        lengths = [sum(b - a for a, b in spans) for spans in self.spans]
        last = np.array([spans[-1][1] - 1 for spans in self.spans], dtype=np.int64)
        tokens = np.concatenate(self.tokens).astype(np.int64, copy=False)
        return PackedBatch(
            tokens, np.concatenate(positions), self.segments, self.packed, self.spans, last, max(lengths)
        )


def pack(
    rows: list[np.ndarray], *, budget: int, share: bool, limits: list[int | None] | None = None, most: int = 0
) -> Iterator[PackedBatch]:
    """Packs non-empty rows of ids into batches of at most about `budget` computed tokens.

    A row longer than the budget becomes a batch of its own, unless other rows share its prefix. With `share`, rows with
    a common prefix are adjacent and the prefix is stored once; a group that exceeds the budget stores it once in each
    of its batches, and what ends with the group may have up to `most` tokens instead. Tokens that two rows share beyond
    their group's prefix count as shared even if they are too few to be stored once: a batch may exceed the budget by
    less than MIN_SHARED tokens a row. `limits` bounds how many tokens of each row may be shared (its prompt's length),
    None if unknown.
    """
    order, shared = sorted_by_prefix(rows, limits) if share else (list(range(len(rows))), [0] * len(rows))
    for part in cut(rows, order, shared, budget, max(budget, most)):
        # The first row of a batch has nothing before it to share a prefix with.
        builder = _Builder(rows, [order[i] for i in part], [0, *(shared[i] for i in part[1:])])
        builder.store(0, len(part))
        yield builder.build()
