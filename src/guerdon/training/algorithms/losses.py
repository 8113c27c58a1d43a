"""Losses over one micro-batch, divided by a count of the whole global batch, so that micro-batches simply add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from guerdon.training.algorithms.masking import Sums, check_tokens, fill_left_out

NO_VARIANCE = 1e-13
"""Returns whose variance is below this share of their mean square are one number, as far as float32 can tell."""


@dataclass(frozen=True, slots=True)
class ValueLossStats(Sums):
    """Sums over the masked tokens, weighted by the mask; those of several micro-batches add up by `+`.

    `sum_loss` is the loss before its division, `sum_clipped` counts the tokens where the clipped term was the larger;
    the others are first and second moments of the returns and of the errors, return less value.
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
        """The share of tokens whose value the clipping held back; 0 without any token."""
        return self.sum_clipped / self.sum_mask if self.sum_mask > 0 else 0.0

    @property
    def explained_variance(self) -> float:
        """1 - Var(return - value) / Var(return); NaN where the returns do not vary."""
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
    """The value loss of PPO, which holds a value within `clip` of what it was when the rollout was made.

        v_clip = prev + clamp(v - prev, -clip, clip)
        loss = 0.5 * sum(mask * max((v - ret)^2, (v_clip - ret)^2)) / max(denominator, 1)

    The loss of Schulman et al.'s PPO in OpenAI's `baselines`, over a masked sum as NeMo-Aligner and TRL take it. All
    four tensors are float32 of one shape, `[T]` or `[B, T]`; where `mask` is 0 nothing is read, be it NaN. A `clip`
    of 0 or less bounds nothing. `denominator` is the mask's sum over the whole global batch: losses of its
    micro-batches add up to its loss. Raises ValueError where shapes or dtypes differ.
    """
    check_tokens({"values": values, "prev_values": prev_values, "returns": returns, "mask": mask})
    mask, values, prev_values, returns = fill_left_out(mask, values, prev_values, returns)
    losses = (values - returns).square()
    is_clipped = torch.zeros_like(mask, dtype=torch.bool)
    if clip > 0:
        held_back = (prev_values + (values - prev_values).clamp(-clip, clip) - returns).square()
        # Within the clip the two differ by rounding alone.
        is_beyond = (values.detach() - prev_values).abs() > clip
        is_clipped = is_beyond & (held_back.detach() > losses.detach())
        losses = torch.maximum(losses, held_back)
    total = 0.5 * (mask * losses).sum()
    return total / max(denominator, 1.0), _stats(values.detach(), returns, mask, total.detach(), is_clipped)


def _stats(values: Tensor, returns: Tensor, mask: Tensor, total: Tensor, is_clipped: Tensor) -> ValueLossStats:
    weight, returns = mask.double(), returns.double()
    errors = returns - values.double()
    sums = torch.stack(
        [
            weight.sum(),
            total.double(),
            (weight * is_clipped).sum(),
            (weight * returns).sum(),
            (weight * returns.square()).sum(),
            (weight * errors).sum(),
            (weight * errors.square()).sum(),
        ]
    )
    return ValueLossStats(*sums.tolist())  # one transfer from the device, not seven
