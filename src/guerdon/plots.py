"""How guerdon's pictures look: the colours and the style that all of them share."""

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
"""What `matplotlib.pyplot.rc_context` is given."""


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files alone; imported only here, as it is an extra and takes its time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
