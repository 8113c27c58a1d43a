"""What a run of serve.py found, as Markdown and as a picture."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np


def machine() -> dict[str, str]:
    """When, at which commit and on what a measurement is made."""
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": revision.stdout.strip(),
        "hardware": f"{cpu}, {os.cpu_count()} cores, {platform.system()}",
    }


def report(results: dict) -> str:
    """The results as Markdown: medians over the rounds."""
    facts = results["about"]
    median = statistics.median
    lines = [
        f"{facts['date']}, commit {facts['commit']}, {facts['hardware']}. {facts['prompts']} prompts, "
        f"{facts['sequences']} sequences, {facts['tokens']} tokens (median {facts['median_tokens']}), float32. "
        "Medians over the rounds.", "",
    ]  # fmt: skip
    if "model" in results:
        lines += [
            "| scoring | sequences/s | range | tokens/s | p50 ms | p99 ms | largest difference |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, row in results["model"].items():
            seq = f"{median(row['seq_s']):.2f} | {min(row['seq_s']):.2f}–{max(row['seq_s']):.2f}"
            rest = [f"{median(row[k]):.0f}" for k in ("tok_s", "p50_ms", "p99_ms")] if "tok_s" in row else ["", "", ""]
            diff = f"{max(row['max_diff']):.1e}" if "max_diff" in row else ""
            lines.append(f"| {name} | {seq} | {' | '.join(rest)} | {diff} |")
        lines.append("")
    if "null" in results:
        lines += [
            "| no model, 512 tokens a request | p50 ms at 1 | requests/s at 1 | at 8 | at 64 |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name, row in results["null"].items():
            rates = [f"{median(row[f'rps_{c}']):.0f}" for c in (1, 8, 64)]
            lines.append(f"| {name} | {median(row['p50_ms_1']):.2f} | {' | '.join(rates)} |")
        lines.append("")
    if results["missing"]:
        lines.append(f"Not measured, no environment: {', '.join(results['missing'])}.")
    return "\n".join(lines)


def plot(results: dict, path: Path) -> None:
    """Bars: sequences/s by form, and requests/s without a model by concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [p for p in ("model", "null") if p in results]
    figure, axes = plt.subplots(len(parts), 1, figsize=(10, 1.5 + 4 * len(parts)), squeeze=False)
    for axis, part in zip(axes[:, 0], parts, strict=True):
        rows = results[part]
        names = list(rows)[::-1]
        colours = ["#2a6f97" if "guerdon" in n or "engine" in n else "#b5b5b5" for n in names]
        if part == "model":
            values = [statistics.median(rows[n]["seq_s"]) for n in names]
            spread = [
                [v - min(rows[n]["seq_s"]), max(rows[n]["seq_s"]) - v] for n, v in zip(names, values, strict=True)
            ]
            axis.barh(names, values, color=colours, xerr=np.array(spread).T, ecolor="#555555", capsize=2)
            axis.bar_label(axis.containers[-1], fmt="%.1f", padding=6)
            axis.set_title("Scoring: sequences a second (higher is better)", loc="left")
        else:
            values = [statistics.median(rows[n]["rps_64"]) for n in names]
            axis.bar_label(axis.barh(names, values, color=colours), fmt="%.0f", padding=4)
            axis.set_title("No model, 64 requests in flight: requests a second", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
