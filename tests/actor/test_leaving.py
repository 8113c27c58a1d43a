"""Runs that leave while a server is away or a disk is full: soon, and with all that can be saved."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import zoo
from actor.rollouts import serving
from actor.runs import metrics_of, parts, tiny_policy
from guerdon.actor import ppo, preemption, reinforce, run_checkpoints
from guerdon.actor.run_checkpoints import RunCheckpoints
from guerdon.actor.training_run import Run
from guerdon.client import RetryPolicy
from guerdon.errors import ConfigError, RewardsFailed, StorageFailed
from guerdon.server.runtime import RunningServer
from guerdon.settings.actors import (
    CriticServer,
    PPORunConfig,
    ReinforceRunConfig,
    RemoteCriticConfig,
    RemoteRewardConfig,
    RewardServer,
)
from guerdon.settings.config import CriticConfig, ModelConfig
from guerdon.training.policy_trainer import PolicyTrainer

EVEN = ModelConfig(model="actor.reward_functions:even")
TIMEOUT_S = 300.0
"""Timeout of a request: so long a run waits for a server that is away, unless it is asked to leave."""
SOON_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_policy(tmp_path_factory.mktemp("policy"))
    zoo.tokenizer(zoo.checkpoint("llama", folder / "critic", seed=1))
    return folder


def reinforced(folder: Path, out: Path, url: str, steps: int = 3, **run: Any) -> ReinforceRunConfig:
    config = ReinforceRunConfig(
        **parts(folder, out, steps=steps),
        remote_rm=RemoteRewardConfig(RewardServer(urls=[url]), timeout_s=TIMEOUT_S),
    )
    for name, value in run.items():
        setattr(config.run, name, value)
    return config


def optimised(folder: Path, out: Path, critic: str, rewards: str | None = None) -> PPORunConfig:
    config = PPORunConfig(**parts(folder, out, steps=3))
    config.remote_critic_rm = RemoteCriticConfig(critic=CriticServer(url=critic), timeout_s=TIMEOUT_S)
    if rewards is not None:
        config.remote_critic_rm.reward_model = RewardServer(urls=[rewards])
        config.remote_critic_rm.combine_rm_and_critic_server = False
    config.data.num_validation = 0
    return config


@contextmanager
def critic_of(folder: Path, tmp_path: Path) -> Iterator[RunningServer]:
    critic = CriticConfig(
        model=str(folder / "critic"), reward_model=str(folder / "critic"), checkpoint_dir=str(tmp_path / "critic")
    )
    with serving(critic=critic, grace_s=0) as server:
        yield server


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a run that waits see at once that it is asked to leave."""
    monkeypatch.setattr(preemption, "_CHECK_EVERY_S", 0.01)


class Leaves:
    """Takes a server away before the n-th call of a function, and asks the run to leave when it waits for that."""

    def __init__(self, patch: pytest.MonkeyPatch, where: Any, name: str, nth: int, server: RunningServer) -> None:
        original: Callable[..., Any] = getattr(where, name)
        next_delay, wait = RetryPolicy.next_delay, preemption.wait
        calls = iter(range(1, 100))
        is_away, is_missed = threading.Event(), threading.Event()
        self.asked = 0.0

        def wrapped(*args: Any, **kw: Any) -> Any:
            if next(calls) == nth:
                server.close()
                is_away.set()
            return original(*args, **kw)

        def delayed(*args: Any) -> float | None:
            if is_away.is_set():
                is_missed.set()
            return next_delay(*args)

        def waiting(*args: Any) -> Any:
            if is_missed.is_set() and not self.asked:
                self.asked = time.monotonic()
                os.kill(os.getpid(), signal.SIGTERM)
            return wait(*args)

        patch.setattr(where, name, wrapped)
        patch.setattr(RetryPolicy, "next_delay", delayed)
        patch.setattr(preemption, "wait", waiting)

    def assert_soon(self) -> None:
        assert self.asked and time.monotonic() - self.asked < SOON_S


# ------------------------------------------------------------------------------------------- a server is away


@pytest.mark.slow
def test_a_run_leaves_amid_a_validation_whose_server_is_away(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(EVEN, grace_s=0) as server, monkeypatch.context() as patch:
        leaves = Leaves(patch, Run, "_validate", 2, server)  # that before the first step is the first
        summary = reinforce.train(reinforced(folder, tmp_path, server.http_url, validate_every=1))
        leaves.assert_soon()
    assert (summary.step, summary.stopped, summary.exit_status) == (1, "SIGTERM", 143)
    assert summary.checkpoint == tmp_path / "checkpoints/step-000001" and summary.checkpoint.is_dir()
    (row,) = metrics_of(tmp_path)  # the step is done, though not validated
    assert row["step"] == 1 and "loss" in row and "validation_reward" not in row
    with serving(EVEN) as server:
        assert reinforce.train(reinforced(folder, tmp_path, server.http_url)).step == 3


@pytest.mark.slow
def test_a_pair_is_saved_though_the_reward_model_is_away(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with critic_of(folder, tmp_path) as critic, serving(EVEN, grace_s=0) as rewards:
        leaves = Leaves(monkeypatch, Run, "rollouts", 2, rewards)
        summary = ppo.train(optimised(folder, tmp_path / "run", critic.http_url, rewards.http_url))
        leaves.assert_soon()
    assert (summary.step, summary.exit_status) == (1, 143)
    assert summary.checkpoint is not None and summary.checkpoint.name == "step-000001"


@pytest.mark.slow
@pytest.mark.parametrize(("where", "name"), [(Run, "rollouts"), pytest.param(ppo, "update", marks=pytest.mark.slow)])
def test_a_run_whose_critic_is_away_leaves_without_a_save_and_says_so(
    where: Any,
    name: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(run_checkpoints, "_LEAVING_S", 0.5)
    with critic_of(folder, tmp_path) as critic, caplog.at_level(logging.ERROR), monkeypatch.context() as patch:
        leaves = Leaves(patch, where, name, 2, critic)
        summary = ppo.train(optimised(folder, tmp_path / "run", critic.http_url))
        leaves.assert_soon()
    assert (summary.step, summary.stopped, summary.exit_status) == (0, "SIGTERM", 143)
    assert str(summary).endswith(f"resumes from {tmp_path / 'run'}/checkpoints/step-000000")
    assert ("step 1 cannot be saved" in caplog.text) == (name == "rollouts")
    with critic_of(folder, tmp_path) as critic:
        assert ppo.train(optimised(folder, tmp_path / "run", critic.http_url)).step == 3
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.slow
def test_a_critic_that_is_only_slow_is_waited_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updated, update = [], ppo.update

    def updating(*args: Any, **kw: Any) -> None:
        update(*args, **kw)
        updated.append(1)
        if len(updated) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ppo, "update", updating)
    with critic_of(folder, tmp_path) as critic:
        summary = ppo.train(optimised(folder, tmp_path / "run", critic.http_url))
    assert (summary.step, summary.exit_status) == (2, 143)
    assert summary.checkpoint is not None and summary.checkpoint.name == "step-000002"


# ------------------------------------------------------------------------------------------- time


def test_the_time_limit_counts_the_wait_for_the_server(folder: Path, tmp_path: Path) -> None:
    config = reinforced(
        folder, tmp_path, "http://127.0.0.1:9", time_limit="0.02"
    )  # of which a second is kept in reserve
    began = time.monotonic()
    with pytest.raises(Exception, match="is not ready"):
        reinforce.train(config)
    assert time.monotonic() - began < SOON_S


def test_a_limit_into_which_no_step_fits_is_an_error(folder: Path, tmp_path: Path) -> None:
    with serving(EVEN) as server, pytest.raises(ConfigError, match=r"not one step fits into run\.time_limit, 0\.01"):
        reinforce.train(reinforced(folder, tmp_path, server.http_url, time_limit="0.01"))


# ------------------------------------------------------------------------------------------- rewards and disks


def test_what_was_learnt_before_the_rewards_failed_is_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewarded = reinforce.with_rewards

    def failing(rollouts: Any, most: float, step: int) -> Any:
        if step == 3:
            for rollout in rollouts:
                rollout.reward, rollout.error = None, "gone"
        return rewarded(rollouts, most, step)

    with serving(EVEN) as server:
        config = reinforced(folder, tmp_path, server.http_url)
        with monkeypatch.context() as patch:
            patch.setattr(reinforce, "with_rewards", failing)
            with pytest.raises(RewardsFailed, match="raise max_failed_fraction"):
                reinforce.train(config)
        assert (tmp_path / "checkpoints/step-000002").is_dir()
        assert reinforce.train(config).step == 3
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3]


def test_a_disk_that_is_full_for_a_while_costs_no_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save, saved = PolicyTrainer.save, []

    def full(policy: PolicyTrainer, to: Path) -> None:
        saved.append(to.parent.name.removeprefix(".aside-"))
        if len(saved) < 3:
            raise StorageFailed(f"cannot write {to}: no space left")
        save(policy, to)

    monkeypatch.setattr(PolicyTrainer, "save", full)
    with serving(EVEN) as server, caplog.at_level(logging.ERROR):
        assert reinforce.train(reinforced(folder, tmp_path, server.http_url, steps=4, save_every=2)).step == 4
    assert saved == ["step-000002", "step-000003", "step-000004"]
    assert "STEP 2 IS NOT SAVED" in caplog.text and "STEP 3 IS NOT SAVED" in caplog.text


def test_a_disk_that_is_full_at_the_end_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(policy: PolicyTrainer, to: Path) -> None:
        raise StorageFailed(f"cannot write {to}: no space left")

    monkeypatch.setattr(PolicyTrainer, "save", full)
    with serving(EVEN) as server, pytest.raises(StorageFailed, match="no space left"):
        reinforce.train(reinforced(folder, tmp_path, server.http_url, steps=1))


@pytest.mark.slow
def test_a_full_disk_of_the_actor_costs_the_critic_no_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = PolicyTrainer.save

    def full(policy: PolicyTrainer, to: Path) -> None:
        if policy.step_count in (1, 2, 3):
            raise StorageFailed(f"cannot write {to}: no space left")
        save(policy, to)

    monkeypatch.setattr(PolicyTrainer, "save", full)
    with critic_of(folder, tmp_path) as critic:
        config = optimised(folder, tmp_path / "run", critic.http_url)
        config.run.save_every = 1
        with pytest.raises(StorageFailed):
            ppo.train(config)
        newest = RunCheckpoints(tmp_path / "run" / "checkpoints", 2).newest_whole()
        assert newest is not None and newest.state.step == 0
        monkeypatch.setattr(PolicyTrainer, "save", save)
        assert ppo.train(config).step == 3  # its pair is still there


# ------------------------------------------------------------------------------------------- what it knows


def test_a_run_with_nothing_left_to_do_knows_its_metrics(folder: Path, tmp_path: Path) -> None:
    with serving(EVEN) as server:
        config = reinforced(folder, tmp_path, server.http_url)
        first, again = reinforce.train(config), reinforce.train(config)
    assert first.metrics == again.metrics and "reward" in again.metrics
    assert "seconds_save" not in first.metrics  # nothing was saved before the end


@pytest.mark.slow
def test_settings_are_not_changed_by_a_run(folder: Path, tmp_path: Path) -> None:
    with serving(EVEN) as server:
        config = reinforced(folder, tmp_path / "1", server.http_url, steps=1)
        config.policy.lr_schedule = "linear"
        reinforce.train(config)
        assert config.policy.total_steps is None
        assert "total_steps: null" in (tmp_path / "1/settings.yaml").read_text()
        config.run.output_dir, config.run.steps = str(tmp_path / "2"), 3
        reinforce.train(config)
    assert all(row["learning_rate"] > 0 for row in metrics_of(tmp_path / "2")[:-1])


@pytest.mark.slow
def test_other_weights_of_the_reward_model_are_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zoo.checkpoint("llama", tmp_path / "other", seed=9)
    for steps, model in ((1, folder / "critic"), (2, tmp_path / "other")):
        caplog.clear()
        with serving(ModelConfig(model=str(model))) as server, caplog.at_level(logging.WARNING):
            reinforce.train(reinforced(folder, tmp_path / "run", server.http_url, steps=steps))
        assert ("the reward model's weights changed" in caplog.text) == (steps == 2)
