"""Heartbeats between the ranks: detect a dead, stopped or hung rank in bounded time, even inside a collective.

Every rank has a thread that sends heartbeats to rank 0, which answers each. A dead process breaks its connection at
once. A stopped one, or one on an unreachable host, is silent for `Ranks.timeout_s`. A hung one still beats, but during
a command that ticks its ticks stand still. One that failed alone reports it while it waits for the others, which may
wait for it inside a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from guerdon.distributed.ranks import IN_TALK, Ranks
from guerdon.errors import Exit, RanksLost, first_line

log = logging.getLogger(__name__)

EXIT_STATUS = int(Exit.RANK_LOST)
"""Exit status of a rank that ends because another was lost; launchers restart on any status but 0."""
_BREAK_S = 1.0
_FAREWELL_S = 10.0
"""How long a stopping rank waits for the others."""
_IS_WELL, _LEAVES = -1, -2
"""Answers of rank 0; any other answer is the number of a lost rank."""


class Pulse:
    """The heartbeats of this rank, in threads of their own, from `start` to `stop`.

    Calls `on_lost` once with the loss, on a thread that computes nothing; after that the process ends with EXIT_STATUS.
    Calls `on_stop` on rank 0 when another rank has called `ask_to_stop`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.lost: RanksLost | None = None
        self.on_lost: Callable[[RanksLost], None] | None = None
        self.on_stop: Callable[[], None] | None = None
        self._ranks = ranks
        self._break_s = min(_BREAK_S, ranks.timeout_s / 10)
        # Shorter on rank 0, so that it can name the lost rank before the others miss rank 0 itself.
        self._patience_s = ranks.timeout_s - (3 if ranks.is_leader else 1) * self._break_s
        self._is_watched = False
        self._wants_stop = False
        self._answer = _IS_WELL
        self._is_leaving = threading.Event()
        self._is_ending = False
        self._news = threading.Event()
        self._have_been_told = threading.Event()
        self._losing = threading.Lock()
        self._lines = [
            _Connection(rank, ranks, self._news) for rank in (range(1, ranks.size) if ranks.is_leader else [0])
        ]
        self._judge = _Judge(self._patience_s, self._break_s)
        self._unlogged: tuple[int, float] = (0, 0.0)

    def start(self) -> None:
        """Starts the heartbeats; the other ranks must start theirs within `Ranks.timeout_s`."""
        talk = self._hear_out if self._ranks.is_leader else self._speak
        for line in self._lines:
            line.open(talk)
        threading.Thread(target=self._watch, name="guerdon-pulse", daemon=True).start()
        atexit.register(self._end)

    def stop(self) -> None:
        """Stops the heartbeats, and waits a moment for the others to stop theirs; no rank is missed from now on."""
        self._leave(min(_FAREWELL_S, self._ranks.timeout_s))

    def _end(self) -> None:
        """Ends the threads if the process exits without `stop`; the others see their connections break.

        Otherwise Python would end threads inside gloo by pthread_exit, which aborts the process.
        """
        self._is_ending = True
        self._leave(3 * self._break_s)

    def _leave(self, within_s: float) -> None:
        self._is_leaving.set()
        self._news.set()
        until = time.monotonic() + within_s
        for line in self._lines:
            line.close(until - time.monotonic())

    def tick(self, *_: Any) -> None:
        """Reports progress; takes any arguments, to be a module's hook."""
        self._ranks.doing.ticks += 1

    def ask_to_stop(self) -> None:
        """Tells rank 0 that this rank was asked to stop, so that all ranks stop."""
        self._wants_stop = True

    @contextlib.contextmanager
    def executing(self, is_watched: bool) -> Iterator[None]:
        """Inside, if `is_watched`, this rank must tick unless it waits for others (`Ranks.waiting`)."""
        self._ranks.doing.ticks += 1
        self._is_watched = is_watched
        try:
            yield
        finally:
            self._is_watched = False

    def verdict(self, error: Exception) -> RanksLost:
        """Returns who is lost after a connection broke with `error`, or the ranks fell out of step.

        Waits briefly until the pulse has seen it and notified the others.
        """
        until = time.monotonic() + 2 * self._break_s
        while self.lost is None and time.monotonic() < until:
            time.sleep(0.01)
        if self.lost is None:
            # All ranks beat, but a message that was sent in part cannot be resumed.
            first = first_line(error)
            lost = RanksLost(f"the ranks do not understand each other: {first}; {_ENDS}")
            threading.Thread(target=self._lose, args=(lost, self._ranks.rank), name="guerdon-lost", daemon=True).start()
            self._have_been_told.wait(4 * self._break_s)
            return lost
        self._have_been_told.wait(4 * self._break_s)
        return self.lost

    # ---------------------------------------------------------------------------------------- what is said

    def _hear_out(self, line: _Connection) -> None:
        """Runs on rank 0: answers another rank's heartbeats until one of the two leaves."""
        while True:
            line.hear()
            if line.words[_LEAVING] or self._is_ending:
                return
            answer = _LEAVES if self._is_leaving.is_set() and self.lost is None else self._answer
            line.say(answer, self._ranks.doing.num_gathered)
            line.has_been_told = answer >= 0
            if answer == _LEAVES:
                return

    def _speak(self, line: _Connection) -> None:
        """Runs on the other ranks: sends heartbeats to rank 0 until one of the two leaves."""
        while True:
            is_leaving = self._is_leaving.wait(self._break_s)
            if self._is_ending:
                return
            doing = self._ranks.doing
            line.say(doing.ticks, self._must_tick(), doing.failed, self._wants_stop, is_leaving)
            if is_leaving:
                return
            line.hear()
            if line.words[_ANSWER] == _LEAVES:
                return
            if line.words[_ANSWER] >= 0:
                self._news.set()

    def _must_tick(self) -> bool:
        return self._is_watched and not self._ranks.doing.num_waits

    # ---------------------------------------------------------------------------------------- what is made of it

    def _watch(self) -> None:
        pause_s = self._break_s / 4
        before = time.monotonic()
        while True:
            self._news.wait(pause_s)
            self._news.clear()
            if self._is_leaving.is_set():
                return
            now = time.monotonic()
            if (late_s := now - before - pause_s) > self._break_s:  # this process itself was stopped, and heard nobody
                for line in self._lines:
                    line.heard_at += late_s
            before = now
            try:
                self._look(now)
            except _Gone as e:
                if not self._is_leaving.is_set():
                    self._end_without(e, now)
                return

    def _look(self, now: float) -> None:
        """Raises _Gone if a rank is lost."""
        lines = [line for line in self._lines if not line.has_left]
        if not self._ranks.is_leader and self._lines[0].words[_ANSWER] >= 0:
            raise _Gone(self._lines[0].words[_ANSWER], "is lost, says rank 0")
        for line in lines:
            if line.is_broken:
                raise _Gone(line.rank, "has ended: its connection broke")
        for line in lines:
            if now - line.heard_at > self._patience_s:
                raise _Gone(line.rank, "has not been heard of in time")
        doing = self._ranks.doing
        num_gathered = doing.num_gathered
        if self._ranks.is_leader:
            told = {0: (doing.ticks, self._must_tick(), doing.failed)}
            told |= {line.rank: (line.words[0], bool(line.words[1]), line.words[2]) for line in lines}
            self._judge.look(told, num_gathered, now)
            if self.on_stop is not None and any(line.words[_WANTS_STOP] for line in lines):
                self.on_stop()
        else:
            num_gathered = self._lines[0].words[_NUM_GATHERED]
        self._log_failure(doing.failure if is_open(doing.failed, num_gathered) else None, now)

    def _log_failure(self, failure: BaseException | None, now: float) -> None:
        """Logs an error with which this rank has waited for the others for a beat; if all fail, it waits less."""
        # By id: a reference to the error would keep its frames' tensors alive.
        before, since = self._unlogged
        number = 0 if failure is None else id(failure)
        if number != before:
            self._unlogged = (number, now)
        elif failure is not None and now - since > self._break_s:
            log.error("rank %d has failed, and waits for the others", self._ranks.rank, exc_info=failure)
            self._unlogged = (number, _LOGGED)

    def _end_without(self, gone: _Gone, now: float) -> None:
        own = self._ranks.members[self._ranks.rank]
        for line in self._lines:
            member = self._ranks.members[line.rank]
            is_silent = not line.has_left and not line.is_broken and now - line.heard_at > self._patience_s / 2
            if is_silent and own.machine and own.machine == member.machine:
                # A stopped process would keep its ports and block the launcher's restart.
                with contextlib.suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)
        self._lose(RanksLost(f"{self._ranks.members[gone.rank]} {gone}: {_ENDS}"), gone.rank)

    def _lose(self, lost: RanksLost, rank: int) -> None:
        with self._losing:
            if self.lost is not None:
                return
            self.lost = lost
        self._answer = rank
        failure, (number, since) = self._ranks.doing.failure, self._unlogged
        if failure is not None and id(failure) == number and since != _LOGGED:
            log.error("rank %d has failed, and waited for the others", self._ranks.rank, exc_info=failure)
        log.critical("%s", lost)
        last_words = threading.Thread(target=self.on_lost, args=(lost,), name="guerdon-lost", daemon=True)
        if self.on_lost is not None:
            last_words.start()
        if self._ranks.is_leader:
            until = time.monotonic() + 3 * self._break_s
            while not all(line.is_past_telling(self._patience_s / 2) for line in self._lines):
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
        self._have_been_told.set()
        if self.on_lost is not None:
            last_words.join()
        # The main thread may wait in a collective for ever, so exit hard.
        logging.shutdown()
        os._exit(EXIT_STATUS)


class _Connection:
    """The connection to one other rank, on a thread of its own because gloo only has blocking receives.

    Waits without a timeout because gloo closes the whole group after one.
    """

    def __init__(self, rank: int, ranks: Ranks, news: threading.Event) -> None:
        self.rank, self._group, self._news = rank, ranks.heartbeat, news
        self.words = [0] * _WORDS if ranks.is_leader else [_IS_WELL, 0]
        self.heard_at = time.monotonic()
        self.is_broken = self.has_left = self.has_been_told = False
        self._thread: threading.Thread | None = None

    def open(self, talk: Callable[[_Connection], None]) -> None:
        self.heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(talk,), name=f"guerdon-pulse-{self.rank}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))

    def _run(self, talk: Callable[[_Connection], None]) -> None:
        try:
            talk(self)
            self.has_left = True
        except RuntimeError:
            self.is_broken = True
        self._news.set()

    def is_past_telling(self, patience_s: float) -> bool:
        """Whether the rank has been notified of a loss, or is unreachable."""
        is_silent = time.monotonic() - self.heard_at > patience_s
        return self.has_been_told or self.has_left or self.is_broken or is_silent

    def say(self, *numbers: int) -> None:
        import torch
        from torch import distributed

        words = torch.zeros(_WORDS, dtype=torch.int64)
        words[: len(numbers)] = torch.tensor(numbers)
        going = distributed.isend(words, dst=self.rank, group=self._group)
        assert going is not None
        going.wait(_ENDLESS)  # a stopped process takes nothing

    def hear(self) -> None:
        import torch
        from torch import distributed

        words = torch.zeros(_WORDS, dtype=torch.int64)
        coming = distributed.irecv(words, src=self.rank, group=self._group)
        assert coming is not None
        coming.wait(_ENDLESS)
        self.words, self.heard_at = words.tolist(), time.monotonic()


class _Judge:
    """Finds the rank that blocks the others, from all ranks' reports."""

    def __init__(self, patience_s: float, break_s: float) -> None:
        self._patience_s, self._break_s = patience_s, break_s
        self._still: dict[int, tuple[int, float]] = {}
        self._failing: dict[int, float] = {}
        self._moved: tuple[int, float] = (-1, 0.0)

    def look(self, told: dict[int, tuple[int, bool, int]], num_gathered: int, now: float) -> None:
        """Raises _Gone; `told` has each rank's ticks, whether it must tick, and the command that it failed in."""
        total = sum(ticks for ticks, _, _ in told.values())
        if total != self._moved[0]:
            self._moved = (total, now)
        for rank, (ticks, must_tick, failed) in told.items():
            if not must_tick or self._still.get(rank, (-1, now))[0] != ticks:
                self._still[rank] = (ticks, now)
            if is_open(failed, num_gathered):
                self._failing.setdefault(rank, now)
            else:
                self._failing.pop(rank, None)
        ages = {rank: now - since for rank, (_, since) in self._still.items()}
        # Rank 0 last and with more time: if all wait for a hung rank, rank 0 is not the one to blame.
        limits = {rank: self._patience_s + (0 if rank else 2 * self._break_s) for rank in ages}
        late = sorted((rank for rank in ages if ages[rank] > limits[rank]), key=lambda rank: (not rank, -ages[rank]))
        alone = {rank: now - max(since, self._moved[1]) for rank, since in self._failing.items()}
        limit = ages[late[0]] - 3 * self._break_s if late else self._patience_s
        for rank, age in alone.items():
            if age > limit:
                raise _Gone(rank, f"failed alone, as its log says, and the others have waited {age:.0f} s for it")
        if late:
            first, *_ = late
            near = [r for r in sorted(ages) if r != first and ages[r] > ages[first] - 3 * self._break_s]
            text = f"has not come on with a command for {ages[first]:.0f} s"
            raise _Gone(first, text + (f", nor has rank {', '.join(map(str, near))}" if near else ""))


def is_open(failed: int, num_gathered: int) -> bool:
    """Whether others may wait for a rank that failed in this command: rank 0 has not gathered it from all yet."""
    return failed == IN_TALK or failed > num_gathered


class _Gone(Exception):
    """Says how a rank is lost."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(how)
        self.rank = rank


_LOGGED = float("inf")
_ENDLESS = timedelta(days=365)
_WORDS = 5
_WANTS_STOP, _LEAVING = 3, 4
"""Indices of the words to rank 0; before them are ticks, whether it must tick, and what failed."""
_ANSWER, _NUM_GATHERED = 0, 1
_ENDS = "this process ends, and comes back where its launcher restarts it"
