"""The names and meanings of a run's metrics, and those computed from rollouts alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from guerdon.actor.rollouts import Rollout

METRICS: dict[str, tuple[str, str]] = {  # name: (section in TensorBoard, what it is)
    "reward": ("reward", "mean reward of the step's responses, without KL penalty and failed ones"),
    "reward_std": ("reward", "standard deviation"),
    "reward_min": ("reward", "minimum"),
    "reward_max": ("reward", "maximum"),
    "reward_penalised": ("reward", "mean with the KL penalty, if it is in the reward"),
    "failed": ("reward", "dropped responses without a reward"),
    "kl": (
        "kl",
        "KL to the reference or teacher by `kl_estimator`: sum over tokens, mean over responses",
    ),
    "kl_per_token": ("kl", "the same, mean over tokens"),
    "entropy": ("policy", "mean entropy of the policy per response token, in nats, before the update"),
    "response_length": ("response", "mean response length in tokens, EOS included"),
    "response_length_min": ("response", "shortest response"),
    "response_length_max": ("response", "longest response"),
    "ended": ("response", "share of responses ended by EOS or a stop text, not truncated"),
    "prompt_length": ("response", "mean prompt length in tokens, counted once per response"),
    "advantage_mean": ("policy", "mean advantage over tokens"),
    "advantage_std": ("policy", "their standard deviation"),
    "loss": ("policy", "policy loss, mean over the step's global batches"),
    "grad_norm": ("policy", "gradient norm before clipping, mean over the step's global batches"),
    "learning_rate": ("policy", "learning rate of the step's last global batch"),
    "clip_fraction": ("policy", "share of tokens with a clipped probability ratio"),
    "ratio": ("policy", "mean probability ratio of a token to before the step's first update"),
    "approx_kl": ("policy", "k3 estimate per token of the KL from the policy before the step's first update"),
    "importance_weight": ("policy", "mean importance weight of trainer over engine, after the cap"),
    "outside_trust_region": (
        "policy",
        "share of tokens outside `trust_region`, without gradient",
    ),
    "optimizer_steps": ("policy", "optimiser steps of the policy since the run's start"),
    "skipped_steps": ("policy", "global batches skipped for a non-finite gradient"),
    "critic_loss": ("critic", "critic loss on the step's responses"),
    "critic_explained_variance": (
        "critic",
        "share of the returns' variance explained by the values, before each global batch's step",
    ),
    "critic_clip_fraction": ("critic", "share of tokens with a clipped value"),
    "critic_grad_norm": ("critic", "the critic's last gradient norm, before clipping"),
    "critic_skipped_steps": ("critic", "the critic's global batches skipped for a non-finite gradient"),
    "critic_learning_rate": ("critic", "learning rate of the critic's last optimiser step"),
    "value_mean": ("critic", "mean value over the responses' tokens"),
    "return_mean": ("critic", "mean return over the responses' tokens"),
    "validation_reward": ("validation", "mean reward of one response per validation prompt, without failed ones"),
    "validation_reward_std": ("validation", "standard deviation of these rewards"),
    "validation_response_length": ("validation", "their mean length in tokens"),
    "validation_ended": ("validation", "share of these responses ended by EOS or a stop text"),
    "validation_failed": ("validation", "validation responses without a reward"),
    "epoch": ("progress", "epochs done, as a fraction"),
    "tokens_per_second": ("time", "response tokens per second of the whole step"),
    "seconds_step": ("time", "the step, without validation and checkpoint"),
    "seconds_generation": ("time", "until the last response was generated, while others are scored"),
    "seconds_reward_wait": ("time", "waiting for rewards after that"),
    "seconds_values": ("time", "waiting for values after that"),
    "seconds_logprobs": ("time", "the policy's log-probs before the update"),
    "seconds_reference": (
        "time",
        "the reference's or teacher's log-probs; only waiting if served",
    ),
    "seconds_update": ("time", "the policy's update"),
    "seconds_critic_wait": ("time", "waiting for the critic's training after that"),
    "seconds_validation": ("time", "the step's validation"),
    "seconds_save": ("time", "the last checkpoint before the step's end, if any"),
}


def rollout_metrics(rollouts: Sequence[Rollout], prefix: str = "") -> dict[str, float]:
    """Returns rewards, lengths and failures of the rollouts, with `prefix` before each name; empty without rollouts."""
    if not rollouts:
        return {}
    lengths = np.array([rollout.response_length for rollout in rollouts])
    metrics = {
        "failed": float(sum(rollout.reward is None for rollout in rollouts)),
        "response_length": float(lengths.mean()),
        "response_length_min": float(lengths.min()),
        "response_length_max": float(lengths.max()),
        "ended": float(np.mean([rollout.is_end for rollout in rollouts])),
        "prompt_length": float(np.mean([rollout.prompt_length for rollout in rollouts])),
    }
    rewards = np.array([rollout.reward for rollout in rollouts if rollout.reward is not None])
    if len(rewards):
        metrics |= {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
        }
    return {prefix + name: value for name, value in metrics.items() if prefix + name in METRICS}


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Adds the block's seconds to the metrics."""
    started = time.perf_counter()
    yield
    metrics[name] = time.perf_counter() - started
