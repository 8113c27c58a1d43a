"""The client of a trainable critic: its values, its training and its checkpoints, in the order of the calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from guerdon.client.addresses import addresses
from guerdon.client.calls import Conversations, Errand, Integers, ModelSignature, Texts, TokenRows, make_request
from guerdon.client.credentials import Credentials
from guerdon.client.critic_calls import Rows, controlling, inferring, make_train_request, training, training_loss
from guerdon.client.futures import TrainFuture
from guerdon.client.ordered import AsyncOrderedSession, OrderedSession
from guerdon.client.results import CriticScores
from guerdon.client.retry import RetryPolicy
from guerdon.client.session import Call, ThreadedClient
from guerdon.core import CheckpointInfo, ControlRequest, CriticState, Operation, ScoreRequest, TrainReport, TrainRequest

T = TypeVar("T")
AnySession = OrderedSession | AsyncOrderedSession

PATIENT = RetryPolicy.patient(21_600.0)
"""A server that comes back loads its checkpoint and trains again on its journal first, which takes minutes."""


Name = str | Mapping[str, str]
"""A critic's name, to which each of its models adds its operation; or the models' own names by operation."""


def _sessions(
    url: str, policy: RetryPolicy, max_in_flight: int, credentials: Credentials | None
) -> Callable[[], OrderedSession]:
    return functools.partial(OrderedSession, addresses(url, credentials), policy, max_in_flight)


class CriticCalls:
    """What both clients know of a critic: its models' names, and which calls go alone."""

    _name: Name

    def _model(self, operation: str) -> str:
        if isinstance(self._name, str):
            return f"{self._name}_{operation}"
        return self._name.get(operation, f"critic_{operation}")

    def _awaited(self) -> list[str]:
        """The models that must be ready: of a server that brings them up one by one, all that were named."""
        return [self._model("infer")] if isinstance(self._name, str) else list(self._name.values())

    def _training(self, session: AnySession, request: TrainRequest, train_id: str | None) -> Call[TrainReport]:
        errand = training(self._model(Operation.TRAIN), request)
        # Only under a name that the caller gave can it have been answered before.
        asks = None if train_id is None else self._errand(ControlRequest(Operation.STATE))
        return session.progress.reporting(session.caller, errand, state=asks)

    def _validating(self, session: AnySession, request: TrainRequest) -> Call[TrainReport]:
        errand = training(self._model(Operation.VALIDATE), request)
        return session.progress.reporting(session.caller, errand, trains=False)

    def _controlling(self, session: AnySession, request: ControlRequest) -> tuple[Call[Any], bool]:
        """The call, and whether it goes alone."""
        errand, operation = self._errand(request), request.operation
        if operation is Operation.LOAD:
            return session.progress.returning(session.caller, errand), True
        return session.caller.ask(errand), operation is not Operation.STATE

    def _errand(self, request: ControlRequest) -> Errand[Any]:
        return controlling(self._model(request.operation), request)


class CriticClient(CriticCalls, ThreadedClient[OrderedSession]):
    """Asks a critic for values, and trains it; safe to use from many threads, and after a fork.

    `url` is the server's http://, https://, grpc:// or grpcs:// address (a bare host:port means http), `credentials`
    as a RewardClient's, `name` the critic's name there, or the names of its models by operation (infer, train, save,
    ...; the others' are critic_<operation>). Forks over gRPC are as a RewardClient's.
    Calls go in the order in which they are made: values asked for after a train are those of the trained
    weights, and a train waits for the values before it. A server that is away or restarts is tried again until the
    policy's time is up. One with a folder for checkpoints has lost nothing then, and trains on nothing twice; one
    without begins anew, and the next train or validate raises CriticReset, as after another client's `load`.
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
        new_session = _sessions(url, policy, max_in_flight, credentials)
        super().__init__(new_session, (url, name, policy, max_in_flight, credentials))

    def infer(
        self,
        *,
        texts: Texts | None = None,
        messages: Conversations | None = None,
        tokens: TokenRows | None = None,
        groups: Integers | None = None,
        prompt_lengths: Integers | None = None,
        timeout_s: float | None = None,
        pad_to_length: int | None = None,
    ) -> CriticScores:
        """Returns the samples' values, no rewards; blocks. Raises the class that the server raised.

        Give exactly one of `texts`, `messages` and `tokens`: a list of samples, as to `RewardClient.score`. `groups`
        and `prompt_lengths` are hints as in `ScoreRequest`. `timeout_s` bounds this call from the moment that it is
        first sent. `pad_to_length` is for servers that join only requests of one width; guerdon's needs none.
        """
        request = make_request(
            texts, messages, tokens, groups, prompt_lengths, timeout_s=timeout_s, pad_to_length=pad_to_length
        )
        return self._infer(request).result()

    def infer_with_rewards(
        self,
        *,
        texts: Texts | None = None,
        messages: Conversations | None = None,
        tokens: TokenRows | None = None,
        groups: Integers | None = None,
        prompt_lengths: Integers | None = None,
        timeout_s: float | None = None,
        pad_to_length: int | None = None,
    ) -> CriticScores:
        """The samples' values and rewards; raises InvalidRequest where the server has no reward model."""
        request = make_request(
            texts, messages, tokens, groups, prompt_lengths, timeout_s=timeout_s, pad_to_length=pad_to_length
        )
        return self._infer(request, needs_rewards=True).result()

    def submit(
        self,
        *,
        texts: Texts | None = None,
        messages: Conversations | None = None,
        tokens: TokenRows | None = None,
        groups: Integers | None = None,
        prompt_lengths: Integers | None = None,
        timeout_s: float | None = None,
        pad_to_length: int | None = None,
    ) -> Future[CriticScores]:
        """A future of `infer`'s result, at once; thousands may be under way."""
        request = make_request(
            texts, messages, tokens, groups, prompt_lengths, timeout_s=timeout_s, pad_to_length=pad_to_length
        )
        return self._infer(request)

    def submit_with_rewards(
        self,
        *,
        texts: Texts | None = None,
        messages: Conversations | None = None,
        tokens: TokenRows | None = None,
        groups: Integers | None = None,
        prompt_lengths: Integers | None = None,
        timeout_s: float | None = None,
        pad_to_length: int | None = None,
    ) -> Future[CriticScores]:
        """A future of `infer_with_rewards`'s result, at once."""
        request = make_request(
            texts, messages, tokens, groups, prompt_lengths, timeout_s=timeout_s, pad_to_length=pad_to_length
        )
        return self._infer(request, needs_rewards=True)

    def train(
        self, tokens: Rows, returns: Rows, prev_values: Rows, mask: Rows, *, train_id: str | None = None
    ) -> TrainFuture[TrainReport]:
        """A future of what training on these rows did, at once.

        Row i has T_i tokens and T_i - 1 of each other. What was applied under a `train_id` (default: a new one) is
        never applied again; it is answered as the first time. A failure is logged; where nobody has looked at the
        future by the next call, that call raises it.
        """
        request = make_train_request(tokens, returns, prev_values, mask, train_id)
        session = self._session_here()
        future: TrainFuture[TrainReport] = TrainFuture(request.id, session.failures)
        self._in_turn(session, self._training(session, request, train_id), alone=True, future=future)
        return future

    def train_loss(self, tokens: Rows, returns: Rows, prev_values: Rows, mask: Rows) -> TrainFuture[float]:
        """As `train`, for the loss alone: also at other servers of these tensors, such as PyTriton's.

        As they know no request by its id, one that may have arrived there is not sent again: the future fails.
        """
        request = make_train_request(tokens, returns, prev_values, mask)
        session = self._session_here()
        future: TrainFuture[float] = TrainFuture(request.id, session.failures)
        call = session.caller.ask(training_loss(self._model(Operation.TRAIN), request))
        self._in_turn(session, call, alone=True, future=future)
        return future

    def validate(self, tokens: Rows, returns: Rows, prev_values: Rows, mask: Rows) -> TrainReport:
        """The loss and its companions on these rows, without any training; blocks."""
        request = make_train_request(tokens, returns, prev_values, mask)
        session = self._session_here()
        return self._in_turn(session, self._validating(session, request)).result()

    def save(self, metrics: dict[str, float] | None = None) -> CheckpointInfo | None:
        """Saves a checkpoint with these metrics, and says which (None where a user's own server saves elsewhere)."""
        return self.submit_save(metrics).result()

    def submit_save(self, metrics: dict[str, float] | None = None) -> Future[CheckpointInfo | None]:
        """A future of `save`'s result, at once."""
        return self._control(ControlRequest(Operation.SAVE, metrics=metrics or {}))

    def load(self, checkpoint: str | None = None) -> CheckpointInfo | None:
        """Goes back to the checkpoint of that name, or to the newest."""
        return self._control(ControlRequest(Operation.LOAD, checkpoint)).result()

    def offload(self) -> None:
        """Moves the weights off the device; until `onload`, values and training are refused with Offloaded."""
        self._control(ControlRequest(Operation.OFFLOAD)).result()

    def onload(self) -> None:
        """Moves the weights back."""
        self._control(ControlRequest(Operation.ONLOAD)).result()

    def state(self) -> CriticState:
        """What the critic is after all calls before this one."""
        return self._control(ControlRequest(Operation.STATE)).result()

    def reconnect(self, timeout_s: float) -> None:
        """Ends the calls under way with Cancelled, and connects anew; from now on a call has so long for all its tries.

        For who has to leave soon: what is asked next waits for nothing before it. What an ended call had brought to the
        server may still be done there.
        """
        self.close()
        known = self._session.caller.endpoints.all
        url, name, policy, max_in_flight, credentials = self._arguments
        policy = dataclasses.replace(policy, timeout_s=timeout_s)
        self._new_session = _sessions(url, policy, max_in_flight, credentials)
        self._arguments = (url, name, policy, max_in_flight, credentials)
        self._open()
        for endpoint, before in zip(self._session.caller.endpoints.all, known, strict=True):
            endpoint.seen = before.seen  # so that it is waited for where it is away

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Blocks until the server is ready; raises DeadlineExceeded with what it said."""
        session = self._session_here()
        for model in self._awaited():
            session.run(session.caller.wait_ready(model, timeout_s))

    def info(self) -> ModelSignature:
        """What the model that gives the values takes and gives."""
        session = self._session_here()
        return session.run(session.caller.describe(self._model("infer")))

    def config(self) -> dict[str, Any]:
        """The configuration, in Triton's terms, of the model that gives the values; raises what the server raised."""
        session = self._session_here()
        return session.run(session.caller.configuration(self._model("infer")))

    def _control(self, request: ControlRequest) -> Future[Any]:
        session = self._session_here()
        call, alone = self._controlling(session, request)
        return self._in_turn(session, call, alone=alone)

    def _infer(self, request: ScoreRequest, *, needs_rewards: bool = False) -> Future[CriticScores]:
        errand = inferring(self._model("infer"), request, needs_rewards=needs_rewards)
        session = self._session_here()
        return self._in_turn(session, session.caller.ask(errand))

    def _in_turn(
        self, session: OrderedSession, call: Call[T], *, alone: bool = False, future: Future[T] | None = None
    ) -> Future[T]:
        future = Future() if future is None else future
        kept = [self]  # which must not be collected, and so close, before the future has its outcome

        def perform(_kept: list[CriticClient] = kept) -> T:
            return session.run(call)

        future.add_done_callback(lambda _: kept.clear())
        session.in_turn(perform, future, alone=alone)
        return future
