"""Threads that compute: each takes its models' next batch or order, executes it, hands the results back."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from guerdon.core import Command, Executor, Scored, Signal
from guerdon.errors import GuerdonError, Overloaded, RanksLost, ServerFault, Unavailable
from guerdon.server import tracing
from guerdon.server.batching.halving import Budgets, Halving, check_count
from guerdon.server.batching.jobs import Batch, Job, Limits
from guerdon.server.batching.orders import Order
from guerdon.server.batching.recheck import Recheck
from guerdon.server.batching.room import Pace
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

    An isolated function has a thread for each of its `num_children`: a sample that runs to its deadline holds up one.
    """

    _does, _do = "computes", "compute"

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
        num_children: int = 0,
    ) -> None:
        self._group = group
        self._schedulers = dict(schedulers)
        self._turn = list({scheduler: name for name, scheduler in reversed(schedulers.items())}.values())[::-1]
        self._deliver = deliver
        self._metrics = metrics
        self._on_crash = on_crash
        self._traces = traces
        self._recheck = Recheck(recheck or {}, dtypes or {}, metrics)
        self._budgets = Budgets(metrics)
        self._wake = threading.Condition()
        self._is_stopping = False
        self.loss: GuerdonError | None = None
        self._running: dict[object, tuple[str, Batch | Order]] = {}  # by thread, or what else runs it
        self._num_children = num_children
        self._threads = [
            threading.Thread(target=self._run, name="guerdon-loop", daemon=True) for _ in range(num_children or 1)
        ]
        for name, scheduler in schedulers.items():
            self.change(name, scheduler.limits)

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, model: str, job: Job) -> None:
        """Queues a job; raises Overloaded if the queue is full or the job would be late, Unavailable once stopping."""
        with self._wake:
            if self._is_stopping:
                raise Unavailable(_STOPPING_SCORES)
            self._schedulers[model].add(job, time.monotonic())
            self._notify()

    def order(self, model: str, order: Order, *, finds_room: bool = False) -> None:
        """Queues an order behind all requests so far; raises as `submit`, but one that `finds_room` always has room."""
        with self._wake:
            if self._is_stopping:
                raise Unavailable(_STOPPING)
            self._schedulers[model].orders.add(order, finds_room=finds_room)
            self._notify()

    def drop(self, model: str, order: Order) -> bool:
        """Takes an order out; returns False if it has begun, else its outcome will never come."""
        with self._wake:
            self._notify()  # for those that it held back
            return self._schedulers[model].orders.drop(order)

    def cancel(self, model: str, job: Job) -> None:
        """Drops a job's unstarted sequences."""
        with self._wake:
            self._schedulers[model].cancel(job)

    def abort(self, model: str, error: GuerdonError) -> None:
        """Fails the jobs and orders of a model that have not started."""
        with self._wake:
            dropped = self._schedulers[model].drop_all()
        self._fail(error, *dropped)

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
        """Returns the waiting sequences and tokens by model, orders included."""
        with self._wake:
            return {name: (s.room.sequences.taken, s.room.tokens.taken) for name, s in self._schedulers.items()}

    def requests(self) -> dict[str, tuple[int, int]]:
        """Returns the numbers of running (at least in part) and waiting requests and orders, by model."""
        with self._wake:
            found = {name: (s.requests(), self._running_work(name)) for name, s in self._schedulers.items()}
        return {
            name: (len(begun.union(jobs)) + len(orders), num_waiting)
            for name, ((begun, num_waiting), (jobs, orders)) in found.items()
        }

    @property
    def is_running(self) -> bool:
        """Whether a thread is alive; it may be inside a command."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self, timeout_s: float) -> bool:
        """Finishes what is queued, then ends the threads and the worker of every rank; waits at most `timeout_s`.

        Returns whether the threads have ended. `loss` says if a rank was lost or a thread crashed.
        """
        with self._wake:
            self._is_stopping = True
            self._notify()
        self._join(timeout_s)
        return not self.is_running

    def close(self) -> None:
        """Ends the child processes of an isolated function, and with them what still runs; idempotent."""
        if self._num_children:
            self._fail(Unavailable(_STOPPING_SCORES), *self._drop_all())
            for name in self._schedulers:
                self._group.execute(Command(Signal.UNLOAD, name))

    def fail_waiting(self, loss: GuerdonError) -> None:
        """Fails all that waits; accepts nothing more, and no command follows the running one. Thread-safe."""
        with self._wake:
            self.loss, self._is_stopping = loss, True
        self._fail(loss, *self._drop_all())

    def fail(self, loss: RanksLost, breaks_s: float) -> None:
        """Fails waiting jobs at once, and running ones unless they end within `breaks_s`; for other threads."""
        self.fail_waiting(loss)
        self._join(breaks_s)
        self._fail(loss, *self._running_work())

    def _notify(self) -> None:
        """Has the threads look at the queues; with the lock."""
        self._wake.notify_all()

    def _join(self, timeout_s: float) -> None:
        ends = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, ends - time.monotonic()))

    def _drop_all(self) -> tuple[list[Job], list[Order]]:
        with self._wake:
            dropped = [scheduler.drop_all() for scheduler in self._schedulers.values()]
            self._notify()
        return [job for jobs, _ in dropped for job in jobs], [order for _, orders in dropped for order in orders]

    def _running_work(self, model: str = "") -> tuple[list[Job], list[Order]]:
        """Returns the jobs and orders that run now, those of a model if it is named."""
        running = [work for name, work in [*self._running.values()] if not model or name == model]
        jobs = {job: None for work in running if isinstance(work, Batch) for job in work.jobs()}
        return list(jobs), [work for work in running if isinstance(work, Order)]

    def _fail(self, error: GuerdonError, jobs: list[Job], orders: list[Order]) -> None:
        for order in orders:
            order.fail(error)
        for job in jobs:
            job.cancelled = True  # what is computed of it is delivered no more
            job.results = [error if r is None else r for r in job.results]
        self._deliver(jobs)

    def _crash(self, error: BaseException) -> None:
        if isinstance(error, RanksLost):
            self.loss = error
            self._on_crash()
            self.fail_waiting(error)
            return
        what = "the thread that %s has ended; nothing can be scored any more"
        failure(log, logging.CRITICAL, what, self._does, error=error)
        unknown = ServerFault(f"the server cannot {self._do} any more; restart it")
        self.loss = loss = without_frames(error) if isinstance(error, ServerFault) else unknown
        self._on_crash()
        self.fail_waiting(loss)
        self._fail(loss, *self._running_work())

    # ------------------------------------------------------------------------------------------- the thread itself

    def _run(self) -> None:
        me = threading.get_ident()
        try:
            while self._next(me):
                model, work = self._running[me]
                if isinstance(work, Order):
                    work.execute(self._group)
                else:
                    try:
                        self._compute(model, work)
                    except MemoryError as e:  # outside of the forward; `Halving` handles the forward's own
                        self._fail_batch(model, work, e)
                del self._running[me], work  # frees what ran before it waits for the next
            if self.loss is None:
                self._group.execute(Command(Signal.EXIT))
        except BaseException as e:
            self._crash(e)

    def _next(self, me: int) -> bool:
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
                    if scheduler.late:
                        self._fail(Overloaded(_LATE, 1.0), scheduler.take_late(), [])
                    if taken is not None:
                        self._turn.remove(name)
                        self._turn.append(name)
                        self._running[me] = name, taken
                        if self._num_children:
                            scheduler.room.pace = Pace()  # one sample's time does not predict the next
                            self._notify()  # another thread, for what else waits
                        return True
                if self._is_stopping:
                    return False
                starts = [t for s in self._schedulers.values() if (t := s.starts_at()) is not None]
                self._wake.wait(min(starts) - now if starts else None)

    def _compute(self, model: str, batch: Batch) -> None:
        started = time.monotonic()
        halving, error = None, None
        counts = batch.jobs() if self._traces is not None else {}
        parts = {job.traced: count for job, count in counts.items() if job.traced is not None}
        traces, size = self._traces if parts else None, (len(batch.entries), batch.num_tokens)
        with contextlib.nullcontext() if traces is None else traces.batch(model, parts, *size) as traced:
            try:
                command = Command(Signal.FORWARD, model, batch.sequences)
                scored = check_count(self._group.execute(command), len(batch.entries))
            except BaseException as e:  # SystemExit as well: a user's function must not end this thread
                halving = Halving(self._group, model)
                error = halving.judge(batch, e)
            if halving is not None and error is not None:  # outside of the handler, so that the error's frames are free
                scored = halving.split(batch, error)
            scored = Halving(self._group, model).mend(batch, scored)
            if traced is not None:
                num_out_of_memory = 0 if halving is None else halving.num_out_of_memory
                traced.tell(weights_version=scored.weights_version, out_of_memory=num_out_of_memory)
        seconds, scheduler = time.monotonic() - started, self._schedulers[model]
        self._metrics.batch(model, *size, seconds)
        budget = self._budgets.learn(model, batch.num_tokens, halving)
        with self._wake:
            scheduler.room.pace.end(seconds)
            if budget is not None:
                scheduler.resize(budget)
        self._resolve(batch, scored, seconds)
        self._recheck.after(model, batch, scored, self._group)

    def _resolve(self, batch: Batch, scored: Scored, seconds: float) -> None:
        finished = []
        with self._wake:  # other threads may have samples of the same jobs
            for (job, i), result in zip(batch.entries, scored.results, strict=True):
                job.results[i] = result
            for job, count in batch.jobs().items():
                job.compute_s += seconds
                job.weights_version = scored.weights_version or job.weights_version
                job.unanswered -= count
                if not job.unanswered and not job.cancelled:
                    finished.append(job)
        self._deliver(finished)

    def _fail_batch(self, model: str, batch: Batch, error: MemoryError) -> None:
        failure(log, logging.ERROR, "%s: out of memory outside of a forward", model, error=error)
        with self._wake:
            for job in batch.jobs():
                self._schedulers[model].cancel(job)
        self._fail(ServerFault("the server's memory ran out; send fewer samples at once"), [*batch.jobs()], [])
