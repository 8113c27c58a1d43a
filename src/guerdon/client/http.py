"""The steps of a call over HTTP: KServe v2 with binary tensors, by httpx."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import orjson

from guerdon.client.addresses import Address
from guerdon.client.calls import ModelSignature
from guerdon.client.retry import Configure, Describe, Infer, InferResult, Ready, RetryPolicy
from guerdon.client.statuses import WITHOUT_CERTIFICATE, error_of, untrusted, with_way_in
from guerdon.errors import (
    Cancelled,
    DeadlineExceeded,
    GuerdonError,
    InvalidRequest,
    RouteNotFound,
    ServerFault,
    Unavailable,
    UnknownModel,
    Unreachable,
)
from guerdon.wire import kserve

_HEADER_LENGTH = "Inference-Header-Content-Length"
_RAYS_HEADER = "x-request-id"
_KEEP_ALIVE_S = 60.0
_VANISHED_S = 180
"""After which the kernel ends a connection whose other host no longer answers."""
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8, "TCP_USER_TIMEOUT": _VANISHED_S * 1000}
"""The last is for what was sent and not acknowledged: meanwhile no probes go out."""
_LASTING = ("CERTIFICATE", "UNKNOWN_CA", "WRONG_VERSION_NUMBER")
"""In the reasons of TLS's errors that come again as long as nobody changes the settings."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One HTTP exchange with a server: what is sent for a step, and what its answer means."""

    step: Ready | Describe | Configure | Infer

    @property
    def url(self) -> str:
        return self.step.endpoint.url

    def request(self) -> dict[str, Any]:
        """The arguments of httpx's `request`."""
        path = f"{self.url}/v2/models/{quote(self.step.model, safe='')}"
        match self.step:
            case Ready():
                return {"method": "GET", "url": f"{path}/ready"}
            case Describe():
                return {"method": "GET", "url": path}
            case Configure():
                return {"method": "GET", "url": f"{path}/config"}
            case Infer(request=request):
                body, header_length = kserve.encode_request(request)
                headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(header_length)}
                headers |= dict(self.step.trace)
                return {"method": "POST", "url": f"{path}/infer", "content": body, "headers": headers}

    def result(self, response: httpx.Response) -> Any:
        """What the step asked for; raises the error that the status stands for."""
        if response.status_code != 200:
            raise self._error(response)
        match self.step:
            case Ready():
                return None
            case Describe():
                return ModelSignature.from_metadata(_json(response))
            case Configure():
                if not isinstance(config := _json(response), dict):
                    raise ServerFault(f"{self.url} sent a malformed configuration")
                return config
            case Infer():
                length = response.headers.get(_HEADER_LENGTH)
                try:
                    reply = kserve.decode_reply(response.content, None if length is None else int(length))
                except (InvalidRequest, ValueError) as e:
                    raise ServerFault(f"{self.url} sent a malformed reply: {e}") from e
                return InferResult(
                    reply,
                    queue_s=_number(response.headers, "guerdon-queue-ms", 0.0) / 1e3,
                    compute_s=_number(response.headers, "guerdon-compute-ms", 0.0) / 1e3,
                )

    def failure(self, error: httpx.TransportError) -> GuerdonError:
        """The error of an exchange that broke."""
        step, url = self.step, self.url
        check = "is the server running there? Check host and port (grpc://host:port for a gRPC port, https:// for TLS)"
        if (refusal := _tls_refusal(error)) is not None:
            return untrusted(url, refusal)
        if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
            return Unreachable(f"cannot connect to {url}: {str(error) or 'timed out'}; {check}", may_have_arrived=False)
        if isinstance(error, httpx.TimeoutException):
            if isinstance(step, Infer):
                return DeadlineExceeded(
                    f"no answer from {url} within {step.timeout_s:.3g} s; raise timeout_s to wait longer"
                )
            return Unreachable(f"{url} takes connections but said nothing within {step.timeout_s:.3g} s; {check}")
        help = "" if step.endpoint.seen else f"; {check}"  # noqa: A001 - the word that errors use
        if help and url.startswith("https://"):
            help += WITHOUT_CERTIFICATE  # noqa: A001
        return Unreachable(f"the connection to {url} broke before the answer: {error}{help}")

    def _error(self, response: httpx.Response) -> GuerdonError:
        status = response.status_code
        body = _json(response)
        message, kind = (body.get("error"), body.get("kind")) if isinstance(body, dict) else (None, None)
        if isinstance(self.step, Ready) and status not in (401, 403):
            said = f": {message}" if isinstance(message, str) else ""
            return Unavailable(f"model '{self.step.model}' at {self.url} is not ready (status {status}{said})")
        if not isinstance(message, str):
            message = f"{self.url} answered {status} to {response.request.url.path}: {response.text[:200]!r}"
            if status == 404:
                return RouteNotFound(f"{message}; is this a server of the open inference protocol (KServe v2)?")
            if status == 500 and body is None and _is_rays(response):
                # Guerdon tells its own faults as JSON: this is Ray Serve's proxy, whose replica was lost.
                return Unavailable(message)
        elif status == 404 or (status == 400 and isinstance(self.step, Describe)):
            return UnknownModel(message)
        retry_after_s = _number(response.headers, "Retry-After", None)
        told = error_of(status, message, retry_after_s, kind, _number(body, "num_steps", None))
        return with_way_in(told, self.url)


def _is_rays(response: httpx.Response) -> bool:
    """Whether Ray Serve's proxy says so itself; where it breaks down over a lost replica, its uvicorn says it."""
    is_broken = response.headers.get("server") == "uvicorn" and response.text == "Internal Server Error"
    return is_broken or _RAYS_HEADER in response.headers


class HttpTransport:
    """Performs steps over pooled connections; thread-safe."""

    def __init__(self, address: Address, policy: RetryPolicy) -> None:
        self._policy = policy
        self._options = _options(address)
        # Each holds one connection. One httpx client with many walks through all of them at each request, and
        # spends more time on that than on the exchange.
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._is_closed = False

    def perform(self, step: Ready | Describe | Configure | Infer) -> Any:
        """The step's result; raises its GuerdonError."""
        exchange = Exchange(step)
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _Connection(self._options)
        self._busy.add(connection)
        try:
            if self._is_closed:  # asked only now that `close` finds the connection
                raise Cancelled("the client is closed")
            response = connection.request(**exchange.request(), timeout=_timeout(step, self._policy))
        except httpx.TransportError as e:
            raise exchange.failure(e) from e
        finally:
            self._busy.discard(connection)
            self._idle.append(connection)
            if self._is_closed:
                self.close()
        return exchange.result(response)

    def close(self) -> None:
        """Closes the connections; exchanges under way break."""
        self._is_closed = True
        for connection in list(self._busy):
            connection.cut()
        while self._idle:
            with suppress(IndexError):  # another thread closes too
                self._idle.pop().close()


class _Connection:
    """An httpx client for one request at a time, which another thread may cut short."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._client = httpx.Client(**options)
        self._socket: socket.socket | None = None
        self._is_cut = False

    def request(self, **arguments: Any) -> httpx.Response:
        return self._client.request(**arguments, extensions={"trace": self._trace})

    def cut(self) -> None:
        """Ends the exchange under way, if need be as soon as it is connected."""
        self._is_cut = True
        if self._socket is not None:
            with suppress(OSError):  # it has just ended by itself
                # Closing would not wake the thread that reads. A TLS socket's own method would drop what it reads by.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._client.close()

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            _keep_alive(self._socket)
            if self._is_cut:
                self.cut()


class AsyncHttpTransport:
    """Performs steps over pooled connections, within one event loop."""

    def __init__(self, address: Address, policy: RetryPolicy) -> None:
        self._policy = policy
        self._options = _options(address)
        self._idle: list[httpx.AsyncClient] = []  # as above
        self._is_closed = False

    async def perform(self, step: Ready | Describe | Configure | Infer) -> Any:
        """The step's result; raises its GuerdonError."""
        exchange = Exchange(step)
        client = self._idle.pop() if self._idle else httpx.AsyncClient(**self._options)
        try:
            response = await client.request(
                **exchange.request(), timeout=_timeout(step, self._policy), extensions={"trace": _trace}
            )
        except httpx.TransportError as e:
            raise exchange.failure(e) from e
        finally:
            self._idle.append(client)
            if self._is_closed:
                await self.close()
        return exchange.result(response)

    async def close(self) -> None:
        """Closes the idle connections now, and each other one when its exchange ends."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().aclose()


async def _trace(event: str, info: Mapping[str, Any]) -> None:
    if event == "connection.connect_tcp.complete":
        _keep_alive(info["return_value"].get_extra_info("socket"))


def _keep_alive(connected: socket.socket) -> None:
    """Has the kernel notice within minutes that the other host is gone; a train request may wait for hours."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # not everywhere
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _options(address: Address) -> dict[str, Any]:
    return address.httpx_options() | {"limits": httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S)}


def _timeout(step: Ready | Describe | Configure | Infer, policy: RetryPolicy) -> httpx.Timeout:
    return httpx.Timeout(step.timeout_s, connect=min(policy.connect_timeout_s, step.timeout_s))


def _tls_refusal(error: BaseException) -> str | None:
    """What one side has against the other's certificate, or that a side does not speak TLS; None for all else."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or not any(word in (cause.reason or "") for word in _LASTING):
        return None
    return str(cause)


def _json(response: httpx.Response) -> Any:
    try:
        return orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return None


def _number(headers: Mapping[str, Any], name: str, default: Any) -> Any:
    try:
        return float(headers[name])
    except (KeyError, TypeError, ValueError):
        return default
