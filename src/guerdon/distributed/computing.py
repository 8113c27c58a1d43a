"""Who computes with models in this process, and who builds one meanwhile; and giving back what is not held any more."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from collections.abc import Iterator


class Computing:
    """Any number compute at once, or one builds.

    While transformers lays a model out it changes for all threads what torch makes by default, such as the dtype of new
    tensors: a forward at that time could compute something else.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_computing = 0
        self._num_building = 0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which nobody builds; waits until that is so."""
        with self._changed:
            while self._num_building:
                self._changed.wait()
            self._num_computing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_computing -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """A context in which nobody else computes or builds; waits until that is so. It must be short."""
        with self._changed:
            while self._num_building:
                self._changed.wait()
            self._num_building = 1  # from now on nobody begins
            while self._num_computing:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._num_building = 0
                self._changed.notify_all()


HERE = Computing()
"""This process's."""


def release() -> None:
    """Gives back the memory of what nothing holds any more, to the device and to the operating system.

    Not so of what was loaded at the start, if only a cycle holds it: it lies outside the garbage collector's rounds,
    and to look through it holds all of this process's threads for half a second.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim()


def trim() -> None:
    """Gives free memory back to the operating system."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library that has it not, as musl
            ctypes.CDLL(None).malloc_trim(0)
