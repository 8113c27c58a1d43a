"""The clients of a teacher, for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal, Unpack

from guerdon.client import teacher_calls
from guerdon.client.calls import accept, takes
from guerdon.client.driver import Session
from guerdon.client.faces import DEFAULTS, AsyncClient, BlockingClient, ClientArgs
from guerdon.client.teacher_calls import GivenIds, TeacherAnswers, TeacherArgs
from guerdon.client.teacher_head import Head

_ASKS = "a TeacherClient needs a model of guerdon serve-teacher"


class TeacherClient(BlockingClient[Session]):
    """Asks a teacher or a reference for log-probs; safe to use from many threads, and after a fork.

    URLs, credentials, retries and forks are as RewardClient's. `TeacherArgs` are the keyword arguments of every
    question.
    """

    _asks = _ASKS

    @takes(ClientArgs, DEFAULTS)
    def __init__(self, url: str | Sequence[str], model: str = "teacher", **options: Unpack[ClientArgs]) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        super().__init__(url, model, DEFAULTS | accept(TeacherClient.__init__, options))

    @takes(TeacherArgs)
    def logprobs(self, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns the log-probs of the samples' own tokens; blocks. Raises the class that the server raised."""
        return self._ask(teacher_calls.prepare_logprobs(self._model, accept(self.logprobs, samples)))

    @takes(TeacherArgs)
    def submit(self, k: int = 0, **samples: Unpack[TeacherArgs]) -> Future[TeacherAnswers]:
        """Returns a future of `logprobs`'s result, with a `k` of `top`'s, at once; thousands may be under way."""
        call = teacher_calls.prepare_top(self._model, k, accept(self.submit, samples))
        return self._submit(self._caller.ask(call), call.priority)

    @takes(TeacherArgs)
    def top(self, k: int, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns the `k` likeliest ids of each asked token with their log-probs, and what `logprobs` returns."""
        return self._ask(teacher_calls.prepare_top(self._model, k, accept(self.top, samples)))

    @takes(TeacherArgs)
    def given(self, ids: GivenIds, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns the log-probs of `ids`, and what `logprobs` returns.

        `ids` has one entry a sample: K ids for all of its tokens, or `[n, K]` for its n asked tokens in order, of which
        -1 are pads.
        """
        return self._ask(teacher_calls.prepare_given(self._model, ids, accept(self.given, samples)))

    @takes(TeacherArgs)
    def hidden(self, *, dtype: Literal["bfloat16"] | None = None, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns what the head turns into the logits of each asked token.

        A `dtype` of bfloat16 rounds the states of a float32 model, which halves their size.
        """
        return self._ask(teacher_calls.prepare_hidden(self._model, dtype, accept(self.hidden, samples)))

    def head(self, known: Head | None = None) -> Head:
        """Fetches the head over HTTP; returns `known` if it is still the same. Raises Unsupported over gRPC."""
        return self._call(teacher_calls.fetch_head(self._caller, self._model, known))


class AsyncTeacherClient(AsyncClient[Session]):
    """`TeacherClient` for one event loop: the same questions, with `await`; close it with `aclose` or `async with`.

    Cancelling a task cancels its request, at the server too.
    """

    _asks = _ASKS

    @takes(ClientArgs, DEFAULTS)
    def __init__(self, url: str | Sequence[str], model: str = "teacher", **options: Unpack[ClientArgs]) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        super().__init__(url, model, DEFAULTS | accept(AsyncTeacherClient.__init__, options))

    @takes(TeacherArgs)
    async def logprobs(self, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns the log-probs of the samples' own tokens."""
        return await self._ask(teacher_calls.prepare_logprobs(self._model, accept(self.logprobs, samples)))

    @takes(TeacherArgs)
    async def top(self, k: int, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns the `k` likeliest ids of each asked token with their log-probs, and what `logprobs` returns."""
        return await self._ask(teacher_calls.prepare_top(self._model, k, accept(self.top, samples)))

    @takes(TeacherArgs)
    async def given(self, ids: GivenIds, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns the log-probs of `ids`, as `TeacherClient.given` takes them, and what `logprobs` returns."""
        return await self._ask(teacher_calls.prepare_given(self._model, ids, accept(self.given, samples)))

    @takes(TeacherArgs)
    async def hidden(
        self, *, dtype: Literal["bfloat16"] | None = None, **samples: Unpack[TeacherArgs]
    ) -> TeacherAnswers:
        """Returns what the head turns into the logits of each asked token."""
        return await self._ask(teacher_calls.prepare_hidden(self._model, dtype, accept(self.hidden, samples)))

    async def head(self, known: Head | None = None) -> Head:
        """Fetches the head over HTTP; returns `known` if it is still the same. Raises Unsupported over gRPC."""
        return await self._session.run(teacher_calls.fetch_head(self._caller, self._model, known))
