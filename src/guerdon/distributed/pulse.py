"""Signs of life between the ranks: a dead, stopped or hung one is seen in a set time, whatever the others wait for.

Every rank has a thread that tells rank 0 that it lives, and rank 0 answers each. A process that has died breaks its
connection at once. One that is stopped, or whose host is not reached, is silent for `Ranks.timeout_s`. One that hangs
beats on; while it executes a command that ticks, its ticks stand still.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from guerdon.distributed.ranks import Ranks
from guerdon.errors import RanksLost

log = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Of a rank that ends because another was lost; launchers restart what ends with any number but 0."""
_BREAK_S = 1.0
_IS_WELL = -1
"""What rank 0 answers in place of the number of a rank that is lost."""


class Pulse:
    """The signs of life of this rank, in a thread of their own, from `start` to `stop`.

    `on_lost` is called once, with what is lost, on a thread that computes nothing; where it returns, or is not set, the
    process ends with EXIT_STATUS. `on_stop` is called on rank 0 when another rank was asked to stop, by `ask_to_stop`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.lost: RanksLost | None = None
        self.on_lost: Callable[[RanksLost], None] | None = None
        self.on_stop: Callable[[], None] | None = None
        self._ranks = ranks
        self._break_s = min(_BREAK_S, ranks.timeout_s / 10)
        self._ticks = 0
        self._is_watched = False
        self._wants_stop = False
        self._is_leaving = threading.Event()
        self._is_over = threading.Event()
        self._losing = threading.Lock()
        self._seen: dict[int, tuple[int, float]] = {}
        self._heard: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="guerdon-pulse", daemon=True)

    def start(self) -> None:
        """Begins to beat; the other ranks must do so within `Ranks.timeout_s`."""
        self._thread.start()

    def stop(self) -> None:
        """Ends without a word: from now on no other rank is missed."""
        self._is_leaving.set()
        self._is_over.wait(self._break_s)

    def tick(self, *_: Any) -> None:
        """Says that what this rank executes gets on; takes any arguments, to be a module's hook."""
        self._ticks += 1

    def ask_to_stop(self) -> None:
        """Tells rank 0 that this rank was asked to stop, so that all of them do."""
        self._wants_stop = True

    @contextlib.contextmanager
    def executing(self, is_watched: bool) -> Iterator[None]:
        """While within it, and watched, this rank must tick."""
        self._ticks += 1
        self._is_watched = is_watched
        try:
            yield
        finally:
            self._is_watched = False

    def verdict(self, error: Exception) -> RanksLost:
        """Who is lost, after a connection broke with `error`; waits a moment for the pulse to see it, too."""
        until = time.monotonic() + 2 * self._break_s
        while self.lost is None and time.monotonic() < until:
            time.sleep(0.01)
        if self.lost is None:
            # All beat, but what was sent in part cannot be taken up again.
            lost = RanksLost(f"the ranks do not understand each other: {str(error).splitlines()[0]}; {_ENDS}")
            threading.Thread(target=self._lose, args=(lost,), name="guerdon-lost", daemon=True).start()
            return lost
        return self.lost

    def _run(self) -> None:
        try:
            beat = self._lead if self._ranks.is_leader else self._follow
            while not self._is_leaving.wait(self._break_s):
                beat()
        except _Gone as e:
            if not self._is_leaving.is_set():
                self._end_without(e)
        finally:
            self._is_over.set()

    # ---------------------------------------------------------------------------------------- rank 0

    def _lead(self) -> None:
        """Hears every other rank, and answers it at once."""
        ranks = self._ranks
        # Its own time is the shortest, so that it can tell all others who is lost before they miss it itself.
        patience_s = ranks.timeout_s - 3 * self._break_s
        self._heard.clear()
        for rank in range(1, ranks.size):
            try:
                ticks, is_watched, wants_stop = self._hear(rank, patience_s)
                self._heard.add(rank)
                self._check_gets_on(rank, ticks, is_watched, patience_s)
                if rank == ranks.size - 1:
                    # Last, and with more time: where all wait for one that hangs, rank 0 is not the one to name.
                    self._check_gets_on(0, self._ticks, self._is_watched, patience_s + 2 * self._break_s)
                self._say(rank, _IS_WELL)
                self._heard.discard(rank)
            except _Gone as e:
                self._tell_all(e.rank)
                raise
            if wants_stop and self.on_stop is not None:
                self.on_stop()

    def _check_gets_on(self, rank: int, ticks: int, is_watched: int, patience_s: float) -> None:
        now = time.monotonic()
        before, since = self._seen.get(rank, (-1, now))
        if not is_watched or ticks != before:
            self._seen[rank] = (ticks, now)
        elif now - since > patience_s:
            raise _Gone(rank, f"has not come on with a command for {now - since:.0f} s")

    def _tell_all(self, lost: int) -> None:
        for rank in range(1, self._ranks.size):
            if rank != lost:
                with contextlib.suppress(_Gone):
                    if rank not in self._heard:  # it takes an answer only once its own word was taken
                        self._hear(rank, 3 * self._break_s)
                    self._say(rank, lost)

    # ---------------------------------------------------------------------------------------- the others

    def _follow(self) -> None:
        self._say(0, self._ticks, self._is_watched, self._wants_stop)
        status, *_ = self._hear(0, self._ranks.timeout_s - self._break_s)
        if status >= 0:
            raise _Gone(status, "is lost, says rank 0")

    # ---------------------------------------------------------------------------------------- both

    def _say(self, rank: int, *numbers: int) -> None:
        import torch
        from torch import distributed

        words = torch.zeros(_WORDS, dtype=torch.int64)
        words[: len(numbers)] = torch.tensor(numbers)
        try:
            distributed.send(words, dst=rank, group=self._ranks.heartbeat)
        except RuntimeError as e:  # a stopped process takes nothing, either
            raise _Gone(rank, _how(e), is_silent=_is_late(e)) from e

    def _hear(self, rank: int, patience_s: float) -> list[int]:
        import torch
        from torch import distributed

        words = torch.zeros(_WORDS, dtype=torch.int64)
        try:
            coming = distributed.irecv(words, src=rank, group=self._ranks.heartbeat)
            assert coming is not None
            coming.wait(timedelta(seconds=patience_s))
        except RuntimeError as e:
            raise _Gone(rank, _how(e), is_silent=_is_late(e)) from e
        return words.tolist()

    def _end_without(self, gone: _Gone) -> None:
        member = self._ranks.members[gone.rank]
        own = self._ranks.members[self._ranks.rank]
        if gone.is_silent and member is not own and own.machine and own.machine == member.machine:
            # A stopped process would keep its ports, and hold up the launcher that restarts the others.
            with contextlib.suppress(OSError):
                os.kill(member.pid, signal.SIGKILL)
        self._lose(RanksLost(f"{member} {gone}: {_ENDS}"))

    def _lose(self, lost: RanksLost) -> None:
        with self._losing:
            if self.lost is not None:
                return
            self.lost = lost
        log.critical("%s", lost)
        if self.on_lost is not None:
            self.on_lost(lost)
        # The main thread may wait in a collective for good, so nothing less will do.
        logging.shutdown()
        os._exit(EXIT_STATUS)


class _Gone(Exception):
    """A rank does not answer; `is_silent` where its connection stands."""

    def __init__(self, rank: int, how: str, *, is_silent: bool = False) -> None:
        super().__init__(how)
        self.rank, self.is_silent = rank, is_silent


_WORDS = 3
_ENDS = "this process ends, and comes back where its launcher restarts it"


def _is_late(error: Exception) -> bool:
    return "imed out" in str(error)


def _how(error: Exception) -> str:
    return "has not been heard of in time" if _is_late(error) else "has ended: its connection broke"
