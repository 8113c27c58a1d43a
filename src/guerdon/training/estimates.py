"""The returns that a critic learns and the advantages that its policy learns, from rewards and the critic's values."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from guerdon.critic_core import TrainRequest
from guerdon.errors import TrainFailed
from guerdon.training.algorithms.advantages import adaptive_lams, gae


def read_rows(tokens: np.ndarray, mask: np.ndarray, num_more: int) -> dict[int, np.ndarray]:
    """Returns the rows that have a masked token, by number, cut `num_more` tokens after the last masked one."""
    counts, width = mask > 0, mask.shape[1]
    found = np.flatnonzero(counts.any(axis=1)).tolist()
    return {i: tokens[i, : width - int(counts[i, ::-1].argmax()) + num_more] for i in found}


def with_estimates(request: TrainRequest, values: np.ndarray) -> TrainRequest:
    """Returns the request with `prev_values`, `returns` and `advantages`, 0 where the mask is.

    `values` is float32 `[N, T-1]`, read only if the mask is above 0. Raises TrainFailed if one of those is not finite.
    """
    rule, counts = request.gae, request.mask > 0
    assert request.rewards is not None and rule is not None
    if not np.isfinite(values[counts]).all():
        row = int((counts & ~np.isfinite(values)).any(axis=1).argmax())
        raise TrainFailed(f"the critic has no finite values for row {row}: nothing was changed", 0)
    of_tokens = request.rewards
    if of_tokens.shape != counts.shape:  # one of a whole row is its last counted token's
        is_last = counts & (np.cumsum(counts[:, ::-1], axis=1)[:, ::-1] == 1)
        of_tokens = np.where(is_last, of_tokens, np.float32(0))
    mask, rewards, own = map(torch.tensor, (request.mask, of_tokens, values))
    advantages, returns = gae(rewards, own, mask, rule.gamma, rule.lam_critic)
    if rule.lam_alpha is not None:
        advantages, _ = gae(rewards, own, mask, rule.gamma, adaptive_lams(mask, rule.lam_alpha))
    elif rule.lam_policy is not None:
        advantages, _ = gae(rewards, own, mask, rule.gamma, rule.lam_policy)
    return dataclasses.replace(
        request,
        prev_values=np.where(counts, values, np.float32(0)),
        returns=returns.numpy(),
        advantages=advantages.numpy(),
    )
