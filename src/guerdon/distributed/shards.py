"""Splits rows over the ranks into parts of about equal cost, and cuts batches; a shared prefix counts once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from guerdon.core import MIN_SHARED, common_prefix


@dataclass(frozen=True, slots=True)
class _Row:
    """A row's number, its cost alone, and its cost behind its predecessor, which may share a prefix."""

    number: int
    alone: int
    behind: int


@dataclass(slots=True)
class _Part:
    numbers: list[int]
    cost: int = 0


def sorted_by_prefix(rows: list[np.ndarray], limits: list[int | None] | None = None) -> tuple[list[int], list[int]]:
    """Returns row numbers in lexicographic order, and how many leading tokens each shares with the one before it.

    Big-endian bytes compare like the ids that they encode, so sorting bytes sorts rows. `limits` bound what is shared.
    """
    keys = [row.astype(">u4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = [0] * len(rows)
    for i in range(1, len(order)):
        a, b = order[i - 1], order[i]
        shared[i] = common_prefix(rows[a], rows[b])
        if limits is not None:
            shared[i] = min([shared[i], *(x for x in (limits[a], limits[b]) if x is not None)])
    return order, shared


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


def shards(rows: list[np.ndarray], count: int, lengths: list[int] | None = None) -> list[list[int]]:
    """Returns the rows' numbers, ascending, in `count` parts, which may be empty; deterministic.

    Rows with a shared prefix stay together unless that makes another part slower. `lengths` are the rows' costs if
    these are not their tokens, as for text; then nothing is shared.
    """
    if count == 1:
        return [list(range(len(rows)))]
    if lengths is None:
        sizes = zip(*sorted_by_prefix(rows), strict=True)
        ordered = [_Row(i, len(rows[i]), len(rows[i]) - (n if n >= MIN_SHARED else 0)) for i, n in sizes]
    else:
        ordered = [_Row(i, n, n) for i, n in enumerate(lengths)]
    # Many runs spread evenly; few long ones are better cut.
    parts = min(_spread(ordered, count), _cut(ordered, count), key=lambda parts: max(part.cost for part in parts))
    return [sorted(part.numbers) for part in parts]


def _spread(ordered: list[_Row], count: int) -> list[_Part]:
    """Keeps rows with a shared prefix in one run, up to a fair share each, and assigns the costliest runs first."""
    fair = -(-sum(row.behind for row in ordered) // count)
    runs: list[_Part] = []
    for row in ordered:
        if row.behind < row.alone and runs and runs[-1].cost + row.behind <= fair:
            runs[-1].numbers.append(row.number)
            runs[-1].cost += row.behind
        else:
            runs.append(_Part([row.number], row.alone))
    parts = [_Part([]) for _ in range(count)]
    for run in sorted(runs, key=lambda run: (-run.cost, run.numbers[0])):
        least = min(parts, key=lambda part: part.cost)
        least.numbers += run.numbers
        least.cost += run.cost
    return parts


def _cut(ordered: list[_Row], count: int) -> list[_Part]:
    """Cuts the ordered rows so that the costliest part costs least."""
    low, high = 0, sum(row.alone for row in ordered)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(ordered, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    parts = _filled(ordered, high)
    return parts + [_Part([]) for _ in range(count - len(parts))]


def _filled(ordered: list[_Row], most: int) -> list[_Part]:
    """Fills parts up to `most` one after the other; a single row may cost more."""
    parts: list[_Part] = []
    for row in ordered:
        if parts and parts[-1].cost + row.behind <= most:
            parts[-1].numbers.append(row.number)
            parts[-1].cost += row.behind
        else:
            parts.append(_Part([row.number], row.alone))
    return parts
