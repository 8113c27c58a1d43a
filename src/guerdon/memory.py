"""Returns unused memory to the device and to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys


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


def trim() -> None:
    """Returns free memory to the operating system."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not in every C library, for example musl
            ctypes.CDLL(None).malloc_trim(0)
