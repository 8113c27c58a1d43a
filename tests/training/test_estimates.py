"""Returns and advantages from rewards and a critic's own values: by hand, and as `gae` makes them of served values."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from critics import build, same, values, weights
from plain import request

import zoo
from guerdon.critic_core import Gae, TrainRequest
from guerdon.errors import Offloaded, TrainFailed
from guerdon.training.algorithms.advantages import adaptive_lams, gae
from guerdon.training.estimates import with_estimates

ROWS = zoo.rows(0, ((40, 5), (20, 3), (30, 5)))[:12]


def rewarded(rewards: np.ndarray, mask: np.ndarray, rule: Gae) -> TrainRequest:
    nothing = np.empty((len(mask), 0), np.float32)
    tokens = np.full((len(mask), mask.shape[1] + 1), 5)
    return TrainRequest("a", tokens, nothing, nothing, np.float32(mask), rewards=np.float32(rewards), gae=rule)


def of(asked: TrainRequest) -> tuple[list[list[float]], list[list[float]]]:
    assert asked.advantages is not None
    return asked.advantages.tolist(), asked.returns.tolist()


NAN = np.nan


def test_by_hand_with_a_tools_tokens_in_the_middle() -> None:
    # The prompt, two tokens of an answer, two of a tool's output, one more of the answer, and padding. Of the tool's
    # tokens neither value nor reward is read. gamma is 1/2, r = 1, 2, 8 and V = 4, 2, 6:
    #   delta = 8 - 6 = 2;   2 + 0.5 * 6 - 2 = 3;   1 + 0.5 * 2 - 4 = -2
    # The critic's lambda is 1:    A = 2;   3 + 0.5 * 2 = 4;       -2 + 0.5 * 4 = 0;         returns 8, 6, 4.
    # The policy's lambda is 1/2:  A = 2;   3 + 0.25 * 2 = 3.5;    -2 + 0.25 * 3.5 = -1.125.
    mask = np.array([[0, 1, 1, 0, 0, 1, 0]])
    rewards = np.array([[NAN, 1, 2, 50, NAN, 8, NAN]])
    own = np.float32([[NAN, 4, 2, 70, np.inf, 6, NAN]])
    asked = with_estimates(rewarded(rewards, mask, Gae(0.5, 1.0, 0.5)), own)
    assert of(asked) == ([[0, -1.125, 3.5, 0, 0, 2, 0]], [[0, 4, 6, 0, 0, 8, 0]])
    assert asked.prev_values.tolist() == [[0, 4, 2, 0, 0, 6, 0]]
    # Three tokens count, so that alpha = 2/3 gives 1 - 1 / (2/3 * 3) = 1/2, too.
    assert of(with_estimates(rewarded(rewards, mask, Gae(0.5, 1.0, lam_alpha=2 / 3)), own)) == of(asked)
    assert of(with_estimates(rewarded(rewards, mask, Gae(0.5, 1.0)), own))[0] == [[0, 0, 4, 0, 0, 2, 0]]


def test_a_rows_reward_is_its_last_masked_tokens() -> None:
    mask = np.float32([[1, 1, 0, 0.5, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    own = np.float32([[1, 2, NAN, 3, NAN], [NAN, 4, NAN, NAN, NAN], [NAN] * 5])
    of_rows = with_estimates(rewarded(np.array([[10], [20], [NAN]]), mask, Gae()), own)
    assert of(of_rows) == (
        [[9, 8, 0, 7, 0], [0, 16, 0, 0, 0], [0] * 5],
        [[10, 10, 0, 10, 0], [0, 20, 0, 0, 0], [0] * 5],
    )
    per_token = np.zeros((3, 5))
    per_token[0, 3], per_token[1, 1] = 10, 20
    assert of(with_estimates(rewarded(per_token, mask, Gae()), own)) == of(of_rows)


def test_a_reward_of_a_single_action_is_a_rows_and_a_tokens() -> None:
    asked = with_estimates(rewarded(np.array([[3], [5]]), np.array([[1], [0]]), Gae()), np.float32([[1], [NAN]]))
    assert of(asked) == ([[2], [0]], [[3], [0]])


def test_values_that_are_not_finite_are_refused() -> None:
    mask = np.array([[1, 0], [1, 1]])
    with pytest.raises(TrainFailed, match="no finite values for row 1: nothing was changed") as failed:
        with_estimates(rewarded(mask, mask, Gae()), np.float32([[1, NAN], [1, np.inf]]))
    assert failed.value.num_steps == 0


def asked_of(rule: Gae) -> TrainRequest:
    """A request of real rows, with holes in its mask and noise for rewards, also where the mask is 0."""
    plain = request(ROWS)
    rewards = np.random.default_rng(1).normal(size=plain.mask.shape).astype(np.float32)
    nothing = np.empty((len(ROWS), 0), np.float32)
    return dataclasses.replace(plain, returns=nothing, prev_values=nothing, rewards=rewards, gae=rule)


@pytest.mark.parametrize("rule", [Gae(0.9, 1.0), Gae(1.0, 0.95, 0.7), Gae(0.99, 1.0, lam_alpha=0.3)], ids=str)
def test_a_critic_estimates_what_gae_makes_of_the_values_that_it_serves(rule: Gae, folder: Path) -> None:
    trainer, asked = build(folder, mean=0.5, std=2.0), asked_of(rule)
    before = weights(trainer)
    made = trainer.estimate(asked)
    assert same(before, weights(trainer)) and trainer.state()["step"] == 0
    served = torch.from_numpy(values(trainer, [row[:-1] for row in asked.tokens]).reshape(asked.mask.shape))
    rewards, mask = torch.from_numpy(asked.rewards), torch.from_numpy(asked.mask)
    _, returns = gae(rewards, served, mask, rule.gamma, rule.lam_critic)
    lam = rule.lam_critic if rule.lam_policy is None else rule.lam_policy
    lams = lam if rule.lam_alpha is None else adaptive_lams(mask, rule.lam_alpha)
    advantages, _ = gae(rewards, served, mask, rule.gamma, lams)
    np.testing.assert_allclose(made.returns, returns.numpy(), atol=1e-5)
    np.testing.assert_allclose(made.advantages, advantages.numpy(), atol=1e-5)
    np.testing.assert_allclose(made.prev_values, served.numpy() * (asked.mask > 0), atol=1e-6)
    assert made.prev_values[asked.mask > 0].std() > 0.01


def test_what_follows_the_last_masked_token_is_not_read(folder: Path) -> None:
    trainer, asked = build(folder), asked_of(Gae())
    made = trainer.estimate(asked)
    for row, counts in zip(asked.tokens, asked.mask > 0, strict=True):
        row[np.flatnonzero(counts).max(initial=-1) + 2 :] = -100
    again = trainer.estimate(asked)
    assert of(again) == of(made)


def test_the_first_pass_begins_at_the_estimated_values(folder: Path) -> None:
    trainer = build(folder, global_batch_size=100)
    made = trainer.estimate(asked_of(Gae()))
    report = trainer.train(made)
    assert report.clip_fraction == 0  # no value has moved yet
    counts, advantages = made.mask > 0, made.advantages
    assert report.loss == pytest.approx(0.5 * np.average(advantages[counts] ** 2, weights=made.mask[counts]), rel=1e-4)


def test_an_offloaded_critic_estimates_nothing(folder: Path) -> None:
    trainer = build(folder)
    trainer.offload()
    with pytest.raises(Offloaded):
        trainer.estimate(asked_of(Gae()))
