"""Serving the forms of other servers' protocols: whatever JSON they speak, each request goes the way of KServe's."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from starlette.types import Receive, Scope

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import UnknownModel
from guerdon.server import tracing
from guerdon.server.aside import off_loop
from guerdon.server.front.asgi import JSON, Reply, query_of, score_headers, unless_left
from guerdon.server.front.body import read_body
from guerdon.server.front.gate import Gate, Place
from guerdon.server.front.guard import caller_of
from guerdon.server.metrics import UNKNOWN
from guerdon.server.service import Service
from guerdon.settings.config import ServerConfig
from guerdon.wire import bodies, pooling, sglang, tei, trainers
from guerdon.wire.forms import Asked, Form

FORMS: dict[str, Form] = trainers.FORMS | pooling.FORMS | sglang.FORMS | tei.FORMS
"""All forms by the path at which they are served."""

_READ_INLINE_BYTES = 65_536
"""A larger body is read in a thread: ten thousand samples may stand in one."""

_ROW_BYTES = 1024
"""A row of an answer takes about as long as so many bytes of a body, however few it has itself."""


class FormHandler:
    """Answers the requests of one form."""

    def __init__(self, form: Form, service: Service, config: ServerConfig, gate: Gate) -> None:
        self._form = form
        self._service = service
        self._body_limits = (config.max_body_mb << 20, config.request_timeout_s, config.read_timeout_s)
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive) -> Reply:
        """The answer; of the model that the body names, else the URL's `?model=`, else the default one."""
        service, query = self._service, query_of(scope)
        name = query.get("model", "")
        # Until the body tells of another model, the request is counted as one to this.
        client = caller_of(scope).name
        with service.metrics.request(self._counted_as(name)) as counted, Place(self._gate, client) as place:
            service.check_ready()
            _, body = await read_body(scope, receive, place, *self._body_limits)
            size = len(body)
            read = functools.partial(self._read, body, query)
            del body
            asked = await off_loop(read, size, _READ_INLINE_BYTES)
            del read
            # A prompt before many responses makes more of them than came; what one body may have always fits.
            place.reach(min(_num_characters(asked), self._body_limits[0]))
            name = asked.model or name
            counted.model = self._counted_as(name)
            tracing.tell(model=counted.model)
            info = service.catalog.scored_by(name)
            asked.check(info)
            reply = ScoreReply([], [], info.weights_version)
            if asked.request is not None:
                reply = await unless_left(service.score(info.name, asked.request, client), receive)
            write = functools.partial(_write, asked, reply, info)
            payload = await off_loop(write, max(size, len(reply.results) * _ROW_BYTES))
        return 200, [*score_headers(reply), JSON], payload

    def _read(self, body: bytes, query: Mapping[str, str]) -> Asked:
        return self._form.read(bodies.parse(body), query)

    def _counted_as(self, name: str) -> str:
        try:
            return self._service.catalog.scored_by(name).name
        except UnknownModel:
            return UNKNOWN


def _write(asked: Asked, reply: ScoreReply, info: ModelInfo) -> bytes:
    return bodies.write(asked.answer(reply, info))


def _num_characters(asked: Asked) -> int:
    return sum(map(len, asked.request.texts or ())) if asked.request is not None else 0
