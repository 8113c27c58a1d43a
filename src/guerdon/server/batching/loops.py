"""A loop for each device, and for each isolated function, so that models on different devices compute at the same time.

Loops share only what is thread-safe. The worker has each model for one loop alone. Metrics, traces and PyTorch's caches
of pinned memory and compiled kernels lock. Every batch wakes the asyncio loop by `call_soon_threadsafe`. Each loop has
queues, budgets and rechecks of its own. Nothing that is served draws random numbers. A forward's other inputs, such as
the batch for attention, are context variables, separate in every thread. Building a model excludes all loops at once
(`distributed/computing.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any

from guerdon.core import Executor, ModelInfo, Score
from guerdon.errors import GuerdonError, RanksLost, ServerFault, describe
from guerdon.kinds import all_kinds
from guerdon.server import tracing
from guerdon.server.batching.jobs import Batch, Job, Limits
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.chat_judge.answer_cache import AnswerCache
from guerdon.server.chat_judge.calling import Asker
from guerdon.server.logs import failure, without_frames
from guerdon.server.metrics import Metrics
from guerdon.settings.chat_judges import ChatJudgeConfig
from guerdon.settings.config import LoadedModelConfig, ServedModelConfig

log = logging.getLogger(__name__)

_LAST_S = 2.0
"""Time to store answers when calls in progress are cancelled."""
_BREAKS_S = 2.0
"""How soon a command that waits for a lost rank fails by itself, unless the rank's host vanished silently."""

Models = ListLike[tuple[ServedModelConfig, ModelInfo]]
Loaded = ListLike[tuple[LoadedModelConfig, ModelInfo]]


class Loops:
    """Every loop of a service: `of` has each model's, by its name, and `places` the models' names by loop."""

    def __init__(
        self,
        group: Executor,
        models: Models,
        schedulers: dict[str, Scheduler],
        deliver: Callable[[list[Job]], None],
        metrics: Metrics,
        *,
        on_crash: Callable[[], None],
        traces: tracing.Traces | None = None,
        is_alone: bool = True,
    ) -> None:
        """Arguments are those of `Loop`, and `schedulers` has every model's.

        Unless `is_alone`, all models share one loop: each rank has one device, and executes one command at a time.
        """
        loaded: Any = [(model, info) for model, info in models if not all_kinds.of(info).is_remote]
        groups = by_device(loaded) if is_alone else {"ranks": loaded}
        self.places = {place: [info.name for _, info in some] for place, some in groups.items()}
        self._all: list[Loop] = []
        for some in groups.values():
            num_children = all_kinds.of(some[0][1]).num_children(some[0][0]) if is_alone else 0
            loop = Loop(
                group,
                {info.name: schedulers[info.name] for _, info in some},
                deliver,
                metrics,
                on_crash=on_crash,
                recheck={} if num_children else {info.name: model.recheck_share for model, info in some},
                dtypes={info.name: info.dtype for _, info in some},
                traces=traces,
                num_children=num_children,
            )
            self._all.append(loop)
        if remote := [(model, info) for model, info in models if all_kinds.of(info).is_remote]:
            queues = {info.name: schedulers[info.name] for _, info in remote}
            judges: Any = [model for model, _ in remote]
            self._all.append(ChatLoop(judges, group, queues, deliver, metrics, on_crash=on_crash))
            self.places[all_kinds.of(remote[0][1]).device] = [*queues]
        self._schedulers = schedulers
        self.of = {name: loop for loop, names in zip(self._all, self.places.values(), strict=True) for name in names}

    def price(self, name: str, job: Job) -> None:
        """Estimates the cost of a job of many sequences before it is submitted; thread-safe."""
        self._schedulers[name].price(job)

    def start(self) -> None:
        """Starts the threads."""
        for loop in self._all:
            loop.start()

    def depth(self) -> dict[str, tuple[int, int]]:
        """Returns the waiting sequences and tokens by model, orders included."""
        return {name: waiting for loop in self._all for name, waiting in loop.depth().items()}

    def requests(self) -> dict[str, tuple[int, int]]:
        """Returns the numbers of running (at least in part) and waiting requests and orders, by model."""
        return {name: counts for loop in self._all for name, counts in loop.requests().items()}

    @property
    def loss(self) -> GuerdonError | None:
        """The error that ended the first loop that crashed or lost a rank, if any."""
        return next((loop.loss for loop in self._all if loop.loss is not None), None)

    @property
    def is_running(self) -> bool:
        """Whether a thread is alive; it may be inside a command."""
        return any(loop.is_running for loop in self._all)

    def stop(self, timeout_s: float) -> bool:
        """Finishes what is queued, then ends all threads; returns whether they have ended within `timeout_s`."""
        ends = time.monotonic() + timeout_s
        for loop in self._all:
            loop.stop(0.0)  # tell all before waiting for any
        has_ended = all(loop.stop(max(0.0, ends - time.monotonic())) for loop in self._all)
        for loop in self._all:
            loop.close()
        return has_ended

    def fail_waiting(self, loss: GuerdonError) -> None:
        """Fails all that waits; accepts nothing more, and no command follows the running ones. Thread-safe."""
        for loop in self._all:
            loop.fail_waiting(loss)

    def fail(self, loss: RanksLost) -> None:
        """Fails waiting jobs at once, and running ones unless they end soon; called from another thread."""
        self.fail_waiting(loss)
        ends = time.monotonic() + _BREAKS_S
        for loop in self._all:
            loop.fail(loss, max(0.0, ends - time.monotonic()))


def deliver(jobs: list[Job], loop: asyncio.AbstractEventLoop | None) -> None:
    """Wakes all waiters for the jobs on `loop` at once; thread-safe."""

    def resolve() -> None:
        for job in jobs:
            assert isinstance(job.owner, asyncio.Future)
            if not job.owner.done():
                job.owner.set_result(None)

    if jobs:
        assert loop is not None, "start() comes first"
        with contextlib.suppress(RuntimeError):  # it is closed, and nobody waits any more
            loop.call_soon_threadsafe(resolve)


def by_device(models: Loaded) -> Mapping[str, Loaded]:
    """Returns the models by their device; `cuda` is `cuda:0`, and `cpu` is `cpu:0`.

    Functions are together in a place of their own. There they hold up no device, and one thread calls all of them: two
    functions of a user need not be thread-safe with each other. Isolated functions have a place each.
    """
    found: dict[str, list[tuple[LoadedModelConfig, ModelInfo]]] = {}
    for model, info in models:
        device = info.device if ":" in info.device else f"{info.device}:0"
        kind = all_kinds.of(info)
        place = f"child processes of {info.name}" if kind.num_children(model) else kind.device or device
        found.setdefault(place, []).append((model, info))
    return found


class ChatLoop(Loop):
    """Asks all judges in words of a server, each `concurrency` samples at a time; every batch is one sample."""

    _does, _do = "asks judges", "ask its judges"

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

    def _notify(self) -> None:
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
            self._crash(e)
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
