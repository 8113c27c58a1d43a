"""Returns unused memory to the device and to the operating system; keeps the garbage collector off what stays."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator


def release() -> None:
    """Collects garbage and returns free memory to the device and to the operating system.

    Does not find cycles among objects loaded at the start, which are frozen out of the garbage collection: searching
    them stops all threads for half a second.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim()


@contextlib.contextmanager
def holding_collections() -> Iterator[None]:
    """Disables the garbage collector inside the context until `resume_collections`, for the import of libraries.

    All that is imported stays, and to search it again and again takes a tenth of a server's start.
    """
    gc.disable()
    try:
        yield
    finally:
        resume_collections()


def resume_collections() -> None:
    """Enables the garbage collector if it is held, which then skips all objects that there are."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def trim() -> None:
    """Returns free memory to the operating system."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not in every C library, for example musl
            ctypes.CDLL(None).malloc_trim(0)
