"""Which key opens what over HTTP and gRPC, what a page may have a browser send, and where keys are never seen."""

import logging
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import orjson
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import served
from guerdon.critic_core import Operation
from guerdon.server.front import guard, http_app
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from guerdon.wire.forms import FORMS
from served import Serve
from server.arithmetic_critic import ArithmeticService
from server.echo_service import CRASH_TOKEN, EchoService
from server.front.test_grpc_hostile import message
from server.helpers import INFER, body_of, next_status, wait_until
from server.keys import ADMIN, KEYS, SCORE, TRAIN, bearer, keyed

OPERATIONS = [f"critic_{operation}" for operation in Operation]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    config = keyed(tmp_path_factory.mktemp("guard"))
    return serve(config=config, build=EchoService)


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = keyed(tmp_path_factory.mktemp("critic"))
    with RunningServer(ArithmeticService(server=config), config) as server:
        yield server


@pytest.fixture(scope="module")
def keyless(serve: Serve) -> RunningServer:
    return serve(grpc_port=0, build=EchoService)


def paths() -> list[tuple[str, str]]:
    """Every route of the application, with a method that it takes."""
    service = EchoService()
    routes = http_app.app(service, ServerConfig()).routes  # type: ignore[attr-defined]
    service.stop()
    found = []
    for route in routes:
        path = re.sub(r"\{name.*?\}", "reward_model", route.path).replace("{version}", "1")
        found.append((route.methods[0], path))
    return found


def test_every_route_but_the_open_ones_needs_a_key(server: RunningServer) -> None:
    routes = paths()
    assert len(routes) > len(FORMS) + 15
    seen = set()
    with httpx.Client(base_url=server.http_url) as client:
        for method, path in [*routes, ("GET", "/nowhere"), ("GET", "/"), ("GET", "/v2/health/live/"), ("PUT", "//")]:
            answer = client.request(method, path)
            if path in guard.OPEN:
                assert answer.status_code == 200
                seen.add(path)
                continue
            assert answer.status_code == 401, path
            assert answer.headers.get_list("www-authenticate") == ['Bearer realm="guerdon"', 'Basic realm="guerdon"']
            assert answer.headers["connection"] == "close"
            assert "this server needs a key" in answer.text
            assert client.request(method, path, headers=bearer(SCORE)).status_code != 401, path
    assert seen == guard.OPEN


def test_each_form_tells_of_a_missing_key_in_its_own_way(server: RunningServer) -> None:
    assert httpx.post(server.http_url + "/v1/score").json()["error"]["code"] == 401
    assert httpx.get(server.http_url + "/v1/models").json()["error"]["code"] == 401
    assert httpx.post(server.http_url + "/predict").json()["error_type"]
    assert httpx.post(server.http_url + INFER).headers["guerdon-error"] == "Unauthenticated"


def test_a_body_without_a_key_is_not_read(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes before the body, which is announced and never sent, and the connection ends."""
    monkeypatch.setattr(http_app, "_LINGER_S", 0.1)
    host, port = server.http_url.removeprefix("http://").split(":")
    for more in (b"", b"Expect: 100-continue\r\n"):
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(
                b"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n%s\r\n" % more
            )
            answer = b""
            while data := connection.recv(65536):
                answer += data
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("role", KEYS)
def test_who_may_do_what_over_http(role: str, server: RunningServer, critic: RunningServer) -> None:
    with httpx.Client(headers=bearer(KEYS[role])) as client:
        assert client.post(server.http_url + INFER, content=body_of([[5]])).status_code == 200
        assert client.get(server.http_url + "/metrics").status_code == 200
        for name in OPERATIONS:
            answer = client.post(f"{critic.http_url}/v2/models/{name}/infer", content=b"nonsense")
            assert answer.status_code == (403 if role == "score" else 400), name
            if role == "score":
                assert f"{name} needs a key of the role train; scorer has the role score" in answer.text
            assert client.get(f"{critic.http_url}/v2/models/{name}").status_code == 200
        for what in ("load", "unload"):
            answer = client.post(f"{server.http_url}/v2/repository/models/nobody/{what}")
            assert answer.status_code == (400 if role == "admin" else 403), answer.text


def code_of(server: RunningServer, method: str, request: Any, key: str | None = None) -> str:
    """How a call over gRPC ends."""
    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
    with grpc.insecure_channel((server.grpc_url or "").removeprefix("grpc://")) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            getattr(stub, method)(request, metadata=metadata, timeout=120)
        except grpc.RpcError as e:
            return e.code().name  # type: ignore[attr-defined, no-any-return]
        return "OK"


@pytest.mark.parametrize("role", ["nobody", "stranger", *KEYS])
def test_who_may_do_what_over_grpc(role: str, server: RunningServer, critic: RunningServer) -> None:
    code = partial(code_of, key=KEYS.get(role, "a-key-that-nobody-has" if role == "stranger" else None))
    assert code(server, "ServerLive", pb.ServerLiveRequest()) == "OK"
    assert code(server, "ServerReady", pb.ServerReadyRequest()) == "OK"
    usual = "OK" if role in KEYS else "UNAUTHENTICATED"
    for method in ("ServerMetadata", "ModelStatistics", "RepositoryIndex"):
        assert code(server, method, getattr(pb, method + "Request")()) == usual, method
    assert code(server, "ModelInfer", message([5])) == usual
    for method in ("ModelReady", "ModelMetadata", "ModelConfig"):
        assert code(server, method, getattr(pb, method + "Request")(name="reward_model")) == usual, method
    trains = {"score": "PERMISSION_DENIED"}.get(role, "INVALID_ARGUMENT") if role in KEYS else usual
    for name in OPERATIONS:
        assert code(critic, "ModelInfer", pb.ModelInferRequest(model_name=name, raw_input_contents=[b"x"])) == trains
    for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
        admins = {"admin": "NOT_FOUND"}.get(role, "PERMISSION_DENIED") if role in KEYS else usual
        assert code(server, method, getattr(pb, method + "Request")(model_name="nobody")) == admins


def test_without_keys_nobody_is_admin(keyless: RunningServer) -> None:
    answer = httpx.post(keyless.http_url + "/v2/repository/models/reward_model/unload", headers=bearer(ADMIN))
    assert answer.status_code == 403
    assert "this server was started without keys" in answer.json()["error"]
    load = pb.RepositoryModelLoadRequest(model_name="reward_model")
    assert code_of(keyless, "RepositoryModelLoad", load) == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8080"}, 200),  # behind a tunnel
        ({"Host": "Localhost."}, 200),
        ({"Host": "demo.localhost:1"}, 200),
        ({"Host": "10.1.2.3:31555"}, 200),  # a mapped port, a pod's address
        ({"Host": "[fd00::1]:31555"}, 200),
        ({"Host": socket.gethostname()}, 200),
        ({"Host": "model.example.com"}, 403),  # whoever asks: any header but Host and Origin can be made up
        ({"Host": "evil.example.com:1", "User-Agent": "x"}, 403),
        ({"Host": "localhost.example.com"}, 403),
        ({"Host": "127.0.0.1:1:1"}, 403),
        ({"Origin": "{own}"}, 200),
        ({"Origin": "{own}", "User-Agent": "Mozilla/5.0"}, 200),
        ({"Origin": "http://localhost:1", "Host": "LOCALHOST:1"}, 200),
        ({"Origin": "http://[::1]:1", "Host": "[::1]:1"}, 200),
        ({"Origin": "http://evil.example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://localhost:1", "Host": "localhost:2"}, 403),
        ({"Origin": "http://evil.example.com:1", "Host": "evil.example.com:1"}, 403),  # whose name leads here
        ({"Host": "evil.example.com:1", "User-Agent": "Mozilla/5.0"}, 403),  # the same, of a GET
        ({"Host": "127.0.0.1.example.com", "User-Agent": "Mozilla/5.0"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),  # an image, which sends no Origin
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, 403),  # of another port of this machine
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),  # a link on another page
    ],
)
def test_a_page_from_elsewhere_gets_nothing(headers: dict[str, str], status: int, keyless: RunningServer) -> None:
    sent = {name: value.format(own=keyless.http_url) for name, value in headers.items()}
    for path in ("/v2", "/health"):
        assert httpx.get(keyless.http_url + path, headers=sent).status_code == status
    assert httpx.post(keyless.http_url + INFER, content=body_of([[5]]), headers=sent).status_code == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"", 403),
        (b" ", 403),
        (b"localhost", 200),
        (b"LOCALHOST.:80", 200),
        (b"localhost:", 200),
        (b"[::1]", 200),
        (b"[::FFFF:127.0.0.1]:1", 200),
        (b"0.0.0.0:1", 200),  # an address, which no page can point elsewhere
        (b"[::1].evil.com", 403),
        (b"[::1]evil.com:80", 403),
        (b"[::1", 403),
        (b"::1", 403),
        (b"[localhost]", 403),
        (b"[127.0.0.1]", 403),
        (b"[fe80::1%evil.com]", 403),
        (b"127.0.0.1.evil.com", 403),
        (b"127.0.0.1:80@evil.com", 403),
        (b"localhost@evil.com", 403),
        (b"localhost:80.evil.com", 403),
        (b"localhost/evil.com", 403),
        (b"localhost evil.com", 403),
        (b"localhost..", 403),
        (b"evil.com#.localhost", 403),
        (b"xlocalhost", 403),
        (b"0", 403),  # other spellings of an address are names, which a resolver may look up
        (b"127.1", 403),
        (b"2130706433", 403),
        (b"0x7f000001", 403),
        (b"0177.0.0.1", 403),
    ],
)
def test_a_host_is_read_whole(host: bytes, status: int, keyless: RunningServer) -> None:
    assert answer_to(keyless, b"GET /v2 HTTP/1.1\r\nHost: %s\r\nX-Forwarded-Host: localhost\r\n\r\n" % host) == status


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET http://localhost/v2?x=http://evil.com HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET /v2?x=http://evil.com HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET http://evil.com/v2 HTTP/1.1\r\nHost: localhost\r\n", 400),  # the target counts, says RFC 9112
        (b"GET http://localhost/v2 HTTP/1.1\r\nHost: evil.com\r\n", 400),
        (b"GET http://localhost@evil.com/v2 HTTP/1.1\r\nHost: localhost\r\n", 400),
        (b"GET http://evil.com/v2 HTTP/1.0\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n", 400),
        (b"GET /v2 HTTP/1.0\r\nHost:\r\nOrigin: null\r\n", 403),
        (b"GET /v2 HTTP/1.0\r\nOrigin: null\r\n", 403),
        (b"GET /v2 HTTP/1.0\r\nHost:\r\nOrigin: http://\r\n", 403),
    ],
)
def test_no_other_way_names_a_host(head: bytes, status: int, keyless: RunningServer) -> None:
    assert answer_to(keyless, head + b"\r\n") == status


def answer_to(server: RunningServer, head: bytes) -> int:
    """The status that answers a head."""
    host, port = server.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(head)
        return next_status(connection)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"host": "127.0.0.1"}, {"gpu-7.example.com": 403, "rewards": 403, "localhost": 200}),
        ({"host": "127.0.0.1", "allowed_hosts": ["Rewards:80", "a.example.com"]}, {"rewards:1": 200, "other": 403}),
        ({"host": "0.0.0.0"}, {"gpu-7.example.com": 200, "rewards": 200, "rewards.ns.svc.cluster.local:80": 200}),
        ({"host": "0.0.0.0", "allowed_hosts": ["rewards"]}, {"rewards:1": 200, "10.0.0.7": 200, "evil.com": 403}),
    ],
)
def test_by_which_names_a_server_without_keys_is_reached(settings: dict[str, Any], wanted: dict[str, int]) -> None:
    """On a network clients know it by names that it cannot know, unless it is told them."""
    with served.running(build=EchoService, allow_anonymous=True, **settings) as server:
        url = server.http_url.replace("0.0.0.0", "127.0.0.1")
        for name, status in wanted.items():
            answer = httpx.get(url + "/metrics", headers={"Host": name})
            assert answer.status_code == status, name
            if status == 403:
                assert "--allowed-hosts" in answer.json()["error"]


def test_http_1_1_has_a_host(keyless: RunningServer) -> None:
    host, port = keyless.http_url.removeprefix("http://").split(":")
    for version, status in ((b"1.1", b"400"), (b"1.0", b"200")):
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(b"GET /v2 HTTP/%s\r\n\r\n" % version)
            answer = connection.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 %s " % status)


def test_with_keys_a_page_may_have_any_name_of_its_own(server: RunningServer) -> None:
    for origin, status in (("http://rewards.example.com", 200), ("http://evil.example.com", 403)):
        sent = {"Origin": origin, "Host": "rewards.example.com", "User-Agent": "Mozilla/5.0"}
        answer = httpx.post(server.http_url + INFER, content=body_of([[5]]), headers=sent, auth=("me", SCORE))
        assert answer.status_code == status


def test_requests_are_counted_by_their_keys_holder(tmp_path: Path) -> None:
    config = keyed(tmp_path, grpc_port=None)
    with served.running(config=config, build=EchoService) as server, httpx.Client(base_url=server.http_url) as client:
        client.get("/health")
        client.get("/v2", headers=bearer("wrong" * 9))
        client.get("/v2", headers=bearer(SCORE))
        client.post(INFER, content=b"", headers=bearer(SCORE))
        client.post(INFER, content=body_of([[5]]), headers=bearer(TRAIN))
        text = client.get("/metrics", headers=bearer(ADMIN)).text
    counted = re.findall(r'^guerdon_client_requests_total\{client="(.*)",outcome="(.*)"\} (.*)$', text, re.MULTILINE)
    assert sorted(counted) == [
        ("scorer", "InvalidRequest", "1.0"),
        ("scorer", "ok", "1.0"),
        ("trainer", "ok", "1.0"),
        ("unknown", "Unauthenticated", "1.0"),
    ]


def test_no_log_and_no_metric_shows_a_key(
    server: RunningServer, critic: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore", "hpack"):  # the client's own, which know the headers that they send
        caplog.set_level(logging.WARNING, logger=name)
    wrong = "a-wrong-key-0123456789"
    for key in (*KEYS.values(), wrong):
        with httpx.Client(headers=bearer(key)) as client:
            for method, path in [*paths(), ("GET", f"/nowhere?key={key}")]:
                client.request(method, server.http_url + path)
            client.post(server.http_url + INFER, content=body_of([[CRASH_TOKEN]]))
            client.post(f"{critic.http_url}/v2/models/critic_train/infer", content=orjson.dumps({"inputs": [key]}))
            client.get(server.http_url + "/v2", headers={"Origin": f"http://{key}"})
        httpx.get(server.http_url + "/v2", auth=("x", key))
    metrics = httpx.get(server.http_url + "/metrics", headers=bearer(SCORE)).text
    wait_until(lambda: "unexpected error" in caplog.text)
    for key in (*KEYS.values(), wrong):
        assert key not in caplog.text
        assert key not in metrics
