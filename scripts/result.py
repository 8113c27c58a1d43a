"""Draws docs/images/result.png from the tables of benchmarks/RESULTS.md: servers' rates, and a step of REINFORCE."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/RESULTS.md"
PICTURE = ROOT / "docs/images/result.png"

OURS, THEIRS, INK, FAINT = "#2b5fa8", "#b9bfc9", "#1d2733", "#6b7480"
PARTS = {
    "generation": "#2b5fa8",
    "reward": "#f2b33d",
    "logprobs": "#7fa6d9",
    "reference": "#b8cdea",
    "update": "#23395b",
}
"""The parts of a step, as the table has them, and their colours."""
SERVERS = "### Every rival in one run"
TITLE_AT = -0.4
"""Where a title begins: above the names, in widths of the axes."""
LABELS = {
    "in process: transformers, one by one": "transformers itself,\none by one",
    "in process: transformers, sorted by length and padded": "transformers itself,\nsorted, padded",
    "PyTriton, one request per prompt, padded to its longest": "PyTriton,\nper prompt, padded",
    "in process: OpenVINO, queued": "OpenVINO, in process,\nqueued",
}
"""Rows of the table of servers that are drawn whatever their rates, and what they are called."""


def table(title: str, number: int = 0) -> list[dict[str, str]]:
    """The rows of a table, the `number`th under the heading `title`, by its columns' names."""
    section = RESULTS.read_text(encoding="utf-8").split(f"\n{title}\n", 1)[1]
    section = re.split(r"\n##+ ", section)[0]
    found = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)][number]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in found]
    return [dict(zip(cells[0], line, strict=True)) for line in cells[2:]]


def measured(title: str) -> str:
    """Date, commit and machine of the tables under a heading, as they stand there."""
    section = RESULTS.read_text(encoding="utf-8").split(f"\n{title}\n", 1)[1]
    date, commit, machine = re.findall(r"^(\d{4}-\d\d-\d\d), commit (\w+)[^,]*(?:\([^)]*\))?, (.*?), Linux",
                                       section.replace("\n", " ").replace(" 20", "\n20"), re.MULTILINE)[0]  # fmt: skip
    machine = machine.replace("(R)", "").replace(" Processor", "")
    return f"{date}, commit {commit}, {machine}"


def draw(path: Path) -> None:
    """The picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10.5, "text.color": INK, "axes.labelcolor": FAINT,
                         "xtick.color": FAINT, "ytick.color": INK, "axes.edgecolor": "#d5d9df"})  # fmt: skip
    # One above the other, and narrow: a phone shows the picture as wide as itself, with words of 9 pixels.
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(5.8, 8.2), height_ratios=(1, 0.42))
    _servers(upper)
    _step(lower)
    for axes in (upper, lower):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#e6e9ed", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.tight_layout(h_pad=2.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, facecolor="#ffffff")


def _servers(axes: Any) -> None:
    rows = {row["scoring"]: row for row in table(SERVERS)}
    names = _drawn(list(rows))[::-1]
    rates = [float(rows[name]["sequences/s"]) for name in names]
    spans = [[float(x) for x in rows[name]["range"].split("–")] for name in names]
    errors = [[rate - low for rate, (low, _) in zip(rates, spans, strict=True)],
              [high - rate for rate, (_, high) in zip(rates, spans, strict=True)]]  # fmt: skip
    colours = [OURS if name.startswith("guerdon") else THEIRS for name in names]
    axes.barh([_label(name) for name in names], rates, color=colours, height=0.62, xerr=errors,
              error_kw={"ecolor": FAINT, "elinewidth": 1})  # fmt: skip
    widest = max(high for _, high in spans)
    for i, (_, high) in enumerate(spans):
        axes.text(
            high + 0.013 * widest,
            i,
            rows[names[i]]["sequences/s"],
            va="center",
            fontweight="bold" if names[i].startswith("guerdon") else None,
        )
    axes.set_xlim(0, 1.2 * widest)
    axes.set_xlabel(f"sequences per second, median and range\n{measured(SERVERS)}", loc="left")
    axes.set_title(
        "Scoring eight responses to prompts of 180 tokens", loc="left", fontweight="bold", fontsize=12, x=TITLE_AT
    )


def _drawn(names: list[str]) -> list[str]:
    """Of the table's rows, best first, those of LABELS, guerdon's server, and of every other server its best form."""
    found, seen = [], {"in process"}
    for name in names:
        server = re.split("[,:]", name)[0]
        if name in LABELS or server == "guerdon" or server not in seen:
            found.append(name)
            seen.add(server)
    return found


def _label(name: str) -> str:
    server, _, form = name.partition(", ")
    return LABELS.get(name, f"{server},\n{form.removesuffix(', one at a time')}")


def _step(axes: Any) -> None:
    rows = {row[""]: row for row in table("## A step of REINFORCE")}
    theirs = sorted((name for name in rows if name.startswith("TRL")), key=lambda name: -float(rows[name]["step"]))
    names = [*theirs, "guerdon"]
    labels = ["TRL's RLOOTrainer" + name.removeprefix("TRL").replace(", ", ",\n") for name in theirs] + ["guerdon"]
    starts = [0.0] * len(names)
    for part, colour in PARTS.items():
        widths = [float(rows[name][part]) for name in names]
        axes.barh(labels, widths, left=starts, color=colour, height=0.5, label=part)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for i, name in enumerate(names):
        seconds = float(rows[name]["step"])
        least, most = (float(rows[other]["step"]) / seconds for other in (theirs[-1], theirs[0]))
        times = "" if name != "guerdon" else f"   {most:.1f} and {least:.1f} times as fast"
        axes.text(starts[i] + 0.015 * max(starts), i, f"{seconds:.1f} s{times}", va="center", fontweight="bold")
    axes.set_xlim(0, 1.2 * max(starts))
    axes.set_ylim(-0.5, len(names) - 0.5)
    axes.set_xlabel(f"seconds, medians of all steps\n{measured('## A step of REINFORCE')}", loc="left")
    axes.set_title("A step of REINFORCE, its parts", loc="left", fontweight="bold", fontsize=12, x=TITLE_AT, pad=24)
    axes.legend(ncols=5, frameon=False, loc="lower left", bbox_to_anchor=(TITLE_AT - 0.03, 0.95),
                columnspacing=0.8, handlelength=0.8, handletextpad=0.35, fontsize=9.5)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE", help="(default: docs/images/result.png)")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
