"""The page's routes of real servers: a sum, functions and a critic, with keys and without."""

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

import httpx
import numpy as np
import pytest

import served
from guerdon import CriticClient
from guerdon.assembly import build_service
from guerdon.errors import ConfigError
from guerdon.server.front import page_routes
from guerdon.server.front.admission import Admission
from guerdon.server.runtime import RunningServer
from guerdon.settings.access import KEYS_VARIABLE
from guerdon.settings.config import (
    ComponentConfig,
    CriticConfig,
    ModelConfig,
    RewardConfig,
    ServerConfig,
)
from guerdon.settings.fields import check_settings
from served import Serve
from server.echo_service import EchoService
from server.helpers import INFER, body_of, tried_again, wait_until

KEYS = {role: f"the-key-of-somebody-who-may-{role}" for role in ("score", "train", "admin")}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server of `helpful`, `flaky` and the sum `total`, which keeps samples."""
    model = str(served.reward_model(tmp_path_factory.mktemp("sums") / "rm"))
    models = [ModelConfig(model=model, name="helpful"), ModelConfig(model="served:flaky", name="flaky")]
    total = RewardConfig(name="total", components=[ComponentConfig(model=model.name) for model in models])
    with (
        served.running(*models, rewards=[total], dashboard_samples=True) as server,
        httpx.Client(base_url=server.http_url) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> str:
    """The address of a server with KEYS, which keeps samples."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("".join(f"{role} of-{role} {key}\n" for role, key in KEYS.items()))
    path.chmod(0o600)
    return serve(api_keys_file=str(path), dashboard_samples=True, build=EchoService).http_url


@pytest.fixture
def echo() -> Iterator[httpx.Client]:
    """A server as it starts without any settings."""
    with served.running(build=EchoService) as server, httpx.Client(base_url=server.http_url) as client:
        yield client


def with_key(url: str, role: str) -> httpx.Client:
    return httpx.Client(base_url=url, auth=("anybody", KEYS[role]))


def snapshot(client: httpx.Client, **query: object) -> dict:
    response = client.get("/dashboard/snapshot", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_page_and_its_files_are_served_with_headers_that_forbid_the_rest(echo):
    for path, kind in (
        ("/", "text/html"),
        ("/docs", "text/html"),
        ("/dashboard/docs.js", "text/javascript"),
        ("/dashboard/app.js", "text/javascript"),
        ("/dashboard/style.css", "text/css"),
    ):
        response = echo.get(path)
        assert response.status_code == 200, path
        assert response.headers["content-type"] == f"{kind}; charset=utf-8"
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-cache"
        name = {"/": "index.html", "/docs": "docs.html"}.get(path) or Path(path).name
        assert response.content == (page_routes.FOLDER / name).read_bytes()
        again = echo.get(path, headers={"if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_the_apis_page_gets_every_file_that_it_names_from_this_server(echo):
    named = re.findall(r'(?:src|href)="([^"]+)"', echo.get("/docs").text)
    assert {"dashboard/swagger.js", "dashboard/swagger.css", "dashboard/docs.js", "openapi.json"} <= {*named}
    for path in named:
        answer = echo.get(f"/{path}")
        assert answer.status_code == 200 and answer.content, path
    assert b"SwaggerUIBundle" in echo.get("/dashboard/swagger.js").content


def test_without_swagger_uis_files_the_answer_says_how_to_install_them(echo, monkeypatch):
    monkeypatch.setattr(page_routes, "distribution", lambda name: distribution("not-" + name))
    refused = echo.get("/dashboard/swagger.js")
    assert refused.status_code == 501
    assert "pip install" in refused.json()["error"]


@pytest.mark.parametrize("name", ["pages.py", "..%2fpages.py", "%2e%2e/pages.py", "", "app.js/", ".", "index.html%00"])
def test_nothing_else_is_served(echo, name):
    with httpx.Client(base_url=echo.base_url) as client:
        request = client.build_request("GET", "/")
        request.url = request.url.copy_with(raw_path=f"/dashboard/{name}".encode())
        assert client.send(request).status_code == 404


def test_without_a_dashboard_there_is_no_page_and_nothing_is_recorded():
    config = ServerConfig(port=0, grpc_port=None, dashboard=False)
    service = EchoService(config)
    with RunningServer(service, config) as server, httpx.Client(base_url=server.http_url) as client:
        assert client.post(INFER, content=body_of([[1, 2]])).status_code == 200
        for path in ("/", "/docs", "/dashboard/swagger.js", "/dashboard/app.js", "/dashboard/snapshot"):
            assert client.get(path).status_code == 404
        assert not [path for path in client.get("/openapi.json").json()["paths"] if "dashboard" in path]
    assert service.recorder.counters.last == 0
    assert not service.recorder.rewards._pending


def test_samples_without_a_page_are_refused():
    with pytest.raises(ConfigError, match="dashboard is off"):
        check_settings(ServerConfig(dashboard=False, dashboard_samples=True))


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_warning_at_the_start_says_that_everybody_can_read_samples(host, warns, monkeypatch):
    said: list[str] = []
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    monkeypatch.setattr(page_routes.log, "warning", said.append)  # caplog depends on levels and on other threads
    config = ServerConfig(host=host, allow_anonymous=True, dashboard_samples=True)
    page_routes.Pages(Admission(EchoService(config), config), config)
    assert any("without keys" in text for text in said) == warns


def test_a_snapshot_of_live_load(sums):
    samples = served.samples(32)
    asked = {"query": served.texts(samples), "prompts": [sample["prompt"] for sample in samples]}
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            sums.post("/get_reward?model=total", json=asked)
            stop.wait(0.05)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        wait_until(lambda: snapshot(sums, window=60)["rewards"]["total"]["drift"]["window"]["count"] >= 64)
        rates = lambda: snapshot(sums, window=60)["series"]["models"]["helpful"]["computed_tokens_per_s"]  # noqa: E731
        wait_until(lambda: (rates()[-1] or 0) > 0)
        told = snapshot(sums, window=60)
    finally:
        stop.set()
        thread.join()

    assert told["server"]["is_ready"] is True
    assert (told["server"]["role"], told["server"]["has_keys"], told["server"]["samples_allowed"]) == (
        "train",
        False,
        True,
    )
    assert told["server"]["address"] == sums.base_url.netloc.decode()
    assert 0 <= time.time() - told["server"]["now"] < 600
    assert [model["name"] for model in told["models"]] == ["total", "helpful", "flaky"]
    total, helpful, _ = told["models"]
    assert (total["kind"], total["components"]) == ("sum", ["helpful", "flaky"])
    assert (helpful["path"], helpful["components"]) == ("packed+shared", None)

    assert told["series"]["length"] == 30
    for series in told["series"]["models"].values():
        assert {len(values) for values in series.values()} == {30}
    assert told["series"]["models"]["total"]["computed_tokens_per_s"] == [None] * 30
    counted = told["totals"]["helpful"]
    assert counted["computed_tokens"] < counted["received_tokens"]
    assert 0.2 < counted["saved_share"] < 0.9
    assert 0 < counted["batch_fill"] <= 1
    assert told["totals"]["total"]["requests"]["ok"] >= 2
    latency = told["totals"]["total"]["latency_s"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
    assert latency["wait"] > 0
    assert latency["compute"] > 0
    assert told["server"]["request_timeout_s"] == 600

    rewards, answered = told["rewards"]["total"], sums.post("/get_reward?model=total", json=asked).json()["rewards"]
    count = len(rewards["count"])
    assert all(len(rewards[name]) == count for name in ("mean", "p05", "p25", "p50", "p75", "p95"))
    assert [len(column) for column in rewards["heat"]["counts"]] == [len(rewards["heat"]["edges"]) - 1] * count
    assert sum(map(sum, rewards["heat"]["counts"])) == pytest.approx(sum(rewards["count"]))
    assert sum(rewards["histogram"]["window"]) == pytest.approx(sum(rewards["count"]))
    window = rewards["drift"]["window"]
    assert window["mean"] == pytest.approx(np.mean(answered), rel=1e-5)
    assert window["std"] == pytest.approx(np.std(answered), rel=1e-5)
    assert rewards["drift"]["reference"] is rewards["drift"]["ks"] is None
    # `flaky` rewards length, by which the sum is ruled.
    assert rewards["length"]["spearman"] > 0.9
    assert len(rewards["length"]["points"]) <= 400
    assert told["critic"] is None

    components = told["components"]["total"]
    assert components["names"] == ["helpful", "flaky"]
    assert components["window"]["count"] == window["count"]
    assert sum(components["window"]["share"]) == pytest.approx(1, abs=1e-3), "it has neither a clip nor a normalisation"
    assert components["window"]["share"][1] > 0.9
    assert [len(components[key][0]) for key in ("mean", "std", "share")] == [count] * 3
    assert [*told["components"]] == ["total"], "the components themselves have none"


def test_a_time_that_is_given_is_compared_with(sums):
    texts = ["a", "of some length"]
    assert sums.post("/get_reward?model=flaky", json={"query": texts}).status_code == 200
    now = snapshot(sums, window=600)["server"]["now"]
    told = snapshot(sums, window=60, reference=f"{now - 60:.0f}-{now + 60:.0f}")["rewards"]["flaky"]
    assert told["drift"]["reference"]["count"] == told["drift"]["window"]["count"] > 0
    assert (told["drift"]["ks"], told["drift"]["shift"]) == (0, 0)
    assert told["histogram"]["reference"] == told["histogram"]["window"]


def test_errors_are_counted_by_kind_also_of_names_that_are_not_served(echo):
    assert echo.post(INFER, content=b"{").status_code == 400
    assert echo.post("/v2/models/rewrad_model/infer", content=b"{}").status_code == 400
    told = snapshot(echo)
    assert told["totals"]["reward_model"]["requests"] == {"InvalidRequest": 1}
    assert told["server"]["unknown_requests"] == {"UnknownModel": 1}
    (error,) = told["errors"]["reward_model"]
    assert (error["of"], error["kind"], error["http"], error["count"]) == ("request", "InvalidRequest", 400, 1)


def test_errors_are_told_without_what_the_client_sent(sums):
    sent = "unscorable words of a client"
    told = sums.post(
        "/v2/models/flaky/infer", json={"inputs": [{"name": sent, "datatype": "x", "shape": [1], "data": []}]}
    )
    assert (told.status_code, sent in told.text) == (400, True)
    wait_until(lambda: snapshot(sums, model="flaky")["errors"]["flaky"])
    assert sent not in sums.get("/dashboard/snapshot?model=flaky").text


def test_of_a_model_that_is_named_alone_series_and_rewards_are_told(sums):
    texts = ["x", "of some length"]
    assert sums.post("/get_reward?model=total", json={"query": texts}).status_code == 200
    whole, one = snapshot(sums), snapshot(sums, model="helpful")
    assert list(whole["series"]["models"]) == list(whole["rewards"]) == ["total", "helpful", "flaky"]
    assert list(one["series"]["models"]) == list(one["rewards"]) == ["helpful"]
    assert list(one["totals"]) == [model["name"] for model in one["models"]] == ["total", "helpful", "flaky"]
    assert one["rewards"]["helpful"]["drift"]["window"]["num_drawn"] >= 2
    refused = sums.get("/dashboard/snapshot", params={"model": "helpfull"})
    assert refused.status_code in (400, 404)
    assert "helpfull" in refused.json()["error"]


def test_series_of_a_named_model_are_those_that_it_has_among_all(sums):
    assert sums.post("/get_reward?model=flaky", json={"query": ["x"] * 7}).status_code == 200
    has = lambda told: any(told["series"]["models"]["flaky"]["sequences_per_s"])  # noqa: E731
    wait_until(lambda: has(snapshot(sums, model="flaky")))
    assert snapshot(sums, model="flaky")["totals"]["flaky"]["window"]["sequences"] >= 7


def test_a_snapshot_is_packed_for_whoever_takes_that(echo):
    asked = {"params": {"window": 3600}}
    packed = echo.get("/dashboard/snapshot", headers={"accept-encoding": "br, gzip"}, **asked)
    plain = echo.get("/dashboard/snapshot", headers={"accept-encoding": "gzip;q=0, br"}, **asked)
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert packed.headers["vary"] == plain.headers["vary"] == "accept-encoding"
    assert packed.json().keys() == plain.json().keys()
    assert int(packed.headers["content-length"]) < len(plain.content) / 2


def test_what_a_function_reads_has_about_so_many_tokens(sums):
    texts = ["a w " * n for n in range(1, 30)]
    assert sums.post("/get_reward?model=flaky", json={"query": texts}).status_code == 200
    told = snapshot(sums, model="flaky", window=60)
    length = told["rewards"]["flaky"]["length"]
    assert length["spearman"] > 0.9
    assert max(one["tokens"] for one in length["bins"]) > 10
    assert {model["name"]: model["estimates_tokens"] for model in told["models"]} == {
        "total": False,
        "helpful": False,
        "flaky": True,
    }
    (one,) = sums.post("/dashboard/try", json={"model": "flaky", "responses": ["x" * 40]}).json()["results"]
    assert one["num_tokens"] == 11


def test_one_client_waits_for_a_few_snapshots_at_once(echo):
    def get(i: int) -> int:
        with httpx.Client(base_url=echo.base_url, timeout=120) as client:
            return client.get("/dashboard/snapshot", params={"window": 60 + 10 * i}).status_code

    with ThreadPoolExecutor(40) as threads:
        statuses = Counter(threads.map(get, range(120)))
    assert set(statuses) <= {200, 503}
    assert statuses[200] >= 8
    assert get(0) == 200


@tried_again
def test_many_that_look_cost_no_more_than_one(echo):
    first = snapshot(echo)
    assert snapshot(echo)["server"]["now"] == first["server"]["now"]
    wait_until(lambda: snapshot(echo)["server"]["now"] > first["server"]["now"])


def test_bad_queries_are_told(echo):
    for query, told in (
        ("window=1", "window=1"),
        ("until=x", "until=x"),
        ("beside=nobody", "unknown model 'nobody'"),
        ("reference=x", "reference=x"),
        ("widnow=60", "unknown key"),
    ):
        response = echo.get(f"/dashboard/snapshot?{query}")
        assert response.status_code == 400
        assert told in response.json()["error"]


def test_samples_are_shown_only_if_they_are_kept(sums, echo):
    texts = [
        "prompt" + "!" * (50 + n) + " and an answer, by far the longest of all that are sent here" for n in range(20)
    ]
    assert sums.post("/get_reward?model=flaky", json={"query": texts, "prompts": ["prompt"] * 20}).status_code == 200
    told = sums.get("/dashboard/samples", params={"model": "flaky", "window": 60}).json()
    assert told["best"][0]["response"] == texts[-1].removeprefix("prompt")
    assert told["best"][0]["prompt"] == "prompt"
    assert [one["reward"] for one in told["best"]] == [float(len(text)) for text in texts[:-7:-1]]
    refused = echo.get("/dashboard/samples")
    assert refused.status_code == 404
    assert "--dashboard-samples" in refused.json()["error"]
    assert snapshot(echo)["server"]["samples_allowed"] is False


def test_samples_that_came_as_ids_are_told_as_text(sums):
    tokens = sums.post("/dashboard/try", json={"model": "helpful", "responses": ["an answer — ✓"]}).json()
    assert tokens["results"][0]["error"] is None
    ids = [[70, 71, 72, 73]]
    path = "/v2/models/helpful/infer"
    assert sums.post(path, content=body_of(ids)).status_code == 200
    told = sums.get("/dashboard/samples", params={"model": "helpful", "window": 60}).json()
    found = [one for one in told["best"] + told["worst"] if one["num_tokens"] == 4]
    assert found
    assert len(found[0]["response"]) == 4


def test_a_key_is_asked_for_and_only_an_admin_reads_texts(keyed):
    with httpx.Client(base_url=keyed) as nobody:
        for path in ("/", "/docs", "/dashboard/swagger.js", "/dashboard/snapshot", "/dashboard/samples"):
            response = nobody.get(path)
            assert response.status_code == 401
            assert any(value.startswith("Basic") for value in response.headers.get_list("www-authenticate"))
        assert nobody.post("/dashboard/try", json={"responses": ["x"]}).status_code == 401
    with with_key(keyed, "score") as client:
        assert client.get("/").status_code == 200
        told = snapshot(client)["server"]
        assert (told["role"], told["has_keys"], told["samples_allowed"]) == ("score", True, False)
        assert client.post("/dashboard/try", json={"responses": ["x"]}).status_code == 200
        refused = client.get("/dashboard/samples")
        assert refused.status_code == 403
        assert "admin" in refused.json()["error"]
    with with_key(keyed, "admin") as client:
        assert snapshot(client)["server"]["samples_allowed"] is True
        assert client.get("/dashboard/samples").json()["best"][0]["response"] == "x"


def test_a_critic_is_told_with_its_reports_and_checkpoints(tmp_path):
    model = str(served.reward_model(tmp_path / "rm"))
    critic = CriticConfig(model=model, checkpoint_dir=str(tmp_path / "critic"), global_batch_size=2, learning_rate=1e-3)
    random = np.random.default_rng(0)
    tokens = random.integers(4, 200, (4, 9))
    returns = random.normal(size=(4, 8)).astype(np.float32)
    with served.running(critic=critic) as server, httpx.Client(base_url=server.http_url) as client:
        before = snapshot(client)["critic"]
        assert (before["step"], before["reports"]["step"], before["checkpoints"]) == (0, [], [])
        with CriticClient(server.http_url) as trainer:
            rows = [*tokens]
            reports = [
                trainer.train(rows, [*returns], [*np.zeros_like(returns)], [*np.ones_like(returns)]).result()
                for _ in range(3)
            ]
            trainer.save({"kl": 0.5})
        wait_until(lambda: len(snapshot(client)["critic"]["checkpoints"]) == 1)
        told = snapshot(client)
    assert told["critic"]["reports"]["time"] == sorted(told["critic"]["reports"]["time"])
    assert 0 <= told["server"]["now"] - told["critic"]["reports"]["time"][-1] < 60
    critic_told, (model_told,) = told["critic"], told["models"]
    assert (critic_told["name"], critic_told["step"], critic_told["num_unsaved"]) == ("critic", 6, 0)
    assert critic_told["reports"]["step"] == [report.step for report in reports] == [2, 4, 6]
    assert critic_told["reports"]["loss"] == [report.loss for report in reports]
    assert critic_told["reports"]["grad_norm"] == [report.grad_norm for report in reports]
    assert critic_told["checkpoints"][0]["metrics"]["kl"] == 0.5
    assert critic_told["fault"] is None
    assert (model_told["name"], model_told["is_critic"]) == ("critic_infer", True)
    assert told["rewards"] == {}


def test_a_key_of_the_role_score_is_told_nothing_of_the_critic(tmp_path):
    path = tmp_path / "keys"
    path.write_text("".join(f"{role} of-{role} {key}\n" for role, key in KEYS.items()))
    path.chmod(0o600)
    critic = CriticConfig(model=str(served.reward_model(tmp_path / "rm")), checkpoint_dir=str(tmp_path / "critic"))
    config = ServerConfig(port=0, grpc_port=None, critic=critic, api_keys_file=str(path))
    service = build_service(config)
    with RunningServer(service, config) as server:
        for fault in ("", "the disk at /secret is broken"):
            service.critic._fault = fault
            time.sleep(1.1)  # a snapshot is kept for a second
            for role in KEYS:
                with with_key(server.http_url, role) as client:
                    told = snapshot(client)
                    assert told["models"][0]["is_critic"]
                    if role == "score":
                        assert told["critic"] is None
                        assert "secret" not in str(told)
                        assert bool(told["server"]["why"]) == bool(fault)
                    else:
                        assert told["critic"]["fault"] == (fault or None)
                        assert told["server"]["why"] == fault
