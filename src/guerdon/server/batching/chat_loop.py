"""A thread that computes nothing: takes samples from the queues of judges in words, and has them asked.

It has an asyncio loop of its own, so that judges' TLS and JSON do not hold up the requests to other models, and so
that it starts, stops and fails as the loops that compute do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from guerdon.core import Score
from guerdon.errors import GuerdonError, RanksLost, ServerFault, Unavailable, describe
from guerdon.server.batching.jobs import Job
from guerdon.server.batching.orders import Order
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.chat_judge.answer_cache import AnswerCache
from guerdon.server.chat_judge.asking import Asker
from guerdon.server.logs import failure, without_frames
from guerdon.server.metrics import Metrics
from guerdon.settings.chat_judges import ChatJudgeConfig

log = logging.getLogger(__name__)

_STOPPING = "the server is stopping; try another one, or again later"
_LAST_S = 2.0
"""Time to keep what was answered when the calls in progress are ended."""


class ChatLoop:
    """Asks all judges in words of a server, each `concurrency` samples at a time.

    `submit`, `cancel` and what else the service calls is as in `Loop`.
    """

    def __init__(
        self,
        judges: list[ChatJudgeConfig],
        schedulers: dict[str, Scheduler],
        deliver: Callable[[list[Job]], None],
        metrics: Metrics,
        *,
        on_crash: Callable[[], None],
    ) -> None:
        """Locks the folders of answers; raises StartError if one cannot be used."""
        self._judges, self._schedulers = judges, schedulers
        self._deliver, self._metrics, self._on_crash = deliver, metrics, on_crash
        self._lock = threading.Lock()
        self._is_stopping = False
        self.loss: GuerdonError | None = None
        self._begun: dict[str, dict[Job, float]] = {judge.name: {} for judge in judges}
        self._tasks: dict[Job, set[asyncio.Task[None]]] = {}
        self._num_running = dict.fromkeys(self._begun, 0)
        self._askers: dict[str, Asker] = {}
        self._folders = {judge.name: Path(judge.cache).expanduser().resolve() for judge in judges}
        self._caches: dict[Path, AnswerCache] = {}
        try:
            for folder in self._folders.values():
                if folder not in self._caches:
                    self._caches[folder] = AnswerCache(folder)
        except BaseException:
            self._close_caches()
            raise
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="guerdon-judges", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._asyncio = asyncio.new_event_loop()
        self._thread.start()

    # ------------------------------------------------------------------------------- called by other threads

    def submit(self, model: str, job: Job) -> None:
        """Queues a job; raises Overloaded if the queue is full, Unavailable once stopping."""
        with self._lock:
            if self._is_stopping:
                raise Unavailable(_STOPPING)
            self._schedulers[model].add(job)
        self._wake()

    def cancel(self, model: str, job: Job) -> None:
        """Drops what of a job is not answered; calls in progress end, and their answers are kept."""
        with self._lock:
            self._schedulers[model].cancel(job)
            self._begun[model].pop(job, None)
        self._call(self._cancel_tasks, job)

    def check_room(
        self, model: str, num_sequences: int, num_tokens: int = 0, client: str = "", seconds_left: float = math.inf
    ) -> None:
        """Raises Overloaded if the judge's queue has no room for a request that is not decoded yet.

        How long a judge's calls take is not known, so that there is time for all.
        """
        with self._lock:
            self._schedulers[model].room.check_coming(num_sequences, num_tokens, client)

    def depth(self) -> dict[str, tuple[int, int]]:
        """Returns the waiting samples and tokens by judge."""
        with self._lock:
            rooms = {name: scheduler.room for name, scheduler in self._schedulers.items()}
            return {name: (room.sequences.taken, room.tokens.taken) for name, room in rooms.items()}

    def requests(self) -> dict[str, tuple[int, int]]:
        """Returns by judge the requests that are asked about, at least in part, and those that wait."""
        with self._lock:
            waiting = {name: scheduler.requests() for name, scheduler in self._schedulers.items()}
            return {name: (len(begun.union(self._begun[name])), count) for name, (begun, count) in waiting.items()}

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Finishes what is queued and the calls in progress, then ends the thread; waits at most `timeout_s`.

        What is not done by then is ended if there was any time. Returns whether the thread has ended.
        """
        with self._lock:
            self._is_stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if timeout_s and self._thread.is_alive():
                self._abandon()
                self._thread.join(_LAST_S)
        elif self._asyncio is None:
            self._close_caches()
        return not self._thread.is_alive()

    def fail_waiting(self, loss: GuerdonError) -> None:
        """Fails all that waits; accepts nothing more. Thread-safe."""
        with self._lock:
            self.loss, self._is_stopping = loss, True
            jobs = [job for scheduler in self._schedulers.values() for job in scheduler.drop_all()[0]]
        self._fail(loss, jobs)
        self._wake()

    def fail(self, loss: RanksLost, breaks_s: float) -> None:
        """Fails all that waits and is being asked; what was answered by now is kept."""
        self.fail_waiting(loss)
        with self._lock:
            jobs = [job for begun in self._begun.values() for job in begun]
        self._fail(loss, jobs)
        self._abandon()

    def _fail(self, error: GuerdonError, jobs: list[Job]) -> None:
        for job in jobs:
            job.cancelled = True  # so that it is delivered once
            job.results = [error if r is None else r for r in job.results]
        self._deliver(jobs)

    def _abandon(self) -> None:
        self._is_abandoned = True
        self._wake()

    def _wake(self) -> None:
        self._call(self._changed.set)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if self._asyncio is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._asyncio.call_soon_threadsafe(function, *args)

    # ------------------------------------------------------------------------------------------- the thread itself

    def _run(self) -> None:
        assert self._asyncio is not None
        try:
            with asyncio.Runner(loop_factory=lambda: self._asyncio) as runner:  # type: ignore[arg-type, return-value]
                runner.run(self._serve())
        except BaseException as e:
            failure(log, logging.CRITICAL, "the thread that asks judges has ended", error=e)
            self.loss = loss = ServerFault("the server cannot ask its judges any more; restart it")
            self._on_crash()
            self.fail_waiting(loss)
            self._fail(loss, [job for begun in self._begun.values() for job in begun])
        finally:
            self._close_caches()

    async def _serve(self) -> None:
        caches = [self._caches[self._folders[judge.name]] for judge in self._judges]
        self._askers = {
            judge.name: Asker(judge, cache, self._metrics) for judge, cache in zip(self._judges, caches, strict=True)
        }
        try:
            while not self._is_abandoned:
                self._changed.clear()
                self._take_all()
                if self._is_stopping and not any(self._num_running.values()):
                    break
                await self._changed.wait()
            endings = [asyncio.create_task(work) for work in (self._finish(), self._until_abandoned())]
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            for ending in endings:
                ending.cancel()
        finally:
            for job in list(self._tasks):
                self._cancel_tasks(job)
            for cache in self._caches.values():
                await cache.abandon()
            for asker in self._askers.values():
                await asker.close()

    async def _finish(self) -> None:
        for cache in self._caches.values():
            await cache.finish()

    async def _until_abandoned(self) -> None:
        while not self._is_abandoned:
            self._changed.clear()
            await self._changed.wait()

    def _take_all(self) -> None:
        """Has samples asked about while their judges have room."""
        for judge in self._judges:
            name = judge.name
            while self._num_running[name] < judge.concurrency:
                now = time.monotonic()
                with self._lock:
                    batch = self._schedulers[name].take(now)
                    if batch is None or isinstance(batch, Order):
                        break
                    for job in batch.jobs():
                        self._begun[name].setdefault(job, now)
                for job, i in batch.entries:
                    self._num_running[name] += 1
                    task = asyncio.create_task(self._ask(name, job, i))
                    self._tasks.setdefault(job, set()).add(task)
                    task.add_done_callback(lambda task, name=name, job=job: self._ended(name, job, task))  # type: ignore[misc]

    async def _ask(self, name: str, job: Job, i: int) -> None:
        result: Score | GuerdonError
        try:
            result = await self._askers[name].score(job.sequences[i].text or "")
        except GuerdonError as e:
            result = without_frames(e)
        # One sample's bug is not the others'.
        except Exception as e:
            failure(log, logging.ERROR, "%s failed on a sample", name, error=e)
            result = ServerFault(f"{name} failed on this sample: {describe(e)}")
        with self._lock:
            if job.cancelled:
                return
            job.results[i] = result
            job.unanswered -= 1
            if job.unanswered:
                return
            job.compute_s = time.monotonic() - self._begun[name].pop(job)
        self._deliver([job])

    def _ended(self, name: str, job: Job, task: asyncio.Task[None]) -> None:
        self._num_running[name] -= 1
        tasks = self._tasks[job]
        tasks.discard(task)
        if not tasks:
            del self._tasks[job]
        self._changed.set()

    def _cancel_tasks(self, job: Job) -> None:
        for task in self._tasks.get(job, ()):
            task.cancel()

    def _close_caches(self) -> None:
        for cache in self._caches.values():
            cache.close()
        self._caches = {}
