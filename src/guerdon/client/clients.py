"""The clients: thin drivers that perform the steps of a call, one with threads, one with asyncio."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit

import numpy as np

from guerdon.client.calls import ModelSignature, make_request
from guerdon.client.endpoints import Endpoint, Endpoints
from guerdon.client.http import AsyncHttpTransport, HttpTransport
from guerdon.client.results import Scores
from guerdon.client.retry import Caller, Describe, RetryPolicy, Step, Wait
from guerdon.client.workers import Workers
from guerdon.core import Message
from guerdon.errors import Cancelled, GuerdonError, InvalidRequest

T = TypeVar("T")
Call = Generator[Step, Any, T]

_DEFAULT_POLICY = RetryPolicy()


class ScoreArgs(TypedDict, total=False):
    """The arguments of `score` and `submit`: exactly one of `texts`, `messages` and `tokens`; one entry a sample.

    `tokens` are token ids, each sequence of its own length. Hints and positions as in `ScoreRequest`: `groups`,
    `prompt_lengths`, `steps`. `timeout_s` bounds this call from the moment that it is first sent, and the server
    is told; samples of higher `priority` (up to 99) go first.
    """

    texts: Sequence[str]
    messages: Sequence[Sequence[Message]]
    tokens: Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray
    groups: Sequence[int] | np.ndarray | None
    prompt_lengths: Sequence[int] | np.ndarray | None
    steps: Sequence[Sequence[int]] | Sequence[np.ndarray] | None
    priority: int
    timeout_s: float | None


class RewardClient:
    """Scores samples at one server or several; safe to use from many threads, and after a fork.

    `url` is http://, https:// or grpc:// (a bare host:port means http), or several of them, which then share the
    load. At most `max_in_flight` requests are on their way at once; more wait here. Closes by itself.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "reward_model",
        *,
        policy: RetryPolicy = _DEFAULT_POLICY,
        max_in_flight: int = 128,
    ) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        self._new_session = functools.partial(_Session, parse_urls(url), model, policy, max_in_flight)
        self._arguments = (url, model, policy, max_in_flight)
        self._open()

    def score(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """The samples' scores; blocks. Arguments: `ScoreArgs`. Raises the class that the server raised."""
        session = self._session_here()
        return session.run(session.caller.score(make_request(**samples)))

    def submit(self, **samples: Unpack[ScoreArgs]) -> Future[Scores]:
        """A future of `score`'s result, at once; thousands may be under way."""
        request = make_request(**samples)
        session = self._session_here()

        def score(_client: RewardClient = self) -> Scores:  # which must not be collected, and so close, before
            return session.run(session.caller.score(request))

        return session.workers.submit(score, request.priority)

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Blocks until a server has the model ready; raises DeadlineExceeded saying what each server said."""
        session = self._session_here()
        session.run(session.caller.wait_ready(timeout_s))

    def info(self) -> ModelSignature:
        """What the model takes and gives."""
        session = self._session_here()
        return session.run(session.caller.describe())

    def close(self) -> None:
        """Ends at once: futures that have no result yet end with Cancelled."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), *self._arguments)

    def _open(self) -> None:
        self._session = self._new_session()
        self._finalizer = weakref.finalize(self, self._session.close)

    def _session_here(self) -> _Session:
        if self._session.pid != os.getpid():
            # Threads and connections do not survive a fork, and its locks may be held by nobody.
            self._open()
        return self._session


class AsyncRewardClient:
    """`RewardClient` for one event loop: the same arguments, with `await`; close it with `aclose` or `async with`."""

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "reward_model",
        *,
        policy: RetryPolicy = _DEFAULT_POLICY,
        max_in_flight: int = 128,
    ) -> None:
        """Raises InvalidRequest for a malformed URL; connects at the first call."""
        self._arguments = (url, model, policy, max_in_flight)
        self._model, self._policy = model, policy
        self._caller = Caller(Endpoints(parse_urls(url)), policy, time.monotonic, random.Random())
        self._slots = asyncio.Semaphore(max_in_flight)
        self._transports: dict[str, Any] = {}
        self._describing: dict[Endpoint, asyncio.Task[Any]] = {}
        self._is_closed = False

    async def score(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """The samples' scores. Cancelling the task abandons the request, at the server too."""
        return await self._run(self._caller.score(make_request(**samples)))

    def submit(self, **samples: Unpack[ScoreArgs]) -> asyncio.Task[Scores]:
        """A task of `score`, started at once."""
        return asyncio.create_task(self._run(self._caller.score(make_request(**samples))))

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Returns when a server has the model ready; raises DeadlineExceeded saying what each server said."""
        await self._run(self._caller.wait_ready(timeout_s))

    async def info(self) -> ModelSignature:
        """What the model takes and gives."""
        return await self._run(self._caller.describe())

    async def aclose(self) -> None:
        """Closes the connections; further calls raise Cancelled."""
        self._is_closed = True
        for transport in self._transports.values():
            await transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), *self._arguments)

    async def _run(self, call: Call[T]) -> T:
        async with self._slots:
            try:
                step = next(call)
                while True:
                    try:
                        result = await self._perform(step)
                    except GuerdonError as e:
                        step = call.throw(e)
                    else:
                        step = call.send(result)
            except StopIteration as done:
                return done.value
            finally:
                call.close()

    async def _perform(self, step: Step) -> Any:
        if self._is_closed:
            raise Cancelled("the client is closed")
        if isinstance(step, Wait):
            return await asyncio.sleep(step.seconds)
        transport = self._transport(step.endpoint.url)
        if not isinstance(step, Describe):
            return await transport.perform(step)
        task = self._describing.get(step.endpoint)
        if task is None:
            task = self._describing[step.endpoint] = asyncio.create_task(self._describe(step, transport))
        return await asyncio.shield(task)  # others may await it when this call is cancelled

    async def _describe(self, step: Describe, transport: Any) -> ModelSignature:
        try:
            step.endpoint.signature = await transport.perform(step)
            return step.endpoint.signature
        finally:
            del self._describing[step.endpoint]

    def _transport(self, url: str) -> Any:
        if url not in self._transports:
            if url.startswith("grpc://"):
                transport = _grpc().AsyncGrpcTransport(url, self._model, self._policy)
            else:
                transport = AsyncHttpTransport(url, self._model, self._policy)
            self._transports[url] = transport
        return self._transports[url]


class _Session:
    """The connections, threads and books of one `RewardClient` in one process."""

    def __init__(self, urls: list[str], model: str, policy: RetryPolicy, max_in_flight: int) -> None:
        self.pid = os.getpid()
        self.caller = Caller(Endpoints(urls), policy, time.monotonic, random.Random())
        self.workers = Workers(max_in_flight)
        self._slots = threading.BoundedSemaphore(max_in_flight)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._describing: dict[Endpoint, Future[Any]] = {}
        self._transports: dict[str, Any] = {}
        for url in urls:
            if url.startswith("grpc://"):
                self._transports[url] = _grpc().GrpcTransport(url, model, policy)
            else:
                self._transports[url] = HttpTransport(url, model, policy)

    def run(self, call: Call[T]) -> T:
        """The call's result, in this thread."""
        with self._slots:
            try:
                step = next(call)
                while True:
                    try:
                        result = self._perform(step)
                    except GuerdonError as e:
                        step = call.throw(e)
                    else:
                        step = call.send(result)
            except StopIteration as done:
                return done.value
            finally:
                call.close()

    def close(self) -> None:
        if os.getpid() == self.pid:
            self._closed.set()
            self.workers.close()
            for transport in self._transports.values():
                transport.close()

    def _perform(self, step: Step) -> Any:
        if isinstance(step, Wait):
            self._closed.wait(step.seconds)
        if self._closed.is_set():
            raise Cancelled("the client is closed")
        if isinstance(step, Wait):
            return None
        transport = self._transports[step.endpoint.url]
        try:
            return self._describe(step, transport) if isinstance(step, Describe) else transport.perform(step)
        except Exception as e:
            if self._closed.is_set():  # which broke it
                raise Cancelled("the client was closed before the answer") from e
            raise

    def _describe(self, step: Describe, transport: Any) -> ModelSignature:
        """The model's signature, fetched once for all threads that ask while it is under way."""
        endpoint = step.endpoint
        with self._lock:
            if endpoint.signature is not None:
                return endpoint.signature
            future = self._describing.get(endpoint)
            is_mine = future is None
            if future is None:
                future = self._describing[endpoint] = Future()
        if is_mine:
            try:
                endpoint.signature = transport.perform(step)
                future.set_result(endpoint.signature)
            except BaseException as e:
                future.set_exception(e)
            finally:
                with self._lock:
                    del self._describing[endpoint]
        return future.result()


def parse_urls(url: str | Sequence[str]) -> list[str]:
    """The servers' URLs, with their scheme and without a trailing slash; raises InvalidRequest."""
    urls = [_parse_url(u) for u in ([url] if isinstance(url, str) else url)]
    if not urls:
        raise InvalidRequest("no server URL given")
    return list(dict.fromkeys(urls))


def _parse_url(url: str) -> str:
    full = (url if "://" in url else f"http://{url}").rstrip("/")
    help = "give http://host:port, https://host:port or grpc://host:port"  # noqa: A001 - the word that errors use
    try:
        parts = urlsplit(full)
        port = parts.port
    except ValueError as e:
        raise InvalidRequest(f"server URL {url!r}: {e}; {help}") from e
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise InvalidRequest(f"server URL {url!r} is not one: {help}")
    if parts.scheme == "grpc" and (port is None or parts.path):
        raise InvalidRequest(f"server URL {url!r} needs a port and no path: {help}")
    return full


def _grpc() -> Any:
    try:
        from guerdon.client import grpc
    except ImportError as e:
        raise ImportError("grpc:// URLs need gRPC, which is an extra: pip install 'guerdon[grpc]'") from e
    return grpc


def _rebuild(cls: Callable[..., T], url: Any, model: str, policy: RetryPolicy, max_in_flight: int) -> T:
    return cls(url, model, policy=policy, max_in_flight=max_in_flight)
