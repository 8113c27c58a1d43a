"""What finds no room is refused by its head alone; what can never find any is told that, however full the queue is."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import scorers
from guerdon.assembly import build_service
from guerdon.config import ModelConfig, ServerConfig
from guerdon.server.runtime import RunningServer
from server.helpers import INFER, body_of, wait_until

QUEUE_TOKENS = 200


@pytest.fixture
def server() -> Iterator[RunningServer]:
    model = ModelConfig(model="scorers:score", max_queue_tokens=QUEUE_TOKENS, max_batch_tokens=16)
    config = ServerConfig(port=0, grpc_port=None, max_body_mb=1, models=[model])
    scorers.hold.clear()
    with RunningServer(build_service(config), config) as running:
        yield running
    scorers.hold.set()


def answer_to_head(server: RunningServer, num_bytes: int, patience_s: float = 30) -> bytes:
    """What comes back in that time to a request whose body is announced and never sent; b"" for nothing."""
    with socket.create_connection(("127.0.0.1", httpx.URL(server.http_url).port), timeout=30) as connection:
        connection.settimeout(patience_s)
        connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (INFER.encode(), num_bytes))
        try:
            return connection.recv(65536)
        except TimeoutError:
            return b""


def test_what_a_full_queue_has_no_room_for_is_refused_by_its_head(server: RunningServer) -> None:
    ask = httpx.Client(base_url=server.http_url, timeout=60).post
    fits, too_many, too_large = 8 * 100, 8 * (QUEUE_TOKENS + 1), 2 << 20
    assert answer_to_head(server, too_many, 1) == b""  # of an empty queue any request has the room
    with ThreadPoolExecutor(2) as pool:
        begun = len(scorers.calls)
        slow = pool.submit(ask, INFER, content=body_of([[scorers.WAITS]]))
        wait_until(lambda: len(scorers.calls) > begun)
        waits = pool.submit(ask, INFER, content=body_of([[5] * 90]))
        metric = 'guerdon_queue_tokens{model="reward_model"} 90.0'
        wait_until(lambda: metric in httpx.get(f"{server.http_url}/metrics").text)
        assert answer_to_head(server, too_many).startswith(b"HTTP/1.1 503")
        assert answer_to_head(server, fits, 1) == b""
        assert answer_to_head(server, too_large).startswith(b"HTTP/1.1 413")
        scorers.hold.set()
        assert [done.result().status_code for done in (slow, waits)] == [200, 200]
