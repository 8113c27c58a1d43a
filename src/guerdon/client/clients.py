"""The clients of a reward model: thin, one for threads and one for asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypedDict

from guerdon.client.addresses import addresses
from guerdon.client.calls import Conversations, Integers, ModelSignature, Texts, TokenRows, make_request, scoring
from guerdon.client.credentials import Credentials
from guerdon.client.results import Scores
from guerdon.client.retry import RetryPolicy
from guerdon.client.session import AsyncClient, AsyncSession, Session, ThreadedClient
from guerdon.client.spans import carried
from guerdon.core import ScoreRequest

_DEFAULT_POLICY = RetryPolicy()


class ScoreArgs(TypedDict, total=False):
    """The arguments of `RewardClient.score`, for those who collect them before the call."""

    texts: Texts
    messages: Conversations
    tokens: TokenRows
    groups: Integers | None
    prompt_lengths: Integers | None
    steps: TokenRows | None
    prompts: Texts | None
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

    def score(
        self,
        *,
        texts: Texts | None = None,
        messages: Conversations | None = None,
        tokens: TokenRows | None = None,
        groups: Integers | None = None,
        prompt_lengths: Integers | None = None,
        steps: TokenRows | None = None,
        prompts: Texts | None = None,
        labels: Sequence[Any] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        pad_to_length: int | None = None,
    ) -> Scores:
        """Returns the samples' scores; blocks. Raises the class that the server raised.

        Give exactly one of `texts`, `messages` (conversations) and `tokens` (token ids, each sequence of its own
        length): a list of samples. Every other list has one entry a sample: `groups`, `prompt_lengths` and `steps` as
        in `ScoreRequest`; `prompts` (text) and `labels` (any JSON value) for functions at the server that read them,
        and not sent if none does. `timeout_s` bounds this call from the moment that it is first sent, and the server
        is told; samples of higher `priority` (up to 99) go first. `pad_to_length` is for servers that join only
        requests of one width, such as PyTriton's; guerdon's needs none.
        """
        request = make_request(
            texts, messages, tokens, groups, prompt_lengths, steps, prompts, labels, priority, timeout_s, pad_to_length
        )
        session = self._session_here()
        return session.run(session.caller.ask(scoring(self._model, request)))

    def submit(
        self,
        *,
        texts: Texts | None = None,
        messages: Conversations | None = None,
        tokens: TokenRows | None = None,
        groups: Integers | None = None,
        prompt_lengths: Integers | None = None,
        steps: TokenRows | None = None,
        prompts: Texts | None = None,
        labels: Sequence[Any] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        pad_to_length: int | None = None,
    ) -> Future[Scores]:
        """A future of `score`'s result, at once; thousands may be under way."""
        request = make_request(
            texts, messages, tokens, groups, prompt_lengths, steps, prompts, labels, priority, timeout_s, pad_to_length
        )
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

    async def score(
        self,
        *,
        texts: Texts | None = None,
        messages: Conversations | None = None,
        tokens: TokenRows | None = None,
        groups: Integers | None = None,
        prompt_lengths: Integers | None = None,
        steps: TokenRows | None = None,
        prompts: Texts | None = None,
        labels: Sequence[Any] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        pad_to_length: int | None = None,
    ) -> Scores:
        """The samples' scores. Cancelling the task abandons the request, at the server too."""
        request = make_request(
            texts, messages, tokens, groups, prompt_lengths, steps, prompts, labels, priority, timeout_s, pad_to_length
        )
        return await self._score(request)

    def submit(
        self,
        *,
        texts: Texts | None = None,
        messages: Conversations | None = None,
        tokens: TokenRows | None = None,
        groups: Integers | None = None,
        prompt_lengths: Integers | None = None,
        steps: TokenRows | None = None,
        prompts: Texts | None = None,
        labels: Sequence[Any] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        pad_to_length: int | None = None,
    ) -> asyncio.Task[Scores]:
        """A task of `score`, started at once."""
        request = make_request(
            texts, messages, tokens, groups, prompt_lengths, steps, prompts, labels, priority, timeout_s, pad_to_length
        )
        return asyncio.create_task(self._score(request))

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
