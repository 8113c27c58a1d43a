"""Keeps building a model apart from computing with one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Computing:
    """A readers-writer lock: any number compute at once, or one builds.

    While transformers instantiates a model it changes torch's defaults for all threads, such as the dtype of new
    tensors: a concurrent forward could compute something else.

    Writers have priority, with one exception: while a long reader runs, such as a critic's train step, short readers
    may still enter. So loading a model does not make rewards wait for a critic on another device.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_computing = 0
        self._num_long = 0
        self._num_building = 0

    @property
    def is_building(self) -> bool:
        """Whether somebody builds, or waits for it."""
        return self._num_building > 0

    @contextlib.contextmanager
    def computing(self, *, is_long: bool = False) -> Iterator[None]:
        """Read lock; held for seconds if it `is_long`."""
        with self._changed:
            while self._num_building and (is_long or not self._num_long):
                self._changed.wait()
            self._num_computing += 1
            self._num_long += is_long
        try:
            yield
        finally:
            with self._changed:
                self._num_computing -= 1
                self._num_long -= is_long
                self._changed.notify_all()

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Write lock; the context must be short."""
        with self._changed:
            while self._num_building:
                self._changed.wait()
            self._num_building = 1  # blocks newcomers
            while self._num_computing:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._num_building = 0
                self._changed.notify_all()


HERE = Computing()
"""The lock of this process."""
