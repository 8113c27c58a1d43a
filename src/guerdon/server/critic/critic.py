"""A trainable critic behind the service: what is asked of it is checked, written down, done and answered, in turn.

A train request is on the disk before it is done, and its answer is kept by its id: once answered it is never lost and
never applied twice. The methods that take the group run on the loop's thread, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from guerdon.core import (
    CheckpointInfo,
    Command,
    ControlRequest,
    CriticState,
    ModelInfo,
    Operation,
    OperationInfo,
    Signal,
    TrainReport,
    TrainRequest,
)
from guerdon.errors import (
    Cancelled,
    CheckpointError,
    GuerdonError,
    InvalidRequest,
    Offloaded,
    RanksLost,
    ServerFault,
    StorageFailed,
    TrainFailed,
)
from guerdon.server.batching.halving import Group
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.orders import Order, Reservation
from guerdon.server.critic import train_checks
from guerdon.server.critic.answers import Answer, other_content
from guerdon.server.critic.history import History
from guerdon.server.critic.outcome import outcome_of, warn
from guerdon.server.critic.progress import Progress
from guerdon.server.metrics import Metrics
from guerdon.server.reading import off_loop
from guerdon.settings.config import CriticConfig

log = logging.getLogger(__name__)

Result = TrainReport | CheckpointInfo | CriticState | None


class Learner(Protocol):
    """What the critic asks of the trainer that its worker holds; `state` is as `distributed.worker.Trainer` has it.

    `run_token` goes into the weights' versions, once a step was made.
    """

    info: ModelInfo
    run_token: str

    def state(self) -> dict[str, Any]: ...


class Coming(Protocol):
    """A request that has come whole, and is not decoded yet; it is read once."""

    async def read(self) -> TrainRequest | ControlRequest: ...

    def release(self) -> None:
        """Gives back what is counted for it while it is in progress: it only waits for another's answer."""


class Critic:
    """The operations of one critic; `operations` are those that it is asked for under `infos`' names.

    With `config.checkpoint_dir` it is durable: then `restore` comes before all else, and `close` at the end. Raises
    StartError where the folder cannot be had.
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
        self.lane = trainer.info.name
        """The model whose scores and this critic's operations keep their order."""
        self.infos = [OperationInfo(f"{config.name}_{operation}", operation, config.name) for operation in operations]
        self.metrics = metrics or Metrics()
        self.progress = Progress(config.name, self.metrics)
        self._trainer = trainer
        self._history = History(config, trainer.info)
        if not self._history.is_durable:  # the same step of another start has other weights
            trainer.run_token = uuid.uuid4().hex[:8]
        self._save_every = config.save_every
        self._is_offloaded = False
        self._fault = ""
        self._era = 0  # counts the returns to checkpoints: behind one, the same id is another request
        self._waiting: dict[tuple[int, str], tuple[str, Order]] = {}

    @property
    def fault(self) -> ServerFault | None:
        """Why nothing can be asked any more: the weights are in a state that nobody knows. Each time a new one."""
        return ServerFault(self._fault) if self._fault else None

    def restore(self, group: Group) -> None:
        """Brings the worker's trainer to where the critic was before it was stopped or killed, if it is durable."""
        self._history.restore(group.lead)
        self._look_for_fault()
        self._show()
        self._save_if_due(group)

    def close(self) -> None:
        """Gives the folder free."""
        self._history.close()

    def give_up(self, loss: RanksLost) -> None:
        """Takes back what is under way, from another thread: nothing can be done any more; as `History.give_up`.

        Whoever asked for what the disk does not let go, and so is done at the next start, is told StorageFailed.
        """
        try:
            self._history.give_up(loss)
        except StorageFailed as e:
            log.error("%s", e)
            for _, order in [*self._waiting.values()]:
                order.fail(e)

    async def call(
        self, operation: Operation, asked: TrainRequest | ControlRequest | Coming, loop: Loop, client: str = ""
    ) -> Result:
        """Does what is asked in its turn, which is that of this call, however long it takes to decode and check.

        A train, offload or onload that was accepted is done, whoever leaves. Raises InvalidRequest, Overloaded,
        Offloaded, StorageFailed, TrainFailed, ServerFault, and DeadlineExceeded where `asked.timeout_s` has passed.
        """
        place = Reservation(client)
        try:
            loop.order(self.lane, place)
        except GuerdonError as e:
            self.refused(operation, e)
            raise
        era = self._era
        self._era += operation is Operation.LOAD
        what, timeout_s = str(operation), None
        try:
            content = asked if isinstance(asked, TrainRequest | ControlRequest) else await asked.read()
            timeout_s = content.timeout_s
            if isinstance(content, ControlRequest):
                run = functools.partial(self._controls()[operation], content)
                order, is_known = Order(run, client=client, name=what), False
                loop.fill(self.lane, place, order)
            else:
                content.id = content.id or uuid.uuid4().hex
                what = f"{operation} {content.id}"
                order, is_known = await self._trained(operation, content, loop, place, era)
        except BaseException as e:
            loop.drop(self.lane, place)
            if isinstance(e, GuerdonError | asyncio.CancelledError):
                self.refused(operation, e, what)
            raise
        del content  # where the same waits already, its arrays go now
        if is_known:
            loop.drop(self.lane, place)
            if not isinstance(asked, TrainRequest | ControlRequest):
                asked.release()
            self.metrics.add("guerdon_train_requests", 1, self.name, "known")
        return await outcome_of(order, operation, what, timeout_s, loop, self.lane, is_known=is_known)

    def refused(self, operation: Operation, error: BaseException, what: str = "") -> None:
        """Says and counts that what was asked was not even begun."""
        if isinstance(error, asyncio.CancelledError):
            error = Cancelled("the client left before it was read")
        warn(what or str(operation), error)
        if operation is Operation.TRAIN:
            self.metrics.add("guerdon_train_requests", 1, self.name, type(error).__name__)

    async def _trained(
        self, operation: Operation, asked: TrainRequest, loop: Loop, place: Reservation, era: int
    ) -> tuple[Order, bool]:
        """The order for rows: the one in `place`, or that which waits or runs for the same train request."""
        digest = await off_loop(functools.partial(train_checks.checked, asked, self._trainer.info), asked.tokens.nbytes)
        size: dict[str, Any] = {"num_sequences": len(asked), "num_tokens": asked.tokens.size, "client": place.client}
        what = f"{operation} {asked.id}"
        if operation is Operation.VALIDATE:
            order = Order(functools.partial(self._validate, asked), name=what, **size)
            loop.fill(self.lane, place, order)
            return order, False
        key = (era, asked.id)
        if (waits := self._waiting.get(key)) is not None:
            if waits[0] != digest:
                raise other_content(asked.id)
            return waits[1], True
        order = Order(functools.partial(self._train, asked, digest), then=self._save_if_due, name=what, **size)
        loop.fill(self.lane, place, order)
        self._waiting[key] = (digest, order)
        order.outcome.add_done_callback(lambda _: self._waiting.pop(key, None))
        return order, False

    def _controls(self) -> dict[Operation, Callable[[ControlRequest, Group], Result]]:
        return {
            Operation.SAVE: self.save,
            Operation.LOAD: self._load,
            Operation.OFFLOAD: self._offload,
            Operation.ONLOAD: self._onload,
            Operation.STATE: self._state,
        }

    def _train(self, request: TrainRequest, digest: str, group: Group) -> TrainReport:
        outcome = ServerFault.__name__
        try:
            if (answer := self._history.answer(request.id)) is not None:
                outcome = "known" if answer.digest == digest else InvalidRequest.__name__
                return answer.give(request.id, digest)
            report = self._train_new(request, digest, group)
            outcome = "ok"
            return report
        except GuerdonError as e:
            outcome = outcome if outcome == "known" else type(e).__name__
            raise
        finally:
            self.metrics.add("guerdon_train_requests", 1, self.name, outcome)

    def _train_new(self, request: TrainRequest, digest: str, group: Group) -> TrainReport:
        self._check_present("train")
        started = time.monotonic()
        position = self._history.accept(request, digest)
        written = time.monotonic()
        if self._history.is_durable:
            self.metrics.observe("guerdon_journal_seconds", written - started, self.name)
        try:
            with self._withdrawing(position):
                report = group.lead(Command(Signal.TRAIN, self.name, train=request))
        except TrainFailed as e:
            self._look_for_fault()
            try:
                self._history.done(request, position, Answer(digest, None, str(e), e.num_steps))
            finally:
                self._show()
            raise
        assert isinstance(report, TrainReport)
        self.metrics.observe("guerdon_train_seconds", time.monotonic() - written, self.name)
        self.progress.done(report)
        try:
            self._history.done(request, position, Answer(digest, report))
        finally:
            self._show()
        return report

    def _validate(self, request: TrainRequest, group: Group) -> TrainReport:
        self._check_present("validate")
        report = group.lead(Command(Signal.VALIDATE, self.name, train=request))
        assert isinstance(report, TrainReport)
        return report

    def save(self, asked: ControlRequest, group: Group) -> CheckpointInfo | None:
        """Saves a checkpoint with the metrics of the last train request and those that are given."""
        self._check_sound()
        train_checks.check_metrics(asked.metrics)
        measured = {name: value for name, value in self._history.measured.items() if math.isfinite(value)}
        started = time.monotonic()
        facts = {"step": self._trainer.state()["step"], "weights_version": self._trainer.info.weights_version}
        info = self._history.save(group.lead, facts, measured | asked.metrics)
        self.metrics.observe("guerdon_checkpoint_seconds", time.monotonic() - started, self.name)
        self._show()
        return info

    def _save_if_due(self, group: Group) -> None:
        """After a train request was answered: saves where that many came since the last checkpoint."""
        if self._save_every is None or self._history.num_unsaved < self._save_every or self._fault:
            return
        try:
            self.save(ControlRequest(Operation.SAVE), group)
        except StorageFailed as e:
            log.error("%s; it is tried again after the next train request", e)

    def _load(self, asked: ControlRequest, group: Group) -> CheckpointInfo | None:
        self._check_present("load")
        source = self._history.checkpoint(asked.checkpoint)
        position = self._history.accept(source.info.name)
        try:
            with self._withdrawing(position):
                group.lead(Command(Signal.LOAD, self.name, folder=str(source.folder), lineage=position))
        except CheckpointError as e:
            raise InvalidRequest(f"{e}; {e.help}") from e
        self._history.gone_back(source)
        self._show()
        try:
            return self.save(ControlRequest(Operation.SAVE, metrics=source.info.metrics), group)
        except StorageFailed as e:
            log.warning("%s; until one is, a restart goes back to %s by the journal", e, source.info.name)
            return source.info

    def _offload(self, asked: ControlRequest, group: Group) -> None:
        self._check_sound()
        self._is_offloaded = True  # already now: what fails half way has left the device in part
        self._show()
        group.lead(Command(Signal.OFFLOAD, self.name))

    def _onload(self, asked: ControlRequest, group: Group) -> None:
        self._check_sound()
        group.lead(Command(Signal.ONLOAD, self.name))
        self._is_offloaded = False
        self._show()

    def _state(self, asked: ControlRequest, group: Group) -> CriticState:
        return self.now()

    def now(self) -> CriticState:
        """Returns what the critic is; only while nothing else is done with it."""
        facts = self._trainer.state()
        return CriticState(
            step=facts["step"],
            weights_version=self._trainer.info.weights_version,
            learning_rate=facts["learning_rate"],
            is_offloaded=self._is_offloaded,
            is_durable=self._history.is_durable,
            num_unsaved=self._history.num_unsaved,
            num_parameters=facts["num_parameters"],
            num_trainable=facts["num_trainable"],
            checkpoints=self._history.checkpoints(),
        )

    def _check_sound(self) -> None:
        if self._fault:
            raise ServerFault(self._fault)

    def _check_present(self, what: str) -> None:
        self._check_sound()
        if self._is_offloaded:
            raise Offloaded(f"{self.name} is offloaded: {what} is refused until `onload`")

    @contextlib.contextmanager
    def _withdrawing(self, position: int) -> Iterator[None]:
        """Takes back what was accepted where it raises what says that nothing was changed, or leaves that unknown.

        Raises StorageFailed in its place where the disk does not let it go.
        """
        try:
            yield
        except TrainFailed:  # which says how much of it stands
            raise
        except GuerdonError:
            self._look_for_fault()
            self._history.withdraw(position)
            raise
        except BaseException as e:
            fault = self._broken_by(e)
            self._history.withdraw(position)
            raise fault from e

    def _broken_by(self, error: BaseException) -> ServerFault:
        """A trainer says by a GuerdonError how far it came; after any other error nobody knows."""
        back = "; it comes back as it was before this" if self._history.is_durable else ""
        self._fault = f"{self.name} has broken down: {type(error).__name__}: {error}; restart it{back}"
        log.critical("%s", self._fault, exc_info=error)
        self._show()
        return ServerFault(self._fault)

    def _look_for_fault(self) -> None:
        """After an error: takes over what the trainer itself says of weights that are spoilt."""
        if broken := self._trainer.state().get("broken"):
            self._fault = broken
            log.critical("%s: %s", self.name, broken)
            self._show()

    def _show(self) -> None:
        self.progress.show(self.now(), self._history.measured, bool(self._fault))
