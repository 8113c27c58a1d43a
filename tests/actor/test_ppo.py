"""PPO from end to end: a tiny policy, and a real server with a critic and a reward model."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import zoo
from actor.rollouts import serving
from actor.runs import metrics_of, parts, tiny_policy, weights_of
from guerdon import CriticClient
from guerdon.actor import ppo
from guerdon.errors import ConfigError
from guerdon.settings.actors import (
    CriticServer,
    PPOConfig,
    PPORunConfig,
    RemoteCriticConfig,
    RewardServer,
    resolve_schedule,
)
from guerdon.settings.config import CriticConfig, ModelConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_policy(tmp_path_factory.mktemp("policy"))
    zoo.tokenizer(zoo.checkpoint("llama", folder / "critic", seed=1))
    return folder


@contextmanager
def critic_of(folder: Path, kept: Path | None, **settings: Any) -> Iterator[str]:
    """A server of the critic, and of the reward model `even` beside it under its own name."""
    critic = CriticConfig(
        model=str(folder / "critic"),
        checkpoint_dir=None if kept is None else str(kept),
        learning_rate=3e-3,
        deterministic=True,
        **{"loss_clip_val": 0.0, **settings},
    )
    with serving(ModelConfig(model="actor.reward_functions:even", name="even"), critic=critic) as server:
        yield server.http_url


def config_of(
    folder: Path, url: str, out: Path, *, algorithm: dict[str, Any] | None = None, **more: Any
) -> PPORunConfig:
    return PPORunConfig(
        **parts(folder, out, **more),
        ppo=PPOConfig(**(algorithm or {})),
        remote_critic_rm=RemoteCriticConfig(
            reward_model=RewardServer(name="even", urls=[url]),
            timeout_s=60.0,
            critic=CriticServer(url=url),
            combine_rm_and_critic_server=False,
        ),
    )


@pytest.mark.slow
def test_the_reward_rises_and_the_critic_learns(folder: Path, tmp_path: Path) -> None:
    with critic_of(folder, tmp_path / "critic") as url:
        algorithm = {"epochs": 2, "global_batch_size": 8, "kl_coefficient": 0.001}
        sampling = {"prompts_per_step": 8}
        made = config_of(folder, url, tmp_path / "out", steps=40, algorithm=algorithm, rollouts=sampling)
        summary = ppo.train(made)
        with CriticClient(url) as critic:
            assert critic.state().step == 40
    assert (summary.step, summary.stopped) == (40, None)
    rows = metrics_of(tmp_path / "out")
    rewards = np.array([row["reward"] for row in rows])
    losses = np.array([row["critic_loss"] for row in rows])
    assert rewards[-8:].mean() > rewards[:8].mean() + 0.1
    assert losses[-8:].mean() < 0.5 * losses[0]
    assert {"value_mean", "return_mean", "critic_explained_variance", "seconds_critic_wait", "ratio"} <= rows[0].keys()
    assert rows[-1]["optimizer_steps"] == 320


@pytest.mark.slow
def test_a_pair_resumes_bitwise(folder: Path, tmp_path: Path) -> None:
    policies, critics = [], []
    for name, lengths in (("whole", [4]), ("parts", [2, 4])):
        kept = tmp_path / f"{name}-critic"
        for steps in lengths:
            with critic_of(folder, kept) as url:
                ppo.train(config_of(folder, url, tmp_path / name, steps=steps))
                with CriticClient(url) as critic:
                    saved = critic.state().checkpoints[-1]
        assert saved.step == 4
        policies.append(weights_of(tmp_path / name, 4))
        critics.append(load_file(kept / saved.name / "model.safetensors"))
    for whole, resumed in (policies, critics):
        for name, weight in whole.items():
            assert torch.equal(weight, resumed[name]), name


@pytest.mark.slow
def test_the_warm_up_trains_the_critic_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with critic_of(folder, tmp_path / "critic") as url:
        config = config_of(folder, url, out, steps=3, algorithm={"critic_warmup_steps": 2})
        config.run.save_every = 2
        ppo.train(config)
        with CriticClient(url) as critic:
            assert critic.state().step == 3
    assert [("loss" in row, row["optimizer_steps"]) for row in metrics_of(out)] == [(False, 0), (False, 0), (True, 1)]
    begun, warm, after = load_file(folder / "policy" / "model.safetensors"), weights_of(out, 2), weights_of(out, 3)
    for name, weight in warm.items():
        assert torch.equal(weight, begun[name]), name
    assert any(not torch.equal(weight, after[name]) for name, weight in warm.items())
    assert resolve_schedule(config).total_steps == 1 and config.policy.total_steps is None


@pytest.mark.slow
def test_one_rollout_a_prompt_and_several_updates_of_the_critic(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    recipe = {"lam_alpha": 0.5, "lam_critic": 1.0, "critic_updates": 3, "trust_region": [0.2, 4.0]}
    with critic_of(folder, tmp_path / "critic", global_batch_size=4) as url:
        sampling = {"prompts_per_step": 8, "rollouts_per_prompt": 1}
        ppo.train(config_of(folder, url, out, steps=2, algorithm=recipe, rollouts=sampling))
        with CriticClient(url) as critic:
            assert critic.state().step == 2 * 3 * 2
    for row in metrics_of(out):
        assert row["outside_trust_region"] == 0 and row["grad_norm"] > 0  # the engine that samples is the trainer's


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trust_region": [4.0, 0.2]}, r"ppo.trust_region is \[4.0, 0.2\]"),
        ({"trust_region": [0.2]}, r"ppo.trust_region is \[0.2\]"),
        ({"lam": 0.9, "lam_alpha": 0.05, "lam_critic": 1.0}, "ppo.lam is 0.9, but has no effect"),
        ({"lam_alpha": 0.0}, "ppo.lam_alpha is 0; give a number above 0"),
        ({"critic_updates": 101}, "ppo.critic_updates is 101; give at most 100"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    folder: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        ppo.train(config_of(folder, "http://127.0.0.1:1", tmp_path / "out", steps=2, algorithm=settings))
    assert re.match(message, f"{raised.value}; {raised.value.help}")


def test_the_critic_learns_while_the_policy_does(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    update = ppo.update
    with critic_of(folder, tmp_path / "critic") as url, CriticClient(url) as beside:

        def updating(*args: Any, **more: Any) -> None:
            before, deadline = len(seen), time.monotonic() + 120
            while (step := beside.state().step) <= before and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(step)
            update(*args, **more)

        monkeypatch.setattr(ppo, "update", updating)
        ppo.train(config_of(folder, url, tmp_path / "out", steps=2))
    assert seen == [1, 2]


def test_a_critic_that_keeps_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    with critic_of(folder, None) as url, pytest.raises(ConfigError, match="keeps no checkpoints") as raised:
        ppo.train(config_of(folder, url, tmp_path / "out", steps=2))
    assert "--checkpoint-dir" in raised.value.help
