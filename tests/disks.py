"""Small disks that a test can fill and make read-only: real ones, in a child whose mounts nobody else sees."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import in_child

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000


def on_small_disk(folder: Path, work: Callable[[], Any], size_kib: int = 128) -> Any:
    """What `work` returns in a child for which `folder` is a disk of its own; skips where that is not allowed."""
    user, group = os.getuid(), os.getgid()

    def child() -> Any:
        if ctypes.CDLL(None).unshare(NEW_MOUNTS | (NEW_USER if user else 0)):
            return "skip"
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        subprocess.run(["mount", "--make-rprivate", "/"], check=False)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", folder], check=False).returncode:
            return "skip"
        return work()

    result = in_child(child)
    if result == "skip":
        pytest.skip("mounting a small disk is not allowed here")
    return result


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


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
