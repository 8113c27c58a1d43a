"""Isolated functions behind a real server: bad samples beside a thousand good ones, and what is left at its end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from guerdon.assembly import build_service
from guerdon.client import RetryPolicy, RewardClient
from guerdon.client.reward_client import Scores
from guerdon.errors import GuerdonError
from guerdon.local import LocalRewardModel
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig, ServerConfig
from ports import free_port
from processes import environment
from served import running
from server.helpers import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")

DEADLINE_S = 5.0
BAD = {  # text: what its sample's error says
    "HANG": "gave no answer within its deadline of 5 s",
    "HANG_IN_C": "gave no answer within its deadline of 5 s",
    "PAUSE": "gave no answer within its deadline of 5 s",
    "BOMB": "processes, more than 8",
    "2GB": "used more than 256 MiB of memory",
    "2GB_SHARED": "used more than 256 MiB of memory",
    "SEGV": "by SIGSEGV",
    "KILL": "by SIGKILL",
    "EXIT": "with exit status 3",
    "SYS_EXIT": "raised SystemExit: 4",
    "RAISE": "raised ValueError",
    "GARBAGE": "something else than an answer",
    "KILL_KEEPER": "ended the process that watches it",
    "NAN": "returned nan",
}
REASONS = {"deadline": 3, "processes": 1, "memory": 2, "signal": 2, "exit": 1, "garbage": 1, "keeper": 1}


def isolated(**settings: object) -> ModelConfig:
    # A memory limit that is reached long before the deadline, on a busy machine as well.
    limits = {"sample_deadline_s": DEADLINE_S, "sample_processes": 8, "sample_memory_mb": 256}
    more = {**limits, "children": 6, **settings}
    return ModelConfig(model="troubles:trouble", name="trouble", isolate=True, **more)  # type: ignore[arg-type]


def with_plain(model: ModelConfig) -> ServerConfig:
    """That function, one that is not isolated, and their sum."""
    plain = ModelConfig(model="rewarding:brevity", name="brevity")
    total = RewardConfig(name="total", components=[ComponentConfig(model="trouble"), ComponentConfig(model="brevity")])
    return ServerConfig(port=0, grpc_port=0, models=[model, plain], rewards=[total])


@pytest.fixture
def others() -> Iterator[set[int]]:
    """The processes below this one; a test leaves no more behind."""
    before = below()
    yield before
    wait_until(lambda: below() <= before)


def below(pid: int | None = None) -> set[int]:
    found = psutil.Process(pid).children(recursive=True)
    return {process.pid for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.slow
def test_each_bad_sample_fails_alone_beside_a_thousand_good_ones(others: set[int]) -> None:
    good = [f"a good sample, number {i}" for i in range(1000)]
    texts = list(good)
    for i, bad in enumerate(BAD):
        texts.insert(1 + 70 * i, bad)
    with running(config=with_plain(isolated())) as server, RewardClient(server.http_url, "trouble") as client:
        scores = client.score(texts=texts)
        metrics = httpx.get(f"{server.http_url}/metrics").text
    for text, reward, error in zip(texts, scores.rewards, scores.errors, strict=True):
        if text in BAD:
            assert np.isnan(reward) and BAD[text] in str(error)
        else:
            assert reward == len(text) and error is None
    for reason, count in REASONS.items():
        assert f'guerdon_isolated_ends_total{{model="trouble",reason="{reason}"}} {float(count)}' in metrics


def test_nobody_waits_for_a_hang_and_stopping_ends_it(others: set[int]) -> None:
    config = with_plain(isolated(children=3, sample_deadline_s=3600.0))
    service = build_service(config)
    assert any("troubles:trouble in 3 child processes" in info.why for info in service.catalog.models())
    with RunningServer(service, config, grace_s=0.1) as server, RewardClient(server.http_url, "trouble") as client:
        hangs: list[Future[Scores]] = [client.submit(texts=["PAUSE"]), client.submit(texts=["PAUSE"])]
        wait_until(lambda: 'guerdon_num_requests_running{model="trouble"} 2.0' in metrics_of(server))
        texts = [f"good {i}" for i in range(100)]
        np.testing.assert_array_equal(client.score(texts=texts).rewards, [len(text) for text in texts])
        with RewardClient(server.http_url, "brevity") as beside, RewardClient(server.http_url, "total") as total:
            assert beside.score(texts=["four"]).rewards[0] == np.float32(-0.04)
            assert total.score(texts=["four"]).rewards[0] == np.float32(3.96)
        assert not any(hang.done() for hang in hangs)


def metrics_of(server: RunningServer) -> str:
    return httpx.get(f"{server.http_url}/metrics").text


@pytest.mark.slow
def test_more_hangs_than_children_take_turns(others: set[int]) -> None:
    """Four hangs over two children: two deadlines, and then the good one; the queue tells nobody that it is late."""
    config = with_plain(isolated(children=2, sample_deadline_s=1.5))
    with running(config=config) as server, RewardClient(server.http_url, "trouble") as client:
        scores = client.score(texts=["PAUSE", "PAUSE", "PAUSE", "PAUSE", "good"], timeout_s=60.0)
    assert all("deadline" in str(error) for error in scores.errors[:4])
    assert scores.rewards[4] == 4.0


def test_a_model_in_this_process_ends_its_children(others: set[int]) -> None:
    with LocalRewardModel("troubles:trouble", isolate=True, children=2) as model:
        scores = model.score(texts=["fine", "SEGV", "good"])
        wait_until(lambda: len(below() - others) == 5)  # a template, two keepers, two children
    np.testing.assert_array_equal(scores.rewards, [4.0, np.nan, 4.0])


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGINT))],
)
def test_no_process_outlives_its_server(number: signal.Signals) -> None:
    port = free_port()
    command = [
        sys.executable, "-m", "guerdon", "serve", "troubles:trouble", "--isolate", "--children", "2", "--no-grpc",
    ]  # fmt: skip
    command += ["--port", str(port), "--sample-deadline-s", "3600", "--shutdown-timeout-s", "1"]
    env = environment() | {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(Path(__file__).parent)])}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            wait_until(lambda: is_ready(port))
            with RewardClient(f"http://127.0.0.1:{port}", policy=RetryPolicy(tries=1)) as client:
                assert client.score(texts=["four"]).rewards[0] == 4.0
                hang = client.submit(texts=["ORPHANS"])
                wait_until(lambda: len(below(process.pid)) >= 6)  # template, keeper, child, three orphans
                pids = below(process.pid)
                process.send_signal(number)
                process.wait(120)
                wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
                assert isinstance(hang.exception(60), GuerdonError)
        finally:
            process.kill()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").is_success
    except httpx.HTTPError:
        return False
