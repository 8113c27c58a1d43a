"""Log-probs of chosen tokens, and entropies, from a table of logits, a few rows at a time.

Legend: N tokens, V logits of each.

By `log_softmax`, `gather` and a product for the entropies PyTorch makes up to three more tables of that size forward
and two backward, each written to memory and read again. Here a few rows go all the way at once, within a processor's
caches, and only the logits are kept: backward the gradient is made of them, the one other table that there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

PART = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits that are worked on at a time: on a CPU as many as its caches hold, on a GPU enough to keep it busy."""

_IMPOSSIBLE = -200.0
"""A log-prob below which the probability is 0 in float32; a product of that with -inf would be no number."""


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, *, with_entropies: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Of logits `[N,V]`, divided by the temperature, the log-probs of targets int64 `[N]`, and the entropies or None.

    Both are float32 `[N]`, whatever the logits' dtype, and differentiable once.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits, targets, temperature, with_entropies)
    return logprobs, entropies if with_entropies else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        entropies = torch.empty_like(logprobs) if with_entropies else None
        normalisers = torch.empty_like(logprobs)
        for rows in _parts(logits):
            part = _scaled(logits[rows], temperature)
            table = torch.log_softmax(part, -1)
            # By the largest logit: the target's own may be -inf.
            normalisers[rows] = part.amax(-1) - table.amax(-1)
            logprobs[rows] = table.gather(1, targets[rows, None])[:, 0]
            if entropies is not None:
                entropies[rows] = -(table.exp().mul_(table.clamp_(min=_IMPOSSIBLE))).sum(-1)
        ctx.save_for_backward(logits, targets, normalisers, entropies)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slopes: Tensor, entropy_slopes: Tensor | None) -> tuple[Tensor, None, None, None]:
        """With p the softmax, e the one-hot target and H the entropy: slope (e - p) - entropy slope p (log p + H)."""
        logits, targets, normalisers, entropies = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        slopes = (slopes / ctx.temperature)[:, None]
        for rows in _parts(logits):
            table = _scaled(logits[rows], ctx.temperature) - normalisers[rows, None]
            if entropies is None or entropy_slopes is None:
                part = table.exp_().mul_(-slopes[rows])
            else:
                by_entropy = entropy_slopes[rows, None] / ctx.temperature
                part = table.exp()
                part.mul_(
                    table.clamp_(min=_IMPOSSIBLE).add_(entropies[rows, None]).mul_(-by_entropy).sub_(slopes[rows])
                )
            gradient[rows] = part.scatter_add_(1, targets[rows, None], slopes[rows])
        return gradient, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _parts(logits: Tensor) -> Iterator[slice]:
    """Slices of so many rows as are worked on at a time."""
    size = max(1, PART.get(logits.device.type, 1 << 24) // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))
