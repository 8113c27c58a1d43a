"""Losses of policy and critic over one micro-batch, divided by counts of the whole global batch, so that they add up.

The policy's tensors are float32 `[B, T]`, entry t of a row about the action token t + 1. Masks are weights; where a
mask is 0 nothing is read, even if it is NaN or infinite, and the gradient is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from guerdon.training.algorithms.kl import KL_ESTIMATORS, clamped_log_ratio
from guerdon.training.algorithms.masking import Sums, check_known, check_tokens, fill_left_out

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr_grpo")
"""The names of `Aggregation`; the first three are verl's."""
NO_VARIANCE = 1e-13
"""If the returns' variance is below this share of their mean square, they are equal up to float32's rounding."""


# ------------------------------------------------------------------------------------------- the policy's


@dataclass(frozen=True, slots=True)
class GlobalCounts(Sums):
    """The counts over the whole global batch that a loss is divided by."""

    num_tokens: float = 0.0
    num_sequences: float = 0.0

    @classmethod
    def of(cls, mask: Tensor) -> GlobalCounts:
        """Returns a mask's sum, and its number of rows with any token; raises ValueError unless float32 `[B, T]`."""
        check_tokens({"mask": mask}, rows_only=True)
        filled = fill_left_out(mask)[0]
        return cls(filled.double().sum().item(), float((filled > 0).any(-1).sum().item()))


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Reduces the tokens' losses to one number, by name, divided by the counts of the whole global batch.

        token-mean            sum_i sum_t m_it l_it / num_tokens                       DAPO (Yu et al., 2025)
        seq-mean-token-mean   sum_i (sum_t m_it l_it / sum_t m_it) / num_sequences     GRPO (Shao et al., 2024)
        seq-mean-token-sum    sum_i sum_t m_it l_it / num_sequences                    the likelihood of whole responses
        dr_grpo               sum_i sum_t m_it l_it / (num_sequences * max_length)     Dr.GRPO (Liu et al., 2025)

    A count below 1 counts as 1, so that a batch without any token has loss 0. `max_length`, the longest response that
    may be generated, is used by "dr_grpo" only. Raises ValueError for an unknown name, or if "dr_grpo" has no
    `max_length` above 0.
    """

    name: str
    counts: GlobalCounts
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_known("loss aggregation", self.name, AGGREGATIONS)
        if self.name == "dr_grpo" and not (self.max_length and self.max_length > 0):
            raise ValueError(f"dr_grpo divides by max_length, which must be above 0, not {self.max_length}")

    def __call__(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Returns this micro-batch's share of the loss; `losses` and `mask` are float32 `[B, T]`, else ValueError."""
        check_tokens({"losses": losses, "mask": mask}, rows_only=True)
        mask, losses = fill_left_out(mask, losses)
        sums = (mask * losses).sum(-1)
        if self.name == "token-mean":
            return sums.sum() / max(self.counts.num_tokens, 1.0)
        if self.name == "seq-mean-token-mean":
            weights = mask.sum(-1)
            sums = sums / weights.masked_fill(weights == 0, 1.0)
        elif self.name == "dr_grpo" and self.max_length:
            sums = sums / self.max_length
        return sums.sum() / max(self.counts.num_sequences, 1.0)


@dataclass(frozen=True, slots=True)
class PolicyLossStats(Sums):
    """Sums over the masked tokens, weighted by the mask; those of several micro-batches add up by `+`.

    `loss` is the micro-batch's share of the loss, already divided; `sum_clipped` counts the tokens whose clipped term
    was larger, `sum_outside` those outside of the trust region. Without importance weights every weight is 1.
    """

    sum_mask: float = 0.0
    loss: float = 0.0
    sum_clipped: float = 0.0
    sum_ratios: float = 0.0
    sum_kl: float = 0.0
    sum_weights: float = 0.0
    sum_outside: float = 0.0

    @property
    def clip_fraction(self) -> float:
        """The share of clipped tokens; 0 without any token."""
        return self._mean(self.sum_clipped)

    @property
    def mean_ratio(self) -> float:
        """The mean ratio of new to old probability; 0 without any token."""
        return self._mean(self.sum_ratios)

    @property
    def approx_kl(self) -> float:
        """The k3 estimate of KL(old || new), from tokens of the old policy; 0 without any token."""
        return self._mean(self.sum_kl)

    @property
    def mean_weight(self) -> float:
        """The mean importance weight after truncation; 0 without any token."""
        return self._mean(self.sum_weights)

    @property
    def outside_fraction(self) -> float:
        """The share of tokens outside of the trust region; 0 without any token."""
        return self._mean(self.sum_outside)

    def _mean(self, total: float) -> float:
        return total / self.sum_mask if self.sum_mask > 0 else 0.0


@torch.no_grad()
def truncated_importance_weights(
    old_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, cap: float = 2.0
) -> Tensor:
    """Returns each token's weight for the difference between the trainer's log-probs and the sampling engine's.

        w = min(exp(old - engine), cap), without gradient

    Truncated importance sampling (Ionides, 2008), as used by Yao et al. ("Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training", 2025). All tensors and the result are float32, all `[T]` or all `[B, T]`; the result is
    0 where the mask is. Raises ValueError for other shapes or dtypes and for a `cap` that is not above 0.
    """
    if not cap > 0:
        raise ValueError(f"cap must be above 0, not {cap}")
    check_tokens({"old_logprobs": old_logprobs, "engine_logprobs": engine_logprobs, "mask": mask})
    _, old_logprobs, engine_logprobs = fill_left_out(mask, old_logprobs, engine_logprobs)
    weights = clamped_log_ratio(old_logprobs, engine_logprobs).exp().clamp(max=cap)
    return weights.masked_fill(~(mask > 0), 0.0)


@torch.no_grad()
def outside_trust_region(logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Returns whether the ratio of each token's probability to that at which it was sampled is outside [low, high].

        ratio = exp(clamp(logp - engine, -20, 20))

    `logprobs` are the trained policy's at this very update, not those before the first, so that the ratio holds both
    how far the policy has moved and how the engine differs from the trainer. Tokens outside are left out of the loss:
    GLM-5's double-sided importance sampling ("DIS"; arXiv 2602.15763) as a mask. All tensors are float32, all `[T]` or
    all `[B, T]`, the result is bool, False where the mask is 0, True if a counted ratio is NaN. Raises ValueError for
    other shapes or dtypes, and unless 0 <= low < 1 < high.
    """
    if not 0 <= low < 1 < high:
        raise ValueError(f"the trust region must hold 1 between two ratios of at least 0, not [{low}, {high}]")
    check_tokens({"logprobs": logprobs, "engine_logprobs": engine_logprobs, "mask": mask})
    _, logprobs, engine_logprobs = fill_left_out(mask, logprobs, engine_logprobs)
    ratios = clamped_log_ratio(logprobs, engine_logprobs).exp()
    return (mask > 0) & ~((ratios >= low) & (ratios <= high))


def reinforce_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    aggregation: Aggregation,
    *,
    weights: Tensor | None = None,
    is_outside: Tensor | None = None,
    entropies: Tensor | None = None,
    entropy_coefficient: float = 0.0,
) -> tuple[Tensor, PolicyLossStats]:
    """The policy-gradient loss, for one optimiser step per rollout (Williams, 1992).

        l_t = -w_t * logp_t * A_t - entropy_coefficient * H_t

    `weights` (w, of `truncated_importance_weights`) are optional, and so are `entropies` (H, of the policy at each
    token), which are not read if the coefficient is 0; only `logprobs` and `entropies` get gradients. Tokens that
    `is_outside` (bool, of `outside_trust_region`) names keep their entropy bonus only, and count in the aggregation as
    before. Returns the share of the loss and its sums. Raises ValueError if shapes or dtypes differ, or required
    entropies are missing.
    """
    check_tokens({"logprobs": logprobs, "advantages": advantages, "mask": mask}, rows_only=True)
    mask, logprobs, advantages = fill_left_out(mask, logprobs, advantages.detach())
    ratios = torch.ones_like(mask)
    is_clipped, kl = torch.zeros_like(mask), torch.zeros_like(mask)
    extras = (weights, is_outside, entropies, entropy_coefficient)
    return _weighted_total(-logprobs * advantages, mask, aggregation, *extras, ratios, is_clipped, kl)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    aggregation: Aggregation,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weights: Tensor | None = None,
    is_outside: Tensor | None = None,
    entropies: Tensor | None = None,
    entropy_coefficient: float = 0.0,
) -> tuple[Tensor, PolicyLossStats]:
    """The clipped surrogate, for several optimiser steps per rollout (PPO; Schulman et al., 2017).

        ratio = exp(clamp(logp - logp_old, -20, 20))
        l_t = w_t * max(-A_t ratio, -A_t clamp(ratio, 1 - clip_low, 1 + clip_high)) - entropy_coefficient * H_t

    A `clip_high` above `clip_low` is DAPO's clip-higher (Yu et al., 2025); an infinite one disables clipping.
    `old_logprobs` are the trainer's own before the first step on the rollout. Otherwise as `reinforce_loss`; also
    raises ValueError if a clip is not above 0.
    """
    for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not clip > 0:
            raise ValueError(f"{name} must be above 0, not {clip}")
    given = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "mask": mask}
    check_tokens(given, rows_only=True)
    mask, logprobs, old_logprobs, advantages = fill_left_out(mask, logprobs, old_logprobs.detach(), advantages.detach())
    log_ratios = clamped_log_ratio(logprobs, old_logprobs)
    ratios = log_ratios.exp()
    free, held_back = -advantages * ratios, -advantages * ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped = held_back.detach() > free.detach()
    # The old policy drew the tokens, so that its log-prob comes first in the ratio.
    kl = KL_ESTIMATORS["k3"](-log_ratios.detach())
    extras = (weights, is_outside, entropies, entropy_coefficient)
    return _weighted_total(torch.maximum(free, held_back), mask, aggregation, *extras, ratios.detach(), is_clipped, kl)


def _weighted_total(
    losses: Tensor,
    mask: Tensor,
    aggregation: Aggregation,
    weights: Tensor | None,
    is_outside: Tensor | None,
    entropies: Tensor | None,
    entropy_coefficient: float,
    ratios: Tensor,
    is_clipped: Tensor,
    kl: Tensor,
) -> tuple[Tensor, PolicyLossStats]:
    """Weighs the losses, subtracts the entropy bonus and aggregates; `mask` must be filled already."""
    if not math.isfinite(entropy_coefficient):
        raise ValueError(f"entropy_coefficient must be finite, not {entropy_coefficient}")
    if weights is None:
        weights = torch.ones_like(mask)
    else:
        check_tokens({"weights": weights, "mask": mask}, rows_only=True)
        weights = fill_left_out(mask, weights.detach())[1]
        losses = weights * losses
    if is_outside is not None:
        losses = losses.masked_fill(is_outside, 0.0)
    if entropy_coefficient:
        if entropies is None:
            raise ValueError(f"entropies are needed because entropy_coefficient is {entropy_coefficient}")
        check_tokens({"entropies": entropies, "mask": mask}, rows_only=True)
        losses = losses - entropy_coefficient * fill_left_out(mask, entropies)[1]
    loss = aggregation(losses, mask)
    each = [is_clipped, ratios, kl, weights]
    if is_outside is not None:
        each.append(is_outside)
    sums = [(mask.double() * values).sum() for values in each]
    stats = torch.stack([mask.double().sum(), loss.detach().double(), *sums])
    return loss, PolicyLossStats(*stats.tolist())  # one transfer from the device, not six


# ------------------------------------------------------------------------------------------- the critic's


@dataclass(frozen=True, slots=True)
class ValueLossStats(Sums):
    """Sums over the masked tokens, weighted by the mask; those of several micro-batches add up by `+`.

    `sum_loss` is the undivided loss, `sum_clipped` counts the tokens whose clipped term was larger; the others are
    first and second moments of the returns and of the errors, return minus value.
    """

    sum_mask: float = 0.0
    sum_loss: float = 0.0
    sum_clipped: float = 0.0
    sum_returns: float = 0.0
    sum_returns_squared: float = 0.0
    sum_errors: float = 0.0
    sum_errors_squared: float = 0.0

    @property
    def clip_fraction(self) -> float:
        """The share of tokens with a clipped value; 0 without any token."""
        return self.sum_clipped / self.sum_mask if self.sum_mask > 0 else 0.0

    @property
    def return_mean(self) -> float:
        """The mean return; NaN without any token."""
        return self.sum_returns / self.sum_mask if self.sum_mask > 0 else math.nan

    @property
    def value_mean(self) -> float:
        """The mean value; NaN without any token."""
        return (self.sum_returns - self.sum_errors) / self.sum_mask if self.sum_mask > 0 else math.nan

    @property
    def explained_variance(self) -> float:
        """1 - Var(return - value) / Var(return); NaN if the returns do not vary."""
        if self.sum_mask <= 0:
            return math.nan
        mean_square = self.sum_returns_squared / self.sum_mask
        variance = mean_square - (self.sum_returns / self.sum_mask) ** 2
        if variance <= NO_VARIANCE * mean_square:
            return math.nan
        errors = self.sum_errors_squared / self.sum_mask - (self.sum_errors / self.sum_mask) ** 2
        return 1.0 - errors / variance


def clipped_value_loss(
    values: Tensor, prev_values: Tensor, returns: Tensor, mask: Tensor, clip: float, denominator: float
) -> tuple[Tensor, ValueLossStats]:
    """PPO's value loss, which clips a value to within `clip` of its value at rollout time.

        v_clip = prev + clamp(v - prev, -clip, clip)
        loss = 0.5 * sum(mask * max((v - ret)^2, (v_clip - ret)^2)) / max(denominator, 1)

    The loss of Schulman et al.'s PPO in OpenAI's `baselines`, over a masked sum as in NeMo-Aligner and TRL. All four
    tensors are float32 of one shape, `[T]` or `[B, T]`; where `mask` is 0 nothing is read, even if it is NaN. A `clip`
    of 0 or less disables clipping. `denominator` is the mask's sum over the whole global batch, so that its
    micro-batches' losses add up. Raises ValueError if shapes or dtypes differ.
    """
    check_tokens({"values": values, "prev_values": prev_values, "returns": returns, "mask": mask})
    mask, values, prev_values, returns = fill_left_out(mask, values, prev_values, returns)
    losses = (values - returns).square()
    is_clipped = torch.zeros_like(mask, dtype=torch.bool)
    if clip > 0:
        held_back = (prev_values + (values - prev_values).clamp(-clip, clip) - returns).square()
        # Within the clip the two differ only by rounding.
        is_beyond = (values.detach() - prev_values).abs() > clip
        is_clipped = is_beyond & (held_back.detach() > losses.detach())
        losses = torch.maximum(losses, held_back)
    total = 0.5 * (mask * losses).sum()
    weight, wanted = mask.double(), returns.double()
    errors = wanted - values.detach().double()
    sums = torch.stack(
        [
            weight.sum(),
            total.detach().double(),
            (weight * is_clipped).sum(),
            (weight * wanted).sum(),
            (weight * wanted.square()).sum(),
            (weight * errors).sum(),
            (weight * errors.square()).sum(),
        ]
    )
    return total / max(denominator, 1.0), ValueLossStats(*sums.tolist())  # one transfer from the device, not seven
