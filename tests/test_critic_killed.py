"""A critic's server, killed with SIGKILL wherever it hurts: no train request is lost, and none is applied twice."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load

import killed_critic
import zoo
from guerdon import CriticClient, Gae, RetryPolicy, TrainReport, assembly
from guerdon.client.critic_calls import make_train_request
from guerdon.settings.config import CriticConfig, ServerConfig
from killing import Kill, Restarted, forkserver
from ports import free_port

NUM_REQUESTS = 20
GBS = 4
LEARNING: dict[str, Any] = {"global_batch_size": GBS, "learning_rate": 1e-2, "frozen": r".*\.self_attn\..*"}
TIMEOUT_S = 250.0
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


def requests(count: int = NUM_REQUESTS) -> list[dict[str, Any]]:
    """The arguments of train requests of one to three global batches each.

    Every third one makes several passes, and every third one has rewards, per token or per row, in place of returns.
    Every third of the others is a tree of segments, which is one global batch.
    """
    random_numbers = np.random.default_rng(0)
    made = []
    for i in range(count):
        num_rows, width = int(random_numbers.integers(2, 10)), int(random_numbers.integers(6, 20))
        tokens = random_numbers.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, (num_rows, width))
        tokens[:, : width // 2] = tokens[0, : width // 2]
        returns, values = random_numbers.normal(size=(2, num_rows, width - 1)).astype(np.float32)
        mask = (np.arange(width - 1) >= width // 2 - 1).astype(np.float32)[None].repeat(num_rows, 0)
        asked: dict[str, Any] = {"tokens": tokens, "mask": mask, "updates": 2 + i % 2 if i % 3 == 1 else 1}
        if i % 3 == 2:
            mask[:, width // 2 + 1] = 0  # as a tool's output
            asked |= {"rewards": returns if i % 2 else returns[:, 0], "gae": RULES[i % len(RULES)]}
        else:
            asked |= {"returns": returns, "prev_values": values}
        if i % 9 == 0:
            asked |= {name: np.pad(asked[name], ((0, 0), (1, 0))) for name in ("returns", "prev_values", "mask")}
            asked["parents"] = [-1, *(int(random_numbers.integers(row)) for row in range(1, num_rows))]
        made.append(asked)
    return made


RULES = (Gae(0.9, 1.0, lam_alpha=0.5), Gae(1.0, 0.95, 0.5), Gae())


def num_steps(asked: dict[str, Any]) -> int:
    num_batches = 1 if "parents" in asked else -(-len(asked["tokens"]) // GBS)
    return num_batches * int(asked["updates"])


def train_through(kills: list[Kill], model: Path, folder: Path, count: int = NUM_REQUESTS) -> Outcome:
    """The first `count` requests, in order, through a server that dies at `kills`; attention is frozen."""
    port = free_port()
    critic = CriticConfig(model=str(model), checkpoint_dir=str(folder), save_every=6, **LEARNING)
    config = ServerConfig(port=port, grpc_port=None, log_level="error", critic=critic)
    policy = RetryPolicy(timeout_s=TIMEOUT_S, tries=10_000, backoff_s=0.05, max_backoff_s=0.1)
    with (
        Restarted(killed_critic.serve, (config,), kills, port) as server,
        CriticClient(f"http://127.0.0.1:{port}", policy=policy) as client,
    ):
        client.wait_ready(timeout_s=TIMEOUT_S)
        futures = [client.train(**asked, train_id=f"{i}") for i, asked in enumerate(requests(count))]
        reports = [future.result(TIMEOUT_S) for future in futures]
        again = [client.train(**asked, train_id=r.id) for asked, r in zip(requests(count), reports, strict=True)]
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
    steps = np.cumsum([num_steps(asked) for asked in requests(len(outcome.reports))]).tolist()
    assert outcome.step == steps[-1]
    assert [report.step for report in outcome.reports] == steps
    assert [report.loss for report in outcome.reports] == [report.loss for report in want.reports]
    assert outcome.reports_again == outcome.reports
    for reports in (outcome.reports, outcome.reports_again):
        for report, wanted in zip(reports, want.reports, strict=True):
            np.testing.assert_array_equal(report.advantages, wanted.advantages)
            np.testing.assert_array_equal(report.returns, wanted.returns)
    assert sum(report.advantages is not None for report in outcome.reports) == len(outcome.reports) // 3
    assert outcome.files.keys() == want.files.keys() and "model.safetensors" in want.files
    for name, data in want.files.items():
        assert outcome.files[name] == data, name


def plan(seed: int) -> list[Kill]:
    """A kill at a point that is met, then more of them, and some at random times, in random order.

    Every point is the first of one of nine seeds.
    """
    numbers = random.Random(seed)
    points = list(killed_critic.POINTS)
    first = (points[seed % len(points)], numbers.randint(1, 2))
    more: list[Kill] = [(numbers.choice(points), numbers.randint(1, 4)) for _ in range(2)]
    more += [numbers.uniform(0.0, SECONDS_OF_A_RUN) for _ in range(KILLS_AT_RANDOM)]
    numbers.shuffle(more)
    return [first, *more]


@pytest.mark.slow
def test_an_undisturbed_run_is_what_the_trainer_gives_by_itself(
    undisturbed: Outcome, model: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)  # as the servers have
    trainer = assembly.build_trainer(CriticConfig(model=str(model), **LEARNING))
    reports = []
    for asked in requests():
        told = make_train_request(**asked)
        told = told if told.rewards is None else trainer.estimate(told)
        returns = None if told.rewards is None else told.returns
        told.id = f"{len(reports)}"
        reports.append(dataclasses.replace(trainer.train(told), advantages=told.advantages, returns=returns))
    trainer.save(tmp_path)
    files = {p.name: p.read_bytes() for p in sorted(tmp_path.glob("*.safetensors"))}
    assert undisturbed.num_kills == 0
    del files["rng.safetensors"]  # which this process has used for other things; and the store keeps answers itself
    learnt = dataclasses.replace(undisturbed, files={name: undisturbed.files[name] for name in files})
    assert_same(learnt, Outcome(reports, reports, trainer.state()["step"], files, 0))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [-1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(53))])
def test_a_killed_run_ends_as_an_undisturbed_one(seed: int, undisturbed: Outcome, model: Path, tmp_path: Path) -> None:
    kills = [("between the journal and training", 2), SECONDS_OF_A_RUN / 2] if seed < 0 else plan(seed)
    outcome = train_through(kills, model, tmp_path / "critic")
    assert outcome.num_kills
    assert_same(outcome, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_requests_survive_twenty_kills_at_random(model: Path, tmp_path: Path) -> None:
    undisturbed = train_through([], model, tmp_path / "undisturbed", count=200)
    numbers = random.Random(0)
    # A life at a point ends after nine requests at most, so that the requests suffice for all of them.
    most = {"between the estimate and the journal": 3, "between the journal and training": 9, "before the journal": 9}
    points = [(numbers.choice([*killed_critic.POINTS]), numbers.random()) for _ in range(10)]
    kills: list[Kill] = [(point, 1 + int(most.get(point, 1) * share)) for point, share in points]
    kills += [numbers.uniform(0.0, 0.2) for _ in range(10)]
    numbers.shuffle(kills)
    outcome = train_through(kills, model, tmp_path / "critic", count=200)
    assert outcome.num_kills == 20
    assert_same(outcome, undisturbed)
    weights = load(outcome.files["model.safetensors"])
    begun = load((model / "model.safetensors").read_bytes())
    for name, weight in weights.items():
        assert np.array_equal(weight, begun[name]) == (".self_attn." in name), name


@pytest.mark.slow
@pytest.mark.parametrize("point", killed_critic.POINTS)
def test_a_kill_at_each_point_in_turn(point: str, undisturbed: Outcome, model: Path, tmp_path: Path) -> None:
    outcome = train_through([(point, 1), (point, 2)], model, tmp_path / "critic")
    assert outcome.num_kills == 2
    assert_same(outcome, undisturbed)
