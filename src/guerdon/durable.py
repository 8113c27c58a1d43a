"""Atomic, durable files and folders with checksums: on the disk whole or not at all, and later damage is detected."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import orjson

from guerdon.errors import StorageFailed

ASIDE = ".aside-"
"""Name prefix of unfinished files and folders; the next start removes leftovers."""
DAMAGED = "damaged-"
"""Name prefix of damaged files and folders."""


class Damaged(Exception):
    """A sealed folder was changed; the text says where."""


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Turns an OSError into StorageFailed; `what` names the failed operation."""
    try:
        yield
    except OSError as e:
        where = f" ({e.filename})" if e.filename else ""
        raise StorageFailed(f"{what}: {e.strerror or e}{where}; make room on the disk, or mend it") from e


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, durably; raises OSError."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Writes a new file atomically and durably.

    Raises OSError; then nothing remains of it, unless the disk refuses the removal, too.
    """
    aside = path.with_name(ASIDE + path.name)
    try:
        with aside.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        aside.rename(path)
        sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Fsyncs a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locked(path: Path) -> TextIO:
    """Opens and locks a file; closing it, or the end of the process, unlocks it.

    Raises BlockingIOError if another process has the lock, OSError if the file cannot be locked.
    """
    # Opened for writing because NFS emulates flock by byte-range locks, which need that.
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


# ------------------------------------------------------------------------------------------- sealed folders


def seal(aside: Path, manifest_name: str, manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Writes the manifest of all files in the folder, and fsyncs everything; raises OSError.

    Returns the size and the SHA-256 of each file, for `verify`.
    """
    files = {}
    for path in sorted(aside.rglob("*")):
        sync(path)
        if path.is_file():
            files[path.relative_to(aside).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    write_new(aside / manifest_name, _sealed(manifest, files))
    return files


def seal_again(folder: Path, manifest_name: str, manifest: dict[str, Any]) -> None:
    """Replaces the manifest of a sealed folder atomically, its files unchanged; raises OSError and Damaged."""
    files = read_manifest(folder, manifest_name)["files"]
    aside = folder / (ASIDE + manifest_name)
    aside.unlink(missing_ok=True)
    write_new(aside, _sealed(manifest, files))
    aside.rename(folder / manifest_name)
    sync(folder)


def place(aside: Path, folder: Path) -> None:
    """Renames a sealed folder to its final name, durably; raises OSError, and then the name does not exist."""
    aside.rename(folder)
    try:
        sync(folder.parent)
    except OSError:
        folder.rename(aside)
        raise


def read_manifest(folder: Path, manifest_name: str) -> dict[str, Any]:
    """Returns the manifest given to `seal`, with `files`; raises Damaged."""
    try:
        sealed = orjson.loads((folder / manifest_name).read_bytes())
        manifest: dict[str, Any] = sealed["manifest"]
        if _seal(manifest) != sealed["sha256"]:
            raise ValueError("it differs from what was written")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise Damaged(f"{manifest_name}: {e}") from e
    return manifest


def verify(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raises Damaged if a file differs from the manifest."""
    for name, expected in files.items():
        path = folder / name
        try:
            if path.stat().st_size != expected["bytes"]:
                raise Damaged(f"{name} has {path.stat().st_size} bytes, not {expected['bytes']}")
            if _sha256(path) != expected["sha256"]:
                raise Damaged(f"{name} has other bytes than were written")
        except OSError as e:
            raise Damaged(f"{name}: {e.strerror}") from e


def remove(folder: Path) -> None:
    """Removes a folder; renames it first, so that a crash leaves none half removed. Raises OSError."""
    shutil.rmtree(folder.rename(folder.with_name(ASIDE + folder.name)))


def _sealed(manifest: dict[str, Any], files: dict[str, dict[str, Any]]) -> bytes:
    # Through JSON and back because the seal covers what will be read.
    content = orjson.loads(orjson.dumps({**manifest, "files": files}))
    return orjson.dumps({"manifest": content, "sha256": _seal(content)}, option=orjson.OPT_INDENT_2)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
