"""Who may pass to any route of HTTP: one check before all of them, so that a new route cannot be forgotten."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from guerdon.access import is_loopback
from guerdon.config import ServerConfig
from guerdon.errors import Forbidden, Unauthenticated
from guerdon.metrics import UNKNOWN, Metrics
from guerdon.server.auth import PYTRITONS_HEADER, Access, Caller

CALLER = "guerdon.caller"
"""Where the scope has who asks."""

OPEN = frozenset({"/health", "/v2/health/live", "/v2/health/ready"})
"""The paths that need no key: what probes ask, which tells nothing of the models."""

_PYTRITONS = PYTRITONS_HEADER.encode()


def caller_of(scope: Scope) -> Caller:
    """Whoever asks, as the guard has found; there is always one where a route is open to keys only."""
    caller = scope[CALLER]
    assert isinstance(caller, Caller)
    return caller


class Guard:
    """Lets requests through to `inner` that have a key, where there are keys, and that no foreign page has sent.

    It reads the request's head alone, and does not know which routes there are. Raises Unauthenticated and Forbidden.
    """

    def __init__(self, inner: ASGIApp, access: Access, config: ServerConfig, metrics: Metrics) -> None:
        self._inner = inner
        self._access = access
        self._metrics = metrics
        self._is_local = not access.names and is_loopback(config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = self._caller(scope)
        except Unauthenticated as e:
            self._metrics.asked(UNKNOWN, type(e))
            raise
        if caller is None:
            await self._inner(scope, receive, send)
            return
        scope[CALLER] = caller
        with self._metrics.client(caller.name):
            await self._inner(scope, receive, send)

    def lets(self, scope: Scope) -> bool:
        """Whether it would let the request through."""
        try:
            self._caller(scope)
        except (Unauthenticated, Forbidden):
            return False
        return True

    def _caller(self, scope: Scope) -> Caller | None:
        """Who asks; None where the path is open to all."""
        headers = dict(scope["headers"])
        _check_page(headers, self._is_local)
        if scope["path"] in OPEN:
            return None
        return self._access.caller(headers.get(b"authorization"), headers.get(_PYTRITONS))


def _check_page(headers: dict[bytes, bytes], is_local: bool) -> None:
    """Raises Forbidden for what a page from elsewhere has its reader's browser send.

    A browser names the page's origin in all that may change something. Where nobody needs a key as only this machine
    reaches the server, a page may have its own name lead to this machine: then its name is no loopback's.
    """
    origin, host = headers.get(b"origin"), headers.get(b"host", b"")
    if origin is not None and origin.lower().partition(b"://")[2] != host.lower():
        raise Forbidden("the request comes from a page of another origin; open the page from this server's own address")
    is_browsers = origin is not None or headers.get(b"user-agent", b"").startswith(b"Mozilla/")
    if is_local and is_browsers and not is_loopback(_name(host)):
        raise Forbidden("a browser reaches this server without a key only by localhost or 127.0.0.1")


def _name(host: bytes) -> str:
    """The name or address in a Host header."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]
