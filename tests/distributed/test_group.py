"""The group of several real processes: what it executes, what it raises, and that nobody falls out of step."""

import dataclasses
import signal
import subprocess
import sys

import numpy as np
import pytest

from guerdon.core import Command, ModelInfo, Score, Sequence, Signal
from guerdon.distributed.commands import Worker
from guerdon.distributed.group import Group
from guerdon.distributed.ranks import Member, _check_layout
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.settings.config import ParallelConfig
from launched import forked
from processes import environment


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


ENDS = """
import os, signal, sys
from guerdon.distributed.stopping import asking

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.{name}):
        kill(pid, number)  # when the interpreter has taken back all handlers of Python's

late = Late()
with asking(lambda: None, for_good={for_good}):
    os.kill(os.getpid(), signal.{name})
print("left", flush=True)
if {for_good}:
    os.kill(os.getpid(), signal.{name})
"""

HEARS = """
import asyncio, contextlib, os, signal, threading
from guerdon.distributed.stopping import asking
{imports}

asked = threading.Event()

async def main():
    os.kill(os.getpid(), signal.{name})
    async with asyncio.timeout(60):
        while not asked.is_set():
            await asyncio.sleep(0.01)

before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
with asking(asked.set):
    with asyncio.Runner(loop_factory={factory}) as runner:
        runner.run(main())
    asked.clear()
    os.kill(os.getpid(), signal.{name})  # behind the loop, too
    assert asked.wait(120)
assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
assert signal.set_wakeup_fd(-1) == -1
print("heard", flush=True)
"""


def run(program: str) -> tuple[int, str]:
    """How the program ends, and what it says."""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_behind_it_a_rank_that_ends_is_not_killed(name: str) -> None:
    assert run(ENDS.format(name=name, for_good=True)) == (0, "left\n")


def test_behind_it_all_is_as_before() -> None:
    assert run(ENDS.format(name="SIGTERM", for_good=False)) == (-signal.SIGTERM, "left\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    ("imports", "factory"), [("", "asyncio.new_event_loop"), ("import uvloop", "uvloop.new_event_loop")]
)
def test_it_is_heard_beside_an_event_loop(name: str, imports: str, factory: str) -> None:
    assert run(HEARS.format(name=name, imports=imports, factory=factory)) == (0, "heard\n")
