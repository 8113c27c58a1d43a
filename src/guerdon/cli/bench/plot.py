"""The picture of a run: how long answers took, and how many came over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from guerdon.cli.bench.driving import Answer
from guerdon.cli.bench.summary import Percentiles, Summary
from guerdon.plots import BAND, INK, MAIN, SECOND, STYLE, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATE, FAILED = "#e09f3e", SECOND


def save(answers: Sequence[Answer], summary: Summary, path: Path, heading: str, load: str) -> None:
    """Draws the answers and writes a PNG."""
    plt = pyplot()
    with plt.rc_context(STYLE | {"axes.titlepad": 28}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), gridspec_kw={"width_ratios": [1, 1.35]})
        figure.subplots_adjust(left=0.06, right=0.98, bottom=0.12, top=0.73, wspace=0.17)
        figure.text(0.012, 0.935, heading, fontsize=13, fontweight="bold")
        figure.text(0.012, 0.885, load, fontsize=9.5, color="#5c677d")
        _draw_latency(left, answers, summary.latency)
        _draw_throughput(right, answers, summary)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_latency(axes: Axes, answers: Sequence[Answer], latency: Percentiles | None) -> None:
    """How many answers took how long, over a logarithmic axis, and the percentiles."""
    times = np.array([1e3 * answer.seconds for answer in answers if answer.num_failed < answer.num_sequences])
    axes.set(title="Latency of a request", xlabel="milliseconds", ylabel="requests")
    if latency is None or not len(times):
        axes.text(0.5, 0.5, "no request was answered", ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    low, high = max(times.min(), 1e-3), max(times.max(), times.min() * 1.5, 2e-3)
    bins = np.geomspace(low * 0.97, high * 1.03, int(np.clip(np.sqrt(len(times)) * 2, 10, 48)))
    counts, _, _ = axes.hist(times, bins=bins.tolist(), color=BAND, edgecolor=MAIN, linewidth=0.8)
    axes.set_xscale("log")
    _tick_plainly(axes, bins[0], bins[-1])
    axes.set_ylim(0, 1.08 * float(np.max(counts)))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    for name, colour in (("p50", MAIN), ("p90", LATE), ("p99", FAILED)):
        ms = getattr(latency, name)
        axes.axvline(ms, color=colour, lw=1.6, label=f"{name}  {_readable(ms)}")
    _name_lines(axes)


def _draw_throughput(axes: Axes, answers: Sequence[Answer], summary: Summary) -> None:
    """Sequences a second over time, those that failed on top, and the mean."""
    axes.set(title="Throughput", xlabel="seconds since the first request", ylabel="sequences a second")
    if not answers or not summary.seconds:
        return
    # Fewer answers than bins would draw gaps where there are none.
    num_bins = int(np.clip(len(answers) / 8, 1, 60))
    edges = np.linspace(0, summary.seconds, num_bins + 1)
    width = edges[1]
    done = [min(answer.done_s, summary.seconds) for answer in answers]
    scored = [answer.num_sequences - answer.num_failed for answer in answers]
    failed = [answer.num_failed for answer in answers]
    rate, lost = (np.histogram(done, edges.tolist(), weights=n)[0] / width for n in (scored, failed))
    axes.stairs(rate, edges, fill=True, color=BAND)
    axes.stairs(rate, edges, color=MAIN, lw=1.6, label="scored")
    if any(failed):
        axes.stairs(rate + lost, edges, baseline=rate, fill=True, color=FAILED, alpha=0.75, label="failed")
    mean = summary.sequences_per_s
    axes.axhline(mean, color=INK, lw=1, ls=(0, (4, 3)), label=f"mean {mean:,.1f}")
    axes.set_ylim(0, 1.08 * float(np.max(rate + lost)) or 1)
    axes.set_xlim(0, summary.seconds)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    _name_lines(axes)


def _name_lines(axes: Axes) -> None:
    """The legend, in one line below the title, where it covers nothing."""
    axes.legend(
        frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(-0.015, 0.985), ncols=3, columnspacing=1.4,
        handlelength=1.2,
    )  # fmt: skip


def _tick_plainly(axes: Axes, low: float, high: float) -> None:
    """Five or fewer marks in plain numbers: a logarithmic axis of less than a decade has hardly any of its own."""
    from matplotlib.ticker import NullFormatter, NullLocator

    marks = [m * 10.0**e for e in range(-4, 8) for m in (1, 1.5, 2, 3, 5, 7) if low <= m * 10.0**e <= high]
    if len(marks) < 2:
        marks = [low, (low * high) ** 0.5, high]
    step = -(-len(marks) // 6)
    marks = marks[::step]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(marks, [f"{mark:,.3g}" if mark < 1000 else f"{mark:,.0f}" for mark in marks])


def _readable(ms: float) -> str:
    return f"{ms / 1e3:,.1f} s" if ms >= 10_000 else f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
