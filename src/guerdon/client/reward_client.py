"""The clients of a reward model, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypedDict, TypeVar, Unpack

from guerdon.client.calls import (
    Call,
    Conversations,
    Integers,
    Scores,
    Texts,
    TokenRows,
    accept,
    make_request,
    prepare_score,
    takes,
)
from guerdon.client.driver import Session
from guerdon.client.faces import DEFAULTS, AsyncClient, BlockingClient, ClientArgs

T = TypeVar("T")

_ASKS = "a RewardClient needs a model with rewards, such as guerdon serve offers"


class ScoreArgs(TypedDict, total=False):
    """The keyword arguments of `RewardClient.score`; give exactly one of `texts`, `messages` and `tokens`.

    `messages` are conversations, `tokens` token ids, sequences of any length. Every list has one entry a sample:
    `groups`, `prompt_lengths` and `steps` as in `ScoreRequest`; `prompts` (text) for functions, and for encoders, which
    read pairs; `labels` (any JSON value) for functions; sent only if the model takes them. `timeout_s` limits the call
    from when it is first sent, and is sent to the server; samples of higher `priority` (up to 99) go first.
    `pad_to_length` is for servers that batch only requests of one width, such as PyTriton's; guerdon's needs none.
    """

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


class RewardClient(BlockingClient[Session]):
    """Scores samples at one server or several; safe to use from many threads, and after a fork.

    `url` is http://, https://, grpc:// or grpcs:// (a bare host:port means http), or several of them, which then share
    the load. The default `credentials` are the environment's; a URL may hold its server's key, http://x:KEY@host:port.
    At most `max_in_flight` requests are under way; more wait here. Closes by itself.
    Over gRPC, fork while no call is under way; else the child's calls raise GuerdonError.
    """

    _asks = _ASKS

    @takes(ClientArgs, DEFAULTS)
    def __init__(self, url: str | Sequence[str], model: str = "reward_model", **options: Unpack[ClientArgs]) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        super().__init__(url, model, DEFAULTS | accept(RewardClient.__init__, options))

    @takes(ScoreArgs)
    def score(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """Returns the samples' scores; blocks. Raises the class that the server raised."""
        return self._ask(prepare_score(self._model, make_request(**accept(self.score, samples))))

    @takes(ScoreArgs)
    def submit(self, **samples: Unpack[ScoreArgs]) -> Future[Scores]:
        """Returns a future of `score`'s result, at once; thousands may be under way."""
        call = prepare_score(self._model, make_request(**accept(self.submit, samples)))
        return self._submit(self._caller.ask(call), call.priority)

    def ask(self, call: Call[T]) -> Future[T]:
        """Returns a future of what a model of another kind answers to `call`, which makes and reads its tensors."""
        return self._submit(self._caller.ask(call))


class AsyncRewardClient(AsyncClient[Session]):
    """`RewardClient` for one event loop: the same arguments, with `await`; close it with `aclose` or `async with`."""

    _asks = _ASKS

    @takes(ClientArgs, DEFAULTS)
    def __init__(self, url: str | Sequence[str], model: str = "reward_model", **options: Unpack[ClientArgs]) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        super().__init__(url, model, DEFAULTS | accept(AsyncRewardClient.__init__, options))

    @takes(ScoreArgs)
    async def score(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """Returns what `RewardClient.score` returns. Cancelling the task cancels the request, at the server too."""
        return await self._ask(prepare_score(self._model, make_request(**accept(self.score, samples))))

    @takes(ScoreArgs)
    def submit(self, **samples: Unpack[ScoreArgs]) -> asyncio.Task[Scores]:
        """Returns a task of `score`, started at once."""
        call = prepare_score(self._model, make_request(**accept(self.submit, samples)))
        return asyncio.create_task(self._ask(call))
