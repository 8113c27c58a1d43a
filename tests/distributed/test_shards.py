"""Which rank computes which rows."""

import numpy as np
import pytest

from guerdon.core import common_prefix
from guerdon.distributed.layout import fit, wants_ranks
from guerdon.distributed.shards import shards
from guerdon.errors import ConfigError
from guerdon.settings.config import ParallelConfig


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


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("settings", "num_gpus", "line"),
    [
        ({"data_parallel": 2}, 0, "2 ranks: 2 data-parallel x 1 tensor-parallel, on cpu, 8 threads each"),
        (
            {"tensor_parallel": 4, "data_parallel": 5},
            0,
            "20 ranks: 5 data-parallel x 4 tensor-parallel, on cpu, 1 thread each",
        ),
        ({"tensor_parallel": 2}, 8, "2 ranks: 1 data-parallel x 2 tensor-parallel, one GPU each, 8 threads each"),
        (
            {"tensor_parallel": 2, "fsdp": True},
            8,
            "8 ranks: 4 data-parallel x 2 tensor-parallel, one GPU each, 2 threads each",
        ),
        ({"fsdp": True}, 3, "3 ranks: 3 data-parallel x 1 tensor-parallel, one GPU each, 5 threads each"),
    ],
)
def test_a_layout_that_fits(settings: dict[str, int], num_gpus: int, line: str) -> None:
    assert str(fit(ParallelConfig(**settings), num_gpus=num_gpus, num_cores=16)) == line


@pytest.mark.parametrize(
    ("settings", "num_gpus", "error", "advice"),
    [
        ({"tensor_parallel": 8}, 4, "8 ranks need a GPU each, and torch sees 4", "give --tensor-parallel 4, or"),
        ({"tensor_parallel": 6}, 4, "torch sees 4", "give --tensor-parallel 3, or --device cpu"),
        ({"tensor_parallel": 2, "data_parallel": 8}, 9, "16 ranks", "--tensor-parallel 2 --data-parallel 4"),
        ({"data_parallel": 2}, 1, "2 ranks", "leave out --tensor-parallel, --data-parallel and --fsdp, or"),
        ({"fsdp": True, "tensor_parallel": 4}, 2, "4 ranks", "give --tensor-parallel 2"),
        ({"fsdp": True}, 0, "fsdp is on, and there are no GPUs to share", "--data-parallel 2"),
        ({"fsdp": True}, 1, "fsdp is on, and there is one rank", "leave it out"),
        ({"fsdp": True, "data_parallel": 1}, 0, "fsdp is on, and there is one rank", "--data-parallel 2 or more"),
    ],
)
def test_a_layout_that_does_not_fit_is_told_with_one_that_does(
    settings: dict[str, int], num_gpus: int, error: str, advice: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        fit(ParallelConfig(**settings), num_gpus=num_gpus, num_cores=16)
    assert error in str(raised.value) and advice in raised.value.help


def test_the_environment_sets_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert fit(ParallelConfig(data_parallel=2), num_gpus=0, num_cores=16).num_threads == 3


def test_ranks_are_started_only_if_the_settings_ask_and_no_launcher_did(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wants_ranks(ParallelConfig()) and not wants_ranks(ParallelConfig(data_parallel=1))
    for config in (ParallelConfig(tensor_parallel=2), ParallelConfig(data_parallel=2), ParallelConfig(fsdp=True)):
        assert wants_ranks(config)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not wants_ranks(ParallelConfig(tensor_parallel=2))
