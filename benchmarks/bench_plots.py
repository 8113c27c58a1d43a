"""Draws the results of bench.py: speed-ups, cost by responses per prompt, and the share of the limit."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

import growth
import rates
from claims import best, rate
from forms import PADDED_TO_MAXIMUM
from guerdon.plots import BAND, INK, MAIN, MUTED, SECOND, STYLE, pyplot
from in_process import ONE_BY_ONE, SORTED
from workload import PROMPTS

PEERS = {
    "PyTriton, padded to the maximum": PADDED_TO_MAXIMUM,
    "PyTriton, padded a request": "PyTriton, one request per prompt",
    "PyTriton, one sequence": "PyTriton, one request per sequence",
    "LitServe": "LitServe",
    "infinity": "infinity",
    "Ray Serve": "Ray Serve",
    "vLLM": "vLLM",
    "OpenVINO": "in process: OpenVINO",
    "ONNX Runtime": "in process: ONNX Runtime",
    "transformers, padded": SORTED.name,
    "transformers, one by one": ONE_BY_ONE.name,
}
"""The pictures' rows: the best form whose name begins so."""
TITLES = {"bare": "questions alone", "short": "short prompts", "long": "long prompts"}


def draw(results: dict, folder: Path) -> None:
    """Draws a picture for each part of the results."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        if "peers" in results:
            _save(plt, _times(plt, results["peers"]), folder / "bench.png")
        if "growth" in results:
            _save(plt, _growth(plt, results["growth"]), folder / "bench_growth.png")
        if "rates" in results:
            _save(plt, _shares(plt, results["rates"]), folder / "bench_limit.png")


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
    plt.close(figure)


def _times(plt: Any, part: dict) -> Any:
    """Draws one panel per load: guerdon's speed-up over each peer's best form, by responses per prompt."""
    loads = [name for name in PROMPTS if any(cell["load"] == name for cell in part["cells"])]
    cells = {name: [cell for cell in part["cells"] if cell["load"] == name] for name in loads}
    times = {name: [_times_of(cell) for cell in cells[name]] for name in loads}
    peers = [p for p in PEERS if any(p in told for of in times.values() for told in of)]
    widths = [max(5, len(cells[name])) for name in loads]
    figure, panels = plt.subplots(
        1, len(loads), figsize=(2.5 + 0.46 * sum(widths), 1.5 + 0.36 * len(peers)), width_ratios=widths, squeeze=False
    )
    colours = plt.matplotlib.colors.LinearSegmentedColormap.from_list("times", ["#ffffff", BAND, MAIN])
    for axis, name in zip(panels[0], loads, strict=True):
        table = np.array([[told.get(p, np.nan) for told in times[name]] for p in peers])
        shade = np.log10(np.clip(table, 1, 30)) / np.log10(30)
        axis.imshow(np.ma.masked_invalid(shade), cmap=colours, vmin=0, vmax=1, aspect="auto")
        for (i, j), value in np.ndenumerate(table):
            if np.isfinite(value):
                colour = "white" if shade[i, j] > 0.75 else INK if value >= 1 else SECOND
                axis.text(j, i, _short(value), ha="center", va="center", color=colour, fontsize=10)
        axis.set_xticks(range(len(cells[name])), [str(cell["responses"]) for cell in cells[name]])
        axis.set_yticks(range(len(peers)), peers if axis is panels[0][0] else [])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        tokens = round(statistics.median(cell["prompt_tokens"] for cell in cells[name]))
        axis.set_title(f"{TITLES[name]}, {tokens:,} tokens", fontsize=10)
        axis.set_xlabel("responses a prompt")
    figure.suptitle(
        "How many times as many sequences a second guerdon scores", x=0.01, ha="left", fontweight="bold", fontsize=12
    )
    figure.text(0.01, -0.03, f"float32, the same weights and cores; {part['hardware']}, {part['date']}", color=MUTED,
                fontsize=8.5)  # fmt: skip
    figure.tight_layout()
    return figure


def _times_of(cell: dict) -> dict[str, float]:
    """Returns the speed-up of guerdon's server over each peer's best form, by row of the picture."""
    _, mine = best(cell, ours=True, served=True)
    told = {}
    for peer, beginning in PEERS.items():
        found = [
            rate(row)
            for name, row in cell["forms"].items()
            if name.startswith(beginning) and (name != PADDED_TO_MAXIMUM or beginning == PADDED_TO_MAXIMUM)
        ]
        if found:
            told[peer] = mine / max(found)
    return told


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _growth(plt: Any, part: dict) -> Any:
    """Draws milliseconds per prompt by its responses, beside the costs of P + N·R and of all tokens sent."""
    rows = part["rows"]
    counts = np.array([row["responses"] for row in rows])
    ms = np.array([1e3 * statistics.median(row["seconds"]) / row["groups"] for row in rows])
    tokens = growth.PROMPT + counts * growth.RESPONSE
    factor = growth.nearest(tokens, ms)
    along = np.linspace(1, counts[-1], 100)
    figure, axis = plt.subplots(figsize=(6.4, 4.0))
    line = factor * (growth.PROMPT + along * growth.RESPONSE)
    axis.fill_between(along, 0.9 * line, 1.1 * line, color=BAND, label="within 10% of it", linewidth=0)
    axis.plot(along, line, color=MAIN, label="c · (P + N·R): the tokens computed")
    axis.plot(along, factor * along * (growth.PROMPT + growth.RESPONSE), color=MUTED, linestyle="--",
              label="c · N·(P + R): the tokens sent")  # fmt: skip
    axis.plot(counts, ms, "o", color=INK, markersize=6, label="measured", zorder=3)
    axis.set(
        xlabel="N, responses a prompt",
        ylabel="milliseconds a prompt",
        xticks=counts[counts != 2],
        ylim=(0, 2.2 * ms[-1]),
    )
    axis.set_title(f"What a prompt costs (P = {growth.PROMPT} tokens, R = {growth.RESPONSE})")
    axis.grid(axis="y")
    axis.legend(frameon=False, loc="upper left")
    return figure


def _shares(plt: Any, part: dict) -> Any:
    """Draws bars: the forward's FLOP/s as a share of those of its matrix products alone."""
    rows = part["models"][::-1]
    shares = [statistics.median(rates.shares_of(row)) for row in rows]
    spread = np.array([[s - min(rates.shares_of(r)), max(rates.shares_of(r)) - s]
                       for s, r in zip(shares, rows, strict=True)]).T  # fmt: skip
    names = [f"Llama {row['shape']}\n{row['dtype']}" for row in rows]
    figure, axis = plt.subplots(figsize=(6.8, 1.4 + 0.62 * len(rows)))
    axis.barh(names, shares, color=[MAIN if row["dtype"] == "float32" else MUTED for row in rows], height=0.6,
              xerr=np.clip(spread, 0, None), ecolor=INK, capsize=2)  # fmt: skip
    for i, (row, share) in enumerate(zip(rows, shares, strict=True)):
        alone = row["product_flops"] / statistics.median(row["product_seconds"]) / 1e9
        inside = share > 0.45
        axis.text(
            0.015 if inside else max(rates.shares_of(row)) + 0.015, i, f"{share:.0%} of {alone:,.0f} GFLOP/s",
            va="center", color="white" if inside else INK, fontweight="bold" if inside else "normal",
        )  # fmt: skip
    least = rates.LEAST[part["device"]]
    axis.axvline(least, color=SECOND, linewidth=1, linestyle="--", zorder=0)
    axis.text(least, len(rows) - 0.45, f"{least:.0%}", color=SECOND, ha="center", fontsize=9)
    axis.set(xlim=(0, 1.05), xticks=np.arange(0, 1.01, 0.25))
    axis.xaxis.set_major_formatter(plt.matplotlib.ticker.PercentFormatter(1.0))
    axis.set_title("The packed forward's FLOPs, of what its matrix products alone reach", pad=16)
    return figure
