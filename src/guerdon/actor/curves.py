"""The plot of a run: its metrics over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.plots import BAND, MAIN, SECOND, STYLE, pyplot

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


def save(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
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
