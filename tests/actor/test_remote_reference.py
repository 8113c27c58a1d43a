"""The reference's log-probs from a real server: a run with them is a run with its own, without a copy in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import served
import zoo
from actor.rollouts import rollout
from actor.runs import metrics_of, parts, weights_of
from actor.test_other_tokenizers import edited, swap_words
from guerdon.actor import ppo, reinforce
from guerdon.actor.remote_teacher import RemoteTeacher
from guerdon.errors import CheckpointError, ConfigError, StartError
from guerdon.server.runtime import RunningServer
from guerdon.settings.actors import (
    CriticServer,
    PPORunConfig,
    ReinforceConfig,
    ReinforceRunConfig,
    RemoteCriticConfig,
    RemoteRewardConfig,
    RewardServer,
    TeacherServer,
)
from guerdon.settings.config import CriticConfig, ModelConfig, TeacherConfig
from guerdon.training.policy_trainer import PolicyTrainer
from served import Serve
from teaching import plain


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    other = zoo.tokenizer(zoo.language_model("llama", folder / "other", seed=1))
    strange = edited(zoo.tokenizer(zoo.language_model("llama", folder / "strange")), swap_words)
    teachers = {"initial": folder / "policy", "other": other, "strange": strange}
    models: list[Any] = [
        TeacherConfig(model=str(path), name=name, deterministic=True) for name, path in teachers.items()
    ]
    models.append(ModelConfig(model="actor.reward_functions:even", name="even"))
    model = str(served.reward_model(folder / "rm"))
    critic = CriticConfig(model=model, reward_model=model, checkpoint_dir=str(folder / "critic"))
    return serve(*models, critic=critic)


def config_of(folder: Path, server: RunningServer, out: Path, reference: str | None) -> ReinforceRunConfig:
    return ReinforceRunConfig(
        **parts(folder, out, steps=3, rollouts={"temperature": 0.8}),
        reinforce=ReinforceConfig(kl_placement="loss", kl_estimator="k3", kl_coefficient=0.5),
        remote_rm=RemoteRewardConfig(RewardServer(name="even", urls=[server.http_url]), timeout_s=30.0),
        reference=_reference(server, reference),
    )


def _reference(server: RunningServer, name: str | None) -> TeacherServer:
    return TeacherServer() if name is None else TeacherServer(server.http_url, name, timeout_s=30.0)


def test_a_run_with_a_served_reference_is_a_run_with_its_own(
    folder: Path, server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reinforce.train(config_of(folder, server, tmp_path / "own", None))

    def refuse(_: PolicyTrainer) -> None:
        raise AssertionError("the reference is loaded beside the policy")

    monkeypatch.setattr(PolicyTrainer, "_load_reference", refuse)
    reinforce.train(config_of(folder, server, tmp_path / "served", "initial"))
    own, remote = metrics_of(tmp_path / "own"), metrics_of(tmp_path / "served")
    for name in ("kl", "loss", "reward"):
        np.testing.assert_allclose([row[name] for row in remote], [row[name] for row in own], rtol=1e-3, atol=1e-4)
    assert own[-1]["kl"] > 0.01 and remote[-1]["seconds_reference"] >= 0
    expected = weights_of(tmp_path / "own", 3)
    for key, weight in weights_of(tmp_path / "served", 3).items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-3, atol=1e-4)


def test_another_model_may_be_the_reference(folder: Path, server: RunningServer, tmp_path: Path) -> None:
    config = config_of(folder, server, tmp_path, "other")
    config.run.steps = 1
    reinforce.train(config)
    assert abs(metrics_of(tmp_path)[0]["kl"]) > 0.01
    config.reference = TeacherServer()
    config.run.steps = 2
    with pytest.raises(CheckpointError, match=r"made with reference\.name 'other'; now it is None"):
        reinforce.train(config)


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_went_on(folder: Path, server: RunningServer, tmp_path: Path) -> None:
    """Bitwise, because the teacher's answers do not depend on what shares their batch."""
    config = config_of(folder, server, tmp_path / "on", "initial")
    reinforce.train(config)
    config.run.output_dir, config.run.steps = str(tmp_path / "resumed"), 1
    reinforce.train(config)
    config.run.steps = 3
    reinforce.train(config)
    expected = weights_of(tmp_path / "on", 3)
    for key, weight in weights_of(tmp_path / "resumed", 3).items():
        assert torch.equal(weight, expected[key]), key


def test_ppo_takes_it_as_well(folder: Path, server: RunningServer, tmp_path: Path) -> None:
    remote = RemoteCriticConfig(critic=CriticServer(url=server.http_url), timeout_s=30.0)
    sections = parts(folder, tmp_path, steps=1)
    ppo.train(PPORunConfig(**sections, remote_critic_rm=remote, reference=_reference(server, "other")))
    assert abs(metrics_of(tmp_path)[0]["kl"]) > 0.01


def test_each_rollout_gets_its_own_logprobs_or_its_own_error(folder: Path, server: RunningServer) -> None:
    group = [rollout([5, 6], response, index=i, reward=1.0) for i, response in enumerate(([7], [zoo.VOCAB_SIZE, 8]))]
    more = [rollout([9], [10, 11, 12], group=1, reward=1.0)]
    with RemoteTeacher(_reference(server, "initial"), 0.5, "reference") as reference:
        reference.submit(group)
        reference.submit(more)
        reference.collect()
    assert group[1].reward is None and "token id 300 is outside the vocabulary" in str(group[1].error)
    (logits,) = plain(folder / "policy", [more[0].tokens])
    expected = torch.log_softmax(logits / 0.5, -1)[torch.arange(3), torch.from_numpy(more[0].tokens[1:])]
    assert more[0].ref_logprobs is not None and group[0].reward == more[0].reward == 1.0
    np.testing.assert_allclose(more[0].ref_logprobs, expected, atol=1e-5)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another tokenizer": ({"name": "strange"}, ConfigError, "the reference's tokenizer differs from the policy's"),
    "a reward model": ({"name": "even"}, ConfigError, "reference 'even' at .* gives no log-probs, only rewards"),
    "an unknown name": ({"name": "nobody"}, StartError, "reference 'nobody' at .* is not ready: .*unknown model"),
    "a key in its URL": ({"url": "http://x:KEY@a:1"}, ConfigError, "reference.url has a key in http://a:1"),
    "a malformed URL": ({"url": "ftp://a"}, ConfigError, "server URL 'ftp://a' is malformed"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reference_is_refused_before_the_first_step(
    wrong: str, folder: Path, server: RunningServer, tmp_path: Path
) -> None:
    settings, error, message = WRONG[wrong]
    config = config_of(folder, server, tmp_path, "initial")
    for name, value in settings.items():
        setattr(config.reference, name, value)
    with pytest.raises(error, match=message):
        reinforce.train(config)
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").iterdir())
