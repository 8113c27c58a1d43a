"""The service under every transport: reads a request's samples, queues them, awaits and assembles the scores."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike

from guerdon.core import Executor, ModelInfo, ScoreReply, ScoreRequest, Sequence
from guerdon.critic_core import ControlRequest, TrainRequest
from guerdon.errors import DeadlineExceeded, GuerdonError, InvalidRequest, RanksLost, Unavailable
from guerdon.kinds import all_kinds, routes, samples
from guerdon.kinds.kind import Asks, Served
from guerdon.server import reading, tracing, triton
from guerdon.server.auth import Access
from guerdon.server.batching.jobs import Job, Limits
from guerdon.server.batching.loops import Loops, deliver
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.catalog import Catalog, Entry, batch_limits
from guerdon.server.cohorts import Cohorts
from guerdon.server.critic.controller import Critic, OperationResult, UnreadRequest
from guerdon.server.metrics import Metrics
from guerdon.server.model_repository import Repository
from guerdon.server.page.recorder import PageRecorder
from guerdon.settings.config import ServedModelConfig, ServerConfig

_BYTES_A_TOKEN = 8
"""Size of an id in binary form; text and JSON take about as much per token."""

Hold = Callable[[list[Sequence], ModelInfo], None]


class Service:
    """Scores samples by every served model, and passes a critic's operations on.

    Its methods belong to one asyncio loop, unless they say otherwise.
    """

    def __init__(
        self,
        group: Executor,
        models: ListLike[tuple[ServedModelConfig, Served]],
        config: ServerConfig,
        limits: dict[str, Limits] | None = None,
        critic: Critic | None = None,
        *,
        num_parts: int = 1,
        is_alone: bool = True,
        since_ns: int | None = None,
    ) -> None:
        """`limits` overrides the config's batch limits, by model name; the trainer of `critic` is among the models.

        Each of `num_parts` computes its part of a batch, so that batches are as many times larger, unless the model
        `takes_all`. `is_alone` is true if this process is the whole `group`: then its devices compute at once.
        `since_ns` is when the models' files began to be read, by `file_time_ns`; by default now.
        """
        self.ready = False
        self.loss: GuerdonError | None = None
        """The error that ended the service, if any."""
        self.ending = asyncio.Event()
        self.critic = critic
        self.metrics = Metrics() if critic is None else critic.metrics
        self.access = Access(config)
        self.traces = tracing.turned_on(config.traces)
        self.reader = reading.Reader()
        self.codec = reading.Workers("codec")
        """Decodes requests and encodes answers."""
        self.max_request_sequences = config.max_request_sequences
        self.timeout_s = config.request_timeout_s
        self._asyncio: asyncio.AbstractEventLoop | None = None
        operations, critic_name = ((), "") if critic is None else (critic.infos, critic.scorer_name)
        self.catalog = Catalog(models, config.rewards, operations, critic_name, since_ns=since_ns)

        def own_limits(model: ServedModelConfig, served: Served) -> Limits:
            return (limits or {}).get(served.info.name) or batch_limits(model, served, num_parts)

        queues: dict[int, Scheduler] = {}  # adapters over one base share a queue, and with it their batches
        for model, served in models:
            members = getattr(served, "members", None) or [served]
            queues[id(served)] = queues.get(id(members[0])) or Scheduler(own_limits(model, served), self.access.names)
        self.loops = Loops(
            group,
            [(model, served.info) for model, served in models],
            {served.info.name: queues[id(served)] for _, served in models},
            lambda jobs: deliver(jobs, self._asyncio),
            self.metrics,
            on_crash=self._end_after_crash,
            traces=self.traces,
            is_alone=is_alone,
        )
        self.cohorts = Cohorts(config, lambda name, request, client: self.score(name, request, client), self.metrics)
        self.repository = Repository(self.catalog, self.loops, group, config, own_limits, is_alone=is_alone)
        self.triton = triton.Family(self.metrics, self.catalog.names(), self.loops.requests)
        self.recorder = PageRecorder(config, self.metrics, self.catalog, self.loops.depth)
        self.metrics.watch(self.loops.depth, self.loops.requests, self.catalog.loaded, self.triton.text)

    async def score(
        self,
        name: str,
        request: ScoreRequest,
        client: str = "",
        *,
        hold: Hold = lambda sequences, info: None,
        started: float | None = None,
    ) -> ScoreReply:
        """Returns one result per sample, in order, or its error; cancelling the call drops what has not started.

        `hold` is called with what will be computed, and raises if its answer has no room. `started` is the monotonic
        time of its arrival. Raises InvalidRequest for the whole request, Overloaded, Unavailable and DeadlineExceeded.
        """
        self._check_size(name, request, client)
        started = time.monotonic() if started is None else started
        if request.cohort and self.cohorts.size(request) > 1 and (info := self.catalog.scored_by(name)).compares:
            return await self.cohorts.score(info, request, client)
        ask = functools.partial(self.score, request=request, client=client, hold=hold, started=started)
        if (made := self.catalog.sums.get(name)) is not None:
            await self._note(made.info, request, reply := await made.ask(request, ask), client)
            self.metrics.components(name, made.statistics())
            return reply
        entry, is_critics = self.catalog.entry(name), name == self.catalog.critic_name
        allowed_s = request.timeout_s or (None if is_critics else self.timeout_s)  # a train request takes its time
        try:
            async with asyncio.timeout(allowed_s):
                if request.asks and routes.names_teachers(request):
                    return await routes.ask_teachers(request, name, self.catalog.awake, ask)
                asked, job = await self._read(entry, request, client, hold, started, started + (allowed_s or math.inf))
                if job.sequences:
                    self.loops.of[name].submit(name, job)
                    await self._computed(job, name)
        except TimeoutError:
            raise DeadlineExceeded(f"not scored within the {allowed_s:g} s that it was allowed") from None
        return await self._answer(entry, request, asked, job)

    async def _read(
        self, entry: Entry, request: ScoreRequest, client: str, hold: Hold, started: float, ends: float
    ) -> tuple[Asks, Job]:
        """Reads the samples for the model that serves when this returns, a critic's in its turn."""
        name = entry.info.name
        critic = self.critic if name == self.catalog.critic_name else None
        if critic is not None and (fault := critic.fault) is not None:
            raise fault
        while True:
            await entry.awake()
            asked = await self.reader.read(entry, request, client)
            hold(accepted := asked.accepted(), asked.served.info)
            job = Job(accepted, request.priority, started, client, ends)
            if len(accepted) > reading.MANY_ROWS:
                await self.reader.run(client, functools.partial(self.loops.price, name, job))
            if critic is not None:
                await critic.wait_for_turn()
            await entry.awake()
            if entry.served is asked.served:  # else another model's tokenizer may read it otherwise
                job.owner = asyncio.get_running_loop().create_future()
                job.traced = None if self.traces is None else tracing.part(name)
                return asked, job

    async def _computed(self, job: Job, name: str) -> None:
        """Waits for a job that is queued; drops it if cancelled."""
        assert isinstance(job.owner, asyncio.Future) and self._asyncio is not None
        try:
            await job.owner
        except asyncio.CancelledError:
            cancel = functools.partial(self.loops.of[name].cancel, name, job)
            cancel() if len(job.sequences) <= reading.MANY_ROWS else self._asyncio.run_in_executor(None, cancel)
            raise
        finally:
            if job.traced is not None:
                job.traced.end(job.taken, len(job.sequences), job.num_tokens)

    async def _answer(self, entry: Entry, request: ScoreRequest, asked: Asks, job: Job) -> ScoreReply:
        """Makes the reply of what was computed, and counts the request."""
        kind = all_kinds.of(info := asked.served.info)

        def work() -> ScoreReply:
            queue_s = max(0.0, job.taken - job.arrived) if job.sequences else 0.0
            version = job.weights_version or info.weights_version
            return kind.finish(asked, asked.reply(job.results, version, queue_s, job.compute_s), self.metrics)

        reply = await self.reader.run_if(len(asked.sequences) > reading.MANY_ROWS, job.client, work)
        self.metrics.add("guerdon_received_tokens", job.num_tokens, info.name)
        await self._note(entry.info, request, reply, job.client)
        return reply

    def _check_size(self, name: str, request: ScoreRequest, client: str) -> None:
        tracing.tell(sequences=(num_samples := len(request)))
        if num_samples > self.max_request_sequences:
            raise InvalidRequest(
                f"the request has {num_samples:,} samples, and this server takes at most "
                f"{self.max_request_sequences:,}; send them in several requests, or start it with a larger "
                "--max-request-sequences"
            )
        if request.tokens is None and name in self.loops.of:  # texts for which there is no room are not tokenised
            self.loops.of[name].check_room(name, num_samples, client=client)

    async def _note(self, info: ModelInfo, request: ScoreRequest, reply: ScoreReply, client: str) -> None:
        """Counts an answered request."""
        lengths = reply.lengths
        if not any(lengths):
            num_read = max(len(request), *(map(len, request.messages or ())), 0)
            estimate = functools.partial(samples.estimate_lengths, request)
            lengths = await self.reader.run_if(num_read > reading.MANY_ROWS, client, estimate)
        num_failed = self.metrics.reply(info.name, reply)
        tracing.tell(model=info.name, failed_sequences=num_failed, weights_version=reply.weights_version)
        self.recorder.note(info, request, reply, lengths)

    def check_room(self, name: str, client: str = "", num_bytes: int = 0, seconds_left: float = math.inf) -> None:
        """Raises Overloaded if the model's queue has no room or no time for this client, Unavailable if it is unloaded.

        The request has `num_bytes` and is not decoded yet; its tokens are estimated, and padding counts. If the queue
        is more than half full, one with much padding may be refused although it would fit.
        """
        made, num_tokens = self.catalog.sums.get(name), num_bytes // _BYTES_A_TOKEN
        for component in (name,) if made is None else made.components:
            self.catalog.entry(component).check_serves()
            self.loops.of[component].check_room(component, 1, num_tokens, client, seconds_left)

    async def call(
        self, name: str, request: TrainRequest | ControlRequest | UnreadRequest, client: str = ""
    ) -> OperationResult:
        """Does a critic's operation; raises what `Critic.call` raises."""
        assert self.critic is not None
        tracing.tell(model=name)
        loop = self.loops.of[self.critic.scorer_name]
        return await self.critic.call(self.catalog.operations[name].operation, request, loop, client)

    # -------------------------------------------------------------------------------- readiness and shutdown

    def start(self) -> None:
        """Begins to serve; call it on the asyncio loop that will call `score`."""
        self._asyncio = asyncio.get_running_loop()
        self.loops.start()
        self.recorder.start()
        self.ready = self.loss is None

    def check_ready(self) -> None:
        """Raises Unavailable if nothing is accepted, RanksLost or ServerFault if that is why."""
        if self.loss is not None:
            raise copy.copy(self.loss)
        if not self.ready:
            raise Unavailable("the server is not ready: it is starting or stopping")

    @property
    def is_computing(self) -> bool:
        """Whether a thread that computes is alive; it may be inside a command."""
        return self.loops.is_running

    def stop(self, timeout_s: float = 30.0) -> None:
        """Finishes queued work and ends the computing threads; blocks until then, at most `timeout_s`."""
        self.ready = False
        self.recorder.stop()
        has_ended = self.loops.stop(timeout_s)
        self.loss = self.loss or self.loops.loss
        if self.critic is not None and has_ended:
            self.critic.close()
        self.reader.close()
        self.codec.close()
        if self.traces is not None:
            self.traces.close()

    def end(self) -> None:
        """Asks whoever runs the service to stop it, as on SIGTERM; idempotent, from any thread."""
        if self._asyncio is None:
            self.ending.set()
            return
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._asyncio.call_soon_threadsafe(self.ending.set)

    def end_after_loss(self, loss: RanksLost) -> None:
        """Fails all requests and ends the service; call it on a thread that neither computes nor serves."""
        self.ready, self.loss = False, loss
        try:
            self.loops.fail_waiting(loss)  # before the journal, which may wait for a slow disk
            if self.critic is not None:
                self.critic.give_up(loss)
            self.loops.fail(loss)
        finally:
            self.end()

    def _end_after_crash(self) -> None:
        """Called on a loop's thread when it crashes: its models will not be scored any more."""
        self.ready, self.loss = False, self.loss or self.loops.loss
        if not isinstance(self.loss, RanksLost):  # else `end_after_loss` answers the clients first
            self.end()
