"""Compressed answers of a judge's server: they are read, and one that holds far more than it may takes no memory."""

import asyncio
import gzip
import json
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from guerdon.errors import SampleFailed
from guerdon.server.chat_judge.answer_cache import Flight
from guerdon.server.chat_judge.calling import MOST_BYTES, Caller
from guerdon.server.metrics import Metrics
from guerdon.settings.chat_judges import ChatJudgeConfig
from processes import by_itself

ANSWER = json.dumps({"choices": [{"message": {"content": "Score: 7"}, "finish_reason": "stop"}]}).encode()


@contextmanager
def answering(body: bytes, encoding: str) -> Iterator[str]:
    """The URL of a server that always answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Accept-Encoding"] == "gzip, deflate"
            self.send_response(200)
            self.send_header("Content-Encoding", encoding)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


def said(body: bytes, encoding: str) -> str:
    async def call(url: str) -> str:
        config = ChatJudgeConfig(name="j", url=url, model="m", template="{response}", call_retries=0)
        caller = Caller(config, "", Metrics())
        try:
            return (await caller.call(b"{}", Flight())).text
        finally:
            await caller.close()

    with answering(body, encoding) as url:
        return asyncio.run(call(url))


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (ANSWER, "identity"),
        (gzip.compress(ANSWER), "gzip"),
        (zlib.compress(ANSWER), "Deflate"),
        (gzip.compress(b" " * 1_000_000 + ANSWER), "gzip"),
    ],
    ids=["plain", "gzip", "deflate", "long"],
)
def test_answers_are_read_in_the_encodings_that_are_asked_for(body: bytes, encoding: str) -> None:
    assert said(body, encoding) == "Score: 7"


@pytest.mark.parametrize(
    ("body", "encoding", "message"),
    [
        (gzip.compress(ANSWER)[:-9], "gzip", "cut off"),
        (gzip.compress(ANSWER) + b"more", "gzip", "more follows"),
        (ANSWER, "gzip", "cannot be decompressed"),
        (ANSWER, "br", "the encoding 'br', not asked for"),
    ],
    ids=["cut off", "more", "plain", "unknown"],
)
def test_what_cannot_be_decompressed_is_told(body: bytes, encoding: str, message: str) -> None:
    with pytest.raises(SampleFailed, match=message):
        said(body, encoding)


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@by_itself
def test_a_bomb_takes_no_more_memory_than_an_answer_may() -> None:
    packer = zlib.compressobj(9, wbits=31)
    megabyte = bytes(1 << 20)
    bomb = b"".join(packer.compress(megabyte) for _ in range(400)) + packer.flush()
    assert said(gzip.compress(ANSWER), "gzip") == "Score: 7"
    before = peak_bytes()
    with pytest.raises(SampleFailed, match="more than 16 MiB"):
        said(bomb, "gzip")
    assert peak_bytes() - before < 2 * MOST_BYTES
