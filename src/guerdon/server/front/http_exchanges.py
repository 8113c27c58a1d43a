"""Requests to score over HTTP, as admission takes them: KServe's tensors, and the forms of other servers' protocols."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from itertools import chain

from guerdon.core import ModelInfo, ScoreReply
from guerdon.server.front.admission import Admission, Decoder, Visit
from guerdon.server.front.http_request import (
    JSON,
    READ_INLINE_BYTES,
    HttpRequest,
    Reply,
    Stream,
    answer_headers,
)
from guerdon.server.reading import INLINE_BYTES
from guerdon.settings.config import LimitsConfig
from guerdon.wire import bodies, kserve, kserve_answers
from guerdon.wire.bodies import InPieces
from guerdon.wire.forms.form import Form
from guerdon.wire.kserve import ServedReply
from guerdon.wire.schema import Info
from guerdon.wire.score_tensors import table_bytes

_BINARY = (b"content-type", b"application/octet-stream")

_STATED = re.compile(rb'"(timeout|priority)"\s*:\s*(\d{0,18})')
_LONG_JSON = 1 << 13
"""JSON that takes longer to parse than to search for a time-out, which may be too short for what waits."""
_ROW_BYTES = 1024
"""A row of an answer takes about as long to write as so many bytes of a body take to parse."""


class KServeExchange:
    """One request of KServe v2 to a model or a critic's operation; the URL names it."""

    def __init__(self, request: HttpRequest, limits: LimitsConfig) -> None:
        self.caller = request.caller
        self.num_bytes, self.num_tables = 0, 1
        self._request = request
        self._limits = limits

    async def read(self, visit: Visit) -> Info:
        """Finds the model first: what cannot be answered is refused before its body is read."""
        request, self._visit = self._request, visit
        info = visit.find(request.names["name"], request.names.get("version", ""))
        visit.enter(request.content_length(self._limits))
        self._body = await request.read_body(visit, self._limits)
        num_json = len(self._body) if request.json_length is None else min(request.json_length, len(self._body))
        if num_json >= _LONG_JSON:
            is_usual, timeout_s = await visit.run(functools.partial(_peek, self._body, num_json), num_json)
            if is_usual:
                visit.check_time(num_json, timeout_s)
        self.num_bytes = len(self._body) + num_json * (INLINE_BYTES // READ_INLINE_BYTES)  # it takes longer to read
        return info

    def take_decoder(self) -> Decoder:
        """Returns the codec's function on the body."""
        body, self._body = self._body, bytearray()
        return functools.partial(kserve.read, body, self._request.json_length)

    async def encode(self, answer: ServedReply, info: Info) -> Reply:
        """Returns JSON, and binary tensors if they were asked for."""
        tensors = self._visit.tensors
        assert tensors is not None

        def write() -> InPieces:
            return kserve_answers.encode(kserve.to_reply(answer, tensors, info), tensors)

        num_bytes = max(self.num_bytes, table_bytes(answer, info))
        make = functools.partial(_body, write, self._visit, self._request)
        payload, json_length = await self._visit.run(make, num_bytes)
        headers = answer_headers(answer)
        if json_length is None:
            headers.append(JSON)
        else:
            headers += (_BINARY, (b"inference-header-content-length", b"%d" % json_length))
        return 200, headers, payload


class FormExchange:
    """One request in a form: to the model that its body names, else the URL's `?model=`, else the default one."""

    num_bytes = 0  # the body is parsed in `read`, since it names the model

    def __init__(self, request: HttpRequest, form: Form, admission: Admission, limits: LimitsConfig) -> None:
        self.caller = request.caller
        self.num_tables = 0
        self._form = form
        self._request = request
        self._admission = admission
        self._limits = limits

    async def read(self, visit: Visit) -> ModelInfo:
        """Parses the body, and finds the model that it names."""
        request, query = self._request, self._request.query
        name = query.get("model", "")
        visit.label = self._admission.label(name, self._form.output)  # until the body names another model
        visit.enter(request.content_length(self._limits))
        body = await request.read_body(visit, self._limits)
        self._size = size = len(body)
        parse = functools.partial(self._form.read, body, query)
        del body
        self._asked = asked = await visit.run(parse, size, READ_INLINE_BYTES)
        self.num_tables = asked.num_tables
        del parse
        # A prompt before many responses makes more text than was sent.
        visit.reach(0 if asked.request is None else sum(map(len, asked.request.texts or ())))
        name, output = asked.model or name, asked.output or self._form.output
        visit.count_as(self._admission.label(name, output))
        self._visit = visit
        info = visit.find_scorer(name, output, has_samples=asked.request is not None)
        asked.check(info)
        return info

    def take_decoder(self) -> Decoder:
        """Returns a function that gives the samples, None if there are none."""
        return lambda _: (None, self._asked.request)

    async def encode(self, answer: ScoreReply, info: Info) -> Reply:
        """Returns the form's answer as JSON."""
        assert isinstance(info, ModelInfo)
        num_bytes = max(self._size, table_bytes(answer, info), len(answer.results) * _ROW_BYTES)

        def write() -> InPieces:
            return InPieces(bodies.write_in_pieces(self._asked.to_reply(answer, info)))

        make = functools.partial(_body, write, self._visit, self._request)
        payload, _ = await self._visit.run(make, num_bytes)
        return 200, [*answer_headers(answer), JSON], payload


def _peek(body: bytearray, num_json: int) -> tuple[bool, float | None]:
    """Returns whether a long request states no priority, and its time-out in seconds, before it is parsed.

    If it would be late, parsing it takes time from those in the queue. The time-out is the longest of any key of that
    name, else None; quotes within strings are escaped.
    """
    stated: list[tuple[bytes, bytes]] = _STATED.findall(body, 0, num_json)
    numbers = (int(number) / 1e6 for name, number in stated if name == b"timeout" and number)
    return all(name != b"priority" for name, _ in stated), max(numbers, default=None)


def _body(write: Callable[[], InPieces], visit: Visit, request: HttpRequest) -> tuple[bytes | Stream, int | None]:
    """Returns the body that `write` makes, as a whole if it is short, and its JSON's length if more follows."""
    pieces, num_bytes, json_length = write()
    start: list[bytes | memoryview] = []
    for piece in pieces:
        start.append(piece)
        if sum(map(len, start)) > bodies.BLOCK:
            break
    else:
        return b"".join(start), json_length
    if num_bytes is None and request.scope["http_version"] == "1.0":  # which knows no chunks
        num_bytes = sum(map(len, write().pieces))
    visit.keep_bytes()
    return Stream(num_bytes, chain(start, pieces), visit), json_length
