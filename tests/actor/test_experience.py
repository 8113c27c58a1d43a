"""What a step learns from, against numbers worked by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from actor.rollouts import rollout
from guerdon.actor.experience import Experience, to_table, untable, with_rewards
from guerdon.actor.ppo import ppo_advantages
from guerdon.actor.reinforce import reinforce_advantages
from guerdon.actor.update import advantage_metrics, global_batches
from guerdon.errors import RunFailed
from guerdon.settings.actors import AlgorithmConfig, PPOConfig, ReinforceConfig
from guerdon.training.algorithms.advantages import RunningMean


@pytest.fixture
def experience() -> Experience:
    """Two responses to each of two prompts; k1 sums to 0.5, -0.5, 0 and 1; the third was cut."""
    rollouts = [
        rollout([5, 6], [7, 8], reward=1.0, values=[9, 0.25, 0.5, 9], logprobs=[-1.1, -2.1]),
        rollout([5, 6], [9], index=1, reward=3.0, values=[9, 2, 9]),
        rollout([4], [3, 3, 3], group=1, reward=4.0, values=[1, 1, 1, 9], is_end=False),
        rollout([4], [2], group=1, index=1, reward=2.0, values=[0, 9]),
    ]
    logprobs = torch.tensor([[-1, -2, 0], [-1, 0, 0], [-1, -1, -1], [-2, 0, 0]], dtype=torch.float32)
    ref = torch.tensor([[-1.5, -2, 0], [-0.5, 0, 0], [-1, -2, 0], [-3, 0, 0]])
    entropies = torch.tensor([[1, 2, 9], [3, 9, 9], [1, 1, 1], [5, 9, 9]], dtype=torch.float32)
    return Experience.of(rollouts, logprobs, ref, entropies, "k1")


def test_tables_are_of_the_responses_alone(experience: Experience) -> None:
    assert experience.mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]]
    assert experience.kl.tolist() == [[0.5, 0, 0], [-0.5, 0, 0], [0, 1, -1], [1, 0, 0]]
    assert experience.engine_logprobs[0].tolist() == pytest.approx([-1.1, -2.1, 0])
    assert experience.values.tolist() == [[0.25, 0.5, 0], [2, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert experience.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert experience.groups.tolist() == [0, 0, 1, 1] and experience.is_end.tolist() == [True, True, False, True]
    assert experience.metrics() == {"kl": 0.25, "kl_per_token": 1 / 7, "entropy": 2.0}


def test_rloo_takes_the_kl_off_the_reward_and_compares_with_the_others(experience: Experience) -> None:
    advantages, _ = reinforce_advantages(experience, ReinforceConfig(kl_coefficient=0.5), RunningMean())
    # rewards less half the KL: 0.75 and 3.25, 4 and 1.5
    assert advantages.tolist() == [[-2.5, -2.5, 0], [2.5, 0, 0], [2.5, 2.5, 2.5], [-2.5, 0, 0]]


def test_the_kl_off_the_reward_may_be_the_mean_over_the_tokens(experience: Experience) -> None:
    config = ReinforceConfig(kl_coefficient=0.5, kl_reduction="mean")
    # The first response's two tokens have 0.5 and 0: 1 - 0.5 * 0.25 is left of its reward, 3.25 of the other's.
    advantages, _ = reinforce_advantages(experience, config, RunningMean())
    assert advantages[:, 0].tolist() == [-2.375, 2.375, 2.5, -2.5]
    assert experience.penalised(0.5, "mean").tolist() == [0.875, 3.25, 4.0, 1.5]


@pytest.mark.parametrize(
    ("settings", "advantages"),
    [
        ({"kl_coefficient": 0.5, "kl_placement": "loss", "kl_estimator": "k3"}, [-2, 2, 2, -2]),
        ({"kl_coefficient": 0.0, "leave_out_truncated": True}, [-2, 2, 0, 0]),
    ],
    ids=["a KL in the loss leaves the rewards alone", "truncated responses have no part, in baselines neither"],
)
def test_advantages_are_those_of_the_settings(
    settings: dict[str, Any], advantages: list[float], experience: Experience
) -> None:
    got, _ = reinforce_advantages(experience, ReinforceConfig(**settings), RunningMean())
    assert got[:, 0].tolist() == advantages


def test_the_running_mean_goes_on_from_step_to_step(experience: Experience) -> None:
    config = ReinforceConfig(kl_coefficient=0.0, advantage_estimator="mean")
    first, running = reinforce_advantages(experience, config, RunningMean())
    assert first[:, 0].tolist() == [1, 3, 4, 2]
    assert (running.sum_rewards, running.num_rewards) == (10, 4)
    second, running = reinforce_advantages(experience, config, running)
    assert second[:, 0].tolist() == [-1.5, 0.5, 1.5, -0.5]
    assert running == RunningMean(20, 8)


def test_ppo_rewards_each_token_less_its_kl(experience: Experience) -> None:
    config = PPOConfig(kl_coefficient=0.5, gamma=1.0, lam=1.0, whiten_advantages=False)
    advantages, returns = ppo_advantages(experience, config)
    # With lambda 1 a return is the sum of what is still to come: the reward, and minus half of each k1.
    assert returns.tolist() == [[0.75, 1, 0], [3.25, 0, 0], [4, 4, 4.5], [1.5, 0, 0]]
    assert advantages.tolist() == [[0.5, 0.5, 0], [1.25, 0, 0], [3, 3, 3.5], [1.5, 0, 0]]
    metrics = advantage_metrics(advantages, experience.mask)
    assert metrics["advantage_mean"] == pytest.approx(13.25 / 7)
    whitened, same = ppo_advantages(experience, PPOConfig(kl_coefficient=0.5, gamma=1.0, lam=1.0))
    torch.testing.assert_close(same, returns)
    metrics = advantage_metrics(whitened, experience.mask)
    assert metrics["advantage_mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["advantage_std"] == pytest.approx(1, abs=1e-6)


def test_advantages_and_returns_have_lambdas_of_their_own() -> None:
    """Two responses of 2 and 4 tokens; all values are 1, the rewards 3 and 2."""
    responses = [rollout([5], [7] * n, index=i, values=[1.0] * (n + 1)) for i, n in enumerate((2, 4))]
    responses[0].reward, responses[1].reward = 3.0, 2.0
    zeros = torch.zeros(2, 4)
    experience = Experience.of(responses, zeros, zeros, zeros, "k1")

    def of(**settings: Any) -> list[Any]:
        config = PPOConfig(kl_coefficient=0.0, whiten_advantages=False, **settings)
        return [table.tolist() for table in ppo_advantages(experience, config)]

    # Only the last token is surprising: by 2 and by 1; what it tells the others shrinks by lambda a token.
    by_half = [[1, 2, 0, 0], [0.125, 0.25, 0.5, 1]]
    assert of(lam=0.5) == [by_half, [[2, 3, 0, 0], [1.125, 1.25, 1.5, 2]]]
    rewards_to_come = [[3, 3, 0, 0], [2, 2, 2, 2]]
    assert of(lam=0.5, lam_critic=1.0) == [by_half, rewards_to_come]
    # 1 - 1 / (0.5 * 2) = 0 and 1 - 1 / (0.5 * 4) = 0.5
    assert of(lam_alpha=0.5, lam_critic=1.0) == [[[0, 2, 0, 0], [0.125, 0.25, 0.5, 1]], rewards_to_come]
    assert of(lam_alpha=0.5, lam=1.0)[1] == rewards_to_come


def test_failed_rollouts_leave_and_the_rest_are_in_order() -> None:
    rollouts = [rollout([1], [2], group=g, index=i, reward=1.0) for g in (1, 0) for i in (0, 1)]
    rollouts[1].reward, rollouts[1].error = None, "the server gave no finite reward"
    kept = with_rewards(rollouts, 0.25, step=3)
    assert [(r.group, r.index) for r in kept] == [(0, 0), (0, 1), (1, 0)]
    with pytest.raises(RunFailed, match=r"1 of the 4 responses of step 3 .* 0.24; the first error: the server gave no"):
        with_rewards(rollouts, 0.24, step=3)
    for r in rollouts:
        r.reward = None
    with pytest.raises(RunFailed, match="4 of the 4"):
        with_rewards(rollouts, 1.0, step=3)


@pytest.mark.parametrize(("num_rows", "sizes"), [(128, [64, 64]), (130, [44, 43, 43]), (127, [64, 63]), (3, [3])])
def test_global_batches_are_of_equal_size_and_in_order(num_rows: int, sizes: list[int]) -> None:
    batches = global_batches(num_rows, AlgorithmConfig(global_batch_size=64))
    assert [len(batch) for batch in batches] == sizes
    assert np.concatenate(batches).tolist() == list(range(num_rows))


def test_untable_is_the_inverse_of_to_table() -> None:
    rollouts = [rollout([1], [2, 3]), rollout([1], [2, 3, 4], index=1)]
    rows = [np.array([1, 2], np.float32), np.array([3, 4, 5], np.float32)]
    for row, back in zip(rows, untable(to_table(rows), rollouts), strict=True):
        np.testing.assert_array_equal(row, back)
