"""The one thread that owns the worker: take the next batch, execute it, hand the results back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from guerdon.core import Command, Signal
from guerdon.errors import GuerdonError, ServerFault, Unavailable
from guerdon.metrics import Metrics
from guerdon.server.scheduler import Batch, Job, Result, Scheduler

log = logging.getLogger(__name__)


class Group(Protocol):
    """Whatever executes one command on every rank and answers with rank 0's result."""

    def lead(self, command: Command) -> list[Result]: ...


class Loop:
    """Runs batches of all models in turn, on a thread of its own.

    `deliver(jobs)` is called on that thread with the jobs that a batch completed, `on_crash()` when the thread
    ends although it was not told to; then every job that waits has failed.
    """

    def __init__(
        self,
        group: Group,
        schedulers: dict[str, Scheduler],
        deliver: Callable[[list[Job]], None],
        metrics: Metrics,
        *,
        on_crash: Callable[[], None],
    ) -> None:
        self._group = group
        self._schedulers = schedulers
        self._turn = list(schedulers)
        self._deliver = deliver
        self._metrics = metrics
        self._on_crash = on_crash
        self._wake = threading.Condition()
        self._stopping = False
        self._running = Batch()
        self._thread = threading.Thread(target=self._run, name="guerdon-loop", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, model: str, job: Job) -> None:
        """Queues a job; raises Overloaded where the queue is full, Unavailable once stopping."""
        with self._wake:
            if self._stopping:
                raise Unavailable("the server is stopping; try another one, or again later")
            self._schedulers[model].add(job)
            self._wake.notify()

    def check_room(self, model: str, num_sequences: int) -> None:
        """Raises Overloaded where the model's queue is full already."""
        with self._wake:
            self._schedulers[model].check_room(num_sequences)

    def cancel(self, model: str, job: Job) -> None:
        """Drops what of a job has not started."""
        with self._wake:
            self._schedulers[model].cancel(job)

    def stop(self, timeout_s: float) -> None:
        """Finishes what is queued, then ends the thread and the worker of every rank; waits at most `timeout_s`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def depth(self) -> dict[str, tuple[int, int]]:
        """Sequences and tokens that wait, by model."""
        with self._wake:
            return {name: (s.num_sequences, s.num_tokens) for name, s in self._schedulers.items()}

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            log.critical("the thread that computes has ended; nothing can be scored any more", exc_info=True)
            self._on_crash()
            self._fail_all(ServerFault("the server cannot compute any more; restart it"))

    def _fail_all(self, error: GuerdonError) -> None:
        with self._wake:
            self._stopping = True
            jobs = {job: None for s in self._schedulers.values() for job in s.drop_all()}
        jobs |= dict.fromkeys(self._running.jobs())
        for job in jobs:
            job.results = [error if r is None else r for r in job.results]
        self._deliver(list(jobs))

    def _serve(self) -> None:
        while (taken := self._next()) is not None:
            model, batch = taken
            self._running = batch
            started = time.monotonic()
            results = self._execute(model, batch)
            seconds = time.monotonic() - started
            with self._wake:
                self._schedulers[model].observe(batch.num_tokens, seconds)
            self._metrics.batch(model, len(batch.entries), batch.num_tokens, seconds)
            self._resolve(batch, results, seconds)
        self._group.lead(Command(Signal.EXIT))

    def _next(self) -> tuple[str, Batch] | None:
        """Waits for the next batch, the models taking turns; None when stopping and nothing is left."""
        with self._wake:
            while True:
                now = time.monotonic()
                for name in self._turn:
                    batch = self._schedulers[name].take(now, hurry=self._stopping)
                    if batch is not None:
                        self._turn.remove(name)
                        self._turn.append(name)
                        return name, batch
                if self._stopping:
                    return None
                starts = [t for s in self._schedulers.values() if (t := s.starts_at()) is not None]
                self._wake.wait(min(starts) - now if starts else None)

    def _execute(self, model: str, batch: Batch) -> list[Result]:
        """Results in batch order; when a batch raises, halves are tried, so that only the guilty one fails."""
        try:
            results = self._group.lead(Command(Signal.FORWARD, model, batch.sequences))
            if len(results) != len(batch.entries):
                raise ValueError(f"{len(results)} results for {len(batch.entries)} samples")
            return results
        except GuerdonError as e:
            error: GuerdonError = e
        # SystemExit, too: what a user's function raises must not end this thread.
        except BaseException as e:
            error = ServerFault(f"the model failed on this sample: {type(e).__name__}: {e}")
            if len(batch.entries) == 1:
                log.exception("%s failed on a sample", model)
        if len(batch.entries) == 1 or all(job.cancelled for job, _ in batch.entries):
            return [error] * len(batch.entries)
        half = len(batch.entries) // 2
        return [
            *self._execute(model, Batch(batch.entries[:half])),
            *self._execute(model, Batch(batch.entries[half:])),
        ]

    def _resolve(self, batch: Batch, results: list[Result], seconds: float) -> None:
        for (job, i), result in zip(batch.entries, results, strict=True):
            job.results[i] = result
        finished = []
        for job, count in batch.jobs().items():
            job.compute_s += seconds
            job.unanswered -= count
            if not job.unanswered and not job.cancelled:
                finished.append(job)
        if finished:
            self._deliver(finished)
