"""What hostile or broken clients do to connections, by raw sockets: it is bounded, and others are served meanwhile."""

import asyncio
import contextlib
import math
import re
import resource
import select
import socket
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

import served
from guerdon.server import runtime
from guerdon.server.front import holders
from guerdon.server.front.connections import HttpConnection
from guerdon.server.front.holders import Held, Holders
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from served import Serve
from server.echo_service import SLOW_TOKEN, EchoService
from server.helpers import INFER, body_of, connect, next_status, outcomes, tried_again, until_closed, wait_until
from server.keys import SCORE, TRAIN, keyed

TIMES = {"header_timeout_s": 0.5, "read_timeout_s": 0.5, "write_timeout_s": 0.8, "idle_timeout_s": 1.5}
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = body_of([[5, 6]])
CHUNKED = b"Transfer-Encoding: chunked"


@pytest.fixture(scope="module")
def server(serve: Serve) -> RunningServer:
    return serve(max_body_mb=4, max_bodies_mb=8, max_connections=50, **TIMES, build=EchoService)


@pytest.fixture(scope="module")
def patient_server(serve: Serve) -> RunningServer:
    """One whose times no stall of the machine uses up."""
    return serve(build=EchoService)


def post(body: bytes, *headers: bytes, path: str = INFER) -> bytes:
    head = [b"POST %s HTTP/1.1" % path.encode(), b"Host: localhost", *headers]
    return b"\r\n".join([*head, b"", body])


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answers)]


def is_served(server: RunningServer) -> bool:
    return httpx.post(server.http_url + INFER, content=BODY, timeout=120).status_code == 200


# ------------------------------------------------------------------------------------------------------------ time


@tried_again
@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        pytest.param([b""], [], id="nothing"),
        pytest.param([b"GET /v2 HT"], [408], id="half a line"),
        pytest.param([b"GET /v2 HTTP/1.1\r\nX: 1\r\n"] + [b"A: b\r\n"] * 20, [408], id="a header at a time"),
        pytest.param([b"\r\n"] * 20, [], id="line ends"),
        pytest.param([LIVE, b"GET /v2 HT"], [200, 408], id="half a second request"),
        pytest.param([LIVE + b"\r\n"] + [b"\r\n"] * 30, [200], id="line ends after a request"),
    ],
)
def test_slow_heads_end(server, sent, wanted):
    began = time.monotonic()
    with connect(server) as connection:
        answers = bytearray()

        def listen() -> None:
            answers.extend(until_closed(connection))

        listening = threading.Thread(target=listen)
        listening.start()
        for piece in sent:
            try:
                connection.sendall(piece)
            except OSError:
                break
            listening.join(0.1)
        listening.join(120)
        assert not listening.is_alive()
    assert statuses(bytes(answers)) == wanted
    assert time.monotonic() - began > 0.3


@tried_again
def test_idle_connections_end_later_than_those_that_never_asked(server):
    with connect(server) as connection:
        connection.sendall(LIVE)
        assert next_status(connection) == 200
        time.sleep(1.0)  # longer than a head may take
        connection.sendall(LIVE)
        assert next_status(connection) == 200
        assert until_closed(connection) == b""


@tried_again
def test_a_connection_without_a_key_may_not_rest(tmp_path):
    """One that asked for health alone ends as if it had not asked; one with a key stays, also after such a request."""
    config = keyed(tmp_path, grpc_port=None, **(TIMES | {"idle_timeout_s": 60.0}))
    keyed_ask = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n" % SCORE.encode()
    with (
        served.running(config=config, build=EchoService) as server,
        connect(server) as known,
        connect(server) as unknown,
    ):
        began = time.monotonic()
        for connection, ask in ((known, keyed_ask), (known, LIVE), (unknown, LIVE)):
            connection.sendall(ask)
            assert next_status(connection) == 200
        assert until_closed(unknown) == b""
        assert 0.3 < time.monotonic() - began < 60  # idle_timeout_s
        time.sleep(0.5)
        known.sendall(LIVE)
        assert next_status(known) == 200


@tried_again
@pytest.mark.parametrize("kind", [b"Content-Length: 900000", b"Transfer-Encoding: chunked"])
def test_bodies_that_stop_coming_end_and_give_their_room_back(server, kind):
    with connect(server) as connection:
        connection.sendall(post(b"5\r\n{", kind))
        answer = until_closed(connection)
    assert statuses(answer) == [504]
    assert b"nothing more of the body came for 0.5 s" in answer
    assert is_served(server)


@tried_again
def test_a_body_that_drips_is_read_on(server):
    with connect(server) as connection:
        connection.sendall(post(b"", b"Content-Length: %d" % len(BODY)))
        for i in range(0, len(BODY), len(BODY) // 5 + 1):  # 5 pieces in more time than one may take
            connection.sendall(BODY[i : i + len(BODY) // 5 + 1])
            time.sleep(0.2)
        assert next_status(connection) == 200


@tried_again
def test_bodies_announced_and_never_sent_leave_room_for_others():
    """Two of them have all the room that there is, for as long as a body may pause."""
    with served.running(build=EchoService, max_body_mb=4, max_bodies_mb=8, **TIMES) as server:
        held = [connect(server) for _ in range(2)]
        for connection in held:
            connection.sendall(post(b"", b"Content-Length: %d" % (4 << 20)))
        time.sleep(0.2)
        refused = httpx.post(server.http_url + INFER, content=BODY)
        assert refused.status_code == 503
        assert httpx.get(server.http_url + "/v2/health/ready").status_code == 200
        wait_until(lambda: is_served(server))
        for connection in held:
            assert statuses(until_closed(connection)) == [504]
            connection.close()


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes little of an answer from servers that start from now on."""
    listen = runtime._listen

    def listen_with_small_buffers(*args: Any) -> socket.socket:
        listener = listen(*args)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(runtime, "_listen", listen_with_small_buffers)


@tried_again
@pytest.mark.parametrize("num_rows", [3, 200])
def test_readers_that_do_not_read_are_left(small_buffers, num_rows):
    """Those of a large answer, and those of one that a transport takes without waiting."""
    with served.running(build=EchoService, **TIMES) as server, connect(server, receive_bytes=2048) as connection:
        ask = body_of([[7] * 4000] * num_rows, outputs=[{"name": "values"}])
        connection.sendall(post(ask, b"Content-Length: %d" % len(ask), path="/v2/models/many/infer"))
        process = psutil.Process()
        wait_until(lambda: outcomes(server.http_url).get(("many", "ok")) == 1)
        assert len(peers(process, server)) == 1
        wait_until(lambda: not peers(process, server))
        assert until_closed(connection).endswith(b"(reset)")
        assert is_served(server)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[HttpConnection]:
    """The server's side of the connections that are made from now on."""
    found: list[HttpConnection] = []
    make = HttpConnection.connection_made

    def made(connection: HttpConnection, transport: Any) -> None:
        make(connection, transport)
        found.append(connection)

    monkeypatch.setattr(HttpConnection, "connection_made", made)
    return found


def test_the_system_looks_after_hosts_that_vanish(patient_server, made):
    with connect(patient_server):
        wait_until(lambda: bool(made))
        sockets = made[-1].transport.get_extra_info("socket")
        assert sockets.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert sockets.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
            assert sockets.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def large_answers_request(num_rows: int) -> bytes:
    ask = body_of([[7] * 4000] * num_rows, outputs=[{"name": "values"}])
    return post(ask, b"Content-Length: %d" % len(ask), path="/v2/models/many/infer")


@tried_again
@pytest.mark.slow
def test_answers_that_nobody_reads_have_a_bound_together(made, small_buffers):
    """It is 1 MiB here, also for short ones, which are sent at once; some are reset long before their time is up."""
    config = ServerConfig(port=0, grpc_port=None, max_body_mb=1, max_bodies_mb=1, header_timeout_s=0.4)
    with RunningServer(EchoService(), config) as server, contextlib.ExitStack() as held:
        for count in range(1, 41):
            held.enter_context(connect(server, receive_bytes=2048)).sendall(large_answers_request(3))
            wait_until(lambda count=count: outcomes(server.http_url).get(("many", "ok")) == count)
        wait_until(lambda: 1 << 19 < sum(c.transport.get_write_buffer_size() for c in made) <= 1 << 20)


def test_no_request_is_taken_up_behind_an_answer_that_is_not_read(made, small_buffers):
    """Its answer would wait in the application, where no bound counts it. The first is whole for one who reads it."""
    with (
        served.running(build=EchoService) as server,
        connect(server, receive_bytes=2048) as connection,
    ):
        wait_until(lambda: bool(made))
        connection.sendall(large_answers_request(6))
        wait_until(lambda: made[-1].cycle and made[-1].cycle.response_complete and made[-1].flow.write_paused)
        connection.sendall(large_answers_request(1))
        assert statuses(until_closed(connection)) == [200]
        assert outcomes(server.http_url)["many", "ok"] == 1


def peers(process: psutil.Process, server: RunningServer) -> list:
    """The server's side of all connections with raw clients, which here are the only ones that stay."""
    port = httpx.URL(server.http_url).port
    return [c for c in process.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "ESTABLISHED"]


# ----------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("piece", "status"),
    [
        pytest.param(b"GET /" + b"a" * 200_000, 431, id="the target"),
        pytest.param(b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000, 431, id="one header"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 2000, 431, id="many headers"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"X" * 200_000, 431, id="a header's name"),
        pytest.param(b"\r\n" * 100_000, 431, id="line ends"),
        pytest.param(post(b"5\r\n12345\r\n0\r\nX: " + b"a" * 200_000, CHUNKED), 400, id="a trailer"),
        pytest.param(post(b"5;x=" + b"a" * 200_000, CHUNKED), 400, id="a chunk's extension"),
        pytest.param(post((b"1;" + b"x" * 200 + b"\r\nx\r\n") * 1000, CHUNKED), 400, id="extensions together"),
        pytest.param(post(b"0" * 200_000 + b"1\r\nx\r\n", CHUNKED), 400, id="zeros before a chunk's size"),
    ],
)
def test_heads_and_framing_are_bounded(patient_server, piece, status):
    with connect(patient_server) as connection:
        for i in range(0, len(piece), 4096):
            try:
                connection.sendall(piece[i : i + 4096])
            except OSError:
                break
        answer = until_closed(connection)
    assert statuses(answer) == [status]
    assert b"guerdon-error: InvalidRequest" in answer


def answer_to(connection: socket.socket, pieces: list[bytes]) -> tuple[bytes, bytes]:
    """The status line and the body that answer a request, of which each piece is sent in a packet of its own."""
    for piece in pieces:
        connection.sendall(piece)
        time.sleep(0.001)
    received = head = body = b""
    while not head or len(body) < int(re.findall(rb"content-length: (\d+)", head)[0]):
        more = connection.recv(1 << 20)
        assert more, received
        received += more
        head, _, body = received.partition(b"\r\n\r\n") if b"\r\n\r\n" in received else (b"", b"", b"")
    return head.partition(b"\r\n")[0], body


def in_chunks(body: bytes, size: int, *, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    framed = [b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts]
    return b"".join([*framed, b"0%s\r\n%s\r\n" % (extension, trailer)])


@pytest.fixture(scope="module")
def scored(patient_server) -> tuple[bytes, bytes]:
    """The answer to BODY with a Content-Length."""
    with connect(patient_server) as connection:
        answer = answer_to(connection, [post(BODY, b"Content-Length: %d" % len(BODY))])
    assert answer[0] == b"HTTP/1.1 200 OK"
    return answer


def test_chunks_may_be_cut_anywhere(patient_server, scored):
    """Between a line's two ends, inside sizes, extensions and trailers; and every byte in a packet of its own."""
    body = in_chunks(BODY, 40, extension=b";a=b;c", trailer=b"X: y\r\nZ: \r\n")
    sent = post(body, CHUNKED)
    first = sent.index(b"\r\n\r\n") - 4
    with connect(patient_server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(first, len(sent)):
            assert answer_to(connection, [sent[:i], sent[i:]]) == scored, sent[i - 10 : i + 10]
        assert answer_to(connection, [sent[i : i + 1] for i in range(len(sent))]) == scored


@pytest.mark.parametrize("packet", [7, 4096, 1 << 20])
def test_a_body_may_come_in_chunks_of_a_byte(patient_server, scored, packet):
    """Line by line or byte by byte, as some clients stream: the framing may be far more than the body."""
    sent = post(in_chunks(BODY + b" " * 20_000, 1), CHUNKED)
    with connect(patient_server) as connection:
        for i in range(0, len(sent), packet):
            connection.sendall(sent[i : i + packet])
        assert answer_to(connection, []) == scored


H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk")


@pytest.mark.parametrize(
    "upgrade", [H2C, (b"Connection: upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")]
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_upgrade_is_ignored(patient_server, scored, upgrade, is_chunked):
    """RFC 9110, section 7.8: "A server MAY ignore a received Upgrade header field". Java's HttpClient sends one."""
    body = in_chunks(BODY, 40) if is_chunked else BODY
    sent = post(body, *upgrade, CHUNKED if is_chunked else b"Content-Length: %d" % len(BODY))
    first = sent.index(b"\r\n\r\n") - 4
    bare = LIVE.replace(b"\r\n\r\n", b"\r\n" + b"\r\n".join(upgrade) + b"\r\n\r\n")
    with connect(patient_server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(first, len(sent), 7):
            assert answer_to(connection, [sent[:i], sent[i:]]) == scored, sent[i - 10 : i + 10]
        for request in (bare, LIVE, bare):
            assert answer_to(connection, [request]) == (b"HTTP/1.1 200 OK", b'{"live":true}')
        assert answer_to(connection, [post(BODY, b"Content-Length: %d" % len(BODY))]) == scored


def test_a_request_inside_the_body_of_an_upgrade_is_none(patient_server):
    """Neither is what stands behind it in the packet taken for its body."""
    inner = LIVE + b" " * 9
    with connect(patient_server) as connection:
        connection.sendall(post(inner, *H2C, b"Content-Length: %d" % len(inner)))
        assert answer_to(connection, [])[0].startswith(b"HTTP/1.1 400")
        connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = until_closed(connection)
    assert statuses(answers) == [200]
    assert b'{"ready":true}' in answers


@pytest.mark.parametrize("is_split", [False, True])
def test_trailers_are_not_headers(patient_server, is_split):
    """Nobody who has checked a request by its head has seen them."""
    body = b"%x\r\n%s\r\n0\r\nContent-Encoding: nonsense\r\n\r\n" % (len(BODY), BODY)
    cut = len(body) - 3 if is_split else len(body)
    with connect(patient_server) as connection:
        connection.sendall(post(body[:cut], b"Transfer-Encoding: chunked"))
        if is_split:
            time.sleep(0.1)
        connection.sendall(body[cut:] + LIVE)
        assert next_status(connection) == 200


def test_pipelined_requests_do_not_pile_up(patient_server):
    """The first is answered, and the connection ends: 13,000 others that came with it were never taken up."""
    before = sum(outcomes(patient_server.http_url).values())
    slow = body_of([[SLOW_TOKEN]])
    with connect(patient_server) as connection:
        connection.sendall(post(slow, b"Content-Length: %d" % len(slow)) + post(BODY, b"Content-Length: 2") * 2000)
        answer = until_closed(connection)
    assert statuses(answer) == [200]
    assert b"connection: close" in answer
    assert sum(outcomes(patient_server.http_url).values()) == before + 1


def test_connections_beyond_the_limit_are_told_so_and_others_go_on():
    """If each of those that are open has a request; a body that has not come is one."""
    config = ServerConfig(port=0, grpc_port=None, max_connections=50, header_timeout_s=120.0, read_timeout_s=120.0)
    service = EchoService(config)
    with RunningServer(service, config) as server, service.scorer.held() as go:
        held = [connect(server) for _ in range(50)]
        try:
            for connection in held[1:]:
                connection.sendall(post(b"{", b"Content-Length: 9"))
            slow = body_of([[SLOW_TOKEN]])
            held[0].sendall(post(slow, b"Content-Length: %d" % len(slow)))
            wait_until(lambda: service.num_open == 1)
            with connect(server) as beyond:
                answer = until_closed(beyond)
            assert statuses(answer) == [503]
            assert b"as many connections as it takes" in answer
            go.set()
            assert next_status(held[0]) == 200
        finally:
            for connection in held:
                connection.close()
        wait_until(lambda: is_served(server))


def test_a_new_connection_ends_the_one_that_rests_longest():
    with served.running(build=EchoService, max_connections=4, header_timeout_s=120.0, idle_timeout_s=120.0) as server:
        held = [connect(server) for _ in range(4)]
        for connection in (held[2], held[0], held[1], held[3], held[2]):  # the order in which they begin to rest
            connection.sendall(LIVE)
            assert next_status(connection) == 200
        with connect(server) as beyond:
            beyond.sendall(LIVE)
            assert next_status(beyond) == 200
            assert until_closed(held[0]) == b""
            for connection in (*held[1:], beyond):
                connection.sendall(LIVE)
                assert next_status(connection) == 200
        for connection in held:
            connection.close()


def test_connections_that_come_at_once_do_not_end_each_other(monkeypatch):
    """They lie accepted before any request is read; what is too much is told so."""
    monkeypatch.setattr(holders, "TIME_TO_ASK_S", math.inf)
    monkeypatch.setattr(runtime, "_new_event_loop", asyncio.new_event_loop)  # accepts all at once; uvloop, one a turn
    config = ServerConfig(port=0, grpc_port=None, max_connections=20, header_timeout_s=120.0)
    with RunningServer(EchoService(), config) as server, contextlib.ExitStack() as stack:
        blocked = threading.Event()
        server._loop.call_soon_threadsafe(blocked.wait)
        burst = [stack.enter_context(connect(server)) for _ in range(40)]
        for connection in burst:
            connection.sendall(post(BODY, b"Content-Length: %d" % len(BODY)))
        blocked.set()
        told = [next_status(connection) for connection in burst]
        assert sorted(told) == [200] * 20 + [503] * 20


def test_who_makes_way_for_a_new_connection():
    ended: list[str] = []
    some = Holders(3, ())

    def come(address: str, name: str, now: float) -> Held | None:
        held = some.add(address, lambda: ended.append(name), now)
        if held is not None:
            some.expect(held, now)
        return held

    for name in ("a0", "a1", "a2"):
        assert come("a", name, 10.0)
    assert come("a", "a3", 10.5) is None and not ended
    answered = come("b", "b0", 10.5)  # of another client, who has fewer
    assert answered and ended == ["a0"]
    some.work(answered)
    some.wait(answered)
    assert come("a", "a4", 11.0) and ended == ["a0", "a1"]  # which has had its time
    assert come("b", "b1", 11.1) and ended == ["a0", "a1", "a2"]
    assert come("b", "b2", 11.2) and ended == ["a0", "a1", "a2", "b0"]  # what was answered first


@pytest.mark.parametrize("is_busy", [False, True])
def test_one_keys_connections_leave_room_for_anothers(tmp_path, is_busy):
    """One key opens as many as there may be at all, and more; whoever has another is served, on four of its own."""
    config = keyed(tmp_path, grpc_port=None, max_connections=24, header_timeout_s=120.0, read_timeout_s=120.0)
    key, other = (b"Authorization: Bearer " + which.encode() for which in (SCORE, TRAIN))
    with served.running(config=config, build=EchoService) as server:
        held = []
        for _ in range(30):
            held.append(connect(server))
            if is_busy:  # the body does not come
                held[-1].sendall(post(b"{", key, b"Content-Length: 9"))
            else:
                held[-1].sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % key)
                assert next_status(held[-1]) == 200
        others = [connect(server) for _ in range(4)]  # a third of the half that is kept
        for _ in range(2):
            for connection in others:
                connection.sendall(post(BODY, other, b"Content-Length: %d" % len(BODY)))
                assert next_status(connection) == 200
        for connection in (*held, *others):
            connection.close()


def test_a_key_that_may_have_no_more_connections_is_told_so(tmp_path):
    config = keyed(tmp_path, grpc_port=None, max_connections=24, header_timeout_s=120.0, read_timeout_s=120.0)
    key = b"Authorization: Bearer " + SCORE.encode()
    with served.running(config=config, build=EchoService) as server:
        held = [connect(server) for _ in range(17)]
        for connection in held:
            connection.sendall(post(b"{", key, b"Content-Length: 9"))
        answers = [connection for connection in held if connection in select.select(held, [], [], 30)[0]]
        (refused,) = answers
        status, told = answer_to(refused, [])
        assert status.startswith(b"HTTP/1.1 503")
        assert b"holds 16 of the 24 connections" in told
        for connection in held:
            connection.close()


def test_two_thousand_idle_connections_do_not_hold_up_others_and_leave_nothing():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8000)), hard))
    process = psutil.Process()
    with RunningServer(EchoService(), ServerConfig(port=0, grpc_port=None, header_timeout_s=300.0)) as server:
        assert is_served(server)
        files, threads = process.num_fds(), process.num_threads()
        held = [connect(server) for _ in range(2000)]
        for i, connection in enumerate(held):
            connection.sendall((b"", b"GET /v2 HT", LIVE)[i % 3])
        with httpx.Client(base_url=server.http_url, timeout=120) as client:
            for _ in range(20):
                assert client.post(INFER, content=BODY).status_code == 200
        for connection in held:
            connection.close()
        wait_until(lambda: process.num_fds() <= files and process.num_threads() <= threads)


# ------------------------------------------------------------------------------------------------------- smuggling


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(post(b"0\r\n\r\n" + LIVE, b"Content-Length: 5", b"Transfer-Encoding: chunked"), id="CL and TE"),
        pytest.param(post(b"0\r\n\r\n" + LIVE, b"Transfer-Encoding: chunked", b"Content-Length: 5"), id="TE and CL"),
        pytest.param(post(b"12345" + LIVE, b"Content-Length: 5", b"Content-Length: 5"), id="two equal CLs"),
        pytest.param(post(b"12345" + LIVE, b"Content-Length: 5", b"Content-Length: 50"), id="two CLs"),
        pytest.param(post(b"12345" + LIVE, b"Content-Length: 5, 5"), id="a list for CL"),
        pytest.param(post(b"12345" + LIVE, b"Content-Length: +5"), id="CL with a sign"),
        pytest.param(post(b"12345" + LIVE, b"Content-Length: 0x5"), id="CL in hex"),
        pytest.param(post(b"12345" + LIVE, b"Content-Length: -5"), id="CL below 0"),
        pytest.param(post(b"12345" + LIVE, b"Content-Length: 99999999999999999999999"), id="CL beyond numbers"),
        pytest.param(post(b"12345" + LIVE, b"Content-Length : 5"), id="a space before the colon"),
        pytest.param(post(b"0\r\n\r\n" + LIVE, b"Transfer-Encoding: chunked, identity"), id="TE does not end chunked"),
        pytest.param(post(b"0\r\n\r\n" + LIVE, b"Transfer-Encoding: gzip, chunked"), id="TE of two"),
        pytest.param(post(b"0\r\n\r\n" + LIVE, b"Transfer-Encoding: xchunked"), id="TE unknown"),
        pytest.param(
            post(b"0\r\n\r\n" + LIVE, b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"), id="two TEs"
        ),
        pytest.param(post(b"0\r\n\r\n" + LIVE, b"Transfer-Encoding: \x0bchunked"), id="TE behind a control character"),
        pytest.param(post(b"xyz\r\n\r\n" + LIVE, b"Transfer-Encoding: chunked"), id="a chunk's size of letters"),
        pytest.param(post(b"-1\r\n\r\n" + LIVE, b"Transfer-Encoding: chunked"), id="a chunk's size below 0"),
        pytest.param(
            post(b"0x5\r\n12345\r\n0\r\n\r\n" + LIVE, b"Transfer-Encoding: chunked"), id="a chunk's size in 0x"
        ),
        pytest.param(
            post(b"fffffffffffffffff\r\n" + LIVE, b"Transfer-Encoding: chunked"), id="a chunk's size beyond numbers"
        ),
        pytest.param(post(b"5\r\n1234567\r\n0\r\n\r\n" + LIVE, b"Transfer-Encoding: chunked"), id="a chunk too long"),
        pytest.param(post(b"5\n12345\n0\n\n" + LIVE, b"Transfer-Encoding: chunked"), id="chunks by line feeds alone"),
        pytest.param(post(b"12345" + LIVE, b"X: a\r\n Content-Length: 50"), id="a header folded"),
        pytest.param(b"GET /v2 HTTP/1.1\nHost: localhost\n\n" + LIVE, id="line feeds alone"),
        pytest.param(b"GET /v2 HTTP/1.1\r\nHost: localhost\rX: y\r\n\r\n" + LIVE, id="a carriage return alone"),
        pytest.param(post(b"" + LIVE, b"X: a\x00b"), id="NUL in a header"),
        pytest.param(post(b"" + LIVE, b"X\x00: ab"), id="NUL in a name"),
        pytest.param(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nHost: y\r\n\r\n" + LIVE, id="two Hosts"),
        pytest.param(b"GET /v2\r\n\r\n" + LIVE, id="HTTP/0.9"),
        pytest.param(b"GET /v2 HTTP/2.0\r\nHost: localhost\r\n\r\n" + LIVE, id="HTTP/2.0"),
        pytest.param(b"GET /v2 HTTP/1.11\r\nHost: localhost\r\n\r\n" + LIVE, id="HTTP/1.11"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2 by prior knowledge"),
        pytest.param(b"get /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n" + LIVE, id="a method in lower case"),
        pytest.param(b"GET /v2 x HTTP/1.1\r\nHost: localhost\r\n\r\n" + LIVE, id="a space in the target"),
        pytest.param(b"CONNECT evil:80 HTTP/1.1\r\nHost: evil\r\n\r\n" + LIVE, id="CONNECT"),
        pytest.param(post(b"12345" + LIVE, *H2C, b"Content-Length: 5", b"Content-Length: 50"), id="h2c with two CLs"),
        pytest.param(post(b"0\r\n\r\n" + LIVE, *H2C, b"Transfer-Encoding: xchunked"), id="h2c with TE unknown"),
        pytest.param(post(b"xyz\r\n\r\n" + LIVE, *H2C, CHUNKED), id="h2c with a chunk's size of letters"),
        pytest.param(
            b"GET /v2 HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + LIVE, id="chunked in HTTP/1.0"
        ),
    ],
)
@pytest.mark.parametrize("is_split", [False, True])
def test_what_two_readers_could_understand_differently_ends_the_connection(patient_server, sent, is_split):
    """One answer, of an error, and no second one: the request in the body is never seen as one."""
    with connect(patient_server) as connection:
        at = sent.index(LIVE) if is_split and LIVE in sent else len(sent)
        connection.sendall(sent[:at])
        if sent[at:]:
            time.sleep(0.03)
            connection.sendall(sent[at:])
        answers = until_closed(connection)
    assert len(statuses(answers)) == 1, answers
    assert statuses(answers)[0] in (400, 405, 431), answers
    assert b"close" in answers.lower()


@tried_again
@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        pytest.param(
            b"GET http://localhost/v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", [200], id="absolute form"
        ),
        pytest.param(b"GET /v2/health/live HTTP/1.0\r\n\r\n", [200], id="HTTP/1.0"),
        pytest.param(
            b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + LIVE,
            [200],
            id="h2c",
        ),
        pytest.param(
            b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" + LIVE, [200], id="close"
        ),
        pytest.param(
            post(b"5;a=b\r\n12345\r\n0\r\nX: y\r\n\r\n", b"Transfer-Encoding: Chunked", b"Connection: close"),
            [400],
            id="chunks with all that they may have",
        ),
    ],
)
def test_what_is_legal_gets_one_answer(server, sent, wanted):
    with connect(server) as connection:
        connection.sendall(sent)
        answers = until_closed(connection)
    assert statuses(answers) == wanted


def test_no_second_answer_if_a_body_ends_wrongly_after_its_answer(patient_server):
    """The route takes no body: it is answered, and then what should be chunks is none."""
    with connect(patient_server) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert next_status(connection) == 200
        connection.sendall(b"no chunk\r\n" + LIVE)
        assert until_closed(connection) == b""
