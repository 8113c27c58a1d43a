"""Segments with parents, and the paths that they make: literal trees."""

import numpy as np
import pytest

from guerdon.critic_core import TrainRequest
from guerdon.engine.packing import pack
from guerdon.errors import InvalidRequest
from guerdon.training.critic_trainer import global_batches
from guerdon.trees import MAX_PATH_TOKENS, Forest, flatten, whole_trees

PARENTS = np.array([-1, -1, 0, 0, 2, 2])
"""Two trees: 0 with the leaves 3, 4 and 5, of which 4 and 5 follow 2; and 1 alone."""
LENGTHS = np.array([3, 2, 2, 1, 1, 3])
TOKENS = np.array([[1, 2, 3], [90, 91, 0], [21, 22, 0], [31, 0, 0], [41, 0, 0], [51, 52, 53]])


def test_each_path_leads_from_a_root_to_a_leaf() -> None:
    forest = Forest.of(PARENTS, LENGTHS, 3)
    assert [path.tolist() for path in forest.paths(TOKENS)] == [
        [1, 2, 3, 31],
        [1, 2, 3, 21, 22, 41],
        [1, 2, 3, 21, 22, 51, 52, 53],
        [90, 91],
    ]
    assert (forest.leaves.tolist(), forest.roots.tolist()) == ([3, 4, 5, 1], [0, 0, 0, 1])
    assert forest.starts.tolist() == [0, 0, 3, 3, 5, 5]
    assert forest.homes.tolist() == [0, 3, 1, 0, 1, 2]


def request(mask: np.ndarray) -> TrainRequest:
    """Entry t of segment i is 10 i + t, its previous value half of that; NaN where nothing counts."""
    targets = 10.0 * np.arange(len(PARENTS))[:, None] + np.arange(3)
    returns = np.where(mask > 0, targets, np.nan).astype(np.float32)
    made = TrainRequest("r", TOKENS, returns, returns / 2, mask.astype(np.float32))
    made.parents, made.lengths = PARENTS, LENGTHS
    return made


def test_each_action_is_trained_once_at_the_token_before_it() -> None:
    mask = np.arange(3) < LENGTHS[:, None]
    mask[:2, 0] = False  # nothing comes before a root's first token
    flat, trees = flatten(request(mask))
    assert (flat.parents, trees.tolist()) == (None, [0, 0, 0, 1])
    assert flat.tokens.shape == (4, 8)
    assert flat.returns.tolist() == [
        [1, 2, 30, 0, 0, 0, 0],
        [0, 0, 20, 21, 40, 0, 0],
        [0, 0, 0, 0, 50, 51, 52],
        [11, 0, 0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(flat.mask, flat.returns > 0)
    np.testing.assert_array_equal(flat.prev_values, flat.returns / 2)
    assert flat.mask.sum() == mask.sum()


def test_what_is_masked_out_is_never_read() -> None:
    mask = np.zeros((6, 3))
    mask[2, 1], mask[5, 0] = 1, 0.5
    (batch,) = global_batches(request(mask), 4)
    rows, targets = batch.read(with_action=False)
    assert [row.tolist() for row in rows] == [[1, 2, 3, 21], [1, 2, 3, 21, 22]]
    assert [own[1].tolist() for own in targets] == [[0, 0, 0, 21], [0, 0, 0, 0, 50]]
    assert [own[2].tolist() for own in targets] == [[0, 0, 0, 1], [0, 0, 0, 0, 0.5]]
    assert (batch.sum_mask, batch.num_tokens) == (1.5, 2)


@pytest.mark.parametrize(
    ("trees", "size", "want"),
    [
        ([0, 1, 2, 3, 4], 2, [2, 2, 1]),
        ([0, 0, 0, 7, 7, 8], 4, [3, 3]),
        ([0, 0, 0, 7, 7, 8], 3, [3, 3]),
        ([0, 0, 0, 7, 7, 8], 2, [3, 2, 1]),
        ([0, 2, 2, 2, 3], 2, [1, 3, 1]),
        ([4], 1, [1]),
    ],
)
def test_no_batch_cuts_a_tree(trees: list[int], size: int, want: list[int]) -> None:
    parts = list(whole_trees(np.array(trees), size))
    assert [part.stop - part.start for part in parts] == want
    assert [part.start for part in parts] == [0, *np.cumsum(want)[:-1]]


def test_a_tree_costs_as_many_tokens_as_it_has() -> None:
    numbers = np.random.default_rng(0)
    parents = np.array([-1, *np.repeat(0, 8), *np.repeat([3, 5], 3), -1, 15, 15])
    lengths = numbers.integers(20, 60, len(parents))
    tokens = numbers.integers(0, 1000, (len(parents), 60))
    mask = (np.arange(60) < lengths[:, None]).astype(np.float32)
    mask[parents < 0, 0] = 0
    asked = TrainRequest("r", tokens, mask, mask, mask)
    asked.parents, asked.lengths = parents, lengths
    batches = global_batches(asked, 100)
    rows, _ = batches[0].read(with_action=False)
    (packed,) = pack(rows, budget=10_000, share=True)
    num_paths = 6 + 6 + 2
    assert (len(batches), len(rows)) == (1, num_paths)
    # The last token of a path has no action behind it, and so no value that is learnt.
    assert packed.num_tokens == lengths.sum() - num_paths
    assert batches[0].num_tokens == lengths.sum() - 2
    assert sum(map(len, rows)) > 2 * packed.num_tokens


@pytest.mark.parametrize(
    ("parents", "lengths", "message"),
    [
        ([0], [1], r"parents is 0 in row 0: give -1, which makes it a root"),
        ([-1, 1], [1, 1], r"parents is 1 in row 1: give the number of an earlier row, 0 to 0, or -1, which"),
        ([-1, -1, -2], [1, 1, 1], r"parents is -2 in row 2: give the number of an earlier row, 0 to 1, or -1"),
        ([-1, 0, 5], [1, 1, 1], r"parents is 5 in row 2"),
        ([-1, 0], [1, 0], r"sequence_lengths is 0 in row 1: a segment has at least one token, and at most 9"),
        ([-1, 0], [10, 1], r"sequence_lengths is 10 in row 0"),
    ],
)
def test_what_is_no_tree_is_named(parents: list[int], lengths: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Forest.of(np.array(parents), np.array(lengths), 9)


def test_paths_that_would_fill_the_memory_are_refused() -> None:
    comb = np.array([-1, *(i - i % 2 - 2 for i in range(2, 12_001))])  # a spine, and a leaf at each of its segments
    comb[1] = 0
    with pytest.raises(InvalidRequest, match=f"at most {MAX_PATH_TOKENS:,} by their product: send fewer trees"):
        Forest.of(np.maximum(comb, -1), np.ones(len(comb), np.int64), 1)
