"""Ranks that stop, hang or die: the others see it in the set time, and all end."""

from __future__ import annotations

import re
import signal
import time

import pytest

from guerdon.distributed.pulse import EXIT_STATUS
from launched import launching
from server.helpers import wait_until


@pytest.mark.parametrize(
    ("how", "number", "lost"),
    [
        ("forward", signal.SIGSTOP, r"rank 1 \(.*\) has not been heard of in time"),
        pytest.param("idle", signal.SIGSTOP, "has not been heard of in time", marks=pytest.mark.slow),
        pytest.param("idle", signal.SIGKILL, "has ended: its connection broke", marks=pytest.mark.slow),
        pytest.param("forward", signal.SIGKILL, "has ended: its connection broke", marks=pytest.mark.slow),
        pytest.param("follower", None, r"rank 1 \(.*\) has not come on with a command", marks=pytest.mark.slow),
        pytest.param("leader", None, r"rank 0 \(.*\) has not come on with a command", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_is_seen_in_time(how: str, number: int | None, lost: str) -> None:
    with launching("distributed.pulse_checks", 2, how) as launch:
        wait_until(lambda: "WELL" in launch.output() or launch.torchrun.poll() is not None, 60)
        started = time.monotonic()
        if number is not None:
            time.sleep(0.5)
            launch.rank(1).send_signal(number)
        launch.torchrun.wait(20)
        assert time.monotonic() - started < 10
        output = launch.output()
        assert re.search(f"LOST AT 0: .*{lost}", output), output
        assert re.search(rf"exitcode *: {EXIT_STATUS} ", output), output
        assert launch.processes() == []
