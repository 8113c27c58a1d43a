"""Disks that are full, limited or read-only while a critic works on them, and what is on them before it acts."""

import errno
import os
import random
import resource
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disks import fill, remount, small_disk
from guerdon.critic_core import Operation, TrainReport
from guerdon.errors import Offloaded, StartError, StorageFailed, TrainFailed
from guerdon.server import status
from processes import by_itself, end_of_child
from server.arithmetic_critic import FAIL_TOKEN, after, request
from server.driving import SAVE, Driver
from tiers import slow_but

A, B, C, D = (request(name, value) for name, value in zip("abcd", (3, 5, 7, 11), strict=True))
NOTHING = request("nothing", 1, first_token=FAIL_TOKEN)
"""Of which nothing is done."""
LARGE = request("large", *range(400), length=12)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@by_itself
def test_on_a_full_disk_trains_and_saves_are_refused_and_everything_stays(tmp_path: Path) -> None:
    small_disk(tmp_path)
    with Driver(tmp_path) as critic:
        critic.train(A)
        saved = critic.ask(Operation.SAVE)
        critic.train(B)
        before = names(tmp_path)
        filling = fill(tmp_path)
        with pytest.raises(StorageFailed, match=r"nothing was changed: No space left on device"):
            critic.train(C)
        with pytest.raises(StorageFailed, match=r"older ones are as they were: No space left on device"):
            critic.ask(Operation.SAVE)
        assert critic.values(1) == ([after([A, B])], "1+2")
        filling.unlink()
        assert names(tmp_path) == before
        with pytest.raises(StorageFailed):  # not full, but too full for this
            critic.train(request("huge", *range(4000), length=12))
        critic.trainer.num_bytes = 1 << 20
        with pytest.raises(StorageFailed):
            critic.ask(Operation.SAVE)
        critic.trainer.num_bytes = 0
        assert names(tmp_path) == before
        assert critic.state().checkpoints == [saved]
        assert critic.train(C).step == 3
        assert critic.ask(Operation.SAVE).step == 3
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B, C])


@by_itself
def test_on_a_full_disk_a_failed_train_is_still_noted(tmp_path: Path) -> None:
    bad = request("bad", 1, 2, 3)
    bad.tokens[2, 0] = FAIL_TOKEN

    small_disk(tmp_path)
    with Driver(tmp_path, global_batch_size=1) as critic:
        fails, critic.trainer.train = critic.trainer.train, lambda *more: (fill(tmp_path), fails(*more))[1]
        with pytest.raises(TrainFailed):
            critic.train(bad)
        with pytest.raises(StorageFailed):
            critic.train(A)
        (tmp_path / "filling").unlink()
    with Driver(tmp_path, global_batch_size=1) as critic:
        assert critic.trainer.weight == after([request("", 1, 2)], 1)


@by_itself
def test_on_a_disk_that_becomes_read_only_the_server_lives_and_says_so(tmp_path: Path) -> None:
    small_disk(tmp_path)
    with Driver(tmp_path) as critic:
        critic.do(A, SAVE, B)
        remount(tmp_path, "ro")
        for _ in range(2):
            with pytest.raises(StorageFailed, match="Read-only file system"):
                critic.train(C)
        with pytest.raises(StorageFailed, match="Read-only file system"):
            critic.ask(Operation.SAVE, metrics={"reward": 1.0})
        assert critic.values(1)[0] == [after([A, B])] and critic.train(B).step == 2
        remount(tmp_path, "rw")
        assert critic.train(C).step == 3
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B, C])
    remount(tmp_path, "ro")
    with pytest.raises(StartError, match=r"cannot keep a journal .* cannot be written"):
        Driver(tmp_path)


@by_itself
def test_a_withdrawal_that_the_disk_refuses_is_made_up_for_before_anything_else(tmp_path: Path) -> None:
    """The train fails in the moment in which the disk becomes read-only."""

    small_disk(tmp_path)
    with Driver(tmp_path) as critic:
        critic.train(A)
        fails = critic.trainer.train
        critic.trainer.train = lambda *more: (remount(tmp_path, "ro"), fails(*more))[1]
        for asked in (NOTHING, NOTHING, B):
            with pytest.raises(StorageFailed, match="cannot record how a train request ended"):
                critic.train(asked)
        critic.trainer.train = fails
        remount(tmp_path, "rw")
        with pytest.raises(TrainFailed, match="the 0 before it stand"):
            critic.train(NOTHING)
        critic.train(B)
    assert [n for n in names(tmp_path / "journal") if "safetensors" in n] == [
        "000000000001-done.safetensors",
        "000000000003-done.safetensors",
    ]
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B])


@by_itself
def test_files_that_may_not_grow_are_refused_like_a_full_disk(tmp_path: Path) -> None:
    """As under a quota, and where no small disk may be mounted."""

    with Driver(tmp_path) as critic:
        critic.do(A, SAVE)
        before = names(tmp_path)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(StorageFailed, match="File too large"):
            critic.train(LARGE)
        critic.trainer.num_bytes = 10_000
        with pytest.raises(StorageFailed, match="File too large"):
            critic.ask(Operation.SAVE, metrics={"reward": 1.0})
        assert names(tmp_path) == before
        critic.train(B)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert critic.train(LARGE).step == 9
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B, LARGE])


@by_itself
def test_a_failed_save_by_itself_fails_no_train_and_is_tried_again(tmp_path: Path) -> None:
    with Driver(tmp_path, save_every=1) as critic:
        critic.trainer.num_bytes = 10_000
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        assert critic.train(A).step == 1
        assert critic.state().checkpoints == []
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        critic.train(B)
        assert [info.step for info in critic.state().checkpoints] == [2]


@by_itself
def test_a_return_whose_checkpoint_cannot_be_written_outlives_a_restart(tmp_path: Path) -> None:
    with Driver(tmp_path) as critic:
        critic.train(A)
        first = critic.ask(Operation.SAVE)
        critic.train(B)
        critic.trainer.num_bytes = 10_000
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        assert critic.ask(Operation.LOAD, checkpoint=first.name) == first
        critic.train(C)
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, C]) and critic.train(B).step == 3


def test_a_request_is_safe_from_a_power_cut_before_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has the record's bytes and its name, and the checkpoint's, before anyone counts on them."""
    synced: list[str] = []
    really_sync, really_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        really_sync(descriptor)
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path).as_posix())

    def rename(path: Path, target: Path) -> Path:
        synced.append(f"{path.relative_to(tmp_path)} > {target.name}")
        return really_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    with Driver(tmp_path) as critic:
        trains = critic.trainer.train
        critic.trainer.train = lambda *more: (synced.append("train"), trains(*more))[1]
        critic.train(A)
        record = "000000000001.safetensors"
        assert synced == [
            ".",  # in which the journal's folder is new
            f"journal/.aside-{record}",
            f"journal/.aside-{record} > {record}",
            "journal",
            "train",
            f"journal/{record} > 000000000001-done.safetensors",
            "journal",
        ]
        synced.clear()
        name = critic.ask(Operation.SAVE).name
        place = synced.index(f".aside-000001 > {name}")
        assert synced[place + 1] == "."
        assert {".aside-000001", *(f".aside-000001/{file}" for file in ("weight.json", "rest.bin"))} <= {
            *synced[:place]
        }
        assert synced[place - 3 : place] == [
            ".aside-000001/.aside-manifest.json",
            ".aside-000001/.aside-manifest.json > manifest.json",
            ".aside-000001",
        ]


def test_a_folder_that_cannot_be_synced_keeps_nothing_of_what_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new name is there, but might be gone after a power cut: so it must go now."""
    really_sync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        really_sync(descriptor)

    with Driver(tmp_path) as critic:
        critic.train(A)
        before = names(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(StorageFailed, match="Input/output error"):
                critic.train(B)
            assert names(tmp_path) == before
            with pytest.raises(StorageFailed, match="Input/output error"):
                critic.ask(Operation.SAVE)
            assert names(tmp_path) == before
        with monkeypatch.context() as patch:  # only in the folder of the checkpoints themselves
            fails_at = tmp_path.stat().st_ino

            def fsync_here(descriptor: int) -> None:
                if os.fstat(descriptor).st_ino == fails_at:
                    raise OSError(errno.EIO, "Input/output error")

            patch.setattr(os, "fsync", fsync_here)
            with pytest.raises(StorageFailed, match="Input/output error"):
                critic.ask(Operation.SAVE)
            assert names(tmp_path) == before
        critic.train(B)
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B])


def refuse(path: Path | int, missing_ok: bool = False) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("how", ["failed", "refused", "broke down"])
def test_a_failure_is_reported_only_after_its_record_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The server ends then, and the next start does what the record says."""

    with Driver(tmp_path) as critic:
        critic.train(A)
        with monkeypatch.context() as patch:

            def fail(*_: object) -> TrainReport:
                patch.setattr(Path, "unlink", refuse)
                raise {
                    "failed": TrainFailed("no memory; the 0 before it stand"),
                    "refused": Offloaded("it is offloaded"),
                    "broke down": RuntimeError("a bug"),
                }[how]

            patch.setattr(critic.trainer, "train", fail)
            with pytest.raises(StorageFailed, match="cannot record how a train request ended"):
                critic.train(B)
            assert status.is_ready(critic.service) is (how != "broke down")
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, B])


def test_a_record_that_can_neither_be_kept_nor_removed_is_removed_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Driver(tmp_path) as critic:
        critic.train(A)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse)
            patch.setattr(Path, "unlink", refuse)
            with pytest.raises(StorageFailed):
                critic.train(B)
        with monkeypatch.context() as patch:
            really_rename = Path.rename

            def rename_and_break(path: Path, target: Path) -> Path:
                patch.setattr(os, "fsync", refuse)
                patch.setattr(Path, "unlink", refuse)
                return really_rename(path, target)

            patch.setattr(Path, "rename", rename_and_break)
            with pytest.raises(StorageFailed):
                critic.train(B)
            assert "journal/000000000003.safetensors" in names(tmp_path)
            patch.setattr(Path, "rename", really_rename)
            with pytest.raises(StorageFailed, match="cannot record how a train request ended"):
                critic.train(C)
        critic.train(C)
        assert "journal/000000000003.safetensors" not in names(tmp_path)
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([A, C])


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


@pytest.mark.parametrize("part", slow_but((0,), range(4)))
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
