"""The steps of calls performed, by threads or by asyncio; and what the clients of each kind share."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from guerdon.client.addresses import Address
from guerdon.client.calls import ModelSignature
from guerdon.client.credentials import Credentials
from guerdon.client.endpoints import Endpoint, Endpoints
from guerdon.client.http import AsyncHttpTransport, HttpTransport
from guerdon.client.retry import Caller, Describe, Infer, RetryPolicy, Step, Wait
from guerdon.client.spans import exchange
from guerdon.client.workers import Workers
from guerdon.errors import Cancelled, GuerdonError, install_command

T = TypeVar("T")
S = TypeVar("S", bound="Session")
A = TypeVar("A", bound="AsyncSession")
Call = Generator[Step, Any, T]
Arguments = tuple[Any, Any, RetryPolicy, int, Credentials | None]
"""What a client was made with: URL, model, policy, max_in_flight, credentials. Those of None are found anew where a
copy of it arrives, so that a key from the environment is in no pickle."""


class Session:
    """The connections, threads and books of one client in one process."""

    def __init__(self, addresses: list[Address], policy: RetryPolicy, max_in_flight: int) -> None:
        """Raises ConfigError where the files of the addresses' credentials cannot be read.

        GuerdonError for a gRPC address in a fork that came while gRPC was at work.
        """
        self.pid = os.getpid()
        self.caller = Caller(Endpoints([address.url for address in addresses]), policy, time.monotonic, random.Random())
        self.workers = Workers(max_in_flight)
        self._slots = threading.BoundedSemaphore(max_in_flight)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._describing: dict[tuple[Endpoint, str], Future[Any]] = {}
        self._transports: dict[str, Any] = {}
        for address in addresses:
            kind = _grpc().GrpcTransport if address.is_grpc else HttpTransport
            self._transports[address.url] = kind(address, policy)

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
        """Ends all calls with Cancelled; does nothing in a process that has only inherited the session."""
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
            if isinstance(step, Describe):
                return self._describe(step, transport)
            if not isinstance(step, Infer):
                return transport.perform(step)
            with exchange(step.model, step.endpoint.url) as trace:
                return transport.perform(dataclasses.replace(step, trace=trace) if trace else step)
        except Exception as e:
            if self._closed.is_set():  # which broke it
                raise Cancelled("the client was closed before the answer") from e
            raise

    def _describe(self, step: Describe, transport: Any) -> ModelSignature:
        """The model's signature, fetched once for all threads that ask while it is under way."""
        endpoint, key = step.endpoint, (step.endpoint, step.model)
        with self._lock:
            if step.model in endpoint.signatures:
                return endpoint.signatures[step.model]
            future = self._describing.get(key)
            is_mine = future is None
            if future is None:
                future = self._describing[key] = Future()
        if is_mine:
            try:
                signature = endpoint.signatures[step.model] = transport.perform(step)
                future.set_result(signature)
            except BaseException as e:
                future.set_exception(e)
            finally:
                with self._lock:
                    del self._describing[key]
        return future.result()


class AsyncSession:
    """The connections and books of one client in one event loop."""

    def __init__(self, addresses: list[Address], policy: RetryPolicy, max_in_flight: int) -> None:
        """Raises what `Session` does."""
        self.caller = Caller(Endpoints([address.url for address in addresses]), policy, time.monotonic, random.Random())
        self._slots = asyncio.Semaphore(max_in_flight)
        self._describing: dict[tuple[Endpoint, str], asyncio.Task[Any]] = {}
        self._is_closed = False
        self._transports: dict[str, Any] = {}
        for address in addresses:
            kind = _grpc().AsyncGrpcTransport if address.is_grpc else AsyncHttpTransport
            self._transports[address.url] = kind(address, policy)

    async def run(self, call: Call[T]) -> T:
        """The call's result."""
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

    async def close(self) -> None:
        """Closes the connections; further steps raise Cancelled."""
        self._is_closed = True
        for transport in self._transports.values():
            await transport.close()

    async def _perform(self, step: Step) -> Any:
        if self._is_closed:
            raise Cancelled("the client is closed")
        if isinstance(step, Wait):
            return await asyncio.sleep(step.seconds)
        transport = self._transports[step.endpoint.url]
        if isinstance(step, Infer):
            with exchange(step.model, step.endpoint.url) as trace:
                return await transport.perform(dataclasses.replace(step, trace=trace) if trace else step)
        if not isinstance(step, Describe):
            return await transport.perform(step)
        key = (step.endpoint, step.model)
        task = self._describing.get(key)
        if task is None:
            task = self._describing[key] = asyncio.create_task(self._describe(step, transport))
        return await asyncio.shield(task)  # others may await it when this call is cancelled

    async def _describe(self, step: Describe, transport: Any) -> ModelSignature:
        try:
            signature = step.endpoint.signatures[step.model] = await transport.perform(step)
            return signature
        finally:
            del self._describing[step.endpoint, step.model]


class ThreadedClient(Generic[S]):
    """A client for threads: safe to use from many, and after a fork; closes by itself when nobody holds it.

    Over gRPC, fork while no call is under way and no async client is open; else the child's calls raise GuerdonError.
    """

    def __init__(self, new_session: Callable[[], S], arguments: Arguments) -> None:
        self._new_session = new_session
        self._arguments = arguments
        self._open()

    def close(self) -> None:
        """Ends at once: futures that have no result yet end with Cancelled."""
        self._finalizer()

    def __repr__(self) -> str:
        return _repr_of(self, self._session, self._arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), *self._arguments)

    def _open(self) -> None:
        self._session = self._new_session()
        self._finalizer = weakref.finalize(self, self._session.close)

    def _session_here(self) -> S:
        if self._session.pid != os.getpid():
            # Threads and connections do not survive a fork, and its locks may be held by nobody.
            self._open()
        return self._session


class AsyncClient(Generic[A]):
    """A client for one event loop; close it with `aclose` or `async with`."""

    def __init__(self, session: A, arguments: Arguments) -> None:
        self._session = session
        self._arguments = arguments

    async def aclose(self) -> None:
        """Closes the connections; further calls raise Cancelled."""
        await self._session.close()

    def __repr__(self) -> str:
        return _repr_of(self, self._session, self._arguments)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), *self._arguments)


def _grpc() -> Any:
    try:
        from guerdon.client import grpc
    except ImportError as e:
        raise ImportError(f"grpc:// and grpcs:// URLs need gRPC, which is an extra: {install_command('grpc')}") from e
    return grpc


def _repr_of(client: object, session: Session | AsyncSession, arguments: Arguments) -> str:
    """Returns a client's repr: class, addresses without their keys, and the model's or the critic's name."""
    urls = [endpoint.url for endpoint in session.caller.endpoints.all]
    return f"{type(client).__name__}({(urls[0] if len(urls) == 1 else urls)!r}, {arguments[1]!r})"


def _rebuild(
    cls: Callable[..., T],
    url: Any,
    model: Any,
    policy: RetryPolicy,
    max_in_flight: int,
    credentials: Credentials | None,
) -> T:
    return cls(url, model, policy=policy, max_in_flight=max_in_flight, credentials=credentials)
