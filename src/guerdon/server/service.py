"""The data plane, the same for every transport: check, tokenise, admit, await, assemble."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from guerdon.config import ModelConfig, ServerConfig
from guerdon.core import (
    ControlRequest,
    Message,
    ModelInfo,
    OperationInfo,
    Score,
    ScoreReply,
    ScoreRequest,
    TrainRequest,
    Truncation,
)
from guerdon.errors import (
    DeadlineExceeded,
    GuerdonError,
    InvalidRequest,
    Overloaded,
    RanksLost,
    Unavailable,
    UnknownModel,
    named,
)
from guerdon.messages import response
from guerdon.metrics import Metrics
from guerdon.server import samples
from guerdon.server.critic import Coming, Critic
from guerdon.server.critic import Result as Done
from guerdon.server.loop import Group, Loop
from guerdon.server.rewards import Sum
from guerdon.server.scheduler import Job, Limits, Result, Scheduler

log = logging.getLogger(__name__)


class Encoder(Protocol):
    """Turns text into ids, or says in a text's place what is wrong with it; thread-safe."""

    def encode(
        self, texts: list[str], add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[np.ndarray | InvalidRequest]: ...

    def encode_messages(self, conversations: list[list[Message]]) -> list[np.ndarray | InvalidRequest]: ...


class Served(Protocol):
    """What the service asks of a model that its worker holds: what it is, and how text becomes its ids."""

    info: ModelInfo
    encoder: Encoder | None
    max_batch_tokens: int
    takes_all: bool


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
    ) -> None:
        """`limits` overrides, by model name, the batch limits that come from the config.

        The trainer of `critic` is among the models, and was restored before. Of a batch each of `num_parts` computes
        its part, so that it may be so much larger, but for a model that `takes_all`.
        """
        self.ready = False
        self.loss: RanksLost | None = None
        self.ending = asyncio.Event()
        self.metrics = Metrics() if critic is None else critic.metrics
        self._critic = critic
        self._operations = {} if critic is None else {info.name: info for info in critic.infos}
        self._config = config
        self._models = {served.info.name: (model, served) for model, served in models}
        self._sums = {
            reward.name: Sum(reward, [self._models[part.model][1].info for part in reward.components])
            for reward in config.rewards
        }
        own = {name: _limits(model, served, num_parts) for name, (model, served) in self._models.items()}
        limits = own | (limits or {})
        schedulers = {n: Scheduler(x) for n, x in limits.items()}
        self._loop = Loop(group, schedulers, self._deliver, self.metrics, on_crash=self._crashed)
        self._tokenisers = ThreadPoolExecutor(2, thread_name_prefix="guerdon-tokenise")
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self.metrics.watch_queue(self._loop.depth)
        self.metrics.watch_models(self._infos)

    def start(self) -> None:
        """Begins to serve; call it on the asyncio loop that will call `score`."""
        self._asyncio = asyncio.get_running_loop()
        self._loop.start()
        self.ready = self.loss is None

    def stop(self, timeout_s: float = 30.0) -> None:
        """Finishes what is queued and ends the worker; blocks until then, at most `timeout_s`."""
        self.ready = False
        has_ended = self._loop.stop(timeout_s)
        self.loss = self.loss or self._loop.loss
        if self._critic is not None and has_ended:
            self._critic.close()
        self._tokenisers.shutdown(wait=False, cancel_futures=True)

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
            if self._critic is not None:
                self._critic.give_up(loss)
            self._loop.fail(loss)
        finally:
            self.end()

    @property
    def is_computing(self) -> bool:
        """Whether the thread lives that leads the ranks, which may be amid a command."""
        return self._loop.is_running

    def check_ready(self) -> None:
        """Raises Unavailable where nothing is taken on, RanksLost where that is why."""
        if self.loss is not None:
            raise copy.copy(self.loss)
        if not self.ready:
            raise Unavailable("the server is not ready: it is starting or stopping")

    def models(self) -> list[ModelInfo | OperationInfo]:
        """All that can be asked for by name: sums of rewards, the served models, and the critic's operations."""
        return [*self._infos(), *self._operations.values()]

    def model(self, name: str, version: str = "") -> ModelInfo | OperationInfo:
        """The model or operation of that name; raises UnknownModel, which names those that are served."""
        if version in ("", "1"):
            if name in self._sums:
                return self._sums[name].info
            if name in self._models:
                return self._models[name][1].info
            if name in self._operations:
                return self._operations[name]
        asked = f"{name!r} version {version}" if version else repr(name)
        names = ", ".join(sorted(info.name for info in self.models()))
        raise UnknownModel(f"unknown model {asked}; served here: {names} (version 1)")

    def scored_by(self, name: str) -> ModelInfo:
        """The model that a protocol means which may leave the name out: then the first one, the one named in the
        settings before all others, sums first. A checkpoint's own name will do, as its folder or hub id was given,
        where it is no other model's name.

        Raises UnknownModel, also where several models were loaded from what is named.
        """
        infos = self._infos()
        if not name:
            return infos[0]
        found = [info for info in infos if info.name == name] or [info for info in infos if info.source == name]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(info.name for info in found)
            raise UnknownModel(f"several models were loaded from {name!r}; ask for one by its name: {names}")
        raise UnknownModel(f"unknown model {name!r}; served here: {', '.join(info.name for info in infos)}")

    def is_ready(self, name: str | None = None) -> bool:
        """Whether the model or operation of that name can be asked, None for all of them."""
        has_fault = self._critic is not None and self._critic.fault is not None
        is_critics = self._critic is not None and name in (None, self._critic.lane, *self._operations)
        return self.ready and not (has_fault and is_critics)

    @contextlib.contextmanager
    def arriving(self, name: str) -> Iterator[None]:
        """A context in which a request comes in: what of a critic's fails there is told as all its failures are."""
        try:
            yield
        except (GuerdonError, asyncio.CancelledError) as e:
            if self._critic is not None and name in self._operations:
                self._critic.refused(self._operations[name].operation, e)
            raise

    async def call(self, name: str, asked: ScoreRequest | TrainRequest | ControlRequest | Coming) -> ScoreReply | Done:
        """What is asked of the model or operation of that name; raises what `score` and `Critic.call` raise."""
        if isinstance(asked, ScoreRequest):
            return await self.score(name, asked)
        critic, info = self._critic, self.model(name)
        assert critic is not None and isinstance(info, OperationInfo)
        return await critic.call(info.operation, asked, self._loop)

    async def score(self, name: str, request: ScoreRequest) -> ScoreReply:
        """One result a sample, in order; cancelling the call drops what has not started.

        Raises InvalidRequest where the request as a whole is wrong, Overloaded, Unavailable and
        DeadlineExceeded. What is wrong with single samples is told in their places in the reply.
        """
        # Behind a train a score may wait for as long as that takes.
        is_critics = self._critic is not None and self._critic.lane == name
        allowed_s = request.timeout_s or (None if is_critics else self._config.request_timeout_s)
        try:
            async with asyncio.timeout(allowed_s):
                if name in self._sums:
                    return await self._summed(self._sums[name], request)
                return await self._score(name, request, time.monotonic())
        except TimeoutError:
            raise DeadlineExceeded(f"not scored within the {allowed_s:g} s that it was allowed") from None

    def _infos(self) -> list[ModelInfo]:
        sums = [made.info for made in self._sums.values()]
        return [*sums, *(served.info for _, served in self._models.values())]

    async def _summed(self, made: Sum, request: ScoreRequest) -> ScoreReply:
        """What all components together make of the request; where one refuses it, the others drop it, too."""
        made.check(request)
        started = time.monotonic()

        async def asked(component: str) -> ScoreReply:
            try:
                return await self._score(component, request, started)
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
        reply = made.combine([part.result() for part in parts])
        self._count(made.info.name, reply)
        for component, mean, std in made.statistics():
            self.metrics.set("guerdon_component_mean", mean, made.info.name, component)
            self.metrics.set("guerdon_component_std", std, made.info.name, component)
        return reply

    def _count(self, name: str, reply: ScoreReply) -> None:
        failed = sum(isinstance(r, GuerdonError) for r in reply.results)
        self.metrics.add("guerdon_sequences", len(reply.results) - failed, name, "ok")
        if failed:
            self.metrics.add("guerdon_sequences", failed, name, "failed")
        self.metrics.observe("guerdon_queue_seconds", reply.queue_s, name)

    async def _score(self, name: str, request: ScoreRequest, started: float) -> ScoreReply:
        self.model(name)
        model, served = self._models[name]
        info = served.info
        if self._critic is not None and self._critic.lane == name and (fault := self._critic.fault) is not None:
            raise fault
        cut = samples.truncation(request, model, info)
        results: list[Result | None] = []
        sequences = []
        for i, row in enumerate(await self._rows(name, served, request, cut)):
            s = samples.sequence(row, request, i)
            if cut is not None:
                s = samples.truncated(s, cut)
            sequences.append(s)
            results.append(row if isinstance(row, InvalidRequest) else samples.wrong(s, info))
        accepted = [i for i, r in enumerate(results) if r is None]
        job = Job([sequences[i] for i in accepted], request.priority, started)
        if accepted:
            await self._answered(name, job)
            for i, result in zip(accepted, job.results, strict=True):
                if isinstance(result, Unavailable):
                    raise copy.copy(result)  # it is raised for other requests, too
                results[i] = result
        self.metrics.add("guerdon_tokens_received", sum(s.num_tokens for s in job.sequences), name)
        queue_s = max(0.0, job.taken - started) if accepted else 0.0
        done: list[Score | GuerdonError] = [r for r in results if r is not None]
        lengths = [len(s.tokens) for s in sequences]
        version = job.weights_version or info.weights_version
        reply = ScoreReply(done, lengths, version, queue_s, job.compute_s)
        self._count(name, reply)
        return reply

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
        """Called on the loop's thread when it cannot go on: nothing will be scored any more."""
        self.ready = False

    async def _rows(
        self, name: str, served: Served, request: ScoreRequest, cut: Truncation | None
    ) -> ListLike[np.ndarray | str | InvalidRequest]:
        """What the scorer reads of each sample: its ids, or its text, or what is wrong with it."""
        info = served.info
        if not len(request):
            raise InvalidRequest("the request has no samples; send at least one")
        if request.tokens is not None:
            if not info.takes_tokens:
                raise InvalidRequest(f"{info.name} reads text, not token ids; send sentences")
            return request.tokens
        if request.messages is not None and not info.takes_messages:
            raise InvalidRequest(
                f"{info.name} reads no messages"
                + (
                    ", but texts; name the function's first parameter `responses`, or "
                    if info.kind == "function"
                    else ": it has no chat template; "
                )
                + "send sentences or tokens, formatted for it"
            )
        if request.texts is not None and not info.takes_text:
            raise InvalidRequest(f"{info.name} has no tokenizer; send tokens and sequence_lengths")
        if served.encoder is None:
            if request.add_special_tokens or request.truncation is not None:
                raise InvalidRequest(
                    f"{info.name} reads texts, not tokens: it has no special tokens to add, and nothing to truncate; "
                    "leave these options out"
                )
            return request.texts or [_response(conversation) for conversation in request.messages or ()]
        self._loop.check_room(name, len(request))  # before work is spent on it
        run = asyncio.get_running_loop().run_in_executor
        if request.texts is not None:
            added = request.add_special_tokens
            return await run(self._tokenisers, served.encoder.encode, request.texts, added, cut if added else None)
        return await run(self._tokenisers, served.encoder.encode_messages, request.messages or [])


def _response(conversation: list[Message]) -> str | InvalidRequest:
    """What a function reads of a conversation."""
    try:
        return response(conversation)
    except InvalidRequest as e:
        return e


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
