"""The order of a critic's calls: concurrency, the newest step seen, and unread failures."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeAlias, TypeVar

from guerdon.client.addresses import Address
from guerdon.client.calls import Call
from guerdon.client.driver import Session
from guerdon.client.faces import CallFuture, LoopThread
from guerdon.client.retry import RetryingCaller, RetryPolicy, Steps
from guerdon.critic_core import CriticState, TrainReport
from guerdon.errors import Cancelled, CriticReset

T = TypeVar("T")

log = logging.getLogger(__name__)


class Turnstile(Generic[T]):
    """Admits callers in the order of arrival: one that goes `alone`, or a run of neighbours that do not.

    Each that has arrived must leave once, whether it was admitted or not.
    """

    def __init__(self) -> None:
        self._inside: set[T] = set()
        self._is_alone = False
        self._waiting: deque[tuple[T, bool]] = deque()

    def arrive(self, who: T, *, alone: bool) -> list[T]:
        """Appends `who` to the queue; returns the entries that may proceed, in order."""
        self._waiting.append((who, alone))
        return self._admit()

    def leave(self, who: T) -> list[T]:
        """Removes `who`, which has ended or given up; returns the entries that may proceed, in order."""
        if who in self._inside:
            self._inside.remove(who)
        else:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not who)
        return self._admit()

    def _admit(self) -> list[T]:
        admitted: list[T] = []
        while self._waiting:
            who, alone = self._waiting[0]
            if self._inside and (alone or self._is_alone):
                break
            self._waiting.popleft()
            self._inside.add(who)
            self._is_alone = alone
            admitted.append(who)
        return admitted


class ResetCheck:
    """Notices that a critic was set back behind the newest step that its client has seen."""

    def __init__(self) -> None:
        self._step = 0
        self._weights_version = ""
        self._reset = ""

    def report(
        self,
        caller: RetryingCaller,
        call: Call[TrainReport],
        *,
        trains: bool = True,
        state: Call[CriticState] | None = None,
    ) -> Steps[TrainReport]:
        """Returns the report of a call that trains or validates; raises CriticReset if it began before the newest step.

        A train request that may have been answered before may report an older step: `state` then shows whether the
        critic has moved on since. Raises what `caller.ask` raises.
        """
        report = yield from caller.ask(call)
        before = report.step - report.num_steps * trains
        if not self._reset and before < self._step and not (yield from self._is_repeated(report, caller, state)):
            self._reset = (
                f"{call.model} answered from step {before} on, but this client had seen step {self._step}: the "
                "server was restarted without --checkpoint-dir, or somebody loaded a checkpoint. What was learnt "
                "since is gone: load a checkpoint by this client's load, or go on from where the critic is with a new "
                "client"
            )
        if self._reset:
            raise CriticReset(self._reset)
        if report.step >= self._step:
            self._step, self._weights_version = report.step, report.weights_version
        return report

    def load(self, caller: RetryingCaller, call: Call[Any]) -> Steps[Any]:
        """Returns the result of a call that loads a checkpoint; from when it is sent, older steps are expected."""
        self._step, self._reset = 0, ""
        return (yield from caller.ask(call))

    def _is_repeated(self, report: TrainReport, caller: RetryingCaller, state: Call[CriticState] | None) -> Steps[bool]:
        """Returns whether the report repeats an earlier answer, instead of a step that was made just now."""
        if state is None:
            return False
        if (report.step, report.weights_version) == (self._step, self._weights_version):
            return True
        now = yield from caller.ask(state)
        return now.step >= self._step and now.step > report.step


class Failures:
    """The failed train requests of one client, until somebody has looked at each; thread-safe."""

    def __init__(self) -> None:
        self._failed: deque[tuple[AnyTrainFuture, BaseException]] = deque()

    def add(self, future: AnyTrainFuture, error: BaseException) -> None:
        """Logs the failure, and keeps it for the next call."""
        log.error("train request %s failed: %s", future.train_id, str(error))
        if not isinstance(error, Cancelled):  # there is no next call
            self._failed.append((future, error))

    def raise_unseen(self) -> None:
        """Raises the error of the first failed request with an unread future."""
        while True:
            try:
                future, error = self._failed.popleft()
            except IndexError:  # none left, or another thread has taken it
                return
            if not future.was_seen:
                if not future.cancelled():
                    future.exception()
                error.add_note(
                    f"raised by a later call, which was not sent: train request {future.train_id} had failed, and "
                    "its future was never read"
                )
                raise error


class TrainFuture(CallFuture[T]):
    """The outcome of one train request; the server knows it as `train_id`."""

    def __init__(self, thread: LoopThread[OrderedSession], train_id: str) -> None:
        super().__init__(thread)
        self.train_id = train_id
        self._failures = thread.session.failures
        self._looks: list[None] = []

    @property
    def was_seen(self) -> bool:
        """Whether somebody has asked for the outcome, or waits for it; lets a failed future's callbacks ask first."""
        if not self._looks:
            self.wait_for_callbacks()
        return bool(self._looks)

    def result(self, timeout: float | None = None) -> T:
        """Returns the report; raises the request's error, or TimeoutError."""
        with self._look():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the request's error, None if it succeeded; raises TimeoutError."""
        with self._look():
            return super().exception(timeout)

    def set_exception(self, exception: BaseException | None) -> None:
        """Records the failure first: a thread that waits for the future may make the next call at once."""
        if exception is not None and not self.done():
            self._failures.add(self, exception)
        super().set_exception(exception)

    @contextmanager
    def _look(self) -> Iterator[None]:
        self._looks.append(None)
        try:
            yield
        except (TimeoutError, KeyboardInterrupt):  # saw nothing
            self._looks.pop()
            raise


class AsyncTrainFuture(asyncio.Future[TrainReport]):
    """`TrainFuture` for an event loop: await it. Cancelling it does not undo a sent request."""

    def __init__(self, train_id: str) -> None:
        super().__init__()
        self.train_id = train_id
        self.was_seen = False

    def __await__(self) -> Generator[Any, None, TrainReport]:
        try:
            return (yield from super().__await__())
        finally:
            self._look()

    def result(self) -> TrainReport:
        """Returns the report; raises the request's error."""
        self._look()
        return super().result()

    def exception(self) -> BaseException | None:
        """Returns the request's error, None if it succeeded."""
        self._look()
        return super().exception()

    def _look(self) -> None:
        self.was_seen |= self.done() and not self.cancelled()


AnyTrainFuture: TypeAlias = TrainFuture[Any] | AsyncTrainFuture


class OrderedSession(Session):
    """A session whose calls go in the order in which they are made; one that goes alone waits for all before it."""

    def __init__(self, addresses: list[Address], policy: RetryPolicy, max_in_flight: int, asks: str = "") -> None:
        super().__init__(addresses, policy, max_in_flight, asks)
        self.failures = Failures()
        self.reset_check = ResetCheck()
        self._turnstile: Turnstile[asyncio.Future[None]] = Turnstile()
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself holds no reference

    def start(self, steps: Steps[T], *, alone: bool, is_wanted: Callable[[], bool] | None = None) -> asyncio.Task[T]:
        """Returns the task of a call, which takes its place in the order now; `is_wanted` as in `run`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def run_in_turn() -> T:
            await turn
            return await self.run(steps, is_wanted=is_wanted)

        def leave(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            _wake(self._turnstile.leave(turn))

        task = asyncio.create_task(run_in_turn())
        self._tasks.add(task)
        task.add_done_callback(leave)
        _wake(self._turnstile.arrive(turn, alone=alone))
        return task


def _wake(turns: list[asyncio.Future[None]]) -> None:
    for turn in turns:
        if not turn.done():  # else its task was cancelled, and is about to leave
            turn.set_result(None)
