"""The span of each request that has something done: of HTTP's what is no GET, of gRPC's what is no question.

What has no key, where there are keys, has no span: whoever reaches the port could crowd out all others'. A span begins
before the key is asked for all the same, as it has the status in which a request of a known key is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from guerdon.errors import Cancelled
from guerdon.server.tracing import Traces

Answer = Callable[[Any, Any], Awaitable[Any]]

_READING = ("GET", "HEAD")
_WRITING = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_DOING = ("ModelInfer", "RepositoryModelLoad", "RepositoryModelUnload")
_PARENT = (b"traceparent", b"tracestate")

FAULTS = (2, 4, 12, 13, 14, 15)
"""gRPC's codes that say that the server is at fault: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE
and DATA_LOSS."""


class Spans:
    """Puts each request to `inner` that is no GET, and that `lets` lets, in a span; the path is the route's in it."""

    def __init__(self, inner: ASGIApp, traces: Traces, routes: Sequence[Route], lets: Callable[[Scope], bool]) -> None:
        self._inner = inner
        self._lets = lets
        self._traces = traces
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if method in _READING or not self._lets(scope):
            await self._inner(scope, receive, send)
            return
        facts = {"http.request.method": method if method in _WRITING else "_OTHER"}
        if (route := self._route(scope)) is not None:
            facts["http.route"] = route
        sent = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _PARENT}
        with self._traces.request(" ".join(facts.values()), sent, facts) as traced:
            if traced is None:
                await self._inner(scope, receive, send)
                return
            is_answered = False

            async def told(message: Message) -> None:
                nonlocal is_answered
                if message["type"] == "http.response.start":
                    is_answered, status = True, message["status"]
                    traced.answered("http.response.status_code", status, is_fault=status >= 500)
                await send(message)

            await self._inner(scope, receive, told)
            if not is_answered:
                traced.failed(Cancelled("the client left"))

    def _route(self, scope: Scope) -> str | None:
        return next((route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE), None)


def with_span(
    answer: Answer, traces: Traces, service: str, method: str, knows: Callable[[Mapping[str, Any]], bool]
) -> Answer:
    """What answers the method's calls, each of a sender that `knows` knows in a span; itself where the method asks."""
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


def _code(context: Any, *, has_reply: bool) -> int | None:
    """The number of the status in which a call has ended; None where its client left before."""
    if has_reply:
        return 0
    status = context.code()
    return None if status is None else int(getattr(status, "value", (status,))[0])
