"""The HTTP application: who may pass, which route it is, and the one place where an error becomes a status."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from guerdon.errors import (
    Cancelled,
    Forbidden,
    GuerdonError,
    InvalidRequest,
    MethodNotAllowed,
    PayloadTooLarge,
    RouteNotFound,
    ServerFault,
    Unauthenticated,
    Unavailable,
)
from guerdon.server import logs, status, tracing
from guerdon.server.front.admission import Admission, Exchange, Place, Visit
from guerdon.server.front.guard import Guard
from guerdon.server.front.http_exchanges import FormExchange, KServeExchange
from guerdon.server.front.http_request import (
    CONNECTION,
    JSON,
    READ_INLINE_BYTES,
    Handler,
    Headers,
    HttpRequest,
    Reply,
    Stream,
    UploadTooSlow,
    error_header,
    error_headers,
    send_reply,
    send_stream,
    version_header,
)
from guerdon.server.front.page_routes import Pages
from guerdon.server.front.request_spans import Spans
from guerdon.server.reading import NUM_THREADS
from guerdon.server.service import Service
from guerdon.server.weight_updates import WeightUpdates
from guerdon.settings.access import Role
from guerdon.settings.config import ServerConfig
from guerdon.wire import bodies, kserve, openapi, signature, unknown_keys
from guerdon.wire.forms import ALL_FORMS, ANSWERS, TOKEN_FORMS, openai, tei, tokens, triton_repository, vllm_control
from guerdon.wire.forms.form import Url
from guerdon.wire.forms.gym import Answer
from guerdon.wire.forms.tokens import TokenForm
from guerdon.wire.schema import Info

logger = logging.getLogger("guerdon.http")

T = TypeVar("T")

GET, POST = ("GET", "HEAD"), ("POST",)

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

_CHALLENGES = [(b"www-authenticate", b'%s realm="guerdon"' % scheme) for scheme in (b"Bearer", b"Basic")]
"""Makes a browser ask for a key; one a line, as some browsers read no second one in a line."""

_UNREAD = (PayloadTooLarge, UploadTooSlow, Unauthenticated, Forbidden)
"""Errors that come before the body was read: the connection ends with them."""

_LINGER_S = 1.0


@dataclass(frozen=True, slots=True)
class Route:
    """A path, its methods, and who answers them; in the path `{name}` stands for a part, `{name:path}` for several.

    Requests to score, and to a critic, are an `exchange`; a `handler` answers all others. With `is_hidden` other
    methods get 404, not 405.
    """

    path: str
    methods: tuple[str, ...]
    handler: Handler | None = None
    exchange: Callable[[HttpRequest], Exchange[Reply]] | None = None
    is_hidden: bool = False


class App:
    """The ASGI application over a service: admits, routes and answers, and turns errors into their protocol's form."""

    def __init__(self, admission: Admission, config: ServerConfig) -> None:
        self.guard = Guard(admission, config)
        self.routes = _routes(admission, config)
        self._admission = admission
        self._write_timeout_s = config.write_timeout_s
        self._metrics = admission.service.metrics
        self._has_keys = bool(admission.service.access.names)
        self._fixed = {route.path: route for route in self.routes if "{" not in route.path}
        self._patterns = [(_pattern(route.path), route) for route in self.routes if "{" in route.path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        request, caller, error, kind = HttpRequest(scope, receive), None, None, None
        reply: Reply | None = None
        try:
            caller = self.guard.admit(request)
            if caller is not None and self._has_keys and (connection := scope.get(CONNECTION)) is not None:
                connection.admit(caller.name)
            route = self.find(request)
            if route is None or (route.is_hidden and scope["method"] not in route.methods):
                raise RouteNotFound(
                    f"no such path: {scope['path']}; this server speaks KServe v2 under /v2, and takes POST to "
                    f"{', '.join(ALL_FORMS)}"
                )
            if scope["method"] not in route.methods:
                raise MethodNotAllowed(f"{scope['path']} takes {' and '.join(route.methods)}, not {scope['method']}")
            if route.exchange is not None:
                reply = await self._answer(route.exchange(request), request)
            else:
                assert route.handler is not None
                reply = await route.handler(request)
        except BaseException as e:
            error, kind = self._to_error(e, request), type(e)
        request.finish()
        if caller is not None:
            self._metrics.client_request_done(caller.name, kind)
        if request.has_left or isinstance(error, Cancelled):
            return
        if reply is None:
            assert error is not None
            await self._refuse(error, request, send)
        elif isinstance(reply[2], Stream):
            await self._send_stream(reply, reply[2].place, request, send)
        else:
            await send_reply(send, reply)

    async def _send_stream(self, reply: Reply, place: Place, request: HttpRequest, send: Send) -> None:
        connection = request.scope.get(CONNECTION)
        try:
            has_left = (lambda: False) if connection is None else connection.transport.is_closing
            if not await send_stream(send, reply, self._write_timeout_s, has_left) and connection is not None:
                connection.break_off()
            await asyncio.sleep(0)  # in which a connection that is closed learns of it
        finally:
            place.release()

    async def _answer(self, exchange: Exchange[Reply], request: HttpRequest) -> Reply:
        with Visit(self._admission, exchange.caller) as visit:
            info, asked = await visit.admit(exchange)
            # Not before, nor after: a thread that decodes or encodes goes on, and needs its room until it is done.
            request.cancel_on_disconnect()
            answer = await visit.ask(info, asked)
            request.finish()
            return await exchange.encode(answer, info)

    def find(self, request: HttpRequest) -> Route | None:
        """Returns the request's route, if any, and gives the request the names in its path."""
        path = request.path
        if (route := self._fixed.get(path)) is not None:
            request.names = {}
            return route
        for pattern, route in self._patterns:
            if (match := pattern.fullmatch(path)) is not None:
                request.names = match.groupdict()
                return route
        return None

    def find_path(self, request: HttpRequest) -> str | None:
        """Returns the path of the request's route with the names in braces; None if it has no route."""
        return None if (route := self.find(request)) is None else route.path

    def _to_error(self, error: BaseException, request: HttpRequest) -> GuerdonError:
        """Returns the error for the client; Cancelled if it has disconnected."""
        if isinstance(error, GuerdonError):
            return logs.without_frames(error)
        if isinstance(error, asyncio.CancelledError):
            if not request.has_left:
                return Unavailable("the server is stopping")
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            return Cancelled("the client left")
        if not isinstance(error, Exception):  # the process ends
            raise error
        where = request.scope["method"], request.scope["path"]
        logs.failure(logger, logging.ERROR, "unexpected error in %s %r", *where, error=error)
        return ServerFault("internal error; the server's log has the details")

    async def _refuse(self, error: GuerdonError, request: HttpRequest, send: Send) -> None:
        tracing.failed(error)
        headers: Headers = [JSON, *error_headers(error)]
        if isinstance(error, Unauthenticated):
            headers += _CHALLENGES
        if isinstance(error, MethodNotAllowed) and (route := self.find(request)) is not None:
            headers.append((b"allow", ", ".join(route.methods).encode()))
        is_unread = isinstance(error, _UNREAD)
        if is_unread:
            headers.append((b"connection", b"close"))
        code, body = _error_form(request.path)(error)
        await send_reply(send, (code, headers, bodies.write(body)), more_body=is_unread)
        if is_unread:
            await _linger(request.receive, send)


def app(service: Service, config: ServerConfig, admission: Admission | None = None) -> ASGIApp:
    """Returns the application over `service`; `admission` is shared with other transports."""
    made = App(admission or Admission(service, config), config)
    return made if service.traces is None else Spans(made, service.traces, made.guard.lets, made.find_path)


def _routes(admission: Admission, config: ServerConfig) -> list[Route]:
    handlers = _Handlers(admission, config)
    model, infer = "/v2/models/{name}", functools.partial(KServeExchange, limits=config)
    routes = [
        Route(model + "/infer", POST, exchange=infer),
        Route(model + "/versions/{version}/infer", POST, exchange=infer),
        Route("/v2/health/live", GET, handlers.live),
        Route("/v2/health/ready", GET, handlers.ready),
        Route("/v2", GET, handlers.server),
        Route("/v2/", GET, handlers.server),
        Route("/v2/models/stats", GET, handlers.statistics),
        Route("/v2/repository/index", POST, handlers.index),
        Route("/v2/repository/models/{name}/load", POST, handlers.load),
        Route("/v2/repository/models/{name}/unload", POST, handlers.unload),
        Route("/sleep", POST, handlers.sleep),
        Route("/wake_up", POST, handlers.wake_up),
        Route("/is_sleeping", GET, handlers.is_sleeping),
        Route("/init_weight_transfer_engine", POST, handlers.init_weights),
        Route("/start_weight_update", POST, handlers.start_weights),
        Route("/update_weights", POST, handlers.update_weights),
        Route("/finish_weight_update", POST, handlers.finish_weights),
        Route("/openapi.json", GET, handlers.openapi),
        Route("/metrics", GET, handlers.metrics),
        Route("/health", GET, handlers.health),
        Route("/health/", GET, handlers.health),  # TRL before 1.11 waits for this one
        Route(tokens.INFO, GET, handlers.info),
        Route("/v1/models", GET, handlers.models),
        Route("/v1/models/{name:path}", GET, handlers.one_model),
    ]
    for path, form in ALL_FORMS.items():
        make = functools.partial(FormExchange, form=form, admission=admission, limits=config)
        routes.append(Route(path, ("POST", "PUT"), exchange=make))
    for path, asks in TOKEN_FORMS.items():
        routes.append(Route(path, POST, functools.partial(handlers.tokens, asks)))
    for path, answer in ANSWERS.items():
        methods = GET if answer.body is None else POST
        routes.append(Route(path, methods, functools.partial(handlers.answer, answer)))
    for path, handler in (
        ("/ready", handlers.model_ready),
        ("", handlers.model_metadata),
        ("/config", handlers.model_config),
        ("/stats", handlers.statistics),
        ("/head", handlers.head),
    ):
        routes += [Route(f"{model}{version}{path}", GET, handler) for version in ("", "/versions/{version}")]
    if config.dashboard:
        pages = Pages(admission, config)
        routes += [
            Route("/", GET, pages.index, is_hidden=True),
            Route("/docs", GET, pages.api),
            Route("/dashboard/snapshot", GET, pages.snapshot),
            Route("/dashboard/samples", GET, pages.samples),
            Route("/dashboard/try", POST, exchange=pages.try_it),
            Route("/dashboard/{file}", GET, pages.file),
        ]
    return routes


class _Handlers:
    """The routes' handlers, but for the page's."""

    def __init__(self, admission: Admission, config: ServerConfig) -> None:
        self._admission = admission
        self._service = admission.service
        self._config = config
        self._created = int(time.time())
        self._updates = WeightUpdates(self._service.repository, config.weight_transfer)

    async def live(self, request: HttpRequest) -> Reply:
        return _json({"live": True})

    async def ready(self, request: HttpRequest) -> Reply:
        return _readiness(status.is_ready(self._service))

    async def model_ready(self, request: HttpRequest) -> Reply:
        name = self._model(request).name
        entry, why = self._service.catalog.entries.get(name), "not ready"
        if entry is not None and not self._service.catalog.is_loaded(name):
            why = str(entry.asleep()) if entry.sleep else f"{name} is unloaded; an admin may load it"
        return _readiness(status.is_ready(self._service, name), why, name=name)

    async def health(self, request: HttpRequest) -> Reply:
        return 200 if status.is_ready(self._service) else 503, [], b""

    async def models(self, request: HttpRequest) -> Reply:
        catalog, name = self._service.catalog, request.query.get("model")
        return _json(openai.list_models([catalog.scored_by(name)] if name else catalog.loaded(), self._created))

    async def one_model(self, request: HttpRequest) -> Reply:
        return _json(openai.describe_model(self._service.catalog.scored_by(request.names["name"]), self._created))

    async def server(self, request: HttpRequest) -> Reply:
        return _json(status.server())

    async def model_metadata(self, request: HttpRequest) -> Reply:
        return _json(signature.metadata(self._model(request)))

    async def model_config(self, request: HttpRequest) -> Reply:
        return _json(signature.config(self._model(request), self._service.max_request_sequences))

    async def statistics(self, request: HttpRequest) -> Reply:
        names = request.names
        return _json(status.statistics(self._service, names.get("name", ""), names.get("version", "")))

    async def head(self, request: HttpRequest) -> Reply:
        """Sends a teacher's output head; nothing if the client's copy is current."""
        info = self._model(request)
        entry = self._service.catalog.entries.get(info.name)  # sums and operations have none
        served: Any = None if entry is None else entry.loaded()
        if entry is not None:
            entry.check_serves()
            await entry.awake()
        if served is None or not served.info.hidden_size:
            raise InvalidRequest(
                f"{info.name} is no teacher, and has no output head; use a model of guerdon serve-teacher"
            )
        file = await asyncio.to_thread(served.head_file)
        tag = b'"%s"' % file.digest.encode()
        headers = [version_header(file.weights_version), (b"etag", tag)]
        if request.headers.get(b"if-none-match") == tag:
            return 304, headers, b""
        pieces = () if request.scope["method"] == "HEAD" else file.pieces()
        headers.append((b"content-type", b"application/octet-stream"))
        return 200, headers, Stream(file.num_bytes, pieces, Place(self._admission.gate, request.caller.name))

    async def index(self, request: HttpRequest) -> Reply:
        is_ready = await self._read_body(request, triton_repository.wants_only_ready)
        return _json(status.repository_index(self._service, is_ready))

    async def load(self, request: HttpRequest) -> Reply:
        name = self._admins_model(request)
        source = await self._read_body(request, triton_repository.source)
        version = await self._service.repository.load(name, source, request.caller.name)
        return 200, [version_header(version)], b""

    async def unload(self, request: HttpRequest) -> Reply:
        name = self._admins_model(request)
        await self._read_body(request, triton_repository.check_unload)
        await self._service.repository.unload(name, request.caller.name)
        return 200, [], b""

    async def sleep(self, request: HttpRequest) -> Reply:
        request.caller.need(Role.TRAIN, "to put models to sleep")
        asked = bodies.convert(request.query, vllm_control.SleepUrl, "the URL")
        level, repository = int(asked.level), self._service.repository
        names = await repository.sleep(asked.model, level, asked.mode, request.caller.name)
        return _json(vllm_control.SleepReply("sleeping", level, names))

    async def wake_up(self, request: HttpRequest) -> Reply:
        request.caller.need(Role.TRAIN, "to wake models up")
        asked = bodies.convert(request.query, vllm_control.WakeUrl, "the URL")
        names = await self._service.repository.wake_up(asked.model, request.caller.name)
        return _json(vllm_control.WakeReply("awake", names, [asked.tags] if asked.tags else None))

    async def is_sleeping(self, request: HttpRequest) -> Reply:
        asked, catalog = bodies.convert(request.query, Url, "the URL"), self._service.catalog
        entries = catalog.entries if not asked.model else {asked.model: catalog.entry(asked.model)}
        levels = {name: entry.sleep.level for name, entry in entries.items() if entry.sleep is not None}
        return _json(vllm_control.IsSleepingReply(bool(levels), levels))

    async def init_weights(self, request: HttpRequest) -> Reply:
        name, _, updates = self._updated(request)
        body = await self._read_body(request, lambda body: unknown_keys.read(body, vllm_control.InitBody))
        async with updates.lock(name):
            updates.init(name, body.check())
        return _json(vllm_control.PhaseReply(message="Weight transfer initialized"))

    async def start_weights(self, request: HttpRequest) -> Reply:
        name, _, updates = self._updated(request)
        async with updates.lock(name):
            update_id, version = await updates.start(name), self._service.catalog.scored_by(name).weights_version
        told = vllm_control.PhaseReply(message="Weight update started", update_id=update_id, weights_version=version)
        return _json(told)

    async def update_weights(self, request: HttpRequest) -> Reply:
        name, update_id, updates = self._updated(request)
        is_json = request.headers.get(b"content-type", b"").startswith(b"application/json")
        with Place(self._admission.gate, request.caller.name) as place:
            body = await request.read_body(place, self._config)
            missing: int | None = None
            sources: list[Any] = unknown_keys.read(body, vllm_control.UpdateBody).files() if is_json else [body]
            async with updates.lock(name):
                for source in sources:
                    missing = await updates.add(name, update_id, source)
        return _json(vllm_control.PhaseReply(message="Weights updated", missing=missing))

    async def finish_weights(self, request: HttpRequest) -> Reply:
        name, update_id, updates = self._updated(request)
        none = vllm_control.FinishBody()
        body = await self._read_body(
            request, lambda body: unknown_keys.read(body, vllm_control.FinishBody) if body else none
        )
        async with updates.lock(name):
            version = await updates.finish(name, update_id, request.caller.name)
        told = vllm_control.PhaseReply(
            message="Weight update finished", weights_version=version, weight_version=body.weight_version
        )
        return 200, [JSON, version_header(version)], bodies.write(told)

    def _updated(self, request: HttpRequest) -> tuple[str, str, WeightUpdates]:
        """Returns the model of an update, the update's id, and the server's updates."""
        request.caller.need(Role.TRAIN, "to replace weights")
        asked = bodies.convert(request.query, vllm_control.UpdateUrl, "the URL")
        return self._service.catalog.scored_by(asked.model).name, asked.update_id, self._updates

    async def answer(self, answer: Answer, request: HttpRequest) -> Reply:
        if answer.body is None:
            return _json(answer.to_reply(b""))
        return _json(await self._read_body(request, answer.to_reply))

    async def tokens(self, form: TokenForm, request: HttpRequest) -> Reply:
        place = Place(self._admission.gate, request.caller.name)
        with place:
            body = await request.read_body(place, self._config)
            read = functools.partial(form.read, body, request.query)
            asked = await place.run(read, len(body), READ_INLINE_BYTES)
            info, tokenizer = self._service.catalog.tokenized_by(asked.model)
            place.reach(len(body) + asked.num_bytes)
            made = await place.run(lambda: bodies.write(asked.answer(tokenizer, info)), asked.num_bytes)
        if len(made) <= bodies.BLOCK:
            return 200, [JSON], made
        kept = Place(self._admission.gate, request.caller.name)
        kept.reach(len(made))
        return 200, [JSON], Stream(len(made), [made[some] for some in bodies.slices(len(made))], kept)

    async def info(self, request: HttpRequest) -> Reply:
        catalog = self._service.catalog
        info = catalog.scored_by(bodies.convert(request.query, Url, "the URL").model)
        entry = catalog.entries.get(info.name)
        return _json(
            tokens.describe(
                info,
                max_concurrent_requests=self._config.max_requests,
                max_batch_tokens=0 if entry is None else entry.loaded().max_batch_tokens,
                max_client_batch_size=self._service.max_request_sequences,
                auto_truncate=entry is not None and entry.config.truncation != "error",
                tokenization_workers=NUM_THREADS,
                version=status.server()["version"],
            )
        )

    async def openapi(self, request: HttpRequest) -> Reply:
        has_page, version = self._service.recorder.is_on, status.server()["version"]
        return _json(openapi.document(self._service.catalog.models(), has_page=has_page, version=version))

    async def metrics(self, request: HttpRequest) -> Reply:
        return 200, [_TEXT], self._service.metrics.render()

    def _model(self, request: HttpRequest) -> Info:
        return self._service.catalog.model(request.names["name"], request.names.get("version", ""))

    def _admins_model(self, request: HttpRequest) -> str:
        """Returns the model that an admin names."""
        name = request.names["name"]
        request.caller.need(Role.ADMIN, f"to load or unload {name}")
        return name

    async def _read_body(self, request: HttpRequest, read: Callable[[bodies.Octets], T]) -> T:
        with Place(self._admission.gate, request.caller.name) as place:
            body = await request.read_body(place, self._config)
            return await place.run(functools.partial(read, body), len(body), READ_INLINE_BYTES)


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)(:path)?\}", path)
    made = re.escape(parts[0])
    for name, is_path, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        made += f"(?P<{name}>{'.*' if is_path else '[^/]+'}){re.escape(text)}"
    return re.compile(made)


def _error_form(path: str) -> Callable[[GuerdonError], tuple[int, Any]]:
    """Returns how errors look at the path, whichever part of the server raised them."""
    if path in ALL_FORMS:
        return ALL_FORMS[path].to_error
    if path in TOKEN_FORMS or path.startswith("/v1/models"):
        return openai.to_error
    return tei.to_error if path == tokens.INFO else kserve.to_error


def _readiness(is_ready: bool, why: str = "not ready", **more: str) -> Reply:
    """Returns the status, which says it all in the protocol, and a body, which KServe's own client reads."""
    if is_ready:
        return _json({**more, "ready": True})
    return 400, [JSON, error_header(Unavailable)], bodies.write(kserve.ErrorBody(why))


def _json(value: Any) -> Reply:
    return 200, [JSON], bodies.write(value)


async def _linger(receive: Receive, send: Send) -> None:
    """Discards what still comes for a moment, then closes: an earlier close would take the answer from the client."""
    try:
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})
