"""Processes that are killed with SIGKILL, by themselves or from outside, and started again."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from processes import environment

FORKS = multiprocessing.get_context("forkserver")

Kill = tuple[str, int] | float
"""A point at which a process kills itself, with the count of the call; or the seconds after which it is killed."""
Points = dict[str, tuple[type, str, bool]]
"""By name: a class, its method, and whether the process dies before the call or after it."""


PRELOADED = [
    "killed_actor",
    "killed_critic",
    "guerdon.engine.checkpoint.reward_models",
    "transformers.models.llama.modeling_llama",
    "torch.utils.tensorboard",
    "uvloop",
    "frozen_imports",
]
"""What the children of FORKS have imported when they start, so that a restart takes a fraction of a second."""


@contextlib.contextmanager
def forkserver() -> Iterator[None]:
    """Imports what the children need once, in the process that they are forked from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{environment()['PYTHONPATH']}:{Path(__file__).parent}")
        FORKS.set_forkserver_preload(PRELOADED)
        yield


def kill_at(points: Points, point: str | None, nth: int) -> None:
    """Makes this process die at the n-th call of what `point` names; None lets it live."""
    if point is None:
        return
    cls, name, before = points[point]
    original = getattr(cls, name)
    calls = itertools.count(1)

    @functools.wraps(original)
    def wrapped(*args: Any, **kw: Any) -> Any:
        is_it = next(calls) == nth
        if is_it and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kw)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(cls, name, wrapped)


class Restarted:
    """A process that is started again whenever it was killed, until it ends otherwise.

    It runs `target(*args, point, nth)`, where the last two are the next of `kills`. A number among these is the time
    after which it is killed from outside, counted from when it listens on `port`, or without one from its start. The
    process after the last kill lives. At the end of the `with` block it is terminated.
    """

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...], kills: Sequence[Kill], port: int | None = None
    ) -> None:
        self.num_kills = 0
        self.exit_code: int | None = None
        self._target, self._args = target, args
        self._kills = kills
        self._port = port
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Restarted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def wait(self, timeout_s: float) -> int | None:
        """Returns its exit status if it ends by itself within the time, else None."""
        self._thread.join(timeout_s)
        return self.exit_code

    def _run(self) -> None:
        for kill in [*self._kills, None]:
            point, nth = kill if isinstance(kill, tuple) else (None, 0)
            process = FORKS.Process(target=self._target, args=(*self._args, point, nth), daemon=True)
            process.start()
            if isinstance(kill, float):
                self._wait_until_it_answers(process)
                end = time.monotonic() + kill
                while process.is_alive() and not self._stopping.is_set() and time.monotonic() < end:
                    process.join(0.005)
                if not self._stopping.is_set():
                    process.kill()
            while process.is_alive() and not self._stopping.is_set():
                process.join(0.02)
            if self._stopping.is_set():
                process.terminate()
            process.join()
            if process.exitcode != -signal.SIGKILL:
                self.exit_code = process.exitcode
                return
            self.num_kills += 1

    def _wait_until_it_answers(self, process: BaseProcess) -> None:
        while self._port is not None and process.is_alive() and not self._stopping.wait(0.005):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
