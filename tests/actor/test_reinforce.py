"""REINFORCE from end to end: a tiny policy, a real server, and everything between."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actor.reward_functions import moments
from actor.rollouts import serving
from actor.runs import metrics_of, parts, weights_of
from guerdon.actor import reinforce
from guerdon.actor.rollouts import Rollout
from guerdon.actor.run_checkpoints import RunCheckpoints
from guerdon.actor.training_run import Run
from guerdon.errors import ConfigError, RunFailed
from guerdon.settings.actors import ReinforceConfig, ReinforceRunConfig, RemoteRewardConfig, RewardServer
from guerdon.settings.config import ModelConfig
from server.helpers import wait_until


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    names = ("even", "flaky", "nothing", "noting")
    models = [ModelConfig(model=f"actor.reward_functions:{name}", name=name) for name in names]
    with serving(*models) as server:
        yield server.http_url


def config_of(
    folder: Path, url: str, out: Path, *, reward: str = "even", algorithm: dict[str, Any] | None = None, **more: Any
) -> ReinforceRunConfig:
    return ReinforceRunConfig(
        **parts(folder, out, **more),
        reinforce=ReinforceConfig(**(algorithm or {})),
        remote_rm=RemoteRewardConfig(RewardServer(name=reward, urls=[url]), timeout_s=30.0),
    )


def test_the_reward_rises(folder: Path, url: str, tmp_path: Path) -> None:
    summary = reinforce.train(config_of(folder, url, tmp_path, steps=20, learning_rate=1e-2))
    assert (summary.step, summary.stopped, summary.exit_status) == (20, None, 0)
    rows = metrics_of(tmp_path)
    rewards = np.array([row["reward"] for row in rows])
    assert len(rows) == 20 and rewards[-5:].mean() > rewards[:5].mean() + 0.15
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-3) and rows[-1]["kl"] > 0.1
    assert {"reward_penalised", "entropy", "loss", "grad_norm", "seconds_update", "response_length"} <= rows[0].keys()
    assert "ratio" not in rows[0] and rows[-1]["optimizer_steps"] == 20


def test_groups_are_scored_while_others_are_generated(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated: list[float] = []
    timed = reinforce.timed

    def timing(metrics: dict[str, float], name: str) -> AbstractContextManager[None]:
        generated.append(time.monotonic())
        return timed(metrics, name)

    def generating(run: Run, *asked: Any) -> Iterator[list[Rollout]]:
        for i, group in enumerate(generate(run, *asked)):
            if i == 3:
                wait_until(lambda: len(moments) >= 2)
            yield group

    generate = Run._generate
    monkeypatch.setattr(Run, "_generate", generating)
    monkeypatch.setattr(reinforce, "timed", timing)  # the loop's first block behind the generation
    made = config_of(folder, url, tmp_path, steps=1, reward="noting", rollouts={"max_batch_rollouts": 4})
    made.data.num_validation = 0
    moments.clear()
    reinforce.train(made)
    assert sum(moment < generated[0] for moment in moments) >= 2  # of four groups, generated one behind the other


SEVERAL = {"epochs": 2, "global_batch_size": 6}
"""Six optimiser steps on each step's 16 responses."""


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({"advantage_estimator": "none"}, marks=pytest.mark.slow),
        pytest.param({"advantage_estimator": "mean", **SEVERAL}, marks=pytest.mark.slow),
        {"advantage_estimator": "grpo", "loss_aggregation": "seq-mean-token-mean", "clip_high": 0.28, **SEVERAL},
        pytest.param(
            {"advantage_estimator": "dr_grpo", "loss_aggregation": "dr_grpo", "leave_out_truncated": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"advantage_estimator": "reinforce++", "kl_coefficient": 0.0, "entropy_coefficient": 0.01},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"kl_placement": "loss", "kl_estimator": "k3", "kl_coefficient": 0.1, "importance_cap": 2.0, **SEVERAL},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["none", "mean", "grpo", "dr_grpo", "reinforce++", "kl in loss"],
)
def test_each_algorithm_resumes_bitwise(algorithm: dict[str, Any], folder: Path, url: str, tmp_path: Path) -> None:
    # Of 8 tokens nearly all responses are cut, and where these are left out no step would learn anything.
    rollouts = {"max_new_tokens": 40 if "leave_out_truncated" in algorithm else 8}
    for out, steps in (("whole", 2), ("parts", 1), ("parts", 2)):
        made = config_of(folder, url, tmp_path / out, algorithm=algorithm, steps=steps, rollouts=rollouts)
        assert reinforce.train(made).step == steps
    whole, resumed = (weights_of(tmp_path / out, 2) for out in ("whole", "parts"))
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
    if algorithm.get("advantage_estimator") == "mean":
        newest = RunCheckpoints(tmp_path / "parts" / "checkpoints", 2).newest_whole()
        assert newest is not None and newest.state.memory["running_mean"][1] == 32  # 16 rewards a step
    rows, several = metrics_of(tmp_path / "parts"), "epochs" in algorithm
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["optimizer_steps"] == (12 if several else 2) and ("ratio" in rows[0]) == several
    assert ("reward_penalised" in rows[0]) == (algorithm.get("kl_placement") != "loss")


def test_failed_samples_are_dropped_and_counted(folder: Path, url: str, tmp_path: Path) -> None:
    reinforce.train(config_of(folder, url, tmp_path, steps=4, reward="flaky", algorithm={"max_failed_fraction": 0.9}))
    rows = metrics_of(tmp_path)
    assert 0 < sum(row["failed"] for row in rows) < 32
    assert all(np.isfinite(row["reward"]) and np.isfinite(row["loss"]) for row in rows)


def test_too_many_failures_end_the_run_and_say_the_first(folder: Path, url: str, tmp_path: Path) -> None:
    made = config_of(folder, url, tmp_path, steps=3, reward="nothing")
    with pytest.raises(RunFailed, match=r"16 of the 16 responses of step 1 got no reward, .* nan for this sample"):
        reinforce.train(made)
    assert not (tmp_path / "checkpoints" / "step-000001").exists()


@pytest.mark.slow
def test_a_large_beta_keeps_the_policy_and_none_lets_it_go(folder: Path, url: str, tmp_path: Path) -> None:
    kl = []
    in_loss = {"kl_coefficient": 5.0, "kl_placement": "loss", "kl_estimator": "k3"}
    for i, algorithm in enumerate(({"kl_coefficient": 0.0}, {"kl_coefficient": 10.0}, in_loss)):
        out = tmp_path / str(i)
        reinforce.train(config_of(folder, url, out, steps=25, algorithm=algorithm))
        kl.append(np.mean([row["kl"] for row in metrics_of(out)[-5:]]))
    assert max(kl[1:]) < 0.5 * kl[0]


def test_settings_that_contradict_each_other_are_refused(folder: Path, tmp_path: Path) -> None:
    in_loss = {"kl_placement": "loss", "kl_estimator": "k1"}
    with pytest.raises(ConfigError, match="gradient of the estimator k1 is only noise"):
        reinforce.train(config_of(folder, "http://127.0.0.1:1", tmp_path, steps=1, algorithm=in_loss))
    algorithm = {"kl_placement": "loss", "kl_estimator": "k3", "kl_reduction": "mean"}
    with pytest.raises(ConfigError, match="kl_reduction is mean"):
        reinforce.train(config_of(folder, "http://127.0.0.1:1", tmp_path, steps=1, algorithm=algorithm))
    with pytest.raises(ConfigError, match="importance_cap is 0"):
        reinforce.train(config_of(folder, "http://127.0.0.1:1", tmp_path, steps=1, algorithm={"importance_cap": 0.0}))
