"""A loop that computes nothing: takes samples from the queues of judges in words, and has them asked.

It has an asyncio loop of its own, so that judges' TLS and JSON do not hold up the requests to other models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from guerdon.core import Score
from guerdon.errors import GuerdonError, RanksLost, ServerFault, describe
from guerdon.server.batching.halving import Executor
from guerdon.server.batching.jobs import Batch, Job, Limits
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.chat_judge.answer_cache import AnswerCache
from guerdon.server.chat_judge.asking import Asker
from guerdon.server.logs import failure, without_frames
from guerdon.server.metrics import Metrics
from guerdon.settings.chat_judges import ChatJudgeConfig

log = logging.getLogger(__name__)

_LAST_S = 2.0
"""Time to store answers when calls in progress are cancelled."""


class ChatLoop(Loop):
    """Asks all judges in words of a server, each `concurrency` samples at a time; every batch is one sample."""

    def __init__(
        self,
        judges: list[ChatJudgeConfig],
        group: Executor,
        schedulers: dict[str, Scheduler],
        deliver: Callable[[list[Job]], None],
        metrics: Metrics,
        *,
        on_crash: Callable[[], None],
    ) -> None:
        """Locks the folders of answers; raises StartError if one cannot be used."""
        super().__init__(group, schedulers, deliver, metrics, on_crash=on_crash)
        self._judges = judges
        self._begun: dict[Job, float] = {}
        self._tasks: dict[Job, set[asyncio.Task[None]]] = {}
        self._num_running = {judge.name: 0 for judge in judges}
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

    def start(self) -> None:
        """Starts the thread."""
        self._asyncio = asyncio.new_event_loop()
        super().start()

    # ------------------------------------------------------------------------------- called by other threads

    def change(self, model: str, limits: Limits) -> None:
        """Does nothing: a batch is always one sample."""

    def cancel(self, model: str, job: Job) -> None:
        """Drops a job's unanswered questions; calls in progress end, and their answers are kept."""
        super().cancel(model, job)
        self._call(self._cancel_tasks, job)

    def stop(self, timeout_s: float) -> bool:
        """Finishes what is queued and the calls in progress, then ends the thread; waits at most `timeout_s`.

        Unfinished calls are cancelled if there was any time. Returns whether the thread has ended.
        """
        if not super().stop(timeout_s) and timeout_s:
            self._abandon()
            self._join(_LAST_S)
        return not self.is_running

    def close(self) -> None:
        """Unlocks the folders if the thread never ran."""
        if self._asyncio is None:
            self._close_caches()

    def fail(self, loss: RanksLost, breaks_s: float) -> None:
        """Fails waiting and running questions; answers so far are kept."""
        super().fail(loss, 0.0)
        self._abandon()

    def _abandon(self) -> None:
        self._is_abandoned = True
        self._notify()

    def _notify(self, *, for_all: bool = False) -> None:
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
            self._end_by(e, "the thread of the judges' calls has ended", "ask its judges")
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
                with self._wake:
                    batch = self._schedulers[name].take(now)
                    if not isinstance(batch, Batch):
                        break
                    ((job, i),) = batch.entries
                    self._begun.setdefault(job, now)
                    self._num_running[name] += 1
                    task = asyncio.create_task(self._ask(name, job, i))
                    self._running[task] = name, batch
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
        with self._wake:
            if job.cancelled:
                return
            job.results[i] = result
            job.unanswered -= 1
            if job.unanswered:
                return
            job.compute_s = time.monotonic() - self._begun[job]
        self._deliver([job])

    def _ended(self, name: str, job: Job, task: asyncio.Task[None]) -> None:
        with self._wake:
            self._num_running[name] -= 1
            del self._running[task]
        tasks = self._tasks[job]
        tasks.discard(task)
        if not tasks:
            del self._tasks[job]
            if not job.num_queued:
                del self._begun[job]
        self._changed.set()

    def _cancel_tasks(self, job: Job) -> None:
        if job not in self._tasks:
            self._begun.pop(job, None)
        for task in self._tasks.get(job, ()):
            task.cancel()

    def _close_caches(self) -> None:
        for cache in self._caches.values():
            cache.close()
        self._caches = {}
