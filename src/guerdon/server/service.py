"""The data plane, the same for every transport: check, tokenise, admit, await, assemble."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as ListLike

from guerdon.core import (
    ControlRequest,
    ModelInfo,
    OperationInfo,
    Score,
    ScoreReply,
    ScoreRequest,
    Sequence,
    TrainRequest,
)
from guerdon.errors import DeadlineExceeded, GuerdonError, InvalidRequest, Overloaded, RanksLost, Unavailable, named
from guerdon.server import reading, tracing, triton
from guerdon.server import truncation as samples
from guerdon.server.auth import Access
from guerdon.server.batching.halving import Group
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.scheduler import Job, Limits, Scheduler
from guerdon.server.catalog import Catalog, Served
from guerdon.server.critic.critic import Coming, Critic
from guerdon.server.critic.critic import Result as Done
from guerdon.server.metrics import Metrics
from guerdon.server.model_repository import Repository
from guerdon.server.page.watch import Watch
from guerdon.server.sums import Sum
from guerdon.settings.config import ModelConfig, ServerConfig

_BYTES_A_TOKEN = 8
"""Of ids in binary form; text and JSON have about as many."""


class Service:
    """Answers score requests for all served models, and what is asked of a critic.

    All its methods belong to one asyncio loop.
    """

    def __init__(
        self,
        group: Group,
        models: ListLike[tuple[ModelConfig, Served]],
        config: ServerConfig,
        limits: dict[str, Limits] | None = None,
        critic: Critic | None = None,
        *,
        num_parts: int = 1,
        is_alone: bool = True,
    ) -> None:
        """`limits` overrides, by model name, the batch limits that come from the config.

        The trainer of `critic` is among the models, and was restored before. Of a batch each of `num_parts` computes
        its part, so that it may be so much larger, but for a model that `takes_all`. `is_alone` says whether this
        process is the whole `group`.
        """
        self.ready = False
        self.loss: GuerdonError | None = None
        self.ending = asyncio.Event()
        self.metrics = Metrics() if critic is None else critic.metrics
        self.access = Access(config)
        self.traces = tracing.turned_on(config.traces)
        self.critic = critic
        self._config = config
        self.catalog = (
            Catalog(models, config.rewards, ())
            if critic is None
            else Catalog(models, config.rewards, critic.infos, critic.lane)
        )

        def own_limits(model: ModelConfig, served: Served) -> Limits:
            return (limits or {}).get(served.info.name) or _limits(model, served, num_parts)

        schedulers = {
            served.info.name: Scheduler(own_limits(model, served), self.access.names) for model, served in models
        }
        self._loop = Loop(
            group,
            schedulers,
            self._deliver,
            self.metrics,
            on_crash=self._crashed,
            recheck={served.info.name: model.recheck_share for model, served in models},
            dtypes={served.info.name: served.info.dtype for _, served in models},
            traces=self.traces,
        )
        self.repository = Repository(
            self.catalog, self._loop, group, config.model_repository, own_limits, is_alone=is_alone
        )
        self.reader = reading.Reader()
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self.metrics.watch_queue(self._loop.depth, self._loop.requests)
        self.metrics.watch_models(self.catalog.loaded)
        names = [info.name for info in self.catalog.models()]
        self.triton = triton.Family(self.metrics, names, self._loop.requests)
        self.metrics.watch_text(self.triton.text)
        self.watch = Watch(config, self.metrics, self.catalog, self._loop.depth)

    def start(self) -> None:
        """Begins to serve; call it on the asyncio loop that will call `score`."""
        self._asyncio = asyncio.get_running_loop()
        self._loop.start()
        self.watch.start()
        self.ready = self.loss is None

    def stop(self, timeout_s: float = 30.0) -> None:
        """Finishes what is queued and ends the worker; blocks until then, at most `timeout_s`."""
        self.ready = False
        self.watch.stop()
        has_ended = self._loop.stop(timeout_s)
        self.loss = self.loss or self._loop.loss
        if self.critic is not None and has_ended:
            self.critic.close()
        self.reader.close()
        if self.traces is not None:
            self.traces.close()

    def end(self) -> None:
        """Has whoever runs the service stop it, as on SIGTERM; from any thread, and as often as one likes."""
        if self._asyncio is None:
            self.ending.set()
            return
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._asyncio.call_soon_threadsafe(self.ending.set)

    def lost(self, loss: RanksLost) -> None:
        """Fails all that waits or runs, and ends the service; from another thread than those that compute and serve."""
        self.ready, self.loss = False, loss
        try:
            self._loop.fail_waiting(loss)  # before the journal, which may wait for a slow disk
            if self.critic is not None:
                self.critic.give_up(loss)
            self._loop.fail(loss)
        finally:
            self.end()

    @property
    def is_computing(self) -> bool:
        """Whether the thread lives that leads the ranks, which may be amid a command."""
        return self._loop.is_running

    def check_ready(self) -> None:
        """Raises Unavailable where nothing is taken on, RanksLost or ServerFault where that is why."""
        if self.loss is not None:
            raise copy.copy(self.loss)
        if not self.ready:
            raise Unavailable("the server is not ready: it is starting or stopping")

    @property
    def max_request_sequences(self) -> int:
        """The most samples of one request."""
        return self._config.max_request_sequences

    def is_ready(self, name: str | None = None) -> bool:
        """Whether the model or operation of that name can be asked, None for all of them that are loaded."""
        has_fault = self.critic is not None and self.critic.fault is not None
        is_critics = self.critic is not None and name in (None, self.critic.lane, *self.catalog.operations)
        return self.ready and not (has_fault and is_critics) and (name is None or self.catalog.is_loaded(name))

    def why_not_ready(self) -> str:
        """What `is_ready` tells of the whole server in words, empty where it is ready."""
        error = self.loss or (None if self.critic is None else self.critic.fault)
        if error is not None:
            return str(error)
        return "" if self.ready else "it is starting or stopping"

    def check_room(self, name: str, client: str = "", num_bytes: int = 0) -> None:
        """Raises Overloaded where the model's queue has no room for this client, Unavailable where it is unloaded.

        For whoever has not decoded a request yet, of `num_bytes`: then that is not done for nothing. Where more than
        half the queue is full, padding may have a request refused that would have found room.
        """
        for component in self._components(name):
            self.catalog.entries[component].loaded()
            self._loop.check_room(component, 1, num_bytes // _BYTES_A_TOKEN, client)

    @contextlib.contextmanager
    def arriving(self, name: str) -> Iterator[None]:
        """A context in which a request comes in: what of a critic's fails there is told as all its failures are."""
        try:
            yield
        except (GuerdonError, asyncio.CancelledError) as e:
            if self.critic is not None and name in self.catalog.operations:
                self.critic.refused(self.catalog.operations[name].operation, e)
            raise

    async def call(
        self, name: str, asked: ScoreRequest | TrainRequest | ControlRequest | Coming, client: str = ""
    ) -> ScoreReply | Done:
        """What is asked of the model or operation of that name; raises what `score` and `Critic.call` raise."""
        if isinstance(asked, ScoreRequest):
            return await self.score(name, asked, client)
        critic, info = self.critic, self.catalog.model(name)
        assert critic is not None and isinstance(info, OperationInfo)
        tracing.tell(model=name)
        return await critic.call(info.operation, asked, self._loop, client)

    async def score(self, name: str, request: ScoreRequest, client: str = "") -> ScoreReply:
        """One result a sample, in order; cancelling the call drops what has not started.

        Raises InvalidRequest where the request as a whole is wrong, Overloaded, Unavailable and
        DeadlineExceeded. What is wrong with single samples is told in their places in the reply.
        """
        tracing.tell(model=name, sequences=len(request))
        if len(request) > self._config.max_request_sequences:
            raise InvalidRequest(
                f"the request has {len(request):,} samples, and this server takes at most "
                f"{self._config.max_request_sequences:,}; send them in several requests, or start it with a larger "
                "--max-request-sequences"
            )
        # Behind a train a score may wait for as long as that takes.
        is_critics = self.critic is not None and self.critic.lane == name
        allowed_s = request.timeout_s or (None if is_critics else self._config.request_timeout_s)
        deadline = time.monotonic() + (allowed_s or math.inf)
        try:
            async with asyncio.timeout(allowed_s):
                if name in self.catalog.sums:
                    return await self._summed(self.catalog.sums[name], request, client, deadline)
                return (await self._score(name, request, time.monotonic(), client, deadline))[0]
        except TimeoutError:
            raise DeadlineExceeded(f"not scored within the {allowed_s:g} s that it was allowed") from None

    def _components(self, name: str) -> tuple[str, ...]:
        """The models that score what is asked of that name."""
        made = self.catalog.sums.get(name)
        return (name,) if made is None else made.components

    async def _summed(self, made: Sum, request: ScoreRequest, client: str, deadline: float) -> ScoreReply:
        """What all components together make of the request; where one refuses it, the others drop it, too."""
        made.check(request)
        started = time.monotonic()

        async def asked(component: str) -> tuple[ScoreReply, list[int]]:
            try:
                return await self._score(component, request, started, client, deadline)
            except Overloaded as e:
                raise named(component, e) from e

        try:
            async with asyncio.TaskGroup() as group:
                parts = []
                for component in made.components:
                    parts.append(group.create_task(asked(component)))
                    await asyncio.sleep(0)  # what a large request is to all of them, others need not wait for
        except BaseExceptionGroup as e:
            raise e.exceptions[0] from None
        replies, lengths = zip(*(part.result() for part in parts), strict=True)
        reply = made.combine(replies)
        about = reply.lengths if any(reply.lengths) else [max(row) for row in zip(*lengths, strict=True)]
        self._count(made.info, request, reply, about)
        for component, mean, std in made.statistics():
            self.metrics.set("guerdon_component_mean", mean, made.info.name, component)
            self.metrics.set("guerdon_component_std", std, made.info.name, component)
        return reply

    def _count(self, info: ModelInfo, request: ScoreRequest, reply: ScoreReply, lengths: list[int]) -> None:
        """Counts an answered request; `lengths` are about those of its samples also where the reply has none."""
        name = info.name
        failed = sum(isinstance(r, GuerdonError) for r in reply.results)
        tracing.tell(model=name, failed_sequences=failed, weights_version=reply.weights_version)
        self.metrics.add("guerdon_sequences", len(reply.results) - failed, name, "ok")
        if failed:
            self.metrics.add("guerdon_sequences", failed, name, "failed")
        self.metrics.observe("guerdon_request_queue_time_seconds", reply.queue_s, name)
        self.watch.note(info, request, reply, lengths)
        self.metrics.observe("guerdon_request_inference_time_seconds", reply.compute_s, name)

    async def _score(
        self, name: str, request: ScoreRequest, started: float, client: str, deadline: float
    ) -> tuple[ScoreReply, list[int]]:
        """The reply, and its samples' lengths in tokens, about those of texts that the model itself reads."""
        self.catalog.model(name)
        if self.critic is not None and self.critic.lane == name and (fault := self.critic.fault) is not None:
            raise fault
        version, sequences, wrong = await self._sequences(name, request, client)
        results: list[Score | GuerdonError | None] = [*wrong]
        accepted = [i for i, error in enumerate(wrong) if error is None]
        job = Job([sequences[i] for i in accepted], request.priority, started, client, deadline)
        job.traced = tracing.part(name)
        if accepted:
            await self._answered(name, job)
            for i, result in zip(accepted, job.results, strict=True):
                if isinstance(result, Unavailable):
                    raise copy.copy(result)  # it is raised for other requests, too
                results[i] = result
        self.metrics.add("guerdon_received_tokens", sum(s.num_tokens for s in job.sequences), name)
        queue_s = max(0.0, job.taken - started) if accepted else 0.0
        done: list[Score | GuerdonError] = [r for r in results if r is not None]
        lengths = [len(s.tokens) for s in sequences]
        reply = ScoreReply(done, lengths, job.weights_version or version, queue_s, job.compute_s)
        about = [s.num_tokens for s in sequences]
        self._count(self.catalog.entries[name].info, request, reply, about)
        return reply, about

    async def _sequences(
        self, name: str, request: ScoreRequest, client: str
    ) -> tuple[str, list[Sequence], list[InvalidRequest | None]]:
        """The version that serves when this returns, what that is to compute, and of each what is wrong with it."""
        entry = self.catalog.entries[name]
        while True:
            model, served = entry.config, entry.loaded()
            cut = samples.truncation(request, model, served.info)
            reading.check(served, request)
            if served.encoder is not None and request.tokens is None:
                self._loop.check_room(name, len(request), client=client)  # before work is spent on it
            rows = await self.reader.rows(served, request, cut, client)
            if entry.served is served:
                break  # else another model has taken its place, whose tokenizer may be another
        sequences = [samples.sequence(row, request, i) for i, row in enumerate(rows)]
        if cut is not None:
            sequences = [samples.truncated(s, cut) for s in sequences]
        wrong = [
            row if isinstance(row, InvalidRequest) else samples.wrong(s, served.info)
            for row, s in zip(rows, sequences, strict=True)
        ]
        return served.info.weights_version, sequences, wrong

    async def _answered(self, name: str, job: Job) -> None:
        """Returns when every sequence of the job has its result."""
        assert self._asyncio is not None, "start() comes first"
        job.owner = future = self._asyncio.create_future()
        self._loop.submit(name, job)
        try:
            await future
        except asyncio.CancelledError:
            self._loop.cancel(name, job)
            raise
        finally:
            if job.traced is not None:
                job.traced.end(job.taken, len(job.sequences), sum(s.num_tokens for s in job.sequences))

    def _deliver(self, jobs: list[Job]) -> None:
        """Called on the loop's thread; a batch wakes the asyncio loop once."""
        if not jobs:
            return
        assert self._asyncio is not None
        try:
            self._asyncio.call_soon_threadsafe(_resolve, jobs)
        except RuntimeError:
            if not self._asyncio.is_closed():  # nobody waits any more
                raise

    def _crashed(self) -> None:
        """Called on the loop's thread when it cannot go on: nothing will be scored any more, and the service ends."""
        self.ready, self.loss = False, self.loss or self._loop.loss
        if not isinstance(self.loss, RanksLost):  # of which `lost` tells the clients first
            self.end()


def _limits(model: ModelConfig, served: Served, num_parts: int) -> Limits:
    return Limits(
        max_batch_tokens=served.max_batch_tokens * (1 if served.takes_all else num_parts),
        max_queue_tokens=model.max_queue_tokens,
        max_queue_sequences=model.max_queue_sequences,
        shares=served.info.path == "packed+shared",
    )


def _resolve(jobs: list[Job]) -> None:
    for job in jobs:
        future = job.owner
        assert isinstance(future, asyncio.Future)
        if not future.done():
            future.set_result(None)
