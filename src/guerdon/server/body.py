"""The body of an HTTP request: read within a bound, and decompressed within the same."""

from __future__ import annotations

import asyncio
import zlib

from starlette.types import Receive, Scope

from guerdon.errors import Cancelled, InvalidRequest, PayloadTooLarge

_INFLATE_INLINE_BYTES = 65_536


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> tuple[int | None, bytes]:
    """The JSON's length as the headers tell it, and the whole body, decompressed.

    Raises PayloadTooLarge as soon as it is known to be larger than `max_bytes`, Cancelled where the client leaves.
    """
    header_length, encoding = None, b""
    for key, value in scope["headers"]:
        if key == b"content-length":
            if int(value) > max_bytes:
                raise _too_large(f"the body of {int(value)} bytes", max_bytes)
        elif key == b"inference-header-content-length":
            if not value.isdigit() or len(value) > 12:
                raise InvalidRequest("Inference-Header-Content-Length must be an integer from 0 up")
            header_length = int(value)
        elif key == b"content-encoding":
            encoding = value.strip().lower()
    message = await receive()
    body = message.get("body", b"")
    if message.get("more_body", False):
        chunks, size = [body], len(body)
        while message.get("more_body", False):
            message = await receive()
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > max_bytes:
                raise _too_large("the body", max_bytes)
        body = b"".join(chunks)
    if message["type"] == "http.disconnect":
        raise Cancelled("the client left")
    if len(body) > max_bytes:
        raise _too_large("the body", max_bytes)
    if encoding not in (b"", b"identity"):
        if encoding not in (b"gzip", b"deflate"):
            raise InvalidRequest(
                f"Content-Encoding {encoding.decode('latin-1')!r} is not known here: use gzip or deflate"
            )
        inline = len(body) <= _INFLATE_INLINE_BYTES
        body = _inflate(body, max_bytes) if inline else await asyncio.to_thread(_inflate, body, max_bytes)
    return header_length, body


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
