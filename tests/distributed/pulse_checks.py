"""A group whose follower is stopped or hangs, in `test_pulse`: run under torchrun with the word for how."""

from __future__ import annotations

import sys
import time
from typing import Any

from guerdon.config import ParallelConfig
from guerdon.distributed.group import Group
from guerdon.distributed.pulse import EXIT_STATUS, Pulse
from guerdon.distributed.ranks import Ranks, start
from guerdon.errors import RanksLost


class Worker:
    """Executes how many seconds each rank takes; of those a watched one ticks every tenth, unless it hangs."""

    def __init__(self, ranks: Ranks, pulse: Pulse) -> None:
        self._ranks, self._pulse = ranks, pulse

    def execute(self, command: dict[str, Any]) -> None:
        until = time.monotonic() + command["seconds"]
        hangs = command.get("hangs") == self._ranks.rank
        while time.monotonic() < until or hangs:
            time.sleep(0.1)
            if not hangs:
                self._pulse.tick()

    def merge(self, command: dict[str, Any], parts: list[None]) -> None:
        return None

    def is_watched(self, command: dict[str, Any]) -> bool:
        return bool(command["is_watched"])


def main(how: str) -> None:
    ranks = start(ParallelConfig(rank_timeout_s=2.0), "cpu")
    pulse = Pulse(ranks)
    pulse.on_lost = lambda lost: print(f"LOST AT {ranks.rank}: {lost}", flush=True)
    pulse.start()
    group = Group(Worker(ranks, pulse), ranks, pulse)
    if not ranks.is_leader:
        group.follow()
        return
    group.lead({"seconds": 3.0, "is_watched": True})  # ticks for longer than the limit
    group.lead({"seconds": 3.0, "is_watched": False})
    print("WELL", flush=True)
    if how == "idle":
        time.sleep(60)
    hangs = {"leader": 0, "follower": 1}.get(how)
    try:
        group.lead({"seconds": 60.0 if hangs is None else 0.0, "is_watched": True, "hangs": hangs})
    except RanksLost as e:
        print(f"RAISED {e}", flush=True)
        time.sleep(10)  # the pulse ends it


if __name__ == "__main__":
    main(sys.argv[1])
    assert EXIT_STATUS == 70
