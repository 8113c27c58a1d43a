"""The names and meanings of a run's metrics, and those computed from rollouts alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.actor.rollouts import Rollout
from guerdon.plots import BAND, MAIN, SECOND, STYLE, pyplot

METRICS: dict[str, tuple[str, str]] = {  # name: (section in TensorBoard, what it is)
    "reward": ("reward", "mean reward of the step's responses, without KL penalty and failed ones"),
    "reward_std": ("reward", "standard deviation"),
    "reward_min": ("reward", "minimum"),
    "reward_max": ("reward", "maximum"),
    "reward_penalised": ("reward", "mean with the KL penalty, if it is in the reward"),
    "failed": ("reward", "dropped responses without a reward"),
    "kl": ("kl", "KL to the reference or teacher by `kl_estimator`: sum over tokens, mean over responses"),
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
    "outside_trust_region": ("policy", "share of tokens outside `trust_region`, without gradient"),
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
    "seconds_reference": ("time", "the reference's or teacher's log-probs; only waiting if served"),
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


if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS: tuple[tuple[str, str, str], ...] = (  # metric, title, unit of its axis
    ("reward", "Reward", "mean of a step"),
    ("kl", "KL to reference or teacher", "nats a response"),
    ("entropy", "Entropy of the policy", "nats a token"),
    ("response_length", "Length of a response", "tokens"),
    ("loss", "Loss of the policy", ""),
    ("critic_loss", "Loss of the critic", ""),
    ("critic_explained_variance", "Explained variance of the critic", ""),
    ("grad_norm", "Norm of the gradient", "before clipping"),
    ("tokens_per_second", "Speed", "response tokens a second"),
)
_SMOOTHED_FROM_STEPS = 20
"""Shorter runs show every point."""


def save_curves(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draws the rows of a metrics file, one panel for each metric that they have, and writes a PNG."""
    panels = [panel for panel in PANELS if len(_points(rows, panel[0])[0])]
    if not panels:
        return
    plt = pyplot()
    style = STYLE | {"figure.constrained_layout.w_pad": 0.12, "figure.constrained_layout.h_pad": 0.08}
    num_columns = min(len(panels), 4 if len(panels) in (4, 7, 8) else 3)
    num_rows = math.ceil(len(panels) / num_columns)
    with plt.rc_context(style):
        figure, grid = plt.subplots(
            num_rows,
            num_columns,
            figsize=(4.2 * num_columns, 3.1 * num_rows + 0.5),
            layout="constrained",
            squeeze=False,
        )
        for axes, (name, heading, unit) in zip(grid.flat, panels, strict=False):
            _draw(axes, rows, name)
            axes.set(title=heading, ylabel=unit, xlabel="step")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Returns the moving average over a tenth of the values; fewer at both ends."""
    half = max(1, len(values) // 20)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _draw(axes: Axes, rows: Sequence[dict[str, Any]], name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    steps, values = _points(rows, name)
    is_long = len(steps) >= _SMOOTHED_FROM_STEPS
    if name == "reward":
        spread = {row["step"]: row.get("reward_std") for row in rows}
        stds = np.array([spread[step] or 0.0 for step in steps])
        axes.fill_between(steps, values - stds, values + stds, color=BAND, lw=0, alpha=0.6, label="± std of responses")
    label = "training" if name == "reward" else None
    axes.plot(
        steps, values, label=None if is_long else label, color=MAIN, lw=0.8 if is_long else 1.6,
        alpha=0.35 if is_long else 1.0, marker=None if is_long else "o", ms=3.5,
    )  # fmt: skip
    if is_long:
        axes.plot(steps, smoothed(values), color=MAIN, lw=2, label=label)
    if name == "reward":
        at, rewards = _points(rows, "validation_reward")
        if len(at):
            axes.plot(at, rewards, color=SECOND, lw=1.2, marker="o", ms=4.5, label="validation")
        axes.legend(frameon=False, fontsize=8)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.02)


def _points(rows: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values of a metric that are present and finite."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None and math.isfinite(row[name])]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps), np.array(values, dtype=float)
