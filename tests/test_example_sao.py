"""The toy of SAO's recipe: its rewards by hand, what a response trains, and a critic's server that is killed in it."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import killed_critic
from actor.rollouts import serving
from actor.runs import metrics_of, without_curves
from guerdon import CriticClient
from guerdon.actor import ppo
from guerdon.settings.actors import PPORunConfig, check_actor
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig
from guerdon.settings.fields import from_mapping
from guerdon.settings.yaml_files import read_yaml
from killing import Kill, Restarted, forkserver
from ports import free_port
from processes import environment

SAO = Path(__file__).parents[1] / "examples/sao"
STEPS = 12


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the example's modules importable, as its PYTHONPATH does."""
    monkeypatch.syspath_prepend(SAO)
    without_curves(monkeypatch)
    yield
    for name in ("calculator", "models"):
        sys.modules.pop(name, None)


def test_the_rewards_of_the_task() -> None:
    from calculator import calculate, reward

    assert calculate("6*7?", "=") == "42" and calculate("0*9?", "=") == "00"
    responses = {"=4242": 1.0, "=424": 0.4, "=4249": 0.4, "=42421": 0.6, "=4241": 0.4, "=42": 0.2, "": 0.0, "42": 0.8}
    assert reward([f"6*7?{text}" for text in responses]) == pytest.approx(list(responses.values()))
    # A second call pays nothing, and the answer is what stands behind the last one.
    assert reward(["6*7?=42=4242", "6*7?1=4242", "6*7?==4242"]) == pytest.approx([0.8, 0.8, 0.8])


def config_of(folder: Path, out: Path, reward_url: str, critic_url: str, steps: int) -> PPORunConfig:
    config: PPORunConfig = from_mapping(PPORunConfig, read_yaml(SAO / "sao.yaml"))
    config.policy.model = str(folder / "policy")
    config.data.prompts, config.data.validation = str(folder / "prompts.jsonl"), str(folder / "held_out.jsonl")
    config.run.steps, config.run.output_dir, config.run.progress = steps, str(out), False
    config.remote_critic_rm.reward_model.urls, config.remote_critic_rm.critic.url = [reward_url], critic_url
    config.remote_critic_rm.timeout_s = 100.0
    check_actor(config)
    return config


def outcome_of(folder: Path, out: Path, kills: Sequence[Kill]) -> tuple[dict[str, bytes], list[dict[str, float]], int]:
    """The last weights and metrics of a run whose critic's server dies at these points; and how often it did."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    critic = CriticConfig(
        model=str(folder / "critic"), checkpoint_dir=str(out / "kept"),
        learning_rate=2e-3, global_batch_size=128, deterministic=True,
    )  # fmt: skip
    server_config = ServerConfig(port=port, grpc_port=None, log_level="error", critic=critic)
    with (
        serving(ModelConfig(model="calculator:reward")) as rewards,
        Restarted(killed_critic.serve, (server_config,), kills, port) as server,
    ):
        config = config_of(folder, out / "ppo", rewards.http_url, url, STEPS)
        config.rollouts.prompts_per_step = config.ppo.global_batch_size = 16
        config.ppo.critic_warmup_steps, config.run.save_every = 2, 5
        assert ppo.train(config).step == STEPS
        with CriticClient(url) as client:
            client.wait_ready(120.0)
            state = client.state()
    assert state.step == STEPS * config.ppo.critic_updates
    folders = out / f"ppo/checkpoints/step-{STEPS:06d}/policy", out / "kept" / state.checkpoints[-1].name
    files = {f"{at.parent.name}/{path.name}": path.read_bytes() for at in folders for path in at.glob("*.safetensors")}
    timeless = [
        {name: value for name, value in row.items() if "second" not in name and name != "time"}
        for row in metrics_of(out / "ppo")
    ]
    return files, timeless, server.num_kills


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_critics_server_that_is_killed_twice_changes_nothing(tmp_path: Path) -> None:
    from models import make

    make(tmp_path, seed=0)
    kills: list[Kill] = [("between two steps of a request", 5), ("between training and the mark", 3)]
    with forkserver():
        files, metrics, num_kills = outcome_of(tmp_path, tmp_path / "killed", kills)
        want_files, want_metrics, _ = outcome_of(tmp_path, tmp_path / "undisturbed", [])
    assert num_kills == 2
    assert metrics == want_metrics and len(metrics) == STEPS
    assert (
        len(files) >= 4
        and files.values()
        and sorted(f.rpartition("/")[2] for f in files) == sorted(f.rpartition("/")[2] for f in want_files)
    )
    assert sorted(files.values()) == sorted(want_files.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_policy_learns_with_the_servers_critic(tmp_path: Path) -> None:
    command = [sys.executable, SAO / "run.py", "--out", tmp_path, "--seed", "0"]
    environ = environment() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "never trained on" in done.stdout
    rows = metrics_of(tmp_path / "ppo")
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[:5]) < 0.1 and np.mean(rewards[-20:]) > 0.75
    assert all(0 <= row["outside_trust_region"] < 0.1 for row in rows[5:])
    assert all("loss" not in row for row in rows[:5])
