"""One HTTP request as its handlers see it: head, body within bounds of size and time, and the client's disconnect."""

from __future__ import annotations

import asyncio
import functools
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from guerdon.core import ScoreReply
from guerdon.errors import Cancelled, DeadlineExceeded, GuerdonError, InvalidRequest, PayloadTooLarge, TrainFailed
from guerdon.server.auth import Caller
from guerdon.server.front.admission import Place
from guerdon.server.reading import INLINE_BYTES
from guerdon.settings.config import LimitsConfig
from guerdon.wire import bodies
from guerdon.wire.inflate import PIECE, Inflater
from guerdon.wire.kserve import ServedReply

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Stream:
    """A large body of `num_bytes`, None if unknown, of which only the piece that is being sent is in memory.

    `place` makes the pieces, beside the event loop, and holds its bytes until all are sent.
    """

    num_bytes: int | None
    pieces: Iterable[bytes | memoryview]
    place: Place


Reply = tuple[int, Headers, bytes | Stream]
"""Status, headers and body."""

JSON = (b"content-type", b"application/json")

CONNECTION = "guerdon.connection"
"""The scope's key for the connection, if it is one of ours; it learns its key's holder."""

READ_INLINE_BYTES = 65_536
"""Longer JSON is read in a thread: ten thousand samples may stand in it."""

LEAST_BYTES_PER_S = 1 << 16
"""A client that reads a large answer more slowly is given up, after a while."""

_OF_MODEL = re.compile(r"/models/([^/]+)(/.+)")
_WATCH_AFTER_S = 0.01
_INFLATE_INLINE_BYTES = 65_536
_INFLATE_READ_BYTES = 65_536
_INFLATE_STEP_BYTES = 4 << 20


class UploadTooSlow(DeadlineExceeded):
    """The body did not come in time; the rest of it is not read."""


class HttpRequest:
    """A request whose head is there; `caller` and `names`, the path's parameters, are set as it is admitted."""

    caller: Caller
    names: dict[str, str]

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.receive = receive
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        path, root = scope["path"], scope.get("root_path", "")
        path = path[len(root) :] if root and path.startswith(root + "/") else path
        found = _OF_MODEL.fullmatch(path)
        self.path: str = path if found is None else found[2]
        """The path without the application's prefix, such as Ray Serve's route prefix, and without a model's."""
        self._model = "" if found is None else found[1]  # as in /models/NAME/v1/completions
        self.json_length: int | None = None
        """The length of the body's JSON if binary tensors follow it; known once the body is read."""
        self.has_left = False
        self._watch: asyncio.TimerHandle | asyncio.Task[None] | None = None

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters, also those without a value: a misspelt name is refused either way."""
        found = dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))
        return {"model": self._model, **found} if self._model else found

    def content_length(self, limits: LimitsConfig) -> int:
        """Returns the size of the body as announced, 0 if it is not; raises PayloadTooLarge."""
        num_bytes, max_bytes = int(self.headers.get(b"content-length", 0)), limits.max_body_mb << 20
        if num_bytes > max_bytes:
            raise _too_large(f"the body of {num_bytes} bytes", max_bytes)
        return num_bytes

    async def read_body(self, place: Place, limits: LimitsConfig) -> bytearray:
        """Reads the whole body, decompressed; `place` holds its bytes.

        Raises PayloadTooLarge as soon as it is known to be larger than the limit, Overloaded if the place has no room
        for it, UploadTooSlow if it takes too long in all or nothing more of it comes, Cancelled if the client
        disconnects.
        """
        max_bytes = limits.max_body_mb << 20
        place.reach(self.content_length(limits))
        encoding = self.headers.get(b"content-encoding", b"").strip().lower()
        if encoding not in (b"", b"identity", b"gzip", b"deflate"):
            raise InvalidRequest(
                f"Content-Encoding {encoding.decode('latin-1')!r} is not known here: use gzip or deflate"
            )
        if (value := self.headers.get(b"inference-header-content-length")) is not None:
            if not value.isdigit() or len(value) > 12:
                raise InvalidRequest("Inference-Header-Content-Length must be an integer from 0 up")
            self.json_length = int(value)
        loop = asyncio.get_running_loop()
        ends = more_by = loop.time() + limits.request_timeout_s
        body = bytearray()
        has_more = True
        try:
            async with asyncio.timeout(None) as waiting:
                while has_more:
                    more_by = loop.time() + limits.read_timeout_s
                    waiting.reschedule(min(ends, more_by))
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise Cancelled("the client left")
                    body += message.get("body", b"")
                    if len(body) > max_bytes:
                        raise _too_large("the body", max_bytes)
                    place.reach(len(body))
                    has_more = message.get("more_body", False)
        except TimeoutError as e:
            if ends <= more_by:
                why = f"the body did not come within {limits.request_timeout_s:g} s"
            else:
                why = f"nothing more of the body came for {limits.read_timeout_s:g} s"
            raise UploadTooSlow(f"{why}; send it faster, or fewer rows") from e
        if encoding in (b"gzip", b"deflate"):
            body = await _inflate(body, place, max_bytes)
            place.hold(len(body))
        text = memoryview(body)[: self.json_length]
        if len(text) > READ_INLINE_BYTES:  # what is shorter is parsed at once, and alone
            memory = await place.run(functools.partial(bodies.memory, text), len(text))
            place.reach(memory + len(body) - len(text))  # parsed JSON takes more memory than its text
        return body

    def cancel_on_disconnect(self) -> None:
        """From now on cancels this task if the client disconnects, and sets `has_left`; until `finish`.

        The connection is only watched once the request takes longer than a moment, so a quick one costs nothing.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        async def watch() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass
            assert task is not None
            self.has_left = True
            task.cancel()

        def start() -> None:
            self._watch = loop.create_task(watch())

        self._watch = loop.call_later(_WATCH_AFTER_S, start)

    def finish(self) -> None:
        """Watches the connection no longer."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


Handler = Callable[[HttpRequest], Awaitable[Reply]]


async def send_reply(send: Send, reply: Reply, *, more_body: bool = False) -> None:
    """Sends status, headers and body; with `more_body` the connection stays open for the caller."""
    status, headers, body = reply
    assert isinstance(body, bytes)
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


def error_header(kind: type[GuerdonError]) -> tuple[bytes, bytes]:
    """Returns the header that names the class of an error."""
    return b"guerdon-error", kind.__name__.encode()


def error_headers(error: GuerdonError) -> Headers:
    """Returns the headers, or gRPC's metadata, on an error: its class, when to try again, and TrainFailed's steps."""
    headers: Headers = [error_header(type(error))]
    if isinstance(error, TrainFailed):
        headers.append((b"guerdon-num-steps", b"%d" % error.num_steps))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
    return headers


async def send_stream(send: Send, reply: Reply, write_timeout_s: float, has_left: Callable[[], bool]) -> bool:
    """Sends status, headers and a body in pieces, each when the client has read those before it.

    Returns False if the client reads too slowly; ends early if it `has_left`.
    """
    status, headers, body = reply
    assert isinstance(body, Stream)
    if body.num_bytes is not None:
        headers.append((b"content-length", b"%d" % body.num_bytes))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    loop, pieces, left_s = asyncio.get_running_loop(), iter(body.pieces), write_timeout_s
    piece: bytes | memoryview | None = b""
    while piece is not None and not has_left():
        following = await body.place.run(lambda: next(pieces, None), INLINE_BYTES + 1)
        if following is None:
            body.place.release()  # before the client has all, and may ask again
        started = loop.time()
        try:
            async with asyncio.timeout(left_s):
                await send({"type": "http.response.body", "body": bytes(piece), "more_body": following is not None})
        except TimeoutError:
            return False
        left_s += len(piece) / LEAST_BYTES_PER_S - (loop.time() - started)
        piece = following
    return True


def version_header(weights_version: str) -> tuple[bytes, bytes]:
    """Returns the header that names the weights that gave the answer."""
    return b"guerdon-weights-version", weights_version.encode("latin-1", "replace")


def answer_headers(answer: ServedReply) -> Headers:
    """Returns the headers, or gRPC's metadata, on an answer: how long its samples took, and by which weights."""
    headers: Headers = []
    if isinstance(answer, ScoreReply):
        headers.append((b"guerdon-queue-ms", b"%.3f" % (answer.queue_s * 1e3)))
        headers.append((b"guerdon-compute-ms", b"%.3f" % (answer.compute_s * 1e3)))
    if answer is not None:
        headers.append(version_header(answer.weights_version))
    return headers


async def _inflate(body: bytearray, place: Place, max_bytes: int) -> bytearray:
    """Decompresses a gzip or zlib stream, within `max_bytes` and the room of the place."""
    made, pieces = bytearray(), _inflated(body)
    while True:
        place.hold(min(len(body) + len(made) + _INFLATE_STEP_BYTES, max_bytes))
        is_done = await place.run(lambda: _extend(made, pieces), len(body) + len(made), _INFLATE_INLINE_BYTES)
        if len(made) > max_bytes:
            raise _too_large("the decompressed body", max_bytes)
        if is_done:
            return made


def _inflated(body: bytearray) -> Iterator[bytes]:
    inflater, view = Inflater(), memoryview(body)
    for start in range(0, len(body), _INFLATE_READ_BYTES):
        yield from inflater.pieces(view[start : start + _INFLATE_READ_BYTES])
    inflater.finish()


def _extend(made: bytearray, pieces: Iterator[bytes]) -> bool:
    """Appends about _INFLATE_STEP_BYTES; returns whether that was all. Raises InvalidRequest."""
    ends = len(made) + _INFLATE_STEP_BYTES - PIECE
    try:
        for piece in pieces:
            made += piece
            if len(made) > ends:
                return False
    except ValueError as e:
        raise InvalidRequest(str(e)) from e
    return True


def _too_large(what: str, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"{what} is larger than the {max_bytes >> 20} MiB that this server accepts; send fewer rows")
