"""Draws docs/images/result.png from the tables of benchmarks/RESULTS.md: guerdon's speed in multiples of others'."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from guerdon.plots import INK, MAIN, MUTED, STYLE, pyplot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/RESULTS.md"
PICTURE = ROOT / "docs/images/result.png"
WORKLOAD_AT, RIVAL_AT = -0.575, -0.012
"""Where the names begin and end: left of the bars, in widths of the axes."""


@dataclass(frozen=True)
class Workload:
    """One table of the results: the rows of guerdon and its rivals, and the column that is compared."""

    title: str
    section: str
    ours: str
    rivals: dict[str, str]
    """What the picture calls a rival: its row."""
    column: str
    is_rate: bool = False
    """More is better."""
    number: int = 0
    """Which table under the section's heading it is."""

    def factors(self) -> dict[str, float]:
        """Returns how many times as fast as each rival guerdon is."""
        rows = {next(iter(row.values())): float(row[self.column]) for row in table(self.section, self.number)}
        ours = rows[self.ours]
        return {rival: ours / rows[row] if self.is_rate else rows[row] / ours for rival, row in self.rivals.items()}


WORKLOADS = (
    Workload(
        "Critic: a step of training, over HTTP",
        "## Training the critic",
        "guerdon over HTTP",
        {"transformers, padded": "padded, keeping memory"},
        "seconds",
    ),
    Workload(
        "Teacher: 20 log-probs per token, long prompts",
        "## Teachers",
        "guerdon, prompt_logprobs 20",
        {"vLLM": "vLLM, prompt_logprobs 20"},
        "seconds",
        number=1,
    ),
    Workload(
        "REINFORCE: a whole step",
        "## A step of REINFORCE",
        "guerdon",
        {"TRL": "TRL, keeping memory"},
        "step",
    ),
    Workload(
        "Judge: 8 responses, 10 criteria",
        "## Judges",
        "guerdon, one request",
        {"vLLM, its best block": "vLLM's scoring route, blocks of 32, one request of 80 items"},
        "seconds",
    ),
    Workload(
        "Rewards: 8 responses per prompt",
        "### Every rival in one run",
        "guerdon, one request per sequence",
        {
            "PyTriton": "PyTriton, one request per sequence",
            "LitServe": "LitServe, one request per sequence, one at a time",
            "OpenVINO, in process": "in process: OpenVINO, queued",
        },
        "sequences/s",
        is_rate=True,
    ),
    Workload(
        "Rewards, since guerdon has kernels",
        "### vLLM on a CPU",
        "guerdon, one request per prompt",
        {"vLLM": "vLLM, one request per prompt, blocks of 32"},
        "sequences/s",
        is_rate=True,
        number=2,
    ),
)


def table(title: str, number: int = 0) -> list[dict[str, str]]:
    """Returns the rows of a table, the `number`th under the heading `title`, by its columns' names."""
    section = RESULTS.read_text(encoding="utf-8").split(f"\n{title}\n", 1)[1]
    section = re.split(r"\n##+ ", section)[0]
    found = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)][number]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in found]
    return [dict(zip(cells[0], line, strict=True)) for line in cells[2:]]


def draw(path: Path) -> None:
    """Writes the picture; one narrow column, so that a phone shows it as wide as itself."""
    plt = pyplot()
    with plt.rc_context(STYLE | {"font.size": 10.5}):
        figure, axes = plt.subplots(figsize=(7.2, 5.1))
        y, beside, box = 0.0, axes.get_yaxis_transform(), {"facecolor": "white", "lw": 0, "pad": 1}
        for workload in WORKLOADS:
            axes.text(WORKLOAD_AT, y, workload.title, fontweight="bold", va="center", bbox=box, transform=beside)
            for rival, factor in sorted(workload.factors().items(), key=lambda item: -item[1]):
                y += 1
                axes.barh(y, factor, height=0.66, color=MAIN if factor >= 1.05 else MUTED)
                axes.text(factor + 0.06, y, f"{factor:.1f}x", va="center", fontweight="bold", bbox=box)
                axes.text(RIVAL_AT, y, rival, va="center", ha="right", transform=beside)
            y += 1.35
        axes.axvline(1, color=INK, lw=1, ls=(0, (3, 3)), zorder=0)
        axes.set_ylim(y - 0.6, -0.8)
        axes.set_xlim(0, 1.12 * max(max(workload.factors().values()) for workload in WORKLOADS))
        axes.set_yticks([])
        axes.spines[["left"]].set_visible(False)
        axes.set_xlabel("times as fast as (1x: as fast)", loc="left")
        figure.subplots_adjust(left=0.37, right=0.985, top=0.99, bottom=0.1)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor="#ffffff")
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE", help="(default: docs/images/result.png)")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
