"""The group of several real processes: what it executes, what it raises, and that nobody falls out of step."""

import dataclasses

import numpy as np
import pytest

from guerdon.core import Command, ModelInfo, Score, Sequence, Signal
from guerdon.distributed.commands import Worker
from guerdon.distributed.group import Group
from guerdon.distributed.ranks import Member, _check_layout
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.settings.config import ParallelConfig
from launched import forked


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_group_of_processes(nproc: int) -> None:
    done = forked("distributed.group_checks", nproc)
    assert done.code == 0, done.output
    assert all(f"RANK {rank} HOLDS" in done.output for rank in range(nproc)), done.output


class Lengths:
    """Rewards each sequence with its length; not one with a 0."""

    info = ModelInfo("lengths", "lengths")
    takes_all = False

    def watch(self, tick: object) -> bool:
        return False

    def score(self, sequences: list[Sequence]) -> list[Score]:
        if any(0 in s.tokens for s in sequences):
            raise InvalidRequest("a 0")
        return [Score(float(len(s.tokens))) for s in sequences]


def test_a_group_of_one_needs_no_others() -> None:
    group = Group(Worker({"lengths": Lengths()}))
    rows = [np.ones(n, dtype=np.int64) for n in (3, 1, 2)]
    scored = group.execute(Command(Signal.FORWARD, "lengths", [Sequence(row) for row in rows]))
    assert [score.reward for score in scored.results] == [3, 1, 2]
    with pytest.raises(InvalidRequest, match=r"^a 0$"):
        group.execute(Command(Signal.FORWARD, "lengths", [Sequence(np.zeros(1, dtype=np.int64))]))
    assert group.execute(Command(Signal.EXIT)) is None
    group.end()


def test_ranks_of_unlike_settings_are_told_so() -> None:
    members = (Member(0, "one", 7), Member(1, "two", 8))
    layouts = [dataclasses.asdict(ParallelConfig(tensor_parallel=2, fsdp=fsdp)) for fsdp in (False, True)]
    with pytest.raises(ConfigError, match=r"fsdp is False for rank 0 \(one, process 7\), and True for rank 1 \(two, "):
        _check_layout(members, layouts)
    _check_layout(members, layouts[:1] * 2)
    with pytest.raises(ConfigError, match="3 processes cannot be parts of 2"):
        _check_layout((*members, Member(2, "two", 9)), layouts[:1] * 3)
    _check_layout(members, [layouts[0] | {"data_parallel": 1}] * 2)
    with pytest.raises(ConfigError, match="data_parallel is 2, and 2 processes are 1 data-parallel parts"):
        _check_layout(members, [layouts[0] | {"data_parallel": 2}] * 2)
