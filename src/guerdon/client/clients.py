"""The clients of a reward model: thin, one for threads and one for asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypedDict, Unpack

import numpy as np

from guerdon.client.addresses import addresses
from guerdon.client.calls import ModelSignature, make_request, scoring
from guerdon.client.credentials import Credentials
from guerdon.client.results import Scores
from guerdon.client.retry import RetryPolicy
from guerdon.client.session import AsyncClient, AsyncSession, Session, ThreadedClient
from guerdon.client.spans import carried
from guerdon.core import Message, ScoreRequest

_DEFAULT_POLICY = RetryPolicy()


class ScoreArgs(TypedDict, total=False):
    """The arguments of `score` and `submit`: exactly one of `texts`, `messages` and `tokens`; one entry a sample.

    `tokens` are token ids, each sequence of its own length. Hints and positions as in `ScoreRequest`: `groups`,
    `prompt_lengths`, `steps`. `prompts` (text) and `labels` (any JSON value) are for functions at the server that read
    them; they are not sent where none does. `timeout_s` bounds this call from the moment that it is first sent, and
    the server is told; samples of higher `priority` (up to 99) go first. `pad_to_length` is for servers that join only
    requests of one width, as PyTriton's; guerdon's needs none.
    """

    texts: Sequence[str]
    messages: Sequence[Sequence[Message]]
    tokens: Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray
    groups: Sequence[int] | np.ndarray | None
    prompt_lengths: Sequence[int] | np.ndarray | None
    steps: Sequence[Sequence[int]] | Sequence[np.ndarray] | None
    prompts: Sequence[str] | None
    labels: Sequence[Any] | None
    priority: int
    timeout_s: float | None
    pad_to_length: int | None


class RewardClient(ThreadedClient[Session]):
    """Scores samples at one server or several; safe to use from many threads, and after a fork.

    `url` is http://, https://, grpc:// or grpcs:// (a bare host:port means http), or several of them, which then share
    the load. `credentials` are the environment's where they are left out; a URL may have its server's key,
    http://x:KEY@host:port. At most `max_in_flight` requests are on their way at once; more wait here. Closes by itself.
    Over gRPC, fork while no call is under way and no async client is open; else the child's calls raise GuerdonError.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "reward_model",
        *,
        policy: RetryPolicy = _DEFAULT_POLICY,
        max_in_flight: int = 128,
        credentials: Credentials | None = None,
    ) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        self._model = model
        new_session = functools.partial(Session, addresses(url, credentials), policy, max_in_flight)
        super().__init__(new_session, (url, model, policy, max_in_flight, credentials))

    def score(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """The samples' scores; blocks. Arguments: `ScoreArgs`. Raises the class that the server raised."""
        session = self._session_here()
        return session.run(session.caller.ask(scoring(self._model, make_request(**samples))))

    def submit(self, **samples: Unpack[ScoreArgs]) -> Future[Scores]:
        """A future of `score`'s result, at once; thousands may be under way."""
        request = make_request(**samples)
        session = self._session_here()

        def score(client: RewardClient = self) -> Scores:  # which must not be collected, and so close, before
            return session.run(session.caller.ask(scoring(client._model, request)))

        return session.workers.submit(carried(score), request.priority)

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Blocks until a server has the model ready; raises DeadlineExceeded saying what each server said."""
        session = self._session_here()
        session.run(session.caller.wait_ready(self._model, timeout_s))

    def info(self) -> ModelSignature:
        """What the model takes and gives."""
        session = self._session_here()
        return session.run(session.caller.describe(self._model))

    def config(self) -> dict[str, Any]:
        """The configuration of the model in Triton's terms; raises what the server raised."""
        session = self._session_here()
        return session.run(session.caller.configuration(self._model))


class AsyncRewardClient(AsyncClient[AsyncSession]):
    """`RewardClient` for one event loop: the same arguments, with `await`; close it with `aclose` or `async with`."""

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "reward_model",
        *,
        policy: RetryPolicy = _DEFAULT_POLICY,
        max_in_flight: int = 128,
        credentials: Credentials | None = None,
    ) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        self._model = model
        session = AsyncSession(addresses(url, credentials), policy, max_in_flight)
        super().__init__(session, (url, model, policy, max_in_flight, credentials))

    async def score(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """The samples' scores. Cancelling the task abandons the request, at the server too."""
        return await self._score(make_request(**samples))

    def submit(self, **samples: Unpack[ScoreArgs]) -> asyncio.Task[Scores]:
        """A task of `score`, started at once."""
        return asyncio.create_task(self._score(make_request(**samples)))

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Returns when a server has the model ready; raises DeadlineExceeded saying what each server said."""
        await self._session.run(self._session.caller.wait_ready(self._model, timeout_s))

    async def info(self) -> ModelSignature:
        """What the model takes and gives."""
        return await self._session.run(self._session.caller.describe(self._model))

    async def config(self) -> dict[str, Any]:
        """The configuration of the model in Triton's terms; raises what the server raised."""
        return await self._session.run(self._session.caller.configuration(self._model))

    async def _score(self, request: ScoreRequest) -> Scores:
        return await self._session.run(self._session.caller.ask(scoring(self._model, request)))
