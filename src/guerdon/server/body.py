"""The body of a request: read within bounds of size and time, decompressed within the same, and worked on aside."""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from guerdon.errors import Cancelled, DeadlineExceeded, InvalidRequest, PayloadTooLarge
from guerdon.server.gate import Place
from guerdon.wire.kserve import InferRequest

T = TypeVar("T")

INLINE_BYTES = 1 << 20
"""A larger body is decoded in a thread, since the event loop would stand still meanwhile."""

_INFLATE_INLINE_BYTES = 65_536


class UploadTooSlow(DeadlineExceeded):
    """The body did not come within the time that it has; what still comes of it is not read."""


async def off_loop(work: Callable[[], T], num_bytes: int, inline_bytes: int = INLINE_BYTES) -> T:
    """What `work` returns, which is called in a thread where the `num_bytes` that it handles are many."""
    return work() if num_bytes <= inline_bytes else await asyncio.to_thread(work)


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


async def read_body(
    scope: Scope, receive: Receive, place: Place, max_bytes: int, timeout_s: float
) -> tuple[int | None, bytes]:
    """The JSON's length as the headers tell it, and the whole body, decompressed; `place` holds its bytes.

    Raises PayloadTooLarge as soon as it is known to be larger than `max_bytes`, Overloaded where the place has no
    room for it, UploadTooSlow where it takes longer than `timeout_s`, Cancelled where the client leaves.
    """
    header_length, encoding = None, b""
    for key, value in scope["headers"]:
        if key == b"content-length":
            if int(value) > max_bytes:
                raise _too_large(f"the body of {int(value)} bytes", max_bytes)
            place.hold(int(value))
        elif key == b"inference-header-content-length":
            if not value.isdigit() or len(value) > 12:
                raise InvalidRequest("Inference-Header-Content-Length must be an integer from 0 up")
            header_length = int(value)
        elif key == b"content-encoding":
            encoding = value.strip().lower()
    try:
        async with asyncio.timeout(timeout_s):
            body = await _received(receive, place, max_bytes)
    except TimeoutError as e:
        raise UploadTooSlow(f"the body did not come within {timeout_s:g} s; send it faster, or fewer rows") from e
    if encoding not in (b"", b"identity"):
        if encoding not in (b"gzip", b"deflate"):
            raise InvalidRequest(
                f"Content-Encoding {encoding.decode('latin-1')!r} is not known here: use gzip or deflate"
            )
        body = await off_loop(functools.partial(_inflate, body, max_bytes), len(body), _INFLATE_INLINE_BYTES)
        place.hold(len(body))
    return header_length, body


async def _received(receive: Receive, place: Place, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_bytes:
            raise _too_large("the body", max_bytes)
        place.reach(size)
        has_more = message.get("more_body", False)
    return b"".join(chunks)


def _inflate(body: bytes, max_bytes: int) -> bytes:
    """What a gzip or zlib stream holds, never more than `max_bytes` of it."""
    stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        inflated = stream.decompress(body, max_bytes + 1)
    except zlib.error as e:
        raise InvalidRequest(f"the body is not what Content-Encoding says: {e}") from e
    if len(inflated) > max_bytes:
        raise _too_large("the decompressed body", max_bytes)
    if not stream.eof or stream.unused_data:
        raise InvalidRequest("the compressed body is cut off, or more follows it")
    return inflated


def _too_large(what: str, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"{what} is larger than the {max_bytes >> 20} MiB that this server accepts; send fewer rows")
