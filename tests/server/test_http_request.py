import asyncio
import gzip
import tracemalloc
import zlib

import pytest

from guerdon.errors import InvalidRequest, Overloaded, PayloadTooLarge
from guerdon.server.front.admission import Gate, Place
from guerdon.server.front.http_request import HttpRequest
from guerdon.settings.config import ServerConfig

MIB = 1 << 20


def read(gate: Gate, body: bytes, encoding: bytes, max_mb: int = 64) -> bytes:
    """What a request with this compressed body has."""

    async def receive() -> dict:
        return {"type": "http.request", "body": body, "more_body": False}

    async def reading() -> bytes:
        headers = [(b"content-encoding", encoding), (b"content-length", b"%d" % len(body))]
        with Place(gate) as place:
            found = await HttpRequest({"headers": headers}, receive).read_body(place, ServerConfig(max_body_mb=max_mb))
            assert gate.bytes.taken >= len(found)
        return found

    return asyncio.run(reading())


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 4 * MIB, 4 * MIB + 1, 9 * MIB])
def test_a_compressed_body_comes_back(encoding, compress, size):
    text = (bytes(range(256)) * (size // 256 + 1))[:size]
    assert read(Gate(ServerConfig()), compress(text, 1), encoding) == text


@pytest.mark.parametrize("size", [20 * MIB, 200 * MIB])
def test_a_bomb_takes_no_more_memory_than_there_is_room_for(size):
    """While others hold most of it."""
    bomb = zlib.compress(bytes(size))
    gate = Gate(ServerConfig(max_body_mb=64, max_bodies_mb=64))
    with Place(gate) as others:
        others.hold(50 * MIB)
        tracemalloc.start()
        with pytest.raises(Overloaded):
            read(gate, bomb, b"deflate")
        assert tracemalloc.get_traced_memory()[1] < 20 * MIB
        tracemalloc.stop()


def test_a_bomb_ends_at_the_largest_size():
    with pytest.raises(PayloadTooLarge, match="the decompressed body"):
        read(Gate(ServerConfig()), zlib.compress(bytes(9 * MIB)), b"deflate", max_mb=8)
    assert len(read(Gate(ServerConfig()), zlib.compress(bytes(8 * MIB)), b"deflate", max_mb=8)) == 8 * MIB


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (gzip.compress(b"x", mtime=0) * 2, "more follows"),
        (gzip.compress(bytes(100_000), mtime=0) + b"x", "more follows"),
        (gzip.compress(b"x", mtime=0)[:-1], "cut off"),
        (gzip.compress(bytes(9 * MIB), mtime=0)[:-9], "cut off"),
        (b"", "cut off"),
        (b"nothing compressed", "not what Content-Encoding says"),
    ],
)
def test_a_body_that_is_not_one_compressed_stream_is_refused(body, text):
    with pytest.raises(InvalidRequest, match=text):
        read(Gate(ServerConfig()), body, b"gzip")
