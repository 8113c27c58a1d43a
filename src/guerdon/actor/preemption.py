"""When a run stops before its last step: at SIGTERM or SIGINT, or at the time limit."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import FrameType
from typing import Any, TypeVar

from guerdon.distributed.ranks import num_started
from guerdon.errors import Exit
from guerdon.settings.actors import parse_time_limit

T = TypeVar("T")

TIME_IS_UP = "time limit"

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_RESERVE_S = 1.0
"""Seconds of the time limit that are reserved for the work after the last save."""
_CHECK_EVERY_S = 0.5


class Preempted(BaseException):
    """Unwinds a loop that must stop; Run's `with` block catches it.

    `is_between` says whether policy, memory and critic are as between two steps, and may be saved.
    """

    def __init__(self, *, is_between: bool = True) -> None:
        super().__init__()
        self.is_between = is_between


def wait_for(future: Future[T], check: Callable[[], None]) -> T:
    """Returns the future's result; calls `check` regularly while waiting, whose exceptions end the wait."""
    while not wait([future], _CHECK_EVERY_S).done:
        check()
    return future.result()


class Preemption:
    """Decides whether to stop now, and why; the time limit counts from its creation.

    From `listen` to `close` it handles SIGTERM and SIGINT, if this is the main thread: the first one asks the run to
    save and stop, the second kills it. With several ranks the second is ignored: launchers and terminals may both send
    one.
    """

    def __init__(self, time_limit: str | None) -> None:
        """Raises ConfigError for a malformed limit."""
        limit = parse_time_limit(time_limit)
        self._deadline = None if limit is None else time.monotonic() + limit
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        """Installs the signal handlers, once."""
        if threading.current_thread() is threading.main_thread() and not self._handlers:
            self._handlers = {number: signal.signal(number, self._handle) for number in _SIGNALS}

    def close(self) -> None:
        """Restores the signal handlers; with several ranks, ignores the signals instead until all ranks end."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler if num_started() == 1 else signal.SIG_IGN)
        self._handlers = {}

    def request(self) -> None:
        """Asks the run to stop as SIGTERM does; from any thread."""
        if self._signal is None:
            self._signal = signal.SIGTERM

    def seconds_left(self) -> float:
        """Seconds until the time limit; infinite without one."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic() - _RESERVE_S)

    def reason(self, seconds_ahead: float) -> str | None:
        """Returns the reason to stop now, else None; `seconds_ahead` is the time to continue, including the save."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if seconds_ahead >= self.seconds_left():
            return TIME_IS_UP
        return None

    def exit_status(self) -> int:
        """Returns the command's exit status: 128 + signal number, as in a shell, or "try again" at the time limit."""
        return Exit.TRY_AGAIN if self._signal is None else 128 + self._signal

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        is_alone = num_started() == 1
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL if is_alone else signal.SIG_IGN)
        # Not by logging: the interrupted code may hold its locks.
        text = f"\n{signal.Signals(number).name}: saving and stopping{'; send it again to kill' if is_alone else ''}\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
