"""The processes below one another on Linux: finds, measures and ends them, by /proc and prctl."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from guerdon.errors import Exit

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """Resource usage of processes: number, private memory in bytes, CPU seconds."""

    num_processes: int
    memory_bytes: int
    cpu_s: float


def can_watch() -> bool:
    """Whether the kernel lists the children of a process."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def adopt_orphans() -> None:
    """Makes descendants whose parent ends children of this process, even if they are in a session of their own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent`, which has forked it, ends; a process that is late ends now."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(Exit.DONE)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(root: int) -> list[int]:
    """Returns the processes below `root`, zombies included; may miss some that start or end meanwhile."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def children(pid: int) -> list[int]:
    """Returns the children of all threads of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def measure(pids: Iterable[int], baseline_bytes: int = 0) -> TreeUsage:
    """Returns what the processes use; `baseline_bytes` of each, inherited by forking, count as its parent's."""
    num_processes, memory_bytes, cpu_s = 0, 0, 0.0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):  # it has ended
            fields = _stat(pid)
            cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S  # with its children's that it has waited for
            memory_bytes += max(0, own_memory(pid) - baseline_bytes)
            num_processes += 1
    return TreeUsage(num_processes, memory_bytes, cpu_s)


def is_exiting(pid: int) -> bool:
    """Whether a process is on its way to its end, or is a zombie."""
    return bool(int(_stat(pid)[6]) & _PF_EXITING)


def _stat(pid: int) -> list[bytes]:
    """Returns what /proc/PID/stat says after the name, from the state on."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def own_memory(pid: int) -> int:
    """Returns the resident bytes of a process that are no file's."""
    return _status(pid, b"RssAnon:") + _status(pid, b"RssShmem:")


def data_bytes(pid: int) -> int:
    """Returns what RLIMIT_DATA counts of a process."""
    return _status(pid, b"VmData:")


def _status(pid: int, key: bytes) -> int:
    with open(f"/proc/{pid}/status", "rb") as file:
        status = file.read()
    _, found, rest = status.partition(b"\n" + key)
    return int(rest.split(None, 1)[0]) * 1024 if found else 0  # a zombie has none


def end_all(timeout_s: float) -> bool:
    """Kills and reaps everything below this process, which adopts orphans; returns whether nothing is left.

    Repeats until the kernel says that there is no child, so that what forks meanwhile is found.
    """
    ends = time.monotonic() + timeout_s
    while True:
        kill(descendants(os.getpid()))
        if not reap_all():
            return True
        if time.monotonic() > ends:
            return False
        time.sleep(_PAUSE_S)


def kill(pids: Iterable[int]) -> None:
    """Sends SIGKILL to the processes."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or is another user's by now
            os.kill(pid, signal.SIGKILL)


def reap_all() -> bool:
    """Reaps all children that have ended, and kills those that were stopped; returns whether any are left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return False
        if not pid:
            return True
        if os.WIFSTOPPED(status):
            kill([pid])


def limit(what: int, value: int) -> None:
    """Lowers a resource limit of this process for good."""
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))
