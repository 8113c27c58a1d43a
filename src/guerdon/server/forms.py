"""Serving the forms of other servers' protocols: whatever JSON they speak, each request goes the way of KServe's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope

from guerdon.config import ServerConfig
from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import Unavailable, UnknownModel
from guerdon.metrics import UNKNOWN
from guerdon.server.asgi import JSON, Reply, score_headers, unless_left
from guerdon.server.body import off_loop, read_body
from guerdon.server.gate import Gate, Place
from guerdon.server.service import Service
from guerdon.wire import forms, pooling, trainers
from guerdon.wire.forms import Asked, Form

FORMS: dict[str, Form] = trainers.FORMS | pooling.FORMS
"""All forms by the path at which they are served."""


class FormHandler:
    """Answers the requests of one form."""

    def __init__(self, form: Form, service: Service, config: ServerConfig, gate: Gate) -> None:
        self._form = form
        self._service = service
        self._body_limits = (config.max_body_mb << 20, config.request_timeout_s)
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive) -> Reply:
        """The answer; of the model that the body names, else the URL's `?model=`, else the default one."""
        service, query = self._service, dict(parse_qsl(scope["query_string"].decode("latin-1")))
        name = query.get("model", "")
        # Until the body tells of another model, the request is counted as one to this.
        with service.metrics.request(self._counted_as(name)) as counted, Place(self._gate) as place:
            if not service.ready:
                raise Unavailable("the server is not ready: it is starting or stopping")
            _, body = await read_body(scope, receive, place, *self._body_limits)
            size = len(body)
            read = functools.partial(self._read, body, query)
            del body
            asked = await off_loop(read, size)
            del read
            name = asked.model or name
            counted.model = self._counted_as(name)
            info = service.scored_by(name)
            reply = ScoreReply([], [], info.weights_version)
            if asked.request is not None:
                reply = await unless_left(service.score(info.name, asked.request), receive)
            payload = await off_loop(functools.partial(_write, asked, reply, info), size)
        return 200, [*score_headers(reply), JSON], payload

    def _read(self, body: bytes, query: Mapping[str, str]) -> Asked:
        return self._form.read(forms.parse(body), query)

    def _counted_as(self, name: str) -> str:
        try:
            return self._service.scored_by(name).name
        except UnknownModel:
            return UNKNOWN


def _write(asked: Asked, reply: ScoreReply, info: ModelInfo) -> bytes:
    return forms.write(asked.answer(reply, info))
