"""Rollouts that branch, as trees of segments: their paths, and each segment's place in a path.

A segment is a run of tokens that follows its parent's. A path leads from a root to a leaf; models compute paths.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from guerdon.critic_core import TrainRequest
from guerdon.errors import InvalidRequest

MAX_PATH_TOKENS = 1 << 24
"""Most tokens of all paths of a request, each padded to the longest; they take 20 bytes each while it is done."""

NO_TREE_REWARDS = (
    "rewards and parents are both given, but GAE has no next value where a tree branches: estimate each path's returns "
    "and prev_values, and send those"
)


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """The trees of one request, whose N segments have a number each, a parent's below its children's.

    All are int64. Of each segment, `[N]`: its `parents`, -1 if it is a root; its `lengths` in tokens; its `starts`, the
    number of its ancestors' tokens; its `homes`, the number of the first path through it, by which it is computed.
    Of each path, `[P]`: its last segment in `leaves`, its tree's root in `roots`. Paths are in the order of their
    roots, then of their leaves.
    """

    parents: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    homes: np.ndarray
    leaves: np.ndarray
    roots: np.ndarray

    @classmethod
    def of(cls, parents: np.ndarray, lengths: np.ndarray, width: int) -> Forest:
        """Returns the forest of segments in rows of `width`; raises InvalidRequest naming the row at fault."""
        numbers = np.arange(len(parents))
        if (wrong := np.flatnonzero((parents < -1) | (parents >= numbers))).size:
            i = int(wrong[0])
            earlier = f"the number of an earlier row, 0 to {i - 1}, or " if i else ""
            raise InvalidRequest(f"parents is {parents[i]} in row {i}: give {earlier}-1, which makes it a root")
        if (wrong := np.flatnonzero((lengths < 1) | (lengths > width))).size:
            i = int(wrong[0])
            raise InvalidRequest(
                f"sequence_lengths is {lengths[i]} in row {i}: a segment has at least one token, and at most {width}, "
                "the width of tokens"
            )
        starts, roots, is_leaf = np.zeros_like(parents), numbers.copy(), np.ones(len(parents), bool)
        for i, parent in enumerate(parents.tolist()):
            if parent >= 0:
                starts[i], roots[i], is_leaf[parent] = starts[parent] + lengths[parent], roots[parent], False
        leaves = np.flatnonzero(is_leaf)
        leaves = leaves[np.argsort(roots[leaves], kind="stable")]
        longest = int((starts + lengths).max())
        if len(leaves) * longest > MAX_PATH_TOKENS:
            raise InvalidRequest(
                f"the trees have {len(leaves):,} paths, the longest of {longest:,} tokens; these may be at most "
                f"{MAX_PATH_TOKENS:,} by their product: send fewer trees in a request"
            )
        homes = np.full(len(parents), len(leaves))
        homes[leaves] = np.arange(len(leaves))
        for i, parent in reversed([*enumerate(parents.tolist())]):
            if parent >= 0:
                homes[parent] = min(homes[parent], homes[i])
        return cls(parents, lengths, starts, homes, leaves, roots[leaves])

    def table(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the paths' tokens int64 `[P, T]`, padded with 0, of the segments' `[N, width]`."""
        ends = self.starts[self.leaves] + self.lengths[self.leaves]
        table = np.zeros((len(ends), ends.max()), np.int64)
        rows, segments = np.arange(len(ends)), self.leaves
        while len(segments):  # one level of all paths at a time, from the leaves up
            counts = self.lengths[segments]
            own = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            of = np.repeat(segments, counts)
            table[np.repeat(rows, counts), self.starts[of] + own] = tokens[of, own]
            above = self.parents[segments]
            rows, segments = rows[above >= 0], above[above >= 0]
        return table

    def paths(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Returns each path's tokens, int64 `[T_i]`."""
        ends = self.starts[self.leaves] + self.lengths[self.leaves]
        return [row[:end] for row, end in zip(self.table(tokens), ends.tolist(), strict=True)]


def flatten(request: TrainRequest) -> tuple[TrainRequest, np.ndarray]:
    """Returns the request with a row for each path, and int64 `[P]`, each row's tree.

    Column t of a segment goes to its home, where it concerns the same action; all other entries of the mask are 0, so
    that each is trained once. Without parents every row is a tree.
    """
    if request.parents is None or request.lengths is None:
        return request, np.arange(len(request))
    forest = Forest.of(request.parents, request.lengths, request.tokens.shape[1])
    tokens = forest.table(request.tokens)
    segments, own = np.nonzero(request.mask > 0)
    rows, columns = forest.homes[segments], forest.starts[segments] + own - 1

    def moved(values: np.ndarray) -> np.ndarray:
        table = np.zeros((len(tokens), tokens.shape[1] - 1), np.float32)
        table[rows, columns] = values[segments, own]
        return table

    returns, prev_values, mask = map(moved, (request.returns, request.prev_values, request.mask))
    flat = dataclasses.replace(
        request, tokens=tokens, returns=returns, prev_values=prev_values, mask=mask, parents=None, lengths=None
    )
    return flat, forest.roots


def whole_trees(trees: np.ndarray, size: int) -> Iterator[slice]:
    """Yields parts of at most `size` rows, in order, that cut no tree; a larger tree is a part by itself."""
    start = 0
    bounds = [*np.flatnonzero(np.diff(trees, prepend=-1)).tolist(), len(trees)]
    for this, following in itertools.pairwise(bounds):
        if following - start > size and this > start:
            yield slice(start, this)
            start = this
    yield slice(start, len(trees))
