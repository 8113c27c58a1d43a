"""ModelStreamInfer by tritonclient's streams and by clients of no library: order, errors, bounds and ends."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

import served
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from served import Serve
from server.echo_service import BUSY_TOKEN, CRASH_TOKEN, SLOW_TOKEN, EchoService, reward_of
from server.front.test_grpc_hostile import message
from server.helpers import tried_again, wait_until
from server.keys import SCORE, TRAIN, keyed

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def address(server: RunningServer) -> str:
    return (server.grpc_url or "").removeprefix("grpc://")


def ids(row: list[int]) -> list[tritonclient.grpc.InferInput]:
    given = tritonclient.grpc.InferInput("input_ids", [1, len(row)], "INT32")
    given.set_data_from_numpy(np.array([row], np.int32))
    return [given]


class Stream:
    """A stream whose requests are sent when the test says so; its responses come in turn."""

    def __init__(self, channel: grpc.Channel, key: str | None = None) -> None:
        self._requests: queue.SimpleQueue = queue.SimpleQueue()
        metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.call = stub.ModelStreamInfer(iter(self._requests.get, None), metadata=metadata, timeout=120)

    def ask(self, request: pb.ModelInferRequest) -> pb.ModelStreamInferResponse:
        self._requests.put(request)
        return next(self.call)

    def send(self, request: pb.ModelInferRequest) -> None:
        self._requests.put(request)

    def end(self) -> None:
        """Sends no more."""
        self._requests.put(None)


@contextmanager
def stream_to(server: RunningServer, key: str | None = None) -> Iterator[Stream]:
    with grpc.insecure_channel(address(server)) as channel:
        stream = Stream(channel, key)
        try:
            yield stream
        finally:
            stream.end()


@pytest.fixture(scope="module")
def server(service: EchoService, serve: Serve) -> RunningServer:
    return serve(grpc_port=0, max_body_mb=1, max_bodies_mb=4, build=lambda _: service)


def test_tritonclients_stream_is_answered_in_order_and_errors_do_not_end_it(server: RunningServer) -> None:
    came: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(address(server)) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        rows = [[5], [5, 6], [-5], [7], [CRASH_TOKEN], [BUSY_TOKEN], [8, 9]]
        for i, row in enumerate(rows):
            client.async_stream_infer("reward_model", ids(row), request_id=str(i), enable_empty_final_response=i % 2)
        client.async_stream_infer("nobody", ids([5]))
        found = [came.get(timeout=120) for _ in range(len(rows) + 1)]
        client.stop_stream()
    for i, (row, (result, error)) in enumerate(zip(rows, found[:-1], strict=True)):
        if row[0] in (-5, CRASH_TOKEN, BUSY_TOKEN):
            assert result is None
            continue
        assert error is None
        assert result.as_numpy("rewards").ravel().tolist() == [reward_of(row)]
        assert result.get_response().id == str(i)
        assert result.get_response().parameters["triton_final_response"].bool_param
    assert "row 0: token id -5" in found[2][1].message()
    assert found[4][1].message() == "internal error; the server's log has the details"
    assert "unknown model 'nobody'" in found[-1][1].message()
    assert came.empty()


async def test_tritonclients_asynchronous_stream(server: RunningServer) -> None:
    async def requests():
        for i in range(30):
            yield {"model_name": "reward_model", "inputs": ids([i + 3]), "request_id": str(i)}

    async with tritonclient.grpc.aio.InferenceServerClient(address(server)) as client:
        found = [result async for result, error in client.stream_infer(requests()) if error is None]
    assert [result.get_response().id for result in found] == [str(i) for i in range(30)]
    assert [result.as_numpy("rewards").item() for result in found] == [reward_of([i + 3]) for i in range(30)]


def test_errors_name_their_request_and_their_class(server: RunningServer) -> None:
    busy, wrong = message([BUSY_TOKEN]), message([-5])
    busy.id, wrong.id = "b", "w"
    with stream_to(server) as stream:
        for request, kind, retry in ((busy, "Overloaded", 3), (wrong, "InvalidRequest", 0)):
            told = stream.ask(request)
            assert told.error_message
            assert told.infer_response.id == request.id
            assert told.infer_response.parameters["guerdon-error"].string_param == kind
            assert told.infer_response.parameters["retry-after"].int64_param == retry
        stream.end()
        assert stream.call.code() is grpc.StatusCode.OK


def test_the_next_request_is_read_after_the_answer(server: RunningServer, service: EchoService) -> None:
    with stream_to(server) as stream, service.scorer.held() as go:
        for row in ([SLOW_TOKEN], [6], [7]):
            stream.send(message(row))
        wait_until(lambda: service.num_open == 1)
        assert httpx.get(server.http_url + "/health").status_code == 200  # a moment in which more could have been read
        assert service.requests[-1].tokens[0].tolist() == [SLOW_TOKEN]
        assert service.num_open == 1
        go.set()
        assert not any(next(stream.call).error_message for _ in range(3))
    assert [request.tokens[0].tolist() for request in list(service.requests)[-3:]] == [[SLOW_TOKEN], [6], [7]]


def test_a_client_that_leaves_cancels_its_work(server: RunningServer, service: EchoService) -> None:
    wait_until(lambda: service.num_open == 0)
    before = service.cancelled
    with stream_to(server) as stream, service.scorer.held():
        stream.send(message([SLOW_TOKEN]))
        wait_until(lambda: service.num_open == 1)
        stream.call.cancel()
        wait_until(lambda: service.num_open == 0)
    assert service.cancelled == before + 1


def test_a_stream_needs_a_key_and_counts_each_request(tmp_path: Path) -> None:
    config = keyed(tmp_path)
    with served.running(config=config, build=EchoService) as server:
        with stream_to(server) as stream:
            assert stream.call.code() is grpc.StatusCode.UNAUTHENTICATED
        with stream_to(server, SCORE) as stream:
            assert [bool(stream.ask(message(row)).error_message) for row in ([5], [-5], [6])] == [False, True, False]
        text = httpx.get(server.http_url + "/metrics", headers={"Authorization": f"Bearer {SCORE}"}).text
    assert 'guerdon_client_requests_total{client="scorer",outcome="ok"} 2.0' in text
    assert 'guerdon_client_requests_total{client="scorer",outcome="InvalidRequest"} 1.0' in text


def test_streams_have_places_of_their_own_which_they_give_back(tmp_path: Path) -> None:
    """Three keys, six places: each key has one that the others cannot take; calls need none of them."""
    config = keyed(tmp_path, max_body_mb=1, max_bodies_mb=6, read_timeout_s=120.0)
    with served.running(config=config, build=EchoService) as server, grpc.insecure_channel(address(server)) as channel:
        streams = [Stream(channel, SCORE) for _ in range(4)]
        assert not any(stream.ask(message([5])).error_message for stream in streams)
        beyond = Stream(channel, SCORE)
        assert beyond.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "streams are open" in beyond.call.details()
        beyond.end()
        metadata = (("authorization", f"Bearer {SCORE}"),)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelInfer(message([5]), metadata=metadata, timeout=120).outputs
        other = Stream(channel, TRAIN)
        assert not other.ask(message([5])).error_message
        streams.pop().end()

        def has_room() -> bool:
            again = Stream(channel, SCORE)
            try:
                return not again.ask(message([5])).error_message
            except grpc.RpcError:
                return False
            finally:
                again.end()

        wait_until(has_room)
        for stream in (*streams, other):
            stream.end()


@tried_again
def test_a_stream_on_which_nothing_comes_ends() -> None:
    """Its first message has the time of any call's, the next ones that for which a connection may rest."""
    config = ServerConfig(port=0, grpc_port=0, read_timeout_s=0.3, idle_timeout_s=1.5)
    with RunningServer(EchoService(), config) as server, stream_to(server) as silent, stream_to(server) as resting:
        assert not resting.ask(message([5])).error_message
        assert silent.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not come within 0.3 s" in silent.call.details()
        assert not resting.ask(message([5])).error_message
        assert resting.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not come within 1.5 s" in resting.call.details()


def test_a_stop_does_not_wait_for_a_resting_stream() -> None:
    with (
        served.running(grpc_port=0, build=EchoService, grace_s=300) as server,
        stream_to(server) as one,
    ):
        assert not one.ask(message([5])).error_message
        server.close()
        assert one.call.code() is not grpc.StatusCode.OK
