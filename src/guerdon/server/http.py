"""HTTP: the routes of KServe v2, of other forms and the metrics, and the one place where an error becomes a status."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import orjson
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from guerdon.config import ServerConfig
from guerdon.core import ModelInfo, OperationInfo, ScoreReply, ScoreRequest
from guerdon.errors import (
    Cancelled,
    GuerdonError,
    MethodNotAllowed,
    PayloadTooLarge,
    RouteNotFound,
    ServerFault,
    TrainFailed,
    Unavailable,
)
from guerdon.metrics import UNKNOWN
from guerdon.server import about
from guerdon.server.asgi import JSON, Handler, Headers, Reply, score_headers, send_reply, unless_left, version_header
from guerdon.server.body import Coming, UploadTooSlow, off_loop, read_body
from guerdon.server.forms import FORMS, FormHandler
from guerdon.server.gate import Gate, Place
from guerdon.server.service import Service
from guerdon.wire import bodies, forms, kserve, openai, operations, signature
from guerdon.wire.operations import Answer, Asked

logger = logging.getLogger("guerdon.http")

Told = Callable[[GuerdonError], tuple[int, Any]]
"""The status and the JSON by which an error is told."""

_BINARY = (b"content-type", b"application/octet-stream")
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

_LINGER_S = 1.0

_TOLD = "guerdon.told"
"""Where the scope has how its endpoint tells errors."""


def app(service: Service, config: ServerConfig, gate: Gate | None = None) -> ASGIApp:
    """The ASGI application over `service`; `gate` counts requests together with other transports."""
    gate = gate or Gate(config)
    front = _Front(service, config, gate)
    get, post = ("GET", "HEAD"), ("POST",)
    model = "/v2/models/{name}"
    infer = _Endpoint(post, front.infer)
    routes = [
        Route(model + "/infer", infer),
        Route(model + "/versions/{version}/infer", infer),
        Route("/v2/health/live", _Endpoint(get, front.live)),
        Route("/v2/health/ready", _Endpoint(get, front.ready)),
        Route("/v2", _Endpoint(get, front.server)),
        Route("/v2/repository/index", _Endpoint(post, front.index)),
        Route("/metrics", _Endpoint(get, front.metrics)),
        Route("/health", _Endpoint(get, front.health)),
        Route("/v1/models", _Endpoint(get, front.models, openai.told)),
        Route("/v1/models/{name:path}", _Endpoint(get, front.one_model, openai.told)),
    ]
    routes += [
        Route(path, _Endpoint(("POST", "PUT"), FormHandler(form, service, config, gate), form.told))
        for path, form in FORMS.items()
    ]
    for path, handler in (("/ready", front.model_ready), ("", front.model_metadata), ("/config", front.model_config)):
        routes += [Route(f"{model}{version}{path}", _Endpoint(get, handler)) for version in ("", "/versions/{version}")]
    return _Errors(Router(routes, redirect_slashes=False, default=_unknown))


def _told(error: GuerdonError) -> tuple[int, Any]:
    """An error as KServe v2's routes tell it, and what is no route at all."""
    status, told = forms.told_plainly(error)
    return status, told | {"num_steps": error.num_steps} if isinstance(error, TrainFailed) else told


class _Front:
    """The routes' handlers."""

    def __init__(self, service: Service, config: ServerConfig, gate: Gate) -> None:
        self._service = service
        self._body_limits = (config.max_body_mb << 20, config.request_timeout_s)
        self._gate = gate
        self._created = int(time.time())
        self._names = {info.name for info in service.models()}

    async def infer(self, scope: Scope, receive: Receive) -> Reply:
        service, name = self._service, scope["path_params"]["name"]
        label = name if name in self._names else UNKNOWN
        with service.metrics.request(label), contextlib.ExitStack() as held:
            with service.arriving(name):
                place = held.enter_context(Place(self._gate))
                info = self._model(scope)
                service.check_ready()
                header_length, body = await read_body(scope, receive, place, *self._body_limits)
            size = len(body)
            decode = functools.partial(_decode, body, header_length, info)
            del body
            if isinstance(info, OperationInfo):
                coming = Coming(decode, size, place)
                del decode
                answer: Answer = await unless_left(service.call(info.name, coming), receive)
                request = coming.form
            else:
                request, asked = await off_loop(decode, size)
                del decode
                assert isinstance(asked, ScoreRequest)
                answer = await unless_left(service.score(info.name, asked), receive)
            payload, header_length = await off_loop(functools.partial(_encode, answer, request, info), size)
        headers: Headers = []
        if isinstance(answer, ScoreReply):
            headers = score_headers(answer)
        elif answer is not None:
            headers = [version_header(answer.weights_version)]
        if header_length is None:
            headers.append(JSON)
        else:
            headers += (_BINARY, (b"inference-header-content-length", b"%d" % header_length))
        return 200, headers, payload

    async def live(self, scope: Scope, receive: Receive) -> Reply:
        return 200, [], b""

    async def ready(self, scope: Scope, receive: Receive) -> Reply:
        return _readiness(self._service.is_ready())

    async def model_ready(self, scope: Scope, receive: Receive) -> Reply:
        return _readiness(self._service.is_ready(self._model(scope).name))

    async def health(self, scope: Scope, receive: Receive) -> Reply:
        return 200 if self._service.is_ready() else 503, [], b""

    async def models(self, scope: Scope, receive: Receive) -> Reply:
        infos = [info for info in self._service.models() if isinstance(info, ModelInfo)]
        return _json(openai.models(infos, self._created))

    async def one_model(self, scope: Scope, receive: Receive) -> Reply:
        return _json(openai.model(self._service.scored_by(scope["path_params"]["name"]), self._created))

    async def server(self, scope: Scope, receive: Receive) -> Reply:
        return _json(about.server())

    async def model_metadata(self, scope: Scope, receive: Receive) -> Reply:
        return _json(signature.metadata(self._model(scope)))

    async def model_config(self, scope: Scope, receive: Receive) -> Reply:
        return _json(signature.config(self._model(scope)))

    async def index(self, scope: Scope, receive: Receive) -> Reply:
        with Place(self._gate) as place:
            _, body = await read_body(scope, receive, place, *self._body_limits)
        only_ready = bool(body) and kserve.parse_object(body).get("ready") is True
        return _json(about.repository_index(self._service, only_ready))

    async def metrics(self, scope: Scope, receive: Receive) -> Reply:
        return 200, [_TEXT], self._service.metrics.render()

    def _model(self, scope: Scope) -> ModelInfo | OperationInfo:
        path = scope["path_params"]
        return self._service.model(path["name"], path.get("version", ""))


class _Endpoint:
    """An ASGI application of one handler; an instance, since Starlette wraps plain functions.

    `told` is how an error is told in its protocol.
    """

    def __init__(self, methods: tuple[str, ...], handler: Handler, told: Told = _told) -> None:
        self._methods = methods
        self._handler = handler
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_TOLD] = self._told
        if scope["method"] not in self._methods:
            raise MethodNotAllowed(f"{scope['path']} takes {' and '.join(self._methods)}, not {scope['method']}")
        await send_reply(send, await self._handler(scope, receive))


class _Errors:
    """Turns whatever `inner` raises into its status and body, as the endpoint's protocol has them."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._inner(scope, receive, send)
            return
        except Cancelled:
            return
        except GuerdonError as e:
            error = e
        except asyncio.CancelledError:
            error = Unavailable("the server is stopping")
        except Exception:
            logger.exception("unexpected error in %s %s", scope["method"], scope["path"])
            error = ServerFault("internal error; the server's log has the details")
        headers: Headers = [JSON]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
        refused = isinstance(error, PayloadTooLarge | UploadTooSlow)
        if refused:
            headers.append((b"connection", b"close"))
        status, told = scope.get(_TOLD, _told)(error)
        await send_reply(send, (status, headers, bodies.write(told)), more_body=refused)
        if refused:
            await _linger(receive, send)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    raise RouteNotFound(
        f"no such path: {scope['path']}; this server speaks KServe v2 under /v2, and takes POST to {', '.join(FORMS)}"
    )


def _readiness(is_ready: bool) -> Reply:
    return (200, [], b"") if is_ready else (400, [JSON], b'{"error":"not ready","kind":"Unavailable"}')


def _json(value: Any) -> Reply:
    return 200, [JSON], orjson.dumps(value)


async def _linger(receive: Receive, send: Send) -> None:
    """Discards what still comes for a moment, then closes: an earlier close would take the answer from the client."""
    try:
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})


def _decode(
    body: bytes, header_length: int | None, info: ModelInfo | OperationInfo
) -> tuple[kserve.InferRequest, Asked]:
    request = kserve.decode(body, header_length)
    return request, operations.to_request(request, info)


def _encode(answer: Answer, request: kserve.InferRequest, info: ModelInfo | OperationInfo) -> tuple[bytes, int | None]:
    return kserve.encode(operations.to_reply(answer, request, info), request)
