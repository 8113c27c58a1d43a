"""The clients of a trainable critic, for threads and for asyncio: values, training, checkpoints, in call order."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar, Unpack

from guerdon.client.addresses import Credentials, addresses
from guerdon.client.calls import Call, Integers, TokenRows, known, takes
from guerdon.client.critic_calls import (
    BatchArgs,
    CriticScores,
    InferArgs,
    Rows,
    TrainArgs,
    TreeArgs,
    make_infer_request,
    make_train_request,
    prepare_control,
    prepare_infer,
    prepare_train,
    prepare_train_loss,
)
from guerdon.client.faces import AsyncClient, BlockingClient, CallFuture
from guerdon.client.ordering import AsyncTrainFuture, OrderedSession, TrainFuture
from guerdon.client.retry import RetryPolicy, Steps
from guerdon.critic_core import CheckpointInfo, ControlRequest, CriticState, Operation, TrainReport, TrainRequest
from guerdon.errors import Cancelled

T = TypeVar("T")
F = TypeVar("F", bound=Future[Any])

PATIENT = RetryPolicy.patient(21_600.0)
"""A server that comes back loads its checkpoint and replays its journal first, which takes minutes."""

Name = str | Mapping[str, str]
"""A critic's name, to which each of its models adds its operation; or the models' own names by operation."""


class CriticModels:
    """Names a critic's models, and makes their calls; both clients are one."""

    _name: Name

    def _model(self, operation: str) -> str:
        if isinstance(self._name, str):
            return f"{self._name}_{operation}"
        return self._name.get(operation, f"critic_{operation}")

    def _main_model(self) -> str:
        return self._model("infer")

    def _models_to_await(self) -> list[str]:
        """Returns all models that were named: a server may load them one by one."""
        return [self._main_model()] if isinstance(self._name, str) else list(self._name.values())

    def _infer_steps(
        self, session: OrderedSession, tokens: TokenRows | None, samples: InferArgs | TreeArgs, needs_rewards: bool
    ) -> Steps[CriticScores]:
        request, parents = make_infer_request(tokens, **samples)
        call = prepare_infer(self._main_model(), request, needs_rewards=needs_rewards, parents=parents)
        return session.caller.ask(call)

    def _train_steps(self, session: OrderedSession, request: TrainRequest, train_id: str | None) -> Steps[TrainReport]:
        call = prepare_train(self._model(Operation.TRAIN), request)
        # Only a request with a name from the caller can have been answered before.
        state = None if train_id is None else self._control_call(ControlRequest(Operation.STATE))
        return session.reset_check.report(session.caller, call, state=state)

    def _validate_steps(self, session: OrderedSession, request: TrainRequest) -> Steps[TrainReport]:
        call = prepare_train(self._model(Operation.VALIDATE), request)
        return session.reset_check.report(session.caller, call, trains=False)

    def _control_steps(self, session: OrderedSession, request: ControlRequest) -> tuple[Steps[Any], bool]:
        """Returns the steps, and whether they go alone."""
        call = self._control_call(request)
        if request.operation is Operation.LOAD:
            return session.reset_check.load(session.caller, call), True
        return session.caller.ask(call), request.operation is not Operation.STATE

    def _control_call(self, request: ControlRequest) -> Call[Any]:
        return prepare_control(self._model(request.operation), request)


class CriticClient(CriticModels, BlockingClient[OrderedSession]):
    """Asks a critic for values, and trains it; safe to use from many threads, and after a fork.

    `url` is the server's http://, https://, grpc:// or grpcs:// address (a bare host:port means http); `credentials`
    and forks are as a RewardClient's. `name` is the critic's name, or its models' names by operation (infer, train,
    save, ...; any other is critic_<operation>).
    Calls go in the order in which they are made: values after a train are those of the trained weights, and a train
    waits for the values before it. While the server is away or restarts, calls are retried until the policy's time is
    over. A server with a folder for checkpoints then has lost nothing, and applies no train request twice; one without
    starts again from step 0, and the next train or validate raises CriticReset, as after another client's `load`.
    """

    def __init__(
        self,
        url: str,
        name: Name = "critic",
        *,
        policy: RetryPolicy = PATIENT,
        max_in_flight: int = 128,
        credentials: Credentials | None = None,
    ) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        self._name = name
        new_session = _session_factory(url, policy, max_in_flight, credentials)
        super().__init__(new_session, (url, name, policy, max_in_flight, credentials))

    @takes(TreeArgs)
    def infer(self, tokens: TokenRows | None = None, **samples: Unpack[TreeArgs]) -> CriticScores:
        """Returns the samples' values, without rewards; blocks. Raises the class that the server raised."""
        return self._wait(self._infer(tokens, known(self.infer, samples)))

    @takes(InferArgs)
    def infer_with_rewards(self, tokens: TokenRows | None = None, **samples: Unpack[InferArgs]) -> CriticScores:
        """Returns the samples' values and rewards; raises InvalidRequest if the server has no reward model."""
        return self._wait(self._infer(tokens, known(self.infer_with_rewards, samples), needs_rewards=True))

    @takes(TreeArgs)
    def submit(self, tokens: TokenRows | None = None, **samples: Unpack[TreeArgs]) -> Future[CriticScores]:
        """Returns a future of `infer`'s result, at once; thousands may be under way."""
        return self._infer(tokens, known(self.submit, samples))

    @takes(InferArgs)
    def submit_with_rewards(
        self, tokens: TokenRows | None = None, **samples: Unpack[InferArgs]
    ) -> Future[CriticScores]:
        """Returns a future of `infer_with_rewards`'s result, at once."""
        return self._infer(tokens, known(self.submit_with_rewards, samples), needs_rewards=True)

    @takes(TrainArgs)
    def train(
        self,
        tokens: TokenRows,
        returns: Rows | None = None,
        prev_values: Rows | None = None,
        mask: Rows | None = None,
        **options: Unpack[TrainArgs],
    ) -> TrainFuture[TrainReport]:
        """Returns a future of the report on training on these rows, at once.

        Row i has T_i tokens and T_i - 1 entries of each other array. Without `lengths` an array `[N, T]` is N rows of T
        tokens, of which the mask says what is learnt. Give `returns` and `prev_values`, or `rewards`: the report then
        has `advantages` and `returns`. A failure is logged; if nobody has looked at the future by the next call, that
        call raises it.
        """
        request = make_train_request(tokens, returns, prev_values, mask, **known(self.train, options))
        session = self._here().session
        future: TrainFuture[TrainReport] = TrainFuture(self._here(), request.id)
        return self._start(self._train_steps(session, request, options.get("train_id")), future, alone=True)

    def train_loss(
        self, tokens: TokenRows, returns: Rows, prev_values: Rows, mask: Rows, *, lengths: Integers | None = None
    ) -> TrainFuture[float]:
        """Trains as `train` does, for the loss alone: also at other servers of these tensors, such as PyTriton's.

        Those do not recognise a request by its id, so one that may have arrived is not sent again: the future fails.
        """
        request = make_train_request(tokens, returns, prev_values, mask, lengths=lengths)
        session = self._here().session
        future: TrainFuture[float] = TrainFuture(self._here(), request.id)
        steps = session.caller.ask(prepare_train_loss(self._model(Operation.TRAIN), request))
        return self._start(steps, future, alone=True)

    @takes(BatchArgs)
    def validate(
        self,
        tokens: TokenRows,
        returns: Rows | None = None,
        prev_values: Rows | None = None,
        mask: Rows | None = None,
        **options: Unpack[BatchArgs],
    ) -> TrainReport:
        """Returns the loss and its metrics on these rows, without training; blocks. Arguments are as for `train`."""
        request = make_train_request(tokens, returns, prev_values, mask, **known(self.validate, options))
        return self._wait(self._start(self._validate_steps(self._here().session, request), CallFuture(self._here())))

    def save(self, metrics: dict[str, float] | None = None) -> CheckpointInfo | None:
        """Saves a checkpoint with these metrics and returns it, or None if a user's own server saves elsewhere."""
        return self._wait(self.submit_save(metrics))

    def submit_save(self, metrics: dict[str, float] | None = None) -> Future[CheckpointInfo | None]:
        """Returns a future of `save`'s result, at once."""
        return self._control(ControlRequest(Operation.SAVE, metrics=metrics or {}))

    def load(self, checkpoint: str | None = None) -> CheckpointInfo | None:
        """Loads the checkpoint of that name, or the newest."""
        return self._wait(self._control(ControlRequest(Operation.LOAD, checkpoint)))

    def offload(self) -> None:
        """Moves the weights off the device; until `onload`, values and training are refused with Offloaded."""
        self._wait(self._control(ControlRequest(Operation.OFFLOAD)))

    def onload(self) -> None:
        """Moves the weights back."""
        self._wait(self._control(ControlRequest(Operation.ONLOAD)))

    def state(self) -> CriticState:
        """Returns the critic's state after all calls before this one."""
        return self._wait(self._control(ControlRequest(Operation.STATE)))

    def reconnect(self, timeout_s: float) -> None:
        """Ends the calls under way with Cancelled, and reconnects; limits each later call with all its tries.

        For a process that must end soon: the next call waits for nothing before it. A cancelled call that has reached
        the server may still be done there.
        """
        self.close()
        known = self._caller.endpoints.all
        url, name, policy, max_in_flight, credentials = self._arguments
        policy = dataclasses.replace(policy, timeout_s=timeout_s)
        self._new_session = _session_factory(url, policy, max_in_flight, credentials)
        self._arguments = (url, name, policy, max_in_flight, credentials)
        self._open()
        for endpoint, before in zip(self._caller.endpoints.all, known, strict=True):
            endpoint.seen = before.seen  # waits for a server that is away, instead of failing at once

    def _infer(
        self, tokens: TokenRows | None, samples: InferArgs | TreeArgs, *, needs_rewards: bool = False
    ) -> Future[CriticScores]:
        steps = self._infer_steps(self._here().session, tokens, samples, needs_rewards)
        return self._start(steps, CallFuture(self._here()))

    def _control(self, request: ControlRequest) -> Future[Any]:
        steps, alone = self._control_steps(self._here().session, request)
        return self._start(steps, CallFuture(self._here()), alone=alone)

    def _start(self, steps: Steps[T], future: F, *, alone: bool = False) -> F:
        thread = self._here()
        session = thread.session
        session.failures.raise_unseen()
        thread.start(lambda is_wanted: session.start(steps, alone=alone, is_wanted=is_wanted), future, self)
        return future


class AsyncCriticClient(CriticModels, AsyncClient[OrderedSession]):
    """`CriticClient` for one event loop: the same calls in the same order, with `await`.

    `submit` and `train` take their place in the order at once, the others when they are awaited.
    """

    def __init__(
        self,
        url: str,
        name: Name = "critic",
        *,
        policy: RetryPolicy = PATIENT,
        max_in_flight: int = 128,
        credentials: Credentials | None = None,
    ) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        self._name = name
        session = OrderedSession(addresses(url, credentials), policy, max_in_flight)
        super().__init__(session, (url, name, policy, max_in_flight, credentials))

    @takes(TreeArgs)
    async def infer(self, tokens: TokenRows | None = None, **samples: Unpack[TreeArgs]) -> CriticScores:
        """Returns the samples' values. Cancelling the task cancels the request, at the server too."""
        return await self._infer(tokens, known(self.infer, samples))

    @takes(InferArgs)
    async def infer_with_rewards(self, tokens: TokenRows | None = None, **samples: Unpack[InferArgs]) -> CriticScores:
        """Returns the samples' values and rewards; raises InvalidRequest if the server has no reward model."""
        return await self._infer(tokens, known(self.infer_with_rewards, samples), needs_rewards=True)

    @takes(TreeArgs)
    def submit(self, tokens: TokenRows | None = None, **samples: Unpack[TreeArgs]) -> asyncio.Task[CriticScores]:
        """Returns a task of `infer`, started at once."""
        return self._infer(tokens, known(self.submit, samples))

    @takes(TrainArgs)
    def train(
        self,
        tokens: TokenRows,
        returns: Rows | None = None,
        prev_values: Rows | None = None,
        mask: Rows | None = None,
        **options: Unpack[TrainArgs],
    ) -> AsyncTrainFuture:
        """Returns a future of the report to await, as `CriticClient.train` does; the request starts at once."""
        request = make_train_request(tokens, returns, prev_values, mask, **known(self.train, options))
        future = AsyncTrainFuture(request.id)
        steps = self._train_steps(self._session, request, options.get("train_id"))
        task = self._start(steps, alone=True, is_wanted=lambda: not future.cancelled())
        task.add_done_callback(functools.partial(self._end_training, future))
        return future

    @takes(BatchArgs)
    async def validate(
        self,
        tokens: TokenRows,
        returns: Rows | None = None,
        prev_values: Rows | None = None,
        mask: Rows | None = None,
        **options: Unpack[BatchArgs],
    ) -> TrainReport:
        """Returns the loss and its metrics on these rows, without training. Arguments are as for `train`."""
        request = make_train_request(tokens, returns, prev_values, mask, **known(self.validate, options))
        return await self._start(self._validate_steps(self._session, request))

    async def save(self, metrics: dict[str, float] | None = None) -> CheckpointInfo | None:
        """Saves a checkpoint with these metrics and returns it, or None if a user's own server saves elsewhere."""
        return await self._control(ControlRequest(Operation.SAVE, metrics=metrics or {}))

    async def load(self, checkpoint: str | None = None) -> CheckpointInfo | None:
        """Loads the checkpoint of that name, or the newest."""
        return await self._control(ControlRequest(Operation.LOAD, checkpoint))

    async def offload(self) -> None:
        """Moves the weights off the device; until `onload`, values and training are refused with Offloaded."""
        await self._control(ControlRequest(Operation.OFFLOAD))

    async def onload(self) -> None:
        """Moves the weights back."""
        await self._control(ControlRequest(Operation.ONLOAD))

    async def state(self) -> CriticState:
        """Returns the critic's state after all calls before this one."""
        return await self._control(ControlRequest(Operation.STATE))

    def _infer(
        self, tokens: TokenRows | None, samples: InferArgs | TreeArgs, *, needs_rewards: bool = False
    ) -> asyncio.Task[CriticScores]:
        return self._start(self._infer_steps(self._session, tokens, samples, needs_rewards))

    def _control(self, request: ControlRequest) -> asyncio.Task[Any]:
        steps, alone = self._control_steps(self._session, request)
        return self._start(steps, alone=alone)

    def _start(
        self, steps: Steps[T], *, alone: bool = False, is_wanted: Callable[[], bool] | None = None
    ) -> asyncio.Task[T]:
        self._session.failures.raise_unseen()
        return self._session.start(steps, alone=alone, is_wanted=is_wanted)

    def _end_training(self, future: AsyncTrainFuture, task: asyncio.Task[TrainReport]) -> None:
        if task.cancelled():
            if future.cancelled():
                return
            error: BaseException | None = Cancelled("the event loop ended before the answer")
        else:
            error = task.exception()
        if error is None:
            if not future.done():
                future.set_result(task.result())
            return
        if not future.done():
            future.set_exception(error)
        self._session.failures.add(future, error)


def _session_factory(
    url: str, policy: RetryPolicy, max_in_flight: int, credentials: Credentials | None
) -> Callable[[], OrderedSession]:
    return functools.partial(OrderedSession, addresses(url, credentials), policy, max_in_flight)
