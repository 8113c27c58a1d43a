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

from guerdon.core import ModelInfo, OperationInfo, ScoreReply, ScoreRequest
from guerdon.errors import (
    Cancelled,
    Forbidden,
    GuerdonError,
    MethodNotAllowed,
    PayloadTooLarge,
    RouteNotFound,
    ServerFault,
    TrainFailed,
    Unauthenticated,
    Unavailable,
)
from guerdon.server import logs, status, tracing
from guerdon.server.aside import answer_bytes, off_loop
from guerdon.server.front.asgi import (
    JSON,
    Handler,
    Headers,
    Reply,
    score_headers,
    send_reply,
    unless_left,
    version_header,
)
from guerdon.server.front.body import Coming, UploadTooSlow, announced, read_body
from guerdon.server.front.forms import FORMS, FormHandler
from guerdon.server.front.gate import Gate, Place
from guerdon.server.front.guard import Guard, caller_of
from guerdon.server.front.page_routes import Pages
from guerdon.server.front.request_spans import Spans
from guerdon.server.metrics import UNKNOWN
from guerdon.server.service import Service
from guerdon.settings.access import Role
from guerdon.settings.config import ServerConfig
from guerdon.wire import bodies, forms, kserve, openai, openapi, operations, repository, signature
from guerdon.wire.operations import Answer, Asked

logger = logging.getLogger("guerdon.http")

Told = Callable[[GuerdonError], tuple[int, Any]]
"""The status and the JSON by which an error is told."""

_BINARY = (b"content-type", b"application/octet-stream")
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

_CHALLENGES = [(b"www-authenticate", b'%s realm="guerdon"' % scheme) for scheme in (b"Bearer", b"Basic")]
"""What has a browser ask for a key; one a line, as some browsers read no second one in a line."""

_UNREAD = (PayloadTooLarge, UploadTooSlow, Unauthenticated, Forbidden)
"""Errors that come before the body was read: the connection ends with them."""

_LINGER_S = 1.0


def app(service: Service, config: ServerConfig, gate: Gate | None = None) -> ASGIApp:
    """The ASGI application over `service`; `gate` counts requests together with other transports."""
    gate = gate or Gate(config, service.access.names)
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
        Route("/v2/models/stats", _Endpoint(get, front.statistics)),
        Route("/v2/repository/index", _Endpoint(post, front.index)),
        Route("/v2/repository/models/{name}/load", _Endpoint(post, front.load)),
        Route("/v2/repository/models/{name}/unload", _Endpoint(post, front.unload)),
        Route("/openapi.json", _Endpoint(get, front.openapi)),
        Route("/metrics", _Endpoint(get, front.metrics)),
        Route("/health", _Endpoint(get, front.health)),
        Route("/v1/models", _Endpoint(get, front.models)),
        Route("/v1/models/{name:path}", _Endpoint(get, front.one_model)),
    ]
    routes += [
        Route(path, _Endpoint(("POST", "PUT"), FormHandler(form, service, config, gate)))
        for path, form in FORMS.items()
    ]
    for path, handler in (
        ("/ready", front.model_ready),
        ("", front.model_metadata),
        ("/config", front.model_config),
        ("/stats", front.statistics),
    ):
        routes += [Route(f"{model}{version}{path}", _Endpoint(get, handler)) for version in ("", "/versions/{version}")]
    if config.dashboard:
        pages = Pages(service, config, gate)
        routes += [
            Route("/", _Endpoint(get, pages.index, _unknown)),
            Route("/dashboard/snapshot", _Endpoint(get, pages.snapshot)),
            Route("/dashboard/samples", _Endpoint(get, pages.samples)),
            Route("/dashboard/try", _Endpoint(post, pages.try_it)),
            Route("/dashboard/{file}", _Endpoint(get, pages.file)),
        ]
    router = Router(routes, redirect_slashes=False, default=_unknown)
    guard = Guard(router, service.access, config, service.metrics)
    whole = _Errors(guard)
    return whole if service.traces is None else Spans(whole, service.traces, routes, guard.lets)


def _told(error: GuerdonError) -> tuple[int, Any]:
    """An error as KServe v2's routes tell it, and what is no route at all."""
    status, told = forms.told_plainly(error)
    return status, told | {"num_steps": error.num_steps} if isinstance(error, TrainFailed) else told


class _Front:
    """The routes' handlers."""

    def __init__(self, service: Service, config: ServerConfig, gate: Gate) -> None:
        self._service = service
        self._body_limits = (config.max_body_mb << 20, config.request_timeout_s, config.read_timeout_s)
        self._gate = gate
        self._created = int(time.time())
        self._names = {info.name for info in service.catalog.models()}

    async def infer(self, scope: Scope, receive: Receive) -> Reply:
        service, name = self._service, scope["path_params"]["name"]
        label = name if name in self._names else UNKNOWN
        tracing.tell(model=label)
        with service.metrics.request(label), contextlib.ExitStack() as held:
            with service.arriving(name):
                caller, info = caller_of(scope), self._model(scope)
                if isinstance(info, OperationInfo):
                    caller.need(Role.TRAIN, info.name)
                place = held.enter_context(Place(self._gate, caller.name))
                service.check_ready()
                if isinstance(info, ModelInfo):
                    # Before its body is read and decoded for nothing; one that is never taken is told so instead.
                    service.check_room(info.name, caller.name, announced(scope, self._body_limits[0]))
                header_length, body = await read_body(scope, receive, place, *self._body_limits)
            size = len(body)
            decode = functools.partial(_decode, body, header_length, info)
            del body
            if isinstance(info, OperationInfo):
                coming = Coming(decode, size, place)
                del decode
                answer: Answer = await unless_left(service.call(info.name, coming, caller.name), receive)
                request = coming.form
            else:
                request, asked = await off_loop(decode, size)
                del decode
                assert isinstance(asked, ScoreRequest)
                answer = await unless_left(service.score(info.name, asked, caller.name), receive)
            table_bytes = answer_bytes(answer, info)
            place.reach(min(table_bytes, self._body_limits[0]))
            encode = functools.partial(_encode, answer, request, info)
            payload, header_length = await off_loop(encode, max(size, table_bytes))
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
        return _json({"live": True})

    async def ready(self, scope: Scope, receive: Receive) -> Reply:
        return _readiness(self._service.is_ready())

    async def model_ready(self, scope: Scope, receive: Receive) -> Reply:
        name = self._model(scope).name
        why = "not ready" if self._service.catalog.is_loaded(name) else f"{name} is unloaded; an admin may load it"
        return _readiness(self._service.is_ready(name), why, name=name)

    async def health(self, scope: Scope, receive: Receive) -> Reply:
        return 200 if self._service.is_ready() else 503, [], b""

    async def models(self, scope: Scope, receive: Receive) -> Reply:
        return _json(openai.models(self._service.catalog.loaded(), self._created))

    async def one_model(self, scope: Scope, receive: Receive) -> Reply:
        return _json(openai.model(self._service.catalog.scored_by(scope["path_params"]["name"]), self._created))

    async def server(self, scope: Scope, receive: Receive) -> Reply:
        return _json(status.server())

    async def model_metadata(self, scope: Scope, receive: Receive) -> Reply:
        return _json(signature.metadata(self._model(scope)))

    async def model_config(self, scope: Scope, receive: Receive) -> Reply:
        return _json(signature.config(self._model(scope), self._service.max_request_sequences))

    async def statistics(self, scope: Scope, receive: Receive) -> Reply:
        path = scope["path_params"]
        return _json(status.statistics(self._service, path.get("name", ""), path.get("version", "")))

    async def index(self, scope: Scope, receive: Receive) -> Reply:
        with Place(self._gate, caller_of(scope).name) as place:
            _, body = await read_body(scope, receive, place, *self._body_limits)
        only_ready = bool(body) and kserve.parse_object(body).get("ready") is True
        return _json(status.repository_index(self._service, only_ready))

    async def load(self, scope: Scope, receive: Receive) -> Reply:
        name, body = await self._admins(scope, receive)
        version = await self._service.repository.load(name, repository.source(body), caller_of(scope).name)
        return 200, [version_header(version)], b""

    async def unload(self, scope: Scope, receive: Receive) -> Reply:
        name, body = await self._admins(scope, receive)
        repository.check_unload(body)
        await self._service.repository.unload(name, caller_of(scope).name)
        return 200, [], b""

    async def _admins(self, scope: Scope, receive: Receive) -> tuple[str, bytes]:
        """The model that an admin names, and the request's body."""
        caller, name = caller_of(scope), scope["path_params"]["name"]
        caller.need(Role.ADMIN, f"to load or unload {name}")
        with Place(self._gate, caller.name) as place:
            _, body = await read_body(scope, receive, place, *self._body_limits)
        return name, body

    async def openapi(self, scope: Scope, receive: Receive) -> Reply:
        return _json(openapi.document(self._service.catalog.models(), has_page=self._service.watch.is_on))

    async def metrics(self, scope: Scope, receive: Receive) -> Reply:
        return 200, [_TEXT], self._service.metrics.render()

    def _model(self, scope: Scope) -> ModelInfo | OperationInfo:
        path = scope["path_params"]
        return self._service.catalog.model(path["name"], path.get("version", ""))


class _Endpoint:
    """An ASGI application of one handler; an instance, since Starlette wraps plain functions.

    Other methods are for `otherwise`, without which they are refused.
    """

    def __init__(self, methods: tuple[str, ...], handler: Handler, otherwise: ASGIApp | None = None) -> None:
        self._methods = methods
        self._handler = handler
        self._otherwise = otherwise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in self._methods:
            if self._otherwise is not None:  # who sends samples to no path is told which there are
                await self._otherwise(scope, receive, send)
            raise MethodNotAllowed(f"{scope['path']} takes {' and '.join(self._methods)}, not {scope['method']}")
        await send_reply(send, await self._handler(scope, receive))


class _Errors:
    """Turns whatever `inner` raises into its status and body, as the path's protocol has them."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._inner(scope, receive, send)
            return
        except Cancelled:
            return
        except GuerdonError as e:
            error = logs.without_frames(e)
        except asyncio.CancelledError:
            error = Unavailable("the server is stopping")
        except Exception as e:
            logs.failure(logger, logging.ERROR, "unexpected error in %s %r", scope["method"], scope["path"], error=e)
            error = ServerFault("internal error; the server's log has the details")
        tracing.failed(error)
        headers: Headers = [JSON]
        if isinstance(error, Unauthenticated):
            headers += _CHALLENGES
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
        refused = isinstance(error, _UNREAD)
        if refused:
            headers.append((b"connection", b"close"))
        status, told = _teller(scope)(error)
        await send_reply(send, (status, headers, bodies.write(told)), more_body=refused)
        if refused:
            await _linger(receive, send)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    raise RouteNotFound(
        f"no such path: {scope['path']}; this server speaks KServe v2 under /v2, and takes POST to {', '.join(FORMS)}"
    )


def _teller(scope: Scope) -> Told:
    """How errors are told at the path, whichever part of the server raised them."""
    path = scope["path"]
    if path in FORMS:
        return FORMS[path].told
    return openai.told if path.startswith("/v1/models") else _told


def _readiness(is_ready: bool, why: str = "not ready", **more: str) -> Reply:
    """Returns the status, which says it all in the protocol, and a body, which KServe's own client reads."""
    told = {**more, "ready": True} if is_ready else {"error": why, "kind": "Unavailable"}
    return 200 if is_ready else 400, [JSON], orjson.dumps(told)


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
