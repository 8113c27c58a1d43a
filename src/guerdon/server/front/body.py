"""The body of a request: read within bounds of size and time, and decompressed within the same."""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope

from guerdon.errors import Cancelled, DeadlineExceeded, InvalidRequest, PayloadTooLarge
from guerdon.server.aside import off_loop
from guerdon.server.front.gate import Place
from guerdon.wire import bodies
from guerdon.wire.kserve import InferRequest

_WEIGHED_BYTES = 65_536
_INFLATE_INLINE_BYTES = 65_536
_INFLATE_READ_BYTES = 65_536
_INFLATE_STEP_BYTES = 4 << 20


class UploadTooSlow(DeadlineExceeded):
    """The body did not come within the time that it has; what still comes of it is not read."""


class Coming:
    """A request to a critic whose bytes are all there: `decode` gives its protocol's form, and what it asks.

    `place` holds its bytes at the gate. `form` is there once it was read, without its tensors.
    """

    form: InferRequest

    def __init__(self, decode: Callable[[], tuple[InferRequest, Any]], num_bytes: int, place: Place) -> None:
        self._decode: Callable[[], tuple[InferRequest, Any]] | None = decode
        self._num_bytes = num_bytes
        self._place = place

    async def read(self) -> Any:
        """What is asked; from now on only that holds the bytes. Raises InvalidRequest."""
        decode, self._decode = self._decode, None
        assert decode is not None
        self.form, asked = await off_loop(decode, self._num_bytes)
        self.form.inputs = {}
        return asked

    def release(self) -> None:
        """Gives its bytes at the gate back."""
        self._place.hold(0)


def announced(scope: Scope, max_bytes: int) -> int:
    """The bytes that the body has on its way, 0 where the headers do not tell; PayloadTooLarge where they are more."""
    num_bytes = next((int(value) for key, value in scope["headers"] if key == b"content-length"), 0)
    if num_bytes > max_bytes:
        raise _too_large(f"the body of {num_bytes} bytes", max_bytes)
    return num_bytes


async def read_body(
    scope: Scope, receive: Receive, place: Place, max_bytes: int, timeout_s: float, read_timeout_s: float
) -> tuple[int | None, bytes]:
    """The JSON's length as the headers tell it, and the whole body, decompressed; `place` holds its bytes.

    Raises PayloadTooLarge as soon as it is known to be larger than `max_bytes`, Overloaded where the place has no
    room for it, UploadTooSlow where it takes longer than `timeout_s`, or nothing more of it comes for `read_timeout_s`,
    Cancelled where the client leaves.
    """
    header_length, encoding = None, b""
    if (num_bytes := announced(scope, max_bytes)) > 0:
        place.hold(num_bytes)
    for key, value in scope["headers"]:
        if key == b"inference-header-content-length":
            if not value.isdigit() or len(value) > 12:
                raise InvalidRequest("Inference-Header-Content-Length must be an integer from 0 up")
            header_length = int(value)
        elif key == b"content-encoding":
            encoding = value.strip().lower()
    if encoding not in (b"", b"identity", b"gzip", b"deflate"):
        raise InvalidRequest(f"Content-Encoding {encoding.decode('latin-1')!r} is not known here: use gzip or deflate")
    body = await _received(receive, place, max_bytes, timeout_s, read_timeout_s)
    if encoding in (b"gzip", b"deflate"):
        body = await _inflated(body, place, max_bytes)
        place.hold(len(body))
    text = memoryview(body)[:header_length]
    if len(text) > _WEIGHED_BYTES:  # what is shorter is read at once, and alone
        memory = await off_loop(functools.partial(bodies.memory, text), len(text))
        # What JSON is read into takes more than was sent; what one body may have always fits.
        place.reach(min(memory + len(body) - len(text), max_bytes))
    return header_length, body


async def _received(receive: Receive, place: Place, max_bytes: int, timeout_s: float, read_timeout_s: float) -> bytes:
    loop = asyncio.get_running_loop()
    ends = loop.time() + timeout_s
    chunks: list[bytes] = []
    size, has_more = 0, True
    try:
        async with asyncio.timeout(None) as waiting:
            while has_more:
                more_by = loop.time() + read_timeout_s
                waiting.reschedule(min(ends, more_by))
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client left")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > max_bytes:
                    raise _too_large("the body", max_bytes)
                place.reach(size)
                has_more = message.get("more_body", False)
    except TimeoutError as e:
        if ends <= more_by:
            told = f"the body did not come within {timeout_s:g} s"
        else:
            told = f"nothing more of the body came for {read_timeout_s:g} s"
        raise UploadTooSlow(f"{told}; send it faster, or fewer rows") from e
    return b"".join(chunks)


async def _inflated(body: bytes, place: Place, max_bytes: int) -> bytes:
    """What a gzip or zlib stream holds, never more than `max_bytes` of it, and no more than the place has room for."""
    inflating = _Inflating(body, max_bytes)
    while not inflating.is_done:
        place.hold(min(len(body) + inflating.num_bytes + _INFLATE_STEP_BYTES, max_bytes))
        await off_loop(inflating.step, len(body) + inflating.num_bytes, _INFLATE_INLINE_BYTES)
        if inflating.num_bytes > max_bytes:
            raise _too_large("the decompressed body", max_bytes)
    return b"".join(inflating.chunks)


class _Inflating:
    """A compressed body on its way to what it holds, a step at a time."""

    def __init__(self, body: bytes, max_bytes: int) -> None:
        self.chunks: list[bytes] = []
        self.num_bytes = 0
        self.is_done = False
        self._body = memoryview(body)
        self._most = max_bytes
        self._position = 0
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32)

    def step(self) -> None:
        """Adds at most _INFLATE_STEP_BYTES to the chunks, and none beyond one too many; raises InvalidRequest."""
        stream, ends = self._stream, min(self.num_bytes + _INFLATE_STEP_BYTES, self._most + 1)
        while self.num_bytes < ends and not self.is_done:
            given: bytes | memoryview = stream.unconsumed_tail
            if not given:
                given = self._body[self._position : self._position + _INFLATE_READ_BYTES]
                self._position += len(given)
            try:
                chunk = stream.decompress(given, ends - self.num_bytes)
            except zlib.error as e:
                raise InvalidRequest(f"the body is not what Content-Encoding says: {e}") from e
            self.num_bytes += len(chunk)
            self.chunks.append(chunk)
            if stream.eof:
                if stream.unused_data or self._position < len(self._body):
                    raise InvalidRequest("more follows the compressed body")
                self.is_done = True
            elif not given:
                raise InvalidRequest("the compressed body is cut off")


def _too_large(what: str, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"{what} is larger than the {max_bytes >> 20} MiB that this server accepts; send fewer rows")
