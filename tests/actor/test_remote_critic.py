"""The critic's side of PPO against real servers: rewards and values of each rollout, and what the critic learns."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zoo
from actor.reward_functions import FAVOURITE
from actor.rollouts import rollout, serving
from guerdon import AsyncCriticClient, CriticClient, RewardClient
from guerdon.actor.remote_critic import RemoteCritic
from guerdon.actor.rollouts import Rollout
from guerdon.client import ModelSignature
from guerdon.errors import ConfigError, StartError
from guerdon.settings.actors import CriticNames, CriticServer, RemoteCriticConfig, RewardServer
from guerdon.settings.config import CriticConfig, ModelConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A critic `model`, and a reward model `reward`."""
    folder = tmp_path_factory.mktemp("critic")
    for seed, name in enumerate(("model", "reward")):
        zoo.tokenizer(zoo.checkpoint("llama", folder / name, seed=seed))
    return folder


def critic_of(folder: Path, **settings: Any) -> CriticConfig:
    return CriticConfig(model=str(folder / "model"), learning_rate=1e-3, deterministic=True, **settings)


def remote(url: str, **settings: Any) -> RemoteCritic:
    return RemoteCritic(RemoteCriticConfig(critic=CriticServer(url=url), timeout_s=30.0, **settings))


def groups_of_two() -> list[list[Rollout]]:
    """Two groups of ragged responses."""
    return [
        [rollout([9] * 20, [7, 8, 2]), rollout([9] * 20, [5, 2], index=1)],
        [rollout([11] * 3, [FAVOURITE], group=1), rollout([11] * 3, [4, 4, 4, 4], group=1, index=1)],
    ]


def test_rewards_and_values_come_together(folder: Path) -> None:
    groups = groups_of_two()
    rollouts = [r for group in groups for r in group]
    with (
        serving(critic=critic_of(folder, reward_model=str(folder / "reward"))) as server,
        remote(server.http_url) as critic,
        CriticClient(server.http_url) as plain,
    ):
        critic.wait_ready()
        for group in groups:
            critic.submit(group)
        critic.collect()
        want = plain.infer_with_rewards(tokens=[r.tokens for r in rollouts])
    assert want.rewards is not None
    assert [r.reward for r in rollouts] == want.rewards.tolist()
    for made, values in zip(rollouts, want.values, strict=True):
        assert made.values is not None
        np.testing.assert_array_equal(made.values, values)


def test_a_reward_model_of_its_own_and_a_sample_that_fails_on_either_server(folder: Path) -> None:
    rewarding = ModelConfig(model="actor.reward_functions:favourite")
    bad_reward, bad_value = rollout([9], [13]), rollout([9], [zoo.VOCAB_SIZE], index=1)
    good = rollout([9], [FAVOURITE], index=2)
    with serving(rewarding) as rewards, serving(critic=critic_of(folder)) as server:
        at = RewardServer(urls=[rewards.http_url])
        with remote(server.http_url, reward_model=at, combine_rm_and_critic_server=False) as critic:
            critic.wait_ready()
            critic.submit([bad_reward, bad_value, good])
            critic.collect()
            assert good.reward == 0.5 and good.error is None and good.values is not None and len(good.values) == 2
            assert bad_reward.reward is None and "nan" in str(bad_reward.error)
            assert bad_value.reward is None and f"{zoo.VOCAB_SIZE}" in str(bad_value.error)
            good.reward = good.values = None
            critic.score([good])
            assert good.reward == 0.5 and good.values is None


def test_the_critic_learns_the_returns_at_the_response_alone(folder: Path) -> None:
    rollouts = [r for group in groups_of_two() for r in group]
    last = rollouts[-1]
    last.observed = np.array([False, True, False, False])  # what an environment wrote has no value to learn
    returns = [np.arange(r.response_length, dtype=np.float32) for r in rollouts]
    tokens = [r.tokens for r in rollouts]
    reports, after = [], []
    for by_hand in (False, True):
        with (
            serving(critic=critic_of(folder, reward_model=str(folder / "reward"))) as server,
            remote(server.http_url) as critic,
            CriticClient(server.http_url) as plain,
        ):
            critic.score(rollouts)
            if by_hand:
                rows, masks, values = [], [], []
                for r, own in zip(rollouts, returns, strict=True):
                    before = r.prompt_length - 1
                    rows.append([0.0] * before + own.tolist())
                    own_mask = [1.0, 0.0, 1.0, 1.0] if r is last else [1.0] * r.response_length
                    masks.append([0.0] * before + own_mask)
                    values.append(r.values[:-1])
                reports.append(plain.train(tokens, rows, values, masks).result())
            else:
                first = critic.train("run-1", rollouts, returns)
                assert critic.train("run-1", rollouts, returns).result() == first.result()
                reports.append(first.result())
            after.append(plain.infer(tokens=tokens).values)
            assert critic.state().step == 1
    assert reports[0].loss == reports[1].loss and reports[0].num_tokens == sum(map(len, returns)) - 1
    for ours, own in zip(*after, strict=True):
        np.testing.assert_array_equal(ours, own)


def test_a_critic_without_a_reward_model_and_none_at_all_say_so(folder: Path) -> None:
    with (
        serving(critic=critic_of(folder)) as server,
        remote(server.http_url) as critic,
        pytest.raises(ConfigError, match="gives no rewards") as raised,
    ):
        critic.wait_ready()
    assert "--reward-model" in raised.value.help
    url = server.http_url
    settings = RemoteCriticConfig(critic=CriticServer(url=url), timeout_s=0.3)
    with RemoteCritic(settings) as critic, pytest.raises(StartError, match="is not ready"):
        critic.wait_ready()
    with pytest.raises(ConfigError, match="`send` is text"):
        remote(url, send="text")


def test_names_of_the_settings_are_the_models_names(folder: Path) -> None:
    with serving(critic=critic_of(folder, name="judge")) as server, RewardClient(server.http_url, "judge_infer") as rm:
        names = CriticNames(infer="judge_infer", train="judge_train", save="judge_save")
        at = CriticServer(name=names, url=server.http_url)
        with RemoteCritic(RemoteCriticConfig(critic=at)) as critic:
            assert critic.state().step == 0
        rm.wait_ready(120.0)

        async def info() -> ModelSignature:
            async with AsyncCriticClient(server.http_url, "judge") as client:
                return await client.info()

        with CriticClient(server.http_url, "judge") as client:
            assert client.info() == asyncio.run(info()) == rm.info()
        assert "values" in rm.info().outputs


def test_values_asked_for_behind_a_training_are_those_of_the_trained_weights(folder: Path) -> None:
    rollouts = [r for group in groups_of_two() for r in group]
    tokens = [r.tokens for r in rollouts]
    with (
        serving(critic=critic_of(folder, reward_model=str(folder / "reward"))) as server,
        remote(server.http_url) as critic,
        CriticClient(server.http_url) as plain,
    ):
        critic.score(rollouts)
        before = [r.values for r in rollouts]
        training = critic.train("run-1", rollouts, [np.ones(r.response_length, np.float32) for r in rollouts])
        critic.score(rollouts)  # nobody has waited for the training
        training.result()
        for made, old, new in zip(rollouts, before, plain.infer(tokens=tokens).values, strict=True):
            np.testing.assert_array_equal(made.values, new)
            assert not np.array_equal(old, new)
