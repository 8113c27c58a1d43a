"""A critic that learns while it serves: its operations are checked, journalled, done and answered, one at a time.

With `checkpoint_dir` a train request is on the disk before it is applied, and its outcome is kept by its id: once
acknowledged it is never lost and never applied twice. A critic's state is in three objects: the controller has the
queue and the weights' soundness, the store the durable state, the progress the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from guerdon.core import Command, Executor, ModelInfo, Signal
from guerdon.critic_core import (
    CheckpointInfo,
    ControlRequest,
    CriticState,
    Operation,
    OperationInfo,
    TrainReport,
    TrainRequest,
)
from guerdon.errors import (
    Cancelled,
    CheckpointError,
    DeadlineExceeded,
    GuerdonError,
    InvalidRequest,
    Offloaded,
    RanksLost,
    ServerFault,
    StorageFailed,
    TrainFailed,
    describe,
)
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.orders import Order, log_unsuccessful
from guerdon.server.critic import train_checks
from guerdon.server.critic.store import MEASURED, Store, TrainOutcome, reused_id
from guerdon.server.metrics import Metrics
from guerdon.server.reading import INLINE_BYTES
from guerdon.settings.config import CriticConfig

log = logging.getLogger(__name__)

MOST_POINTS = 2000

_DROPPABLE = (Operation.STATE, Operation.VALIDATE, Operation.SAVE, Operation.LOAD)
"""Dropped if its client disconnects, or stops waiting, before it begins."""

OperationResult = TrainReport | CheckpointInfo | CriticState | None


class Learner(Protocol):
    """The controller's interface to its worker's trainer; `state` is as in `distributed.commands.Trainer`.

    `run_token` becomes part of the weights' versions after the first step.
    """

    info: ModelInfo
    run_token: str

    def state(self) -> dict[str, Any]: ...


class UnreadRequest(Protocol):
    """A request that has been received and is not decoded yet; it is read once."""

    async def read(self) -> TrainRequest | ControlRequest: ...

    def release(self) -> None:
        """Gives back the memory that it counts for: from now on it only waits for another request's answer."""


class Critic:
    """The operations of one critic; `operations` has their names, as `infos`.

    With `config.checkpoint_dir` it is durable: call `restore` first and `close` last. Methods that take the group run
    on the loop's thread. Raises StartError if the folder cannot be used.
    """

    def __init__(
        self,
        config: CriticConfig,
        trainer: Learner,
        metrics: Metrics | None = None,
        *,
        operations: Sequence[Operation] = tuple(Operation),
    ) -> None:
        self.name = config.name
        self.scorer_name = trainer.info.name
        """The model that serves this critic's values; its scores and the operations share one queue."""
        self.infos = [OperationInfo(f"{config.name}_{operation}", operation, config.name) for operation in operations]
        self.metrics = metrics or Metrics()
        self.progress = CriticProgress(config.name, self.metrics)
        self.store = Store(config, trainer.info)
        self._trainer = trainer
        if not self.store.is_durable:  # the same step of another start has other weights
            trainer.run_token = uuid.uuid4().hex[:8]
        self._save_every = config.save_every
        self._is_offloaded = False
        self._fault = ""
        self._turn = asyncio.Lock()  # held, in order of arrival, from before a request is decoded until it is queued
        self._era = 0  # counts loads: the same id after one is another request
        self._pending: dict[tuple[int, str], tuple[str, Order]] = {}  # (era, id) -> (digest, order)

    @property
    def fault(self) -> ServerFault | None:
        """A new error if the state of the weights is unknown, so that nothing can be asked any more; else None."""
        return ServerFault(self._fault) if self._fault else None

    def restore(self, group: Executor) -> None:
        """Brings a durable critic to its state before it stopped or was killed."""
        self.store.restore(group.execute)
        for report in self.store.reports()[-MOST_POINTS:]:
            self.progress.keep(report, at=math.nan)
        self._look_for_fault()
        self._show()
        self._save_if_due(group)

    def close(self) -> None:
        """Unlocks the folder."""
        self.store.close()

    def give_up(self, loss: RanksLost) -> None:
        """Withdraws the unfinished request because nothing can be done any more; thread-safe.

        If the disk keeps the request, so that the next start does it, its clients get StorageFailed.
        """
        try:
            self.store.give_up(loss)
        except StorageFailed as e:
            log.error("%s", e)
            for _, order in [*self._pending.values()]:
                order.fail(e)

    # -------------------------------------------------------------------------- on the event loop: one request

    async def call(
        self, operation: Operation, asked: TrainRequest | ControlRequest | UnreadRequest, loop: Loop, client: str = ""
    ) -> OperationResult:
        """Does an operation in order of arrival, however long its request takes to decode and check.

        An accepted train, offload or onload is done even if the client disconnects. Raises InvalidRequest, Overloaded,
        Offloaded, StorageFailed, TrainFailed, ServerFault, and DeadlineExceeded after the request's `timeout_s`.
        """
        what, timeout_s = str(operation), None
        unread: Any = None if isinstance(asked, TrainRequest | ControlRequest) else asked
        try:
            async with self._turn:
                request: Any = asked if unread is None else await unread.read()
                timeout_s = request.timeout_s
                if isinstance(request, ControlRequest):
                    order, is_known = Order(self._work(operation, request), client=client, name=what), False
                    loop.order(self.scorer_name, order)
                    self._era += operation is Operation.LOAD
                else:
                    request.id = request.id or uuid.uuid4().hex
                    what = f"{operation} {request.id}"
                    if request.tokens.nbytes <= INLINE_BYTES:
                        digest = train_checks.check(request, self._trainer.info)
                    else:
                        digest = await asyncio.to_thread(train_checks.check, request, self._trainer.info)
                    order, is_known = self._enqueue_rows(operation, request, digest, loop, client)
        except (GuerdonError, asyncio.CancelledError) as e:
            self.count_refused(operation, e, what)
            raise
        del request  # frees its arrays if the same request waits already
        if is_known:
            if unread is not None:
                unread.release()
            self.metrics.add("guerdon_train_requests", 1, self.name, "known")
        return await self._outcome_of(order, operation, what, timeout_s, loop, is_known=is_known)

    async def wait_for_turn(self) -> None:
        """Waits until all requests that came before are queued; what is queued without another await comes next."""
        async with self._turn:
            pass

    def count_refused(self, operation: Operation, error: BaseException, what: str = "") -> None:
        """Logs and counts an operation that was refused before it was queued."""
        if isinstance(error, asyncio.CancelledError):
            error = Cancelled("the client left before it was read")
        log_unsuccessful(what or str(operation), error)
        if operation is Operation.TRAIN:
            self.metrics.add("guerdon_train_requests", 1, self.name, type(error).__name__)

    def _enqueue_rows(
        self, operation: Operation, request: TrainRequest, digest: str, loop: Loop, client: str
    ) -> tuple[Order, bool]:
        """Queues a checked train or validate; returns its order and False.

        If the same train request waits or runs already, returns that one's order and True.
        """
        key = (self._era, request.id)
        if operation is Operation.TRAIN and (pending := self._pending.get(key)) is not None:
            if pending[0] != digest:
                raise reused_id(request.id)
            return pending[1], True
        is_train = operation is Operation.TRAIN
        order = Order(
            functools.partial(self._train, request, digest) if is_train else functools.partial(self._validate, request),
            client=client,
            num_sequences=len(request),
            num_tokens=request.tokens.size,
            then=self._save_if_due if is_train else None,
            name=f"{operation} {request.id}",
        )
        loop.order(self.scorer_name, order)
        if is_train:
            self._pending[key] = (digest, order)
            order.outcome.add_done_callback(lambda _: self._pending.pop(key, None))
        return order, False

    async def _outcome_of(
        self, order: Order, operation: Operation, what: str, timeout_s: float | None, loop: Loop, *, is_known: bool
    ) -> Any:
        """Waits for an order's outcome; `is_known` says that another call queued it.

        Raises the order's error, and DeadlineExceeded after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(order.outcome)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if operation in _DROPPABLE and loop.drop(self.scorer_name, order):
                log_unsuccessful(what, Cancelled("the client left before it began; it is dropped"))
            raise
        except GuerdonError as e:
            if is_known:
                log_unsuccessful(what, e)
            raise
        late = f"{operation} takes longer than {timeout_s:g} s"
        if operation in _DROPPABLE and loop.drop(self.scorer_name, order):
            error = DeadlineExceeded(f"{late}: it had not begun, and is dropped")
        else:
            again = f"; ask again with train_id {what.split(' ', 1)[1]!r}" if operation is Operation.TRAIN else ""
            error = DeadlineExceeded(f"{late}, and goes on{again}")
        log_unsuccessful(what, error)
        raise error

    # -------------------------------------------------------------------------- on the loop's thread: one order

    def _train(self, request: TrainRequest, digest: str, group: Executor) -> TrainReport:
        counted = ServerFault.__name__
        try:
            if (known := self.store.outcome(request.id)) is not None:
                counted = "known" if known.digest == digest else InvalidRequest.__name__
                return self.store.complete(known.report_for(request.id, digest), request)
            self._check_present("train")
            request = self._estimated(request, group)
            started = time.monotonic()
            position = self.store.accept(request, digest)
            journalled = time.monotonic()
            if self.store.is_durable:
                self.metrics.observe("guerdon_journal_seconds", journalled - started, self.name)
            try:
                with self._withdrawing(position):
                    report: TrainReport = group.execute(Command(Signal.TRAIN, self.name, ask=request))
                    self.metrics.observe("guerdon_train_seconds", time.monotonic() - journalled, self.name)
                    self.progress.count(report)
                    self.store.keep_estimates(request)
            except TrainFailed as e:
                self._look_for_fault()
                with self._showing():
                    self.store.finish(request, position, TrainOutcome(digest, None, str(e), e.num_steps))
                raise
            with self._showing():
                self.store.finish(request, position, TrainOutcome(digest, report))
            counted = "ok"
            return self.store.complete(report, request)
        except GuerdonError as e:
            counted = counted if counted == "known" else type(e).__name__
            raise
        finally:
            self.metrics.add("guerdon_train_requests", 1, self.name, counted)

    def _validate(self, request: TrainRequest, group: Executor) -> TrainReport:
        self._check_present("validate")
        request = self._estimated(request, group)
        report: TrainReport = group.execute(Command(Signal.VALIDATE, self.name, ask=request))
        if request.rewards is None:
            return report
        return dataclasses.replace(report, advantages=request.advantages, returns=request.returns)

    def _estimated(self, request: TrainRequest, group: Executor) -> TrainRequest:
        """Returns the request with estimates from its rewards and the current weights; unchanged without rewards.

        It is done before the request is journalled, so that a replay trains on the same returns, and nothing is lost if
        it fails.
        """
        if request.rewards is None:
            return request
        estimated: TrainRequest = group.execute(Command(Signal.ESTIMATE, self.name, ask=request))
        return estimated

    def _work(self, operation: Operation, request: ControlRequest) -> Callable[[Executor], OperationResult]:
        works: dict[Operation, Callable[[ControlRequest, Executor], OperationResult]] = {
            Operation.SAVE: self.save,
            Operation.LOAD: self._load,
            Operation.OFFLOAD: self._offload,
            Operation.ONLOAD: self._onload,
            Operation.STATE: lambda request, group: self.state(),
        }
        return functools.partial(works[operation], request)

    def save(self, asked: ControlRequest, group: Executor) -> CheckpointInfo | None:
        """Saves a checkpoint with the last train request's metrics and `metrics`."""
        self._check_sound()
        train_checks.check_metrics(asked.metrics)
        measured = {name: value for name, value in self.store.measured.items() if math.isfinite(value)}
        started = time.monotonic()
        facts = {"step": self._trainer.state()["step"], "weights_version": self._trainer.info.weights_version}
        info = self.store.save(group.execute, facts, measured | asked.metrics)
        self.metrics.observe("guerdon_checkpoint_seconds", time.monotonic() - started, self.name)
        self._show()
        return info

    def _save_if_due(self, group: Executor) -> None:
        """Saves, after a train request was answered, if `save_every` of them came since the last checkpoint."""
        if self._save_every is None or self.store.num_unsaved < self._save_every or self._fault:
            return
        try:
            self.save(ControlRequest(Operation.SAVE), group)
        except StorageFailed as e:
            log.error("%s; it is tried again after the next train request", e)

    def _load(self, asked: ControlRequest, group: Executor) -> CheckpointInfo | None:
        self._check_present("load")
        source = self.store.checkpoint(asked.checkpoint)
        position = self.store.accept(source.info.name)
        try:
            with self._withdrawing(position):
                group.execute(Command(Signal.LOAD, self.name, folder=str(source.folder), lineage=position))
        except CheckpointError as e:
            raise InvalidRequest(f"{e}; {e.help}") from e
        self.store.returned_to(source)
        self._show()
        try:
            return self.save(ControlRequest(Operation.SAVE, metrics=source.info.metrics), group)
        except StorageFailed as e:
            log.warning("%s; until one is, a restart goes back to %s by the journal", e, source.info.name)
            return source.info

    def _offload(self, asked: ControlRequest, group: Executor) -> None:
        self._check_sound()
        self._is_offloaded = True  # already now: a failure half way leaves only a part on the device
        self._show()
        group.execute(Command(Signal.OFFLOAD, self.name))

    def _onload(self, asked: ControlRequest, group: Executor) -> None:
        self._check_sound()
        group.execute(Command(Signal.ONLOAD, self.name))
        self._is_offloaded = False
        self._show()

    def state(self) -> CriticState:
        """Returns the critic's state; only while no other operation runs."""
        facts = self._trainer.state()
        return CriticState(
            step=facts["step"],
            weights_version=self._trainer.info.weights_version,
            learning_rate=facts["learning_rate"],
            is_offloaded=self._is_offloaded,
            is_durable=self.store.is_durable,
            num_unsaved=self.store.num_unsaved,
            num_parameters=facts["num_parameters"],
            num_trainable=facts["num_trainable"],
            checkpoints=self.store.checkpoints(),
        )

    # ------------------------------------------------------------------------------- whether the weights are sound

    def _check_sound(self) -> None:
        if self._fault:
            raise ServerFault(self._fault)

    def _check_present(self, what: str) -> None:
        self._check_sound()
        if self._is_offloaded:
            raise Offloaded(f"{self.name} is offloaded: {what} is refused until `onload`")

    @contextlib.contextmanager
    def _withdrawing(self, position: int) -> Iterator[None]:
        """Withdraws an accepted record if the command fails without a change, or with unknown changes.

        Raises StorageFailed instead if the disk keeps the record.
        """
        try:
            yield
        except TrainFailed:  # says how much of it stands
            raise
        except GuerdonError:
            self._look_for_fault()
            self.store.withdraw(position)
            raise
        except BaseException as e:
            # After any error but a GuerdonError the trainer's progress is unknown: the critic is corrupt.
            back = "; it comes back as it was before this" if self.store.is_durable else ""
            self._fault = f"{self.name} has broken down: {describe(e)}; restart it{back}"
            log.critical("%s", self._fault, exc_info=e)
            self._show()
            self.store.withdraw(position)
            raise ServerFault(self._fault) from e

    def _look_for_fault(self) -> None:
        """Copies the reason from the trainer if an error has corrupted the weights."""
        if broken := self._trainer.state().get("broken"):
            self._fault = broken
            log.critical("%s: %s", self.name, broken)
            self._show()

    @contextlib.contextmanager
    def _showing(self) -> Iterator[None]:
        """Shows the state at the end, even if the body raises."""
        try:
            yield
        finally:
            self._show()

    def _show(self) -> None:
        self.progress.show(self.state(), self.store.measured, bool(self._fault))


class CriticProgress:
    """Shows a critic's state and its last train reports to metrics and the page; thread-safe."""

    def __init__(self, name: str, metrics: Metrics) -> None:
        self.state: CriticState | None = None
        self._name, self._metrics = name, metrics
        self._points: deque[tuple[float, ...]] = deque(maxlen=MOST_POINTS)

    def count(self, report: TrainReport) -> None:
        """Counts a finished train request and keeps its measurements."""
        self._metrics.add("guerdon_train_tokens", report.num_tokens, self._name)
        self._metrics.add("guerdon_train_steps", report.num_steps, self._name, "done")
        self._metrics.add("guerdon_train_steps", report.num_skipped, self._name, "skipped")
        self.keep(report, at=time.monotonic())

    def keep(self, report: TrainReport, at: float) -> None:
        """Keeps the report's measurements; `at` is on the monotonic clock, NaN if unknown."""
        self._points.append((report.step, at, *(getattr(report, name) for name in MEASURED)))

    def show(self, state: CriticState, measured: Mapping[str, float], has_fault: bool) -> None:
        """Sets the current state and the last measurements."""
        self.state = state
        shown = {"step": state.step, "unsaved": state.num_unsaved, "offloaded": state.is_offloaded, "fault": has_fault}
        for name, value in {**measured, **shown}.items():
            self._metrics.set(f"guerdon_critic_{name}", value, self._name)

    def reports(self, epoch: float) -> dict[str, list[float]]:
        """Returns the step, the time and the MEASURED of each of the last MOST_POINTS reports, by name.

        Times are seconds after `epoch`, the start of the monotonic clock, NaN for reports from before this start of
        the server.
        """
        points = [(step, epoch + at, *measured) for step, at, *measured in self._points.copy()]
        columns = zip(*points, strict=True) if points else [()] * (2 + len(MEASURED))
        return {name: list(column) for name, column in zip(("step", "time", *MEASURED), columns, strict=True)}
