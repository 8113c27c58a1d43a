"""The group of several real processes: what it executes, what it raises, and that nobody falls out of step."""

from __future__ import annotations

import numpy as np
import pytest

from guerdon.core import Command, ModelInfo, Score, Sequence, Signal
from guerdon.distributed.group import Group
from guerdon.distributed.worker import Worker
from guerdon.errors import InvalidRequest
from launched import launched


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_group_of_processes(nproc: int) -> None:
    done = launched("distributed.group_checks", nproc)
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
    scored = group.lead(Command(Signal.FORWARD, "lengths", [Sequence(row) for row in rows]))
    assert [score.reward for score in scored.results] == [3, 1, 2]
    with pytest.raises(InvalidRequest, match=r"^a 0$"):
        group.lead(Command(Signal.FORWARD, "lengths", [Sequence(np.zeros(1, dtype=np.int64))]))
    assert group.lead(Command(Signal.EXIT)) is None
    group.end()
