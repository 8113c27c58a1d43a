"""The ranks that hold one set of models: rank 0 leads, the others follow, one command at a time.

A command goes to every rank, each does its part, and all report their outcome before rank 0 returns. Whatever can be
wrong with the command itself was checked before it was sent.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from guerdon.core import Command, Signal
from guerdon.distributed import portable
from guerdon.distributed.pulse import Pulse
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.errors import GuerdonError, RanksLost


class CommandWorker(Protocol):
    """Executes commands on a rank, and merges all ranks' results on rank 0."""

    def execute(self, command: Any) -> Any:
        """Does this rank's part of the command."""

    def merge(self, command: Any, parts: list[Any]) -> Any:
        """Returns the result from all ranks' parts, in the order of the ranks."""

    def is_watched(self, command: Any) -> bool:
        """Whether the command ticks while it progresses, so that the pulse can see a hang."""


class Group:
    """Executes commands on all ranks: rank 0 calls `execute`, the others `follow`.

    A server that is one process needs no group: its worker executes commands itself. Calls `on_done(command,
    broadcast_s, gather_s)` after each command if there are other ranks. `has_ended` says whether all ranks know of the
    end.
    """

    on_done: Callable[[Any, float, float], None] | None = None

    def __init__(self, worker: CommandWorker, ranks: Ranks = ALONE, pulse: Pulse | None = None) -> None:
        self._worker, self._ranks, self._pulse = worker, ranks, pulse
        self.has_ended = False
        self._num_commands = 0

    def execute(self, command: Any) -> Any:
        """Executes the command on every rank and returns the merged result.

        Raises what any rank's worker raises, prefixed with the rank, and RanksLost if a rank is lost.
        """
        if self._ranks.size == 1:
            return self._worker.merge(command, [self._worker.execute(command)])
        from guerdon.distributed import frames

        assert self._ranks.control is not None
        started = time.monotonic()
        self._send(portable.dumps(command))
        sent = time.monotonic()
        error, part = self._attempt(command)
        executed = time.monotonic()
        with self._naming_lost():
            _, *others = frames.gather(self._ranks.control)
        outcomes = [(error, part), *map(_read_outcome, others)]
        gathered = time.monotonic()
        doing = self._ranks.doing
        doing.num_gathered = self._num_commands
        doing.failed, doing.failure = 0, None
        if _is_end(command):
            self._send(b"")  # only now may any rank leave
            self._leave()
            return None
        if self.on_done is not None:
            self.on_done(command, sent - started, gathered - executed)
        first = next((other for other, _ in outcomes if other is not None), None)
        if first is not None:
            try:
                raise first
            finally:
                # Breaks the cycle of the error and its frames, which hold a forward's tensors.
                del first, error, outcomes
        return self._worker.merge(command, [part for _, part in outcomes])

    def end(self, error: GuerdonError | None = None) -> None:
        """Ends all ranks: the others' `follow` returns, or raises the error. Idempotent."""
        if self._ranks.size > 1 and not self.has_ended:
            self.execute(error or Command(Signal.EXIT))

    def follow(self) -> None:
        """Executes the leader's commands until it ends; raises the error that it ends with.

        Raises RanksLost if the leader is lost.
        """
        while True:
            # If the data cannot be read, on a host with other code, this command fails.
            data = self._receive()
            self._ranks.doing.failed, self._ranks.doing.failure = 0, None
            error, command = _attempted(functools.partial(portable.loads, data))
            part = None
            if error is None:
                error, part = self._attempt(command)
            else:
                self._num_commands += 1
                self._fail(error)
            self._send_outcome(error, part)
            if _is_end(command):
                self._receive()  # a slower rank may still need this one
                self._leave()
                if isinstance(command, GuerdonError):
                    raise command
                return

    def _attempt(self, command: Any) -> tuple[BaseException | None, Any]:
        assert self._pulse is not None
        self._num_commands += 1
        if _is_end(command):
            return None, None
        with self._pulse.executing(self._worker.is_watched(command)):
            outcome = _attempted(lambda: self._worker.execute(command))
        try:
            if outcome[0] is not None:
                self._fail(outcome[0])
            return outcome
        finally:
            del outcome  # breaks the cycle, as in `execute`: this frame is among the error's

    def _fail(self, error: BaseException) -> None:
        """Reports by the pulse that this rank has failed: others may wait for it inside the command."""
        if not isinstance(error, RanksLost):
            doing = self._ranks.doing
            doing.failure = error
            doing.failed = self._num_commands

    def _send(self, data: bytes) -> None:
        from guerdon.distributed import frames

        assert self._pulse is not None and self._ranks.control is not None
        if self._pulse.lost is not None:
            raise self._pulse.lost
        with self._naming_lost():
            frames.send_to_all(data, self._ranks.control)

    def _receive(self) -> bytes:
        from guerdon.distributed import frames

        assert self._ranks.control is not None
        with self._naming_lost():
            return frames.receive(self._ranks.control)

    def _send_outcome(self, error: BaseException | None, part: Any) -> None:
        """Sends this rank's outcome to rank 0."""
        from guerdon.distributed import frames

        ranks = self._ranks
        assert ranks.control is not None
        failure, data = _attempted(lambda: portable.dumps((error and ranks.portable(error), part)))
        if failure is not None:  # not picklable
            data = portable.dumps((ranks.portable(failure), None))
        with self._naming_lost():
            frames.send_to_leader(data, ranks.control)

    @contextlib.contextmanager
    def _naming_lost(self) -> Iterator[None]:
        """Raises RanksLost if a connection breaks."""
        assert self._pulse is not None
        try:
            yield
        except RuntimeError as e:
            raise self._pulse.verdict(e) from e

    def _leave(self) -> None:
        assert self._pulse is not None
        self.has_ended = True
        self._pulse.stop()


def _attempted(work: Callable[[], Any]) -> tuple[BaseException | None, Any]:
    """Returns the exception of `work`, and its result."""
    try:
        return None, work()
    # SystemExit as well: a user's function must not leave the other ranks waiting.
    except BaseException as e:
        return e, None


def _read_outcome(data: bytes) -> tuple[BaseException | None, Any]:
    error, outcome = _attempted(functools.partial(portable.loads, data))
    return outcome if error is None else (error, None)


def _is_end(command: Any) -> bool:
    return isinstance(command, GuerdonError) or (isinstance(command, Command) and command.signal is Signal.EXIT)
