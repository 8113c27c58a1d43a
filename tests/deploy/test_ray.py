"""The service from two replicas of Ray Serve: a plain server's answers, whatever happens to one of them.

Skipped without ray: `make ray` installs it and runs this.
"""

import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.http

import served
import zoo
from deploy.patient import BREAKS
from guerdon.adapters import openrlhf, trl
from guerdon.assembly import build_service
from guerdon.client import RewardClient
from guerdon.errors import SampleFailed
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from guerdon.settings.fields import from_mapping
from processes import environment

pytest.importorskip("ray")

import ray
from ray import serve

from guerdon.deploy.ray import NAME, build, deployment
from ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = {"ray_actor_options": {"num_cpus": 0.1}}


def settings(folder: Path) -> dict[str, Any]:
    return {"models": [{"model": str(folder), "deterministic": True}], "allow_anonymous": True}


PATIENT = {"models": [{"model": "deploy.patient:score"}], "allow_anonymous": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Ray's proxy, over nothing yet; at the end no process of Ray's is left."""
    home = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the paths of Ray's sockets must be short
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join((environment()["PYTHONPATH"], str(Path(__file__).parents[1]))))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray puts one into the home folder
        patch.setenv("OMP_NUM_THREADS", "1")
        before = set(psutil.Process().children(recursive=True))
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=home, logging_level="warning")
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            started = set(psutil.Process().children(recursive=True)) - before
            serve.shutdown()
            ray.shutdown()
            _, left = psutil.wait_procs(started, timeout=120)
            for process in left:
                process.kill()
            shutil.rmtree(home, ignore_errors=True)
            assert not left


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.reward_model(tmp_path_factory.mktemp("ray") / "rm")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[str]:
    """A plain server of the same settings."""
    config = from_mapping(ServerConfig, {**settings(folder), "port": 0, "grpc_port": None})
    with RunningServer(build_service(config), config) as server:
        yield server.http_url


@pytest.fixture(scope="module")
def two(url: str, folder: Path) -> str:
    """The model from two replicas."""
    serve.run(deployment(settings(folder), num_replicas=2, **SMALL), name="two")
    return url


@pytest.fixture
def patient(url: str) -> Iterator[str]:
    """Where an application of its own may be run, under a prefix."""
    yield f"{url}/patient"
    serve.delete("patient")


def running(app: str) -> list[int]:
    """The processes of the application's replicas, once all are up."""
    status = serve.status().applications[app].deployments[NAME]
    if set(status.replica_states) != {"RUNNING"}:
        return []
    found = [p for p in psutil.process_iter(["pid", "cmdline"]) if p.info["cmdline"]]
    return [p.info["pid"] for p in found if f":{app}:{NAME}" in p.info["cmdline"][0]]


def until(condition: Callable[[], Any], within_s: float = 120.0) -> Any:
    """Returns the first true result of `condition`."""
    end = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < end, "it has not come to pass"
        time.sleep(0.1)
    return result


def infer(url: str, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The rewards by Triton's client, all in binary."""
    with tritonclient.http.InferenceServerClient(url.removeprefix("http://"), network_timeout=60) as client:
        inputs = []
        for name, array in (("tokens", tokens), ("sequence_lengths", lengths)):
            inputs.append(tritonclient.http.InferInput(name, list(array.shape), "INT64"))
            inputs[-1].set_data_from_numpy(array)
        return client.infer("reward_model", inputs).as_numpy("rewards")


def same(answer: Any) -> Any:
    """The answer without what differs between any two."""
    return answer if isinstance(answer, list) else {**answer, "id": "", "created": 0}


def exact(response: httpx.Response) -> tuple[int, str, bytes]:
    return response.status_code, response.headers["content-type"], response.content


def test_every_form_has_a_plain_servers_scores_to_the_last_digit(two: str, plain: str) -> None:
    rows = zoo.rows(3)
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    lengths = np.array([[len(row)] for row in rows], np.int64)
    json = {
        "inputs": [
            {"name": "tokens", "shape": tokens.shape, "datatype": "INT64", "data": tokens.tolist()},
            {"name": "sequence_lengths", "shape": lengths.shape, "datatype": "INT64", "data": lengths.tolist()},
        ]
    }
    samples = served.samples(8)
    texts, prompts, completions = served.texts(samples), *([s[k] for s in samples] for k in ("prompt", "response"))
    for _ in range(4):  # both replicas get some
        assert np.array_equal(infer(two, tokens, lengths), infer(plain, tokens, lengths))
        asked = [httpx.post(f"{url}/v2/models/reward_model/infer", json=json).json()["outputs"] for url in (two, plain)]
        assert asked[0] == asked[1]
        for path, body in (
            ("/get_reward", {"query": texts}),
            ("/classify", {"model": "reward_model", "input": texts}),
            ("/predict", {"inputs": texts[0]}),
        ):
            one, other = (httpx.post(url + path, json=body) for url in (two, plain))
            assert one.status_code == other.status_code == 200
            assert same(one.json()) == same(other.json())
        by_openrlhf = [openrlhf.reward_function(url)(texts, prompts, []) for url in (two, plain)]
        assert by_openrlhf[0] == by_openrlhf[1]
        by_trl = [trl.reward_function(url)(prompts, completions) for url in (two, plain)]
        assert by_trl[0] == by_trl[1]
        with RewardClient(two) as client, RewardClient(plain) as other_client:
            assert np.array_equal(client.score(texts=texts).rewards, other_client.score(texts=texts).rewards)


def test_bodies_of_many_mebibytes_pass_unharmed(two: str, plain: str) -> None:
    tokens = np.random.default_rng(0).integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, (400, 8), np.int64)
    wide = np.zeros((400, 10_000), np.int64)  # 30 MiB, nearly all of it padding
    wide[:, :8] = tokens
    lengths = np.full((400, 1), 8, np.int64)
    assert np.array_equal(infer(two, wide, lengths), infer(plain, tokens, lengths))


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "/v2/models/reward_model/infer", b"{"),
        ("POST", "/v2/models/reward_model/infer", b'{"inputs": [{"name": "nonsense"}]}'),
        ("POST", "/v2/models/other/infer", b'{"inputs": []}'),
        ("POST", "/get_reward", b'{"query": 5}'),
        ("POST", "/classify", b'{"input": []}'),
        ("GET", "/v2/models/other", b""),
        ("GET", "/v2/models/reward_model/infer", b""),
        ("GET", "/no/such/path", b""),
    ],
)
def test_bad_requests_get_a_plain_servers_errors(two: str, plain: str, method: str, path: str, content: bytes) -> None:
    one, other = (httpx.request(method, url + path, content=content) for url in (two, plain))
    assert exact(one) == exact(other)
    assert one.status_code >= 400


def test_a_larger_body_than_is_allowed_is_refused_alike(two: str, plain: str) -> None:
    one, other = (httpx.post(f"{url}/get_reward", content=b" " * (257 << 20), timeout=120) for url in (two, plain))
    assert exact(one) == exact(other)
    assert one.status_code == 413


def test_health_and_metrics_are_served(two: str) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/reward_model/ready", "/health", "/v2", "/metrics"):
        assert httpx.get(two + path).status_code == 200, path


def test_no_request_is_lost_with_a_replica_that_is_killed(two: str) -> None:
    texts, stop = served.texts(served.samples(16)), threading.Event()
    killed = until(lambda: len(pids := running("two")) == 2 and pids)

    def load() -> list[list[float]]:
        """The rewards of call after call; a call that fails raises."""
        with RewardClient(two) as client:
            told = []
            while not stop.is_set():
                told.append(client.score(texts=texts).raise_for_failed().rewards.tolist())
            return told

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load) for _ in range(4)]
        try:
            time.sleep(1)
            os.kill(killed[0], signal.SIGKILL)
            until(lambda: len(pids := running("two")) == 2 and killed[0] not in pids)
            time.sleep(1)
        finally:
            stop.set()
        told = [rewards for done in loads for rewards in done.result()]
    assert len(told) > 50
    assert all(rewards == told[0] for rewards in told)


def test_a_replica_that_cannot_compute_any_more_is_replaced(patient: str) -> None:
    serve.run(deployment(PATIENT, **SMALL), name="patient", route_prefix="/patient")
    before = until(lambda: running("patient"))
    with RewardClient(patient) as client:
        with pytest.raises(SampleFailed, match="cannot compute any more"):
            client.score(texts=[BREAKS]).raise_for_failed()
        until(lambda: (pids := running("patient")) and pids != before)
        assert client.score(texts=["abc"]).rewards.tolist() == [3.0]


def test_replicas_come_and_go_with_the_load_and_nothing_accepted_is_dropped(patient: str) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
    scaling |= {"upscale_delay_s": 0.5, "downscale_delay_s": 1.0, "metrics_interval_s": 0.2, "look_back_period_s": 1.0}
    serve.run(deployment(PATIENT, autoscaling_config=scaling, **SMALL), name="patient", route_prefix="/patient")
    assert len(until(lambda: running("patient"))) == 1
    stop = threading.Event()

    def load(i: int) -> int:
        """How many requests were answered, each with its own score."""
        with httpx.Client(timeout=120) as client:
            count = 0
            while not stop.is_set():
                reply = client.post(f"{patient}/get_reward", json={"query": ["x" * i]})
                assert (reply.status_code, reply.json()["rewards"]) == (200, [float(i)]), reply.text
                count += 1
            return count

    with ThreadPoolExecutor(9) as pool:
        try:
            one = pool.submit(load, 1)
            many = [pool.submit(load, i) for i in range(2, 10)]
            until(lambda: len(running("patient")) == 2)
        finally:
            stop.set()
        assert all(future.result() for future in [one, *many])
        stop.clear()
        try:
            one = pool.submit(load, 1)  # goes on while a replica leaves
            until(lambda: len(running("patient")) == 1)
        finally:
            stop.set()
        assert one.result()


def test_a_keyless_servers_file_works_unchanged_on_loopback(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-reward-model").symlink_to(folder)
    (tmp_path / "server.yaml").write_text("models:\n  - {model: ./my-reward-model}\n")
    monkeypatch.chdir(tmp_path)
    serve.run(deployment("server.yaml", **SMALL), name="file", route_prefix="/file")
    try:
        with RewardClient(f"{url}/file") as client:
            assert client.score(texts=["abc"]).raise_for_failed().rewards.shape == (1,)
        foreign = httpx.post(f"{url}/file/get_reward", json={"query": ["abc"]}, headers={"Host": "rewards.example.com"})
        assert foreign.status_code == 403  # as a plain server there: the page of a rebound name
    finally:
        serve.delete("file")


def test_a_file_is_read_where_the_application_is_built(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("models:\n  - {model: ./rm}\n")
    for made in (build({"config": str(path)}), build({"models": [{"model": "./rm"}]}), deployment(path)):
        assert made._bound_deployment.init_args[0].models[0].model == "./rm"
