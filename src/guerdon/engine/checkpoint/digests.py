"""BLAKE2b of whole files, hashed in threads and cached until a file changes.

A digest is cached in memory and in the user's cache folder, keyed by the file's device, inode, size, mtime and ctime in
nanoseconds: a program that overwrites a file and restores its mtime, as `cp -p` does, cannot restore its ctime.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from guerdon.errors import CheckpointError

CHUNK = 64 << 20
"""Bytes that one thread hashes at once; a file's digest is the digest of its chunks' digests."""
READ = 1 << 20
SETTLED_S = 2.0
"""A file changed more recently may change again with the same mtime and ctime, because their resolution is limited."""
MOST_KEPT = 1000

_cached: dict[tuple[str, str], str] = {}


def digest_files(paths: tuple[Path, ...]) -> Future[list[str]]:
    """Starts to hash the files and returns a future of their digests, 32 hex digits each.

    The future raises CheckpointError if a file cannot be read. The process does not wait for the threads at exit.
    """
    future: Future[list[str]] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(_digests(paths))
        except OSError as e:
            error = CheckpointError(f"{e.filename} cannot be read: {e.strerror}", "repair the disk, or copy it again")
            error.__cause__ = e
            future.set_exception(error)
        except BaseException as e:
            future.set_exception(e)

    _start(run)
    return future


def _digests(paths: tuple[Path, ...]) -> list[str]:
    states = [_state(path) for path in paths]
    found = [_look_up(*state[:2]) for state in states]
    missing = [i for i, digest in enumerate(found) if not digest]
    sizes = {i: paths[i].stat().st_size for i in missing}
    chunks = [(i, start) for i in missing for start in range(0, sizes[i], CHUNK)]
    parts = _map(lambda chunk: _hash_chunk(paths[chunk[0]], chunk[1]), chunks)
    for i in missing:
        digest = hashlib.blake2b(digest_size=16)
        for (owner, _), part in zip(chunks, parts, strict=True):
            if owner == i:
                digest.update(part)
        found[i] = digest.hexdigest()
        inode, stamp, is_settled = states[i]
        if is_settled and _state(paths[i])[1] == stamp:
            _cache(inode, stamp, found[i])
    return found


def _hash_chunk(path: Path, start: int) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    buffer = memoryview(bytearray(READ))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = CHUNK
        while left and (count := file.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def _map(work: Callable[[Any], bytes], items: list[Any]) -> list[bytes]:
    """Maps `work` over the items on half of this process's cores; whoever loads the files needs the other half."""
    todo = deque(enumerate(items))
    results: list[Any] = [b""] * len(items)
    errors: list[BaseException] = []

    def run() -> None:
        while todo and not errors:
            try:
                i, item = todo.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[i] = work(item)
            except BaseException as e:
                errors.append(e)

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = [_start(run) for _ in range(min(len(items), num_cores // 2) - 1)]
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _start(run: Callable[[], None]) -> threading.Thread:
    # A daemon, unlike threads of concurrent.futures: a failed start must not wait for it.
    thread = threading.Thread(target=run, name="guerdon-hash", daemon=True)
    thread.start()
    return thread


# ------------------------------------------------------------------------------------------------- the cache


def _state(path: Path) -> tuple[str, str, bool]:
    """Returns which file it is, its state, and whether it has not changed for a while."""
    with path.open("rb") as file:  # opening makes NFS fetch fresh attributes
        stat = os.fstat(file.fileno())
    stamp = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    return f"{stat.st_dev:x}-{stat.st_ino:x}", stamp, time.time() - stat.st_ctime > SETTLED_S


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "guerdon" / "digests"


def _entry(inode: str, stamp: str, digest: str) -> str:
    check = hashlib.blake2b(f"{inode} {stamp} {digest}".encode(), digest_size=8).hexdigest()
    return f"{stamp} {digest} {check}\n"


def _look_up(inode: str, stamp: str) -> str:
    """Returns the cached digest of the file in that state, empty if there is none."""
    digest = _cached.get((inode, stamp), "")
    with contextlib.suppress(OSError, RuntimeError, ValueError, IndexError):  # no home, no file, or a corrupt one
        if not digest:
            text = (_folder() / inode).read_text(encoding="ascii")
            digest = text.split()[-2]
            if text != _entry(inode, stamp, digest):
                return ""
            _cached[inode, stamp] = digest
    return digest


def _cache(inode: str, stamp: str, digest: str) -> None:
    """Caches the digest; if the cache folder is not writable, the next start hashes again."""
    _cached[inode, stamp] = digest
    with contextlib.suppress(OSError, RuntimeError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{inode}-{os.getpid()}-{threading.get_ident()}"
        aside.write_text(_entry(inode, stamp, digest), encoding="ascii")
        aside.replace(folder / inode)
        kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in kept[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
