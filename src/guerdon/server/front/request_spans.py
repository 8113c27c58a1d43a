"""One span per request that does something: over HTTP all but GET, over gRPC all but questions.

A request without a valid key has no span: whoever reaches the port could crowd out all others'. The span begins before
the key is checked all the same, so that it has the status in which a request with a valid key is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from guerdon.errors import Cancelled
from guerdon.server import tracing
from guerdon.server.front.http_request import HttpRequest
from guerdon.server.tracing import Traces

Answer = Callable[[Any, Any], Awaitable[Any]]

_READING = ("GET", "HEAD")
_WRITING = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_DOING = ("ModelInfer", "RepositoryModelLoad", "RepositoryModelUnload")
_PARENT = (b"traceparent", b"tracestate")


FAULTS = (2, 4, 12, 13, 14, 15)
"""gRPC's codes for faults of the server: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE
and DATA_LOSS."""


class Spans:
    """Puts each request to `inner` that is no GET, and that `lets` lets, in a span, named by its route."""

    def __init__(
        self,
        inner: ASGIApp,
        traces: Traces,
        lets: Callable[[Scope], bool],
        find_path: Callable[[HttpRequest], str | None],
    ) -> None:
        self._inner = inner
        self._traces = traces
        self._lets = lets
        self._find_path = find_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if method in _READING or not self._lets(scope):
            await self._inner(scope, receive, send)
            return
        facts = {"http.request.method": method if method in _WRITING else "_OTHER"}
        if (path := self._find_path(HttpRequest(scope, receive))) is not None:
            facts["http.route"] = path
        sent = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _PARENT}
        with self._traces.request(" ".join(facts.values()), sent, facts) as traced:
            if traced is None:
                await self._inner(scope, receive, send)
                return
            is_answered = False

            async def note_status(message: Message) -> None:
                nonlocal is_answered
                if message["type"] == "http.response.start":
                    is_answered, status = True, message["status"]
                    traced.answered("http.response.status_code", status, is_fault=status >= 500)
                await send(message)

            await self._inner(scope, receive, note_status)
            if not is_answered:
                traced.failed(Cancelled("the client left"))


def with_span(
    answer: Answer, traces: Traces, service: str, method: str, knows: Callable[[Mapping[str, Any]], bool]
) -> Answer:
    """Wraps a method's `answer` so that each call of a known sender has a span; returns it as is for questions."""
    if method not in _DOING:
        return answer
    facts = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}

    async def call(messages: Any, context: Any) -> Any:
        sent = dict(context.invocation_metadata())
        if not knows(sent):
            return await answer(messages, context)
        with traces.request(f"{service}/{method}", sent, facts) as traced:
            reply = None
            try:
                reply = await answer(messages, context)
            finally:
                if traced is not None and (code := _code(context, has_reply=reply is not None)) is not None:
                    traced.answered("rpc.grpc.status_code", code, is_fault=code in FAULTS)
            return reply

    return call


@contextlib.contextmanager
def message_span(
    traces: Traces | None, service: str, sent: Mapping[str, Any], number_of: Callable[[Exception], int]
) -> Iterator[None]:
    """A context with the span of one of a stream's requests; `number_of` an error is the number of its status."""
    if traces is None:
        yield
        return
    facts = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": "ModelStreamInfer"}
    with traces.request(f"{service}/ModelStreamInfer", sent, facts) as traced:
        code = 0
        try:
            yield
        except Exception as e:
            code = number_of(e)
            tracing.failed(e)
            raise
        finally:
            if traced is not None:
                traced.answered("rpc.grpc.status_code", code, is_fault=code in FAULTS)


def _code(context: Any, *, has_reply: bool) -> int | None:
    """Returns the number of the call's status, None if its client left before."""
    if has_reply:
        return 0
    status = context.code()
    return None if status is None else int(getattr(status, "value", (status,))[0])
