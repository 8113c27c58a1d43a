"""A server that dies at every single file operation it makes, and disks that are full or cannot be written."""

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guerdon.critic_core import Operation
from guerdon.errors import TrainFailed
from processes import by_itself, end_of_child
from server.arithmetic_critic import FAIL_TOKEN, after, request
from server.driving import Driver

FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "os.truncate"}


def dies_before(num_events: int, folder: Path) -> None:
    """Lets this process end at once before it touches a file in the folder for the `num_events`-th time."""
    left = num_events

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in FILE_EVENTS and str(arguments[0]).startswith(str(folder)):
            left -= 1
            if not left:
                os._exit(9)

    sys.addaudithook(hook)


BAD = request("bad", 1, 2, 3)
BAD.tokens[2, 0] = FAIL_TOKEN
NOTHING = request("nothing", 1, first_token=FAIL_TOKEN)
SCRIPT: list[tuple[str, Any]] = [
    ("train", request("a", 3)),
    ("train", request("b", 5)),
    ("save", None),
    ("train", BAD),
    ("train", request("c", 7)),
    ("save", None),
    ("train", NOTHING),
    ("train", request("d", 11, 13)),
    ("save", None),
    ("load", 5),
    ("train", request("e", 17)),
    ("save", None),
    ("train", request("f", 19)),
]


def final_weight() -> float:
    """The weight at the script's end: the load goes back to what the checkpoint of then had."""
    c, e, f = (asked for _, asked in SCRIPT if getattr(asked, "id", "") in ("c", "e", "f"))
    first = [request("a", 3), request("b", 5), request("", 1, 2)]
    return after([*first, c, e, f], 1)


def play(critic: Driver, first: int, acknowledge: Callable[[], None]) -> None:
    """Does the script from its step `first` on, and says after each that it was acknowledged."""
    for what, content in SCRIPT[first:]:
        try:
            if what == "train":
                critic.train(content)
            elif what == "save":
                critic.ask(Operation.SAVE)
            else:
                name = next(c.name for c in critic.state().checkpoints if c.step == content)
                critic.ask(Operation.LOAD, checkpoint=name)
        except TrainFailed:
            assert content in (BAD, NOTHING)
        acknowledge()


def runs_until(folder: Path, acknowledged: Path, num_events: int) -> bool:
    """Starts a server and plays on from the last acknowledged step; whether it came to the end before it died."""

    def child() -> None:
        dies_before(num_events, folder)
        with Driver(folder, global_batch_size=1, keep_checkpoints=2) as critic, acknowledged.open("a") as log:

            def acknowledge() -> None:
                log.write(".")
                log.flush()

            play(critic, len(acknowledged.read_text()), acknowledge)

    acknowledged.touch()
    status = end_of_child(child)
    assert status in (0, 9)
    return status == 0


def check_end(folder: Path) -> None:
    with Driver(folder, global_batch_size=1, keep_checkpoints=2) as critic:
        assert critic.trainer.weight == final_weight()
        assert critic.trainer.step == 7


def crash_and_recover(tmp_path: Path, num_events: int, rng: random.Random) -> bool:
    """Dies at that event, then a few times at random ones, then recovers; whether the first run came to its end."""
    folder, acknowledged = tmp_path / "critic", tmp_path / "acknowledged"
    has_ended = runs_until(folder, acknowledged, num_events)
    while not runs_until(folder, acknowledged, rng.randint(1, 120)):
        pass
    check_end(folder)
    shutil.rmtree(folder)
    acknowledged.unlink()
    return has_ended


@by_itself
def test_the_script_without_any_crash(tmp_path: Path) -> None:
    assert runs_until(tmp_path / "critic", tmp_path / "acknowledged", -1)
    check_end(tmp_path / "critic")


@pytest.mark.parametrize("part", range(4))
@by_itself
def test_a_crash_at_some_file_operations_loses_nothing_and_repeats_nothing(tmp_path: Path, part: int) -> None:
    rng = random.Random(part)
    for num_events in rng.sample(range(1, 250), 5):
        crash_and_recover(tmp_path, num_events, rng)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@by_itself
def test_a_crash_at_any_file_operation_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    rng, num_events = random.Random(0), 1
    while not crash_and_recover(tmp_path, num_events, rng):
        num_events += 1
    assert num_events > 100
