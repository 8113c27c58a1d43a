"""Files and folders that are on the disk whole, or not at all, and in which later damage is seen."""

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
"""How the name of whatever is not finished begins; what a crash left of it is removed at the next start."""
DAMAGED = "damaged-"
"""How the name of a folder begins that is not as it was sealed."""


class Damaged(Exception):
    """A sealed folder is not as it was; the text says what of it."""


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Turns an OSError into StorageFailed, which says that `what` could not be done, and why."""
    try:
        yield
    except OSError as e:
        where = f" ({e.filename})" if e.filename else ""
        raise StorageFailed(f"{what}: {e.strerror or e}{where}; make room on the disk, or mend it") from e


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, where they are not there yet; when this returns they outlive a power cut.

    Raises OSError.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that is not there yet; when this returns it outlives a power cut.

    Raises OSError; then nothing remains of it, unless the disk does not even take back.
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
    """Makes a file's content, or a folder's list of names, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locked(path: Path) -> TextIO:
    """An open file whose lock ends with it, and so with the process; raises BlockingIOError where another has it.

    Raises OSError where there can be no lock.
    """
    # To write, too: NFS makes of it a lock on the file's bytes, and such a one is for whoever may write them.
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


# ------------------------------------------------------------------------------------------- sealed folders


def seal(aside: Path, manifest_name: str, manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Writes the manifest of everything in the folder, and syncs it all; raises OSError.

    Returns what `verify` wants: the size and the SHA-256 of each file.
    """
    files = {}
    for path in sorted(aside.rglob("*")):
        sync(path)
        if path.is_file():
            files[path.relative_to(aside).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    write_new(aside / manifest_name, _sealed(manifest, files))
    return files


def seal_again(folder: Path, manifest_name: str, manifest: dict[str, Any]) -> None:
    """Puts another manifest in the place of a sealed folder's, whose files are the same; raises OSError, and Damaged.

    A crash leaves the one or the other.
    """
    files = read_manifest(folder, manifest_name)["files"]
    aside = folder / (ASIDE + manifest_name)
    aside.unlink(missing_ok=True)
    write_new(aside, _sealed(manifest, files))
    aside.rename(folder / manifest_name)
    sync(folder)


def place(aside: Path, folder: Path) -> None:
    """Gives a sealed folder its name, by which it is there from now on; raises OSError, and then it is not."""
    aside.rename(folder)
    try:
        sync(folder.parent)
    except OSError:
        folder.rename(aside)
        raise


def read_manifest(folder: Path, manifest_name: str) -> dict[str, Any]:
    """What `seal` was given, and `files`; raises Damaged."""
    try:
        sealed = orjson.loads((folder / manifest_name).read_bytes())
        manifest: dict[str, Any] = sealed["manifest"]
        if _seal(manifest) != sealed["sha256"]:
            raise ValueError("it is not what was written")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise Damaged(f"{manifest_name}: {e}") from e
    return manifest


def verify(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raises Damaged where a file of the folder is not as the manifest has it."""
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
    """Removes a folder by one rename first, so that a crash leaves none half removed; raises OSError."""
    shutil.rmtree(folder.rename(folder.with_name(ASIDE + folder.name)))


def _sealed(manifest: dict[str, Any], files: dict[str, dict[str, Any]]) -> bytes:
    # Through JSON and back, as the seal is over what will be read.
    content = orjson.loads(orjson.dumps({**manifest, "files": files}))
    return orjson.dumps({"manifest": content, "sha256": _seal(content)}, option=orjson.OPT_INDENT_2)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
