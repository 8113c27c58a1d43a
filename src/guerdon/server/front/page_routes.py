"""The page's routes: its files, from `server/page/static`, and the JSON that they show; the API's page beside it."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import hashlib
import logging
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import orjson

from guerdon.core import ModelInfo, ScoreReply, ScoreRequest
from guerdon.errors import Overloaded, RouteNotFound, Unsupported, install_command
from guerdon.server import status
from guerdon.server.auth import Caller
from guerdon.server.batching.sharing import FairTurns
from guerdon.server.front.admission import Admission, Decoder, Exchange, Visit
from guerdon.server.front.http_request import JSON, READ_INLINE_BYTES, Headers, HttpRequest, Reply
from guerdon.server.page import snapshot, trying
from guerdon.server.page.extremes import KeptSample
from guerdon.server.page.snapshot import PageQuery, parse_query
from guerdon.server.service import Service
from guerdon.settings.access import Role, is_loopback
from guerdon.settings.config import LimitsConfig, ServerConfig
from guerdon.wire import bodies
from guerdon.wire.forms.page_bodies import Extreme, Extremes
from guerdon.wire.schema import Info

log = logging.getLogger(__name__)

FOLDER = Path(snapshot.__file__).parent / "static"
INDEX = "index.html"
API_INDEX = "docs.html"
"""The page at /docs, in the folder of the dashboard's files."""

_API_FILES = {"swagger.js": "swagger_bundle.js", "swagger.css": "swagger_style.css"}
"""Swagger UI's files: names under /dashboard, and the package's names for them."""

_KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFE: Headers = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]
_KEPT_S = 1.0
"""How long a snapshot is reused for the same question: many pages cost no more than one."""

_MOST_WAITING = 8
"""Snapshots that one client may wait for at once; without keys all are one client."""

_GZIP = re.compile(rb"gzip(\s*;\s*q=(1|0\.0*[1-9])[\d.]*)?")

_Key = tuple[PageQuery, Role, str | None, bool]


class Pages:
    """The handlers of the page's routes."""

    def __init__(self, admission: Admission, config: ServerConfig) -> None:
        self._service = service = admission.service
        self._config = config
        self._files = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in _KINDS}
        self._turns = FairTurns(1)
        self._num_waiting: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guerdon-page")
        self._kept: dict[_Key, tuple[float, bytes]] = {}
        if service.recorder.extremes is not None and not service.access.names and not is_loopback(config.host):
            log.warning("samples' texts are kept for the page, and without keys anyone who reaches it can read them")

    async def index(self, request: HttpRequest) -> Reply:
        """Returns the page itself."""
        return self._file(request, INDEX)

    async def api(self, request: HttpRequest) -> Reply:
        """Returns the page that shows the API."""
        return self._file(request, API_INDEX)

    async def file(self, request: HttpRequest) -> Reply:
        """Returns one of the files of these pages."""
        return self._file(request, request.names["file"])

    async def snapshot(self, request: HttpRequest) -> Reply:
        """Returns the page's data of the last `?window=` seconds, with the reference `?reference=`."""
        what = parse_query(request.query, "window", "reference", "model", "beside", "until")
        caller, catalog = request.caller, self._service.catalog
        if what.model:
            what = dataclasses.replace(what, model=catalog.scored_by(what.model).name)
        if what.beside:
            what = dataclasses.replace(what, beside=catalog.scored_by(what.beside).name)
        accepted = b",".join(value for name, value in request.scope["headers"] if name == b"accept-encoding")
        is_packed = any(_GZIP.fullmatch(coding.strip()) for coding in accepted.lower().split(b","))
        headers: Headers = [JSON, *_SAFE, (b"vary", b"accept-encoding")]
        if is_packed:
            headers.append((b"content-encoding", b"gzip"))
        if self._num_waiting[caller.name] >= _MOST_WAITING:
            raise Overloaded(f"you already wait for {_MOST_WAITING} snapshots; try again", _KEPT_S)
        self._num_waiting[caller.name] += 1
        request.cancel_on_disconnect()
        try:
            server = request.scope.get("server")
            address = None if not server or server[1] is None else f"{server[0]}:{server[1]}"
            body = await self._snapshot(what, caller, address, is_packed)
        finally:
            self._num_waiting[caller.name] -= 1
        return 200, headers, body

    async def _snapshot(self, what: PageQuery, caller: Caller, address: str | None, is_packed: bool) -> bytes:
        """Makes the snapshot as JSON, one at a time, the clients taking turns."""
        key, recorder = (what, caller.role, address, is_packed), self._service.recorder
        run = asyncio.get_running_loop().run_in_executor
        async with self._turns.turn(caller.name):
            told = self._kept.get(key)
            if told is not None and time.monotonic() - told[0] <= _KEPT_S:
                return told[1]
            samples = await run(self._thread, recorder.samples)
            service, critic = self._service, self._service.critic if caller.role >= Role.TRAIN else None
            server = self._server(caller, address)
            gathered = snapshot.gather(recorder, service.catalog, critic, what, server, samples)
            body = await run(self._thread, _written, gathered, is_packed)
            now = time.monotonic()
            self._kept = {other: kept for other, kept in self._kept.items() if now - kept[0] <= _KEPT_S}
            self._kept[key] = (now, body)
            return body

    async def samples(self, request: HttpRequest) -> Reply:
        """Returns the best and worst samples of `?model=` in the last `?window=` seconds, if samples are kept."""
        caller, extremes = request.caller, self._service.recorder.extremes
        if extremes is None:
            raise RouteNotFound("this server keeps no samples' texts; start it with --dashboard-samples")
        if not self._may_read(caller):
            caller.need(Role.ADMIN, "to read samples' texts")
        query = request.query
        what = parse_query(query, "model", "window")
        info = self._service.catalog.scored_by(query.get("model", ""))
        start = self._service.recorder.now() - what.window_s
        told: Extremes = {"model": info.name, "window_s": what.window_s, "best": [], "worst": []}
        if info.name in extremes:
            told["best"] = [self._sample(one, info) for one in extremes[info.name].best(start)]
            told["worst"] = [self._sample(one, info) for one in extremes[info.name].worst(start)]
        return 200, [JSON, *_SAFE], orjson.dumps(told)

    def try_it(self, request: HttpRequest) -> Exchange[Reply]:
        """Scores a prompt and responses, and describes each token."""
        return _TrialExchange(request, self._service, self._config)

    def _file(self, request: HttpRequest, name: str) -> Reply:
        if name in _API_FILES and name not in self._files:
            try:  # never imports the package, which would make strings of 18 MB of every page that it knows
                path = Path(str(distribution("offapi").locate_file(f"offapi/{_API_FILES[name]}")))
                self._files[name] = path.read_bytes()
            except (PackageNotFoundError, FileNotFoundError) as e:
                raise Unsupported(f"/docs needs the package offapi: {install_command('server')}") from e
        body = self._files.get(name)
        if body is None:
            raise RouteNotFound(f"no such path: {request.path}; the page is at /")
        tag = b'"%s"' % hashlib.sha256(body).hexdigest()[:16].encode()
        headers: Headers = [(b"content-type", _KINDS[Path(name).suffix]), (b"etag", tag), *_SAFE]
        if tag in request.headers.get(b"if-none-match", b""):
            return 304, headers, b""
        return 200, headers, body

    def _server(self, caller: Caller, address: str | None) -> dict[str, Any]:
        service, told = self._service, status.server()
        why = status.why_not_ready(service)
        if why and service.critic is not None and service.critic.fault is not None and caller.role < Role.TRAIN:
            why = "the critic has failed; a key of the role train can read the reason"
        return {
            "is_ready": status.is_ready(service),
            "why": why,
            "has_keys": bool(service.access.names),
            "name": told["name"],
            "version": told["version"],
            "address": address,
            "samples_allowed": self._service.recorder.extremes is not None and self._may_read(caller),
            "role": caller.role.name.lower(),
            "request_timeout_s": self._config.request_timeout_s,
        }

    def _may_read(self, caller: Caller) -> bool:
        """Whether the caller may see samples' texts: with keys, only an admin."""
        return not self._service.access.names or caller.role >= Role.ADMIN

    def _sample(self, one: KeptSample, info: ModelInfo) -> Extreme:
        prompt, response = one.prompt, one.response
        tokenizer = self._service.catalog.tokenizer(info.name)
        if one.tokens is not None and tokenizer is not None and one.vocabulary == info.vocabulary:
            pieces = tokenizer.pieces(one.tokens)
            prompt = "".join(pieces[: one.num_prompt_tokens]) or None
            response = "".join(pieces[one.num_prompt_tokens :])
        extreme: Extreme = {
            "time": one.time,
            "reward": one.reward,
            "num_tokens": one.num_tokens,
            "weights_version": one.weights_version,
            "prompt": prompt,
            "response": response,
            "is_cut": one.is_cut,
        }
        extreme["components" if info.has_components else "attributes"] = one.attributes
        return extreme


class _TrialExchange:
    """One prompt with its responses, as the page sends them."""

    num_bytes = 0  # the body is parsed in `read`, since it names the model
    num_tables = 1

    def __init__(self, request: HttpRequest, service: Service, limits: LimitsConfig) -> None:
        self.caller = request.caller
        self._request = request
        self._service = service
        self._limits = limits

    async def read(self, visit: Visit) -> ModelInfo:
        visit.enter(self._request.content_length(self._limits))
        body = await self._request.read_body(visit, self._limits)
        self._trial = trial = await visit.run(lambda: trying.read(body), len(body), READ_INLINE_BYTES)
        return visit.find_scorer(trial.model)

    def take_decoder(self) -> Decoder:
        return self._decode

    def _decode(self, info: Info) -> tuple[None, ScoreRequest]:
        assert isinstance(info, ModelInfo)
        return None, self._trial.ask(info)

    async def encode(self, answer: ScoreReply, info: Info) -> Reply:
        assert isinstance(info, ModelInfo)
        trial, tokenizer = self._trial, self._service.catalog.tokenizer(info.name)
        self._request.cancel_on_disconnect()  # it may wait for its turn
        payload = await self._service.reader.run(
            self.caller.name, lambda: bodies.write(trying.answer(trial, info, answer, tokenizer))
        )
        return 200, [JSON, *_SAFE], payload


def _written(gathered: snapshot.Gathered, is_packed: bool) -> bytes:
    body = bodies.write(snapshot.make(gathered))
    return gzip.compress(body, compresslevel=1) if is_packed else body
