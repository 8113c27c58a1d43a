"""A server's spans, as a real collector gets them from requests of real clients."""

import os
import queue
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc

import scorers
import served
from collector import INTERNAL, SERVER, Collector, collecting
from guerdon.assembly import build_service
from guerdon.client import Credentials, CriticClient, RetryPolicy, RewardClient, Scores
from guerdon.errors import ConfigError, GuerdonError, Overloaded, ServerFault, StartError, TrainFailed
from guerdon.server import tracing
from guerdon.server.runtime import RunningServer, check_addresses
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig, ServerConfig
from guerdon.settings.fields import check_settings
from processes import environment
from server.arithmetic_critic import FAIL_TOKEN, ArithmeticService
from server.echo_service import BUSY_TOKEN, CRASH_TOKEN, NAN_TOKEN, EchoService
from server.helpers import INFER, body_of, tried_again, wait_until
from server.keys import SCORE, bearer, keyed
from tiers import slow_but

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def echo(collector: Collector, **settings: Any) -> RunningServer:
    config = ServerConfig(**{"port": 0, "grpc_port": 0, "traces": collector.url, **settings})
    return RunningServer(EchoService(config), config)


def scoring(collector: Collector, scorer: str = "scorers:score", **settings: Any) -> RunningServer:
    models = [ModelConfig(model=scorer, **settings)]
    config = ServerConfig(port=0, grpc_port=0, traces=collector.url, models=models)
    return RunningServer(build_service(config), config)


@pytest.fixture
def held() -> Iterator[None]:
    """Sequences with `scorers.WAITS` wait until the test sets `scorers.hold`."""
    scorers.hold.clear()
    yield
    scorers.hold.set()


def waited_for(client: RewardClient) -> Future[Scores]:
    """A request that is computed until `scorers.hold` is set."""
    before = len(scorers.calls)
    future = client.submit(tokens=[[scorers.WAITS]])
    wait_until(lambda: len(scorers.calls) > before)
    return future


def num_queued(server: RunningServer) -> int:
    """How many sequences wait."""
    text = httpx.get(server.http_url + "/metrics").text
    return int(float(text.partition('guerdon_queue_sequences{model="reward_model"} ')[2].partition("\n")[0]))


def over_http(server: RunningServer) -> None:
    answer = httpx.post(server.http_url + INFER, content=body_of([[1, 2, 3], [4, 5]]), headers=SAMPLED)
    assert answer.status_code == 200


def over_grpc(server: RunningServer) -> None:
    tokens = tritonclient.grpc.InferInput("tokens", [2, 3], "INT64")
    lengths = tritonclient.grpc.InferInput("sequence_lengths", [2, 1], "INT64")
    tokens.set_data_from_numpy(np.array([[1, 2, 3], [4, 5, 0]]))
    lengths.set_data_from_numpy(np.array([[3], [2]]))
    with tritonclient.grpc.InferenceServerClient((server.grpc_url or "").removeprefix("grpc://")) as client:
        client.infer("reward_model", [tokens, lengths], headers=SAMPLED)


def over_stream(server: RunningServer) -> None:
    tokens = tritonclient.grpc.InferInput("input_ids", [2, 3], "INT32")
    tokens.set_data_from_numpy(np.array([[1, 3, 4], [4, 2, 2]], np.int32))
    answered: queue.SimpleQueue = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient((server.grpc_url or "").removeprefix("grpc://")) as client:
        client.start_stream(lambda result, error: answered.put(error), headers=SAMPLED)
        client.async_stream_infer("reward_model", [tokens])
        assert answered.get(timeout=120) is None


OF_HTTP = {"http.request.method": "POST", "http.route": "/v2/models/{name}/infer", "http.response.status_code": 200}
OF_GRPC = {
    "rpc.system": "grpc",
    "rpc.service": "inference.GRPCInferenceService",
    "rpc.method": "ModelInfer",
    "rpc.grpc.status_code": 0,
}


@pytest.mark.parametrize(
    ("ask", "name", "facts"),
    [
        (over_http, "POST /v2/models/{name}/infer", OF_HTTP),
        (over_grpc, "inference.GRPCInferenceService/ModelInfer", OF_GRPC),
        (over_stream, "inference.GRPCInferenceService/ModelStreamInfer", OF_GRPC | {"rpc.method": "ModelStreamInfer"}),
    ],
    ids=["http", "grpc", "stream"],
)
def test_a_request_has_its_own_span_its_wait_and_its_batch(
    collector: Collector, ask: Any, name: str, facts: dict[str, Any]
) -> None:
    with echo(collector) as server:
        ask(server)
    assert collector.paths == {"/v1/traces"}
    assert {span.service for span in collector.spans()} == {"guerdon"}
    (request,) = collector.spans(name)
    (queue,), (compute,), (batch,) = map(collector.spans, ("queue", "compute", "batch reward_model"))
    assert len(collector.spans()) == 4
    assert (request.trace, request.parent, request.kind) == (TRACE, PARENT, SERVER)
    assert request.facts == {
        **facts,
        "guerdon.model": "reward_model",
        "guerdon.sequences": 2,
        "guerdon.failed_sequences": 0,
        "guerdon.received_tokens": 5,
        "guerdon.weights_version": "1",
    }
    assert not request.is_error
    for child in (queue, compute):
        assert (child.trace, child.parent, child.kind) == (TRACE, request.id, INTERNAL)
        assert child.facts == {"guerdon.model": "reward_model", "guerdon.sequences": 2}
    assert request.began <= queue.began <= queue.ended
    assert abs(queue.ended - compute.began) < 20e9, "the wait ends as the batch begins"
    assert queue.ended <= compute.ended
    assert compute.ended <= request.ended
    assert compute.links == ((batch.trace, batch.id, {}),)
    assert batch.links == ((TRACE, request.id, {"guerdon.sequences": 2}),)
    assert (batch.parent, batch.kind) == ("", INTERNAL)
    assert batch.trace != TRACE
    assert batch.facts == {
        "guerdon.model": "reward_model",
        "guerdon.requests": 1,
        "guerdon.sequences": 2,
        "guerdon.computed_tokens": 5,
        "guerdon.weights_version": "1",
        "guerdon.out_of_memory": 0,
    }
    assert (batch.began, batch.ended) == (compute.began, compute.ended)


def test_a_request_without_a_parent_begins_a_trace(collector: Collector) -> None:
    with echo(collector) as server:
        RewardClient(server.http_url).score(tokens=[[1, 2]])
    (request,) = collector.spans("POST")
    assert request.parent == ""
    assert {span.trace for span in collector.spans() if span.name in ("queue", "compute")} == {request.trace}


def test_a_wait_lasts_until_the_last_sequence_is_taken_up(collector: Collector, held: None) -> None:
    with scoring(collector) as server, RewardClient(server.http_url) as client:
        first = waited_for(client)
        second = client.submit(tokens=[[1]])
        wait_until(lambda: num_queued(server) == 1)
        time.sleep(0.4)
        scorers.hold.set()
        assert first.result().rewards[0] == scorers.WAITS
        assert second.result().rewards[0] == 1
    short, long = sorted(collector.spans("queue"), key=lambda span: span.began)
    assert short.ended <= long.began
    assert long.ended - long.began > 0.3e9
    (its,) = (span for span in collector.spans("compute") if span.trace == long.trace)
    assert long.ended <= its.ended
    assert max(span.ended - span.began for span in collector.spans("compute")) > 0.4e9


def test_a_batch_is_linked_to_all_its_requests(collector: Collector, held: None) -> None:
    count = 150  # more than the links that a span may have by the library's own limit
    with scoring(collector) as server, RewardClient(server.http_url, max_in_flight=count + 1) as client:
        first = waited_for(client)
        waiting = [client.submit(tokens=[[i + 100], [i + 100, 1]]) for i in range(count)]
        wait_until(lambda: num_queued(server) == 2 * count)
        scorers.hold.set()
        for future in [first, *waiting]:
            future.result()
    requests = {span.id: span for span in collector.spans("POST")}
    large = max(collector.spans("batch"), key=lambda span: len(span.links))
    assert (large.facts["guerdon.requests"], large.facts["guerdon.sequences"]) == (count, 2 * count)
    assert len({span for _, span, _ in large.links}) == count
    assert all(
        requests[span].trace == trace and beside == {"guerdon.sequences": 2} for trace, span, beside in large.links
    )
    computes = [span for span in collector.spans("compute") if span.links[0][1] == large.id]
    assert {span.parent for span in computes} == {span for _, span, _ in large.links}


def test_a_request_split_over_batches_has_them_all(collector: Collector) -> None:
    rows = [[i] * 8 for i in range(1, 6)]
    with scoring(collector, max_batch_tokens=16) as server:
        answer = httpx.post(server.http_url + INFER, content=body_of(rows), headers=SAMPLED)
        assert answer.status_code == 200
    batches, computes = collector.spans("batch"), collector.spans("compute")
    assert len(batches) == 3
    assert [span.facts["guerdon.sequences"] for span in computes] == [2, 2, 1]
    assert [span.links[0][1] for span in computes] == [span.id for span in batches]
    (request,) = collector.spans("POST")
    assert {span.links[0][:2] for span in batches} == {(TRACE, request.id)}
    assert len(collector.spans("queue")) == 1


def test_a_sum_has_the_parts_of_its_components(collector: Collector) -> None:
    models = [ModelConfig(model=f"rewarding:{name}", name=name) for name in ("brevity", "words")]
    total = RewardConfig(components=[ComponentConfig(model="brevity"), ComponentConfig(model="words")])
    with served.running(*models, traces=collector.url, rewards=[total]) as server:
        RewardClient(server.http_url).score(texts=["a b a"], prompts=[""], labels=["a"])
    (request,) = collector.spans("POST")
    assert request.facts["guerdon.model"] == "reward_model"
    assert request.facts["guerdon.sequences"] == 1
    parts = Counter((span.name, span.facts["guerdon.model"]) for span in collector.spans() if span.parent == request.id)
    assert parts == Counter((name, model) for name in ("queue", "compute") for model in ("brevity", "words"))
    assert {span.name for span in collector.spans("batch")} == {"batch brevity", "batch words"}


def test_a_form_of_a_trainer_has_its_route_and_its_tokenising(collector: Collector) -> None:
    with echo(collector) as server:
        answer = httpx.post(server.http_url + "/get_reward", json={"query": ["abcde"], "prompts": [""]})
        assert answer.status_code == 200, answer.text
    (request,) = collector.spans("POST")
    assert (request.name, request.facts["http.route"]) == ("POST /get_reward", "/get_reward")
    assert request.facts["guerdon.received_tokens"] == 5
    (tokenize,), (queue,) = collector.spans("tokenize"), collector.spans("queue")
    assert tokenize.parent == request.id
    assert tokenize.facts == {"guerdon.model": "reward_model"}
    assert tokenize.ended <= queue.began + 1e6


@pytest.mark.parametrize(
    ("rows", "status", "kind"),
    [([[BUSY_TOKEN]], 503, "Overloaded"), ([[CRASH_TOKEN]], 500, "ServerFault")],
    ids=["refused", "bug"],
)
def test_a_request_that_fails_says_so_by_its_class(
    collector: Collector, rows: list[list[int]], status: int, kind: str
) -> None:
    with echo(collector) as server:
        assert httpx.post(server.http_url + INFER, content=body_of(rows)).status_code == status
    (request,) = collector.spans("POST")
    assert request.facts["http.response.status_code"] == status
    assert (request.facts["error.type"], request.is_error, request.message) == (kind, True, "")
    assert request.facts["guerdon.model"] == "reward_model"


def test_grpc_tells_its_status_and_the_class(collector: Collector) -> None:
    once = RetryPolicy(tries=1)
    with echo(collector) as server, RewardClient(server.grpc_url or "", policy=once) as client:
        with pytest.raises(Overloaded):
            client.score(tokens=[[BUSY_TOKEN]])
        with pytest.raises(ServerFault):
            client.score(tokens=[[CRASH_TOKEN]])
        assert client.score(tokens=[[NAN_TOKEN]]).errors[0]
    refused, bug, answered = collector.spans("inference.")
    assert (refused.facts["rpc.grpc.status_code"], refused.facts["error.type"]) == (8, "Overloaded")
    assert (bug.facts["rpc.grpc.status_code"], bug.facts["error.type"]) == (13, "ServerFault")
    assert (refused.is_error, bug.is_error, bug.message) == (False, True, "")
    assert (answered.facts["rpc.grpc.status_code"], answered.facts["guerdon.failed_sequences"]) == (0, 1)
    assert not answered.is_error


@tried_again
def test_what_came_too_late_has_its_wait() -> None:
    scorers.hold.clear()
    with collecting() as collector, scoring(collector) as server:
        body = body_of([[scorers.WAITS]], parameters={"timeout": 200_000})
        assert httpx.post(server.http_url + INFER, content=body, headers=SAMPLED).status_code == 504
        (request,) = collector.wait("POST")
        scorers.hold.set()
    assert (request.facts["error.type"], request.is_error) == ("DeadlineExceeded", True)
    assert [span.parent for span in collector.spans("queue")] == [request.id]
    assert collector.spans("compute") == []
    assert collector.spans("batch")[0].links[0][1] == request.id


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_client_that_leaves_is_told_as_such(collector: Collector, held: None, transport: str) -> None:
    with scoring(collector) as server:
        url = server.http_url if transport == "http" else server.grpc_url or ""
        client = RewardClient(url)
        future = waited_for(client)
        client.close()
        with pytest.raises(GuerdonError):
            future.result()
        (request,) = collector.wait("POST" if transport == "http" else "inference.")
        scorers.hold.set()
    assert request.facts["error.type"] == "Cancelled"
    assert "http.response.status_code" not in request.facts


def test_no_text_and_no_key_is_in_a_span(collector: Collector, tmp_path: Path) -> None:
    config = keyed(tmp_path, traces=collector.url)
    secret = "a sample's own words"
    with served.running(config=config, build=EchoService) as server:
        url, known = server.http_url, bearer(SCORE)
        data = {"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": [secret]}
        assert httpx.post(url + INFER, json={"inputs": [data]}, headers=known).status_code == 200
        wrong = {"name": "sentences", "shape": [1, 1], "datatype": "INT64", "data": [secret]}
        assert httpx.post(url + INFER, json={"inputs": [wrong]}, headers=known).status_code == 400
        assert httpx.post(url + "/v2/models/a-guessed-name/infer", content=secret, headers=known).status_code == 400
        assert httpx.post(url + "/a-guessed-path", content=secret, headers=known).status_code == 404
        assert httpx.post(url + INFER, content=secret, headers=bearer("a-wrong-key-0123456789")).status_code == 401
        RewardClient(server.grpc_url or "", credentials=Credentials(api_key=SCORE)).score(texts=[secret])
    kinds = [span.facts.get("error.type") for span in collector.spans() if span.kind == SERVER]
    assert kinds == [None, "InvalidRequest", "UnknownModel", "RouteNotFound", None]
    sent = b"".join(collector.bodies)
    for text in (secret, SCORE, "a-wrong-key", "a-guessed", "scorer"):
        assert text.encode() not in sent
    unknown, nowhere = collector.spans("POST")[2:4]
    assert unknown.facts["guerdon.model"] == "unknown"
    assert nowhere.name == "POST"


def test_without_a_key_that_is_known_nothing_is_traced(collector: Collector, tmp_path: Path) -> None:
    """A refused request of one that is known is: as its role does not allow it, over both transports."""
    config = keyed(tmp_path, traces=collector.url)
    load = "/v2/repository/models/reward_model/load"
    foreign = bearer(SCORE) | {"Origin": "http://elsewhere.example"}
    with served.running(config=config, build=EchoService) as server:
        for headers, status in (({}, 401), (bearer("a-wrong-key-0123456789"), 401), (foreign, 403)):
            told = httpx.post(server.http_url + INFER, content=body_of([[1]]), headers=headers | SAMPLED)
            assert told.status_code == status
        assert httpx.post(server.http_url + load, headers=bearer(SCORE) | SAMPLED).status_code == 403
        netloc = (server.grpc_url or "").removeprefix("grpc://")
        with tritonclient.grpc.InferenceServerClient(netloc) as triton:
            for headers, why in (
                ({}, "needs a key"),
                (bearer("a-wrong-key-0123456789"), "not one"),
                (bearer(SCORE), "role"),
            ):
                with pytest.raises(tritonclient.grpc.InferenceServerException, match=why):
                    triton.load_model("reward_model", headers={name.lower(): key for name, key in headers.items()})
    traced = [(span.facts["error.type"], span.name) for span in collector.spans() if span.kind == SERVER]
    assert traced == [
        ("Forbidden", "POST /v2/repository/models/{name}/load"),
        ("Forbidden", "inference.GRPCInferenceService/RepositoryModelLoad"),
    ]


def test_what_only_asks_has_no_span(collector: Collector) -> None:
    with echo(collector) as server, RewardClient(server.grpc_url or "") as client:
        for path in ("/metrics", "/health", "/v2", "/v2/models/reward_model", "/v2/health/ready"):
            assert httpx.get(server.http_url + path, headers=SAMPLED).status_code == 200
        client.wait_ready()
        client.info()
    assert collector.spans() == []


def test_what_the_client_does_not_sample_has_none(collector: Collector) -> None:
    with echo(collector) as server:
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert httpx.post(server.http_url + INFER, content=body_of([[1]]), headers=unsampled).status_code == 200
        assert httpx.post(server.http_url + INFER, content=body_of([[1]]), headers=SAMPLED).status_code == 200
    assert len(collector.spans("POST")) == len(collector.spans("batch")) == 1


def test_a_batch_is_sampled_as_its_requests_are(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with echo(collector) as server:
        assert httpx.post(server.http_url + INFER, content=body_of([[1]])).status_code == 200
        assert httpx.post(server.http_url + INFER, content=body_of([[1]]), headers=SAMPLED).status_code == 200
    assert [span.trace for span in collector.spans("POST")] == [TRACE]
    assert len(collector.spans("batch")) == 1


def test_a_parent_that_is_none_begins_a_trace(collector: Collector) -> None:
    with echo(collector) as server:
        for parent in ("nonsense", f"00-{'0' * 32}-{PARENT}-01", "00-" + "f" * 5000):
            answer = httpx.post(server.http_url + INFER, content=body_of([[1]]), headers={"traceparent": parent})
            assert answer.status_code == 200
    assert [span.parent for span in collector.spans("POST")] == [""] * 3


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_train_request_has_its_wait_and_its_time(collector: Collector, tmp_path: Path, transport: str) -> None:
    config = ServerConfig(port=0, grpc_port=0, traces=collector.url)
    service = ArithmeticService(tmp_path, server=config)
    rows = {"returns": [[1.0, 1.0]], "prev_values": [[0.0, 0.0]], "mask": [[0, 1]]}
    with RunningServer(service, config) as server:
        client = CriticClient(server.http_url if transport == "http" else server.grpc_url or "")
        client.train([[1, 2, 3]], **rows).result()
        with pytest.raises(TrainFailed):
            client.train([[FAIL_TOKEN, 2, 3]], **rows).result()
        client.infer(tokens=[[1, 2]])
    trained, failed = [s for s in collector.spans() if s.facts.get("guerdon.model") == "critic_train"]
    assert trained.kind == SERVER
    assert "error.type" not in trained.facts
    assert failed.facts["error.type"] == "TrainFailed"
    (queue, compute) = [span for span in collector.spans() if span.parent == trained.id]
    assert (queue.name, compute.name) == ("queue", "compute")
    assert compute.facts == {"guerdon.sequences": 1, "guerdon.tokens": 3}
    assert queue.ended <= compute.began
    assert [span.facts["guerdon.model"] for span in collector.spans("compute") if span.links] == ["critic_infer"]


def test_the_environment_turns_traces_on(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "rewards")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with served.running(build=EchoService) as server:
        over_http(server)
    assert {span.service for span in collector.spans()} == {"rewards"}
    assert b"deployment.environment" in collector.bodies[0]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"}, ""),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is not http/protobuf",
        ),
    ],
    ids=["unset", "disabled", "none", "grpc"],
)
def test_the_environment_leaves_traces_off(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tracing.turned_on(None) is None
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_without_the_library_the_setting_is_refused_and_the_environment_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.trace.export"):
        monkeypatch.setitem(sys.modules, name, None)
    for refused in (
        lambda: check_addresses(ServerConfig(port=0, grpc_port=None, traces="http://127.0.0.1:9")),
        lambda: tracing.turned_on("http://127.0.0.1:9"),
    ):
        with pytest.raises(StartError, match="not installed") as caught:
            refused()
        assert "pip install '.[otel]'" in caught.value.help
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert tracing.turned_on(None) is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set" in caplog.text


def test_a_malformed_environment_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "many")
    with pytest.raises(StartError, match="OpenTelemetry's environment"):
        tracing.turned_on("http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://", "http://a:x", "http://a?b=c"])
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="traces is") as caught:
        check_settings(ServerConfig(traces=url))
    assert "4318" in caught.value.help


def test_an_endpoint_with_a_key_is_refused_without_telling_it() -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(ServerConfig(traces="http://x:hunter2@127.0.0.1:4318"))
    assert "hunter2" not in f"{caught.value} {caught.value.help}"


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/v1/traces/"])
def test_the_endpoint_may_have_the_path(collector: Collector, path: str) -> None:
    traces = tracing.Traces(collector.url + path)
    with traces.request("a", {}, {}):
        pass
    traces.close()
    assert collector.paths == {"/v1/traces"}


def test_a_collector_that_is_away_holds_nothing_up() -> None:
    config = ServerConfig(port=0, grpc_port=None, traces="http://127.0.0.1:9")
    server = RunningServer(EchoService(config), config)
    for _ in range(3):
        over_http(server)
    time.sleep(0.1)
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 20.0


@pytest.mark.slow
def test_off_is_without_opentelemetry() -> None:
    """A server's whole process, and a client's, neither of which imports anything of it."""
    code = """
import sys
from guerdon.assembly import build_service
from guerdon.client import RewardClient
from guerdon.settings.config import ModelConfig, ServerConfig
from guerdon.server.runtime import RunningServer
config = ServerConfig(port=0, grpc_port=0, models=[ModelConfig(model="scorers:score")])
with RunningServer(build_service(config), config) as server:
    for url in (server.http_url, server.grpc_url):
        with RewardClient(url) as client:
            assert client.score(tokens=[[1, 2]]).rewards.tolist() == [3.0]
            assert client.submit(tokens=[[1, 2]]).result().rewards.tolist() == [3.0]
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    env = environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


PROGRAM = """
import asyncio, json, sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from guerdon.client import AsyncRewardClient, RetryPolicy, RewardClient
from guerdon.errors import Overloaded

url, collector = sys.argv[1:]
provider = TracerProvider(resource=Resource.create({"service.name": "trainer"}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(collector + "/v1/traces")))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("trainer")

async def score():
    async with AsyncRewardClient(url) as client:
        with tracer.start_as_current_span("async"):
            await client.score(tokens=[[1, 2]])
            await client.submit(tokens=[[1, 2]])

with RewardClient(url) as client:
    client.score(tokens=[[1, 2]])  # outside of any span
    with tracer.start_as_current_span("threads"):
        client.score(tokens=[[1, 2]])
        future = client.submit(tokens=[[1, 2]])
    future.result()
    client.submit(tokens=[[1, 2]]).result()  # by a thread that has worked within a span
asyncio.run(score())
with RewardClient(url, policy=RetryPolicy(tries=1)) as client, tracer.start_as_current_span("refused"):
    try:
        client.score(tokens=[[999]])
    except Overloaded:
        pass
provider.shutdown()
"""


@pytest.mark.parametrize("transport", slow_but(("grpc",), ["http", "grpc"]))
def test_the_trace_of_the_callers_program_goes_on_at_the_server(collector: Collector, transport: str) -> None:
    with echo(collector) as server:
        url = server.http_url if transport == "http" else server.grpc_url or ""
        command = [sys.executable, "-c", PROGRAM, url, collector.url]
        done = subprocess.run(command, capture_output=True, text=True, env=environment())
        assert done.returncode == 0, done.stderr
        port = int(url.rpartition(":")[2])
    for name in ("threads", "async"):
        (own,) = collector.spans(name)
        assert own.service == "trainer"
        calls = [span for span in collector.spans("infer reward_model") if span.trace == own.trace]
        assert len(calls) == 2
        for call in calls:
            assert (call.service, call.parent) == ("trainer", own.id)
            assert call.facts == {
                "guerdon.model": "reward_model",
                "server.address": "127.0.0.1",
                "server.port": port,
                "url.scheme": transport,
            }
            (at_server,) = [span for span in collector.spans() if span.parent == call.id]
            assert (at_server.service, at_server.kind, at_server.trace) == ("guerdon", SERVER, own.trace)
    roots = [span for span in collector.spans() if span.kind == SERVER and not span.parent]
    assert len(roots) == 2, "what was asked outside of any span"
    (refused,) = [span for span in collector.spans("infer ") if "error.type" in span.facts]
    assert (refused.facts["error.type"], refused.is_error, refused.message) == ("Overloaded", True, "")


def test_a_critic_client_keeps_the_span_in_which_a_call_was_made(collector: Collector, tmp_path: Path) -> None:
    config = ServerConfig(port=0, grpc_port=None, traces=collector.url)
    program = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from guerdon.client import CriticClient
trace.set_tracer_provider(TracerProvider())
tracer = trace.get_tracer("trainer")
rows = ([[1, 2, 3]], [[1.0, 1.0]], [[0.0, 0.0]], [[0, 1]])
with CriticClient(sys.argv[1]) as client:
    with tracer.start_as_current_span("first") as span:
        first = client.train(*rows)
        values = client.submit(tokens=[[1, 2]])  # which waits for the train's turn
        print(format(span.get_span_context().trace_id, "032x"))
    values.result()
"""
    with RunningServer(ArithmeticService(tmp_path, server=config), config) as server:
        command = [sys.executable, "-c", program, server.http_url]
        done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    traces = {span.facts["guerdon.model"]: span.trace for span in collector.spans("POST")}
    assert traces == {"critic_train": done.stdout.strip(), "critic_infer": done.stdout.strip()}


@pytest.mark.slow
def test_the_command_sends_traces(collector: Collector) -> None:
    command = [sys.executable, "-m", "guerdon", "serve", "scorers:score", "--port", "0", "--no-grpc"]
    env = environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [*command, "--traces", collector.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            ready = next(line for line in process.stdout if "ready at" in line)
            (url,) = [word for word in ready.split() if word.startswith("http://")]
            assert httpx.post(url + INFER, content=body_of([[1]]), headers=SAMPLED).status_code == 200
        finally:
            process.terminate()
        assert f"traces go to {collector.url}/v1/traces" in process.stderr.read()
    assert [span.trace for span in collector.spans("POST")] == [TRACE]
