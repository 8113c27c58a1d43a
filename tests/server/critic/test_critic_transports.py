"""A critic over real HTTP and gRPC: its operations as tensors, the classes of its errors, and clients that leave."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2_grpc

from guerdon.critic_core import TrainRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from guerdon.wire import kserve, kserve_grpc
from guerdon.wire.tensors import InferReply, InferRequest, Tensor
from server.arithmetic_critic import BUG_TOKEN, FAIL_TOKEN, SLOW_TOKEN, WAIT_TOKEN, ArithmeticService, after, request
from server.helpers import wait_until


@pytest.fixture
def service(tmp_path: Path) -> ArithmeticService:
    return ArithmeticService(tmp_path)


@pytest.fixture
def server(service: ArithmeticService) -> Iterator[RunningServer]:
    with RunningServer(service, ServerConfig(port=0, grpc_port=0)) as server:
        yield server
        service.trainer.go.set()


class Refused(Exception):
    """What a client is told: the status, the class and the text."""


class OverHttp:
    def __init__(self, server: RunningServer) -> None:
        self._client = httpx.Client(base_url=server.http_url, timeout=120)

    def call(self, model: str, asked: InferRequest, timeout_s: float = 120) -> InferReply:
        body, length = kserve.encode_request(asked)
        headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
        answer = self._client.post(f"/v2/models/{model}/infer", content=body, headers=headers, timeout=timeout_s)
        if answer.status_code != 200:
            raise Refused(answer.status_code, answer.headers["guerdon-error"], answer.json()["error"])
        size = answer.headers.get("inference-header-content-length")
        return kserve.decode_reply(answer.content, None if size is None else int(size))


class OverGrpc:
    def __init__(self, server: RunningServer) -> None:
        channel = grpc.insecure_channel((server.grpc_url or "").removeprefix("grpc://"))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def call(self, model: str, asked: InferRequest, timeout_s: float = 120) -> InferReply:
        try:
            return kserve_grpc.decode_reply(
                self._stub.ModelInfer(kserve_grpc.encode_request(asked, model), timeout=timeout_s)
            )
        except grpc.RpcError as e:
            kind = dict(e.trailing_metadata() or ()).get("guerdon-error")
            raise Refused(e.code().name, kind, e.details()) from e


@pytest.fixture(params=[OverHttp, OverGrpc])
def client(request: pytest.FixtureRequest, server: RunningServer) -> Any:
    return request.param(server)


def train(asked: TrainRequest) -> InferRequest:
    names = ("tokens", "returns", "prev_values", "mask")
    inputs = {name: Tensor.of(name, getattr(asked, name)) for name in names}
    return InferRequest(inputs, parameters={"train_id": asked.id})


def control(**inputs: str) -> InferRequest:
    tensors = {name: Tensor.of_texts(name, [text]) for name, text in inputs.items()}
    return InferRequest(tensors or {"dummy_var": Tensor.of("dummy_var", np.zeros(1, np.int64))})


def told(reply: InferReply, name: str) -> Any:
    (tensor,) = (t for t in reply.outputs if t.name == name)
    return orjson.loads(tensor.data[0]) if tensor.datatype == "BYTES" else tensor.data.tolist()


def test_what_a_server_that_stops_refuses_is_counted_by_its_name(client: Any, service: ArithmeticService) -> None:
    service.ready = False
    for model, kind in (("critic_train", "Unavailable"), ("nobody", "UnknownModel")):
        with pytest.raises(Refused) as refused:
            client.call(model, train(request("a", 3)))
        assert refused.value.args[1] == kind
    text = service.metrics.render().decode()
    assert 'guerdon_train_requests_total{critic="critic",outcome="Unavailable"} 1.0' in text
    assert 'guerdon_requests_total{model="critic_train",outcome="Unavailable"} 1.0' in text


def test_every_operation_is_a_model(client: Any, service: ArithmeticService) -> None:
    reply = client.call("critic_train", train(request("a", 3)))
    assert told(reply, "loss_mean") == [1.0] and told(reply, "report")["step"] == 1
    assert reply.parameters["weights_version"] == "1+1"
    assert told(client.call("critic_train", train(request("a", 3))), "report")["step"] == 1
    assert told(client.call("critic_validate", train(request("v", 3))), "report")["num_tokens"] == 1
    assert told(client.call("critic_save", control(metrics='{"reward": 1.5}')), "status") == [0]
    tokens = {"input_ids": Tensor.of("input_ids", np.array([[1, 2]], np.int32))}
    reply = client.call("critic_infer", InferRequest(tokens))
    assert told(reply, "values") == [[after([request("a", 3)]) * i for i in (1, 2)]]
    assert reply.parameters["weights_version"] == "1+1"
    state = told(client.call("critic_state", control()), "state")
    assert state["checkpoints"][0]["metrics"]["reward"] == 1.5
    assert told(client.call("critic_offload", control()), "status") == [0]
    assert service.trainer.is_offloaded
    client.call("critic_onload", control())
    client.call("critic_load", control(checkpoint=state["checkpoints"][0]["name"]))
    assert service.trainer.lineage == 2


def test_errors_tell_their_class(client: Any, service: ArithmeticService) -> None:
    is_http = isinstance(client, OverHttp)

    def refused(model: str, asked: InferRequest) -> tuple[Any, str, str]:
        with pytest.raises(Refused) as caught:
            client.call(model, asked)
        return caught.value.args  # type: ignore[return-value]

    client.call("critic_train", train(request("a", 3)))
    status, kind, text = refused("critic_train", train(request("a", 4)))
    assert (status, kind) == (400 if is_http else "INVALID_ARGUMENT", "InvalidRequest") and "another request" in text
    assert refused("critic_train", train(request("f", 1, first_token=FAIL_TOKEN)))[:2] == (
        500 if is_http else "INTERNAL",
        "TrainFailed",
    )
    client.call("critic_offload", control())
    for model, asked in (("critic_train", train(request("b", 1))), ("critic_infer", train(request("b", 1)))):
        if model == "critic_infer":
            asked = InferRequest({"input_ids": Tensor.of("input_ids", np.array([[1, 2]], np.int32))})
        assert refused(model, asked)[:2] == (503 if is_http else "UNAVAILABLE", "Offloaded")
    client.call("critic_onload", control())
    assert refused("critic_load", control(checkpoint="nobody"))[:2] == (
        400 if is_http else "INVALID_ARGUMENT",
        "InvalidRequest",
    )
    assert refused("critic_train", train(request("c", 1, first_token=BUG_TOKEN)))[1] == "ServerFault"
    assert refused("critic_nothing", control())[1] == "UnknownModel"


def test_a_client_that_leaves_does_not_stop_its_train(client: Any, service: ArithmeticService) -> None:
    waiting = train(request("a", 1, first_token=WAIT_TOKEN))

    def left(asked: InferRequest, has_come: Callable[[], bool]) -> bool:
        """Whether it had come when its client left."""
        with pytest.raises((Refused, httpx.TimeoutException)):
            client.call("critic_train", asked, timeout_s=0.3)
        return has_come()

    wait_until(lambda: left(waiting, lambda: service.trainer.trained == ["a"]))
    wait_until(lambda: left(train(request("b", 2)), lambda: service.loops.depth()["critic_infer"][0] == 1))
    service.trainer.go.set()
    wait_until(lambda: service.trainer.step == 2)
    assert told(client.call("critic_train", waiting), "report")["step"] == 1
    assert service.trainer.trained == ["a", "b"]


def test_stopping_the_server_answers_the_trains_that_it_accepted(tmp_path: Path) -> None:
    service = ArithmeticService(tmp_path)
    asked = train(request("a", 1, first_token=SLOW_TOKEN))
    with ThreadPoolExecutor(1) as threads:
        with RunningServer(service, ServerConfig(port=0, grpc_port=None)) as server:
            reply = threads.submit(OverHttp(server).call, "critic_train", asked)
            wait_until(lambda: bool(service.trainer.trained))
        assert told(reply.result(), "report")["step"] == 1
