"""A trainable critic behind the service: what is asked of it is checked, written down, done and answered, in turn.

A train request is on the disk before it is done, and its answer is kept by its id: once answered it is never lost and
never applied twice. The methods that take the group run on the loop's thread, one at a time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from guerdon.config import CriticConfig
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
    DeadlineExceeded,
    GuerdonError,
    InvalidRequest,
    Offloaded,
    ServerFault,
    StorageFailed,
    TrainFailed,
)
from guerdon.metrics import Metrics
from guerdon.server import train_checks
from guerdon.server.answers import Answer, Answers, other_content
from guerdon.server.body import off_loop
from guerdon.server.history import History
from guerdon.server.journal import digest_of
from guerdon.server.loop import Group, Order

log = logging.getLogger(__name__)

_SHOWN = ("loss", "clip_fraction", "explained_variance", "grad_norm", "learning_rate")

Result = TrainReport | CheckpointInfo | CriticState | None


class Learner(Protocol):
    """What the critic asks of the trainer that its worker holds; `state` is as `distributed.worker.Trainer` has it."""

    info: ModelInfo

    def state(self) -> dict[str, Any]: ...


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
        self.fault: ServerFault | None = None
        """Why nothing can be asked any more: the weights are in a state that nobody knows."""
        self._trainer = trainer
        self._history = History(config)
        self._save_every = config.save_every
        self._is_offloaded = False
        self._measured: dict[str, float] = {}
        self._waiting: dict[str, tuple[str, Order]] = {}

    def restore(self, group: Group) -> None:
        """Brings the worker's trainer to where the critic was before it was stopped or killed, if it is durable."""
        info = self._history.restore(group.lead)
        self._measured = {} if info is None else {k: v for k, v in info.metrics.items() if k in _SHOWN}
        self._show()

    def close(self) -> None:
        """Gives the folder free."""
        self._history.close()

    async def call(
        self, operation: Operation, asked: TrainRequest | ControlRequest, submit: Callable[[Order], None]
    ) -> Result:
        """Does what is asked in its turn; `submit` queues an order in the lane.

        A caller that leaves stops nothing that was accepted. Raises InvalidRequest, Overloaded, Offloaded,
        StorageFailed, TrainFailed, ServerFault, and DeadlineExceeded where `asked.timeout_s` has passed.
        """
        order = await self._ordered(operation, asked, submit)
        try:
            async with asyncio.timeout(asked.timeout_s):
                return await asyncio.wrap_future(order.outcome)
        except TimeoutError:
            again = f"; ask again with train_id {asked.id!r}" if isinstance(asked, TrainRequest) else ""
            raise DeadlineExceeded(f"{operation} takes longer than {asked.timeout_s:g} s, and goes on{again}") from None

    async def _ordered(
        self, operation: Operation, asked: TrainRequest | ControlRequest, submit: Callable[[Order], None]
    ) -> Order:
        """The order for what is asked: a new one, or the one that waits or runs for the same train request."""
        if isinstance(asked, ControlRequest):
            control = {
                Operation.SAVE: self.save,
                Operation.LOAD: self._load,
                Operation.OFFLOAD: self._offload,
                Operation.ONLOAD: self._onload,
                Operation.STATE: self._state,
            }[operation]
            order = Order(functools.partial(control, asked))
            submit(order)
            if operation is Operation.LOAD:
                self._waiting.clear()  # the same id from now on comes after the return to another state
            return order
        asked.id = asked.id or uuid.uuid4().hex
        digest = await off_loop(functools.partial(_checked, asked, self._trainer.info), asked.tokens.nbytes)
        if operation is Operation.VALIDATE:
            order = _order(asked, functools.partial(self._validate, asked))
            submit(order)
            return order
        if asked.id in self._waiting:
            waiting_digest, order = self._waiting[asked.id]
            if waiting_digest != digest:
                raise other_content(asked.id)
            return order
        order = _order(asked, functools.partial(self._train, asked, digest), then=self._save_if_due)
        submit(order)
        self._waiting[asked.id] = (digest, order)
        loop = asyncio.get_running_loop()
        order.outcome.add_done_callback(lambda _: loop.call_soon_threadsafe(self._forget, asked.id, order))
        return order

    def _forget(self, id: str, order: Order) -> None:  # noqa: A002 - what it is called everywhere
        if id in self._waiting and self._waiting[id][1] is order:
            del self._waiting[id]

    def _train(self, request: TrainRequest, digest: str, group: Group) -> TrainReport:
        outcome = "known"
        try:
            if (answer := self._history.answers.get(request.id)) is not None:
                return answer.give(request.id, digest)
            outcome = "ok"
            return self._train_new(request, digest, group)
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
            report = group.lead(Command(Signal.TRAIN, self.name, train=request))
        except TrainFailed as e:
            self._history.done(request, position, Answer(digest, None, str(e), e.num_steps))
            self._show()
            raise
        except GuerdonError:
            self._history.withdraw(position)
            raise
        except BaseException as e:
            self._history.withdraw(position)
            self._break(e)
        assert isinstance(report, TrainReport)
        self._history.done(request, position, Answer(digest, report))
        self.metrics.observe("guerdon_train_seconds", time.monotonic() - written, self.name)
        self.metrics.add("guerdon_train_tokens", report.num_tokens, self.name)
        self.metrics.add("guerdon_train_steps", report.num_steps, self.name, "done")
        self.metrics.add("guerdon_train_steps", report.num_skipped, self.name, "skipped")
        self._measured = {name: value for name in _SHOWN if math.isfinite(value := getattr(report, name))}
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
        if not all(map(math.isfinite, asked.metrics.values())):
            raise InvalidRequest(f"metrics has a number that is not finite: {asked.metrics}")
        started = time.monotonic()
        facts = {"step": self._trainer.state()["step"], "weights_version": self._trainer.info.weights_version}
        info = self._history.save(group.lead, facts, self._measured | asked.metrics)
        self.metrics.observe("guerdon_checkpoint_seconds", time.monotonic() - started, self.name)
        self._show()
        return info

    def _save_if_due(self, group: Group) -> None:
        """After a train request was answered: saves where that many came since the last checkpoint."""
        if self._save_every is None or self._history.num_unsaved < self._save_every or self.fault is not None:
            return
        try:
            self.save(ControlRequest(Operation.SAVE), group)
        except StorageFailed as e:
            log.error("%s; it is tried again after the next train request", e)

    def _load(self, asked: ControlRequest, group: Group) -> CheckpointInfo | None:
        self._check_present("load")
        source = self._history.checkpoint(asked.checkpoint)
        answers = Answers.from_json(source.answers())
        position = self._history.accept(source.info.name)
        try:
            group.lead(Command(Signal.LOAD, self.name, folder=str(source.folder), lineage=position))
        except GuerdonError:
            self._history.withdraw(position)
            raise
        except BaseException as e:
            self._history.withdraw(position)
            self._break(e)
        self._history.answers = answers  # what came after the checkpoint was not done in this state
        self._measured = {k: v for k, v in source.info.metrics.items() if k in _SHOWN}
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
        if self.fault is not None:
            raise self.fault

    def _check_present(self, what: str) -> None:
        self._check_sound()
        if self._is_offloaded:
            raise Offloaded(f"{self.name} is offloaded: {what} is refused until `onload`")

    def _break(self, error: BaseException) -> NoReturn:
        """A trainer says by a GuerdonError how far it came; after any other error nobody knows."""
        back = "; it comes back as it was before this" if self._history.is_durable else ""
        self.fault = ServerFault(f"{self.name} has broken down: {type(error).__name__}: {error}; restart it{back}")
        log.critical("%s", self.fault, exc_info=error)
        raise self.fault from error

    def _show(self) -> None:
        for name, value in self._measured.items():
            self.metrics.set(f"guerdon_critic_{name}", value, self.name)
        self.metrics.set("guerdon_critic_step", self._trainer.state()["step"], self.name)
        self.metrics.set("guerdon_critic_unsaved", self._history.num_unsaved, self.name)
        self.metrics.set("guerdon_critic_offloaded", self._is_offloaded, self.name)


def _checked(request: TrainRequest, info: ModelInfo) -> str:
    """The digest of a request in which nothing is wrong."""
    train_checks.check(request, info)
    return digest_of(request)


def _order(asked: TrainRequest, run: Callable[[Group], Any], then: Callable[[Group], None] | None = None) -> Order:
    return Order(run, num_sequences=len(asked), num_tokens=asked.tokens.size, then=then)
