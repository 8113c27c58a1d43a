"""A critic's server that is told to stop amid a long train: what it tells is what its next start finds."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import zoo
from guerdon.client import CriticClient, RetryPolicy
from guerdon.critic_core import TrainReport, TrainRequest
from guerdon.errors import RanksLost
from processes import environment
from server.arithmetic_critic import SLOW_TOKEN, after, request
from server.driving import Driver
from server.helpers import wait_until

A, LONG, LATER = request("a", 3.0), request("long", 5.0, first_token=SLOW_TOKEN), request("later", 7.0)

IS_WAITING = re.compile(r'^guerdon_num_requests_waiting\{model="critic_infer"\} 1\.0$', re.MULTILINE)
PROGRAM = """\
from guerdon import assembly
from guerdon.settings.config import CriticConfig, ServerConfig

{parts}
critic = CriticConfig(model={model!r}, checkpoint_dir={folder!r})
config = ServerConfig(port=0, grpc_port=None, shutdown_timeout_s={grace_s}, critic=critic)
assembly.run(config, parts, on_started=lambda http, _: print(http, flush=True))
print("ended", flush=True)
"""
ARITHMETIC = """\
from server.arithmetic_critic import ArithmeticTrainer

def build(config, ranks):
    trainer = ArithmeticTrainer(config)
    trainer.slow_s = {slow_s}
    return trainer

parts = assembly.Parts(trainer=build)
"""
ENDLESS = """\
import torch
from guerdon.training.critic_trainer import CriticTrainer

def train(*_):
    x = torch.ones(100, 100, requires_grad=True)
    while True:
        (x @ x).sum().backward()

CriticTrainer.train = train
parts = assembly.PLAIN
"""


@contextmanager
def served(
    folder: Path, parts: str, *, grace_s: float, model: str = "arithmetic"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server's process, and its URL."""
    program = PROGRAM.format(folder=str(folder), parts=parts, grace_s=grace_s, model=model)
    env = environment()
    env["PYTHONPATH"] += f":{Path(__file__).parents[2]}"
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def train(url: str, asked: TrainRequest) -> TrainReport:
    with CriticClient(url, policy=RetryPolicy(tries=1)) as client:
        rows = (asked.tokens, asked.returns, asked.prev_values, asked.mask)
        return client.train(*rows, train_id=asked.id).result(120)


# That both signals end a server in order, test_runtime.py checks.
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_train_that_is_told_to_be_taken_back_is_not_done(tmp_path: Path, number: int) -> None:
    with (
        served(tmp_path, ARITHMETIC.format(slow_s=600), grace_s=0.5) as (process, url),
        ThreadPoolExecutor(2) as threads,
    ):
        assert train(url, A).step == 1
        told = [threads.submit(train, url, LONG)]
        wait_until((tmp_path / "journal" / "000000000002.safetensors").exists)
        told.append(threads.submit(train, url, LATER))
        wait_until(lambda: IS_WAITING.search(httpx.get(url + "/metrics").text) is not None)
        process.send_signal(number)
        for future in told:
            with pytest.raises(RanksLost, match=r"unfinished after the grace period of 0\.5 s; it was withdrawn"):
                future.result(120)
        assert process.wait(120) == 0
        assert process.stdout is not None and process.stdout.read() == "ended\n"
    assert [path.name for path in (tmp_path / "journal").glob("*.safetensors")] == ["000000000001-done.safetensors"]
    with Driver(tmp_path) as critic:
        assert critic.trainer.trained == ["a"]
        critic.train(LONG)  # as whoever was told so does
        assert critic.trainer.weight == after([A, LONG])


def test_a_train_that_is_done_within_the_grace_is_answered_and_kept(tmp_path: Path) -> None:
    with (
        served(tmp_path, ARITHMETIC.format(slow_s=1.0), grace_s=30.0) as (process, url),
        ThreadPoolExecutor(1) as threads,
    ):
        answer = threads.submit(train, url, LONG)
        wait_until((tmp_path / "journal" / "000000000001.safetensors").exists)
        process.send_signal(signal.SIGTERM)
        assert answer.result(120).step == 1
        assert process.wait(120) == 0
    with Driver(tmp_path) as critic:
        assert critic.trainer.weight == after([LONG])
        assert critic.train(LONG).step == 1


@pytest.mark.slow
def test_the_command_ends_with_0_also_amid_a_train(tmp_path: Path) -> None:
    """Python's own end would end the thread inside torch, and that the process by abort."""
    model = str(zoo.checkpoint("llama", tmp_path / "model"))
    with (
        served(tmp_path / "critic", ENDLESS, grace_s=0.2, model=model) as (process, url),
        ThreadPoolExecutor(1) as threads,
    ):
        told = threads.submit(train, url, A)
        wait_until((tmp_path / "critic" / "journal" / "000000000001.safetensors").exists)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(RanksLost, match="withdrawn"):
            told.result(120)
        assert process.wait(120) == 0
    assert not list((tmp_path / "critic" / "journal").glob("*.safetensors"))
