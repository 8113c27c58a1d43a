"""Signals to a rank: heard whoever else listens for them, and harmless to one that ends."""

import signal
import subprocess
import sys

import pytest

from processes import environment

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
    assert asked.wait(60)
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
