"""gRPC under hostile clients: memory, places and time are bounded, keys come first, and others are served meanwhile."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from guerdon.access import KEYS_VARIABLE
from guerdon.config import ServerConfig
from guerdon.server.runtime import RunningServer
from guerdon.wire import kserve_grpc
from guerdon.wire.kserve import InferRequest
from guerdon.wire.tensors import Tensor
from server.echo_service import SLOW_TOKEN, EchoService
from server.helpers import outcomes, wait_until

MIB = 1 << 20
KEYS = {"s": "score-key-0123456789", "t": "train-key-0123456789", "a": "admin-key-0123456789"}


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


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"s": "score trainer", "t": "train learner", "a": "admin boss"}
    monkeypatch.setenv(KEYS_VARIABLE, ",".join(f"{names[role]} {key}" for role, key in KEYS.items()))


def code_of(call: Any, request: Any, key: str | None = None) -> str:
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    try:
        call(request, metadata=metadata, timeout=5)
    except grpc.RpcError as e:
        return e.code().name
    return "OK"


def test_messages_that_do_not_come_end_and_give_their_places_back():
    """They have all the places in which messages come; who waits is served once they have had their time."""
    config = ServerConfig(port=0, grpc_port=0, max_body_mb=1, max_bodies_mb=4, read_timeout_s=0.6)
    with RunningServer(EchoService(), config) as server, channel_to(server) as channel, channel_to(server) as other:
        unsent = Unsent(channel, 4)
        time.sleep(0.2)
        assert stub_of(other).ServerReady(pb.ServerReadyRequest(), timeout=0.3).ready
        began = time.monotonic()
        assert stub_of(other).ModelInfer(message([5]), timeout=10).outputs[0].shape == [1]
        assert 0.1 < time.monotonic() - began < 3
        for call in unsent.calls:
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not come within 0.6 s" in call.details()
        unsent.leave()
        assert outcomes(server.http_url) == {("unknown", "UploadTooSlow"): 4, ("reward_model", "ok"): 1}


def test_one_client_cannot_have_all_the_places_in_which_messages_come(keys):
    config = ServerConfig(port=0, grpc_port=0, max_body_mb=1, max_bodies_mb=4, read_timeout_s=20)
    with RunningServer(EchoService(), config) as server, channel_to(server) as channel, channel_to(server) as other:
        unsent = Unsent(channel, 20, KEYS["s"])
        time.sleep(0.2)
        assert code_of(stub_of(other).ModelInfer, message([5]), KEYS["t"]) == "OK"
        for call in unsent.calls:
            call.cancel()
        unsent.leave()
        wait_until(lambda: code_of(stub_of(other).ModelInfer, message([5]), KEYS["s"]) == "OK")


def test_health_answers_also_when_the_gate_is_full():
    config = ServerConfig(port=0, grpc_port=0, max_requests=1)
    service = EchoService()
    with RunningServer(service, config) as server, channel_to(server) as channel:
        stub = stub_of(channel)
        slow = stub.ModelInfer.future(message([SLOW_TOKEN]))
        wait_until(lambda: bool(service.requests))
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=0.5).live
        assert stub.ServerReady(pb.ServerReadyRequest(), timeout=0.5).ready
        assert stub.ModelReady(pb.ModelReadyRequest(name="reward_model"), timeout=0.5).ready
        assert code_of(stub.ModelInfer, message([5])) == "RESOURCE_EXHAUSTED"
        slow.result()


def test_each_method_wants_its_role(keys):
    methods: dict[str, tuple[Any, str]] = {
        "ServerLive": (pb.ServerLiveRequest(), "nobody"),
        "ServerReady": (pb.ServerReadyRequest(), "nobody"),
        "ModelReady": (pb.ModelReadyRequest(name="reward_model"), "s"),
        "ServerMetadata": (pb.ServerMetadataRequest(), "s"),
        "ModelMetadata": (pb.ModelMetadataRequest(name="reward_model"), "s"),
        "ModelConfig": (pb.ModelConfigRequest(name="reward_model"), "s"),
        "ModelInfer": (message([5]), "s"),
        "RepositoryIndex": (pb.RepositoryIndexRequest(), "s"),
        "RepositoryModelLoad": (pb.RepositoryModelLoadRequest(model_name="nobody"), "a"),
        "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest(model_name="nobody"), "a"),
    }
    with RunningServer(EchoService(), ServerConfig(port=0, grpc_port=0)) as server, channel_to(server) as channel:
        for name, (request, needed) in methods.items():
            call = getattr(stub_of(channel), name)
            wanted = "OK" if needed == "nobody" else "UNAUTHENTICATED"
            assert code_of(call, request) == wanted
            assert code_of(call, request, "a-key-that-nobody-has") == wanted
            for role, key in KEYS.items():
                passes = "sta".index(role) >= "sta".find(needed)
                found = code_of(call, request, key)
                if needed == "a" and passes:
                    assert found == "NOT_FOUND"
                else:
                    assert found == ("OK" if passes else "PERMISSION_DENIED"), (name, role)


def test_no_message_is_read_of_whoever_has_no_key(keys):
    config = ServerConfig(port=0, grpc_port=0)
    with RunningServer(EchoService(), config) as server, channel_to(server) as channel:
        unsent = Unsent(channel, 3, "a-key-that-nobody-has")
        for call in unsent.calls:
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        unsent.leave()


def test_without_keys_nobody_is_an_admin():
    with RunningServer(EchoService(), ServerConfig(port=0, grpc_port=0)) as server, channel_to(server) as channel:
        request = pb.RepositoryModelLoadRequest(model_name="reward_model")
        assert code_of(stub_of(channel).RepositoryModelLoad, request) == "PERMISSION_DENIED"


def test_small_methods_take_no_large_messages():
    with RunningServer(EchoService(), ServerConfig(port=0, grpc_port=0)) as server, channel_to(server) as channel:
        request = pb.ModelReadyRequest(name="x" * (2 * MIB))
        assert code_of(stub_of(channel).ModelReady, request) == "INVALID_ARGUMENT"
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
        assert code_of(call, b"\xff\xff\xff") == "INVALID_ARGUMENT"
        assert code_of(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer"), b"\xff") == "INVALID_ARGUMENT"


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[RunningServer, psutil.Process]]:
    """A server in a process of its own, to which 16 MiB of messages may come at once, each of 2."""
    program = """
        from guerdon.config import ServerConfig
        from guerdon.server.runtime import run
        from server.echo_service import EchoService
        config = ServerConfig(port=0, grpc_port=0, max_body_mb=2, max_bodies_mb=16)
        run(EchoService(), config, on_started=lambda http, grpc: print(http, grpc, flush=True))
    """
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root / "tests")))}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        http_url, grpc_url = started.stdout.readline().split()
        server = RunningServer.__new__(RunningServer)
        server.http_url, server.grpc_url = http_url, grpc_url
        yield server, psutil.Process(started.pid)
        started.terminate()


def peak_mib(process: psutil.Process) -> float:
    """The most memory that the process has had so far, in MiB."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


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
