"""Who may pass to any route of HTTP: one check before all of them, so that a new route cannot be forgotten."""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.types import Scope

from guerdon.errors import Forbidden, Unauthenticated
from guerdon.server.auth import ANYBODY, PYTRITONS_HEADER, Caller
from guerdon.server.front.admission import Admission
from guerdon.server.front.http_request import HttpRequest
from guerdon.settings.access import is_loopback
from guerdon.settings.config import ServerConfig

OPEN = frozenset({"/health", "/health/", "/v2/health/live", "/v2/health/ready"})
"""The paths that need no key: probes ask them, and they reveal nothing of the models."""

_PYTRITONS = PYTRITONS_HEADER.encode()

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:@/\\?#\s]+))(?::\d{0,5})?")


_MOST_HOSTS, _MOST_HOST_BYTES = 64, 256
"""Of the Host headers that have passed, so many short ones are remembered, and not parsed again."""


class Guard:
    """Lets requests pass that have a key, if there are keys, and that no foreign page has sent.

    It reads only the request's head, independent of routes.
    """

    def __init__(self, admission: Admission, config: ServerConfig) -> None:
        self._admission = admission
        self._access = admission.service.access
        self._own_names = _own_names(config, bool(self._access.names))
        self._own_hosts: set[bytes | None] = set()  # some that have passed

    def admit(self, request: HttpRequest) -> Caller | None:
        """Returns who asks, None if the path is open to all; raises Unauthenticated and Forbidden."""
        headers = request.headers
        self._check_origin(headers)
        if request.path in OPEN:
            request.caller = ANYBODY
            return None
        caller = self._admission.identify(headers.get(b"authorization"), headers.get(_PYTRITONS))
        request.caller = caller
        return caller

    def lets(self, scope: Scope) -> bool:
        """Whether it would let the request pass."""
        headers = dict(scope["headers"])
        try:
            self._check_origin(headers)
            if scope["path"] not in OPEN:
                self._access.caller(headers.get(b"authorization"), headers.get(_PYTRITONS))
        except (Unauthenticated, Forbidden):
            return False
        return True

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Raises Forbidden if a page of another origin makes its reader's browser send this.

        Browsers name the page's origin in whatever may change something, and how it stands to this server's in
        `Sec-Fetch-Site`. Following a link to this server's page is a navigation, which no script reads.
        """
        origin, host = headers.get(b"origin"), headers.get(b"host")
        is_foreign = origin is not None and (origin.lower().partition(b"://")[2] or None) != (host or b"").lower()
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            is_foreign = is_foreign or headers.get(b"sec-fetch-mode") != b"navigate"
        if is_foreign:
            raise Forbidden(
                "the request comes from a page of another origin; open the page from this server's own address"
            )
        if self._own_names is not None and host not in self._own_hosts:
            _check_host(host, self._own_names)
            if host is not None and len(host) <= _MOST_HOST_BYTES and len(self._own_hosts) < _MOST_HOSTS:
                self._own_hosts.add(host)


def _own_names(config: ServerConfig, has_keys: bool) -> frozenset[str] | None:
    """Returns the names by which clients without a key may reach the server; None if any will do."""
    if has_keys or not (config.allowed_hosts or is_loopback(config.host)):
        return None
    machine = socket.gethostname()
    names = ("localhost", machine, machine.partition(".")[0], *config.allowed_hosts)
    return frozenset({config.host.lower(), *(_name(name)[0] for name in names)})


def _check_host(host: bytes | None, names: frozenset[str]) -> None:
    """DNS rebinding: raises Forbidden for a name that a foreign page may have pointed here.

    Nobody can point an address elsewhere. Only HTTP/1.0 has no Host, and no browser speaks it.
    """
    if host is None:
        return
    name, is_address = _name(host.decode("latin-1"))
    if is_address or (name and (name in names or name.endswith(".localhost"))):
        return
    raise Forbidden(
        f"{host[:256].decode('latin-1')!r} is no known name of this server without keys (DNS rebinding): "
        "use localhost or its address, or start it with `--allowed-hosts NAME`"
    )


def _name(host: str) -> tuple[str, bool]:
    """Returns the name or address in a Host header, and whether it is an address; "" if the header is malformed."""
    found = _HOST.fullmatch(host.strip().lower())
    if found is None:
        return "", False
    name = found["address"] or found["name"].removesuffix(".")
    try:
        (ipaddress.IPv6Address if found["address"] else ipaddress.IPv4Address)(name)
    except ValueError:
        return ("" if found["address"] else name), False
    return name, True
