"""Reward models, teachers and judges that sleep and wake by vLLM's routes: memory, who waits, refusals, ranks."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

import judged
import zoo
from guerdon import RewardClient, TeacherClient
from guerdon.assembly import build_service
from guerdon.client import RetryPolicy
from guerdon.errors import Unavailable
from guerdon.server.runtime import RunningServer
from guerdon.server.service import Service
from guerdon.settings.access import KEYS_VARIABLE
from guerdon.settings.config import JudgeConfig, ModelConfig, ServerConfig, TeacherConfig
from served import Serve, reward_model, running
from server.swapping import ROWS, held
from test_ranks_served import serving
from tiers import slow_but

ONCE = RetryPolicy(tries=1)
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
MIB = 1 << 20


def ask(url: str, path: str, **query: str) -> httpx.Response:
    return httpx.post(url + path, params=query, timeout=120)


def post(server: RunningServer, path: str, **query: str) -> httpx.Response:
    return ask(server.http_url, path, **query)


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """One model of each kind, and a function, that never sleeps."""
    folder = tmp_path_factory.mktemp("asleep")
    teacher = zoo.tokenizer(zoo.language_model("llama", folder / "lm"))
    models: list[Any] = [
        ModelConfig(model=str(reward_model(folder / "rm")), name="rm"),
        TeacherConfig(model=str(teacher), name="teacher"),
        JudgeConfig(model=str(teacher), name="judge", rubric=str(judged.write(folder))),
        ModelConfig(model="served:graded_answer", name="function"),
    ]
    return serve(*models)


@pytest.fixture
def answers(server: RunningServer) -> Any:
    """What all three answer, as one array."""

    def ask() -> np.ndarray:
        with RewardClient(server.http_url, "rm", policy=ONCE) as rm, RewardClient(server.http_url, "judge") as judge:
            rewards = [rm.score(tokens=ROWS).rewards, judge.score(texts=["yes", "no"], prompts=["a", "b"]).rewards]
        with TeacherClient(server.http_url, policy=ONCE) as teacher:
            return np.concatenate([*rewards, *teacher.logprobs(tokens=ROWS).logprobs])

    return ask


@pytest.mark.parametrize("level", slow_but("12", "012"))
@pytest.mark.parametrize("mode", slow_but(("abort",), ["abort", "wait"]))
def test_all_kinds_sleep_refuse_and_wake_with_the_same_bits(
    server: RunningServer, answers: Any, level: str, mode: str
) -> None:
    before = answers()
    told = post(server, "/sleep", level=level, mode=mode)
    assert told.status_code == 200 and told.json()["status"] == "sleeping"
    assert {*told.json()["freed_bytes"]} == {"rm", "teacher", "judge"}
    state = httpx.get(server.http_url + "/is_sleeping").json()
    assert state == {"is_sleeping": True, "levels": dict.fromkeys(("rm", "teacher", "judge"), int(level))}
    if level == "0":  # vLLM's pause: what is asked waits
        threading.Timer(0.2, lambda: post(server, "/wake_up")).start()
    else:
        for name in ("rm", "teacher", "judge"):
            refused = httpx.post(f"{server.http_url}/v2/models/{name}/infer", json={"inputs": []})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert "asleep until POST /wake_up" in refused.json()["error"]
            assert httpx.get(f"{server.http_url}/v2/models/{name}/ready").status_code == 400
        assert httpx.get(server.http_url + "/v2/models/teacher/head").status_code == 503
        with RewardClient(server.http_url, "function") as function:
            assert function.score(messages=[[{"role": "assistant", "content": "1"}]], labels=["1"]).rewards == [1]
        assert post(server, "/sleep", level="1").json()["freed_bytes"] == dict.fromkeys(("rm", "teacher", "judge"), 0)
        assert post(server, "/wake_up", tags="weights").json() == {
            "status": "awake", "models": ["rm", "teacher", "judge"], "tags": ["weights"],
        }  # fmt: skip
    np.testing.assert_array_equal(answers(), before)
    assert httpx.get(server.http_url + "/is_sleeping").json() == {"is_sleeping": False, "levels": {}}


def test_one_model_sleeps_ever_deeper_and_the_others_serve(server: RunningServer, answers: Any) -> None:
    before = answers()
    sizes = [post(server, "/sleep", model="rm", level=level).json()["freed_bytes"]["rm"] for level in "0112"]
    assert sizes[0] == sizes[2] == 0 < sizes[1]
    with TeacherClient(server.http_url) as teacher:
        assert len(teacher.logprobs(tokens=ROWS).logprobs) == len(ROWS)
    with RewardClient(server.http_url, "rm", policy=ONCE) as rm, pytest.raises(Unavailable, match="rm is asleep"):
        rm.score(tokens=ROWS)
    post(server, "/wake_up", model="rm")
    np.testing.assert_array_equal(answers(), before)


@pytest.mark.parametrize(
    ("path", "query", "says"),
    [
        ("/sleep", {"level": "3"}, "level"),
        ("/sleep", {"mode": "later"}, "mode"),
        ("/sleep", {"depth": "1"}, "depth"),
        ("/wake_up", {"tags": "weight"}, "weights, kv_cache, scheduling"),
        ("/sleep", {"model": "nobody"}, "unknown model"),
        ("/sleep", {"model": "function"}, "is a function"),
    ],
)
def test_what_cannot_be_done_is_said(server: RunningServer, path: str, query: dict[str, str], says: str) -> None:
    refused = post(server, path, **query)
    assert refused.status_code in (400, 501) and says in refused.json()["error"]
    assert not httpx.get(server.http_url + "/is_sleeping").json()["is_sleeping"]


SERVICES: list[Service] = []


def build(config: ServerConfig) -> Service:
    SERVICES.append(build_service(config))
    return SERVICES[-1]


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A reward model of 100 MiB whose requests wait while it sleeps."""
    folder = zoo.checkpoint("llama", tmp_path_factory.mktemp("large"), **SIZES)
    with running(ModelConfig(model=str(folder)), build=build, while_asleep="wait", request_timeout_s=30) as server:
        yield server


@pytest.mark.slow
def test_memory_is_given_back_and_requests_wait(tmp_path: Path) -> None:
    """The arithmetic: 8 layers, each of attention's and the feed-forward's matrices, in float32; 8 MiB of tolerance.

    The process is the server's own: in this one other tests' memory comes and goes.
    """
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    least = 4 * SIZES["num_hidden_layers"] * (2 * hidden * hidden + 3 * hidden * inner)
    settings = {"models": [{"model": str(zoo.checkpoint("llama", tmp_path / "rm", **SIZES))}], "while_asleep": "wait"}
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(settings | {"port": 0, "grpc_port": None}))
    with serving("--config", tmp_path / "server.yaml", nproc=1) as (launch, url), RewardClient(url) as client:
        first, process = client.score(tokens=ROWS), launch.rank(0)
        ask(url, "/sleep"), ask(url, "/wake_up")  # what the first sleep itself leaves behind
        for level in ("1", "2"):
            awake = process.memory_info().rss
            freed = ask(url, "/sleep", level=level).json()["freed_bytes"]["reward_model"]
            assert freed >= least > 75 * MIB
            assert awake - process.memory_info().rss > freed - 8 * MIB
            futures = [client.submit(tokens=ROWS) for _ in range(3)]
            time.sleep(0.3)
            assert not any(future.done() for future in futures)
            assert ask(url, "/wake_up").status_code == 200
            for future in futures:
                np.testing.assert_array_equal(future.result(120).rewards, first.rewards)
            assert abs(process.memory_info().rss - awake) < freed / 2


@pytest.mark.slow
def test_abort_fails_what_is_queued_and_wait_answers_it(waiting: RunningServer) -> None:
    service = SERVICES[-1]
    with RewardClient(waiting.http_url, policy=ONCE) as client:
        for mode in ("abort", "wait"):
            with held(service):
                queued = client.submit(tokens=ROWS)
                while not service.loops.depth()["reward_model"][0]:
                    time.sleep(0.01)
                sleeping = threading.Thread(target=post, args=(waiting, "/sleep"), kwargs={"mode": mode})
                sleeping.start()
                if mode == "abort":
                    with pytest.raises(Unavailable, match="asleep"):
                        queued.result(120)
            sleeping.join(120)
            if mode == "wait":
                assert len(queued.result(120).rewards) == len(ROWS)
            post(waiting, "/wake_up")


@pytest.mark.slow
def test_a_full_disk_leaves_it_awake(waiting: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with RewardClient(waiting.http_url) as client:
        before = client.score(tokens=ROWS).rewards
        monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Path("/dev/full").open("r+b", buffering=0))  # noqa: SIM115
        refused = post(waiting, "/sleep")
        assert refused.status_code == 507 and "no room for the weights" in refused.json()["error"]
        np.testing.assert_array_equal(client.score(tokens=ROWS).rewards, before)


def test_only_those_who_may_train_put_models_to_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "score actor an-actors-key-of-length,train trainer a-trainers-key-of-length")
    with running(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path)))) as server:
        for key, status in (("an-actors-key-of-length", 403), ("a-trainers-key-of-length", 200)):
            headers = {"authorization": f"Bearer {key}"}
            for path in ("/sleep", "/wake_up"):
                assert httpx.post(server.http_url + path, headers=headers, timeout=120).status_code == status
        assert httpx.post(server.http_url + "/sleep").status_code == 401


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_ranks_sleep_and_wake_together(tensor_parallel: int, tmp_path: Path) -> None:
    model = zoo.checkpoint("llama", tmp_path / "rm", **SIZES)
    settings = {
        "models": [{"model": str(model)}], "tensor_parallel": tensor_parallel, "port": 0, "grpc_port": None,
    }  # fmt: skip
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(settings))
    with serving("--config", tmp_path / "server.yaml") as (launch, url), RewardClient(url, policy=ONCE) as client:
        before = client.score(tokens=ROWS).rewards
        httpx.post(url + "/sleep", timeout=120), httpx.post(url + "/wake_up", timeout=120)
        awake = [launch.rank(i).memory_info().rss for i in range(2)]
        freed = httpx.post(url + "/sleep", timeout=120).json()["freed_bytes"]["reward_model"]
        asleep = [launch.rank(i).memory_info().rss for i in range(2)]
        assert freed > 75 * MIB / tensor_parallel
        given = [one - other for one, other in zip(awake, asleep, strict=True)]
        assert min(given) > freed / 2, (freed, awake, asleep)  # rank 0 also answers meanwhile
        with pytest.raises(Unavailable, match="asleep"):
            client.score(tokens=ROWS)
        assert httpx.post(url + "/wake_up", timeout=120).status_code == 200
        np.testing.assert_array_equal(client.score(tokens=ROWS).rewards, before)
