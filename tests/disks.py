"""Small disks that a test can fill and make read-only: real ones, for tests that run `by_itself`."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000


def small_disk(folder: Path, size_kib: int = 128) -> None:
    """Makes of `folder` a disk of its own, for this process and its children; skips where that is not allowed."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(NEW_MOUNTS | (NEW_USER if user else 0)):
        pytest.skip("a process may not have mounts of its own here")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["mount", "--make-rprivate", "/"], check=False)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a small disk is not allowed here")


def remount(folder: Path, how: str) -> None:
    """Makes it read-only (`ro`), also while files on it are open for writing, or as it was (`rw`)."""
    if how == "rw":
        subprocess.run(["umount", folder], check=True)
    else:
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


def fill(folder: Path) -> Path:
    """Takes all the room that there is."""
    path = folder.parent / folder.name / "filling"
    with path.open("wb", buffering=0) as f:
        for size in (4096, 1):
            try:
                while True:
                    f.write(b"x" * size)
            except OSError:
                pass
    return path
