"""KL to the reference: estimators, and rewards with the KL penalty.

Indices are those of the actions: entry t of a row is about token t + 1. All masks are float32 weights; where a mask is
0 nothing is read, even if it is NaN or infinite, and results are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from guerdon.training.algorithms.masking import check_known, check_samples, check_tokens, fill_left_out

LOG_RATIO_CLAMP = 20.0
"""Log-ratios are clamped to this, as in verl: beyond it exp only overflows."""

KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: x.square() / 2,
    "k3": lambda x: torch.expm1(-x) + x,  # exp(-x) - 1 would lose the digits of a small x
    "abs": lambda x: x.abs(),
}
"""By name: the estimate of a token's KL as a function of x = logp - logp_ref."""

KL_REDUCTIONS = ("sum", "mean")
"""How the tokens' KL is reduced to a sequence's."""


def clamped_log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Returns `clamp(logprobs - other_logprobs, -20, 20)`, for any shape; the gradient is 0 beyond the bounds."""
    return (logprobs - other_logprobs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Estimates KL(policy || reference) at each token that the policy sampled; differentiable in `logprobs`.

        x = clamp(logp - ref, -20, 20)
        k1 = x      k2 = x^2 / 2      k3 = exp(-x) - 1 + x      abs = |x|

    k1, k2, k3 are Schulman's ("Approximating KL Divergence", 2020): k1 is unbiased and may be negative, k3 is unbiased
    and never negative, k2 is biased and never negative. `abs` is NeMo-Aligner's default and does not estimate a KL. As
    a part of a loss, k2's expected gradient is the KL's and k1's is 0, so that k1 belongs into rewards. All tensors and
    the result are float32, all `[T]` or all `[B, T]`; the result is 0 where the mask is. Raises ValueError for other
    shapes or dtypes, or an unknown estimator.
    """
    check_known("KL estimator", estimator, KL_ESTIMATORS)
    check_tokens({"logprobs": logprobs, "ref_logprobs": ref_logprobs, "mask": mask})
    _, logprobs, ref_logprobs = fill_left_out(mask, logprobs, ref_logprobs)
    return KL_ESTIMATORS[estimator](clamped_log_ratio(logprobs, ref_logprobs))


def kl_per_sequence(kl: Tensor, mask: Tensor, reduction: str = "sum") -> Tensor:
    """Reduces the tokens' estimates, `[B, T]`, to each sequence's, `[B]`, all float32.

        sum: kl_i = sum_t mask_it * kl_it      mean: kl_i = sum_t mask_it * kl_it / sum_t mask_it

    log p(response) is a sum over its tokens, and so is its KL. The mean is NeMo-Aligner's in REINFORCE: each token of a
    response twice as long is penalised half as much. A row without any token has 0. Raises ValueError for other shapes
    or dtypes, or an unknown reduction.
    """
    check_known("KL reduction", reduction, KL_REDUCTIONS)
    check_tokens({"kl": kl, "mask": mask}, rows_only=True)
    mask, kl = fill_left_out(mask, kl)
    sums = (mask * kl).sum(-1)
    if reduction == "sum":
        return sums
    weights = mask.sum(-1)
    return sums / torch.where(weights > 0, weights, 1.0)


def penalised_rewards(rewards: Tensor, kl: Tensor | None, beta: float) -> Tensor:
    """Returns the reward of each sequence with the KL penalty, `R_i = reward_i - beta * kl_i` (Ouyang et al., 2022).

    `rewards`, `kl` (of `kl_per_sequence`) and the result are float32 `[B]`. If `beta` is 0, `kl` is not read and may be
    None. Raises ValueError for other shapes or dtypes, for a `beta` that is negative or not finite, and for a missing
    `kl`.
    """
    _check_beta(beta)
    check_samples({"rewards": (rewards, torch.float32)})
    if beta == 0:
        return rewards.clone()
    if kl is None:
        raise ValueError(f"kl is needed because beta is {beta}; it may be None only if beta is 0")
    check_samples({"kl": (kl, torch.float32)}, len(rewards))
    return rewards - beta * kl


def token_rewards(rewards: Tensor, kl: Tensor | None, mask: Tensor, beta: float) -> Tensor:
    """Returns the reward of each action for GAE: the KL penalty at every token, and the sequence's reward at the last
    one.

        r_t = reward * [t is the last with mask above 0] - beta * kl_t

    As in Ouyang et al., 2022, and NeMo-Aligner's PPO. `rewards` is float32 `[B]`; `kl` (of `kl_per_token`; not read and
    possibly None if `beta` is 0), `mask` and the result are float32 `[B, T]`. A row without any token gets no reward.
    Raises ValueError as `penalised_rewards`.
    """
    _check_beta(beta)
    check_tokens({"mask": mask}, rows_only=True)
    check_samples({"rewards": (rewards, torch.float32)}, len(mask))
    is_token = mask > 0
    # The last token is the one that has no other from itself onwards, counted from the right.
    is_last = is_token & (is_token.flip(-1).cumsum(-1).flip(-1) == 1)
    result = torch.where(is_last, rewards.unsqueeze(-1), 0.0)
    if beta == 0:
        return result
    if kl is None:
        raise ValueError(f"kl is needed because beta is {beta}; it may be None only if beta is 0")
    check_tokens({"kl": kl, "mask": mask}, rows_only=True)
    _, kl = fill_left_out(mask, kl)
    return result - beta * kl


def _check_beta(beta: float) -> None:
    if not (beta >= 0 and math.isfinite(beta)):
        raise ValueError(f"beta must be finite and not negative, not {beta}")
