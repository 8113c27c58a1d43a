"""The page's routes: its files, which lie in `server/page/static`, and the JSON that they show."""

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
from pathlib import Path
from typing import Any

import orjson
from starlette.types import Receive, Scope

from guerdon.core import ModelInfo
from guerdon.errors import Overloaded, RouteNotFound
from guerdon.server import status
from guerdon.server.aside import off_loop
from guerdon.server.auth import Caller
from guerdon.server.batching.sharing import FairTurns
from guerdon.server.front.asgi import JSON, Headers, Reply, query_of, unless_left
from guerdon.server.front.body import read_body
from guerdon.server.front.gate import Gate, Place
from guerdon.server.front.guard import caller_of
from guerdon.server.metrics import UNKNOWN
from guerdon.server.page import asked, snapshot, trying
from guerdon.server.page.extremes import Kept
from guerdon.server.service import Service
from guerdon.settings.access import Role, is_loopback
from guerdon.settings.config import ServerConfig
from guerdon.wire import bodies

log = logging.getLogger(__name__)

FOLDER = Path(asked.__file__).parent / "static"
INDEX = "index.html"

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
"""How long a snapshot is good for whoever asks for the same: many pages cost no more than one."""

_MOST_WAITING = 8
"""Snapshots that one client may wait for at once; where there are no keys all are one client."""

_GZIP = re.compile(rb"gzip(\s*;\s*q=(1|0\.0*[1-9])[\d.]*)?")

_Key = tuple[asked.Asked, Role, str | None, bool]


class Pages:
    """The handlers of the page's routes."""

    def __init__(self, service: Service, config: ServerConfig, gate: Gate) -> None:
        self._service = service
        self._config = config
        self._gate = gate
        self._body_limits = (config.max_body_mb << 20, config.request_timeout_s, config.read_timeout_s)
        self._files = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in _KINDS}
        self._turns = FairTurns(1)
        self._num_waiting: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guerdon-page")
        self._kept: dict[_Key, tuple[float, bytes]] = {}
        if service.watch.extremes is not None and not service.access.names and not is_loopback(config.host):
            log.warning("samples' texts are kept for the page, and as there are no keys whoever reaches it reads them")

    async def index(self, scope: Scope, receive: Receive) -> Reply:
        """The page itself."""
        return self._file(scope, INDEX)

    async def file(self, scope: Scope, receive: Receive) -> Reply:
        """A file of the page, of those that are there, by its name."""
        return self._file(scope, scope["path_params"]["file"])

    async def snapshot(self, scope: Scope, receive: Receive) -> Reply:
        """What the page shows of the last `?window=` seconds, beside what `?reference=` names."""
        what = asked.read(query_of(scope), "window", "reference", "model")
        caller = caller_of(scope)
        if what.model:
            what = dataclasses.replace(what, model=self._service.catalog.scored_by(what.model).name)
        is_packed = _takes_gzip(scope)
        headers: Headers = [JSON, *_SAFE, (b"vary", b"accept-encoding")]
        if is_packed:
            headers.append((b"content-encoding", b"gzip"))
        if self._num_waiting[caller.name] >= _MOST_WAITING:
            raise Overloaded(f"{_MOST_WAITING} snapshots of yours are waited for; try again", _KEPT_S)
        self._num_waiting[caller.name] += 1
        try:
            body = await unless_left(self._snapshot(what, caller, _address(scope), is_packed), receive)
        finally:
            self._num_waiting[caller.name] -= 1
        return 200, headers, body

    async def _snapshot(self, what: asked.Asked, caller: Caller, address: str | None, is_packed: bool) -> bytes:
        """The snapshot as JSON, which is made one at a time, the clients taking turns."""
        key, watch = (what, caller.role, address, is_packed), self._service.watch
        run = asyncio.get_running_loop().run_in_executor
        async with self._turns.turn(caller.name):
            told = self._kept.get(key)
            if told is not None and time.monotonic() - told[0] <= _KEPT_S:
                return told[1]
            samples = await run(self._thread, watch.samples)
            service, critic = self._service, self._service.critic if caller.role >= Role.TRAIN else None
            server = self._server(caller, address)
            gathered = snapshot.gather(watch, service.catalog, critic, what, server, samples)
            body = await run(self._thread, _written, gathered, is_packed)
            now = time.monotonic()
            self._kept = {other: kept for other, kept in self._kept.items() if now - kept[0] <= _KEPT_S}
            self._kept[key] = (now, body)
            return body

    async def samples(self, scope: Scope, receive: Receive) -> Reply:
        """The best and the worst samples of `?model=` in the last `?window=` seconds, where they are kept."""
        caller, extremes = caller_of(scope), self._service.watch.extremes
        if extremes is None:
            raise RouteNotFound("this server keeps no samples' texts; start it with --dashboard-samples")
        if not self._may_read(caller):
            caller.need(Role.ADMIN, "to read samples' texts")
        query = query_of(scope)
        what = asked.read(query, "model", "window")
        info = self._service.catalog.scored_by(query.get("model", ""))
        start = self._service.watch.now() - what.window_s
        told: dict[str, Any] = {"model": info.name, "window_s": what.window_s, "best": [], "worst": []}
        if info.name in extremes:
            told["best"] = [self._sample(one, info) for one in extremes[info.name].best(start)]
            told["worst"] = [self._sample(one, info) for one in extremes[info.name].worst(start)]
        return 200, [JSON, *_SAFE], orjson.dumps(told)

    async def try_it(self, scope: Scope, receive: Receive) -> Reply:
        """Scores a prompt and responses, and tells of each token."""
        service, client = self._service, caller_of(scope).name
        with service.metrics.request(UNKNOWN) as counted, Place(self._gate, client) as place:
            service.check_ready()
            _, body = await read_body(scope, receive, place, *self._body_limits)
            trial = await off_loop(lambda: trying.read(bodies.parse(body)), len(body), 65_536)
            info = service.catalog.scored_by(trial.model)
            counted.model = info.name
            tokenizer = service.catalog.tokenizer(info.name)
            reply = await unless_left(service.score(info.name, trial.request, client), receive)
            payload = await unless_left(
                service.reader.run(client, lambda: bodies.write(trying.answer(trial, info, reply, tokenizer))), receive
            )
        return 200, [JSON, *_SAFE], payload

    def _file(self, scope: Scope, name: str) -> Reply:
        body = self._files.get(name)
        if body is None:
            raise RouteNotFound(f"no such path: {scope['path']}; the page is at /")
        tag = b'"%s"' % hashlib.sha256(body).hexdigest()[:16].encode()
        headers: Headers = [(b"content-type", _KINDS[Path(name).suffix]), (b"etag", tag), *_SAFE]
        if tag in dict(scope["headers"]).get(b"if-none-match", b""):
            return 304, headers, b""
        return 200, headers, body

    def _server(self, caller: Caller, address: str | None) -> dict[str, Any]:
        service, told = self._service, status.server()
        why = service.why_not_ready()
        if why and service.critic is not None and service.critic.fault is not None and caller.role < Role.TRAIN:
            why = "the critic has broken down; whoever has a key of the role train is told why"
        return {
            "is_ready": service.is_ready(),
            "why": why,
            "has_keys": bool(service.access.names),
            "name": told["name"],
            "version": told["version"],
            "address": address,
            "samples_allowed": self._service.watch.extremes is not None and self._may_read(caller),
            "role": caller.role.name.lower(),
            "request_timeout_s": self._config.request_timeout_s,
        }

    def _may_read(self, caller: Caller) -> bool:
        """Whether the caller may see samples' texts: where there are keys, only an admin."""
        return not self._service.access.names or caller.role >= Role.ADMIN

    def _sample(self, one: Kept, info: ModelInfo) -> dict[str, Any]:
        prompt, response = one.prompt, one.response
        tokenizer = self._service.catalog.tokenizer(info.name)
        if one.tokens is not None and tokenizer is not None and one.vocabulary == info.vocabulary:
            pieces = tokenizer.pieces(one.tokens)
            prompt = "".join(pieces[: one.num_prompt_tokens]) or None
            response = "".join(pieces[one.num_prompt_tokens :])
        return {
            "time": one.time,
            "reward": one.reward,
            "num_tokens": one.num_tokens,
            "weights_version": one.weights_version,
            "prompt": prompt,
            "response": response,
            "is_cut": one.is_cut,
            "attributes" if info.kind != "sum" else "components": one.attributes,
        }


def _written(gathered: snapshot.Gathered, is_packed: bool) -> bytes:
    body = bodies.write(snapshot.make(gathered))
    return gzip.compress(body, compresslevel=1) if is_packed else body


def _takes_gzip(scope: Scope) -> bool:
    taken = b",".join(value for name, value in scope["headers"] if name == b"accept-encoding").lower().split(b",")
    return any(_GZIP.fullmatch(coding.strip()) for coding in taken)


def _address(scope: Scope) -> str | None:
    server = scope.get("server")
    return None if not server or server[1] is None else f"{server[0]}:{server[1]}"
