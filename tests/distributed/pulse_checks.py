"""A group whose follower is stopped, hangs or fails, in `test_pulse`: run under torchrun with the word for how."""

import contextlib
import sys
import time
from typing import Any

import torch
from torch import distributed

from guerdon.distributed.group import Group
from guerdon.distributed.pulse import EXIT_STATUS, Pulse
from guerdon.distributed.ranks import Ranks, start
from guerdon.errors import RanksLost
from guerdon.settings.config import ParallelConfig


class Worker:
    """Executes how many seconds each rank takes; of those a watched one ticks every tenth, unless it hangs.

    All but the one that `works` only wait for it to tell; the one that `fails` raises while the others wait in a
    collective.
    """

    def __init__(self, ranks: Ranks, pulse: Pulse) -> None:
        self._ranks, self._pulse = ranks, pulse

    def execute(self, command: dict[str, Any]) -> None:
        if command.get("fails") == self._ranks.rank:
            raise MemoryError("no room for it")
        if "fails" in command:
            distributed.all_reduce(torch.zeros(1))  # as inside a model: whoever waits here says nothing of it
        seconds = command["seconds"] if command.get("works", self._ranks.rank) == self._ranks.rank else 0.0
        until = time.monotonic() + seconds
        hangs = command.get("hangs") == self._ranks.rank
        while time.monotonic() < until or hangs:
            time.sleep(0.1)
            if not hangs:
                self._pulse.tick()
        if "works" in command:
            self._ranks.tell_all(None)

    def merge(self, command: dict[str, Any], parts: list[None]) -> None:
        return None

    def is_watched(self, command: dict[str, Any]) -> bool:
        return bool(command["is_watched"])


class SlowEnd(Group):
    """Tells what came of the third command, which is the end, late."""

    def _send_outcome(self, error: BaseException | None, part: Any) -> None:
        if self._num_commands == 3:
            time.sleep(3.0)
            print("TOLD LATE", flush=True)
        super()._send_outcome(error, part)


def main(how: str) -> None:
    ranks = start(ParallelConfig(rank_timeout_s=2.0), "cpu")
    pulse = Pulse(ranks)
    pulse.on_lost = lambda lost: print(f"LOST AT {ranks.rank}: {lost}", flush=True)
    pulse.start()
    is_slow = how == "ends" and ranks.rank == 2
    group = (SlowEnd if is_slow else Group)(Worker(ranks, pulse), ranks, pulse)
    if not ranks.is_leader:
        group.follow()
        if how == "ends":
            print(f"RANK {ranks.rank} LEFT", flush=True)
        return
    group.execute({"seconds": 3.0, "is_watched": True})  # ticks for longer than the limit
    group.execute({"seconds": 3.0, "is_watched": False})
    print("WELL", flush=True)
    if how == "idle":
        time.sleep(60)
    if how == "ends":
        group.end()
        print("RANK 0 LEFT", flush=True)
        return
    if how == "works":
        for works in range(ranks.size):
            group.execute({"seconds": 5.0, "is_watched": True, "works": works})
        group.end()
        return
    if how == "fails":
        with contextlib.suppress(RanksLost):
            group.execute({"seconds": 0.0, "is_watched": False, "fails": 1})
        time.sleep(10)
    hangs = {"leader": 0, "follower": 1}.get(how)
    try:
        group.execute({"seconds": 60.0 if hangs is None else 0.0, "is_watched": True, "hangs": hangs})
    except RanksLost as e:
        print(f"RAISED {e}", flush=True)
        time.sleep(10)  # the pulse ends it


if __name__ == "__main__":
    main(sys.argv[1])
    assert EXIT_STATUS == 70
