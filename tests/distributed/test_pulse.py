"""Ranks that stop, hang or die: the others see it in the set time, and all end."""

import re
import signal
import time

import pytest

from guerdon.distributed.pulse import EXIT_STATUS, _Gone, _Judge
from guerdon.distributed.ranks import IN_TALK, Ranks
from launched import launched, launching
from server.helpers import tried_again, wait_until


@tried_again
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "lost"),
    [
        ("forward", signal.SIGSTOP, r"rank 1 \(.*\) has not been heard of in time"),
        pytest.param("idle", signal.SIGSTOP, "has not been heard of in time", marks=pytest.mark.slow),
        pytest.param("idle", signal.SIGKILL, "has ended: its connection broke", marks=pytest.mark.slow),
        pytest.param("forward", signal.SIGKILL, "has ended: its connection broke", marks=pytest.mark.slow),
        pytest.param("follower", None, r"rank 1 \(.*\) has not come on with a command", marks=pytest.mark.slow),
        pytest.param("fails", None, r"rank 1 \(.*\) failed alone, as its log says", marks=pytest.mark.slow),
        pytest.param("leader", None, r"rank 0 \(.*\) has not come on with a command", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_is_seen_in_time(how: str, number: int | None, lost: str) -> None:
    with launching("distributed.pulse_checks", 2, how) as launch:
        wait_until(lambda: "WELL" in launch.output() or launch.torchrun.poll() is not None)
        started = time.monotonic()
        if number is not None:
            time.sleep(0.5)
            launch.rank(1).send_signal(number)
        launch.torchrun.wait(120)
        assert time.monotonic() - started < 25
        output = launch.output()
        assert re.search(f"LOST AT 0: .*{lost}", output), output
        assert re.search(rf"exitcode *: {EXIT_STATUS} ", output), output
        assert ("MemoryError: no room for it" in output) is (how == "fails")
        launch.wait_ended()


@tried_again
@pytest.mark.slow
def test_two_of_four_ranks_are_stopped() -> None:
    with launching("distributed.pulse_checks", 4, "forward") as launch:
        wait_until(lambda: "WELL" in launch.output() or launch.torchrun.poll() is not None)
        time.sleep(0.5)
        for rank in (1, 2):
            launch.rank(rank).send_signal(signal.SIGSTOP)
        started = time.monotonic()
        # torchrun itself would kill the one that nobody has killed only after 30 s.
        launch.torchrun.wait(120)
        assert time.monotonic() - started < 25
        output = launch.output()
        assert re.search(r"LOST AT 0: rank [12] \(.*has not been heard of in time", output), output
        assert "rank 0 (" not in output, output
        launch.wait_ended()


@tried_again
@pytest.mark.slow
@pytest.mark.parametrize("how", ["works", "ends"])
def test_ranks_that_wait_or_end_slowly_are_not_lost(how: str) -> None:
    done = launched("distributed.pulse_checks", 3, how)
    assert done.code == 0, done.output
    assert "LOST" not in done.output
    assert done.output.count("LEFT") == (3 if how == "ends" else 0)
    assert done.output.count("TOLD LATE") == (how == "ends")


def judge() -> _Judge:
    return _Judge(patience_s=27.0, break_s=1.0)


def test_the_first_rank_that_makes_no_progress_is_named() -> None:
    one = judge()
    one.look({0: (1, True, 0), 1: (1, True, 0), 2: (1, True, 0)}, 0, 0.0)
    one.look({0: (2, True, 0), 1: (2, True, 0), 2: (1, True, 0)}, 0, 20.0)
    with pytest.raises(_Gone, match=r"^has not come on with a command for 28 s$") as gone:
        one.look({0: (2, True, 0), 1: (2, True, 0), 2: (1, True, 0)}, 0, 28.0)
    assert gone.value.rank == 2

    one = judge()  # all wait for one of them; which, only its host can tell
    one.look({0: (1, True, 0), 1: (1, True, 0), 2: (1, True, 0)}, 0, 0.0)
    with pytest.raises(_Gone, match=r"for 30 s, nor has rank 0, 2$") as gone:
        one.look({0: (1, True, 0), 1: (1, True, 0), 2: (1, True, 0)}, 0, 30.0)
    assert gone.value.rank == 1


def test_a_rank_that_waits_need_not_come_on() -> None:
    one = judge()
    for now in range(0, 100, 5):
        one.look({0: (1, False, 0), 1: (now, True, 0)}, 0, float(now))
    one.look({0: (1, True, 0), 1: (95, True, 0)}, 0, 100.0)
    one.look({0: (1, True, 0), 1: (95, True, 0)}, 0, 120.0)  # its time began as its waiting ended
    ranks = Ranks()
    with ranks.waiting(), ranks.waiting():
        assert ranks.doing.num_waits == 2
    assert ranks.doing.num_waits == 0 and ranks.doing.ticks == 2


@pytest.mark.parametrize("failed", [3, IN_TALK])
def test_a_rank_that_fails_alone_is_named(failed: int) -> None:
    one = judge()
    one.look({0: (1, False, 0), 1: (1, False, failed)}, 2, 0.0)
    one.look({0: (2, False, 0), 1: (1, False, failed)}, 2, 20.0)  # rank 0 comes on, and will tell
    one.look({0: (2, False, 0), 1: (1, False, failed)}, 2, 40.0)
    with pytest.raises(_Gone, match="failed alone, as its log says, and the others have waited 28 s for it") as gone:
        one.look({0: (2, False, 0), 1: (1, False, failed)}, 2, 48.0)
    assert gone.value.rank == 1

    one = judge()  # as soon as those that wait for it would be named
    one.look({0: (1, True, 0), 1: (1, True, 0)}, 2, 0.0)
    for now in (2.8, 28.5):  # rank 0 is given two more
        one.look({0: (1, True, 0), 1: (1, False, failed)}, 2, now)
    with pytest.raises(_Gone, match="failed alone"):
        one.look({0: (1, True, 0), 1: (1, False, failed)}, 2, 29.5)

    one = judge()  # all have told
    for now in range(0, 100, 5):
        one.look({0: (1, False, 0), 1: (1, False, 3)}, 3, float(now))
