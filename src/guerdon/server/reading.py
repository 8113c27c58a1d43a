"""What a scorer reads of a request's samples: their ids, which a tokenizer makes of text, or the texts themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from guerdon.core import Message, ModelInfo, ScoreRequest, Truncation
from guerdon.errors import InvalidRequest
from guerdon.messages import response
from guerdon.server import tracing
from guerdon.server.batching.sharing import FairTurns
from guerdon.server.catalog import Served, Steps, Tokenizer

T = TypeVar("T")

_NUM_THREADS = 2

Rows = ListLike[np.ndarray | str | InvalidRequest]
"""Of each sample its ids, or its text, or what is wrong with it."""


class Reader:
    """Reads requests for every model, text on threads of its own, on which the clients take turns."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="guerdon-tokenise")
        self._turns = FairTurns(_NUM_THREADS)

    def close(self) -> None:
        """Ends the threads; what waits for them is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """What `work` returns, on one of the threads once it is the client's turn, which lasts until `work` ends."""
        await self._turns.acquire(client)
        try:
            done = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except BaseException:
            self._turns.release()
            raise
        done.add_done_callback(lambda _: self._turns.release())
        return await asyncio.shield(done)

    async def rows(self, served: Served, request: ScoreRequest, cut: Truncation | None, client: str) -> Rows:
        """What the scorer reads of each sample of a request that `check` has passed; text is cut as `cut` says.

        Text is tokenised in steps, so that the clients' turns are short, and no further if this is cancelled.
        """
        if request.tokens is not None:
            return request.tokens
        encoder, added, texts = served.encoder, request.add_special_tokens, request.texts
        if encoder is None:
            return texts or [_response(conversation) for conversation in request.messages or ()]
        most = served.info.max_length
        if request.prompt_lengths is not None and cut is not None:  # which move by as many tokens as are cut off
            cut, most = cut if added else None, None
        with tracing.step("tokenize", served.info.name):
            if not isinstance(encoder, Tokenizer):  # then no messages are taken
                return await self.run(client, lambda: encoder.encode(texts or [], added, cut if added else None))
            if texts is not None:
                steps = encoder.encode_in_steps(texts, added, cut, most)
            else:
                steps = encoder.encode_messages_in_steps(request.messages or [], cut, most)
            while (rows := await self.run(client, lambda: _advance(steps))) is None:
                pass
            return rows


def _advance(steps: Steps) -> Rows | None:
    """Takes one step; returns what comes of all of them with the last."""
    try:
        return next(steps)
    except StopIteration as e:
        return e.value


def check(served: Served, request: ScoreRequest) -> None:
    """Raises InvalidRequest where the samples are of a form that the model does not read."""
    info = served.info
    if not len(request):
        raise InvalidRequest("the request has no samples; send at least one")
    if request.tokens is not None:
        if not info.takes_tokens:
            raise InvalidRequest(f"{info.name} reads text, not token ids; send sentences")
        return
    if not info.takes_text:
        raise InvalidRequest(info.why_no_text)
    if request.messages is not None and not info.takes_messages:
        raise InvalidRequest(f"{info.name} reads no messages{_why(info)}send sentences or tokens, formatted for it")
    if served.encoder is None and (request.add_special_tokens or request.truncation is not None):
        raise InvalidRequest(
            f"{info.name} reads texts, not tokens: it has no special tokens to add, and nothing to truncate; "
            "leave these options out"
        )


def _why(info: ModelInfo) -> str:
    if info.path == "function":  # not a RewardModelServer's infer_fn, which reads ids
        return ", but texts; name the function's first parameter `responses`, or "
    return ": it has no chat template; "


def _response(conversation: list[Message]) -> str | InvalidRequest:
    """What a function reads of a conversation."""
    try:
        return response(conversation)
    except InvalidRequest as e:
        return e
