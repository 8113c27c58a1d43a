"""Full and read-only disks under what is no critic's own: scored files, a run's metrics, logs, and a server over HTTP.

What a critic does on such disks stands in tests/server/critic/test_disks.py.
"""

import contextlib
import fcntl
import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import served
from disks import fill, remount, small_disk
from guerdon import CriticClient, RetryPolicy, RewardClient, cli, durable
from guerdon.actor.run_checkpoints import CheckpointSaver, RunCheckpoints, RunState
from guerdon.actor.run_checkpoints import RunSnapshot as Snapshot
from guerdon.actor.trackers import Trackers, read_metrics
from guerdon.client import Scores
from guerdon.client.score_file import score_file
from guerdon.errors import StorageFailed
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from processes import by_itself
from server.arithmetic_critic import ArithmeticService, after, request
from server.echo_service import EchoService

ONCE = RetryPolicy(timeout_s=30, tries=1)
NUM_ROWS = 600


class Lengths:
    """Scores by the texts' lengths."""

    def submit(self, texts: Sequence[str], **_: object) -> Future[Scores]:
        future: Future[Scores] = Future()
        lengths = np.array([len(text) for text in texts], np.float32)
        future.set_result(Scores(lengths, [None] * len(lengths), weights_version="1"))
        return future


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (200 + i)}) + "\n" for i in range(NUM_ROWS)))
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@contextlib.contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """The log goes to that file, as a server's often does."""
    handler, root = logging.FileHandler(path), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


def scored(path: Path) -> list[list[float]]:
    return [json.loads(line)["rewards"] for line in path.read_text().splitlines()]


@pytest.mark.slow
@by_itself
def test_scoring_a_file_onto_a_full_disk_stops_with_its_reason_and_goes_on_when_there_is_room(
    rows: Path, disk: Path
) -> None:
    small_disk(disk, size_kib=600)
    out = disk / "out.jsonl"
    (disk / "other").write_bytes(b"x" * 400_000)
    with pytest.raises(StorageFailed, match=r"cannot write .*out\.jsonl: No space left on device; make room"):
        score_file(Lengths(), rows, out, progress=False)
    num_written = len(out.read_text().splitlines())
    assert 10 < num_written < NUM_ROWS
    (disk / "other").unlink()
    summary = score_file(Lengths(), rows, out, progress=False)
    assert summary.num_rows == NUM_ROWS and 10 < summary.num_resumed <= num_written
    assert scored(out) == [[200.0 + i] for i in range(NUM_ROWS)]


@pytest.mark.slow
@by_itself
def test_scores_that_are_made_again_leave_the_file_as_it_was_where_the_disk_is_full(disk: Path, rows: Path) -> None:
    small_disk(disk, size_kib=1200)
    out = disk / "out.jsonl"
    lines = [json.dumps({"text": "x" * (200 + i), "rewards": [None], "errors": ["no"]}) for i in range(NUM_ROWS)]
    out.write_text("\n".join(lines) + "\n")
    before = out.read_bytes()
    filling = fill(disk)
    with pytest.raises(StorageFailed, match="No space left on device"):
        score_file(Lengths(), rows, out, retry_failed=True, progress=False)
    assert out.read_bytes() == before and sorted(p.name for p in disk.iterdir()) == ["filling", "out.jsonl"]
    filling.unlink()
    assert score_file(Lengths(), rows, out, retry_failed=True, progress=False).num_failed == 0


@pytest.mark.slow
@by_itself
def test_the_command_tells_of_a_full_or_read_only_disk_in_one_line(rows: Path, disk: Path) -> None:
    small_disk(disk)
    with served.running(build=EchoService) as server:
        argv = ["score", "--server", server.http_url, str(rows), "-o", str(disk / "out.jsonl")]
        filling = fill(disk)
        full = io.StringIO()
        with contextlib.redirect_stderr(full):
            assert cli.main([*argv, "--no-progress"]) == 1
        filling.unlink()
        remount(disk, "ro")
        read_only = io.StringIO()
        with contextlib.redirect_stderr(read_only):
            assert cli.main([*argv, "--no-progress"]) in (1, 2)
    assert "No space left on device" in full.getvalue() and "Traceback" not in full.getvalue()
    assert "Read-only file system" in read_only.getvalue() and "Traceback" not in read_only.getvalue()


@pytest.mark.slow
@by_itself
def test_a_server_whose_log_and_checkpoints_are_on_a_full_disk_scores_on_and_trains_again_when_there_is_room(
    disk: Path,
) -> None:
    a, b, c = (request(name, value) for name, value in zip("abc", (3, 5, 7), strict=True))

    def rows_of(asked: object) -> Sequence[np.ndarray]:
        return [getattr(asked, name) for name in ("tokens", "returns", "prev_values", "mask")]

    small_disk(disk, size_kib=256)
    service = ArithmeticService(disk / "critic", with_rewards=True)
    config = ServerConfig(port=0, grpc_port=None)
    with (
        RunningServer(service, config) as server,
        CriticClient(server.http_url, policy=ONCE) as critic,
        RewardClient(server.http_url, model="critic_infer", policy=ONCE) as scorer,
    ):
        assert critic.train(*rows_of(a), train_id="a").result(120).step == 1
        filling = fill(disk)
        with logged_to(disk / "filling"):
            for _ in range(3):
                with pytest.raises(StorageFailed, match="nothing was changed: No space left on device"):
                    critic.train(*rows_of(b), train_id="b").result(120)
                assert scorer.score(tokens=[[1, 2, 3]]).rewards.tolist() == [6.0]
        remount(disk, "ro")
        with pytest.raises(StorageFailed, match=r"No space left|Read-only"):
            critic.save()
        assert scorer.score(tokens=[[4]]).rewards.tolist() == [4.0]
        remount(disk, "rw")
        filling.unlink()
        assert critic.train(*rows_of(b), train_id="b").result(120).step == 2
        assert critic.save().step == 2
        assert critic.train(*rows_of(c), train_id="c").result(120).step == 3
        assert service.trainer.weight == after([a, b, c])


@pytest.mark.slow
@by_itself
def test_a_run_goes_on_over_a_full_disk_and_saves_and_notes_its_metrics_when_there_is_room(disk: Path) -> None:
    def save_policy(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"weights")

    small_disk(disk)
    with mock.patch("guerdon.actor.trackers.TensorBoard"):
        trackers = Trackers(disk, (), "", "", {}, 0)
    saving = CheckpointSaver(RunCheckpoints(disk / "checkpoints", keep=2), None, None)
    runs = [Snapshot(RunState("run", step, {}, {}), save_policy, {}) for step in range(4)]
    trackers.log(0, {"reward": 0.0})
    saving.save_if_due(1, runs[0], Future.result)
    filling = fill(disk)
    for step in (1, 2):
        # More than what of the file's last block is free.
        trackers.log(step, {"reward": float(step), **{f"m{i}": 0.5 for i in range(500 // step**4)}})
        saving.save_if_due(2, runs[step], Future.result)
    assert saving.newest is not None and saving.newest.state.step == 0
    filling.unlink()
    trackers.log(3, {"reward": 3.0})
    saving.save_if_due(2, runs[3], Future.result)
    assert saving.newest.state.step == 3, "what was due is done after the next step"
    trackers.close()
    assert [row["reward"] for row in read_metrics(disk / "metrics.jsonl")] == [0.0, 1.0, 2.0, 3.0]


def test_a_lock_is_one_that_nfs_can_give(tmp_path: Path) -> None:
    """It locks the file's bytes for `flock`, which exclusively is for descriptors that may write alone."""
    with durable.locked(tmp_path / "lock") as file:
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            durable.locked(tmp_path / "lock")
    durable.locked(tmp_path / "lock").close()


def test_without_a_lock_no_descriptor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no locks here") as told:
        durable.locked(tmp_path / "lock")
    assert told.value and len(os.listdir("/proc/self/fd")) == len(before)


def test_new_folders_are_in_those_above_them_before_anything_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    really_sync = os.fsync

    def fsync(descriptor: int) -> None:
        really_sync(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", fsync)
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert sorted(synced) == [str(path) for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")]
    synced.clear()
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert synced == []
    monkeypatch.chdir(tmp_path)
    durable.make_folder(Path("d"))
    assert synced == [str(tmp_path)]
