"""Requests that are refused before their body is read, and the room that bodies take."""

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

import scorers
import served
from guerdon.errors import Overloaded
from guerdon.server.front.admission import Gate, Place
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig
from guerdon.wire import kserve
from guerdon.wire.tensors import InferRequest, Tensor
from server.helpers import INFER, body_of, wait_until

MIB = 1 << 20


def entered(gate: Gate, client: str, most: int = 1000) -> int:
    """How many requests of the client find a place."""
    with contextlib.ExitStack() as held:
        for count in range(most):
            try:
                held.enter_context(Place(gate, client))
            except Overloaded:
                held.pop_all()  # they stay
                return count
    raise AssertionError("there is no bound")


def test_one_client_has_all_places():
    gate = Gate(ServerConfig(max_requests=10))
    assert entered(gate, "") == 10


def test_a_flood_of_one_client_leaves_places_for_the_others():
    gate = Gate(ServerConfig(max_requests=12), ("a", "b", "c"))
    assert entered(gate, "a") == 8  # everybody's half, and its own sixth
    assert entered(gate, "b") == 2
    assert entered(gate, "c") == 2
    assert gate.requests.taken == 12


def test_one_clients_announced_bodies_leave_room_for_the_others():
    gate = Gate(ServerConfig(max_body_mb=1, max_bodies_mb=8), ("a", "b"))
    first, second = Place(gate, "a"), Place(gate, "b")
    first.hold(6 * MIB)
    with pytest.raises(Overloaded, match=r"would exceed 8 MiB, or a's share of it; try again"):
        first.hold(6 * MIB + 1)
    second.hold(2 * MIB)
    first.hold(MIB)
    second.hold(3 * MIB)
    assert gate.bytes.taken == 4 * MIB


@pytest.mark.parametrize("clients", [(), ("a",), ("a", "b"), tuple("abcdefghij")])
def test_one_body_of_the_largest_size_always_fits(clients):
    gate = Gate(ServerConfig(max_body_mb=64, max_bodies_mb=1), clients)
    with Place(gate, "a") as place:
        place.hold(64 * MIB)
    assert gate.bytes.taken == 0
    assert gate.requests.taken == 0


def test_an_answered_request_holds_only_its_bytes():
    gate = Gate(ServerConfig(max_requests=1))
    with Place(gate) as first:
        first.hold(MIB)
        with pytest.raises(Overloaded, match="1 requests are in progress"):
            Place(gate).check_room()
        first.leave()
        with Place(gate):
            assert (gate.requests.taken, gate.bytes.taken) == (1, MIB)
        assert gate.requests.taken == 0
    assert (gate.requests.taken, gate.bytes.taken) == (0, 0)


def test_a_refused_hold_changes_nothing():
    gate = Gate(ServerConfig(max_body_mb=1, max_bodies_mb=1))
    with Place(gate) as place:
        place.hold(1000)
        with pytest.raises(Overloaded):
            place.hold(2 * MIB)
        assert gate.bytes.taken == 1000
        place.hold(10)
        assert gate.bytes.taken == 10
        place.reach(5)
        assert gate.bytes.taken == 10
    assert gate.bytes.taken == 0


QUEUE_TOKENS = 200
ADMITTED = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    model = ModelConfig(model="scorers:score", max_queue_tokens=QUEUE_TOKENS, max_batch_tokens=16)
    scorers.hold.clear()
    with served.running(model, max_body_mb=1) as running:
        yield running
    scorers.hold.set()


def answer_to_head(server: RunningServer, num_bytes: int) -> bytes:
    """What comes back to a request whose body is announced and never sent; ADMITTED if the server asks for the body."""
    with socket.create_connection(("127.0.0.1", httpx.URL(server.http_url).port), timeout=120) as connection:
        head = "POST %s HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        connection.sendall((head % (INFER, num_bytes)).encode())
        return connection.recv(65536)


def test_a_full_queue_refuses_a_request_by_its_head(server: RunningServer) -> None:
    ask = httpx.Client(base_url=server.http_url, timeout=120).post
    fits, too_many, beyond_all, too_large = 8 * 40, 8 * 60, 8 * (QUEUE_TOKENS + 1), 2 << 20
    assert answer_to_head(server, too_many) == ADMITTED  # of an empty queue any request has the room
    with ThreadPoolExecutor(2) as pool:
        slow, waits = begin(server, pool, ask, 150)
        assert answer_to_head(server, too_many).startswith(b"HTTP/1.1 503")
        assert answer_to_head(server, fits) == ADMITTED
        assert answer_to_head(server, beyond_all) == ADMITTED  # such a request is taken, or most of it is padding
        assert answer_to_head(server, too_large).startswith(b"HTTP/1.1 413")
        scorers.hold.set()
        assert [done.result().status_code for done in (slow, waits)] == [200, 200]


def test_a_body_that_is_too_large_is_told_so_while_the_queue_is_over_its_limits(server: RunningServer) -> None:
    """Sent again later, it would still be too large."""
    ask = httpx.Client(base_url=server.http_url, timeout=120).post
    with ThreadPoolExecutor(2) as pool:
        asked = begin(server, pool, ask, 2 * QUEUE_TOKENS)
        assert answer_to_head(server, 8).startswith(b"HTTP/1.1 503")
        assert answer_to_head(server, 2 << 20).startswith(b"HTTP/1.1 413")
        scorers.hold.set()
        assert [done.result().status_code for done in asked] == [200, 200]


@pytest.mark.parametrize("num_rows", [12, 40])
def test_nobody_is_refused_for_padding_while_half_the_queue_is_free(server: RunningServer, num_rows: int) -> None:
    """With it the smaller request would not fit beside what waits, and the larger one not into an empty queue."""
    tokens, lengths = np.full((num_rows, 10), 5), np.ones((num_rows, 1), np.int64)
    tensors = {"tokens": Tensor.of("tokens", tokens), "sequence_lengths": Tensor.of("sequence_lengths", lengths)}
    body, json_length = kserve.encode_request(InferRequest(tensors))
    ask = httpx.Client(base_url=server.http_url, timeout=120).post
    with ThreadPoolExecutor(3) as pool:
        asked = begin(server, pool, ask, 90)
        headers = {"Inference-Header-Content-Length": str(json_length)}
        padded = pool.submit(ask, INFER, content=body, headers=headers)
        wait_until(lambda: padded.done() or waiting(server) == 90 + num_rows)
        scorers.hold.set()
        assert [done.result().status_code for done in (*asked, padded)] == [200] * 3


def test_a_long_request_that_would_be_late_is_refused_before_it_is_parsed() -> None:
    """What tells the two apart is a body that cannot be parsed."""
    model = ModelConfig(model="scorers:score", max_batch_tokens=16)
    scorers.hold.clear()
    begun = len(scorers.calls)
    with served.running(model) as server, ThreadPoolExecutor(3) as pool:
        ask = httpx.Client(base_url=server.http_url, timeout=120).post

        def status(timeout_us: int, more: bytes = b"") -> tuple[int, float]:
            body = b'{"parameters": {"timeout": %d%s}, "inputs": [{"data": [%s' % (timeout_us, more, b"5," * 9000)
            reply = ask(INFER, content=body)
            return reply.status_code, float(reply.headers.get("retry-after", "0"))

        assert status(1_000)[0] == 400  # before the first full batch nobody knows how long one takes
        full = pool.submit(ask, INFER, content=body_of([[scorers.WAITS] * 16]))
        wait_until(lambda: len(scorers.calls) > begun)
        time.sleep(0.5)  # so a full batch takes at least as long: at most 32 tokens a second
        scorers.hold.set()
        assert full.result().status_code == 200
        scorers.hold.clear()
        slow = begin(server, pool, ask, 1600)
        assert status(20_000_000)[0] == 503 and status(20_000_000)[1] > 1
        assert status(3_600_000_000)[0] == 400
        assert status(20_000_000, b', "priority": 1')[0] == 400
        assert status(20_000_000, b', "labels": {"timeout": 3600000000}')[0] == 400
        scorers.hold.set()
        assert [done.result().status_code for done in slow] == [200, 200]


def begin(server: RunningServer, pool: ThreadPoolExecutor, ask: Callable[..., Any], num_tokens: int) -> list[Future]:
    """Two requests: what is computed until `scorers.hold` is set, and behind it one of so many tokens."""
    begun = len(scorers.calls)
    slow = pool.submit(ask, INFER, content=body_of([[scorers.WAITS]]))
    wait_until(lambda: len(scorers.calls) > begun)
    waits = pool.submit(ask, INFER, content=body_of([[5] * num_tokens]))
    wait_until(lambda: waiting(server) == num_tokens)
    return [slow, waits]


def waiting(server: RunningServer) -> int:
    """The tokens in the queue."""
    text = httpx.get(f"{server.http_url}/metrics").text
    (found,) = re.findall(r'^guerdon_queue_tokens\{model="reward_model"\} (.*)$', text, re.MULTILINE)
    return int(float(found))
