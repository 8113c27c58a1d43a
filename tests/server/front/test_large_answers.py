"""Answers that are large, or that nobody reads."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import orjson
import psutil
import pytest
from tritonclient.grpc import service_pb2_grpc

import zoo
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig, TeacherConfig
from guerdon.wire import kserve, kserve_grpc
from guerdon.wire.tensors import InferRequest, Tensor
from served import Serve
from server.echo_service import EchoService
from server.helpers import INFER, posted, tried_again, wait_until

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
    return httpx.post(server.http_url + MANY, content=body, headers=headers, timeout=120)


def call(server: RunningServer, texts: list[str]) -> Any:
    inputs = {"sentences": Tensor.of_texts("sentences", texts)}
    request = kserve_grpc.encode_request(InferRequest(inputs, {"values": True}), "many")
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel((server.grpc_url or "").removeprefix("grpc://"), options) as channel:
        return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=120)


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
            announced = held.enter_context(socket.create_connection(address, timeout=120))
            announced.sendall(posted(b"", 900_000))
        wait_until(lambda: post(server, TEXTS, is_binary=True).status_code == 503)
        assert "bodies and answers of the requests in progress" in post(server, TEXTS, is_binary=True).json()["error"]
        with pytest.raises(grpc.RpcError, match="bodies and answers of the requests in progress"):
            call(server, TEXTS)
        assert post(server, TEXTS[:9], is_binary=True).status_code == 200
    wait_until(lambda: post(server, TEXTS, is_binary=True).status_code == 200)


TOKENS, TOP, ROWS = 50, 100, 200
ROW = [5 + i % 100 for i in range(TOKENS)]
ARRAYS = (TOKENS - 1) * ROWS * TOP * 8
"""Bytes of an answer's arrays, which are 8 MB; as JSON they have up to 55 MB."""

OTHERS = ("vllm, echoed", "sglang", "trl, binary", "kserve")
BODIES_MB, MOST_MB = 24, 100
COMPLETIONS: dict[str, Any] = {"prompt": [ROW] * ROWS, "max_tokens": 0, "prompt_logprobs": TOP}
KSERVE: dict[str, Any] = {
    "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [ROWS, TOKENS], "data": ROW * ROWS}],
    "parameters": {"top_k": TOP},
}
FORMS = ["vllm", "kserve, binary", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/v1/completions", COMPLETIONS),
    "vllm, echoed": ("/v1/completions", {**COMPLETIONS, "echo": True, "logprobs": TOP, "prompt_logprobs": None}),
    "sglang": (
        "/generate",
        {
            "input_ids": [ROW] * ROWS,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": TOP,
            "sampling_params": {"max_new_tokens": 0},
        },
    ),
    "trl, binary": (
        "/get_sequence_logprobs/",
        {"sequences": [ROW] * ROWS, "prompt_lengths": [1] * ROWS, "top_logprobs": TOP, "response_format": "binary"},
    ),
    "kserve": ("/v2/models/teacher/infer", KSERVE),
    "kserve, binary": ("/v2/models/teacher/infer", KSERVE | {"parameters": {"top_k": TOP, "binary_data_output": True}}),
}


@pytest.fixture(scope="module")
def unread_server(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    """A teacher whose bodies and answers may have 24 MiB together."""
    model = zoo.language_model("llama", tmp_path_factory.mktemp("unread") / "teacher")
    teacher = TeacherConfig(model=str(model), max_top_k=TOP, name="teacher")
    return serve(teacher, grpc_port=0, max_body_mb=8, max_bodies_mb=BODIES_MB, write_timeout_s=1.0)


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def unread_post(server: RunningServer, asked: str, version: bytes = b"1.1") -> tuple[dict[str, str], bytes]:
    """The headers, of small letters, and the body of an answer that is read; its status is `:status`."""
    with (
        ask(server, asked, version, 1 << 20) as connection,
        contextlib.closing(http.client.HTTPResponse(connection)) as reply,
    ):
        reply.begin()
        return {":status": str(reply.status), **{k.lower(): v for k, v in reply.getheaders()}}, reply.read()


def ask(server: RunningServer, asked: str, version: bytes = b"1.1", num_buffer: int = 4096) -> socket.socket:
    """A connection on which an answer is asked for, which is not read."""
    path, body = ASKED[asked]
    text = json.dumps(body).encode()
    head = b"POST %s HTTP/%s\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), version, len(text))
    connection = socket.create_connection(("127.0.0.1", httpx.URL(server.http_url).port), timeout=120)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_buffer)
    connection.sendall(head + text)
    return connection


@tried_again
@pytest.mark.parametrize("asked", FORMS)
def test_answers_that_nobody_reads_take_no_more_than_bodies_may(unread_server: RunningServer, asked: str) -> None:
    headers, whole = unread_post(unread_server, asked)
    assert headers[":status"] == "200" and len(whole) > ARRAYS
    before, most = resident_bytes(), 0
    with contextlib.ExitStack() as held:
        unread = [held.enter_context(contextlib.closing(ask(unread_server, asked))) for _ in range(8)]
        statuses = []
        for connection in unread:
            statuses.append(int(connection.recv(12)[9:]))
            most = max(most, resident_bytes())
        assert {*statuses} == {200, 503} and statuses.count(200) * ARRAYS < BODIES_MB << 20
        assert most - before < MOST_MB << 20
        # Others are served, and after a while those who do not read are given up.
        assert httpx.get(f"{unread_server.http_url}/v2/health/live", timeout=120).status_code == 200
        wait_until(lambda: unread_post(unread_server, asked)[0][":status"] == "200")


@pytest.mark.slow
def test_what_large_answers_took_is_given_back(unread_server: RunningServer) -> None:
    """To the system: the C library would keep it for the process."""
    before = resident_bytes()
    for _ in range(3):
        headers, whole = unread_post(unread_server, "vllm")
        assert headers[":status"] == "200"
    num_whole = len(whole)
    del whole
    wait_until(lambda: resident_bytes() - before < num_whole)


def test_a_client_that_reads_too_slowly_is_given_up(unread_server: RunningServer) -> None:
    """Else one that takes a little at a time would keep what others need for hours."""

    def trickle() -> None:
        for _ in range(80):
            assert connection.recv(1000)
            time.sleep(0.05)
        while connection.recv(1 << 20):  # what the system has of it
            pass

    with ask(unread_server, "kserve, binary") as connection, pytest.raises(ConnectionResetError):
        trickle()


@pytest.mark.parametrize("asked", ["kserve", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_client_of_http_1_0_is_told_the_size_instead_of_chunks(unread_server: RunningServer, asked: str) -> None:
    """As nginx asks, if nobody tells it otherwise."""
    (chunked, whole), (sized, same) = unread_post(unread_server, asked), unread_post(unread_server, asked, b"1.0")
    assert chunked["transfer-encoding"] == "chunked" and "transfer-encoding" not in sized
    assert int(sized["content-length"]) == len(same) == len(whole)
    reads = [json.loads(text) for text in (whole, same)]
    assert reads[0].get("outputs") == reads[1].get("outputs")
    assert reads[0].get("usage") == reads[1].get("usage")


def test_long_json_before_binary_tensors_has_its_length(unread_server: RunningServer) -> None:
    outputs = [{"name": "top_ids", "parameters": {"binary_data": True}}, {"name": "top_logprobs"}]
    headers, whole = unread_post(unread_server, "kserve, binary")
    every = kserve.decode_reply(whole, int(headers["inference-header-content-length"]))
    ASKED["both"] = ("/v2/models/teacher/infer", {**KSERVE, "outputs": outputs})
    headers, whole = unread_post(unread_server, "both")
    assert int(headers["content-length"]) == len(whole)
    both = kserve.decode_reply(whole, int(headers["inference-header-content-length"]))
    wanted = {tensor.name: tensor.data for tensor in every.outputs}
    for tensor in both.outputs:
        np.testing.assert_array_equal(tensor.data, wanted[tensor.name])
    assert [tensor.name for tensor in both.outputs] == ["top_ids", "top_logprobs"]
