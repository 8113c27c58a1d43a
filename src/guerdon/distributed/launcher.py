"""Starts the ranks of one host, and starts them again when one is lost.

```
guerdon serve M --data-parallel 2      `launch`: the store in which the ranks find each other, signals, exit statuses
└─ fork server                         has imported what the ranks need, and computes nothing
   ├─ rank 0                           the same code as under torchrun
   └─ rank 1
```

Not torch.distributed.launcher: it restarts after any failure, a wrong setting included; it keeps a rank that has
returned alive until all have, so that the others would not miss it; and its rendezvous listens on all networks and
unpickles what it receives. The store of this one listens on loopback.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any

from guerdon.distributed.layout import THREADS, Layout
from guerdon.errors import Exit, StartError

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HOST = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LEAVING_S = 30.0
"""How long ranks may take to end once another has failed, or this process was killed; the time that torchrun gives."""
_UNKNOWN = 255
"""The exit status of processes whose fork server was killed."""


def launch(layout: Layout, work: Callable[[], int], *, max_restarts: int, preload: Sequence[str]) -> int:
    """Runs `work` on every rank until all have ended; returns the first exit status that is not 0.

    `work`, which must be picklable, returns a rank's exit status. If a rank is lost, all are started again, at most
    `max_restarts` times. SIGTERM and SIGINT are passed on as one SIGTERM to each rank. `preload` names the modules that
    are imported once for all ranks and restarts; importing them may start no thread.
    """
    launched = _Launch(layout, work)
    with launched.handling_signals():
        os.environ.setdefault(THREADS, str(layout.num_threads))  # read by the ranks' libraries, on import
        _start_fork_server(preload)
        num_left = max_restarts
        while True:
            ended = launched.run_once()
            if ended is None or launched.signal_number is not None or not ended.is_lost:
                return launched.status(ended)
            if ended.status == _UNKNOWN:
                log.critical("the process that forks the ranks was killed: they all end")
                return Exit.RANK_LOST
            if not num_left:
                log.critical("%s, and no restart is left of %d (max_restarts)", ended, max_restarts)
                return Exit.RANK_LOST
            num_left -= 1
            log.error("%s: all ranks start again, restarts left: %d", ended, num_left)


def _start_fork_server(preload: Sequence[str]) -> None:
    """Starts the process that forks the ranks, with _SIGNALS blocked, as in the ranks until they unblock them.

    Some send signals to every process: a terminal, systemd, Slurm.
    """
    multiprocessing.set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()  # else it is started next, and unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class _Ended:
    """The first rank that failed."""

    rank: int
    status: int
    """As of `Process.exitcode`: -9 if SIGKILL killed it."""

    @property
    def is_lost(self) -> bool:
        return self.status < 0 or self.status in (Exit.RANK_LOST, _UNKNOWN)

    def __str__(self) -> str:
        if self.status < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.status).name}"
        return f"rank {self.rank} ended with status {self.status}"


class _Launch:
    """The ranks' processes, seen from the process that starts them."""

    def __init__(self, layout: Layout, work: Callable[[], int]) -> None:
        self.signal_number: int | None = None
        self._layout, self._work = layout, work
        self._context = multiprocessing.get_context("forkserver")
        # Nothing is sent: closing it stops the ranks, also if this process was killed.
        self._told, self._telling = self._context.Pipe(duplex=False)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Within the context SIGTERM and SIGINT stop the ranks; after the first, and on exit, they are ignored."""
        for number in _SIGNALS:
            signal.signal(number, self._stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _stop(self, number: int, _: FrameType | None) -> None:
        if self.signal_number is None:
            self.signal_number = number
            self._telling.close()

    def status(self, ended: _Ended | None) -> int:
        """Returns the exit status of the whole command."""
        if ended is None or ended.status == -signal.SIGTERM:  # it had not begun
            return Exit.DONE
        if ended.is_lost:
            return Exit.RANK_LOST
        if ended.status == Exit.TERMINATED and self.signal_number == signal.SIGINT:  # ranks get SIGTERM for both
            return Exit.INTERRUPTED
        return ended.status

    def run_once(self) -> _Ended | None:
        """Starts all ranks and waits until all have ended; returns the first that failed."""
        from torch.distributed import TCPStore

        from guerdon.distributed.joining import interface_of

        listener = socket.create_server((_HOST, 0))
        port, number = listener.getsockname()[1], listener.detach()
        store = TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=number)
        # Keeps gloo off the networks.
        loopback = None if _INTERFACE in os.environ else interface_of(_HOST)
        processes = []
        for rank in range(self._layout.size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._layout.size),
                "LOCAL_WORLD_SIZE": str(self._layout.size),
                "MASTER_ADDR": _HOST,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                **({} if loopback is None else {_INTERFACE: loopback}),
            }
            process = self._context.Process(target=_run_rank, args=(self._work, environment, self._told))
            try:
                process.start()
            except (EOFError, OSError) as e:
                raise StartError(
                    "the process that starts the ranks has ended", "its own message, above, says why"
                ) from e
            processes.append(process)
        return _wait(processes)


def _wait(processes: list[ForkServerProcess]) -> _Ended | None:
    """Waits until all ranks have ended; as soon as one fails, ends the others."""
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
    first: _Ended | None = None
    until = math.inf
    while running:
        ready = connection.wait(list(running), None if until == math.inf else max(0.0, until - time.monotonic()))
        failed = []
        for sentinel in ready:
            rank = running.pop(sentinel)
            processes[rank].join()
            if status := processes[rank].exitcode:
                failed.append(_Ended(rank, status))
        if failed and first is None:
            first = min(failed, key=lambda ended: ended.status)  # a negative one, killed, is why the others ended
            until = time.monotonic() + _LEAVING_S
            for rank in running.values():
                processes[rank].terminate()
        elif not ready:
            until = math.inf
            for rank in running.values():
                processes[rank].kill()
    return first


def _run_rank(work: Callable[[], int], environment: dict[str, str], told: Connection) -> None:
    """Runs in each rank's process, which the fork server has forked with _SIGNALS blocked."""
    os.environ.update(environment)
    with contextlib.suppress(OSError):  # not on Linux
        Path("/proc/self/comm").write_text(f"guerdon-rank-{environment['RANK']}")  # for ps and top
    if told.poll():
        return
    threading.Thread(target=_obey, args=(told,), name="guerdon-launcher", daemon=True).start()
    # SIGINT stays blocked: the launcher passes Ctrl-C on, and two signals would be one too many.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    try:
        status = work()
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not
    sys.exit(status)


def _obey(told: Connection) -> None:
    """Sends SIGTERM to this process once the launcher stops or is gone; if it is gone, kills a rank that stays."""
    launcher, main_thread = multiprocessing.parent_process(), threading.main_thread().ident
    assert launcher is not None and main_thread is not None
    told.poll(None)
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and launcher.is_alive():
        time.sleep(0.05)  # it starts; if it were killed now, the others would report its loss
    signal.pthread_kill(main_thread, signal.SIGTERM)
    launcher.join()  # it ends after its ranks, unless it was killed
    time.sleep(_LEAVING_S)
    os.kill(os.getpid(), signal.SIGKILL)
