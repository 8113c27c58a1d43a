"""The clients of a trainable critic, for threads and for asyncio: values, training, checkpoints, in call order."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar, Unpack

from guerdon.client import critic_calls
from guerdon.client.calls import Call, Integers, TokenRows, accept, takes
from guerdon.client.critic_calls import BatchArgs, CriticScores, InferArgs, Rows, TrainArgs, TreeArgs
from guerdon.client.faces import DEFAULTS, AsyncClient, BlockingClient, CallFuture, Client, ClientArgs
from guerdon.client.ordering import AsyncTrainFuture, OrderedSession, TrainFuture
from guerdon.client.retry import RetryPolicy, Steps
from guerdon.critic_core import CheckpointInfo, ControlRequest, CriticState, Operation, TrainReport, TrainRequest
from guerdon.errors import Cancelled

T = TypeVar("T")
F = TypeVar("F", bound=Future[Any])

PATIENT = RetryPolicy.patient(21_600.0)
"""A server that comes back loads its checkpoint and replays its journal first, which takes minutes."""

_DEFAULTS: ClientArgs = {**DEFAULTS, "policy": PATIENT}

Name = str | Mapping[str, str]
"""A critic's name, to which each of its models adds its operation; or the models' own names by operation."""


class CriticModels(Client[OrderedSession]):
    """Names a critic's models, and makes their calls; both clients are one.

    `_start` of each has a call take its place in the order, and returns its future or its task.
    """

    _session_class = OrderedSession
    _asks = (
        "a CriticClient needs the models of guerdon serve-critic: of a critic named NAME the models NAME_infer, "
        "NAME_train and so on"
    )
    _session: OrderedSession
    _start: Callable[..., Any]

    def _model_of(self, operation: str) -> str:
        if isinstance(self._model, str):
            return f"{self._model}_{operation}"
        return str(self._model.get(operation, f"critic_{operation}"))

    def _main_model(self) -> str:
        return self._model_of("infer")

    def _models_to_await(self) -> list[str]:
        """Returns all models that were named: a server may load them one by one."""
        return [self._main_model()] if isinstance(self._model, str) else list(self._model.values())

    def _infer(self, tokens: TokenRows | None, samples: InferArgs | TreeArgs, *, needs_rewards: bool = False) -> Any:
        request, parents = critic_calls.make_infer_request(tokens, **samples)
        call = critic_calls.prepare_infer(self._main_model(), request, needs_rewards=needs_rewards, parents=parents)
        return self._start(self._session.caller.ask(call))

    def _train_steps(self, request: TrainRequest, train_id: str | None) -> Steps[TrainReport]:
        call, session = critic_calls.prepare_train(self._model_of(Operation.TRAIN), request), self._session
        # Only a request with a name from the caller can have been answered before.
        state = None if train_id is None else self._control_call(Operation.STATE)
        return session.reset_check.report(session.caller, call, state=state)

    def _validate(self, request: TrainRequest) -> Any:
        call, session = critic_calls.prepare_train(self._model_of(Operation.VALIDATE), request), self._session
        return self._start(session.reset_check.report(session.caller, call, trains=False))

    def _control(self, operation: Operation, **about: Any) -> Any:
        call, session = self._control_call(operation, **about), self._session
        if operation is Operation.LOAD:
            return self._start(session.reset_check.load(session.caller, call), alone=True)
        return self._start(session.caller.ask(call), alone=operation is not Operation.STATE)

    def _control_call(self, operation: Operation, **about: Any) -> Call[Any]:
        return critic_calls.prepare_control(self._model_of(operation), ControlRequest(operation, **about))


class CriticClient(CriticModels, BlockingClient[OrderedSession]):
    """Asks a critic for values, and trains it; safe to use from many threads, and after a fork.

    `url` is the server's http://, https://, grpc:// or grpcs:// address (a bare host:port means http); `credentials`
    and forks are as a RewardClient's. `name` is the critic's name, or its models' names by operation (infer, train,
    save, ...; any other is critic_<operation>). Calls are executed in order: values after a train come from the trained
    weights, and a train waits for the values before it. While the server is away or restarts, calls are retried until
    the policy's time is over. A server with a folder for checkpoints then has lost nothing, and applies no train
    request twice; one without starts again from step 0, and the next train or validate raises CriticReset, as after
    another client's `load`.
    """

    @takes(ClientArgs, _DEFAULTS)
    def __init__(self, url: str, name: Name = "critic", **options: Unpack[ClientArgs]) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        super().__init__(url, name, _DEFAULTS | accept(CriticClient.__init__, options))

    @takes(TreeArgs)
    def infer(self, tokens: TokenRows | None = None, **samples: Unpack[TreeArgs]) -> CriticScores:
        """Returns the samples' values, without rewards; blocks. Raises the class that the server raised."""
        return self._wait(self._infer(tokens, accept(self.infer, samples)))

    @takes(InferArgs)
    def infer_with_rewards(self, tokens: TokenRows | None = None, **samples: Unpack[InferArgs]) -> CriticScores:
        """Returns the samples' values and rewards; raises InvalidRequest if the server has no reward model."""
        return self._wait(self._infer(tokens, accept(self.infer_with_rewards, samples), needs_rewards=True))

    @takes(TreeArgs)
    def submit(self, tokens: TokenRows | None = None, **samples: Unpack[TreeArgs]) -> Future[CriticScores]:
        """Returns a future of `infer`'s result, at once; thousands may be under way."""
        future: Future[CriticScores] = self._infer(tokens, accept(self.submit, samples))
        return future

    @takes(InferArgs)
    def submit_with_rewards(
        self, tokens: TokenRows | None = None, **samples: Unpack[InferArgs]
    ) -> Future[CriticScores]:
        """Returns a future of `infer_with_rewards`'s result, at once."""
        asked = accept(self.submit_with_rewards, samples)
        future: Future[CriticScores] = self._infer(tokens, asked, needs_rewards=True)
        return future

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
        tokens; the mask selects trained ones. Give `returns` and `prev_values`, or `rewards`: the report then has
        `advantages` and `returns`. A failure is logged; if the future has not been read by the next call, that call
        raises it.
        """
        request = critic_calls.make_train_request(tokens, returns, prev_values, mask, **accept(self.train, options))
        future: TrainFuture[TrainReport] = TrainFuture(self._here(), request.id)
        return self._start_as(future, self._train_steps(request, options.get("train_id")), alone=True)

    def train_loss(
        self, tokens: TokenRows, returns: Rows, prev_values: Rows, mask: Rows, *, lengths: Integers | None = None
    ) -> TrainFuture[float]:
        """Trains as `train` does, for the loss alone: also at other servers of these tensors, such as PyTriton's.

        Those do not recognise a request by its id, so one that may have arrived is not sent again: the future fails.
        """
        request = critic_calls.make_train_request(tokens, returns, prev_values, mask, lengths=lengths)
        future: TrainFuture[float] = TrainFuture(self._here(), request.id)
        steps = self._caller.ask(critic_calls.prepare_train_loss(self._model_of(Operation.TRAIN), request))
        return self._start_as(future, steps, alone=True)

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
        request = critic_calls.make_train_request(tokens, returns, prev_values, mask, **accept(self.validate, options))
        return self._wait(self._validate(request))

    def save(self, metrics: dict[str, float] | None = None) -> CheckpointInfo | None:
        """Saves a checkpoint with these metrics and returns it, or None if a user's own server saves elsewhere."""
        return self._wait(self.submit_save(metrics))

    def submit_save(self, metrics: dict[str, float] | None = None) -> Future[CheckpointInfo | None]:
        """Returns a future of `save`'s result, at once."""
        future: Future[CheckpointInfo | None] = self._control(Operation.SAVE, metrics=metrics or {})
        return future

    def load(self, checkpoint: str | None = None) -> CheckpointInfo | None:
        """Loads the checkpoint of that name, or the newest."""
        return self._wait(self._control(Operation.LOAD, checkpoint=checkpoint))

    def offload(self) -> None:
        """Moves the weights off the device; until `onload`, values and training are refused with Offloaded."""
        self._wait(self._control(Operation.OFFLOAD))

    def onload(self) -> None:
        """Moves the weights back."""
        self._wait(self._control(Operation.ONLOAD))

    def state(self) -> CriticState:
        """Returns the critic's state after all calls before this one."""
        return self._wait(self._control(Operation.STATE))

    def reconnect(self, timeout_s: float) -> None:
        """Ends the calls under way with Cancelled, and reconnects; limits each later call with all its tries.

        For a process that must end soon: the next call waits for nothing before it. A cancelled call that has reached
        the server may still be done there.
        """
        self.close()
        before = self._caller.endpoints.all
        url, name, options = self._arguments
        options = {**options, "policy": dataclasses.replace(options["policy"], timeout_s=timeout_s)}
        self._arguments = (url, name, options)
        self._open()
        for endpoint, old in zip(self._caller.endpoints.all, before, strict=True):
            endpoint.seen = old.seen  # waits for a server that is away, instead of failing at once

    def _start(self, steps: Steps[T], *, alone: bool = False) -> Future[T]:
        return self._start_as(CallFuture(self._here()), steps, alone)

    def _start_as(self, future: F, steps: Steps[Any], alone: bool) -> F:
        thread = self._here()
        session = thread.session
        session.failures.raise_unseen()
        thread.start(lambda is_wanted: session.start(steps, alone=alone, is_wanted=is_wanted), future, self)
        return future


class AsyncCriticClient(CriticModels, AsyncClient[OrderedSession]):
    """`CriticClient` for one event loop: the same calls in the same order, with `await`.

    `submit` and `train` take their place in the order at once, the others when they are awaited.
    """

    @takes(ClientArgs, _DEFAULTS)
    def __init__(self, url: str, name: Name = "critic", **options: Unpack[ClientArgs]) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        super().__init__(url, name, _DEFAULTS | accept(AsyncCriticClient.__init__, options))

    @takes(TreeArgs)
    async def infer(self, tokens: TokenRows | None = None, **samples: Unpack[TreeArgs]) -> CriticScores:
        """Returns the samples' values. Cancelling the task cancels the request, at the server too."""
        return await self._infer(tokens, accept(self.infer, samples))

    @takes(InferArgs)
    async def infer_with_rewards(self, tokens: TokenRows | None = None, **samples: Unpack[InferArgs]) -> CriticScores:
        """Returns the samples' values and rewards; raises InvalidRequest if the server has no reward model."""
        return await self._infer(tokens, accept(self.infer_with_rewards, samples), needs_rewards=True)

    @takes(TreeArgs)
    def submit(self, tokens: TokenRows | None = None, **samples: Unpack[TreeArgs]) -> asyncio.Task[CriticScores]:
        """Returns a task of `infer`, started at once."""
        task: asyncio.Task[CriticScores] = self._infer(tokens, accept(self.submit, samples))
        return task

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
        request = critic_calls.make_train_request(tokens, returns, prev_values, mask, **accept(self.train, options))
        future = AsyncTrainFuture(request.id)
        steps = self._train_steps(request, options.get("train_id"))
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
        request = critic_calls.make_train_request(tokens, returns, prev_values, mask, **accept(self.validate, options))
        return await self._validate(request)

    async def save(self, metrics: dict[str, float] | None = None) -> CheckpointInfo | None:
        """Saves a checkpoint with these metrics and returns it, or None if a user's own server saves elsewhere."""
        return await self._control(Operation.SAVE, metrics=metrics or {})

    async def load(self, checkpoint: str | None = None) -> CheckpointInfo | None:
        """Loads the checkpoint of that name, or the newest."""
        return await self._control(Operation.LOAD, checkpoint=checkpoint)

    async def offload(self) -> None:
        """Moves the weights off the device; until `onload`, values and training are refused with Offloaded."""
        await self._control(Operation.OFFLOAD)

    async def onload(self) -> None:
        """Moves the weights back."""
        await self._control(Operation.ONLOAD)

    async def state(self) -> CriticState:
        """Returns the critic's state after all calls before this one."""
        return await self._control(Operation.STATE)

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
