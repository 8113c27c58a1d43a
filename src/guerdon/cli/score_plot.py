"""`guerdon score --plot`: draws the rewards of a file; for pairs also the margins, and the accuracy by category."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from guerdon.client.pair_report import Pairs
from guerdon.client.score_file import FileSummary
from guerdon.errors import ConfigError, StartError, StorageFailed, install_command
from guerdon.plots import BAND, INK, MAIN, MUTED, SECOND, STYLE, name_lines, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 24
"""The picture shows the largest categories, at most this many."""

_LONGEST_NAME = 28
_OUTLIERS = 0.002
"""The share of values at each end that may lie outside of a histogram's axis, counted in its last bar."""


def check_plot(name: str) -> None:
    """Raises StartError if matplotlib is missing, and ConfigError if `--plot NAME` cannot be written as a PNG."""
    if find_spec("matplotlib") is None:
        raise StartError("--plot needs matplotlib, which is not installed", install_command("plot"))
    if Path(name).suffix.lower() != ".png":
        raise ConfigError(f"--plot {name} is not a .png file", "give a name that ends in .png")
    check_writable(Path(name))


def check_writable(path: Path) -> None:
    """Raises ConfigError if the file cannot be written; leaves no file behind."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} for {path.name}", "create it first")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", "name a file in it")
    is_new = not path.exists()
    if not is_new and not path.is_file():
        return  # opening and closing a pipe would end it for its reader
    try:
        path.open("ab").close()
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}", "name a writable file") from e
    if is_new:
        path.unlink()


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns an OSError, which may lack the path, into StorageFailed."""
    try:
        yield
    except OSError as e:
        raise StorageFailed(f"cannot write {path}: {e.strerror}") from e


def draw(summary: FileSummary, path: str, scorer: str, source: str) -> None:
    """Writes a PNG of the summary, with `scorer` and `source` in its heading; raises StorageFailed."""
    plt = pyplot()
    total, categories = summary.pairs.total(), summary.pairs.largest(MOST_BARS)
    widths = [1.0] + [1.0] * bool(len(total)) + [1.15] * bool(len(total) and categories)
    height = 4.8 if len(widths) < 3 else max(4.8, 1.9 + 0.24 * len(categories))
    with plt.rc_context(STYLE | {"axes.titlepad": 26}):
        figure, grid = plt.subplots(
            1, len(widths), figsize=(1.2 + 4.6 * sum(widths), height), squeeze=False, layout="constrained",
            gridspec_kw={"width_ratios": widths},
        )  # fmt: skip
        figure.suptitle(f"{source}, scored by {scorer}", x=0.012, ha="left", fontsize=13, fontweight="bold")
        axes = list(grid[0])
        if len(total):
            _draw_rewards(axes[0], [("chosen", total.chosen, MAIN), ("rejected", total.rejected, SECOND)])
            _draw_margins(axes[1], total)
        else:
            _draw_rewards(axes[0], [("rewards", summary.rewards, MAIN)])
        if len(axes) == 3:
            _draw_accuracy(axes[2], categories, total, len(summary.pairs.categories))
        with writing(path):
            figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_rewards(axes: Axes, kinds: Sequence[tuple[str, Sequence[float], str]]) -> None:
    """Draws a histogram of each kind's rewards, with its mean."""
    axes.set(title="Rewards", xlabel="reward", ylabel="responses")
    values = np.concatenate([np.asarray(rewards, float) for _, rewards, _ in kinds])
    if not len(values):
        axes.text(0.5, 0.5, "no sample has a reward", ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    edges = _edges(values)
    for name, rewards, colour in kinds:
        counts = _counts(np.asarray(rewards, float), edges)
        axes.stairs(counts, edges, fill=True, color=colour, alpha=0.18)
        axes.stairs(counts, edges, color=colour, lw=1.6, label=f"{name}, mean {_readable(float(np.mean(rewards)))}")
        axes.axvline(float(np.mean(rewards)), color=colour, lw=1, ls=(0, (4, 3)))
    _finish(axes)


def _draw_margins(axes: Axes, pairs: Pairs) -> None:
    """Draws a histogram of chosen minus rejected: wrong pairs left of zero, right ones to its right."""
    margins = pairs.margins
    edges = _edges(margins, through_zero=True)
    decided, ties = _counts(margins[margins != 0], edges), _counts(margins[margins == 0], edges)
    axes.set(title="Margins", xlabel="reward of chosen minus reward of rejected", ylabel="pairs")
    colours = np.where(edges[:-1] >= 0, BAND, "#f3d3d7").tolist()
    axes.bar(edges[:-1], decided, np.diff(edges), align="edge", color=colours)
    axes.stairs(decided + ties, edges, color=INK, lw=0.8)
    axes.axvline(0, color=INK, lw=1)
    if pairs.num_ties:
        label = f"{pairs.num_ties:,} ties"
        axes.bar(edges[:-1], ties, np.diff(edges), decided, align="edge", color=MUTED, label=label)
    median = float(np.median(margins))
    axes.axvline(median, color=MAIN, lw=1.4, ls=(0, (4, 3)), label=f"median {_readable(median)}")
    _finish(axes)


def _draw_accuracy(axes: Axes, categories: dict[str, Pairs], total: Pairs, num_categories: int) -> None:
    """Draws a bar for each category that has scored pairs, with its accuracy and its number of pairs."""
    rows = [(name, pairs) for name, pairs in categories.items() if len(pairs)]
    accuracies = [pairs.accuracy for _, pairs in rows]
    title = "Accuracy" if num_categories == len(categories) else f"Accuracy, {len(categories)} of {num_categories}"
    axes.set(title=title, xlim=(0, 1.3), ylim=(len(rows) - 0.4, -0.6), xticks=[0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.barh(range(len(rows)), accuracies, height=0.66, color=[SECOND if a < 0.5 else MAIN for a in accuracies])
    axes.set_yticks(range(len(rows)), [n if len(n) <= _LONGEST_NAME else n[: _LONGEST_NAME - 1] + "…" for n, _ in rows])
    axes.tick_params(axis="y", length=0)
    for place, (_, pairs) in enumerate(rows):
        axes.text(1.03, place, f"{pairs.accuracy:.1%}  of {len(pairs):,}", va="center", fontsize=8.5)
    axes.axvline(0.5, color=MUTED, lw=1, label="chance")
    axes.axvline(total.accuracy, color=INK, lw=1.2, ls=(0, (4, 3)), label=f"all pairs {total.accuracy:.1%}")
    name_lines(axes)


def _edges(values: np.ndarray, *, through_zero: bool = False) -> np.ndarray:
    """Returns the edges of a histogram's bins without outliers, optionally with one at zero."""
    low, high = np.quantile(values, [_OUTLIERS, 1 - _OUTLIERS])
    if through_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-6 * max(1.0, abs(high)):  # one value
        low, high = low - 0.5, high + 0.5
    num_bins = int(np.clip(2 * np.sqrt(len(values)), 8, 48))
    edges = np.linspace(low, high, num_bins + 1)
    if not through_zero:
        return edges
    width = edges[1] - edges[0]
    return width * np.arange(np.floor(low / width), np.ceil(high / width) + 1)


def _counts(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns the number of values in each bin; outliers count in the first and in the last."""
    return np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]


def _finish(axes: Axes) -> None:
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.set_ylim(0, 1.06 * axes.dataLim.ymax)
    name_lines(axes)


def _readable(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
