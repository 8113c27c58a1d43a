"""Which ranks a command starts on a machine, and what it says of a count that does not fit."""

import pytest

from guerdon.distributed.layout import fit, wants_ranks
from guerdon.errors import ConfigError
from guerdon.settings.config import ParallelConfig


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
