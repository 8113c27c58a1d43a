"""Decompresses gzip and zlib streams in bounded pieces: a megabyte of either may hold a gigabyte."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

PIECE = 1 << 16

ENCODINGS = ("gzip", "deflate")
"""The values of Content-Encoding that can be read."""


class Inflater:
    """Decompresses one stream, which comes in parts."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32)

    def pieces(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yields the decompressed next part of the stream, at most PIECE bytes at once; raises ValueError."""
        while data:
            if self._stream.eof:
                raise ValueError("more follows the compressed body")
            try:
                yield self._stream.decompress(data, PIECE)
            except zlib.error as e:
                raise ValueError(f"the body is not what Content-Encoding says: {e}") from e
            data = self._stream.unconsumed_tail or self._stream.unused_data

    def finish(self) -> None:
        """Raises ValueError if the stream has not come to its end."""
        if not self._stream.eof:
            raise ValueError("the compressed body is cut off")
