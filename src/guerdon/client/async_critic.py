"""The client of a trainable critic for asyncio: the same calls in the same order."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from guerdon.client.addresses import addresses
from guerdon.client.calls import Conversations, Integers, ModelSignature, Texts, TokenRows, make_request
from guerdon.client.credentials import Credentials
from guerdon.client.critic import PATIENT, CriticCalls, Name
from guerdon.client.critic_calls import Rows, inferring, make_train_request
from guerdon.client.futures import AsyncTrainFuture
from guerdon.client.ordered import AsyncOrderedSession
from guerdon.client.results import CriticScores
from guerdon.client.retry import RetryPolicy
from guerdon.client.session import AsyncClient
from guerdon.core import CheckpointInfo, ControlRequest, CriticState, Operation, ScoreRequest, TrainReport
from guerdon.errors import Cancelled


class AsyncCriticClient(CriticCalls, AsyncClient[AsyncOrderedSession]):
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
        session = AsyncOrderedSession(addresses(url, credentials), policy, max_in_flight)
        super().__init__(session, (url, name, policy, max_in_flight, credentials))

    async def infer(
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
        """The samples' values. Cancelling the task abandons the request, at the server too."""
        request = make_request(
            texts, messages, tokens, groups, prompt_lengths, timeout_s=timeout_s, pad_to_length=pad_to_length
        )
        return await self._infer(request)

    async def infer_with_rewards(
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
        return await self._infer(request, needs_rewards=True)

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
    ) -> asyncio.Task[CriticScores]:
        """A task of `infer`, started at once."""
        request = make_request(
            texts, messages, tokens, groups, prompt_lengths, timeout_s=timeout_s, pad_to_length=pad_to_length
        )
        return self._infer(request)

    def train(
        self, tokens: Rows, returns: Rows, prev_values: Rows, mask: Rows, *, train_id: str | None = None
    ) -> AsyncTrainFuture:
        """As `CriticClient.train`: a future to be awaited, under way at once."""
        request = make_train_request(tokens, returns, prev_values, mask, train_id)
        future = AsyncTrainFuture(request.id)
        session = self._session
        call = self._training(session, request, train_id)
        task = session.in_turn(call, alone=True, is_wanted=lambda: not future.cancelled())
        task.add_done_callback(functools.partial(self._trained, future))
        return future

    async def validate(self, tokens: Rows, returns: Rows, prev_values: Rows, mask: Rows) -> TrainReport:
        """The loss and its companions on these rows, without any training."""
        request = make_train_request(tokens, returns, prev_values, mask)
        return await self._session.in_turn(self._validating(self._session, request), alone=False)

    async def save(self, metrics: dict[str, float] | None = None) -> CheckpointInfo | None:
        """Saves a checkpoint with these metrics, and says which (None where a user's own server saves elsewhere)."""
        return await self._control(ControlRequest(Operation.SAVE, metrics=metrics or {}))

    async def load(self, checkpoint: str | None = None) -> CheckpointInfo | None:
        """Goes back to the checkpoint of that name, or to the newest."""
        return await self._control(ControlRequest(Operation.LOAD, checkpoint))

    async def offload(self) -> None:
        """Moves the weights off the device; until `onload`, values and training are refused with Offloaded."""
        await self._control(ControlRequest(Operation.OFFLOAD))

    async def onload(self) -> None:
        """Moves the weights back."""
        await self._control(ControlRequest(Operation.ONLOAD))

    async def state(self) -> CriticState:
        """What the critic is after all calls before this one."""
        return await self._control(ControlRequest(Operation.STATE))

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Returns when the server is ready; raises DeadlineExceeded with what it said."""
        for model in self._awaited():
            await self._session.run(self._session.caller.wait_ready(model, timeout_s))

    async def info(self) -> ModelSignature:
        """What the model that gives the values takes and gives."""
        return await self._session.run(self._session.caller.describe(self._model("infer")))

    async def config(self) -> dict[str, Any]:
        """The configuration, in Triton's terms, of the model that gives the values; raises what the server raised."""
        return await self._session.run(self._session.caller.configuration(self._model("infer")))

    def _control(self, request: ControlRequest) -> asyncio.Task[Any]:
        call, alone = self._controlling(self._session, request)
        return self._session.in_turn(call, alone=alone)

    def _infer(self, request: ScoreRequest, *, needs_rewards: bool = False) -> asyncio.Task[CriticScores]:
        errand = inferring(self._model("infer"), request, needs_rewards=needs_rewards)
        return self._session.in_turn(self._session.caller.ask(errand), alone=False)

    def _trained(self, future: AsyncTrainFuture, task: asyncio.Task[TrainReport]) -> None:
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
