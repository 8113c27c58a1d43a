"""The colours and the style of all pictures."""

from __future__ import annotations

from typing import Any

MAIN, SECOND, BAND, INK, MUTED = "#1b7f79", "#d1495b", "#cfe5e2", "#2b2d42", "#8d99ae"

STYLE: dict[str, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#e6e8ec",
}
"""For `matplotlib.pyplot.rc_context`."""


def pyplot() -> Any:
    """Returns `matplotlib.pyplot` with a backend for files; imported late because it is an extra, and slow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def name_lines(axes: Any) -> None:
    """Draws the legend in one line below the title."""
    axes.legend(
        frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(-0.015, 0.985), ncols=3, columnspacing=1.4,
        handlelength=1.2,
    )  # fmt: skip
