"""Requests and waiting, shared by the tests of the transports."""

import asyncio
import functools
import http.client
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import orjson
import pytest

from guerdon.server.runtime import RunningServer

INFER = "/v2/models/reward_model/infer"


def body_of(rows: list[list[int]], **more) -> bytes:
    """A JSON request to score token rows; `more` are further keys of its object."""
    width = max(map(len, rows))
    tokens = {"name": "tokens", "shape": [len(rows), width], "datatype": "INT64"}
    lengths = {"name": "sequence_lengths", "shape": [len(rows), 1], "datatype": "INT64"}
    tokens["data"] = [row + [0] * (width - len(row)) for row in rows]
    lengths["data"] = [len(row) for row in rows]
    return orjson.dumps({"inputs": [tokens, lengths], **more})


def posted(body: bytes, length: int | None = None, path: str = INFER) -> bytes:
    """A POST as it goes over a connection, which announces so many bytes, else the body's."""
    length = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), length, body)


def connect(server: RunningServer, receive_bytes: int | None = None) -> socket.socket:
    found = socket.socket()
    if receive_bytes is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    found.settimeout(30)
    found.connect(("127.0.0.1", httpx.URL(server.http_url).port))
    return found


def until_closed(connection: socket.socket) -> bytes:
    """All that the server still sends."""
    parts = []
    try:
        while data := connection.recv(1 << 20):
            parts.append(data)
    except ConnectionResetError:
        parts.append(b"(reset)")
    return b"".join(parts)


def next_status(connection: socket.socket) -> int:
    """The status of the next answer, which is read whole: head and body may come in packets of their own."""
    with http.client.HTTPResponse(connection) as answer:
        answer.begin()
        answer.read()
        return answer.status


_ECHO = """\
from guerdon.settings.config import ServerConfig
from guerdon.server.runtime import run
from server.echo_service import EchoService
config = ServerConfig(port=0, grpc_port=0, **{settings})
run(EchoService(), config, on_started=lambda http, grpc: print(http, grpc, flush=True))
print("ended", flush=True)
"""


@contextmanager
def echo_process(**settings: int) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """An EchoService in a process of its own, and its URLs for HTTP and gRPC; at its orderly end it prints `ended`."""
    command = [sys.executable, "-c", _ECHO.format(settings=settings)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        http_url, grpc_url = process.stdout.readline().split()
        try:
            yield process, http_url, grpc_url
        finally:
            process.terminate()


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns once `condition` holds; fails the test after two minutes, which no busy machine needs."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def tried_again(test: Callable[..., None]) -> Callable[..., None]:
    """Repeats a test of time-outs below two seconds, because a busy machine may stall: it fails if every try fails.

    For what the time-outs themselves are about; whatever else is waited for, a test waits for without an end.
    """

    @functools.wraps(test)
    def tried(*args: Any, **kw: Any) -> None:
        for tries_left in reversed(range(4)):
            try:
                return test(*args, **kw)
            except (Exception, pytest.fail.Exception):
                if not tries_left:
                    raise
        return None

    return tried


def outcomes(url: str) -> dict[tuple[str, str], int]:
    """How many requests the server at `url` has counted, by model and outcome."""
    found = re.findall(
        r'^guerdon_requests_total\{model="(.*)",outcome="(.*)"\} (.*)$', httpx.get(url + "/metrics").text, re.MULTILINE
    )
    return {(model, outcome): int(float(count)) for model, outcome, count in found}


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds, for 30 seconds at most."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)
