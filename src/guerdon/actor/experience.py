"""A step's experience: its rollouts, and log-probs of policy and reference, as tables on the CPU.

Tables are float32 `[B, R]`: B responses with a reward, the longest of R tokens. Entry r of a row is about the
response's token r, the action in the state after token P + r - 1; after a response all tables are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from guerdon.actor.policy_group import PolicyGroup
from guerdon.actor.rollouts import Rollout
from guerdon.actor.run_metrics import timed
from guerdon.errors import RewardsFailed
from guerdon.training.algorithms.kl import kl_per_sequence, kl_per_token, penalised_rewards
from guerdon.training.algorithms.masking import MaskedMoments
from guerdon.training.policy_trainer import PolicyTrainer


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """B rollouts with rewards, and log-probs of their tokens before the step's first update.

    `mask` is 1 at the tokens that the policy sampled; `logprobs`, `ref_logprobs` and `entropies` are the trainer's own,
    `engine_logprobs` those of the engine that sampled, `kl` the tokens' KL by the chosen estimator. `rewards` float32
    `[B]`, `groups` int64 `[B]`, `is_end` bool `[B]`.
    """

    rollouts: list[Rollout]
    mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    entropies: Tensor
    engine_logprobs: Tensor
    kl: Tensor
    rewards: Tensor
    groups: Tensor
    is_end: Tensor

    @classmethod
    def of(
        cls, rollouts: list[Rollout], logprobs: Tensor, ref_logprobs: Tensor, entropies: Tensor, kl_estimator: str
    ) -> Experience:
        """Builds the tables; each rollout must have a reward. Raises ValueError if tables are not `[B, R]`."""
        mask = to_table([rollout.mask for rollout in rollouts])
        return cls(
            rollouts,
            mask,
            logprobs,
            ref_logprobs,
            entropies,
            to_table([rollout.logprobs for rollout in rollouts]),
            kl_per_token(logprobs, ref_logprobs, mask, kl_estimator),
            torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
            torch.tensor([rollout.group for rollout in rollouts], dtype=torch.int64),
            torch.tensor([rollout.is_end for rollout in rollouts]),
        )

    @property
    def prompt_lengths(self) -> np.ndarray:
        """P of each rollout, int64 `[B]`."""
        return prompt_lengths(self.rollouts)

    @property
    def values(self) -> Tensor:
        """The critic's values of the states before each action."""
        rows = []
        for rollout in self.rollouts:
            assert rollout.values is not None, "only PPO needs values, and its rollouts have them"
            rows.append(rollout.values[rollout.prompt_length - 1 : -1])
        return to_table(rows)

    def penalised(self, beta: float, reduction: str = "sum") -> Tensor:
        """Returns each reward with its response's KL penalty, by `kl_per_sequence`'s reduction, float32 `[B]`."""
        return penalised_rewards(self.rewards, kl_per_sequence(self.kl, self.mask, reduction), beta)

    def metrics(self) -> dict[str, float]:
        """Returns the KL to the reference or the teacher, and the entropy."""
        return {
            "kl": kl_per_sequence(self.kl, self.mask).mean().item(),
            "kl_per_token": MaskedMoments.of(self.kl, self.mask).mean,
            "entropy": MaskedMoments.of(self.entropies, self.mask).mean,
        }


def with_rewards(
    rollouts: Sequence[Rollout], max_failed_fraction: float, step: int, origin: str = "reward model"
) -> list[Rollout]:
    """Returns the rollouts that have a reward, sorted by group and index; raises RewardsFailed if too many failed.

    The error names `origin`, the source of the rewards.
    """
    failed = [rollout for rollout in rollouts if rollout.reward is None]
    if len(failed) > max_failed_fraction * len(rollouts) or len(failed) == len(rollouts):
        raise RewardsFailed(
            f"{len(failed)} of the {len(rollouts)} responses of step {step} got no reward, and max_failed_fraction is "
            f"{max_failed_fraction:g}; the first error: {failed[0].error}; see the log of the {origin}'s server, "
            "or raise max_failed_fraction; the same command resumes from the last checkpoint"
        )
    kept = [rollout for rollout in rollouts if rollout.reward is not None]
    return sorted(kept, key=lambda rollout: (rollout.group, rollout.index))


def measure(
    policy: PolicyGroup | PolicyTrainer,
    rollouts: list[Rollout],
    temperature: float,
    kl_estimator: str,
    metrics: dict[str, float],
) -> Experience:
    """Computes log-probs of policy and reference before the step's first update.

    The trainer's own log-probs, not the engine's, because those are what its updates change. The reference's are not
    computed if the rollouts have them from a server.
    """
    rows, lengths = [rollout.tokens for rollout in rollouts], prompt_lengths(rollouts)
    with timed(metrics, "seconds_logprobs"):
        own = policy.logprobs(rows, lengths, temperature, with_entropies=True)
    given = [rollout.ref_logprobs for rollout in rollouts if rollout.ref_logprobs is not None]
    if given:
        ref_logprobs = to_table(given)
    else:
        with timed(metrics, "seconds_reference"):
            ref_logprobs = policy.reference_logprobs(rows, lengths, temperature)
    assert own.entropies is not None
    experience = Experience.of(rollouts, own.logprobs, ref_logprobs, own.entropies, kl_estimator)
    metrics.update(experience.metrics())
    return experience


def to_table(rows: Sequence[np.ndarray]) -> Tensor:
    """Pads ragged rows with 0 to float32 `[B, R]`."""
    made = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for out, row in zip(made, rows, strict=True):
        out[: len(row)] = row
    return torch.from_numpy(made)


def untable(values: Tensor, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Returns the rows of `[B, R]` without padding: the inverse of `to_table`."""
    return [row[: rollout.response_length].numpy() for row, rollout in zip(values, rollouts, strict=True)]


def prompt_lengths(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Returns P of each rollout, int64 `[B]`."""
    return np.array([rollout.prompt_length for rollout in rollouts], np.int64)
