"""A critic's server, killed with SIGKILL wherever it hurts: no train request is lost, and none is applied twice."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import killed_critic
import zoo
from guerdon import CriticClient, RetryPolicy, TrainReport, assembly
from guerdon.client.critic_calls import make_train_request
from guerdon.settings.config import CriticConfig, ServerConfig
from killing import Kill, Restarted, forkserver, free_port

NUM_REQUESTS = 20
GBS = 4
TIMEOUT_S = 100.0
KILLS_AT_RANDOM = 3
SECONDS_OF_A_RUN = 0.25
"""What the requests take about, undisturbed."""


@dataclass
class Outcome:
    """How a run ended: what each train request was answered, and answered when it was sent once more at the end.

    `step` is the critic's, `files` are the bytes of its last checkpoint.
    """

    reports: list[TrainReport]
    reports_again: list[TrainReport]
    step: int
    files: dict[str, bytes]
    num_kills: int


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    with forkserver():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.checkpoint("llama", tmp_path_factory.mktemp("killed") / "model")


def requests() -> list[tuple[np.ndarray, ...]]:
    """Tokens, returns, previous values and masks, of one to three global batches each."""
    random_numbers = np.random.default_rng(0)
    made = []
    for _ in range(NUM_REQUESTS):
        num_rows, width = int(random_numbers.integers(2, 10)), int(random_numbers.integers(6, 20))
        tokens = random_numbers.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, (num_rows, width))
        tokens[:, : width // 2] = tokens[0, : width // 2]
        returns, values = random_numbers.normal(size=(2, num_rows, width - 1)).astype(np.float32)
        mask = (np.arange(width - 1) >= width // 2 - 1).astype(np.float32)[None].repeat(num_rows, 0)
        made.append((tokens, returns, values, mask))
    return made


NUM_STEPS = [-(-len(tokens) // GBS) for tokens, *_ in requests()]


def train_through(kills: list[Kill], model: Path, folder: Path) -> Outcome:
    """All requests, in order, through a server that dies at `kills`."""
    port = free_port()
    critic = CriticConfig(
        model=str(model), checkpoint_dir=str(folder), global_batch_size=GBS, learning_rate=1e-2, save_every=6
    )
    config = ServerConfig(port=port, grpc_port=None, log_level="error", critic=critic)
    policy = RetryPolicy(timeout_s=TIMEOUT_S, tries=10_000, backoff_s=0.05, max_backoff_s=0.1)
    with (
        Restarted(killed_critic.serve, (config,), kills, port) as server,
        CriticClient(f"http://127.0.0.1:{port}", policy=policy) as client,
    ):
        client.wait_ready(timeout_s=TIMEOUT_S)
        futures = [client.train(*request) for request in requests()]
        reports = [future.result(TIMEOUT_S) for future in futures]
        again = [client.train(*request, train_id=r.id) for request, r in zip(requests(), reports, strict=True)]
        reports_again = [future.result(TIMEOUT_S) for future in again]
        state = client.state()
        saved = folder / client.save().name
    files = {p.name: p.read_bytes() for p in sorted(saved.glob("*.safetensors"))}
    return Outcome(reports, reports_again, state.step, files, server.num_kills)


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train_through([], model, tmp_path_factory.mktemp("undisturbed") / "critic")


def assert_same(outcome: Outcome, want: Outcome) -> None:
    """Bitwise the same weights and optimiser, the same answers, and every step made once."""
    assert outcome.step == sum(NUM_STEPS)
    assert [report.step for report in outcome.reports] == np.cumsum(NUM_STEPS).tolist()
    assert [report.loss for report in outcome.reports] == [report.loss for report in want.reports]
    assert outcome.reports_again == outcome.reports
    assert outcome.files.keys() == want.files.keys() and "model.safetensors" in want.files
    for name, data in want.files.items():
        assert outcome.files[name] == data, name


def plan(seed: int) -> list[Kill]:
    """A kill at a point that is met, then more of them, and some at random times, in random order.

    Every point is the first of one of eight seeds.
    """
    numbers = random.Random(seed)
    points = list(killed_critic.POINTS)
    first = (points[seed % len(points)], numbers.randint(1, 2))
    more: list[Kill] = [(numbers.choice(points), numbers.randint(1, 4)) for _ in range(2)]
    more += [numbers.uniform(0.0, SECONDS_OF_A_RUN) for _ in range(KILLS_AT_RANDOM)]
    numbers.shuffle(more)
    return [first, *more]


def test_an_undisturbed_run_is_what_the_trainer_gives_by_itself(
    undisturbed: Outcome, model: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)  # as the servers have
    trainer = assembly.build_trainer(CriticConfig(model=str(model), global_batch_size=GBS, learning_rate=1e-2))
    reports = [trainer.train(make_train_request(*asked)) for asked in requests()]
    trainer.save(tmp_path)
    files = {p.name: p.read_bytes() for p in sorted(tmp_path.glob("*.safetensors"))}
    assert undisturbed.num_kills == 0
    del files["rng.safetensors"]  # which this process has used for other things
    learnt = dataclasses.replace(undisturbed, files={name: undisturbed.files[name] for name in files})
    assert_same(learnt, Outcome(reports, reports, trainer.state()["step"], files, 0))


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_ends_as_an_undisturbed_one(seed: int, undisturbed: Outcome, model: Path, tmp_path: Path) -> None:
    outcome = train_through(plan(seed), model, tmp_path / "critic")
    assert outcome.num_kills
    assert_same(outcome, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3, 53))
def test_fifty_more_killed_runs(seed: int, undisturbed: Outcome, model: Path, tmp_path: Path) -> None:
    outcome = train_through(plan(seed), model, tmp_path / "critic")
    assert outcome.num_kills
    assert_same(outcome, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("point", killed_critic.POINTS)
def test_a_kill_at_each_point_in_turn(point: str, undisturbed: Outcome, model: Path, tmp_path: Path) -> None:
    outcome = train_through([(point, 1), (point, 2)], model, tmp_path / "critic")
    assert outcome.num_kills == 2
    assert_same(outcome, undisturbed)
