"""The one thread that owns the worker: take the next batch or order, execute it, hand the results back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from guerdon.core import Command, Scored, Signal
from guerdon.errors import GuerdonError, Overloaded, RanksLost, ServerFault, Unavailable
from guerdon.server import tracing
from guerdon.server.batching.attempt import Attempt, check_device
from guerdon.server.batching.attempt import Group as Group
from guerdon.server.batching.budget import Budget
from guerdon.server.batching.lane import Lane
from guerdon.server.batching.recheck import Recheck
from guerdon.server.batching.scheduler import Batch, Job, Limits, Scheduler
from guerdon.server.logs import failure, without_frames
from guerdon.server.metrics import Metrics
from guerdon.server.tracing import TracedBatch, Traces

log = logging.getLogger(__name__)

_STOPPING = "the server is stopping; try again later"
_LATE = "too much waits to score this in the time that is left; try again later, or allow more time"
_BREAKS_S = 2.0
"""How soon what waits for a lost rank breaks off by itself, unless the rank's host has vanished without a word."""
_RECOVERS_S = 0.1
"""How long to wait where there was no memory to choose a batch."""


class Order:
    """Something to do on the loop's thread between two batches of a model, in its turn.

    `run(group)` gives the `outcome`, or raises it; `then(group)`, where given, is done after that is known. Without
    `run` it only holds its place until `Loop.fill`. `num_sequences` and `num_tokens` are what it holds while it waits,
    for `client`.
    """

    def __init__(self, run: Callable[[Group], Any] | None = None, client: str = "") -> None:
        self.client = client
        self.num_sequences = self.num_tokens = 0
        self.outcome: Future[Any] = Future()
        self.outcome.set_running_or_notify_cancel()  # what was accepted is done, whoever leaves
        self.run = run
        self.then: Callable[[Group], None] | None = None
        self.is_ready = run is not None
        self.traced = tracing.part()

    def execute(self, group: Group) -> None:
        """Does it; whatever it raises goes into the outcome. Raises as `check_device`, and then nothing follows."""
        run, then, self.run, self.then = self.run, self.then, None, None  # what they hold goes with them
        assert run is not None
        traced, self.traced = self.traced, None
        try:
            with contextlib.nullcontext() if traced is None else traced.order(self.num_sequences, self.num_tokens):
                result = run(group)
        except GuerdonError as e:
            self.fail(e)
            check_device(e)
        except BaseException as e:
            failure(log, logging.ERROR, "an order failed", error=e)
            self.fail(ServerFault(f"{type(e).__name__}: {e}"))
            check_device(e)
        else:
            with contextlib.suppress(InvalidStateError):
                self.outcome.set_result(result)
        if then is not None:
            try:
                then(group)
            except RanksLost as e:
                log.error("what follows an order was not done: %s", e)
            except BaseException as e:
                failure(log, logging.ERROR, "what follows an order failed", error=e)

    def fail(self, error: GuerdonError) -> None:
        """Has the error for its outcome, unless it has one, also where another thread does the same."""
        with contextlib.suppress(InvalidStateError):
            self.outcome.set_exception(error)


class Loop:
    """Runs batches and orders of all models in turn, on a thread of its own.

    `deliver(jobs)` is called on that thread with the jobs that a batch completed, `on_crash()` when the thread
    ends although it was not told to; `loss` says why, and every job that waits fails. `recheck` is the share, by model,
    of what was answered that is scored again by the plain forward, as exactly as the model's `dtypes` allow.
    """

    def __init__(
        self,
        group: Group,
        schedulers: dict[str, Scheduler],
        deliver: Callable[[list[Job]], None],
        metrics: Metrics,
        *,
        on_crash: Callable[[], None],
        recheck: Mapping[str, float] | None = None,
        dtypes: Mapping[str, str] | None = None,
        traces: Traces | None = None,
    ) -> None:
        self._group = group
        self._lanes: dict[str, Lane[Order]] = {name: Lane(s) for name, s in schedulers.items()}
        self._turn = list(schedulers)
        self._deliver = deliver
        self._metrics = metrics
        self._on_crash = on_crash
        self._traces = traces
        self._recheck = Recheck(recheck or {}, dtypes or {}, metrics)
        self._wake = threading.Condition()
        self._stopping = False
        self.loss: GuerdonError | None = None
        self._running: Batch | Order = Batch()
        self._running_of = ""
        self._thread = threading.Thread(target=self._run, name="guerdon-loop", daemon=True)
        self._budgets: dict[str, Budget] = {}
        for name, scheduler in schedulers.items():
            self.change(name, scheduler.limits)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, model: str, job: Job) -> None:
        """Queues a job; raises Overloaded if the queue is full or the job would be late, Unavailable once stopping."""
        with self._wake:
            if self._stopping:
                raise Unavailable("the server is stopping; try another one, or again later")
            self._lanes[model].add(job, time.monotonic())
            self._wake.notify()

    def order(self, model: str, order: Order, *, finds_room: bool = False) -> None:
        """Queues an order behind all that was asked of the model before; raises as `submit`.

        One that `finds_room` is accepted also where the queue is full.
        """
        with self._wake:
            if self._stopping:
                raise Unavailable(_STOPPING)
            self._lanes[model].add_order(order, finds_room=finds_room)
            self._wake.notify()

    def fill(
        self,
        model: str,
        order: Order,
        run: Callable[[Group], Any],
        num_sequences: int,
        num_tokens: int,
        then: Callable[[Group], None] | None = None,
    ) -> None:
        """Says what an order does that has only held its place; raises as `submit`, and then it has its place still."""
        with self._wake:
            order.run, order.then = run, then
            if not self._lanes[model].fill(order, num_sequences, num_tokens):
                raise Unavailable(_STOPPING)
            self._wake.notify()

    def drop(self, model: str, order: Order) -> bool:
        """Takes an order out that has not begun, and says whether that was so; its outcome will not come."""
        with self._wake:
            is_dropped = self._lanes[model].drop_order(order)
            self._wake.notify()  # for those that it held back
        return is_dropped

    def change(self, model: str, limits: Limits) -> None:
        """Has other limits for the model's batches from now on; on the loop's thread, or before it starts."""
        with self._wake:
            self._lanes[model].change(limits)
        self._budgets[model] = Budget(limits.max_batch_tokens)
        self._metrics.set("guerdon_batch_budget_tokens", limits.max_batch_tokens, model)

    def check_room(self, model: str, num_sequences: int, num_tokens: int = 0, client: str = "") -> None:
        """Raises Overloaded where the model's queue is full already for what this client sends."""
        with self._wake:
            self._lanes[model].check_room(num_sequences, num_tokens, client)

    def cancel(self, model: str, job: Job) -> None:
        """Drops what of a job has not started."""
        with self._wake:
            self._lanes[model].cancel(job)

    def stop(self, timeout_s: float) -> bool:
        """Finishes what is queued, then ends the thread and the worker of every rank; waits at most `timeout_s`.

        Returns whether the thread has ended. Where a rank was lost, or the thread broke down, `loss` says so.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        """Whether the thread lives, which may be amid a command."""
        return self._thread.is_alive()

    def depth(self) -> dict[str, tuple[int, int]]:
        """Sequences and tokens that wait, by model."""
        with self._wake:
            return {name: (s.num_sequences, s.num_tokens) for name, s in self._lanes.items()}

    def requests(self) -> dict[str, tuple[int, int]]:
        """Requests that run, as a part of them was taken up, and requests that wait, by model; orders are some, too."""
        counts = {}
        with self._wake:
            jobs, orders = self._taken()
            for name, lane in self._lanes.items():
                begun, num_waiting = lane.requests()
                num_running = len(begun.union(jobs)) + len(orders) if name == self._running_of else len(begun)
                counts[name] = (num_running, num_waiting)
        return counts

    def fail_waiting(self, loss: RanksLost) -> None:
        """Fails all that waits, from another thread; nothing more is accepted, and no command follows what runs."""
        with self._wake:
            self.loss = loss
        self._fail(loss, *self._drop_all())

    def fail(self, loss: RanksLost) -> None:
        """Ends it, from another thread: what waits fails at once, what runs unless it soon comes to its own end."""
        self.fail_waiting(loss)
        if self._thread.is_alive():
            self._thread.join(_BREAKS_S)
        self._fail(loss, *self._taken())

    def _run(self) -> None:
        try:
            self._serve()
        except RanksLost as e:
            self.loss = e
            self._on_crash()
            self._fail(e, *self._drop_all())
        except BaseException as e:
            failure(
                log, logging.CRITICAL, "the thread that computes has ended; nothing can be scored any more", error=e
            )
            unknown = ServerFault("the server cannot compute any more; restart it")
            self.loss = error = without_frames(e) if isinstance(e, ServerFault) else unknown
            self._on_crash()
            self._fail(error, *self._drop_all())
            self._fail(error, *self._taken())

    def _drop_all(self) -> tuple[list[Job], list[Order]]:
        """Takes out all that waits; from now on nothing is accepted."""
        with self._wake:
            self._stopping = True
            dropped = [lane.drop_all() for lane in self._lanes.values()]
            self._wake.notify()
        jobs = {job: None for waiting, _ in dropped for job in waiting}
        return list(jobs), [order for _, waiting in dropped for order in waiting]

    def _taken(self) -> tuple[list[Job], list[Order]]:
        """What runs now."""
        running = self._running
        return ([], [running]) if isinstance(running, Order) else (list(running.jobs()), [])

    def _fail(self, error: GuerdonError, jobs: list[Job], orders: list[Order]) -> None:
        for order in orders:
            order.fail(error)
        for job in jobs:
            job.results = [error if r is None else r for r in job.results]
        self._deliver(jobs)

    def _serve(self) -> None:
        while (taken := self._next()) is not None:
            model = taken[0]
            del taken  # while the next is waited for, nothing of this one is held
            if isinstance(self._running, Order):
                self._running.execute(self._group)
            else:
                try:
                    self._compute(model, self._running)
                except MemoryError as e:  # no forward's, which `_compute` sees to
                    self._give_up(model, self._running, e)
            self._running = Batch()
        if self.loss is None:
            self._group.lead(Command(Signal.EXIT))

    def _compute(self, model: str, batch: Batch) -> None:
        started = time.monotonic()
        attempt = Attempt(self._group, model)
        with self._traced(model, batch) as traced:
            scored = attempt.score(batch)
            if traced is not None:
                traced.tell(weights_version=scored.weights_version, out_of_memory=attempt.num_out_of_memory)
        seconds = time.monotonic() - started
        with self._wake:
            self._lanes[model].observe(batch.num_tokens, seconds)
        self._metrics.batch(model, len(batch.entries), batch.num_tokens, seconds)
        self._learn(model, attempt, batch)
        self._resolve(batch, scored, seconds)
        self._recheck.after(model, batch, scored, self._group)

    def _traced(self, model: str, batch: Batch) -> contextlib.AbstractContextManager[TracedBatch | None]:
        """A context in which the batch is computed, which has a span where one of its requests has."""
        if self._traces is None:
            return contextlib.nullcontext()
        parts = {job.traced: count for job, count in batch.jobs().items() if job.traced is not None}
        if not parts:
            return contextlib.nullcontext()
        return self._traces.batch(model, parts, len(batch.entries), batch.num_tokens)

    def _learn(self, model: str, attempt: Attempt, batch: Batch) -> None:
        """Has the model's next batches hold fewer tokens where there was no memory for this one, more after many."""
        lane, budget = self._lanes[model], self._budgets[model]
        before = budget.num_tokens
        if not attempt.num_out_of_memory:
            budget.fitted(batch.num_tokens)
        else:
            self._metrics.add("guerdon_out_of_memory", attempt.num_out_of_memory, model)
            if attempt.fits is not None and not lane.limits.batch_sizes:
                budget.did_not_fit(attempt.fits)
        after = budget.num_tokens
        if after == before:
            return
        with self._wake:
            lane.resize(after)
        self._metrics.set("guerdon_batch_budget_tokens", after, model)
        if after < before:
            log.warning(
                "%s: out of memory with a batch of %d tokens or less; a batch has %d at most for the next %d. Give "
                "--max-batch-tokens %d to start with that",
                model,
                before,
                after,
                budget.patience,
                after,
            )

    def _give_up(self, model: str, batch: Batch, error: MemoryError) -> None:
        """Answers what a batch's jobs still wait for, where there was no memory to do so as usual."""
        failure(log, logging.ERROR, "%s: out of memory beside a forward", model, error=error)
        jobs = list(batch.jobs())
        with self._wake:
            for job in jobs:
                self._lanes[model].cancel(job)
        self._fail(ServerFault("the server's memory ran out; send fewer samples at once"), jobs, [])

    def _next(self) -> tuple[str, Batch | Order] | None:
        """Waits for the next batch or order, the models taking turns; None when stopping and nothing is left."""
        with self._wake:
            while True:
                now = time.monotonic()
                for name in self._turn:
                    try:
                        taken = self._lanes[name].take(now, hurry=self._stopping)
                    except MemoryError as e:  # what was chosen already is not lost
                        failure(log, logging.ERROR, "%s: no memory to choose a batch", name, error=e)
                        self._wake.wait(_RECOVERS_S)
                        continue
                    if late := self._lanes[name].take_late():
                        self._fail(Overloaded(_LATE, 1.0), late, [])
                    if taken is not None:
                        self._turn.remove(name)
                        self._turn.append(name)
                        self._running_of, self._running = name, taken
                        return name, taken
                if self._stopping:
                    unready = [order for lane in self._lanes.values() for order in lane.drop_unready()]
                    if unready:  # those behind them may go
                        continue
                    return None
                starts = [t for lane in self._lanes.values() if (t := lane.starts_at()) is not None]
                self._wake.wait(min(starts) - now if starts else None)

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
