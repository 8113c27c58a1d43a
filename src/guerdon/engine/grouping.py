"""Which rows of tokens share a batch: cuts their order where the budget ends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from guerdon.core import MIN_SHARED


def cut(rows: list[np.ndarray], order: list[int], shared: list[int], budget: int, most: int) -> Iterator[list[int]]:
    """Yields runs of indices into `order`, each within the budget; cuts a group only if it must.

    A shared prefix counts at most half the budget, so that a long prompt keeps its responses together. A run that ends
    with a whole group, or its rest, may have up to `most` tokens: another one would compute the prefix again.
    """

    def cost(i: int, first: int) -> int:
        length = len(rows[order[i]])
        if i > first:
            return length - (shared[i] if shared[i] >= MIN_SHARED else 0)
        return length - (max(0, shared[i + 1] - budget // 2) if i + 1 < len(order) else 0)

    part: list[int] = []
    size = start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and shared[stop] >= MIN_SHARED:
            stop += 1
        if part and size + sum(cost(i, start) for i in range(start, stop)) > budget:
            yield part
            part, size = [], 0
        first, takes_rest = start, False
        for i in range(start, stop):
            if part and not takes_rest and size + cost(i, first) > budget:
                takes_rest = size + sum(cost(j, first) for j in range(i, stop)) <= most
                if not takes_rest:
                    yield part
                    part, size, first = [], 0, i
            part.append(i)
            size += cost(i, first)
        start = stop
    if part:
        yield part
