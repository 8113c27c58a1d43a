"""What the demo prints and draws: headings, wrapped text, and pictures of rewards."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.plots import INK, MAIN, SECOND, STYLE, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEN, RED, BOLD = "32", "1;31", "1"
BEST, WORST, REST = MAIN, SECOND, "#c9ced6"


def heading(text: str) -> None:
    """Prints the heading of a step."""
    print(f"\n{bold(text)}", flush=True)


def bold(text: str) -> str:
    return coloured(BOLD, text)


def coloured(code: str, text: str) -> str:
    """Returns the text in a colour if stdout is a terminal."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def wrapped(text: str, width: int, most: int = 3) -> list[str]:
    """Returns one to `most` lines of the text; "(nothing)" for an empty one."""
    return textwrap.wrap(" ".join(text.split()) or "(nothing)", width, max_lines=most, placeholder=" ...")


def shortened(text: str, width: int = 110) -> str:
    return textwrap.shorten(text, width, placeholder=" ...")


def list_files(named: list[tuple[object, str]]) -> None:
    """Prints paths with what is in them."""
    width = max(len(str(path)) for path, _ in named)
    for path, what in named:
        print(f"  {bold(str(path))}{' ' * (width - len(str(path)))}  {what}")


def draw_learning(steps: Sequence[dict[str, Any]], before: np.ndarray, after: np.ndarray, path: Path) -> None:
    """Writes a PNG of a run's metrics and of the rewards of held-out responses."""
    with _picture(path, "guerdon's demo: a policy learns from a served reward model", 3) as (first, second, third):
        _draw_rewards(first, steps)
        trained = [row for row in steps if "kl" in row]
        second.plot([row["step"] for row in trained], [row["kl"] for row in trained], color=INK, lw=2)
        second.set_ylim(bottom=min(0, *second.get_ylim()))
        second.set(xlabel="step", ylabel="nats per response", title="KL to the initial policy")
        bins = np.histogram_bin_edges(np.concatenate([before.ravel(), after.ravel()]), bins=24).tolist()
        for rewards, name, colour in ((before, "before", WORST), (after, "after", BEST)):
            third.hist(rewards.ravel(), bins=bins, color=colour, alpha=0.35)
            third.hist(rewards.ravel(), bins=bins, histtype="step", lw=1.5, color=colour)
            third.axvline(rewards.mean(), color=colour, lw=2, label=f"{name}: mean {rewards.mean():.2f}")
        third.set(xlabel="reward", ylabel="responses", title="Held-out prompts, before and after")
        third.set_ylim(top=1.25 * third.get_ylim()[1])  # room for the legend
        third.legend(frameon=False, fontsize=9, loc="upper left")


def draw_scores(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Writes a PNG of the rewards of scored rows, without failed samples."""
    with _picture(path, title, 2) as (left, right):
        _draw_distribution(left, rows)
        _draw_gaps(right, rows)


@contextmanager
def _picture(path: Path, title: str, num_panels: int) -> Iterator[Sequence[Axes]]:
    """Yields the panels of a picture and writes it when the block ends."""
    plt = pyplot()
    with plt.rc_context(STYLE | {"axes.titleweight": "normal", "axes.titlelocation": "center"}):
        figure: Figure
        figure, panels = plt.subplots(1, num_panels, figsize=(1.5 + 4.5 * num_panels, 4.4), layout="constrained")
        yield panels
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_rewards(axes: Axes, steps: Sequence[dict[str, Any]]) -> None:
    """Draws each step's mean reward with its spread, and the validation reward."""
    trained = [row for row in steps if "reward" in row]
    at = np.array([row["step"] for row in trained])
    means, stds = (np.array([row[name] for row in trained]) for name in ("reward", "reward_std"))
    axes.fill_between(at, means - stds, means + stds, color=BEST, alpha=0.12, lw=0, label="standard deviation")
    axes.plot(at, means, color=BEST, lw=2, label="training prompts")
    held_out = [(row["step"], row["validation_reward"]) for row in steps if "validation_reward" in row]
    axes.plot(*zip(*held_out, strict=True), color=WORST, lw=1.2, marker="o", ms=5, label="held-out prompts")
    axes.grid(axis="y", color="#e6e8ec")
    axes.set_axisbelow(True)
    axes.set(xlabel="step", ylabel="reward", title="Reward")
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _draw_distribution(axes: Axes, rows: list[dict[str, Any]]) -> None:
    rewards = [[r for r in row["rewards"] if r is not None] for row in rows]
    everything = np.array([r for row in rewards for r in row])
    bins = np.histogram_bin_edges(everything, bins=min(40, 10 + len(everything) // 8)).tolist()
    axes.hist(everything, bins=bins, color=REST, label="all responses")
    axes.hist(
        [max(row) for row in rewards if row], bins=bins, histtype="step", lw=2, color=BEST, label="best per prompt"
    )
    axes.hist(
        [min(row) for row in rewards if row], bins=bins, histtype="step", lw=2, color=WORST, label="worst per prompt"
    )
    axes.axvline(everything.mean(), color=INK, lw=1, ls=(0, (4, 3)))
    axes.annotate(
        f"mean {everything.mean():.2f}", (everything.mean(), 1), (4, -2), xycoords=("data", "axes fraction"),
        textcoords="offset points", va="top", fontsize=9,
    )  # fmt: skip
    axes.set(xlabel="reward", ylabel="responses", title=f"Rewards of {len(everything)} responses")
    axes.legend(frameon=False, fontsize=9)


def _draw_gaps(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draws a line from the worst to the best response of each prompt, sorted by the best."""
    kept = [[r for r in row["rewards"] if r is not None] for row in rows]
    spans = sorted(((min(row), max(row)) for row in kept if row), key=lambda span: span[1])
    low, high = np.array(spans).T
    ranks = np.arange(len(spans))
    axes.vlines(ranks, low, high, color=REST, lw=max(0.6, min(4.0, 200 / len(spans))))
    size = max(4.0, min(28.0, 1500 / len(spans)))
    axes.scatter(ranks, high, s=size, color=BEST, lw=0, label="best", zorder=3)
    axes.scatter(ranks, low, s=size, color=WORST, lw=0, label="worst", zorder=3)
    axes.set(xlabel=f"{len(spans)} prompts, sorted by best reward", ylabel="reward")
    axes.set_title(f"Best and worst response to each prompt, {np.mean(high - low):.2f} apart on average")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
