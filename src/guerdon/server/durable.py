"""Files that are on the disk whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from guerdon.errors import StorageFailed

ASIDE = ".aside-"
"""How the name of whatever is not finished begins; what a crash left of it is removed at the next start."""


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Turns an OSError into StorageFailed, which says that `what` could not be done, and why."""
    try:
        yield
    except OSError as e:
        where = f" ({e.filename})" if e.filename else ""
        raise StorageFailed(f"{what}: {e.strerror or e}{where}; make room on the server's disk, or mend it") from e


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
