"""guerdon's actors, set as the page about NeMo-Aligner says, give NeMo-Aligner's numbers.

The formulas are written after those of its `ReinforceTrainer` and `PPOTrainer`, on its own padded tables `[B, S-1]`,
whose entry t is about token t + 1.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from actor.rollouts import rollout
from guerdon.actor.experience import Experience, to_table
from guerdon.actor.ppo import ppo_advantages
from guerdon.actor.reinforce import reinforce_advantages
from guerdon.settings.actors import PPOConfig, ReinforceConfig
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, ppo_loss, reinforce_loss

BETA = 0.3
ENDED = {"all": [True] * 8, "some": [True, True, False, True, False, False, True, False], "none": [False] * 8}


@dataclasses.dataclass
class Tables:
    """Random rollouts of two prompts as NeMo-Aligner has them, and as `Experience`."""

    mask: Tensor
    logprobs: Tensor
    init_logprobs: Tensor
    values: Tensor
    rewards: Tensor
    is_end: Tensor
    prompts: Tensor
    response_lengths: Tensor
    experience: Experience

    def of_responses(self, table: Tensor) -> Tensor:
        """Returns a padded table's part at the responses, `[B, R]`."""
        return to_table([row[kept > 0].numpy() for row, kept in zip(table, self.mask, strict=True)])


def tables(ended: str, kl_estimator: str = "abs") -> Tables:
    draw = np.random.default_rng(3)
    rollouts, rows = [], []
    width = 30
    for i, is_end in enumerate(ENDED[ended]):
        group = i // 4
        prompt_length, length = (4, 7)[group], int(draw.integers(2, 15))
        made = rollout(
            list(range(5, 5 + prompt_length)), list(range(20, 20 + length)), group=group, index=i % 4, is_end=is_end,
            reward=float(draw.normal()), values=draw.normal(size=prompt_length + length).tolist(),
        )  # fmt: skip
        rollouts.append(made)
        rows.append((prompt_length, prompt_length + length))
    mask, logprobs, init, values = (torch.zeros(8, width) for _ in range(4))
    for i, (start, end) in enumerate(rows):
        mask[i, start - 1 : end - 1] = 1.0
        logprobs[i, : end - 1] = -torch.from_numpy(draw.exponential(size=end - 1)).float()
        init[i, : end - 1] = -torch.from_numpy(draw.exponential(size=end - 1)).float()
        made_values = rollouts[i].values
        assert made_values is not None
        values[i, : end - 1] = torch.from_numpy(made_values[:-1])
    made_tables = Tables(
        mask, logprobs, init, values,
        torch.tensor([r.reward for r in rollouts]), torch.tensor(ENDED[ended]),
        torch.tensor([r.group for r in rollouts]), torch.tensor([end for _, end in rows]), None,  # type: ignore[arg-type]
    )  # fmt: skip
    own = [made_tables.of_responses(table) for table in (logprobs, init)]
    made_tables.experience = Experience.of(rollouts, own[0], own[1], torch.zeros_like(own[0]), kl_estimator)
    return made_tables


def mean_of(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask.bool()).sum(-1) / mask.bool().sum(-1)


def nemo_baseline(prompts: Tensor, rewards: Tensor, counts: Tensor) -> Tensor:
    """The leave-one-out baseline over responses that ended; the reward itself if at most one has."""
    baseline = torch.zeros_like(rewards)
    for prompt in prompts.unique():
        own = (prompts == prompt).nonzero()[:, 0]
        if counts[own].sum() <= 1:
            baseline[own] = rewards[own]
            continue
        for i in own:
            others = own[own != i]
            baseline[i] = (rewards[others] * counts[others]).sum() / (counts[own].sum() - 1)
    return baseline


@pytest.mark.parametrize("ended", ENDED)
def test_reinforce(ended: str) -> None:
    """With `micro_batch_size: 1`, NeMo-Aligner's default: a truncated response alone in its micro-batch has loss 0."""
    t = tables(ended)
    kl = mean_of((t.logprobs - t.init_logprobs).abs(), t.mask)
    rewards = t.rewards - BETA * kl
    config = ReinforceConfig(
        kl_coefficient=BETA, kl_reduction="mean", kl_estimator="abs", leave_out_truncated=True,
        loss_aggregation="seq-mean-token-mean",
    )  # fmt: skip
    assert torch.allclose(t.experience.penalised(BETA, "mean"), rewards, atol=1e-6)
    baseline = nemo_baseline(t.prompts, rewards, t.is_end.float())
    losses = mean_of(-t.logprobs * (rewards - baseline)[:, None], t.mask) * t.is_end
    advantages, _ = reinforce_advantages(t.experience, config, running=None)  # type: ignore[arg-type]
    mask = t.experience.mask
    aggregation = Aggregation(config.loss_aggregation, GlobalCounts.of(mask))
    loss, _ = reinforce_loss(t.experience.logprobs, advantages, mask, aggregation)
    assert loss.item() == pytest.approx(losses.mean().item(), abs=1e-6)
    assert (loss == 0) == (ended == "none")


@pytest.mark.parametrize("normalises", [False, True])
def test_ppo(normalises: bool) -> None:
    t = tables("some")
    gamma, lam = 0.9, 0.8
    rewards = torch.zeros_like(t.values)
    rewards[torch.arange(8), t.response_lengths - 2] = t.rewards
    rewards = (rewards - BETA * (t.logprobs - t.init_logprobs).abs()) * t.mask
    values, advantages, last = t.values * t.mask, torch.zeros_like(t.values), torch.zeros(8)
    for i in reversed(range(values.shape[1])):
        following = values[:, i + 1] if i + 1 < values.shape[1] else 0.0
        last = rewards[:, i] + gamma * following - values[:, i] + gamma * lam * last
        advantages[:, i] = last
    returns = advantages + values
    if normalises:
        taken = advantages[t.mask.bool()]
        advantages = (advantages - taken.mean()) * torch.rsqrt(taken.var(correction=0) + 1e-8)
    config = PPOConfig(
        kl_coefficient=BETA, kl_estimator="abs", gamma=gamma, lam=lam, whiten_advantages=normalises,
        loss_aggregation="seq-mean-token-mean",
    )  # fmt: skip
    got, target = ppo_advantages(t.experience, config)
    assert torch.allclose(got, t.of_responses(advantages), atol=1e-5)
    assert torch.allclose(target, t.of_responses(returns), atol=1e-5)

    now = t.logprobs + 0.3 * torch.sin(torch.arange(t.logprobs.shape[1]))
    ratios = (now - t.logprobs).exp()
    losses = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.2))
    mask = t.experience.mask
    loss, _ = ppo_loss(
        t.of_responses(now),
        t.experience.logprobs,
        got,
        mask,
        Aggregation(config.loss_aggregation, GlobalCounts.of(mask)),
    )
    assert loss.item() == pytest.approx(mean_of(losses, t.mask).mean().item(), abs=1e-5)
