import asyncio
import gzip
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import orjson
import pytest

from guerdon.core import Score, ScoreRequest
from guerdon.errors import InvalidRequest, Unavailable
from guerdon.server.auth import ANYBODY
from guerdon.server.front import http_app
from guerdon.server.front.admission import Admission
from guerdon.server.front.http_exchanges import FormExchange
from guerdon.server.front.http_request import HttpRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from guerdon.wire.forms import FORMS
from guerdon.wire.forms.form import FormRequest, Url
from guerdon.wire.forms.vllm_pooling import NativeBody
from served import Serve
from server.echo_service import EchoService
from server.form_examples import EXAMPLES
from server.helpers import INFER, outcomes, wait_until

EMPTY = {"rewards": [], "scores": [], "extra_logs": {}}


@pytest.fixture(scope="module")
def running_server(service: EchoService, serve: Serve) -> RunningServer:
    return serve(build=lambda _: service)


def test_every_form_has_an_example():
    assert {example.path for example in EXAMPLES} == set(FORMS)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_form_has_the_score_that_kserves_has(client, example):
    text = "what is it? it is good"
    sentences = {"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    (reward,) = client.post(INFER, json={"inputs": [sentences]}).json()["outputs"][0]["data"]
    response = example.ask(client, text)
    assert example.scored(response) == reward == len(text)
    assert float(response.headers["guerdon-queue-ms"]) >= 0
    assert float(response.headers["guerdon-compute-ms"]) > 0
    assert response.headers["guerdon-weights-version"] == "1"
    packed = gzip.compress(orjson.dumps(example.body(text)))
    assert example.scored(client.post(example.path, content=packed, headers={"Content-Encoding": "gzip"})) == reward
    assert example.scored(client.put(example.path, json=example.body(text))) == reward
    plain = {"Content-Type": "text/plain"}
    assert example.scored(client.post(example.path, content=orjson.dumps(example.body(text)), headers=plain)) == reward


def test_every_form_writes_the_same_digits(client, service, monkeypatch):
    monkeypatch.setattr(service.scorer, "score", lambda sequences: [Score(1 / 3) for _ in sequences])
    for example in EXAMPLES:
        assert "0.33333334" in example.ask(client, "a text").text, example


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_model_is_the_bodys_else_the_urls_else_the_first(client, example):
    for query, named, version in [
        ("", {}, "1"),
        ("?model=many", {}, "7"),
        ("?model=.%2Fcheckpoints%2Fmany", {}, "7"),
        ("?model=", {}, "1"),
        ("", {"model": "many"}, "7"),
        ("", {"model": "./checkpoints/many"}, "7"),
        ("?model=many", {"model": "reward_model"}, "1"),
        ("?model=nobody", {"model": "many"}, "7"),
        ("?model=many", {"model": ""}, "7"),
        ("?model=many", {"model": None}, "7"),
    ]:
        response = example.ask(client, "a text", query, **named)
        assert example.scored(response) == 6
        assert response.headers["guerdon-weights-version"] == version, (query, named)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_misspelt_key_in_the_url_is_refused_and_no_other_model_asked(client, service, example):
    before = service.requests[-1:]
    for query in ("?modle=many", "?modle=", "?model=many&modle"):
        text = example.refused(example.ask(client, "a text", query), InvalidRequest)
        assert text.startswith("the URL has the unknown key 'modle'; it takes model")
    assert service.requests[-1:] == before


def test_what_the_model_has_no_answer_to_is_refused_before_it_is_asked(client, service):
    before = service.requests[-1:]
    response = client.post("/pooling", json={"input": "a", "task": "token_classify"})
    assert response.status_code == 400
    assert "gives no numbers for single tokens; send the task classify" in response.text
    assert service.requests[-1:] == before


def test_openrlhf_as_it_sends_and_reads(client, service):
    body = {"query": ["Q a", "Q bc", "R d"], "prompts": ["Q", "Q", "R"], "labels": ["1", None, {"k": [2]}]}
    told = client.post("/get_reward", json=body)
    assert told.content == b'{"rewards":[3.0,4.0,3.0],"scores":[3.0,4.0,3.0],"extra_logs":{}}'
    asked = service.requests[-1]
    assert (asked.texts, asked.prompts, asked.references) == (body["query"], body["prompts"], body["labels"])
    assert len(set(asked.groups)) == 2
    logs = client.post("/get_reward?model=many", json=body).json()["extra_logs"]
    assert logs == {"length": [3, 4, 3], "first": [555, 555, 555]}
    assert client.post("/get_reward?model=many&extra_logs=false", json=body).json()["extra_logs"] == {}


def test_openrlhfs_empty_lists_are_answered_at_once_though_the_model_is_busy(client, service):
    with service.scorer.held() as go, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.post, "/get_reward", json={"query": ["<slow>"]}, timeout=120)
        wait_until(lambda: bool(service.requests) and service.requests[-1].texts == ["<slow>"])
        for body in ({"query": []}, {"query": [], "prompts": [], "labels": []}):
            response = client.post("/get_reward", json=body)
            assert (response.status_code, response.json()) == (200, EMPTY)
        assert not slow.done()
        go.set()
        assert slow.result().json()["rewards"] == [6]
    assert client.post("/get_reward?model=nobody", json={"query": []}).status_code == 400


def test_slime_as_it_sends_and_reads(client, service):
    body = {"prompt": "Q", "response": " ab", "label": "3"}
    assert client.post("/reward", json=body).content == b"4.0"
    assert client.post("/reward?key=score", json=body).json() == {"score": 4}
    told = client.post("/reward?key=score&model=many", json=body).json()
    assert told == {"score": 4, "components": {"length": 4, "first": 555}}
    messages = [{"role": "user", "content": "Q"}]
    conversation = [*messages, {"role": "assistant", "content": " ab"}]
    assert client.post("/reward", json=body | {"prompt": messages}).json() == len(str(conversation))
    assert service.requests[-1].messages == [conversation]


def test_health_and_models(client, service):
    for method in ("GET", "HEAD"):
        response = client.request(method, "/health")
        assert (response.status_code, response.content) == (200, b"")
    service.ready = False
    try:
        response = client.get("/health")
        assert (response.status_code, response.content) == (503, b"")
        assert client.get("/v1/models").status_code == 200
    finally:
        service.ready = True
    told = client.get("/v1/models").json()
    assert told["object"] == "list"
    assert [model["id"] for model in told["data"]] == ["reward_model", "many"]
    started = {model["created"] for model in told["data"]}
    assert len(started) == 1
    assert time.time() - 86_400 < min(started) <= time.time()
    time.sleep(1 - time.time() % 1)
    assert client.get("/v1/models").json() == told, "nothing of it is the present time"
    assert client.get("/v1/models/many").json() == told["data"][1]
    unknown = client.get("/v1/models/nobody")
    assert unknown.status_code == 404
    assert "served here: reward_model, many" in unknown.json()["error"]["message"]


def test_an_unknown_path_is_told_what_there_is(client):
    for method, path in (("POST", "/"), ("POST", "/get_reward/"), ("GET", "/v1"), ("POST", "/rewards")):
        response = client.request(method, path)
        assert response.status_code == 404
        assert list(response.json()) == ["error"]
        text = response.json()["error"]
        assert text.startswith(f"no such path: {path}; this server speaks KServe v2 under /v2, and takes POST to ")
        assert all(path in text for path in FORMS)


def test_requests_are_counted_under_the_model_that_they_ask():
    service, config = EchoService(), ServerConfig(port=0, grpc_port=None, max_body_mb=1, max_requests=1)
    with RunningServer(service, config) as server, httpx.Client(base_url=server.http_url, timeout=120) as client:
        for url, body in [
            ("/get_reward", {"query": ["a"]}),
            ("/get_reward?model=many", {"query": ["a"]}),
            ("/get_reward?model=nobody", {"query": ["a"], "model": "./checkpoints/many"}),
            ("/get_reward", {"query": []}),
            ("/get_reward", {"query": ["a"], "model": "nobody"}),
            ("/get_reward?model=somebody", {"query": ["a"]}),
            ("/get_reward?model=many", {}),
            ("/get_reward", {"query": ["<nan>"]}),
            ("/get_reward", {"query": ["<crash>"]}),
            ("/get_reward", {"query": ["<busy>"], "model": "many"}),
            ("/get_reward", {"query": ["x" * (2 << 20)]}),
        ]:
            client.post(url, json=body)
        before = len(service.requests)
        with service.scorer.held() as go, ThreadPoolExecutor(1) as pool:
            slow = pool.submit(client.post, "/reward", json={"prompt": "<slow>", "response": ""})
            wait_until(lambda: len(service.requests) > before)
            assert client.post("/reward?model=many", json={"prompt": "a", "response": ""}).status_code == 503
            go.set()
            assert slow.result().status_code == 200
        assert outcomes(server.http_url) == {
            ("reward_model", "ok"): 3,
            ("many", "ok"): 2,
            ("unknown", "UnknownModel"): 2,
            ("many", "InvalidRequest"): 1,
            ("reward_model", "SampleFailed"): 1,
            ("reward_model", "ServerFault"): 1,
            ("many", "Overloaded"): 2,
            ("reward_model", "PayloadTooLarge"): 1,
        }


def test_a_large_body_is_read_and_answered_off_the_loop(service):
    threads: list[int] = []
    bodies: list[bytes] = []
    rows: list[int] = []

    def to_request(body: NativeBody, url: Url) -> FormRequest:
        threads.append(threading.get_ident())
        request = ScoreRequest(texts=[body.text[0][:9]] * rows[-1])
        return FormRequest(request, lambda reply, info: threads.append(threading.get_ident()))

    async def received() -> dict:
        if not bodies:  # it listens whether the client has left
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop()}

    form, config = replace(FORMS["/encode"], to_request=to_request), ServerConfig()
    app = http_app.App(Admission(service, config), config)
    for text, num_rows, asides in (
        ("small", 1, [False, False]),
        ("many bytes" * 20_000, 1, [True, False]),
        ("very many bytes" * 100_000, 1, [True, True]),
        ("many rows", 2000, [False, True]),
    ):
        bodies.append(orjson.dumps({"text": [text]}))
        rows.append(num_rows)
        request = HttpRequest({"path": "/encode", "query_string": b"", "headers": []}, received)
        request.caller = ANYBODY
        answering = app._answer(FormExchange(request, form, Admission(service, config), config), request)
        assert asyncio.run_coroutine_threadsafe(answering, service._asyncio).result(120)[2] == b"null"
        on_loop = asyncio.run_coroutine_threadsafe(_ident(), service._asyncio).result(120)
        assert [thread != on_loop for thread in threads[-2:]] == asides


def test_what_pairs_come_to_counts_as_bytes_of_bodies():
    """A prompt before many responses is small as a body, and large as what is asked."""
    config = ServerConfig(port=0, grpc_port=None, max_body_mb=1, max_bodies_mb=1)
    pairs = {"text_1": "<slow>" + "p" * 4000, "text_2": ["a"] * 270}
    service = EchoService()
    with RunningServer(service, config) as server, service.scorer.held() as go, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(httpx.post, server.http_url + "/score", json=pairs, timeout=120)
        wait_until(lambda: len(service.requests) > 0)
        refused = httpx.post(server.http_url + "/score", json={"text_1": "a", "text_2": "b"})
        assert refused.status_code == 503
        assert "would exceed 1 MiB" in refused.text
        go.set()
        assert len(slow.result().json()["data"]) == 270, "one always fits"


def test_an_error_of_many_requests_is_raised_for_each_as_its_own(service, monkeypatch, running_server):
    shared = Unavailable("the model is away")

    def score(sequences):
        raise shared

    monkeypatch.setattr(service.scorer, "score", score)
    asking = service.score("reward_model", ScoreRequest(texts=["a"]))
    raised = asyncio.run_coroutine_threadsafe(asking, service._asyncio).exception(60)
    assert (type(raised), str(raised)) == (Unavailable, str(shared))
    assert raised is not shared


async def _ident() -> int:
    return threading.get_ident()
