"""The demo's picture: how rewards are spread, and how far apart the best and the worst answer to a prompt are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.demo.story import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEST, WORST, REST, INK = "#1b7f79", "#d1495b", "#c9ced6", "#2b2d42"
KIND_COLOURS = dict(zip(KINDS, (BEST, "#6bb392", "#8d99ae", "#edae49", WORST, "#7a5c8f"), strict=True))


def save(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws scored rows (`rewards` a prompt, and perhaps `kinds`) and writes a PNG; failed samples are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style: Any = {
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": "#8d99ae",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), width_ratios=(1, 1.15), layout="constrained")
        _draw_distribution(left, rows)
        if all("kinds" in row for row in rows):
            _draw_kinds(right, rows)
        else:
            _draw_gaps(right, rows)
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_distribution(axes: Axes, rows: list[dict[str, Any]]) -> None:
    rewards = [[r for r in row["rewards"] if r is not None] for row in rows]
    everything = np.array([r for row in rewards for r in row])
    bins = np.histogram_bin_edges(everything, bins=min(40, 10 + len(everything) // 8)).tolist()
    axes.hist(everything, bins=bins, color=REST, label="all responses")
    axes.hist(
        [max(row) for row in rewards if row], bins=bins, histtype="step", lw=2, color=BEST, label="best of a prompt"
    )
    axes.hist(
        [min(row) for row in rewards if row], bins=bins, histtype="step", lw=2, color=WORST, label="worst of a prompt"
    )
    axes.axvline(everything.mean(), color=INK, lw=1, ls=(0, (4, 3)))
    axes.annotate(
        f"mean {everything.mean():.2f}", (everything.mean(), 1), (4, -2), xycoords=("data", "axes fraction"),
        textcoords="offset points", va="top", fontsize=9,
    )  # fmt: skip
    axes.set(xlabel="reward", ylabel="responses", title=f"Rewards of {len(everything)} responses")
    axes.legend(frameon=False, fontsize=9)


def _draw_kinds(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """One strip a kind of answer, each dot an answer, the bar its median."""
    jitter = np.random.default_rng(0)
    for height, kind in enumerate(reversed(KINDS)):
        pairs = [pair for row in rows for pair in zip(row["kinds"], row["rewards"], strict=True)]
        rewards = np.array([r for k, r in pairs if k == kind and r is not None])
        heights = height + jitter.uniform(-0.22, 0.22, len(rewards))
        axes.scatter(rewards, heights, s=26, color=KIND_COLOURS[kind], alpha=0.75, lw=0)
        if len(rewards):
            axes.plot([np.median(rewards)] * 2, [height - 0.34, height + 0.34], color=INK, lw=2)
    axes.set_yticks(range(len(KINDS)), [kind.replace("_", " ") for kind in reversed(KINDS)])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e8ec")
    axes.set_axisbelow(True)
    axes.set(xlabel="reward", title="By what a person would call the response")


def _draw_gaps(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """One line a prompt from its worst to its best response, in the order of the best."""
    kept = [[r for r in row["rewards"] if r is not None] for row in rows]
    spans = sorted(((min(row), max(row)) for row in kept if row), key=lambda span: span[1])
    low, high = np.array(spans).T
    ranks = np.arange(len(spans))
    axes.vlines(ranks, low, high, color=REST, lw=max(0.6, min(4.0, 200 / len(spans))))
    size = max(4.0, min(28.0, 1500 / len(spans)))
    axes.scatter(ranks, high, s=size, color=BEST, lw=0, label="best", zorder=3)
    axes.scatter(ranks, low, s=size, color=WORST, lw=0, label="worst", zorder=3)
    axes.set(xlabel=f"{len(spans)} prompts, in the order of their best reward", ylabel="reward")
    axes.set_title(f"Best and worst response to each prompt, {np.mean(high - low):.2f} apart on average")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
