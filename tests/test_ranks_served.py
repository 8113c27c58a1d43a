"""Servers of several processes, as torchrun starts them: the same answers as of one, and how they end."""

import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import yaml

import judged
import nemo_parts
import rank_functions
import zoo
from guerdon.client import CriticClient, RetryPolicy, RewardClient, Scores
from guerdon.errors import Unavailable
from launched import Launch, launched, launching
from ports import free_port
from served import FAILS, reward_model, samples, sums, texts
from server.helpers import wait_until
from test_critic_server_trainer import batch_of, by_hand, make

ONCE = RetryPolicy(tries=1)
RESTARTS = ("--standalone", "--max-restarts", "2")


@contextmanager
def serving(*args: object, nproc: int = 2, options: tuple[str, ...] = (), **env: str) -> Iterator[tuple[Launch, str]]:
    """A launch of `guerdon serve`, and its URL, from when it is ready."""
    port = free_port()
    with launching("guerdon", nproc, "serve", *args, "--port", port, options=options, env=env) as launch:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(launch, url)
        yield launch, url


def wait_until_ready(launch: Launch, url: str) -> None:
    def is_ready() -> bool:
        assert launch.torchrun.poll() is None, launch.output()
        try:
            return httpx.get(url + "/v2/health/ready").status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(is_ready)


def score(url: str, model: str, retry: RetryPolicy | None = None, **asked: Any) -> Scores:
    with RewardClient(url, model=model, policy=retry or RetryPolicy()) as client:
        return client.score(**asked)


def exit_code(launch: Launch, timeout_s: float = 120.0) -> int:
    return launch.torchrun.wait(timeout_s)


def is_free(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) != 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.mark.timeout(300)  # starts of processes, each of many imports
def test_two_ranks_serve_what_one_serves_and_leave(folder: Path, tmp_path: Path) -> None:
    asked = samples(14)
    whole, labels = texts(asked), [s["label"] for s in asked]
    with sums(folder) as one:
        wanted = score(one.http_url, "total", texts=whole, labels=labels).rewards
        wanted_helpful = score(one.http_url, "helpful", texts=whole).rewards
    settings = {
        "models": [
            {"model": str(folder / "rm"), "name": "helpful", "deterministic": True},
            {"model": "served:agreement", "name": "agreement"},
            {"model": "served:flaky", "name": "flaky"},
        ],
        "rewards": [
            {"name": "total", "components": [{"model": "helpful"}, {"model": "agreement", "weight": 0.5, "clip": 3.0}]}
        ],
    }
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(settings))
    grpc = f"127.0.0.1:{free_port()}"
    with serving("--config", tmp_path / "server.yaml", "--grpc-port", grpc.split(":")[1]) as (launch, url):
        for address in (url, f"grpc://{grpc}"):
            assert score(address, "helpful", texts=whole).rewards == pytest.approx(wanted_helpful, abs=1e-6)
            assert score(address, "total", texts=whole, labels=labels).rewards == pytest.approx(wanted, abs=1e-6)
            some = score(address, "flaky", texts=[whole[0], FAILS, whole[1]])
            assert np.isnan(some.rewards[1]) and "returned nan" in str(some.errors[1])
            assert some.rewards[[0, 2]].tolist() == [len(whole[0]), len(whole[1])]
        assert_triton_gets(wanted_helpful, whole, url, grpc)
        metrics = httpx.get(url + "/metrics").text
        assert 'guerdon_ranks{kind="data"} 2.0' in metrics
        assert 'guerdon_gather_seconds_count{command="forward"}' in metrics

        # What one of them is told to do, all do.
        launch.rank(1).send_signal(signal.SIGTERM)
        assert exit_code(launch) == 0, launch.output()
        assert is_free(url)
        assert "Traceback" not in launch.output(), launch.output()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_follower_that_dies_amid_a_forward_is_told_of_and_all_come_back(tmp_path: Path) -> None:
    """Who waits is told so, who retries gets the answer of those that come next."""
    slow = tmp_path / "slow"
    arguments = ("rank_functions:length", "--name", "length", "--no-grpc")
    with serving(*arguments, options=RESTARTS, SLOW_FILE=str(slow)) as (launch, url):
        first = launch.rank(0).pid
        told: list[BaseException] = []
        patient: list[float] = []

        def ask_once() -> None:
            try:
                score(url, "length", ONCE, texts=[rank_functions.SLOW, "b"])
            except Unavailable as e:
                told.append(e)

        def ask_patiently() -> None:
            scores = score(url, "length", RetryPolicy.patient(200, wait_for_start=True), texts=["abc", "de"])
            patient.extend(scores.rewards.tolist())

        threads = [threading.Thread(target=ask_once)]
        threads[0].start()
        wait_until(slow.exists)
        threads.append(threading.Thread(target=ask_patiently))
        threads[1].start()
        follower = launch.rank(1)
        follower.send_signal(signal.SIGKILL)
        threads[0].join(120)
        assert len(told) == 1, launch.output()
        assert re.search(rf"rank 1 \(.*, process {follower.pid}\) has ended", str(told[0])), told
        threads[1].join(120)
        assert patient == [3.0, 2.0], launch.output()
        wait_until_ready(launch, url)
        assert launch.rank(0).pid != first
        launch.rank(1).send_signal(signal.SIGTERM)
        assert exit_code(launch) == 0, launch.output()
        assert "Traceback" not in launch.output(), launch.output()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_judge_on_two_ranks_gives_the_scores_of_separate_forwards(tensor_parallel: int, tmp_path: Path) -> None:
    """Both ranks compute parts of a batch, or parts of the weights."""
    model = zoo.tokenizer(zoo.language_model("llama", tmp_path / "llama"))
    judge = {"kind": "judge", "model": str(model), "rubric": judged.write(tmp_path), "max_other_mass": 1.0}
    settings = {"models": [judge], "tensor_parallel": tensor_parallel, "grpc_port": None}
    (tmp_path / "judge.yaml").write_text(yaml.safe_dump(settings))
    wanted = judged.wanted(model)
    with serving("--config", tmp_path / "judge.yaml") as (_, url):
        metrics = httpx.get(url + "/metrics").text
        assert f'guerdon_ranks{{kind="{"data" if tensor_parallel == 1 else "tensor"}"}} 2.0' in metrics, metrics
        scores = score(url, "judge", texts=judged.TEXTS, prompts=judged.PROMPTS)
        np.testing.assert_allclose(scores.rewards, wanted["rewards"], rtol=0, atol=1e-5)
        assert scores.attributes is not None  # after the criteria: the mass on no label, and the entropy
        np.testing.assert_allclose(scores.attributes[:, :-2], wanted["values"], rtol=0, atol=1e-5)


def assert_triton_gets(wanted: np.ndarray, whole: list[str], url: str, grpc: str) -> None:
    sentences = np.array([text.encode() for text in whole], dtype=object)[:, None]
    for module, address in ((triton_http, url.removeprefix("http://")), (triton_grpc, grpc)):
        with module.InferenceServerClient(address) as client:
            given = module.InferInput("sentences", list(sentences.shape), "BYTES")
            given.set_data_from_numpy(sentences)
            rewards = client.infer("helpful", [given]).as_numpy("rewards")
            assert rewards.reshape(-1).tolist() == pytest.approx(wanted, abs=1e-6)


def two_models(tmp_path: Path, folder: Path) -> tuple[str, ...]:
    """The words for a server of a function, and then a checkpoint, whose loading the ranks do together."""
    models = [{"model": "rank_functions:length", "name": "length"}, {"model": str(reward_model(folder / "second"))}]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"models": models}))
    return "serve", "--config", str(tmp_path / "two.yaml"), "--port", "0", "--no-grpc"


@pytest.mark.slow
def test_no_rank_starts_if_one_cannot(folder: Path, tmp_path: Path) -> None:
    done = launched("guerdon", 2, *two_models(tmp_path, folder), env={"FAILING_RANK": "1"})
    assert done.code == 1
    assert re.search(r"guerdon: rank 1 on .*: cannot import rank_functions:length: .*no such function", done.output)
    assert "help: give module:function" in done.output
    assert done.output.count("guerdon: ") == 2 and "ready at" not in done.output  # loading, and that
    assert re.search(r"exitcode *: 2 ", done.output), done.output


@pytest.mark.slow
def test_a_rank_that_dies_while_it_loads_is_named(folder: Path, tmp_path: Path) -> None:
    done = launched("guerdon", 2, *two_models(tmp_path, folder), env={"DYING_RANK": "1"})
    assert re.search(r"CRITICAL rank 0 .*: rank 1 \(.*\) has ended", done.output), done.output
    assert re.search(r"exitcode *: (70|-9) ", done.output), done.output


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_told_to_stop_while_it_loads_leaves_with_all_others(rank: int, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    words = ("serve", "rank_functions:length", "--port", 0, "--no-grpc")
    with launching("guerdon", 2, *words, env={"SLOW_IMPORT": "3", "SLOW_FILE": str(slow)}) as launch:
        wait_until(slow.exists)
        launch.rank(rank).send_signal(signal.SIGTERM)
        assert exit_code(launch) == 0, launch.output()
        assert "Traceback" not in launch.output() and "CRITICAL" not in launch.output()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seconds", ["0", "1"])
def test_ranks_that_are_told_to_stop_again_and_again_end_in_good_order(rank: int, seconds: str, tmp_path: Path) -> None:
    """Signals both ranks as launchers on several hosts do, when they serve or from the start on."""
    slow, port = tmp_path / "slow", free_port()
    env = {"SLOW_IMPORT": seconds, "SLOW_FILE": str(slow)}
    with launching("guerdon", 2, "serve", "rank_functions:length", "--port", port, "--no-grpc", env=env) as launch:
        if seconds == "0":
            wait_until_ready(launch, f"http://127.0.0.1:{port}")
        wait_until(slow.exists)
        ranks = [launch.rank(rank), launch.rank(1 - rank)]
        while launch.torchrun.poll() is None:
            for one in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGTERM)
            time.sleep(0.002)
        assert exit_code(launch) == 0, launch.output()
        assert "CRITICAL" not in launch.output() and "Traceback" not in launch.output(), launch.output()


@pytest.mark.slow
def test_requests_that_outlast_the_grace_period_get_an_error_and_the_launcher_restarts(tmp_path: Path) -> None:
    slow, told = tmp_path / "slow", []
    with serving("rank_functions:length", "--no-grpc", SLOW_FILE=str(slow), SLOW_SECONDS="60") as (launch, url):

        def ask() -> None:
            with pytest.raises(Unavailable) as raised:
                score(url, "reward_model", ONCE, texts=[rank_functions.SLOW])
            told.append(str(raised.value))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(slow.exists)
        launch.rank(0).send_signal(signal.SIGTERM)
        asking.join(120)
        assert len(told) == 1 and "unfinished after the grace period of 20 s" in told[0], told
        assert exit_code(launch) == 1
        assert re.search(r"exitcode *: 70 ", launch.output()), launch.output()
        assert "this server ends without them" in launch.output()
        launch.wait_ended()


@pytest.mark.slow
def test_nemo_aligners_servers_run_on_every_rank() -> None:
    ports = free_port(), free_port()
    reward_url, critic_url = (f"http://127.0.0.1:{port}" for port in ports)
    with launching("nemo_ranks", 2, *ports) as launch:
        wait_until_ready(launch, reward_url)
        scores = score(reward_url, "reward_model", tokens=[[1, 2, 3], [40], [5, 6]])
        assert scores.rewards.tolist() == [6.0, 40.0, 11.0]
        launch.rank(0).send_signal(signal.SIGTERM)
        wait_until_ready(launch, critic_url)
        with CriticClient(critic_url) as critic:
            assert critic.train(**batch_of(8)).result(120) is not None
        launch.rank(1).send_signal(signal.SIGTERM)
        assert exit_code(launch) == 0, launch.output()
        assert all(f"RANK {rank} HOLDS" in launch.output() for rank in (0, 1)), launch.output()


@pytest.mark.slow
def test_each_rank_has_children_of_its_own_for_an_isolated_function() -> None:
    flags = ("--isolate", "--children", 2, "--sample-deadline-s", 5, "--no-grpc")
    with serving("troubles:trouble", *flags) as (launch, url):
        asked = ["PAUSE" if i % 10 == 3 else "SEGV" if i % 10 == 7 else f"good {i}" for i in range(40)]
        told = score(url, "reward_model", texts=asked)
        for text, reward, error in zip(asked, told.rewards, told.errors, strict=True):
            wanted = {"PAUSE": "within its deadline of 5 s", "SEGV": "by SIGSEGV"}.get(text)
            assert wanted in str(error) if wanted else reward == len(text)
        launch.rank(1).send_signal(signal.SIGTERM)
        assert exit_code(launch) == 0, launch.output()


@pytest.mark.slow
def test_nemo_aligners_servers_split_batches_over_data_parallel_ranks() -> None:
    ports = free_port(), free_port()
    reward_url, critic_url = (f"http://127.0.0.1:{port}" for port in ports)
    batch = batch_of(8)
    batch["mask"][:] = 1  # so that the mean of the ranks' losses is the global batch's
    losses, weights = by_hand(make(), batch)
    with launching("nemo_parts", 2, *ports) as launch:
        wait_until_ready(launch, reward_url)
        # Of 3 rows, filled up, each rank computes 2; of 5, which is more than 2 on each, each computes 4.
        assert score(reward_url, "reward_model", tokens=[[1, 2], [40], [5]]).rewards.tolist() == [2003, 2040, 2005]
        assert score(reward_url, "reward_model", tokens=[[i] for i in range(5)]).rewards.tolist() == [
            4000.0 + i for i in range(5)
        ]
        told = score(reward_url, "reward_model", tokens=[[1], [2], [3], [nemo_parts.FAILS]])
        assert np.isfinite(told.rewards).tolist() == [True, True, True, False]
        assert "a bug in the user's function" in str(told.errors[3])
        launch.rank(0).send_signal(signal.SIGTERM)
        wait_until_ready(launch, critic_url)
        with CriticClient(critic_url) as critic:
            rows = [[i, 1, 2, 3, 4][: 1 + i % 5] for i in range(1, 6)]
            told = critic.infer_with_rewards(tokens=[*rows, [7] * 5])
            assert told.rewards.tolist() == [2.0, 3.0, 4.0, 5.0, 1.0, 5.0]
            plain = make().model
            for values, row in zip(told.values, [*rows, [7] * 5], strict=True):
                np.testing.assert_allclose(values, plain(torch.tensor(row)).detach(), rtol=1e-5)
            assert critic.train(**batch).result(120).losses == pytest.approx(losses, rel=1e-5)
        launch.rank(1).send_signal(signal.SIGTERM)
        assert exit_code(launch) == 0, launch.output()
        for rank in (0, 1):
            (held,) = re.findall(rf"RANK {rank} HOLDS (\[.*\])", launch.output())
            np.testing.assert_allclose(json.loads(held), weights["head.weight"].flatten(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_stops_all_ranks_after_accepted_requests_are_answered(number: int, tmp_path: Path) -> None:
    slow, answers = tmp_path / "slow", []
    with serving("rank_functions:length", "--no-grpc", SLOW_FILE=str(slow)) as (launch, url):

        def ask() -> None:
            answers.append(score(url, "reward_model", ONCE, texts=[rank_functions.SLOW, "b"]).rewards.tolist())

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(slow.exists)
        ranks = [launch.rank(0), launch.rank(1)]
        launch.torchrun.send_signal(number)
        asking.join(120)
        assert answers == [[6.0, 1.0]]
        assert exit_code(launch) == 1  # torchrun's own, whatever its processes return
        assert not any(rank.is_running() for rank in ranks) and is_free(url)
        assert "lost" not in launch.output() and "CRITICAL" not in launch.output()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_restarts_a_lost_rank_is_the_end(rank: int, number: int) -> None:
    with serving("rank_functions:length", "--no-grpc", "--rank-timeout-s", 3) as (launch, url):
        launch.rank(rank).send_signal(number)
        assert exit_code(launch) == 1
        assert re.search(r"exitcode *: 70 ", launch.output()), launch.output()
        launch.wait_ended()
        assert is_free(url)


@pytest.mark.slow
def test_a_port_that_is_taken_and_settings_that_do_not_fit_are_told_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launched("guerdon", 2, "serve", "rank_functions:length", "--port", port, "--no-grpc")
    assert done.output.count(f"guerdon: cannot listen for HTTP on 127.0.0.1:{port}") == 1, done.output
    for arguments, told in (
        (
            ("serve", "rank_functions:length", "--tensor-parallel", 3),
            "2 processes cannot be parts of 3 tensor-parallel",
        ),
        (("serve", "rank_functions:length", "--fsdp"), "fsdp is on, but there is no critic"),
        (("score", "--model", "rank_functions:length", "in.jsonl", "-o", "out.jsonl"), "guerdon score is one process"),
    ):
        done = launched("guerdon", 2, *arguments)
        assert done.output.count(told) == 1 and "exitcode  : 2 " in done.output, done.output
