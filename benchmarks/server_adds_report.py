"""Formats the results of server_adds.py as Markdown and as a picture, and checks the promises."""

from __future__ import annotations

from pathlib import Path
from statistics import median

LEAST_SHARE, LEAST_RATE, MOST_TIMES = 0.97, 1000, 2.0
"""The promises: of the engine's rate, requests/s without a model, and how far p99 may be from p50 in a closed loop."""

HEADS = {
    "model": (("engine_s", "seq_s", "share", "computing", "p50_ms", "p99_ms", "max_diff"),
              "| form | engine, sequences/s | server | share | computing | p50 ms | p99 ms | largest difference |"),
    "null": (("per_s", "p50_ms", "p99_ms", "p99/p50"),
             "| one sequence of 512 tokens a request | requests/s | p50 ms | p99 ms | p99/p50 |"),
    "latency": (("per_s", "p50_ms", "p99_ms", "p99/p50"),
                "| one sequence a request | requests/s | p50 ms | p99 ms | p99/p50 |"),
}  # fmt: skip
"""By part: the columns of its table, and the head above them."""

_DIGITS = {"share": 3, "computing": 3, "p99/p50": 2}
_WITH_RANGE = ("share", "p99/p50")


def broken_of(results: dict) -> list[str]:
    """Returns the broken promises of the measured parts, by medians over the rounds."""
    broken = []
    for name, row in _forms(results, "model"):
        if not median(row["share"]) >= LEAST_SHARE:
            broken.append(f"{name}: {median(row['share']):.3f} of the engine's rate, less than {LEAST_SHARE}")
    for name, row in _forms(results, "null"):
        if "64 in flight" in name and not median(row["per_s"]) >= LEAST_RATE:
            broken.append(f"no model, {name}: {median(row['per_s']):.0f} requests/s, less than {LEAST_RATE}")
    for name, row in _forms(results, "latency"):
        if "closed" in name and not median(row["p99/p50"]) <= MOST_TIMES:
            broken.append(f"{name}: p99 is {median(row['p99/p50']):.2f} times p50, more than {MOST_TIMES:g}")
    return broken


def table(results: dict) -> str:
    """Formats medians over the rounds, and the ranges of what is promised."""
    lines = []
    for part, (columns, head) in HEADS.items():
        if part not in results:
            continue
        about = results[part]
        lines += [
            f"{about['date']}, commit {about['commit']}, {about['hardware']}. Medians of {about['rounds']} rounds.", "",
            head, "|" + " --- |" * (1 + len(columns)),
        ]  # fmt: skip
        lines += [
            f"| {name} | {' | '.join(_cell(column, row[column]) for column in columns)} |"
            for name, row in about["forms"].items()
        ]
        lines.append("")
    return "\n".join(lines).rstrip()


def _cell(column: str, values: list[float]) -> str:
    if column == "max_diff":
        return f"{max(values):.1e}"
    middle = median(values)
    digits = _DIGITS.get(column, 0 if middle >= 100 else 1)
    told = f"{middle:.{digits}f}"
    return f"{told} ({min(values):.{digits}f} to {max(values):.{digits}f})" if column in _WITH_RANGE else told


def plot(results: dict, path: Path) -> None:
    """Draws bars: the share of the engine's rate, requests/s without a model, p99 over p50; promises are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        ("model", "share", LEAST_SHARE, "share of the engine's sequences/s"),
        ("null", "per_s", LEAST_RATE, "no model: requests/s"),
        ("latency", "p99/p50", MOST_TIMES, "p99 as times p50 (promised of closed loops)"),
    ]
    panels = [panel for panel in panels if panel[0] in results]
    heights = [1 + len(results[part]["forms"]) for part, *_ in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 0.3 * sum(heights) + len(panels)), squeeze=False, height_ratios=heights
    )
    for axis, (part, column, bound, title) in zip(axes[:, 0], panels, strict=True):
        rows = dict(reversed(list(_forms(results, part))))
        values = [median(row[column]) for row in rows.values()]
        spread = [
            [value - min(row[column]) for value, row in zip(values, rows.values(), strict=True)],
            [max(row[column]) - value for value, row in zip(values, rows.values(), strict=True)],
        ]
        axis.barh(list(rows), values, color="#2a6f97", xerr=spread, ecolor="#555555", capsize=2)
        axis.axvline(bound, color="#e07a5f", linestyle="--")
        axis.set_xlim(0, 1.3 * max([*values, bound]))  # a round in which the machine stood still may lie beyond
        axis.set_title(title, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _forms(results: dict, part: str) -> list[tuple[str, dict]]:
    return list(results.get(part, {}).get("forms", {}).items())
