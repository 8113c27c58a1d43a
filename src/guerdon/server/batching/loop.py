"""A thread that computes: takes its models' next batch or order, executes it, hands the results back."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from guerdon.core import Command, Scored, Signal
from guerdon.errors import GuerdonError, Overloaded, RanksLost, ServerFault, Unavailable
from guerdon.server import tracing
from guerdon.server.batching.budget import Budgets
from guerdon.server.batching.halving import Executor, Halving, check_count
from guerdon.server.batching.jobs import Batch, Job, Limits
from guerdon.server.batching.orders import Order, Reservation
from guerdon.server.batching.recheck import Recheck
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.logs import failure, without_frames
from guerdon.server.metrics import Metrics

log = logging.getLogger(__name__)

_STOPPING = "the server is stopping; try again later"
_STOPPING_SCORES = "the server is stopping; try another one, or again later"
_LATE = "too much waits to score this in the time that is left; try again later, or allow more time"
_RECOVERS_S = 0.1
"""How long to wait when there was no memory to choose a batch."""


class Loop:
    """Runs the batches and orders of its models in turn, on a thread of its own.

    Calls `deliver(jobs)` on that thread with the jobs that a batch completed, and `on_crash()` if the thread
    crashes; then `loss` says why, and every waiting job fails. `recheck` is the share of results, by model, that is
    scored again by the plain forward, and compared as exactly as the model's `dtypes` allow.
    """

    def __init__(
        self,
        group: Executor,
        schedulers: dict[str, Scheduler],
        deliver: Callable[[list[Job]], None],
        metrics: Metrics,
        *,
        on_crash: Callable[[], None],
        recheck: Mapping[str, float] | None = None,
        dtypes: Mapping[str, str] | None = None,
        traces: tracing.Traces | None = None,
    ) -> None:
        self._group = group
        self._schedulers = dict(schedulers)
        self._turn = list(schedulers)
        self._deliver = deliver
        self._metrics = metrics
        self._on_crash = on_crash
        self._traces = traces
        self._recheck = Recheck(recheck or {}, dtypes or {}, metrics)
        self._budgets = Budgets(metrics)
        self._wake = threading.Condition()
        self._is_stopping = False
        self.loss: GuerdonError | None = None
        self._running: Batch | Order = Batch()
        self._running_model = ""
        self._thread = threading.Thread(target=self._run, name="guerdon-loop", daemon=True)
        for name, scheduler in schedulers.items():
            self.change(name, scheduler.limits)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # ------------------------------------------------------------------------------- called by other threads

    def submit(self, model: str, job: Job) -> None:
        """Queues a job; raises Overloaded if the queue is full or the job would be late, Unavailable once stopping."""
        with self._wake:
            self._check_accepting(_STOPPING_SCORES)
            self._schedulers[model].add(job, time.monotonic())
            self._wake.notify()

    def order(self, model: str, order: Order | Reservation, *, finds_room: bool = False) -> None:
        """Queues an order behind all requests so far, or reserves its place; raises as `submit`.

        One that `finds_room` is accepted even if the queue is full.
        """
        with self._wake:
            self._check_accepting(_STOPPING)
            self._schedulers[model].orders.add(order, finds_room=finds_room)
            self._wake.notify()

    def fill(self, model: str, reservation: Reservation, order: Order) -> None:
        """Puts the order in its reserved place; raises as `submit`, and then the reservation stays."""
        with self._wake:
            if not self._schedulers[model].orders.fill(reservation, order):
                raise Unavailable(_STOPPING)
            self._wake.notify()

    def drop(self, model: str, order: Order | Reservation) -> bool:
        """Takes an order out; returns False if it has begun, else its outcome will never come."""
        with self._wake:
            self._wake.notify()  # for those that it held back
            return self._schedulers[model].orders.drop(order)

    def cancel(self, model: str, job: Job) -> None:
        """Drops what of a job has not started."""
        with self._wake:
            self._schedulers[model].cancel(job)

    def check_room(
        self, model: str, num_sequences: int, num_tokens: int = 0, client: str = "", seconds_left: float = math.inf
    ) -> None:
        """Raises Overloaded if the queue has no room, or no time, for a request that is not decoded yet.

        Takes no lock for the room, which the thread holds while it chooses a batch: `submit` checks again.
        """
        self._schedulers[model].room.check_coming(num_sequences, num_tokens, client)
        if seconds_left < math.inf:
            with self._wake:
                self._schedulers[model].check_coming(num_tokens, seconds_left, client)

    def change(self, model: str, limits: Limits) -> None:
        """Changes the limits of the model's batches; on the loop's thread, or before it starts."""
        with self._wake:
            self._schedulers[model].change(limits)
        self._budgets.start(model, limits.max_batch_tokens, is_fixed=bool(limits.batch_sizes))

    def depth(self) -> dict[str, tuple[int, int]]:
        """Returns the waiting sequences and tokens by model, those of orders included."""
        with self._wake:
            rooms = {name: scheduler.room for name, scheduler in self._schedulers.items()}
            return {name: (room.sequences.taken, room.tokens.taken) for name, room in rooms.items()}

    def requests(self) -> dict[str, tuple[int, int]]:
        """Returns by model the requests and orders that run, at least in part, and those that wait."""
        counts = {}
        with self._wake:
            jobs, orders = self._running_work()
            for name, scheduler in self._schedulers.items():
                begun, num_waiting = scheduler.requests()
                is_running = name == self._running_model
                counts[name] = (len(begun.union(jobs)) + len(orders) if is_running else len(begun), num_waiting)
        return counts

    def _check_accepting(self, else_say: str) -> None:
        if self._is_stopping:
            raise Unavailable(else_say)

    # ----------------------------------------------------------------------------------------------------- shutdown

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive; it may be inside a command."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Finishes what is queued, then ends the thread and the worker of every rank; waits at most `timeout_s`.

        Returns whether the thread has ended. `loss` says if a rank was lost or the thread crashed.
        """
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fail_waiting(self, loss: GuerdonError) -> None:
        """Fails all that waits; accepts nothing more, and no command follows the running one. Thread-safe."""
        with self._wake:
            self.loss, self._is_stopping = loss, True
            dropped = [scheduler.drop_all() for scheduler in self._schedulers.values()]
            self._wake.notify()
        jobs = {job: None for waiting, _ in dropped for job in waiting}
        self._fail(loss, list(jobs), [order for _, waiting in dropped for order in waiting])

    def fail(self, loss: RanksLost, breaks_s: float) -> None:
        """Fails from another thread what waits at once, and what runs unless it ends by itself within `breaks_s`."""
        self.fail_waiting(loss)
        if self._thread.is_alive():
            self._thread.join(breaks_s)
        self._fail(loss, *self._running_work())

    def _running_work(self) -> tuple[list[Job], list[Order]]:
        running = self._running
        return ([], [running]) if isinstance(running, Order) else (list(running.jobs()), [])

    def _fail(self, error: GuerdonError, jobs: list[Job], orders: list[Order]) -> None:
        for order in orders:
            order.fail(error)
        for job in jobs:
            job.results = [error if r is None else r for r in job.results]
        self._deliver(jobs)

    def _crash(self, error: BaseException) -> None:
        if isinstance(error, RanksLost):
            self.loss = error
            self._on_crash()
            self.fail_waiting(error)
            return
        failure(
            log, logging.CRITICAL, "the thread that computes has ended; nothing can be scored any more", error=error
        )
        unknown = ServerFault("the server cannot compute any more; restart it")
        self.loss = loss = without_frames(error) if isinstance(error, ServerFault) else unknown
        self._on_crash()
        self.fail_waiting(loss)
        self._fail(loss, *self._running_work())

    # ------------------------------------------------------------------------------------------- the thread itself

    def _run(self) -> None:
        try:
            while self._next():
                if isinstance(self._running, Order):
                    self._running.execute(self._group)
                else:
                    try:
                        self._compute(self._running_model, self._running)
                    except MemoryError as e:  # outside of the forward; `Halving` handles the forward's own
                        self._fail_batch(e)
                self._running = Batch()  # frees what ran before it waits for the next
            if self.loss is None:
                self._group.execute(Command(Signal.EXIT))
        except BaseException as e:
            self._crash(e)

    def _next(self) -> bool:
        """Waits for the next batch or order, the models taking turns; False when stopping and nothing is left."""
        with self._wake:
            while True:
                now = time.monotonic()
                for name in self._turn:
                    scheduler = self._schedulers[name]
                    try:
                        taken = scheduler.take(now, hurry=self._is_stopping)
                    except MemoryError as e:  # what was chosen already is not lost
                        failure(log, logging.ERROR, "%s: no memory to choose a batch", name, error=e)
                        self._wake.wait(_RECOVERS_S)
                        continue
                    if late := scheduler.take_late():
                        self._fail(Overloaded(_LATE, 1.0), late, [])
                    if taken is not None:
                        self._turn.remove(name)
                        self._turn.append(name)
                        self._running_model, self._running = name, taken
                        return True
                if self._is_stopping:
                    if any(s.orders.drop_reservations() for s in self._schedulers.values()):
                        continue  # with what waited behind them
                    return False
                starts = [t for s in self._schedulers.values() if (t := s.starts_at()) is not None]
                self._wake.wait(min(starts) - now if starts else None)

    def _compute(self, model: str, batch: Batch) -> None:
        started = time.monotonic()
        halving: Halving | None = None
        parts = {job.traced: count for job, count in batch.jobs().items() if job.traced is not None}
        with tracing.batch(self._traces, model, parts, len(batch.entries), batch.num_tokens) as traced:
            try:
                scored = check_count(self._group.execute(Command(Signal.FORWARD, model, batch.sequences)), batch)
            except BaseException as e:  # SystemExit as well: a user's function must not end this thread
                halving = Halving(self._group, model)
                error = halving.judge(batch, e)
            if halving is not None:  # outside of the handler, so that the error's frames are free
                scored = halving.split(batch, error)
            scored = Halving(self._group, model).mend(batch, scored)
            if traced is not None:
                num_out_of_memory = 0 if halving is None else halving.num_out_of_memory
                traced.tell(weights_version=scored.weights_version, out_of_memory=num_out_of_memory)
        seconds = time.monotonic() - started
        with self._wake:
            self._schedulers[model].observe(seconds)
        self._metrics.batch(model, len(batch.entries), batch.num_tokens, seconds)
        if (budget := self._budgets.learn(model, batch.num_tokens, halving)) is not None:
            with self._wake:
                self._schedulers[model].resize(budget)
        self._resolve(batch, scored, seconds)
        self._recheck.after(model, batch, scored, self._group)

    def _resolve(self, batch: Batch, scored: Scored, seconds: float) -> None:
        for (job, i), result in zip(batch.entries, scored.results, strict=True):
            job.results[i] = result
        finished = []
        for job, count in batch.jobs().items():
            job.compute_s += seconds
            job.weights_version = scored.weights_version or job.weights_version
            job.unanswered -= count
            if not job.unanswered and not job.cancelled:
                finished.append(job)
        if finished:
            self._deliver(finished)

    def _fail_batch(self, error: MemoryError) -> None:
        """Fails the running batch's jobs, which ran out of memory outside of the forward."""
        failure(log, logging.ERROR, "%s: out of memory outside of a forward", self._running_model, error=error)
        jobs, _ = self._running_work()
        with self._wake:
            for job in jobs:
                self._schedulers[self._running_model].cancel(job)
        self._fail(ServerFault("the server's memory ran out; send fewer samples at once"), jobs, [])
