"""Which rank computes which rows."""

import numpy as np
import pytest

from guerdon.core import common_prefix
from guerdon.distributed.shards import shards


def cost(rows: list[np.ndarray], part: list[int]) -> int:
    """Tokens that one rank computes, what two rows have in common once."""
    order = sorted(part, key=lambda i: rows[i].astype(">u4").tobytes())
    total = 0
    for k, i in enumerate(order):
        shared = common_prefix(rows[order[k - 1]], rows[i]) if k else 0
        total += len(rows[i]) - (shared if shared >= 16 else 0)
    return total


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_row_once_in_equal_parts_whatever_they_are(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(int(rng.integers(0, 20))):
        prompt = rng.integers(0, 50_000, int(rng.integers(0, 200)))
        rows += [np.concatenate([prompt, rng.integers(0, 50_000, int(rng.integers(1, 300)))]) for _ in range(4)]
    parts = shards(rows, count)
    assert len(parts) == count
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    assert all(part == sorted(part) for part in parts)
    assert parts == shards([row.copy() for row in rows], count)
    costs = [cost(rows, part) for part in parts]
    largest = max((cost(rows, [i]) for i in range(len(rows))), default=0)
    assert max(costs) - min(costs) <= max(4 * largest, 1)


def test_responses_to_one_prompt_stay_together() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 300) for _ in range(4)]
    rows = [np.append(prompts[i % 4], rng.integers(0, 1000, 20)) for i in range(16)]
    parts = shards(rows, 2)
    for part in parts:
        assert len(part) == 8 and len({i % 4 for i in part}) == 2


def test_one_prompt_of_all_rows_is_split() -> None:
    prompt = np.arange(100)
    rows = [np.append(prompt, np.arange(i, i + 50)) for i in range(40)]
    assert [len(part) for part in shards(rows, 4)] == [10] * 4


def test_few_rows_leave_parts_empty_and_lengths_count_where_given() -> None:
    assert shards([], 3) == [[], [], []]
    assert shards([np.arange(3)], 3) == [[0], [], []]
    same = [np.arange(20)] * 4
    assert shards(same, 2, [30, 10, 10, 10]) == [[0], [1, 2, 3]]
