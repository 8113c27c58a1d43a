"""Draws docs/images/architecture.png: the rooms that a request passes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).resolve().parents[1] / "docs/images/architecture.png"

PAPER, INK, FAINT, LINE = "#fbfaf7", "#1d2733", "#5d6875", "#c9ced6"
ROOM, ASKS, LEARNS, KEPT = "#e6eefb", "#ffffff", "#fdf1d8", "#e9f3e6"
EDGES = {ROOM: "#7fa6d9", ASKS: "#b9bfc9", LEARNS: "#e0a93c", KEPT: "#8fb583"}
TITLE, LINE_HEIGHT = 1.3, 1.2
"""Heights of a box's title and of each line under it, in units of the sheet."""


class Sheet:
    """Draws boxes, words and arrows at given places on a sheet of 100 by 56 units."""

    def __init__(self, axes: Any) -> None:
        self.axes = axes
        axes.set_xlim(0, 100)
        axes.set_ylim(56, 0)
        axes.axis("off")

    def box(
        self, x: float, y: float, width: float, height: float, title: str, text: str = "", fill: str = ROOM
    ) -> None:
        """Draws a box with its upper left corner at (x, y), and words in its middle."""
        from matplotlib.patches import FancyBboxPatch

        style = "round,pad=0,rounding_size=0.9"
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, style, fc=fill, ec=EDGES[fill], lw=1.1))
        self.words(x, y, width, height, title, text)

    def words(self, x: float, y: float, width: float, height: float, title: str, text: str = "") -> None:
        """Writes a title, and smaller lines under it, in the middle of a place."""
        num_lines = text.count("\n") + 1 if text else 0
        top = y + (height - TITLE - 0.5 * bool(text) - LINE_HEIGHT * num_lines) / 2
        middle = x + width / 2
        self.axes.text(middle, top + TITLE / 2, title, ha="center", va="center", fontsize=10, weight="bold", color=INK)
        self.axes.text(
            middle, top + TITLE + 0.5, text, ha="center", va="top", fontsize=8.1, color=FAINT, linespacing=1.3
        )

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """Draws a dashed frame around boxes that run together."""
        from matplotlib.patches import FancyBboxPatch

        style = "round,pad=0,rounding_size=1.4"
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, style, fc="none", ec=LINE, lw=1.3, ls=(0, (4, 3))))
        self.axes.text(x + 1.4, y + 1.7, title, va="center", fontsize=8.8, color=FAINT, fontweight="bold")

    def arrow(self, start: tuple[float, float], end: tuple[float, float], **words: Any) -> None:
        """Draws an arrow, with two heads if `two_ways`; its `text` stands at its middle, moved by `at`."""
        style = "<|-|>" if words.get("two_ways") else "-|>"
        arrow = {"arrowstyle": style, "color": "#75808e", "lw": 1.4, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
        self.axes.annotate("", xy=end, xytext=start, arrowprops=arrow)
        if text := words.get("text"):
            x, y = (start[0] + end[0]) / 2 + words["at"][0], (start[1] + end[1]) / 2 + words["at"][1]
            self.small(x, y, text)

    def small(self, x: float, y: float, text: str, rotation: float = 0) -> None:
        """Writes small words at an arrow."""
        self.axes.text(
            x, y, text, ha="center", va="center", fontsize=7.9, color=FAINT, linespacing=1.25, rotation=rotation
        )


def draw(path: Path) -> None:
    """Draws the picture into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["font.family"] = "DejaVu Sans"
    figure, axes = plt.subplots(figsize=(13, 7.28))
    figure.subplots_adjust(0, 0, 1, 1)
    sheet = Sheet(axes)
    _clients(sheet)
    _server(sheet)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor=PAPER)


def _clients(sheet: Sheet) -> None:
    sheet.frame(1.5, 2, 23.5, 52, "clients")
    boxes = (
        ("Trainers", "OpenRLHF, slime, TRL, verl, AReaL,\nNeMo-RL, SkyRL, verifiers, trlX", 8.2),
        ("guerdon reinforce, ppo, distill", "generate, get rewards, values\nor log-probs, train", 8.2),
        ("RewardClient, CriticClient", "guerdon score, your own program", 8.2),
        ("Clients of other servers", "Triton, vLLM, SGLang, TEI", 6.8),
        ("Browser, Prometheus", "the page at /, /metrics", 6.8),
    )
    y = 5.2
    for title, text, height in boxes:
        sheet.box(3, y, 20.5, height, title, text, ASKS)
        y += height + 2.1
    sheet.arrow((23.5, 26), (32.5, 26), text="HTTP\ngRPC", at=(-0.2, -1.9), two_ways=True)


def _server(sheet: Sheet) -> None:
    sheet.frame(30.5, 2, 68, 52, "guerdon serve, serve-critic, serve-teacher, serve-judge: rank 0")
    sheet.box(32.5, 5.2, 14.5, 41.3, "")
    front = "connections: TLS,\nlimits, time-outs\n\nadmission: keys,\nqueue space\n\nHTTP, gRPC"
    sheet.words(32.5, 9, 14.5, 18, "server/front", front)
    sheet.box(34, 33.5, 11.5, 10.5, "wire", "KServe v2,\ntrainers' JSON;\nno I/O", ASKS)
    sheet.box(51.5, 5.2, 14, 11.5, "server/service", "resolves the model,\ntokenises, sums\nrewards")
    sheet.box(51.5, 21.2, 14, 11.5, "server/batching", "batches by tokens,\nshared prompts once,\nfair per key")
    sheet.box(51.5, 37.2, 14, 9.3, "server/critic", "in order,\nexactly once", LEARNS)
    sheet.box(70, 5.2, 11.3, 11.5, "other ranks", "tensor parallel,\ndata parallel,\nFSDP2", ASKS)
    sheet.box(70, 21.2, 11.3, 11.5, "distributed", "one command\nto every rank")
    sheet.box(85.5, 5.2, 11.5, 27.5, "engine", "checkpoint\n\npacked forward,\nno padding\n\npooling\n\nfloat32 head")
    sheet.box(85.5, 37.2, 11.5, 9.3, "training", "gradient, AdamW,\nschedule", LEARNS)
    sheet.box(70, 37.2, 11.3, 9.3, "journal", "written first", KEPT)
    sheet.box(32.5, 48.6, 33, 4.1, "server/page, metrics, tracing", "", ASKS)
    sheet.box(70, 48.6, 27, 4.1, "checkpoints", "", KEPT)
    sheet.arrow((47, 11), (51.5, 11), two_ways=True)
    sheet.arrow((58.5, 16.7), (58.5, 21.2), text="samples", at=(3.4, 0))
    sheet.arrow((65.5, 27), (70, 27), text="batch", at=(0, -1.3))
    sheet.arrow((81.3, 27), (85.5, 27))
    sheet.arrow((75.65, 21.2), (75.65, 16.7), two_ways=True)
    sheet.arrow((58.5, 37.2), (58.5, 32.7), text="trains", at=(2.9, 0))
    sheet.axes.plot([51.5, 49.6, 49.6], [14.5, 14.5, 41.85], color="#75808e", lw=1.4, solid_capstyle="butt")
    sheet.arrow((49.55, 41.85), (51.5, 41.85))
    sheet.small(48.6, 30, "trains", rotation=90)
    sheet.arrow((65.5, 41.85), (70, 41.85))
    sheet.arrow((81.3, 32.2), (85.5, 38.2), text="trains", at=(-2.1, 1.2))
    sheet.arrow((91.25, 32.7), (91.25, 37.2), two_ways=True)
    sheet.arrow((91.25, 46.5), (91.25, 48.6))
    sheet.arrow((75.65, 46.5), (75.65, 48.6), two_ways=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=PICTURE, help="default: docs/images/architecture.png"
    )
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
