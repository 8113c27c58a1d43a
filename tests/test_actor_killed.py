"""An actor and its servers, killed with SIGKILL wherever it hurts: the run ends bitwise as an undisturbed one."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import killed_actor
import killed_critic
import zoo
from actor.runs import metrics_of, parts, tiny_policy
from guerdon import CriticClient
from guerdon.settings.actors import (
    ActorConfig,
    CriticServer,
    DistillConfig,
    DistillRunConfig,
    PPOConfig,
    PPORunConfig,
    ReinforceConfig,
    ReinforceRunConfig,
    RemoteCriticConfig,
    RemoteRewardConfig,
    RewardServer,
    TeacherServer,
)
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig, TeacherConfig
from killing import Kill, Restarted, forkserver
from ports import free_port

pytestmark = pytest.mark.timeout(300)

STEPS = 7
TIMEOUT_S = 250.0
SECONDS_OF_A_RUN = 3.0
"""What a run takes about, undisturbed."""


@dataclass
class Outcome:
    """How a run ended: the files of its last checkpoint and of the critic's, and what was logged but for times."""

    files: dict[str, bytes]
    metrics: list[dict[str, float]]
    num_kills: int = 0


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    with forkserver():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_policy(tmp_path_factory.mktemp("killed"))
    zoo.tokenizer(zoo.checkpoint("llama", folder / "reward", seed=1))
    zoo.tokenizer(zoo.language_model("llama", folder / "teacher", seed=1))
    return folder


def settings_of(folder: Path, out: Path) -> dict[str, Any]:
    settings = parts(folder, out, steps=STEPS, rollouts={"max_new_tokens": 6})
    settings["run"].save_every = 3
    settings["run"].validate_every = 2
    settings["run"].num_samples = 2
    return settings


def outcome_of(out: Path, *more: Path) -> Outcome:
    folders = [out / f"checkpoints/step-{STEPS:06d}/policy", *more]
    files = {f"{path.parent.name}/{path.name}": path.read_bytes() for f in folders for path in f.glob("*.safetensors")}
    assert len(files) >= 3 * len(folders)
    timeless = [
        {name: value for name, value in row.items() if "second" not in name and name != "time"}
        for row in metrics_of(out)
    ]
    return Outcome(files, timeless)


def reinforced(
    folder: Path, out: Path, actor_kills: Sequence[Kill] = (), server_kills: Sequence[Kill] = (), **algorithm: Any
) -> Outcome:
    """A run of REINFORCE whose actor and whose server die at these points."""
    port = free_port()
    model = ModelConfig(model=str(folder / "reward"), deterministic=True)
    server_config = ServerConfig(port=port, grpc_port=None, log_level="error", models=[model])
    config = ReinforceRunConfig(
        **settings_of(folder, out),
        # The running mean is a memory, and two epochs of two batches are four optimiser steps.
        reinforce=ReinforceConfig(**{"advantage_estimator": "mean", "epochs": 2, "global_batch_size": 8, **algorithm}),
        remote_rm=RemoteRewardConfig(RewardServer(port=port), timeout_s=TIMEOUT_S),
    )
    return outcome_with_kills(config, server_config, out, actor_kills, server_kills)


def distilled(folder: Path, out: Path, actor_kills: Sequence[Kill] = (), server_kills: Sequence[Kill] = ()) -> Outcome:
    """A run of distillation whose actor and whose teacher's server die at these points."""
    port = free_port()
    model = TeacherConfig(model=str(folder / "teacher"), deterministic=True)
    server_config = ServerConfig(port=port, grpc_port=None, log_level="error", models=[model])
    config = DistillRunConfig(
        **settings_of(folder, out),
        distill=DistillConfig(epochs=2, global_batch_size=8),
        teacher=TeacherServer(f"http://127.0.0.1:{port}", timeout_s=TIMEOUT_S),
    )
    return outcome_with_kills(config, server_config, out, actor_kills, server_kills)


def outcome_with_kills(
    config: ActorConfig,
    server_config: ServerConfig,
    out: Path,
    actor_kills: Sequence[Kill],
    server_kills: Sequence[Kill],
) -> Outcome:
    """The outcome of a run whose only server has these settings."""
    with (
        Restarted(killed_actor.serve, (server_config,), server_kills, server_config.port) as server,
        Restarted(killed_actor.train, (config,), actor_kills) as actor,
    ):
        assert actor.wait(TIMEOUT_S) == 0
    outcome = outcome_of(out)
    outcome.num_kills = actor.num_kills + server.num_kills
    return outcome


def optimised(folder: Path, out: Path, actor_kills: Sequence[Kill] = (), server_kills: Sequence[Kill] = ()) -> Outcome:
    """A run of PPO whose actor and whose critic's server die at these points."""
    port = free_port()
    critic = CriticConfig(
        model=str(folder / "reward"), reward_model=str(folder / "reward"), checkpoint_dir=str(out / "critic"),
        learning_rate=1e-3, global_batch_size=8, deterministic=True,
    )  # fmt: skip
    server_config = ServerConfig(port=port, grpc_port=None, log_level="error", critic=critic)
    config = PPORunConfig(
        **settings_of(folder, out),
        ppo=PPOConfig(epochs=2, global_batch_size=8, critic_warmup_steps=1),
        remote_critic_rm=RemoteCriticConfig(critic=CriticServer(port=port), timeout_s=TIMEOUT_S),
    )
    with (
        Restarted(killed_critic.serve, (server_config,), server_kills, port) as server,
        Restarted(killed_actor.train, (config,), actor_kills) as actor,
    ):
        assert actor.wait(TIMEOUT_S) == 0
        with CriticClient(f"http://127.0.0.1:{port}") as client:
            client.wait_ready(TIMEOUT_S)  # it may have been killed once more after the run's last call
            state = client.state()
    assert state.step == STEPS * 2
    last = state.checkpoints[-1]
    assert last.metrics["actor_step"] == STEPS
    outcome = outcome_of(out, out / "critic" / last.name)
    outcome.num_kills = actor.num_kills + server.num_kills
    return outcome


def assert_same(outcome: Outcome, want: Outcome) -> None:
    """Bitwise the same weights, optimisers and random numbers, and the same metrics, each step's once."""
    assert [row["step"] for row in outcome.metrics] == list(range(1, STEPS + 1))
    assert outcome.metrics == want.metrics
    assert [Path(name).name for name in sorted(outcome.files)] == [Path(name).name for name in sorted(want.files)]
    for (name, data), (_, expected) in zip(sorted(outcome.files.items()), sorted(want.files.items()), strict=True):
        assert data == expected, name


def comes_after_a_kill(point: str) -> bool:
    """Whether only a resumed run, or one that loads the critic's checkpoint, comes to the point."""
    return "resume" in point or "load" in point


def plan(seed: int, points: Sequence[str]) -> list[Kill]:
    """Kills at points, first at one that every run comes to, and some at random times, in random order."""
    numbers = random.Random(seed)
    kills: list[Kill] = [(points[(seed + i) % len(points)], numbers.randint(1, 3)) for i in (0, 3)]
    kills += [numbers.uniform(0.0, SECONDS_OF_A_RUN) for _ in range(2)]
    numbers.shuffle(kills)
    # A time may lie behind the end of a run, after which there is nothing to kill.
    met = [kill for kill in kills if isinstance(kill, tuple) and not comes_after_a_kill(kill[0])]
    first = met[0] if met else ("amid the rollouts", 40)
    return [first, *(kill for kill in kills if kill is not first)]


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Outcome]:
    """What each kind of run comes to if nobody kills it."""
    return functools.cache(lambda run: run(folder, tmp_path_factory.mktemp("undisturbed")))


KILLS: list[Kill] = [("amid a save", 1), ("between two optimiser steps", 9)]
KILLS_OF_A_PAIR: list[Kill] = [
    ("when the critic's training is asked for", 2),
    ("between the critic's save and the actor's", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "kills", "server_kills"),
    [
        (reinforced, KILLS, [0.3]),
        (distilled, KILLS, [0.3]),
        (optimised, KILLS_OF_A_PAIR, [("between two steps of a request", 5)]),
    ],
)
def test_a_killed_run_ends_as_an_undisturbed_one(
    run: Run, kills: list[Kill], server_kills: list[Kill], folder: Path, undisturbed: Any, tmp_path: Path
) -> None:
    outcome = run(folder, tmp_path, kills, server_kills)
    assert outcome.num_kills == 3
    assert_same(outcome, undisturbed(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "point"),
    [
        *((run, point) for run in (reinforced, distilled) for point in killed_actor.POINTS),
        *((optimised, point) for point in killed_actor.POINTS_WITH_CRITIC),
    ],
)
def test_a_kill_of_the_actor_at_each_point(
    run: Run, point: str, folder: Path, undisturbed: Any, tmp_path: Path
) -> None:
    again = comes_after_a_kill(point)
    first: list[Kill] = [("amid the rollouts", 40)] if again else []
    outcome = run(folder, tmp_path, [*first, (point, 1), (point, 1 if again else 2)])
    assert outcome.num_kills == len(first) + 2
    assert_same(outcome, undisturbed(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "seed"), [*((distilled, seed) for seed in range(4)), *((reinforced, seed) for seed in range(8))]
)
def test_random_kills_of_actor_and_server(run: Run, seed: int, folder: Path, undisturbed: Any, tmp_path: Path) -> None:
    times = random.Random(seed + 100)
    server_kills = [times.uniform(0.0, SECONDS_OF_A_RUN) for _ in range(3)]
    outcome = run(folder, tmp_path, plan(seed, list(killed_actor.POINTS)), server_kills)
    assert outcome.num_kills
    assert_same(outcome, undisturbed(run))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_kills_of_actor_and_critic(seed: int, folder: Path, undisturbed: Any, tmp_path: Path) -> None:
    kills = plan(seed, list(killed_actor.POINTS_WITH_CRITIC))
    outcome = optimised(folder, tmp_path, kills, plan(seed + 50, list(killed_critic.POINTS)))
    assert outcome.num_kills
    assert_same(outcome, undisturbed(optimised))
