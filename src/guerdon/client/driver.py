"""Performs the steps of calls by asyncio, for every client: the one place where the client does I/O."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import heapq
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from guerdon.client.addresses import Address
from guerdon.client.calls import ModelSignature
from guerdon.client.endpoints import Endpoint, Endpoints
from guerdon.client.http_transport import HttpTransport
from guerdon.client.retry import Describe, Headers, Infer, Probe, Ready, RetryingCaller, RetryPolicy, Step, Steps, Wait
from guerdon.errors import Cancelled, GuerdonError, StartError, UnknownModel, install_command

T = TypeVar("T")


class Session:
    """The connections, queue and servers of one client, within one event loop; only `run_here` is for other threads.

    At most `max_in_flight` calls are in progress; the others wait, by priority.
    """

    def __init__(self, addresses: list[Address], policy: RetryPolicy, max_in_flight: int, asks: str = "") -> None:
        """`asks` is appended to an UnknownModel: the models that this client uses.

        Raises ConfigError if the files of an address's credentials cannot be read, GuerdonError for a gRPC address in a
        process that was forked while gRPC was at work.
        """
        self.caller = RetryingCaller(
            Endpoints([address.url for address in addresses]), policy, time.monotonic, random.Random()
        )
        self._transports = {address.url: _open_transport(address, policy) for address in addresses}
        self._has_grpc = any(address.is_grpc for address in addresses)
        self._lock = threading.Lock()  # of the steps, the slots and the queue; never held while anything waits
        self._num_free = max_in_flight
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._descriptions: dict[tuple[Endpoint, str], asyncio.Task[ModelSignature]] = {}
        self._probes: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._asks = asks

    async def run(
        self, steps: Steps[T], priority: int = 0, is_wanted: Callable[[], bool] | None = None, step: Step | None = None
    ) -> T:
        """Returns the result of a call's steps; `step` is the next one if some have been executed.

        Is cancelled if `is_wanted`, called before the first step, returns False.
        """
        try:
            await self._wait_for_slot(priority)
            try:
                if is_wanted is not None and not is_wanted():
                    raise asyncio.CancelledError
                if step is None:
                    step = self._advance(steps)
                while True:
                    try:
                        result = await self._perform(step)
                    except GuerdonError as e:
                        step = self._advance(steps, error=e)
                    else:
                        step = self._advance(steps, result)
            finally:
                self._admit_next()
        except StopIteration as done:
            return done.value
        except UnknownModel as e:
            raise self._explained(e) from None
        finally:
            self._close_steps(steps)

    def run_here(self, steps: Steps[T]) -> tuple[bool, Any]:
        """Performs a call's first exchange in this thread, if that is over gRPC and need not wait for other calls.

        Returns True and the call's result, or False and the next step for `run`, None if none was taken. By `run`, a
        blocking call over gRPC passes two other threads: the loop's and grpcio's.
        """
        with self._lock:
            if not self._has_grpc or not self._num_free or self._queue or _has_span():
                return False, None
            self._num_free -= 1
        try:
            step = self._advance(steps)
            perform = isinstance(step, Infer) and getattr(self._transports[step.endpoint.url], "perform_here", None)
            if not perform:
                return False, step
            try:
                result = perform(step)
            except Exception as e:
                if self._is_closed:  # grpcio has a ValueError for this, among others
                    raise Cancelled("the client was closed before the answer") from e
                if not isinstance(e, GuerdonError):
                    raise
                return False, self._advance(steps, error=e)
            return False, self._advance(steps, result)
        except StopIteration as done:
            return True, done.value
        except UnknownModel as e:
            raise self._explained(e) from None
        except BaseException:
            self._close_steps(steps)
            raise
        finally:
            self._release_slot_here()

    async def close(self) -> None:
        """Closes the connections; further steps raise Cancelled."""
        self._is_closed = True
        tasks = [*self._descriptions.values(), *self._probes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in self._transports.values():
            await transport.close()

    async def _perform(self, step: Step) -> Any:
        if self._is_closed:
            raise Cancelled("the client is closed")
        if isinstance(step, Wait):
            return await asyncio.sleep(step.seconds)
        transport = self._transports[step.endpoint.url]
        if isinstance(step, Probe):
            task = asyncio.create_task(self._probe(step, transport))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)
            return None
        if isinstance(step, Describe):
            return await self._describe(step, transport)
        if isinstance(step, Infer) and _has_span():
            with _client_span(step.model, step.endpoint.url) as trace:
                return await transport.perform(dataclasses.replace(step, trace=trace))
        return await transport.perform(step)

    async def _probe(self, step: Probe, transport: Any) -> None:
        error: GuerdonError | None = None
        try:
            await transport.perform(Ready(step.endpoint, step.model, step.timeout_s))
        except GuerdonError as e:
            error = e
        with self._lock:
            self.caller.end_probe(step.endpoint, error)

    async def _describe(self, step: Describe, transport: Any) -> ModelSignature:
        """Fetches the model's signature once for all calls that need it at the same time."""
        key = (step.endpoint, step.model)
        task = self._descriptions.get(key)
        if task is None:
            task = self._descriptions[key] = asyncio.create_task(transport.perform(step))
            task.add_done_callback(functools.partial(self._end_description, key))
        try:
            return await asyncio.shield(task)  # other calls may await it after this one is cancelled
        except GuerdonError as e:
            # The calls share `e`. Its traceback must not get the frames of each: clearing those of a call that has
            # ended would close the coroutines of another that still waits.
            raise copy.copy(e) from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():  # by `close`
                raise Cancelled("the client was closed before the answer") from None
            raise

    def _end_description(self, key: tuple[Endpoint, str], task: asyncio.Task[ModelSignature]) -> None:
        del self._descriptions[key]
        if not task.cancelled():
            task.exception()  # all that awaited it may be cancelled

    def _explained(self, error: UnknownModel) -> UnknownModel:
        return UnknownModel(f"{error}; {self._asks}") if self._asks else error

    def _advance(self, steps: Steps[Any], result: Any = None, error: GuerdonError | None = None) -> Step:
        with self._lock:
            return steps.send(result) if error is None else steps.throw(error)

    def _close_steps(self, steps: Steps[Any]) -> None:
        with self._lock:
            steps.close()

    async def _wait_for_slot(self, priority: int) -> None:
        with self._lock:
            if self._num_free and not self._queue:
                self._num_free -= 1
                return
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._queue, (-priority, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came at the same time
                self._admit_next()
            raise

    def _admit_next(self) -> None:
        with self._lock:
            while self._queue:
                _, _, turn = heapq.heappop(self._queue)
                if not turn.done():
                    turn.set_result(None)
                    return
            self._num_free += 1

    def _release_slot_here(self) -> None:
        with self._lock:
            if not self._queue:
                self._num_free += 1
                return
            loop = self._queue[0][2].get_loop()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._admit_next)


def _open_transport(address: Address, policy: RetryPolicy) -> Any:
    if not address.is_grpc:
        return HttpTransport(address, policy)
    try:
        from guerdon.client.grpc_transport import GrpcTransport
    except ImportError as e:
        raise StartError(
            f"grpc:// and grpcs:// URLs need gRPC, which is an extra: {install_command('grpc')}",
            "install it, or give the server's http:// URL",
        ) from e
    return GrpcTransport(address, policy)


def _has_span() -> bool:
    """Returns whether a span is active, which needs a program that has imported OpenTelemetry."""
    current = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    return current is not None and current().get_span_context().is_valid


@contextlib.contextmanager
def _client_span(model: str, url: str) -> Iterator[Headers]:
    """Opens a span below the caller's, and yields the headers by which the server continues the trace."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    server = urlsplit(url)
    attributes: dict[str, str | int] = {
        "guerdon.model": model, "server.address": server.hostname or "", "url.scheme": server.scheme
    }  # fmt: skip
    if server.port is not None:
        attributes["server.port"] = server.port
    span = trace.get_tracer("guerdon").start_span(f"infer {model}", kind=trace.SpanKind.CLIENT, attributes=attributes)
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, trace.set_span_in_context(span))
    try:
        yield tuple(headers.items())
    except BaseException as e:  # only its class: the text may quote a sample
        span.set_attribute("error.type", type(e).__name__)
        span.set_status(trace.Status(trace.StatusCode.ERROR))
        raise
    finally:
        span.end()
