"""When a run leaves before its last step: at SIGTERM or SIGINT, or when the time is up."""

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
"""Of the time limit, for what comes after the last save."""
_HEED_EVERY_S = 0.5


class Left(BaseException):
    """Goes up through a loop that is asked to stop; Run's `with` block ends it.

    `is_between` says whether policy, memory and critic are as they were between two steps, and so fit to be saved.
    """

    def __init__(self, *, is_between: bool = True) -> None:
        super().__init__()
        self.is_between = is_between


def heeding(future: Future[T], heed: Callable[[], None]) -> T:
    """The future's result; meanwhile `heed` is called now and then, and what it raises ends the waiting."""
    while not wait([future], _HEED_EVERY_S).done:
        heed()
    return future.result()


class Stopping:
    """Says whether to leave now, and why; counts the time limit from when it was made.

    From `listen` to `close` it takes SIGTERM and SIGINT, where this is the main thread: the first one asks the run to
    save and leave, and the second kills it.
    """

    def __init__(self, time_limit: str | None) -> None:
        """Raises ConfigError for a malformed limit."""
        limit = parse_time_limit(time_limit)
        self._deadline = None if limit is None else time.monotonic() + limit
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        """Takes the signals over, once."""
        if threading.current_thread() is threading.main_thread() and not self._handlers:
            self._handlers = {number: signal.signal(number, self._handle) for number in _SIGNALS}

    def close(self) -> None:
        """Gives the signals back; one of several ranks does not heed them any more, and ends when the others do."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler if num_started() == 1 else signal.SIG_IGN)
        self._handlers = {}

    def ask(self) -> None:
        """Asks the run to leave as SIGTERM does; from any thread."""
        if self._signal is None:
            self._signal = signal.SIGTERM

    def left_s(self) -> float:
        """Seconds until the time is up; infinity where there is no limit."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic() - _RESERVE_S)

    def reason(self, seconds_ahead: float) -> str | None:
        """Why to leave now, None to go on; `seconds_ahead` is what goes on would take, the save behind it included."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if seconds_ahead >= self.left_s():
            return TIME_IS_UP
        return None

    def exit_status(self) -> int:
        """The status of a command that left for such a reason: that of a shell for signals."""
        return Exit.TRY_AGAIN if self._signal is None else 128 + self._signal

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        # Not through logging, whose locks the interrupted code may hold.
        name = signal.Signals(number).name
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2,
            f"\n{name}: saving and leaving; once more kills\n".encode(),
        )
