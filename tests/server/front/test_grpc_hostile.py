"""gRPC under hostile clients: memory, places and time are bounded, keys come first, and others are served meanwhile."""

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import served
from guerdon.server.front import grpc_server
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from guerdon.wire import kserve_grpc
from guerdon.wire.tensors import InferRequest, Tensor
from server.echo_service import SLOW_TOKEN, EchoService
from server.helpers import INFER, body_of, echo_process, outcomes, tried_again, wait_until
from server.keys import ADMIN, SCORE, TRAIN, keyed
from server.raw_grpc import RawClient

MIB = 1 << 20


def message(row: list[int], rows: int = 1) -> pb.ModelInferRequest:
    ids = Tensor.of("input_ids", np.array([row] * rows, np.int32))
    return kserve_grpc.encode_request(InferRequest({"input_ids": ids}), "reward_model")


@contextmanager
def channel_to(server: RunningServer, **options: Any) -> Iterator[grpc.Channel]:
    address = (server.grpc_url or "").removeprefix("grpc://")
    with grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)], **options) as channel:
        yield channel


def stub_of(channel: grpc.Channel) -> service_pb2_grpc.GRPCInferenceServiceStub:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


class Unsent:
    """Calls whose message never comes: as a stream it may, on the wire, be that of any unary method."""

    def __init__(self, channel: grpc.Channel, count: int, key: str | None = None) -> None:
        self._unsent: list[queue.SimpleQueue] = []
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self.calls = []
        for _ in range(count):
            waiting: queue.SimpleQueue = queue.SimpleQueue()
            self._unsent.append(waiting)
            self.calls.append(call.future(iter(waiting.get, None), metadata=metadata))

    def leave(self) -> None:
        """Ends the threads that would send them."""
        for waiting in self._unsent:
            waiting.put(None)


def code_of(call: Any, request: Any, key: str | None = None) -> str:
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    try:
        call(request, metadata=metadata, timeout=120)
    except grpc.RpcError as e:
        return e.code().name
    return "OK"


@tried_again
def test_messages_that_do_not_come_end_and_give_their_places_back():
    """They have all the places in which messages come; who waits is served once they have had their time."""
    config = ServerConfig(port=0, grpc_port=0, max_body_mb=1, max_bodies_mb=4, read_timeout_s=0.6)
    with RunningServer(EchoService(), config) as server, channel_to(server) as channel, channel_to(server) as other:
        unsent = Unsent(channel, 4)
        time.sleep(0.2)
        assert stub_of(other).ServerReady(pb.ServerReadyRequest(), timeout=120).ready
        assert not any(call.done() for call in unsent.calls)
        began = time.monotonic()
        assert stub_of(other).ModelInfer(message([5]), timeout=120).outputs[0].shape == [1]
        assert time.monotonic() - began > 0.1
        for call in unsent.calls:
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not come within 0.6 s" in call.details()
        unsent.leave()
        assert outcomes(server.http_url) == {("unknown", "UploadTooSlow"): 4, ("reward_model", "ok"): 1}


def test_one_client_cannot_have_all_the_places_in_which_messages_come(tmp_path):
    config = keyed(tmp_path, max_body_mb=1, max_bodies_mb=4, read_timeout_s=120)
    with (
        served.running(config=config, build=EchoService) as server,
        channel_to(server) as channel,
        channel_to(server) as other,
    ):
        unsent = Unsent(channel, 20, SCORE)
        time.sleep(0.2)
        assert code_of(stub_of(other).ModelInfer, message([5]), TRAIN) == "OK"
        for call in unsent.calls:
            call.cancel()
        unsent.leave()
        wait_until(lambda: code_of(stub_of(other).ModelInfer, message([5]), SCORE) == "OK")


def raw_client(server: RunningServer, **options: Any) -> RawClient:
    return RawClient(int((server.grpc_url or "").rpartition(":")[2]), **options)


def test_half_open_calls_of_two_clients_do_not_keep_a_third_waiting(tmp_path):
    """Each client has a place of its own in which a message may come."""
    config = keyed(tmp_path, max_body_mb=1, max_bodies_mb=4, header_timeout_s=120.0, read_timeout_s=120.0)
    with served.running(config=config, build=EchoService) as server, channel_to(server) as channel:
        raw = raw_client(server)
        for method in ("ModelReady", "ModelInfer", "ModelReady", "ModelInfer"):
            raw.ask(method, key=SCORE)
            raw.ask(method, key=TRAIN)
        time.sleep(0.2)
        for _ in range(3):
            assert code_of(stub_of(channel).ModelReady, pb.ModelReadyRequest(name="reward_model"), ADMIN) == "OK"
            assert code_of(stub_of(channel).ModelInfer, message([5]), ADMIN) == "OK"
        raw.close()


@tried_again
def test_half_open_calls_of_any_method_are_bounded_and_small_ones_end_soon():
    config = ServerConfig(port=0, grpc_port=0, max_requests=6, header_timeout_s=0.6, read_timeout_s=120.0)
    with RunningServer(EchoService(), config) as server, channel_to(server) as channel:
        raw, stub = raw_client(server), stub_of(channel)
        for _ in range(3):
            raw.ask("ModelReady")
            raw.ask("RepositoryIndex")
        time.sleep(0.2)
        for method, request in (("ModelReady", pb.ModelReadyRequest()), ("ModelInfer", message([5]))):
            assert code_of(getattr(stub, method), request) == "RESOURCE_EXHAUSTED"
        assert stub.ServerReady(pb.ServerReadyRequest(), timeout=120).ready
        assert httpx.post(server.http_url + INFER, content=body_of([[5]])).status_code == 200
        wait_until(lambda: code_of(stub.ModelInfer, message([5])) == "OK")
        raw.close()


def large_answers_call() -> bytes:
    request = message([5] * 2048, 100)
    request.model_name = "many"
    for name in ("rewards", "values"):
        request.outputs.add().name = name
    return request.SerializeToString()


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@tried_again
def test_answers_that_are_not_read_end_and_leave_nothing(monkeypatch, method):
    """Until then they hold the room of bodies that they had; their client answers pings, and stays."""
    monkeypatch.setattr(grpc_server, "LEAST_BYTES_PER_S", 1 << 30)
    with served.running(build=EchoService, grpc_port=0, max_body_mb=1, max_bodies_mb=2, write_timeout_s=3.0) as server:
        raw = raw_client(server)
        raw.ask(method, large_answers_call())  # its answer takes all the room
        wait_until(lambda: outcomes(server.http_url).get(("many", "ok")) == 1)
        large = body_of([[5] * 200_000])
        assert httpx.post(server.http_url + INFER, content=large).status_code == 503
        wait_until(lambda: httpx.post(server.http_url + INFER, content=large).status_code == 400)  # it is too long
        wait_until(lambda: not [task for task in asyncio.all_tasks(server._loop) if task.get_name() == "rpc_task"])
        assert not raw.is_closed.is_set()
        raw.close()


def test_a_stop_does_not_wait_for_what_is_half_open_or_not_read():
    config = ServerConfig(port=0, grpc_port=0)
    with RunningServer(EchoService(), config, grace_s=600) as server:
        raw = raw_client(server)
        raw.ask("ModelInfer", large_answers_call())
        wait_until(lambda: outcomes(server.http_url).get(("many", "ok")) == 1)
        for method in ("ModelReady", "ModelInfer"):
            raw.ask(method)
        time.sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 120
    raw.close()


@tried_again
def test_connections_have_bounds():
    """Of number, of time without a call and for its first word; none of them is looked at by a ping for its speed."""
    config = ServerConfig(
        port=0, grpc_port=0, max_connections=3, max_requests=7, header_timeout_s=0.5, idle_timeout_s=1.6
    )
    with RunningServer(EchoService(), config) as server:
        began = time.monotonic()
        silent = socket.create_connection(("127.0.0.1", int((server.grpc_url or "").rpartition(":")[2])), 5)
        idle, busy = raw_client(server), raw_client(server)
        busy.ask("ModelInfer")
        wait_until(lambda: 3 in busy.settings)
        assert busy.settings[3] == 107  # calls at once
        beyond = raw_client(server)
        assert beyond.is_closed.wait(120)
        with contextlib.suppress(ConnectionError):
            while silent.recv(4096):  # its time is up, which recv would not survive either
                pass
        assert 0.3 < time.monotonic() - began < 1.4
        silent.close()
        assert idle.is_closed.wait(120)
        assert not busy.is_closed.is_set()
        busy.ask("ModelReady", pb.ModelReadyRequest(name="x" * 60_000).SerializeToString())
        time.sleep(0.1)
        assert busy.num_pings == 0
        for raw in (idle, busy, beyond):
            raw.close()


@tried_again
def test_a_client_that_answers_no_ping_is_left(monkeypatch):
    monkeypatch.setattr(grpc_server, "_PING_AFTER_MS", 300)
    monkeypatch.setattr(grpc_server, "_PING_ANSWER_MS", 300)
    with served.running(grpc_port=0, build=EchoService) as server:
        vanished, other = raw_client(server, answers_pings=False), raw_client(server)
        assert vanished.is_closed.wait(120)
        assert other.num_pings
        assert not other.is_closed.is_set()
        other.close()


@tried_again
def test_a_client_may_ping_while_it_waits(monkeypatch):
    """As many clients do every 10 seconds; one that floods the server with pings is left."""
    monkeypatch.setattr(grpc_server, "_LEAST_PING_MS", 50)
    service = EchoService()
    with (
        RunningServer(service, ServerConfig(port=0, grpc_port=0)) as server,
        service.scorer.held(),
        contextlib.closing(raw_client(server)) as waiting,
        contextlib.closing(raw_client(server)) as flooding,
    ):
        waiting.ask("ModelInfer", message([SLOW_TOKEN]).SerializeToString())
        wait_until(lambda: bool(service.requests))
        for i in range(8):
            waiting.ping()
            wait_until(lambda i=i: waiting.num_answered > i)
            time.sleep(0.1)
        assert not waiting.is_closed.is_set()
        with contextlib.suppress(OSError):
            for _ in range(20):
                flooding.ping()
        assert flooding.is_closed.wait(120)


@pytest.mark.slow
def test_a_call_of_forty_seconds_survives_pings_every_ten():
    """By Triton's own client, with the options that it documents."""
    service = EchoService()
    options = tritonclient.grpc.KeepAliveOptions(10_000, 20_000, True, 0)
    with RunningServer(service, ServerConfig(port=0, grpc_port=0)) as server:
        url = (server.grpc_url or "").removeprefix("grpc://")
        asked = tritonclient.grpc.InferInput("input_ids", [1, 1], "INT32")
        asked.set_data_from_numpy(np.array([[SLOW_TOKEN]], np.int32))
        client = tritonclient.grpc.InferenceServerClient(url, keepalive_options=options)
        with client, service.scorer.held() as go:
            threading.Timer(45, go.set).start()
            result = client.infer("reward_model", [asked])
    assert result.as_numpy("rewards").shape == (1,)


def test_health_answers_also_when_the_gate_is_full():
    config = ServerConfig(port=0, grpc_port=0, max_requests=1)
    service = EchoService()
    with RunningServer(service, config) as server, channel_to(server) as channel, service.scorer.held() as go:
        stub = stub_of(channel)
        slow = stub.ModelInfer.future(message([SLOW_TOKEN]))
        wait_until(lambda: bool(service.requests))
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=120).live
        assert stub.ServerReady(pb.ServerReadyRequest(), timeout=120).ready
        assert stub.ModelReady(pb.ModelReadyRequest(name="reward_model"), timeout=120).ready
        assert code_of(stub.ModelInfer, message([5])) == "RESOURCE_EXHAUSTED"
        assert not slow.done()
        go.set()
        slow.result()


def test_no_message_is_read_of_whoever_has_no_key(tmp_path):
    with served.running(config=keyed(tmp_path), build=EchoService) as server, channel_to(server) as channel:
        unsent = Unsent(channel, 3, "a-key-that-nobody-has")
        for call in unsent.calls:
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        unsent.leave()


def test_small_methods_take_no_large_messages():
    with served.running(grpc_port=0, build=EchoService) as server, channel_to(server) as channel:
        request = pb.ModelReadyRequest(name="x" * (2 * MIB))
        assert code_of(stub_of(channel).ModelReady, request) == "INVALID_ARGUMENT"
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
        assert code_of(call, b"\xff\xff\xff") == "INVALID_ARGUMENT"
        assert code_of(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer"), b"\xff") == "INVALID_ARGUMENT"


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[RunningServer, psutil.Process]]:
    """A server in a process of its own, to which 16 MiB of messages may come at once, each of 2."""
    with echo_process(max_body_mb=2, max_bodies_mb=16) as (started, http_url, grpc_url):
        server = RunningServer.__new__(RunningServer)
        server.http_url, server.grpc_url = http_url, grpc_url
        yield server, psutil.Process(started.pid)


def peak_mib(process: psutil.Process) -> float:
    """The most memory that the process has had so far, in MiB."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


@pytest.mark.slow
def test_bombs_take_no_more_memory_than_messages_may(process):
    """Each is 128 MiB of zeros: gRPC has to end what decompresses to more than a message may have."""
    server, measured = process
    bomb = bytes(1 << 27)
    with channel_to(server, compression=grpc.Compression.Gzip) as channel:
        small = stub_of(channel).ModelInfer(message([5]))  # compressed messages are served
        assert small.outputs[0].shape == [1]
        before = peak_mib(measured)
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for result in [call.future(bomb) for _ in range(4)]:
            assert result.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak_mib(measured) - before < 64


def test_many_large_messages_at_once_take_no_more_memory_than_messages_may(process):
    """300 MiB are on their way; 16 may be coming, and as many be held, some with copies as they are read and parsed."""
    server, measured = process
    before = peak_mib(measured)
    large = message([3] * 4000, rows=120)
    large.model_name = "nobody"
    assert 1.5 * MIB < large.ByteSize() < 2 * MIB
    with channel_to(server) as channel:
        calls = [stub_of(channel).ModelInfer.future(large) for _ in range(160)]
        codes = {call.code().name for call in calls}
    assert codes <= {"NOT_FOUND", "RESOURCE_EXHAUSTED"}
    assert "NOT_FOUND" in codes
    assert peak_mib(measured) - before < 160


def test_a_browsers_request_is_none_of_grpc():
    """Browsers speak HTTP/2 behind TLS alone, so that no page's name is looked at here."""
    with served.running(grpc_port=0, build=EchoService) as server:
        url = (server.grpc_url or "").replace("grpc://", "http://")
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/inference.GRPCInferenceService/ServerMetadata", headers={"Host": "evil.example.com"})
