"""On-policy distillation from end to end: a tiny policy, a real teacher's server, and everything between."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import served
import zoo
from actor.rank_runs import alone
from actor.rollouts import rollout
from actor.runs import metrics_of, parts, tiny_policy, weights_of
from actor.test_other_tokenizers import edited, swap_words
from guerdon.actor import distill
from guerdon.actor.experience import Experience
from guerdon.errors import CheckpointError, ConfigError, RewardsFailed, StartError
from guerdon.server.runtime import RunningServer
from guerdon.settings.actors import DistillConfig, DistillRunConfig, TeacherServer
from guerdon.settings.config import ModelConfig, TeacherConfig
from guerdon.training.policy_trainer import PolicyTrainer
from served import Serve
from tiers import slow_but
from training.policies import PlainPolicy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_policy(tmp_path_factory.mktemp("policy"))
    zoo.tokenizer(zoo.language_model("llama", folder / "teacher", seed=1))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    strange = edited(zoo.tokenizer(zoo.language_model("llama", folder / "strange")), swap_words)
    good = str(folder / "teacher")
    models: list[Any] = [
        TeacherConfig(model=good, name="teacher", deterministic=True),
        TeacherConfig(model=good, name="short", max_length=16),
        TeacherConfig(model=good, name="tiny", max_length=2),
        TeacherConfig(model=str(strange), name="strange"),
        TeacherConfig(model=str(strange), name="reader", student_tokenizer=good),
        ModelConfig(model="actor.reward_functions:even", name="even"),
    ]
    return serve(*models)


def config_of(
    folder: Path, server: RunningServer, out: Path, *, teacher: str = "teacher", steps: int = 1, **more: Any
) -> DistillRunConfig:
    algorithm = more.pop("algorithm", {})
    return DistillRunConfig(
        **parts(folder, out, steps=steps, **more),
        distill=DistillConfig(**algorithm),
        teacher=TeacherServer(server.http_url, teacher, timeout_s=30.0),
    )


@pytest.mark.slow
def test_the_policy_comes_closer_to_the_teacher(
    folder: Path, server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: PolicyTrainer) -> None:
        raise AssertionError("a reference is loaded beside the policy")

    monkeypatch.setattr(PolicyTrainer, "_load_reference", refuse)
    more: dict[str, Any] = {"learning_rate": 1e-2, "rollouts": {"rollouts_per_prompt": 16}}
    summary = distill.train(config_of(folder, server, tmp_path, steps=20, **more))
    assert (summary.step, summary.stopped, summary.exit_status) == (20, None, 0)
    rows = metrics_of(tmp_path)
    kl = np.array([row["kl"] for row in rows])
    assert kl[-5:].mean() < 0.6 * kl[:5].mean()
    for row in rows:  # the one by the log-probs of sampling, the other by those of the packed forward
        assert row["reward"] == pytest.approx(-row["kl"], rel=1e-4)
    assert rows[-1]["validation_reward"] > rows[9]["validation_reward"]
    assert "ratio" not in rows[0] and "reward_penalised" not in rows[0] and rows[0]["seconds_reference"] >= 0


def test_a_step_is_that_of_plain_transformers_and_torch(folder: Path, server: RunningServer, tmp_path: Path) -> None:
    config = config_of(folder, server, tmp_path, rollouts={"temperature": 0.8})
    done = alone(config)
    rows = [rollout.tokens for rollout in done.steps[1]]
    prompts = np.array([rollout.prompt_length for rollout in done.steps[1]])
    policy, teacher = PlainPolicy(folder / "policy"), PlainPolicy(folder / "teacher")
    logprobs, _, mask = policy.logprobs(rows, prompts, 0.8)
    with torch.no_grad():
        log_ratios = logprobs - teacher.logprobs(rows, prompts, 0.8)[0]
    loss = (mask * log_ratios * logprobs).sum() / mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimiser = torch.optim.AdamW(
        policy.model.parameters(), config.policy.learning_rate, (0.9, 0.98), weight_decay=0.01
    )
    optimiser.step()

    (row,) = metrics_of(tmp_path)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert row["kl"] == pytest.approx(((mask * log_ratios).sum() / len(rows)).item(), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    weights, expected = weights_of(tmp_path, 1), policy.model.state_dict()
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= 1e-5 * weight.norm(), name


@pytest.mark.parametrize(
    "algorithm", slow_but(({},), [{}, {"epochs": 2, "global_batch_size": 6, "importance_cap": 2.0}])
)
def test_a_resumed_run_is_the_run_that_went_on(
    algorithm: dict[str, Any], folder: Path, server: RunningServer, tmp_path: Path
) -> None:
    for out, steps in (("whole", 2), ("parts", 1), ("parts", 2)):
        assert distill.train(config_of(folder, server, tmp_path / out, steps=steps, algorithm=algorithm)).step == steps
    whole, resumed = (weights_of(tmp_path / out, 2) for out in ("whole", "parts"))
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
    assert ("ratio" in metrics_of(tmp_path / "parts")[0]) == ("epochs" in algorithm)


def test_what_the_teacher_refuses_is_dropped_and_counted(folder: Path, server: RunningServer, tmp_path: Path) -> None:
    algorithm = {"max_failed_fraction": 0.9}
    done = alone(config_of(folder, server, tmp_path, teacher="short", algorithm=algorithm))
    failed = [rollout for rollout in done.steps[1] if rollout.reward is None]
    assert 0 < len(failed) < 16 and metrics_of(tmp_path)[0]["failed"] == len(failed)
    assert all(len(rollout.tokens) > 16 and "16" in str(rollout.error) for rollout in failed)
    assert np.isfinite(metrics_of(tmp_path)[0]["loss"])


def test_too_many_failures_end_the_run(folder: Path, server: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(RewardsFailed, match=r"16 of the 16 responses of step 1 .* the log of the teacher's server"):
        distill.train(config_of(folder, server, tmp_path, teacher="tiny"))


@pytest.mark.slow
def test_a_change_of_the_teachers_weights_is_logged(
    folder: Path, server: RunningServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    distill.train(config_of(folder, server, tmp_path))
    with (
        served.running(TeacherConfig(model=str(folder / "policy"), name="teacher")) as other,
        caplog.at_level(logging.WARNING),
    ):
        distill.train(config_of(folder, other, tmp_path, steps=2))
    assert "the teacher's weights changed to " in caplog.text


def test_the_advantage_is_that_of_each_token_alone_and_bounded() -> None:
    rollouts = [rollout([5], [6, 7], reward=0.0), rollout([5], [8], reward=0.0)]
    own, teacher = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), torch.tensor([[-0.5, -9.0], [-99.0, 0.0]])
    advantages = distill.distill_advantages(Experience.of(rollouts, own, teacher, torch.zeros(2, 2), "k3"))
    assert advantages.tolist() == [[0.5, -7.0], [-20.0, 0.0]]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no URL": ({"url": None}, ConfigError, "teacher.url is not given"),
    "another tokenizer": ({"name": "strange"}, ConfigError, "the teacher's tokenizer differs from the policy's"),
    "a reader of other ids": ({"name": "reader"}, ConfigError, "teacher 'reader' at .* gives some .* no log-prob"),
    "a reward model": ({"name": "even"}, ConfigError, "teacher 'even' at .* gives no log-probs, only rewards"),
    "an unknown name": ({"name": "nobody"}, StartError, "teacher 'nobody' at .* is not ready: .*unknown model"),
    "a key in its URL": ({"url": "http://x:KEY@a:1"}, ConfigError, "teacher.url has a key in http://a:1"),
    "a malformed URL": ({"url": "ftp://a"}, ConfigError, "server URL 'ftp://a' is malformed"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_teacher_is_refused_before_the_first_step(
    wrong: str, folder: Path, server: RunningServer, tmp_path: Path
) -> None:
    settings, error, message = WRONG[wrong]
    config = config_of(folder, server, tmp_path)
    for name, value in settings.items():
        setattr(config.teacher, name, value)
    with pytest.raises(error, match=message):
        distill.train(config)
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").iterdir())


def test_a_run_resumes_neither_with_another_teacher_nor_by_another_command(
    folder: Path, server: RunningServer, tmp_path: Path
) -> None:
    distill.train(config_of(folder, server, tmp_path))
    with pytest.raises(CheckpointError, match=r"made with teacher\.name 'teacher'; now it is 'short'"):
        distill.train(config_of(folder, server, tmp_path, teacher="short", steps=2))
