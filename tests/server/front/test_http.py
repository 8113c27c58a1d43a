import asyncio
import gc
import gzip
import re
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import orjson
import pytest

from guerdon import errors
from guerdon.errors import InvalidRequest, Overloaded, PayloadTooLarge
from guerdon.server.front.admission import Gate, Place
from guerdon.server.front.http_request import HttpRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from guerdon.wire import kserve
from guerdon.wire.tensors import InferRequest, Tensor
from served import Serve
from server.echo_service import BUSY_TOKEN, CRASH_TOKEN, NAN_TOKEN, SLOW_TOKEN, EchoService
from server.helpers import INFER, body_of, connect, outcomes, posted, tried_again, until_closed, wait_until


@pytest.fixture(scope="module")
def running_server(service: EchoService, serve: Serve) -> RunningServer:
    return serve(max_body_mb=1, max_requests=4, build=lambda _: service)


def error_of(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]  # as the protocol has it: Triton's Java client refuses another key
    assert issubclass(getattr(errors, response.headers["guerdon-error"]), errors.GuerdonError)
    assert "Traceback" not in response.text
    return response.json()["error"]


def test_json_without_any_content_type(client):
    response = client.post(INFER, content=body_of([[5, 6, 7], [1]], id="q"))
    assert response.json() == {
        "id": "q",
        "model_name": "reward_model",
        "model_version": "1",
        "parameters": {"weights_version": "1"},
        "outputs": [
            {"name": "rewards", "datatype": "FP32", "shape": [2, 1], "data": [18.0, 1.0]},
            {"name": "exceeded", "datatype": "INT32", "shape": [2, 1], "data": [0, 0]},
        ],
    }
    assert "inference-header-content-length" not in response.headers
    assert "content-encoding" not in response.headers
    assert float(response.headers["guerdon-queue-ms"]) >= 0
    assert float(response.headers["guerdon-compute-ms"]) > 0
    assert response.headers["guerdon-weights-version"] == "1"


def test_binary_body_in_one_piece_in_chunks_and_by_version(client):
    tensors = [Tensor.of("tokens", np.arange(512)[np.newaxis]), Tensor.of("sequence_lengths", np.array([[512]]))]
    body, length = kserve.encode_request(InferRequest({t.name: t for t in tensors}, {"rewards": True}))
    headers = {"Inference-Header-Content-Length": str(length)}

    def pieces() -> Iterator[bytes]:
        for i in range(0, len(body), 1000):
            yield body[i : i + 1000]

    for path in (INFER, "/v2/models/reward_model/versions/1/infer"):
        for content in (body, pieces()):
            response = client.post(path, content=content, headers=headers)
            reply = kserve.decode_reply(response.content, int(response.headers["inference-header-content-length"]))
            assert reply.outputs[0].data.tolist() == [[sum(range(512)) % 1000]]


def test_raw_text(client):
    response = client.post(INFER, content="Grüße".encode(), headers={"Inference-Header-Content-Length": "0"})
    reply = kserve.decode_reply(response.content, int(response.headers["inference-header-content-length"]))
    assert reply.outputs[0].data.tolist() == [[5]]


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies_and_bombs(client, encoding, compress):
    headers = {"Content-Encoding": encoding}
    for rows in ([[5, 6, 7]], [np.random.default_rng(0).integers(0, 9999, 4000).tolist()] * 40):
        response = client.post(INFER, content=compress(body_of(rows)), headers=headers)
        assert response.json()["outputs"][0]["data"] == [sum(row) % 1000 for row in rows]
    bomb = compress(b" " * (64 << 20))
    tracemalloc.start()
    text = error_of(client.post(INFER, content=bomb, headers=headers), 413)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "decompressed body is larger than the 1 MiB" in text
    assert peak < 8 << 20
    broken = compress(body_of([[5]]))
    assert "cut off" in error_of(client.post(INFER, content=broken[:-3], headers=headers), 400)
    assert "Content-Encoding" in error_of(client.post(INFER, content=b"{}", headers=headers), 400)
    text = error_of(client.post(INFER, content=b"{}", headers={"Content-Encoding": "br"}), 400)
    assert text == "Content-Encoding 'br' is not known here: use gzip or deflate"


def test_health_and_descriptions(client, service):
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/many/ready", "/v2/models/many/versions/1/ready"):
        assert client.get(path).status_code == 200
        assert client.head(path).status_code == 200
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models/many/ready").json() == {"name": "many", "ready": True}
    assert client.get("/v2").json()["name"] == "guerdon"
    assert client.get("/v2/models/many").json()["name"] == "many"
    assert client.get("/v2/models/many/versions/1/config").json()["max_batch_size"] > 0
    assert "guerdon_requests" in client.get("/metrics").text
    index = client.post("/v2/repository/index").json()
    assert index[0] == {"name": "reward_model", "version": "1", "state": "READY", "reason": ""}
    service.ready = False
    try:
        assert client.get("/v2/health/live").status_code == 200
        error_of(client.get("/v2/health/ready"), 400)
        error_of(client.get("/v2/models/many/ready"), 400)
        assert "not ready" in error_of(client.post(INFER, content=body_of([[5]])), 503)
        assert client.post("/v2/repository/index").json()[0]["state"] == "UNAVAILABLE"
        assert client.post("/v2/repository/index", content=b'{"ready": true}').json() == []
    finally:
        service.ready = True


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "text"),
    [
        ("GET", "/nowhere", None, 404, "no such path: /nowhere"),
        ("POST", "/v2/models/reward_model/infer/", b"{}", 404, "no such path"),
        ("GET", INFER, None, 405, "takes POST, not GET"),
        ("DELETE", "/v2/health/live", None, 405, "takes GET and HEAD, not DELETE"),
        ("POST", "/v2/models/nobody/infer", b"{}", 400, "unknown model 'nobody'"),
        ("POST", "/v2/models/reward_model/versions/3/infer", b"{}", 400, "unknown model 'reward_model' version 3"),
        ("GET", "/v2/models/nobody/config", None, 400, "unknown model 'nobody'"),
        ("GET", "/v2/models/nobody/ready", None, 400, "unknown model 'nobody'"),
        ("POST", INFER, b"not json", 400, "not valid JSON"),
        ("POST", INFER, b"", 400, "not valid JSON"),
        ("POST", INFER, b'{"inputs": []}', 400, "no inputs"),
        ("POST", INFER, body_of([[5]], outputs=[{"name": "nonsense"}]), 400, "unknown output 'nonsense'"),
        ("POST", INFER, body_of([[5], []]), 400, "row 1: the sample has no tokens"),
        ("POST", INFER, body_of([[5], [-1]]), 400, "row 1: token id -1"),
        ("POST", INFER, body_of([[5], [NAN_TOKEN]]), 500, "row 1: the reward is not finite"),
        ("POST", INFER, body_of([[CRASH_TOKEN]]), 500, "internal error; the server's log has the details"),
        ("POST", "/v2/repository/index", b"[]", 400, "the body is a list; send an object"),
    ],
)
def test_each_error_has_its_status_and_text(client, method, path, content, status, text):
    assert text in error_of(client.request(method, path, content=content), status)
    assert client.post(INFER, content=body_of([[5]])).status_code == 200


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "", "9" * 30, "999"])
def test_a_wrong_header_length_is_refused(client, value):
    headers = {"Inference-Header-Content-Length": value}
    assert "Inference-Header-Content-Length" in error_of(
        client.post(INFER, content=body_of([[5]]), headers=headers), 400
    )


def test_one_failed_row_leaves_its_neighbours(client):
    outputs = [{"name": "rewards"}, {"name": "errors"}]
    reply = client.post(INFER, content=body_of([[5], [NAN_TOKEN], [7], []], outputs=outputs))
    rewards, errors = reply.json()["outputs"]
    assert rewards["data"] == [5.0, None, 7.0, None]
    assert errors["data"] == ["", "the reward is not finite", "", "the sample has no tokens; send at least one"]


def test_overload_says_when_to_come_back(client):
    response = client.post(INFER, content=body_of([[BUSY_TOKEN]]))
    assert error_of(response, 503) == "the queue is full"
    assert response.headers["retry-after"] == "3"


def test_requests_beyond_the_limit_are_refused_at_once(client, service):
    with service.scorer.held() as go, ThreadPoolExecutor(12) as pool:
        slow = body_of([[SLOW_TOKEN]])
        asked = [pool.submit(client.post, INFER, content=slow, timeout=120) for _ in range(12)]
        wait_until(lambda: sum(each.done() for each in asked) == 8)
        go.set()
        responses = [each.result() for each in asked]
    refused = [response for response in responses if response.status_code == 503]
    assert len(refused) == 8
    assert {response.headers["retry-after"] for response in refused} == {"1"}
    assert client.post(INFER, content=body_of([[5]])).status_code == 200


@pytest.mark.parametrize("where", ["before", "within"])
def test_a_body_too_large_is_refused_before_it_is_read(running_server, client, where):
    """1 GiB is announced, or sent in chunks; the answer is there long before the end, then the connection closes."""
    with connect(running_server) as connection:
        kind = "Content-Length: 1073741824" if where == "before" else "Transfer-Encoding: chunked"
        connection.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n\r\n".encode())
        for _ in range(20 if where == "within" else 0):
            connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        answer = until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer
        assert b'{"error":"the body' in answer
        assert b"(reset)" not in answer
    assert client.post(INFER, content=body_of([[5]])).status_code == 200


def test_a_client_that_sends_all_of_a_large_body_still_reads_the_answer(client):
    assert "larger than the 1 MiB" in error_of(client.post(INFER, content=b" " * (8 << 20)), 413)


def test_a_client_that_leaves_cancels_its_work(running_server, client, service):
    wait_until(lambda: service.num_open == 0)
    before = service.cancelled
    body = body_of([[SLOW_TOKEN]])
    with service.scorer.held():
        with connect(running_server) as connection:
            connection.sendall(posted(body))
            wait_until(lambda: service.num_open == 1)
        wait_until(lambda: service.cancelled == before + 1)
    with connect(running_server) as connection:  # leaves in the middle of the body
        connection.sendall(posted(body[:9], len(body)))
    slow = [client.post(INFER, content=body).status_code for _ in range(2)]
    assert slow == [200, 200]
    assert service.cancelled == before + 1


def test_what_is_not_http_gets_a_400(running_server, client):
    with connect(running_server) as connection:
        connection.sendall(b"\x16\x03\x01 no http\r\n\r\n")
        answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'{"error":' in answer
    assert client.get("/v2/health/live").status_code == 200


def test_every_request_is_counted_by_how_it_ends():
    service = EchoService()
    config = ServerConfig(port=0, grpc_port=None, max_body_mb=1, max_requests=1)
    with RunningServer(service, config) as server, httpx.Client(base_url=server.http_url, timeout=120) as client:
        for content in (body_of([[5]]), b"{", body_of([[5], [-1]]), body_of([[NAN_TOKEN]]), body_of([[CRASH_TOKEN]])):
            client.post(INFER, content=content)
        client.post(INFER, content=b" " * (2 << 20))
        client.post(INFER, content=body_of([[BUSY_TOKEN]]))
        for name in ("nobody", "somebody"):
            client.post(f"/v2/models/{name}/infer", content=body_of([[5]]))
        client.post("/v2/models/many/versions/9/infer", content=body_of([[5]]))
        service.ready = False
        client.post(INFER, content=body_of([[5]]))
        service.ready = True
        before = len(service.requests)
        with service.scorer.held() as go, ThreadPoolExecutor(1) as pool:
            slow = pool.submit(client.post, INFER, content=body_of([[SLOW_TOKEN]]), timeout=120)
            wait_until(lambda: len(service.requests) > before)
            client.post("/v2/models/many/infer", content=body_of([[5]]))
            go.set()
            slow.result()
        body = body_of([[SLOW_TOKEN]])
        with service.scorer.held():
            with connect(server) as connection:
                connection.sendall(posted(body))
                wait_until(lambda: len(service.requests) > before + 1)
            wait_until(lambda: ("reward_model", "Cancelled") in outcomes(server.http_url))
        metrics = client.get("/metrics").text
        assert outcomes(server.http_url) == {
            ("reward_model", "ok"): 2,
            ("reward_model", "InvalidRequest"): 2,
            ("reward_model", "SampleFailed"): 1,
            ("reward_model", "ServerFault"): 1,
            ("reward_model", "PayloadTooLarge"): 1,
            ("reward_model", "Overloaded"): 1,
            ("reward_model", "Unavailable"): 1,
            ("reward_model", "Cancelled"): 1,
            ("unknown", "UnknownModel"): 2,
            ("many", "UnknownModel"): 1,
            ("many", "Overloaded"): 1,
        }
    assert 'guerdon_e2e_request_latency_seconds_count{model="reward_model"} 10.0' in metrics
    assert 'guerdon_e2e_request_latency_seconds_count{model="unknown"} 2.0' in metrics


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_in_progress_are_bounded_together(chunked):
    """Half a body waits for its rest; beside it, small ones fit and another large one does not."""
    config = ServerConfig(port=0, grpc_port=None, max_body_mb=1, max_bodies_mb=1)
    whole = body_of([[5] * 100_000] * 3)
    assert 0.5 < len(whole) / (1 << 20) < 1
    with RunningServer(EchoService(), config) as server, httpx.Client(base_url=server.http_url, timeout=120) as client:
        with connect(server) as connection:
            kind = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(whole)
            connection.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % (INFER.encode(), kind))
            connection.sendall(b"%x\r\n" % len(whole) + whole + b"\r\n" if chunked else whole[:-1])
            large = lambda: client.post(INFER, content=iter([whole]) if chunked else whole)  # noqa: E731
            wait_until(lambda: large().status_code == 503)
            assert client.post(INFER, content=body_of([[5]])).status_code == 200
            response = large()
            assert "bodies and answers of the requests in progress would exceed 1 MiB" in error_of(response, 503)
            assert response.headers["retry-after"] == "1"
        wait_until(lambda: client.post(INFER, content=whole).status_code != 503)  # the first's bytes left with it
        assert "takes at most" in error_of(client.post(INFER, content=whole), 400)


@tried_again
def test_a_slow_upload_is_ended_and_gives_its_place_back():
    config = ServerConfig(port=0, grpc_port=None, max_requests=1, request_timeout_s=0.4)
    with RunningServer(EchoService(), config) as server, httpx.Client(base_url=server.http_url, timeout=120) as client:
        with connect(server) as connection:
            connection.sendall(posted(b"{", 999))
            answer = until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 504")
        assert b"the body did not come within 0.4 s" in answer
        assert client.post(INFER, content=body_of([[5]])).status_code == 200
        assert outcomes(server.http_url) == {("reward_model", "UploadTooSlow"): 1, ("reward_model", "ok"): 1}


@tried_again
def test_a_large_body_does_not_hold_up_the_others():
    """Its last row is wrong, so that decoding is all that it takes."""
    rows = ['[{"role": "user", "content": "x"}]'] * 200_000 + ["[]"]
    inputs = [{"name": "messages", "shape": [len(rows), 1], "datatype": "BYTES", "data": rows}]
    body = orjson.dumps({"inputs": inputs})
    config = ServerConfig(port=0, grpc_port=None)
    # What other tests have imported and left would be walked through while the many objects of the body are made.
    gc.collect()
    gc.freeze()
    with (
        RunningServer(EchoService(), config) as server,
        httpx.Client(base_url=server.http_url, timeout=120) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        started = time.monotonic()
        large = pool.submit(httpx.post, server.http_url + INFER, content=body, timeout=120)
        waits = []
        while not large.done():
            asked = time.monotonic()
            assert client.get("/v2/health/live").status_code == 200
            waits.append(time.monotonic() - asked)
        taken = time.monotonic() - started
    gc.unfreeze()
    assert "row 200000: must be a JSON list" in error_of(large.result(), 400)
    assert max(waits) < 0.3 * taken


def test_a_body_holds_its_room_until_it_is_decoded_even_if_its_client_leaves(monkeypatch):
    """The thread that decodes it cannot be cancelled."""
    begun, go, read = threading.Event(), threading.Event(), kserve.read

    def slow(body, *others):
        if len(body) > 1 << 20:
            begun.set()
            assert go.wait(120)
        return read(body, *others)

    monkeypatch.setattr(kserve, "read", slow)
    large, small = body_of([[5] * 600_000]), body_of([[5]])
    config = ServerConfig(port=0, grpc_port=None, max_body_mb=2, max_bodies_mb=2)
    with RunningServer(EchoService(), config) as server, httpx.Client(base_url=server.http_url, timeout=120) as client:
        with connect(server) as leaves:
            leaves.sendall(posted(large))
            assert begun.wait(120)
        for _ in range(20):
            assert "bodies and answers of the requests in progress" in error_of(client.post(INFER, content=small), 503)
            time.sleep(0.005)
        go.set()
        wait_until(lambda: client.post(INFER, content=small).status_code == 200)


def test_a_method_that_a_path_does_not_take_is_answered_with_those_that_it_takes(client):
    """RFC 9110, section 15.5.6: 405 "MUST generate an Allow header field"."""
    paths = client.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        if path == "/":
            continue  # where other methods are told that there is nothing
        for method in ("DELETE", "OPTIONS", "PATCH"):
            response = client.request(method, re.sub(r"\{\w+\}", "x", path))
            assert (response.status_code, response.headers["guerdon-error"]) == (405, "MethodNotAllowed")
            assert {*response.headers["allow"].split(", ")} == {operation.upper() for operation in operations}
            assert "allow" not in client.request("DELETE", "/nowhere").headers


def test_the_server_tells_what_it_is_with_and_without_a_slash(client):
    assert client.get("/v2/").json() == client.get("/v2").json()


MIB = 1 << 20


def read(gate: Gate, body: bytes, encoding: bytes, max_mb: int = 64) -> bytes:
    """What a request with this compressed body has."""

    async def receive() -> dict:
        return {"type": "http.request", "body": body, "more_body": False}

    async def reading() -> bytes:
        head = {"path": "/", "headers": [(b"content-encoding", encoding), (b"content-length", b"%d" % len(body))]}
        with Place(gate) as place:
            found = await HttpRequest(head, receive).read_body(place, ServerConfig(max_body_mb=max_mb))
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
