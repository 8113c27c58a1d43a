"""Who may pass to any route of HTTP: one check before all of them, so that a new route cannot be forgotten."""

from __future__ import annotations

import ipaddress
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from guerdon.errors import Forbidden, Unauthenticated
from guerdon.server.auth import PYTRITONS_HEADER, Access, Caller
from guerdon.server.metrics import UNKNOWN, Metrics
from guerdon.settings.access import is_loopback
from guerdon.settings.config import ServerConfig

CALLER = "guerdon.caller"
"""Where the scope has who asks."""

CONNECTION = "guerdon.connection"
"""Where the scope has the connection, if it is one of ours, which is told whose it is."""

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
        self._names = _own_names(config, bool(access.names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = self._caller(scope)
        except Unauthenticated as e:
            self._metrics.asked(UNKNOWN, type(e))
            raise
        if caller is None:
            await self._inner(scope, receive, send)
            return
        with self._metrics.client(caller.name):
            if (connection := scope.get(CONNECTION)) is not None:
                connection.admit(caller.name)
            scope[CALLER] = caller
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
        _check_page(headers)
        if self._names is not None:
            _check_host(headers.get(b"host", b"").decode("latin-1"), self._names)
        if scope["path"] in OPEN:
            return None
        return self._access.caller(headers.get(b"authorization"), headers.get(_PYTRITONS))


def _check_page(headers: dict[bytes, bytes]) -> None:
    """Raises Forbidden if a page from elsewhere makes its reader's browser send this.

    Browsers name the page's origin in whatever may change something, and how it stands to this server's in
    `Sec-Fetch-Site`. Following a link to this server's page is a navigation, which no script reads.
    """
    origin, host = headers.get(b"origin"), headers.get(b"host", b"")
    is_foreign = origin is not None and origin.lower().partition(b"://")[2] != host.lower()
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        is_foreign = is_foreign or headers.get(b"sec-fetch-mode") != b"navigate"
    if is_foreign:
        raise Forbidden("the request comes from a page of another origin; open the page from this server's own address")


def _own_names(config: ServerConfig, has_keys: bool) -> frozenset[str] | None:
    """Returns the names by which clients without a key may reach the server; None if any will do."""
    if has_keys or not (config.allowed_hosts or is_loopback(config.host)):
        return None
    machine = socket.gethostname()
    names = ("localhost", config.host, machine, machine.partition(".")[0], *config.allowed_hosts)
    return frozenset(_name(name) for name in names)


def _check_host(host: str, names: frozenset[str]) -> None:
    """Raises Forbidden for a name that may be a foreign page's own, which leads here (DNS rebinding).

    An address is no name that anybody could have lead elsewhere. Only HTTP/1.0 has no Host, and no browser speaks it.
    """
    name = _name(host)
    if not name or name in names or name.endswith(".localhost"):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise Forbidden(
            f"{name[:256]!r} is not known as a name of this server, which asks for no key (DNS rebinding): ask "
            "localhost or its address, or start it with `--allowed-hosts NAME`"
        ) from None


def _name(host: str) -> str:
    """Returns the name or address in a Host header."""
    text = host.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, colon, _ = text.rpartition(":")
    return (name if colon and ":" not in name else text).removesuffix(".")
