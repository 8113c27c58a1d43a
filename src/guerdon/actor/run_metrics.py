"""The names and meanings of a run's metrics, and those computed from rollouts alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from guerdon.actor.rollouts import Rollout

METRICS: dict[str, tuple[str, str]] = {  # name: (section in TensorBoard, what it is)
    "reward": ("reward", "mean reward of the step's responses, without KL penalty and without failed ones"),
    "reward_std": ("reward", "their standard deviation"),
    "reward_min": ("reward", "their minimum"),
    "reward_max": ("reward", "their maximum"),
    "reward_penalised": ("reward", "their mean with the KL penalty; only if the penalty is in the reward"),
    "failed": ("reward", "responses that got no reward and were dropped"),
    "kl": (
        "kl",
        "KL to the reference or teacher, as `kl_estimator` estimates it: summed over a response, mean over responses",
    ),
    "kl_per_token": ("kl", "the same estimate, mean over tokens"),
    "entropy": ("policy", "mean entropy of the policy at the responses' tokens, in nats, before the update"),
    "response_length": ("response", "mean length of a response in tokens, its EOS included"),
    "response_length_min": ("response", "shortest response"),
    "response_length_max": ("response", "longest response"),
    "ended": ("response", "share of responses that ended by EOS or a stop text; the rest were truncated"),
    "prompt_length": ("response", "mean length of a prompt in tokens, counted once per response"),
    "advantage_mean": ("policy", "mean advantage over tokens"),
    "advantage_std": ("policy", "standard deviation of the advantages over tokens"),
    "loss": ("policy", "loss of the policy, mean over the step's global batches"),
    "grad_norm": ("policy", "norm of the gradient before clipping, mean over the step's global batches"),
    "learning_rate": ("policy", "learning rate of the step's last global batch"),
    "clip_fraction": ("policy", "share of tokens with a clipped probability ratio"),
    "ratio": ("policy", "mean ratio of a token's probability to its probability before the step's first update"),
    "approx_kl": ("policy", "k3 estimate, per token, of the KL from the policy before the step's first update"),
    "importance_weight": ("policy", "mean importance weight between engine and trainer, after the cap"),
    "outside_trust_region": (
        "policy",
        "share of tokens without gradient, because their probability ratio between trainer and engine is outside of "
        "`trust_region`",
    ),
    "optimizer_steps": ("policy", "optimiser steps of the policy since the run's start"),
    "skipped_steps": ("policy", "skipped global batches of the step, because their gradient was not finite"),
    "critic_loss": ("critic", "loss of the critic on the step's responses"),
    "critic_explained_variance": (
        "critic",
        "share of the returns' variance that the values explain, before the step on each global batch",
    ),
    "critic_clip_fraction": ("critic", "share of tokens with a clipped value"),
    "critic_grad_norm": ("critic", "norm of the critic's last gradient, before clipping"),
    "critic_skipped_steps": ("critic", "global batches that the critic skipped, because their gradient was not finite"),
    "critic_learning_rate": ("critic", "learning rate of the critic's last optimiser step"),
    "value_mean": ("critic", "mean value over the responses' tokens"),
    "return_mean": ("critic", "mean return over the responses' tokens"),
    "validation_reward": ("validation", "mean reward of one response to each validation prompt, without failed ones"),
    "validation_reward_std": ("validation", "standard deviation of these rewards"),
    "validation_response_length": ("validation", "mean length of these responses in tokens"),
    "validation_ended": ("validation", "share of these responses that ended by EOS or a stop text"),
    "validation_failed": ("validation", "validation responses that got no reward"),
    "epoch": ("progress", "epochs done, as a fraction"),
    "tokens_per_second": ("time", "response tokens of the step per second of the whole step"),
    "seconds_step": ("time", "seconds of the step, without validation and checkpoint"),
    "seconds_generation": ("time", "seconds until the last response was generated; scoring runs at the same time"),
    "seconds_reward_wait": ("time", "seconds of waiting for rewards after that"),
    "seconds_values": ("time", "seconds of waiting for values after that"),
    "seconds_logprobs": ("time", "seconds of the policy's log-probs before the update"),
    "seconds_reference": (
        "time",
        "seconds of the reference's or the teacher's log-probs; of waiting if a server gives them",
    ),
    "seconds_update": ("time", "seconds of the policy's update"),
    "seconds_critic_wait": ("time", "seconds of waiting for the critic's training after that"),
    "seconds_validation": ("time", "seconds of the step's validation"),
    "seconds_save": ("time", "seconds of this run's last checkpoint before the step's end, if there was one"),
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
