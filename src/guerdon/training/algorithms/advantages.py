"""Advantages: how much better than expected each action was, by reward baselines or by GAE.

They are computed once for a whole rollout, before it is split over ranks: half a group would have the wrong baseline.
Nothing here carries a gradient. Sums are taken in float64; results are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from guerdon.training.algorithms.masking import (
    MaskedMoments,
    Sums,
    check_known,
    check_samples,
    check_tokens,
    fill_left_out,
)

ADVANTAGE_ESTIMATORS = ("none", "mean", "rloo", "grpo", "dr_grpo", "reinforce++")
"""The names that `estimate_advantages` knows. GAE, which needs a critic, is a function of its own."""

STD_EPSILON = 1e-4  # TRL's, beside the standard deviation of a group
VARIANCE_EPSILON = 1e-8  # beside the variance in whitening


@dataclass(frozen=True, slots=True)
class RunningMean(Sums):
    """The rewards so far, as sums; the baseline of the estimator "mean"."""

    sum_rewards: float = 0.0
    num_rewards: float = 0.0

    @property
    def mean(self) -> float:
        """The mean reward; 0 without any."""
        return self.sum_rewards / self.num_rewards if self.num_rewards > 0 else 0.0


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, moments: MaskedMoments) -> Tensor:
    """Shifts and scales to mean 0 and variance 1: `(A - mean) / sqrt(variance + 1e-8)`, as PPO in OpenAI's `baselines`.

    `values`, `mask` and the result are float32, all `[T]` or all `[B, T]`; the result is 0 where the mask is. `moments`
    are those of the whole rollout, over all ranks. Raises ValueError if shapes or dtypes differ.
    """
    check_tokens({"values": values, "mask": mask})
    _, values = fill_left_out(mask, values)
    whitened = (values.double() - moments.mean) / math.sqrt(moments.variance + VARIANCE_EPSILON)
    return whitened.masked_fill(~(mask > 0), 0.0).float()


@torch.no_grad()
def rloo(rewards: Tensor, groups: Tensor, is_counted: Tensor) -> Tensor:
    """REINFORCE leave-one-out: each reward minus the mean of the others in its group (Kool et al., 2019; Ahmadian et
    al., 2024).

        b_i = (sum_j m_j R_j - m_i R_i) / (M - m_i)      A_i = m_i * (R_i - b_i)

    m is `is_counted`, M its sum over the group; A is 0 if M - m_i is. `rewards` is float32 `[B]`, not read if not
    counted; `groups` int64 `[B]`, the id of each sample's prompt, in any order; `is_counted` bool `[B]`. The result is
    float32 `[B]`. Raises ValueError for other shapes or dtypes and for a counted reward that is not finite.
    """
    rewards = _counted_rewards(rewards, groups, is_counted)
    counts = is_counted.double()
    num_others = _group_sums(counts, groups) - counts
    baselines = (_group_sums(rewards, groups) - rewards) / num_others.clamp(min=1)
    return torch.where(is_counted & (num_others > 0), rewards - baselines, 0.0).float()


@torch.no_grad()
def group_mean(rewards: Tensor, groups: Tensor, is_counted: Tensor, scale_by_std: bool) -> Tensor:
    """Each reward minus the mean of its group, itself included; with `scale_by_std` divided by the group's std.

        A_i = m_i * (R_i - mean)            Dr.GRPO (Liu et al., 2025)
        A_i = m_i * (R_i - mean) / (std + 1e-4)      GRPO (Shao et al., 2024; the epsilon and M - 1 in std are TRL's)

    Mean and std are over the counted samples of the group; a single one gets 0. Arguments, result and errors are those
    of `rloo`.
    """
    rewards = _counted_rewards(rewards, groups, is_counted)
    counts = is_counted.double()
    num_counted = _group_sums(counts, groups)
    deviations = (rewards - _group_sums(rewards, groups) / num_counted.clamp(min=1)) * counts
    if scale_by_std:
        variances = _group_sums(deviations.square(), groups) / (num_counted - 1).clamp(min=1)
        deviations = deviations / (variances.sqrt() + STD_EPSILON)
    return deviations.float()


@torch.no_grad()
def estimate_advantages(
    estimator: str,
    rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    is_end: Tensor | None = None,
    running: RunningMean = RunningMean(),
) -> tuple[Tensor, RunningMean]:
    """Returns the advantage of every token from one reward per sequence, by the estimator's name, and the next running
    mean.

        none         A_i = R_i                                     Williams, 1992
        mean         A_i = R_i - mean of earlier calls' rewards    Sutton, 1984: reinforcement comparison
        rloo         see `rloo`
        grpo         see `group_mean`, with std
        dr_grpo      see `group_mean`, without
        reinforce++  A_i = R_i, whitened over all tokens           Hu, 2025

    `rewards` is float32 `[B]`, with any KL penalty already subtracted; `groups` int64 `[B]`, the ids of the prompts;
    `mask` float32 `[B, T]`. If `is_end` (bool `[B]`) is given, samples for which it is False do not count: they are in
    no baseline and have advantage 0. `running` is the last call's result; only "mean" reads and updates it. The result
    is float32 `[B, T]`, 0 where the mask is. Raises ValueError for an unknown name, other shapes or dtypes, and a
    counted reward that is not finite.
    """
    check_known("advantage estimator", estimator, ADVANTAGE_ESTIMATORS)
    check_tokens({"mask": mask}, rows_only=True)
    is_counted = torch.ones_like(rewards, dtype=torch.bool) if is_end is None else is_end
    check_samples({"rewards": (rewards, torch.float32), "is_end": (is_counted, torch.bool)}, len(mask))
    counted = _counted_rewards(rewards, groups, is_counted)
    if estimator == "rloo":
        advantages = rloo(rewards, groups, is_counted)
    elif estimator in ("grpo", "dr_grpo"):
        advantages = group_mean(rewards, groups, is_counted, scale_by_std=estimator == "grpo")
    elif estimator == "mean":
        # Earlier calls' rewards only: a baseline that contains a sample's own reward is biased.
        advantages = torch.where(is_counted, counted - running.mean, 0.0).float()
        running = running + RunningMean(counted.sum().item(), float(is_counted.sum()))
    else:
        advantages = counted.float()
    result = torch.where(mask > 0, advantages.unsqueeze(-1), 0.0)
    if estimator == "reinforce++":
        counted_mask = mask.masked_fill(~is_counted.unsqueeze(-1), 0.0)
        result = whiten(result, counted_mask, MaskedMoments.of(result, counted_mask))
    return result, running


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float | Tensor = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates, and the returns that the critic learns (Schulman et al., 2016).

        delta_t = r_t + gamma V_{t+1} - V_t      A_t = delta_t + gamma lam A_{t+1}      returns = A + V

    V and A are 0 after the last token. `rewards` (of `token_rewards`), `values`, `mask` and both results are float32
    `[B, T]`. Masked tokens are skipped as if absent, as in verl, so that a tool's output between two turns neither cuts
    nor discounts. Results are 0 where the mask is. `lam` is a number, or float64 `[B]`, one for each sequence, as of
    `adaptive_lams`. Raises ValueError for other shapes or dtypes and for `gamma` or `lam` outside [0, 1].
    """
    check_tokens({"rewards": rewards, "values": values, "mask": mask}, rows_only=True)
    if isinstance(lam, Tensor):
        check_samples({"lam": (lam, torch.float64)}, len(mask))
    lams = lam.tolist() if isinstance(lam, Tensor) else [lam]
    for name, factor in (("gamma", gamma), *(("lam", one) for one in lams)):
        if not 0 <= factor <= 1:
            raise ValueError(f"{name} must be within 0 and 1, not {factor}")
    is_token = mask > 0
    _, rewards, values = (tensor.double() for tensor in fill_left_out(mask, rewards, values))
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(is_token[:, t], delta + gamma * lam * next_advantage, 0.0)
        next_value = torch.where(is_token[:, t], values[:, t], next_value)
        next_advantage = torch.where(is_token[:, t], advantages[:, t], next_advantage)
    return advantages.float(), (advantages + values).float()


def adaptive_lams(mask: Tensor, alpha: float) -> Tensor:
    """Returns VAPO's λ of each sequence, `1 - 1 / (alpha * l)` of its l tokens, and 0 where that is below 0.

    So the advantages of a long response reach back further (Yue et al., 2025, arXiv 2504.05118). `mask` is float32
    `[B, T]`, the result float64 `[B]`. Raises ValueError if `alpha` is not above 0.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, not {alpha}")
    check_tokens({"mask": mask}, rows_only=True)
    num_tokens = (mask > 0).sum(dim=1).double()
    return (1 - 1 / (alpha * num_tokens)).clamp(min=0.0)


def _counted_rewards(rewards: Tensor, groups: Tensor, is_counted: Tensor) -> Tensor:
    """Returns the checked rewards in float64, 0 for samples that do not count."""
    samples = {
        "rewards": (rewards, torch.float32),
        "groups": (groups, torch.int64),
        "is_counted": (is_counted, torch.bool),
    }
    check_samples(samples)
    counted = torch.where(is_counted, rewards, 0.0).double()
    if not counted.isfinite().all():
        i = int((~counted.isfinite()).nonzero()[0])
        raise ValueError(f"the reward of sample {i} is {rewards[i].item()}: a sample without a reward must not count")
    return counted


def _group_sums(values: Tensor, groups: Tensor) -> Tensor:
    """Returns the sum over its group for each sample."""
    _, places = groups.unique(return_inverse=True)
    return values.new_zeros(len(values)).index_add_(0, places, values)[places]
