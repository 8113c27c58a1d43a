"""`guerdon ... --data-parallel 2`: the ranks that a command starts itself, and how they end and come back."""

import contextlib
import dataclasses
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

import guerdon
import rank_functions
import zoo
from actor.rollouts import serving
from actor.runs import metrics_of, parts, tiny_policy, weights_of
from chaos_account import GBS, LEARNING_RATE, Reference, Work
from chaos_account import weights_of as critic_weights_of
from guerdon.actor import ppo, reinforce
from guerdon.client import CriticClient, RetryPolicy
from guerdon.client.critic_calls import make_train_request
from guerdon.critic_core import Gae
from guerdon.settings.actors import (
    CriticServer,
    PPORunConfig,
    ReinforceRunConfig,
    RemoteCriticConfig,
    RemoteRewardConfig,
    RewardServer,
)
from guerdon.settings.config import CriticConfig, ModelConfig
from launched import Launch, started
from ports import free_port
from served import reward_model, samples, texts
from server.helpers import wait_until
from test_ranks_served import is_free, score, wait_until_ready

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@contextlib.contextmanager
def running(*arguments: object, **env: str) -> Iterator[Launch]:
    """The command with these arguments, and all its processes; ended on leaving."""
    command = [sys.executable, "-m", "guerdon", *map(str, arguments)]
    with started(command, env, str(Path(guerdon.__file__).parents[1])) as launch:
        yield launch


@contextlib.contextmanager
def serving_ranks(*arguments: object, command: str = "serve", **env: str) -> Iterator[tuple[Launch, str]]:
    """The command from when it is ready, and its URL."""
    port = free_port()
    with running(command, *arguments, "--port", port, "--no-grpc", "--device", "cpu", **env) as launch:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(launch, url)
        yield launch, url


def words_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        return process.cmdline()
    return []


def rank(launch: Launch, number: int) -> psutil.Process:
    (found,) = [process for process in launch.processes() if process.name() == f"guerdon-rank-{number}"]
    return found


def end(launch: Launch, number: int = signal.SIGTERM, timeout_s: float = 120.0) -> int:
    """Sends the signal to the command alone; returns its status."""
    launch.torchrun.send_signal(number)
    return launch.torchrun.wait(timeout_s)


def assert_ended_well(launch: Launch, status: int = 0) -> None:
    output = launch.output()
    assert launch.torchrun.returncode == status, output
    for word in ("Traceback", "CRITICAL", "Warning", "resource_tracker"):
        assert word not in output, output
    launch.wait_ended()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(tmp_path_factory.mktemp("launched") / "rm")


@pytest.fixture(scope="module")
def wanted(model: Path) -> np.ndarray:
    """The rewards of the samples by one process."""
    with serving(ModelConfig(model=str(model))) as server:
        return score(server.http_url, "reward_model", texts=texts(samples(14))).rewards


def assert_scores(url: str, wanted: np.ndarray) -> None:
    patient = RetryPolicy.patient(200, wait_for_start=True)
    np.testing.assert_allclose(score(url, "reward_model", patient, texts=texts(samples(14))).rewards, wanted, **CLOSE)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_command_serves_loses_a_rank_comes_back_and_ends(model: Path, wanted: np.ndarray) -> None:
    with serving_ranks(model, "--data-parallel", 2) as (launch, url):
        told = "guerdon: 2 ranks: 2 data-parallel x 1 tensor-parallel, on cpu, 1 thread each"
        assert launch.output().startswith(told)
        assert_scores(url, wanted)
        listening = {
            address.laddr.ip
            for process in launch.processes()
            for address in process.net_connections()
            if address.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}, "the ranks' own channels are on loopback as well"

        first = rank(launch, 0).pid
        rank(launch, 1).kill()
        wait_until(lambda: "restarts left: 9" in launch.output())
        assert_scores(url, wanted)
        assert "rank 1 was killed by SIGKILL: all ranks start again, restarts left: 9" in launch.output()
        assert rank(launch, 0).pid != first and "Traceback" not in launch.output()
        launch.torchrun.send_signal(signal.SIGTERM)
        assert launch.torchrun.wait(120) == 0 and "Traceback" not in launch.output(), launch.output()
        launch.wait_ended()
        assert is_free(url)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--tensor-parallel", 2), ("--tensor-parallel", 2, "--data-parallel", 2)])
def test_tensor_parallel_ranks_score_as_one_process(model: Path, wanted: np.ndarray, flags: tuple[object, ...]) -> None:
    with serving_ranks(model, *flags) as (launch, url):
        assert_scores(url, wanted)
        end(launch)
        assert_ended_well(launch)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_critic_sharded_over_two_ranks_learns_as_one_process(tmp_path: Path) -> None:
    folder, work = zoo.checkpoint("llama", tmp_path / "model"), Work(0)
    reference = Reference(folder, work)
    flags = ("--fsdp", "--data-parallel", 2, "--global-batch-size", GBS, "--learning-rate", LEARNING_RATE)
    saved = tmp_path / "critic"
    with (
        serving_ranks(folder, *flags, "--checkpoint-dir", saved, command="serve-critic") as (launch, url),
        CriticClient(url, policy=RetryPolicy.patient(200, wait_for_start=True)) as critic,
    ):
        for number in range(3):
            reports = critic.train(*work.rows(number)).result(120), reference.train(number)
            np.testing.assert_allclose(reports[0].losses, reports[1].losses, rtol=1e-5)
            if number == 1:  # a rank is lost between two steps
                rank(launch, 1).kill()
        tokens, rewards, _, mask = work.rows(3)
        asked: dict[str, Any] = {"tokens": tokens, "mask": mask, "rewards": rewards, "gae": Gae(0.9, 1.0, 0.5)}
        report = critic.train(**asked, updates=2).result(120)
        own = reference.trainer.estimate(make_train_request(**asked, updates=2))
        np.testing.assert_allclose(report.advantages, own.advantages, **CLOSE)
        np.testing.assert_allclose(report.losses, reference.trainer.train(own).losses, rtol=1e-4)
        np.testing.assert_allclose(np.concatenate(critic.infer(tokens=work.probe).values), reference.values(), **CLOSE)
        newest = saved / critic.save().name
        end(launch)
        assert launch.torchrun.returncode == 0 and "Traceback" not in launch.output(), launch.output()
    weights, expected = critic_weights_of(newest), reference.weights(tmp_path / "reference")
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() <= 1e-5 * weight.norm(), name


def written(config: Any, path: Path) -> Path:
    path.write_text(yaml.safe_dump(dataclasses.asdict(config)))
    return path


def assert_same_run(out: Path, out_of_one: Path, step: int) -> None:
    weights, expected = weights_of(out, step), weights_of(out_of_one, step)
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() <= 1e-5 * weight.norm(), name
    assert [row["reward"] for row in metrics_of(out)] == [row["reward"] for row in metrics_of(out_of_one)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_reinforce_on_two_ranks_learns_as_one_process(tmp_path: Path) -> None:
    folder = tiny_policy(tmp_path)
    with serving(ModelConfig(model="actor.reward_functions:even", name="even")) as server:

        def config(out: str) -> ReinforceRunConfig:
            remote = RemoteRewardConfig(RewardServer(name="even", urls=[server.http_url]), timeout_s=30.0)
            return ReinforceRunConfig(**parts(folder, tmp_path / out, steps=3), remote_rm=remote)

        reinforce.train(config("one"))
        with running("reinforce", written(config("two"), tmp_path / "run.yaml"), "--data-parallel", 2) as launch:
            launch.torchrun.wait(120)
            assert_ended_well(launch)
    assert_same_run(tmp_path / "two", tmp_path / "one", 3)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ppo_sharded_over_two_ranks_learns_as_one_process(tmp_path: Path) -> None:
    folder = tiny_policy(tmp_path)
    critic = str(zoo.tokenizer(zoo.checkpoint("llama", folder / "critic", seed=1)))
    for out, flags in (("one", ()), ("two", ("--parallel.fsdp", "--parallel.data-parallel", 2))):
        learner = CriticConfig(model=critic, reward_model=critic, checkpoint_dir=str(tmp_path / f"critic-{out}"))
        with serving(critic=learner) as server:
            remote = RemoteCriticConfig(critic=CriticServer(url=server.http_url), timeout_s=30.0)
            config = PPORunConfig(**parts(folder, tmp_path / out, steps=2), remote_critic_rm=remote)
            if not flags:
                ppo.train(config)
                continue
            with running("ppo", written(config, tmp_path / "run.yaml"), *flags) as launch:
                launch.torchrun.wait(120)
                assert_ended_well(launch)
    assert_same_run(tmp_path / "two", tmp_path / "one", 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_drain_however_often_and_to_whom_they_are_sent(number: int, tmp_path: Path) -> None:
    slow, answers = tmp_path / "slow", []
    with serving_ranks("rank_functions:length", "--data-parallel", 2, SLOW_FILE=str(slow)) as (launch, url):

        def ask() -> None:
            scores = score(url, "reward_model", RetryPolicy(tries=1), texts=[rank_functions.SLOW, "b"])
            answers.append(scores.rewards.tolist())

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(slow.exists)
        while launch.torchrun.poll() is None:  # to all, as terminals, systemd and Slurm do
            for process in launch.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            time.sleep(0.05)
        asking.join(120)
        assert answers == [[6.0, 1.0]]
        assert_ended_well(launch)
        assert is_free(url)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["before the ranks", "while they load"])
def test_signals_while_the_ranks_start(number: int, when: str, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    words = ("serve", "rank_functions:length", "--data-parallel", 2, "--port", 0, "--no-grpc", "--device", "cpu")
    with running(*words, SLOW_IMPORT="3", SLOW_FILE=str(slow)) as launch:
        if when == "while they load":
            wait_until(slow.exists)
        else:
            wait_until(lambda: any("forkserver" in " ".join(words_of(p)) for p in launch.processes()))
        end(launch, number)
        assert_ended_well(launch)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the command", "the fork server"])
def test_no_rank_outlives_what_started_it(killed: str) -> None:
    with serving_ranks("rank_functions:length", "--data-parallel", 2) as (launch, url):
        if killed == "the command":
            launch.torchrun.kill()
        else:
            rank(launch, 0).parent().kill()
            assert launch.torchrun.wait(120) == 70 and "the process that forks the ranks was killed" in launch.output()
        launch.wait_ended()
        assert is_free(url) and "Traceback" not in launch.output(), launch.output()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_without_restarts_a_lost_rank_is_the_end(number: int) -> None:
    with serving_ranks("rank_functions:length", "--data-parallel", 2, "--max-restarts", 0) as (launch, url):
        rank(launch, number).kill()
        assert launch.torchrun.wait(120) == 70
        told = f"rank {number} was killed by SIGKILL, and no restart is left of 0 (max_restarts)"
        assert launch.output().count(told) == 1 and "Traceback" not in launch.output(), launch.output()
        launch.wait_ended()
        assert is_free(url)


@pytest.mark.slow
def test_what_is_wrong_is_told_once() -> None:
    plain = ("serve", "rank_functions:length", "--data-parallel", 2, "--no-grpc", "--device", "cpu")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_told([*plain, "--port", port], f"guerdon: cannot listen for HTTP on 127.0.0.1:{port}", 1)
    function = ["serve", "rank_functions:no_such", *plain[2:], "--port", 0]
    assert_told(function, "guerdon: cannot import rank_functions:no_such", 3)
    assert_told([*plain, "--port", 0], "guerdon: rank 1 on .*: cannot import rank_functions:leng", 3, FAILING_RANK="1")
    assert_told([*plain, "--fsdp"], "guerdon: fsdp is on, but there is no critic", 1)
    critic = ("serve-critic", ".", "--fsdp", "--device", "cpu")
    assert_told([*critic], "guerdon: fsdp is on, and there are no GPUs to share\nhelp: .*--data-parallel 2", 1)
    assert_told([*plain[:-1], "cuda:1"], "guerdon: device is cuda:1, and every rank has its own", 1)


def assert_told(arguments: list[object], told: str, num_lines: int, **env: str) -> None:
    """The command ends with 2 and prints this, once, and that many lines that begin with `guerdon: `."""
    with running(*arguments, **env) as launch:
        assert launch.torchrun.wait(120) == 2, launch.output()
        output = launch.output()
        assert len(re.findall(told, output)) == 1 and output.count("guerdon: ") == num_lines, output
        assert "Traceback" not in output and "restart" not in output, output
