from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import served
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from guerdon.wire import kserve_grpc
from guerdon.wire.tensors import InferRequest, Tensor
from server.echo_service import BUSY_TOKEN, CRASH_TOKEN, NAN_TOKEN, SLOW_TOKEN, EchoService
from server.helpers import outcomes, wait_until


@pytest.fixture(scope="module")
def stub(service: EchoService) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    config = ServerConfig(port=0, grpc_port=0, max_body_mb=8, max_requests=4)
    with RunningServer(service, config) as server, stub_of(server) as stub:
        yield stub


@contextmanager
def stub_of(server: RunningServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    address = (server.grpc_url or "").removeprefix("grpc://")
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def message(tokens: list[int], model: str = "reward_model", outputs: list[str] | None = None) -> pb.ModelInferRequest:
    ids = Tensor.of("input_ids", np.array([tokens], np.int32))
    return kserve_grpc.encode_request(InferRequest({"input_ids": ids}, dict.fromkeys(outputs or [])), model)


def failure(call, *arguments, **options) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    assert "Traceback" not in caught.value.details()
    return caught.value


def test_typed_contents_and_metadata(stub):
    request = pb.ModelInferRequest(model_name="reward_model", model_version="1", id="t")
    request.inputs.add(
        name="tokens", datatype="INT64", shape=[1, 3], contents=pb.InferTensorContents(int64_contents=[5, 6, 7])
    )
    request.inputs.add(
        name="sequence_lengths", datatype="INT32", shape=[1], contents=pb.InferTensorContents(int_contents=[2])
    )
    reply, call = stub.ModelInfer.with_call(request)
    assert np.frombuffer(reply.raw_output_contents[0], np.float32).tolist() == [11]
    assert reply.id == "t"
    trailing = dict(call.trailing_metadata())
    assert float(trailing["guerdon-queue-ms"]) >= 0
    assert float(trailing["guerdon-compute-ms"]) > 0
    assert trailing["guerdon-weights-version"] == "1"


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (message([5], model="nobody"), "NOT_FOUND", "unknown model 'nobody'"),
        (message([5], outputs=["nonsense"]), "INVALID_ARGUMENT", "unknown output 'nonsense'"),
        (message([-5]), "INVALID_ARGUMENT", "row 0: token id -5"),
        (message([NAN_TOKEN]), "INTERNAL", "row 0: the reward is not finite"),
        (message([CRASH_TOKEN]), "INTERNAL", "internal error; the server's log has the details"),
        (pb.ModelInferRequest(model_name="reward_model"), "INVALID_ARGUMENT", "no inputs"),
    ],
)
def test_each_error_has_its_code_and_text(stub, request_, code, text):
    error = failure(stub.ModelInfer, request_)
    assert error.code().name == code
    assert text in error.details()
    assert stub.ModelInfer(message([5])).outputs[0].shape == [1]


def test_descriptions_of_unknown_models_are_not_found(stub):
    for call, request in (
        (stub.ModelMetadata, pb.ModelMetadataRequest(name="nobody")),
        (stub.ModelConfig, pb.ModelConfigRequest(name="reward_model", version="9")),
    ):
        assert failure(call, request).code() is grpc.StatusCode.NOT_FOUND


def test_unknown_models_are_not_ready(stub):
    assert stub.ModelReady(pb.ModelReadyRequest(name="many", version="1")).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name="nobody")).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name="many", version="9")).ready


def test_what_the_protocol_has_beyond_this_is_unimplemented(stub):
    assert failure(stub.TraceSetting, pb.TraceSettingRequest()).code() is grpc.StatusCode.UNIMPLEMENTED


def test_not_ready(stub, service):
    service.ready = False
    try:
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        assert not stub.ServerReady(pb.ServerReadyRequest()).ready
        assert not stub.ModelReady(pb.ModelReadyRequest(name="reward_model")).ready
        assert failure(stub.ModelInfer, message([5])).code() is grpc.StatusCode.UNAVAILABLE
        assert not stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models
    finally:
        service.ready = True


def test_overload_carries_retry_after(stub):
    error = failure(stub.ModelInfer, message([BUSY_TOKEN]))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())["retry-after"] == "3"


def test_requests_beyond_the_limit_are_refused_at_once(stub, service):
    with service.scorer.held() as go:
        calls = [stub.ModelInfer.future(message([SLOW_TOKEN])) for _ in range(10)]
        wait_until(lambda: sum(call.done() for call in calls) == 6)
        go.set()
        codes = [call.code() for call in calls]
    assert codes.count(grpc.StatusCode.OK) == 4
    assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 6


def test_the_deadline_becomes_the_requests_timeout(stub, service):
    stub.ModelInfer(message([5]), timeout=300)
    assert 200 < service.requests[-1].timeout_s < 301
    timed = message([5])
    timed.parameters["timeout"].int64_param = 60_000_000
    stub.ModelInfer(timed, timeout=120)
    assert service.requests[-1].timeout_s == 60
    stub.ModelInfer(message([5]))
    assert service.requests[-1].timeout_s is None
    assert failure(stub.ModelInfer, message([SLOW_TOKEN]), timeout=0.2).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_client_that_leaves_cancels_its_work(stub, service):
    wait_until(lambda: service.num_open == 0)
    before = service.cancelled
    with service.scorer.held():
        call = stub.ModelInfer.future(message([SLOW_TOKEN]))
        wait_until(lambda: service.num_open == 1)
        call.cancel()
        wait_until(lambda: service.num_open == 0)
        assert service.cancelled == before + 1


def test_message_sizes(stub):
    large = kserve_grpc.encode_request(
        InferRequest({"input_ids": Tensor.of("input_ids", np.full((500, 4096), 3, np.int32))}), "reward_model"
    )
    assert large.ByteSize() > 4 << 20
    assert stub.ModelInfer(large).outputs[0].shape == [500]
    beyond = kserve_grpc.encode_request(
        InferRequest({"input_ids": Tensor.of("input_ids", np.full((600, 4096), 3, np.int32))}), "reward_model"
    )
    assert failure(stub.ModelInfer, beyond).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_every_request_is_counted_by_how_it_ends():
    service = EchoService()
    with RunningServer(service, ServerConfig(port=0, grpc_port=0, max_requests=1)) as server, stub_of(server) as stub:
        stub.ModelInfer(message([5]))
        for tokens in ([-5], [NAN_TOKEN], [CRASH_TOKEN]):
            failure(stub.ModelInfer, message(tokens))
        for name in ("nobody", "somebody"):
            failure(stub.ModelInfer, message([5], model=name))
        failure(stub.ModelInfer, pb.ModelInferRequest(model_name="many"))
        slow = stub.ModelInfer.future(message([SLOW_TOKEN]))
        wait_until(lambda: service.requests[-1].tokens[0].tolist() == [SLOW_TOKEN])
        failure(stub.ModelInfer, message([5], model="many"))
        slow.cancel()
        wait_until(lambda: ("reward_model", "Cancelled") in outcomes(server.http_url))
        assert outcomes(server.http_url) == {
            ("reward_model", "ok"): 1,
            ("reward_model", "InvalidRequest"): 1,
            ("reward_model", "SampleFailed"): 1,
            ("reward_model", "ServerFault"): 1,
            ("reward_model", "Cancelled"): 1,
            ("unknown", "UnknownModel"): 2,
            ("many", "InvalidRequest"): 1,
            ("unknown", "Overloaded"): 1,  # refused before its message was read
        }


def test_bodies_in_progress_are_bounded_together():
    config = ServerConfig(port=0, grpc_port=0, max_body_mb=1, max_bodies_mb=1)
    rows = np.full((40, 4096), SLOW_TOKEN, np.int32)
    large = kserve_grpc.encode_request(InferRequest({"input_ids": Tensor.of("input_ids", rows)}), "reward_model")
    assert large.ByteSize() > 1 << 19
    service = EchoService()
    with RunningServer(service, config) as server, stub_of(server) as stub:
        with service.scorer.held():
            first = stub.ModelInfer.future(large)
            wait_until(lambda: bool(service.requests))
            error = failure(stub.ModelInfer, large)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "bodies and answers of the requests in progress" in error.details()
        assert len(first.result().raw_output_contents[0]) == 4 * len(rows)
        assert stub.ModelInfer(large).outputs[0].shape == [len(rows)]


def test_a_message_may_be_as_large_as_grpc_can_count():
    with served.running(build=EchoService, grpc_port=0, max_body_mb=4096) as server, stub_of(server) as stub:
        assert stub.ModelInfer(message([5])).outputs[0].shape == [1]
