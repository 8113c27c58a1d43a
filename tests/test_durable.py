"""Locks and folders that critics and actors begin with, on whichever file system these are."""

import fcntl
import os
from pathlib import Path

import pytest

from guerdon import durable


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
