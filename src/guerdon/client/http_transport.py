"""Performs the steps of a call over HTTP: KServe v2 with binary tensors, by httpcore, on which httpx stands.

httpx's own client costs a third more of each exchange, and walks through all of its connections at each.
"""

from __future__ import annotations

import socket
import ssl
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import httpcore
import httpx
import orjson

from guerdon import errors
from guerdon.client.addresses import Address
from guerdon.client.calls import ModelSignature
from guerdon.client.retry import Configure, Describe, Exchange, FetchHead, Infer, InferResult, Ready, RetryPolicy
from guerdon.client.statuses import CERTIFICATE_HINT, stated, stated_error, tls_failure
from guerdon.wire import kserve

Json = TypeVar("Json", dict[str, Any], list[Any])

_HEADER_LENGTH = "inference-header-content-length"
_RAY_HEADER = "x-request-id"
_KEEP_ALIVE_S = 60.0
_CONNECT_S = 5.0
_DEAD_HOST_S = 180
"""The kernel ends a connection after this long without an answer from the other host."""
_SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in {
            "TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8,
            "TCP_USER_TIMEOUT": _DEAD_HOST_S * 1000,  # for sent data without acknowledgement, when no probes go out
        }.items()
        if hasattr(socket, name)
    ),
]  # fmt: skip
"""A train request may wait for hours: these have the kernel notice within minutes that the other host is gone."""
_LASTING_TLS_ERRORS = ("CERTIFICATE", "UNKNOWN_CA", "WRONG_VERSION_NUMBER")
"""Parts of the reasons of TLS errors that come again until somebody changes the settings."""
_PATHS = {Ready: "/ready", Describe: "", Configure: "/config", FetchHead: "/head", Infer: "/infer"}
_BREAKS = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError)


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A server's reply; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Returns the body's JSON, None if it is malformed."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """One step's request to a server, and the meaning of the reply; no I/O."""

    step: Exchange

    @property
    def url(self) -> str:
        return self.step.endpoint.url

    @property
    def path(self) -> str:
        """The path, below the server's URL."""
        return f"/v2/models/{quote(self.step.model, safe='')}{_PATHS[type(self.step)]}"

    def request(self) -> tuple[str, dict[str, str], bytes]:
        """Returns the method, the headers and the body."""
        if isinstance(self.step, FetchHead):
            return "GET", {"If-None-Match": f'"{self.step.digest}"'} if self.step.digest else {}, b""
        if not isinstance(self.step, Infer):
            return "GET", {}, b""
        body, header_length = kserve.encode_request(self.step.request)
        headers = {
            "Content-Type": "application/octet-stream", "Content-Length": str(len(body)),
            _HEADER_LENGTH: str(header_length),
        }  # fmt: skip
        return "POST", headers | dict(self.step.trace), body

    def result(self, reply: HttpReply) -> Any:
        """Returns the step's result; raises the status's error."""
        if reply.status == 304 and isinstance(self.step, FetchHead):
            return None
        if reply.status != 200:
            raise self._error(reply)
        match self.step:
            case Ready():
                return None
            case Describe():
                return ModelSignature.from_metadata(reply.json())
            case Configure():
                if not isinstance(config := reply.json(), dict):
                    raise errors.ServerFault(f"{self.url} sent a malformed configuration")
                return config
            case FetchHead():
                return reply.body
            case Infer():
                length = reply.headers.get(_HEADER_LENGTH)
                try:
                    decoded = kserve.decode_reply(reply.body, None if length is None else int(length))
                except (errors.InvalidRequest, ValueError) as e:
                    raise errors.ServerFault(f"{self.url} sent a malformed reply: {e}") from e
                return InferResult(
                    decoded,
                    queue_s=(stated(reply.headers, "guerdon-queue-ms") or 0.0) / 1e3,
                    compute_s=(stated(reply.headers, "guerdon-compute-ms") or 0.0) / 1e3,
                )

    def failure(self, error: BaseException) -> errors.GuerdonError:
        """Returns the error of a connection that failed or broke."""
        step, url = self.step, self.url
        check = "is the server running there? Check host and port (grpc://host:port for a gRPC port, https:// for TLS)"
        if (refusal := _tls_refusal(error)) is not None:
            return tls_failure(url, refusal)
        if isinstance(error, httpcore.ConnectTimeout | httpcore.ConnectError):
            return errors.Unreachable(f"cannot connect to {url}: {_reason(error)}; {check}", may_have_arrived=False)
        if isinstance(error, httpcore.TimeoutException):
            if isinstance(step, Infer):
                return errors.DeadlineExceeded(
                    f"no answer from {url} within {step.timeout_s:.3g} s; raise timeout_s to wait longer"
                )
            return errors.Unreachable(
                f"{url} takes connections but said nothing within {step.timeout_s:.3g} s; {check}"
            )
        if isinstance(error, httpcore.RemoteProtocolError) and not step.endpoint.seen and url.startswith("http://"):
            return errors.Unreachable(
                f"{url} does not speak HTTP: {error}; write grpc://host:port for a gRPC port, https:// for TLS"
            )
        hint = "" if step.endpoint.seen else f"; {check}"
        if hint and url.startswith("https://"):
            hint += CERTIFICATE_HINT
        return errors.Unreachable(f"the connection to {url} broke before the answer: {error}{hint}")

    def _error(self, reply: HttpReply) -> errors.GuerdonError:
        status, body = reply.status, reply.json()
        message = body.get("error") if isinstance(body, dict) else None
        if isinstance(self.step, Ready) and status not in (401, 403):
            reason = f": {message}" if isinstance(message, str) else ""
            return errors.Unavailable(f"model '{self.step.model}' at {self.url} is not ready (status {status}{reason})")
        if not isinstance(message, str):
            message = f"{self.url} answered {status} to {self.path}: {reply.text[:200]!r}"
            if status == 404:
                return errors.RouteNotFound(f"{message}; is this a server of the open inference protocol (KServe v2)?")
            # Guerdon sends its own errors as JSON: this is from Ray Serve's proxy, which has lost a replica, or from
            # its uvicorn after a crash over one.
            is_broken = reply.headers.get("server") == "uvicorn" and reply.body == b"Internal Server Error"
            if status == 500 and body is None and (is_broken or _RAY_HEADER in reply.headers):
                return errors.Unavailable(message)
        elif status == 404 or (status == 400 and isinstance(self.step, Describe)):
            return errors.UnknownModel(message)
        return stated_error(status, message, reply.headers, self.url)


class _KeepAliveBackend(httpcore.AnyIOBackend):
    """Opens TCP connections with our socket options, which httpcore's proxies do not take."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return await super().connect_tcp(host, port, timeout, local_address, _SOCKET_OPTIONS)


_BACKEND = _KeepAliveBackend()


class HttpTransport:
    """Performs steps over its connections to one server, within one event loop."""

    def __init__(self, address: Address, policy: RetryPolicy) -> None:
        """Raises ConfigError if a file of the credentials cannot be read."""
        self._connect_timeout_s = policy.connect_timeout_s
        url = httpx.URL(address.url)
        self._scheme, self._host, self._port = url.raw_scheme, url.raw_host, url.port
        self._base_path = url.raw_path.rstrip(b"/")
        self._headers = [(b"Host", url.netloc), *_encoded(address.headers)]
        self._tls = address.credentials.tls() if address.has_tls else None
        self._proxy = _proxy(url, self._tls)
        self._idle: list[httpcore.AsyncHTTPConnection] = []
        self._is_closed = False

    async def perform(self, step: Exchange) -> Any:
        """Returns the step's result; raises its GuerdonError."""
        exchange = HttpExchange(step)
        method, headers, body = exchange.request()
        url = httpcore.URL(
            scheme=self._scheme, host=self._host, port=self._port, target=self._base_path + exchange.path.encode()
        )
        limit_s = step.timeout_s
        timeouts = {
            "connect": min(self._connect_timeout_s, limit_s), "read": limit_s, "write": limit_s, "pool": limit_s
        }  # fmt: skip
        request = httpcore.Request(
            method, url, headers=[*self._headers, *_encoded(headers)], content=body, extensions={"timeout": timeouts}
        )
        connection = self._proxy or await self._connection(url.origin)
        try:
            response = await connection.handle_async_request(request)
            try:
                content = await response.aread()
            finally:
                await response.aclose()
        except _BREAKS as e:
            raise exchange.failure(e) from None  # its text has the reason; the frames of httpcore say no more
        finally:
            if connection is not self._proxy and self._is_closed:
                await connection.aclose()
            elif isinstance(connection, httpcore.AsyncHTTPConnection) and connection.is_available():
                self._idle.append(connection)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        if "content-encoding" in headers:  # unasked, by something in between
            content = httpx.Response(response.status, headers=headers, content=content).content
        return exchange.result(HttpReply(response.status, headers, content))

    async def close(self) -> None:
        """Closes the idle connections now, and each other one when its exchange ends."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().aclose()
        if self._proxy is not None:
            await self._proxy.aclose()

    async def _connection(self, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        """Returns an idle connection, or a new one that connects at its first request."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(
            origin, ssl_context=self._tls, keepalive_expiry=_KEEP_ALIVE_S, network_backend=_BACKEND
        )


def fetch(
    address: Address,
    path: str,
    *,
    method: str = "GET",
    timeout_s: float = 5.0,
    content: bytes = b"",
    media_type: str = "application/json",
) -> HttpReply:
    """Returns the reply, of status 200, to one blocking request, which carries the address's key.

    Raises Unreachable without a reply, the error class of a status with the server's text, if any, and ConfigError for
    an unreadable file of the credentials.
    """
    tls = address.credentials.tls() if address.has_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        response = httpx.request(
            method,
            address.url + path,
            content=content,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S)),
            headers=address.headers | ({"Content-Type": media_type} if content else {}),
            verify=tls,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        has_left = not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout)
        why = f"{address.url} gave no answer to {path}: {str(e) or 'timed out'}"
        raise errors.Unreachable(why, may_have_arrived=has_left) from e
    reply = HttpReply(response.status_code, response.headers, response.content)
    if reply.status != 200:
        body = reply.json()
        body = body if isinstance(body, dict) else {}
        message = body.get("error")
        if not isinstance(message, str):
            message = f"{address.url} answered {reply.status} to {path}"
        raise stated_error(reply.status, message, reply.headers)
    return reply


def fetch_json(address: Address, path: str, cls: type[Json], *, method: str = "GET", timeout_s: float = 5.0) -> Json:
    """Returns the JSON of `fetch`'s reply, a `dict` or a `list`.

    Raises what `fetch` raises, and ServerFault for anything else, such as a web page.
    """
    body = fetch(address, path, method=method, timeout_s=timeout_s).json()
    if not isinstance(body, cls):
        raise errors.ServerFault(f"{address.url} answered {path} unlike any server of the open inference protocol")
    return body


def _proxy(url: httpx.URL, tls: ssl.SSLContext | None) -> httpcore.AsyncConnectionPool | None:
    """Returns the connections through the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names, None without one."""
    proxies = urllib.request.getproxies()
    found = proxies.get(url.scheme) or proxies.get("all")
    # NO_PROXY has hosts, and perhaps their ports.
    if not found or any(urllib.request.proxy_bypass(name) for name in (url.host, url.netloc.decode("ascii"))):
        return None
    proxy = httpx.URL(found if "://" in found else f"http://{found}")
    kind = httpcore.AsyncSOCKSProxy if proxy.scheme.startswith("socks5") else httpcore.AsyncHTTPProxy
    return kind(
        httpcore.URL(scheme=proxy.raw_scheme, host=proxy.raw_host, port=proxy.port, target=proxy.raw_path),
        proxy_auth=(proxy.username, proxy.password) if proxy.userinfo else None,
        ssl_context=tls, max_connections=None, keepalive_expiry=_KEEP_ALIVE_S, network_backend=_BACKEND,
    )  # fmt: skip


def _tls_refusal(error: BaseException) -> str | None:
    """Returns why one side refuses the other's certificate or does not speak TLS, None for any other error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or not any(word in (cause.reason or "") for word in _LASTING_TLS_ERRORS):
        return None
    return str(cause)


def _reason(error: BaseException | None) -> str:
    """Returns the operating system's message behind a failed connection."""
    text = str(error) or "timed out"
    while error is not None:
        if isinstance(error, ExceptionGroup):  # one for each address of the host
            error = error.exceptions[0]
        if isinstance(error, OSError) and error.errno is not None:
            return str(error)
        error = error.__cause__ or error.__context__
    return text


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
