import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import orjson
import pytest

from client.echo_server import EchoProcess
from guerdon.core import Score
from guerdon.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MethodNotAllowed,
    Overloaded,
    PayloadTooLarge,
    SampleFailed,
    ServerFault,
    Unavailable,
    UnknownModel,
)
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from served import Serve
from server.echo_service import EchoService
from server.form_examples import EXAMPLES
from server.helpers import connect, posted, tried_again, until_closed, wait_until

TIMEOUT_S = 1.2
MAX_REQUESTS = 16


@pytest.fixture(scope="module")
def running_server(service: EchoService, serve: Serve) -> RunningServer:
    return serve(max_body_mb=1, max_requests=MAX_REQUESTS, build=lambda _: service)


@pytest.fixture(scope="module")
def hasty(serve: Serve) -> tuple[EchoService, RunningServer]:
    """One that allows its requests little time."""
    service = EchoService(ServerConfig(request_timeout_s=TIMEOUT_S))
    return service, serve(request_timeout_s=TIMEOUT_S, build=lambda _: service)


@pytest.fixture
def client(running_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running_server.http_url, timeout=120) as client:
        yield client


@pytest.fixture(params=EXAMPLES, ids=str)
def example(request):
    return request.param


def test_killed_refused_and_started_again():
    """Requests under way when the server dies break off; then connections are refused, until it is back."""
    with ThreadPoolExecutor(len(EXAMPLES)) as pool, EchoProcess(slow_s=120) as first:

        def ask(example, text: str) -> httpx.Response:
            return httpx.post(first.http_url + example.path, json=example.body(text), timeout=120)

        under_way = [pool.submit(ask, example, "<slow>") for example in EXAMPLES]
        wait_until(lambda: first.num_requests() == len(EXAMPLES))
        first.kill()
        for future in under_way:
            assert isinstance(future.exception(60), httpx.TransportError)
        for example in EXAMPLES:
            with pytest.raises(httpx.ConnectError):
                ask(example, "a text")
        with first.again():
            assert [example.scored(ask(example, "a text")) for example in EXAMPLES] == [6.0] * len(EXAMPLES)


@tried_again
def test_slow(hasty):
    """The answers are there when the time is up; what is asked next is answered as if nothing had been."""
    service, server = hasty
    with httpx.Client(base_url=server.http_url, timeout=120) as client:
        with service.scorer.held(), ThreadPoolExecutor(len(EXAMPLES)) as pool:
            started = time.monotonic()
            responses = list(pool.map(lambda e: e.ask(client, "<slow>"), EXAMPLES))
            assert time.monotonic() - started >= TIMEOUT_S
        slow_are_refused(responses)
        for example in EXAMPLES:
            wait_until(lambda example=example: example.ask(client, "a text").status_code == 200)
            assert example.scored(example.ask(client, "a text")) == 6


def slow_are_refused(responses):
    for example, response in zip(EXAMPLES, responses, strict=True):
        assert example.refused(response, DeadlineExceeded) == f"not scored within the {TIMEOUT_S} s that it was allowed"


def test_not_ready_and_ready_again(client, service, example):
    service.ready = False
    try:
        response = example.ask(client, "a text")
    finally:
        service.ready = True
    assert example.refused(response, Unavailable) == "the server is not ready: it is starting or stopping"
    assert example.scored(example.ask(client, "a text")) == 6


def test_a_failed_sample_is_an_error_and_no_number_and_its_neighbours_stand(client, example):
    texts = ["a", "<nan>", "abc", "<nan>", "abcd"]
    with ThreadPoolExecutor(5) as pool:
        responses = list(pool.map(lambda text: example.ask(client, text), texts))
    for text, response in zip(texts, responses, strict=True):
        if text == "<nan>":
            assert example.refused(response, SampleFailed).endswith("the reward is not finite")
        else:
            assert example.scored(response) == len(text)


def test_a_wrong_model(client, example):
    for query, named in (("?model=nobody", {}), ("", {"model": "nobody"}), ("?model=many", {"model": "nobody"})):
        text = example.refused(example.ask(client, "a text", query, **named), UnknownModel)
        assert "'nobody'" in text
        assert "reward_model, many" in text


def test_overload(client, example):
    response = example.ask(client, "<busy>")
    assert example.refused(response, Overloaded) == "the queue is full"
    assert response.headers["retry-after"] == "3"


def test_beyond_the_limit_of_requests(running_server, client, example):
    """Places are held by bodies that do not come; a request is refused at once, and answered when they are gone."""
    holders = [connect(running_server) for _ in range(MAX_REQUESTS)]
    for holder in holders:
        holder.sendall(posted(b"{", 9, example.path))
    wait_until(lambda: example.ask(client, "a text").status_code != 200)
    response = example.ask(client, "a text")
    for holder in holders:
        holder.close()
    assert (
        example.refused(response, Overloaded)
        == f"{MAX_REQUESTS} requests are in progress, which is the limit; try again"
    )
    assert response.headers["retry-after"] == "1"
    wait_until(lambda: example.ask(client, "a text").status_code == 200)


def test_uploads_that_stop(hasty):
    connections = [connect(hasty[1]) for _ in EXAMPLES]
    for connection, example in zip(connections, EXAMPLES, strict=True):
        connection.sendall(posted(b"{", 9, example.path))
    for connection, example in zip(connections, EXAMPLES, strict=True):
        with connection:
            head, _, told = until_closed(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % example.status(DeadlineExceeded))
        assert b"connection: close" in head
        assert example.error(orjson.loads(told)).startswith(f"the body did not come within {TIMEOUT_S} s")


def test_clients_that_leave_cancel_their_work(running_server, client, service):
    """While the model is busy with them, and long before their time is up."""
    before, connections = service.cancelled, [connect(running_server) for _ in EXAMPLES]
    with service.scorer.held():
        for connection, example in zip(connections, EXAMPLES, strict=True):
            connection.sendall(posted(orjson.dumps(example.body("<slow>")), path=example.path))
        wait_until(lambda: service.num_open == len(EXAMPLES))
        assert service.cancelled == before
        for connection in connections:
            connection.close()
        wait_until(lambda: service.cancelled == before + len(EXAMPLES))
    assert client.post("/get_reward", json={"query": ["a"]}).status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_a_wrong_method(client, example, method):
    response = client.request(method, example.path)
    assert response.headers["allow"] == "POST, PUT"
    if method == "HEAD":
        assert (response.status_code, response.content) == (405, b"")
    else:
        assert example.refused(response, MethodNotAllowed) == f"{example.path} takes POST and PUT, not {method}"


def test_bodies_that_cannot_be_read(client, example):
    encoded = {"Content-Encoding": "gzip"}
    for content, headers, kind, text in [
        (b"", {}, InvalidRequest, "the body is not valid JSON"),
        (b'{"query": ["a"', {}, InvalidRequest, "the body is not valid JSON"),
        (b"\xff\xfe{}", {}, InvalidRequest, "the body is not valid JSON"),
        (b'{"query": [NaN]}', {}, InvalidRequest, "the body is not valid JSON"),
        (b"[" * 100_000, {}, InvalidRequest, "the body is not valid JSON"),
        (b"[]", {}, InvalidRequest, "the body is a list; send an object"),
        (b"null", {}, InvalidRequest, "the body is null; send an object"),
        (b"{}", {}, InvalidRequest, ""),
        (b"{}", encoded, InvalidRequest, "the body is not what Content-Encoding says"),
        (b"{}", {"Content-Encoding": "br"}, InvalidRequest, "Content-Encoding 'br' is not known here"),
        (b" " * (2 << 20), {}, PayloadTooLarge, "is larger than the 1 MiB that this server accepts"),
    ]:
        response = client.post(example.path, content=content, headers=headers)
        assert text in example.refused(response, kind)
    assert example.scored(example.ask(client, "a text")) == 6


def test_a_bug_of_the_server_is_told_without_its_secrets(client, example):
    response = example.ask(client, "<crash>")
    assert example.refused(response, ServerFault) == "internal error; the server's log has the details"


def test_a_text_that_is_too_long_is_refused_and_not_cut(client, example):
    text = example.refused(example.ask(client, "x" * 5000), InvalidRequest)
    assert "the sample has 5000 tokens, reward_model takes at most 4096" in text


def test_a_failed_sample_fails_its_whole_request(client):
    """These forms have no place for a failed sample beside others."""
    for path, body, status in [
        ("/get_reward", {"query": ["a", "<nan>", "b"]}, 500),
        ("/classify", {"input": ["a", "<nan>", "b"]}, 500),
        ("/encode", {"text": ["a", "<nan>", "b"]}, 500),
        ("/predict", {"inputs": [["a"], ["<nan>"], ["b"]]}, 424),
    ]:
        response = client.post(path, json=body)
        assert response.status_code == status
        assert "row 1: the reward is not finite" in response.text


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e300])
def test_no_number_that_json_has_not_ever_stands_in_an_answer(client, service, example, reward, monkeypatch):
    """Whatever the model gives."""
    monkeypatch.setattr(service.scorer, "score", lambda sequences: [Score(reward) for _ in sequences])
    text = example.refused(example.ask(client, "a text"), SampleFailed)
    assert "is not a finite number of float32" in text
