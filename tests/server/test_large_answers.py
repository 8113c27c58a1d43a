"""Answers that are large although what was asked is small: they are made in a thread, and hold room at the gate."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2_grpc

from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from guerdon.wire import kserve, kserve_grpc
from guerdon.wire.tensors import InferRequest, Tensor
from server.echo_service import EchoService
from server.helpers import INFER, wait_until

TEXTS = ["x"] * 999 + ["x" * 1000]
"""A few kilobytes of which the values make a table of a million numbers."""

MANY = INFER.replace("reward_model", "many")


class Watched(np.ndarray):
    """Values that keep in which threads somebody looked at them."""

    threads: set[str]

    def __len__(self) -> int:
        Watched.threads.add(threading.current_thread().name)
        return super().__len__()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """One whose bodies have 2 MiB together, and whose values are watched."""
    service = EchoService()
    scorer: Any = service.catalog.entries["many"].loaded()
    score = scorer.score

    def watched(sequences: list[Any]) -> list[Any]:
        scores = score(sequences)
        for one in scores:
            one.values = one.values.view(Watched)
        Watched.threads = set()
        return scores

    monkeypatch.setattr(scorer, "score", watched)
    config = ServerConfig(port=0, grpc_port=0, max_body_mb=1, max_bodies_mb=2)
    with RunningServer(service, config) as running:
        yield running


def asked(texts: list[str], *, is_binary: bool) -> tuple[bytes, int]:
    inputs = {"sentences": Tensor.of_texts("sentences", texts)}
    return kserve.encode_request(InferRequest(inputs, {"values": is_binary}))


def post(server: RunningServer, texts: list[str], *, is_binary: bool) -> httpx.Response:
    body, json_length = asked(texts, is_binary=is_binary)
    headers = {"Inference-Header-Content-Length": str(json_length)}
    return httpx.post(server.http_url + MANY, content=body, headers=headers, timeout=60)


def call(server: RunningServer, texts: list[str]) -> Any:
    inputs = {"sentences": Tensor.of_texts("sentences", texts)}
    request = kserve_grpc.encode_request(InferRequest(inputs, {"values": True}), "many")
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel((server.grpc_url or "").removeprefix("grpc://"), options) as channel:
        return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)


@pytest.mark.parametrize("way", ["json", "binary", "grpc"])
def test_a_large_answer_to_a_small_request_is_made_beside_the_event_loop(server: RunningServer, way: str) -> None:
    for texts, is_aside in ((TEXTS, True), (TEXTS[:9], False)):
        if way == "grpc":
            shape = list(call(server, texts).outputs[0].shape)
        else:
            told = post(server, texts, is_binary=way == "binary")
            assert told.status_code == 200, told.text
            head = told.content[: int(told.headers.get("inference-header-content-length", len(told.content)))]
            shape = orjson.loads(head)["outputs"][0]["shape"]
        assert shape == [len(texts), len(texts[-1])]
        assert Watched.threads and ("guerdon-server" not in Watched.threads) == is_aside


def test_a_large_answer_holds_room_of_bodies(server: RunningServer) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(2):
            address = ("127.0.0.1", httpx.URL(server.http_url).port)
            announced = held.enter_context(socket.create_connection(address, timeout=30))
            announced.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n" % INFER.encode())
        wait_until(lambda: post(server, TEXTS, is_binary=True).status_code == 503)
        assert "bodies and answers of the requests in progress" in post(server, TEXTS, is_binary=True).json()["error"]
        with pytest.raises(grpc.RpcError, match="bodies and answers of the requests in progress"):
            call(server, TEXTS)
        assert post(server, TEXTS[:9], is_binary=True).status_code == 200
    wait_until(lambda: post(server, TEXTS, is_binary=True).status_code == 200)
