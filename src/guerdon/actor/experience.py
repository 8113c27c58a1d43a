"""What a step learns from: rollouts and log-probs made into tables, advantages, global batches; pure, on the CPU.

Tables are float32 `[B, R]`: B responses that have a reward, the longest of R tokens. Entry r of a row is about the
response's token r, the action in the state after token P + r - 1; behind a response all tables are 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from guerdon.actor.rollouts import Rollout
from guerdon.errors import RewardsFailed
from guerdon.settings.actors import AlgorithmConfig, PPOConfig, ReinforceConfig
from guerdon.training.algorithms.advantages import Moments, RunningMean, estimate_advantages, gae, whiten
from guerdon.training.algorithms.kl import kl_per_sequence, kl_per_token, penalised_rewards, token_rewards


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """B rollouts with rewards, and what policy and reference make of their tokens before the step's first update.

    `mask` is 1 at the response's tokens; `logprobs`, `ref_logprobs` and `entropies` are the trainer's own,
    `engine_logprobs` those of the engine that sampled, `kl` the tokens' KL by the chosen estimator. `rewards`
    float32 `[B]`, `groups` int64 `[B]`, `is_end` bool `[B]`.
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
        """Assembles them; each rollout must have a reward. Raises ValueError where tables are not `[B, R]`."""
        mask = table([np.ones(rollout.response_length, np.float32) for rollout in rollouts])
        return cls(
            rollouts,
            mask,
            logprobs,
            ref_logprobs,
            entropies,
            table([rollout.logprobs for rollout in rollouts]),
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
        """The critic's values of the states in which the response's tokens were chosen."""
        rows = []
        for rollout in self.rollouts:
            assert rollout.values is not None, "only PPO asks for values, and its rollouts have them"
            rows.append(rollout.values[rollout.prompt_length - 1 : -1])
        return table(rows)

    def penalised(self, beta: float, reduction: str = "sum") -> Tensor:
        """Returns each reward less its response's KL, by `kl_per_sequence`'s reduction, float32 `[B]`."""
        return penalised_rewards(self.rewards, kl_per_sequence(self.kl, self.mask, reduction), beta)

    def metrics(self) -> dict[str, float]:
        """How far the policy is from its reference, and how undecided."""
        return {
            "kl": kl_per_sequence(self.kl, self.mask).mean().item(),
            "kl_per_token": Moments.of(self.kl, self.mask).mean,
            "entropy": Moments.of(self.entropies, self.mask).mean,
        }


def rewarded(rollouts: Sequence[Rollout], max_failed_fraction: float, step: int) -> list[Rollout]:
    """The rollouts that have a reward, in the order of group and index; RewardsFailed where too many have none."""
    failed = [rollout for rollout in rollouts if rollout.reward is None]
    if len(failed) > max_failed_fraction * len(rollouts) or len(failed) == len(rollouts):
        raise RewardsFailed(
            f"{len(failed)} of the {len(rollouts)} responses of step {step} got no reward, and max_failed_fraction is "
            f"{max_failed_fraction:g}; the first: {failed[0].error}; see the log of the reward model's server, or give "
            "more max_failed_fraction; the same command goes on from the last checkpoint"
        )
    kept = [rollout for rollout in rollouts if rollout.reward is not None]
    return sorted(kept, key=lambda rollout: (rollout.group, rollout.index))


def reinforce_advantages(
    experience: Experience, config: ReinforceConfig, running: RunningMean
) -> tuple[Tensor, RunningMean]:
    """The advantage of every token by the estimator's name, and the next running mean."""
    beta = config.kl_coefficient if config.kl_placement == "reward" else 0.0
    return estimate_advantages(
        config.advantage_estimator,
        experience.penalised(beta, config.kl_reduction),
        experience.groups,
        experience.mask,
        is_end=experience.is_end if config.leave_out_truncated else None,
        running=running,
    )


def ppo_advantages(experience: Experience, config: PPOConfig) -> tuple[Tensor, Tensor]:
    """The advantage of every token by GAE, whitened where asked, and the returns that the critic is to learn."""
    mask = experience.mask
    rewards = token_rewards(experience.rewards, experience.kl, mask, config.kl_coefficient)
    advantages, returns = gae(rewards, experience.values, mask, config.gamma, config.lam)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask, Moments.of(advantages, mask))
    return advantages, returns


def advantage_metrics(advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean and standard deviation over all tokens."""
    moments = Moments.of(advantages, mask)
    return {"advantage_mean": moments.mean, "advantage_std": math.sqrt(moments.variance)}


def global_batches(num_rows: int, config: AlgorithmConfig) -> list[np.ndarray]:
    """Numbers of the rows of each optimiser step of one epoch, int64.

    As many as rows of `global_batch_size` need, but of equal size: a last one of few rows would step as far as the
    others, on less evidence. The order stays, so that responses to one prompt stay together, and share it.
    """
    return np.array_split(np.arange(num_rows), -(-num_rows // config.global_batch_size))


def table(rows: Sequence[np.ndarray]) -> Tensor:
    """float32 `[B, R]` of ragged rows, with 0 behind each."""
    made = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for out, row in zip(made, rows, strict=True):
        out[: len(row)] = row
    return torch.from_numpy(made)


def unpadded(values: Tensor, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """The rows of `[B, R]` without what is behind each response: the inverse of `table`."""
    return [row[: rollout.response_length].numpy() for row, rollout in zip(values, rollouts, strict=True)]


def prompt_lengths(rollouts: Sequence[Rollout]) -> np.ndarray:
    """P of each rollout, int64 `[B]`."""
    return np.array([rollout.prompt_length for rollout in rollouts], np.int64)
