"""The policy's update on one step's experience: global batches, and the loss of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guerdon.actor.experience import Experience
from guerdon.actor.policy_group import PolicyGroup
from guerdon.actor.run_metrics import timed
from guerdon.settings.actors import LossConfig, RolloutConfig
from guerdon.training.algorithms import losses
from guerdon.training.algorithms.kl import kl_per_token
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, PolicyLossStats
from guerdon.training.algorithms.masking import MaskedMoments
from guerdon.training.policy_trainer import PolicyTrainer, StepReport

VLLM_IMPORTANCE_CAP = 2.0  # that of Yao et al., 2025


def update(
    policy: PolicyGroup | PolicyTrainer,
    experience: Experience,
    advantages: Tensor,
    config: LossConfig,
    sampling: RolloutConfig,
    metrics: dict[str, float],
    *,
    kl_coefficient: float = 0.0,
) -> None:
    """Makes all optimiser steps on one step's experience: one per global batch and epoch.

    `advantages` are float32 `[B, R]`. With a `kl_coefficient` the loss contains the KL penalty.
    """
    batches = global_batches(len(experience.rollouts), config)
    is_on_policy = config.epochs * len(batches) == 1
    cap = config.importance_cap
    if cap is None and sampling.engine == "vllm":
        cap = VLLM_IMPORTANCE_CAP
    weights = None
    if cap is not None:
        weights = losses.truncated_importance_weights(
            experience.logprobs, experience.engine_logprobs, experience.mask, cap
        )
    reports: list[StepReport] = []
    with timed(metrics, "seconds_update"):
        for _ in range(config.epochs):
            for members in batches:
                counts = GlobalCounts.of(experience.mask[torch.from_numpy(members)])
                aggregation = Aggregation(config.loss_aggregation, counts, sampling.max_new_tokens)
                loss = PolicyLoss.of(
                    experience, advantages, weights, members, aggregation, config, is_on_policy, kl_coefficient
                )
                reports.append(
                    policy.step(
                        [experience.rollouts[i].tokens for i in members],
                        experience.prompt_lengths[members],
                        loss,
                        temperature=sampling.temperature,
                        with_entropies=config.entropy_coefficient != 0,
                    )
                )
    metrics.update(advantage_metrics(advantages, experience.mask))
    metrics.update(_report_metrics(reports, is_on_policy, weights is not None, config.trust_region is not None))


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """The loss of one global batch, as `PolicyTrainer.step` asks for it, a micro-batch at a time.

    Nothing but data, so that it can be sent to other ranks: float32 `[B, R]` tables of the batch's rows, those None
    that this loss does not read. `aggregation` divides by the counts of all the rows. Without `old_logprobs` this is
    the only update on the experience; with `ref_logprobs` the loss has the KL's cost; with `engine_logprobs` tokens
    outside of the trust region have no gradient.
    """

    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    engine_logprobs: Tensor | None
    weights: Tensor | None
    aggregation: Aggregation
    config: LossConfig
    kl_coefficient: float

    @classmethod
    def of(
        cls,
        experience: Experience,
        advantages: Tensor,
        weights: Tensor | None,
        batch: np.ndarray,
        aggregation: Aggregation,
        config: LossConfig,
        is_on_policy: bool,
        kl_coefficient: float,
    ) -> PolicyLoss:
        """Builds the loss of the rows `batch`, int64, of tables like those of `experience`.

        `is_on_policy` is True if this is the only update on the experience.
        """
        at = torch.from_numpy(batch)
        return cls(
            mask=experience.mask[at],
            advantages=advantages[at],
            old_logprobs=None if is_on_policy else experience.logprobs[at],
            ref_logprobs=experience.ref_logprobs[at] if kl_coefficient > 0 else None,
            engine_logprobs=None if config.trust_region is None else experience.engine_logprobs[at],
            weights=None if weights is None else weights[at],
            aggregation=aggregation,
            config=config,
            kl_coefficient=kl_coefficient,
        )

    def __call__(
        self, logprobs: Tensor, entropies: Tensor | None, members: np.ndarray
    ) -> tuple[Tensor, PolicyLossStats]:
        """Returns the micro-batch's share of the loss, and its sums; `members` are its rows in the global batch."""
        at, width = torch.from_numpy(members), logprobs.shape[1]

        def rows_of(table: Tensor) -> Tensor:
            return table[at, :width].to(logprobs.device)

        config, mask, advantages = self.config, rows_of(self.mask), rows_of(self.advantages)
        about: dict[str, Any] = {"entropies": entropies, "entropy_coefficient": config.entropy_coefficient}
        about["weights"] = None if self.weights is None else rows_of(self.weights)
        if self.engine_logprobs is not None and config.trust_region is not None:
            low, high = config.trust_region
            about["is_outside"] = losses.outside_trust_region(logprobs, rows_of(self.engine_logprobs), mask, low, high)
        if self.old_logprobs is None:
            loss, stats = losses.reinforce_loss(logprobs, advantages, mask, self.aggregation, **about)
        else:
            about |= {"clip_low": config.clip_low, "clip_high": config.clip_high}
            old_logprobs = rows_of(self.old_logprobs)
            loss, stats = losses.ppo_loss(logprobs, old_logprobs, advantages, mask, self.aggregation, **about)
        if self.ref_logprobs is not None:
            kl = kl_per_token(logprobs, rows_of(self.ref_logprobs), mask, config.kl_estimator)
            loss = loss + self.kl_coefficient * self.aggregation(kl, mask)
            stats = replace(stats, loss=loss.item())
        return loss, stats


def _report_metrics(
    reports: list[StepReport], is_on_policy: bool, is_weighted: bool, has_trust_region: bool
) -> dict[str, float]:
    """Returns means over the optimiser steps, token metrics weighted by tokens; only those that the loss has."""
    stats = sum((report.stats for report in reports[1:]), reports[0].stats)
    norms = [report.grad_norm for report in reports if not report.skipped]
    metrics = {
        "loss": stats.loss / len(reports),
        "learning_rate": reports[-1].learning_rate,
        "skipped_steps": float(len(reports) - len(norms)),
    }
    if norms:
        metrics["grad_norm"] = sum(norms) / len(norms)
    if not is_on_policy:
        metrics |= {"clip_fraction": stats.clip_fraction, "ratio": stats.mean_ratio, "approx_kl": stats.approx_kl}
    if is_weighted:
        metrics["importance_weight"] = stats.mean_weight
    if has_trust_region:
        metrics["outside_trust_region"] = stats.outside_fraction
    return metrics


def advantage_metrics(advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Returns mean and standard deviation over all tokens."""
    moments = MaskedMoments.of(advantages, mask)
    return {"advantage_mean": moments.mean, "advantage_std": math.sqrt(moments.variance)}


def global_batches(num_rows: int, config: LossConfig) -> list[np.ndarray]:
    """Splits the rows into the global batches of one epoch; returns their indices, int64.

    There are as many as `global_batch_size` requires, but of equal size: a small last batch would make as large a step
    as the others from fewer samples. The order stays, so that responses to one prompt stay together and share it.
    """
    return np.array_split(np.arange(num_rows), -(-num_rows // config.global_batch_size))
