"""Formats the results of scale.py as Markdown and as a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from scale_paper import Measured, Setting, busy_s, host_s, model


def measured(results: dict) -> Measured:
    """The parts of the estimate."""
    by_ranks = {int(n): [(row["bytes"], row["whole_s"]) for row in rows] for n, rows in results["commands"].items()}
    return Measured(**results["paper"], command_s=by_ranks)


def report(results: dict, setting: Setting) -> str:
    """Formats medians over the rounds, each with its range."""
    about = results["about"]
    lines = [f"{about['date']}, commit {about['commit']}, {about['hardware']}, one thread a process, float32.", ""]
    if "serve" in results:
        lines += _rates("scoring", results["serve"])
    if "commands" in results:
        lines += ["| ranks | sequences of 300 tokens | bytes | to the others, ms | back, ms | in all, ms |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for ranks, rows in results["commands"].items():
            for row in rows:
                times = " | ".join(f"{row[key] * 1e3:.2f}" for key in ("down_s", "up_s", "whole_s"))
                lines += [f"| {ranks} | {row['sequences']:.0f} | {row['bytes']:,.0f} | {times} |"]
        lines += [""]
    if "train" in results:
        lines += _rates("a train step", results["train"])
    if "paper" in results and "commands" in results:
        lines += _paper(measured(results), setting)
    return "\n".join(lines)


def _rates(what: str, found: dict) -> list[str]:
    lines = [f"{found['samples']} sequences, {found['tokens']:,} tokens.", ""]
    lines += [f"| {what} | seconds | range | sequences/s | tokens/s | times 1 process |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    base = statistics.median(next(iter(found["seconds"].values())))
    for name, seconds in found["seconds"].items():
        middle = statistics.median(seconds)
        rates = f"{found['samples'] / middle:.2f} | {found['tokens'] / middle:,.0f} | {base / middle:.2f}"
        lines += [f"| {name} | {middle:.2f} | {min(seconds):.2f}–{max(seconds):.2f} | {rates} |"]
    return [*lines, ""]


def _paper(parts: Measured, setting: Setting) -> list[str]:
    s = setting
    times = model(s, parts)
    names = list(times)
    lines = [
        f"On paper: {s.num_gpus} H100 SXM, {s.num_parameters / 1e9:.1f}e9 parameters, tensor parallel {s.tensor_size}, "
        f"a batch of {s.num_prompts} prompts ({s.prompt_tokens} tokens) with {s.responses} responses "
        f"({s.response_tokens}): {s.received_tokens:,} tokens received, {s.computed_tokens:,} computed. Data sheets: "
        f"{s.peak_flops / 1e12:.0f} TFLOPS bfloat16 dense, NVLink {2 * s.nvlink_bytes_s / 1e9:.0f} GB/s both ways. "
        f"Assumed: {s.mfu:.0%} of the peak, {s.wire:.0%} of the links. "
        f"Measured here, on one core: {parts.tokenise_tokens_s:,.0f} tokens/s tokenised, "
        f"{parts.decode_bytes_s / 1e6:.0f} MB/s of JSON, {parts.shards_tokens_s:,.0f} tokens/s split, and the commands "
        "above.",
        "",
        f"| seconds of the batch | {' | '.join(names)} |",
        "| --- | --- | --- |",
    ]
    for part in times[names[0]]:
        lines += [f"| {part} | {' | '.join(f'{times[name][part]:.3f}' for name in names)} |"]
    lines += [f"| the GPUs, in all | {' | '.join(f'{busy_s(times[name]):.3f}' for name in names)} |"]
    rates = " | ".join(f"{s.received_tokens / max(busy_s(times[n]), host_s(times[n])):,.0f}" for n in names)
    lines += [f"| tokens/s received | {rates} |", ""]
    for name in names:
        gpus, host = busy_s(times[name]), host_s(times[name])
        busiest = max((p for p in times[name] if not p.endswith("beside it")), key=times[name].__getitem__)
        if host > gpus:
            what = f"rank 0's one core: {host:.2f} s of text for {gpus:.2f} s of the GPUs' work"
        else:
            share = times[name][busiest] / gpus
            what = f"the {busiest}, {share:.0%} of the GPUs' time; rank 0's core is busy {host / gpus:.0%} of it"
        lines += [f"- {name}: the bottleneck is {what}."]
    return [*lines, ""]


def plot(results: dict, setting: Setting, path: Path) -> None:
    """Draws tokens per second, the cost of a command by its size, and the estimate as stacked bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 6.5))
    for axis, part, title in ((axes[0, 0], "serve", "Scoring"), (axes[0, 1], "train", "A train step")):
        if part not in results:
            continue
        found = results[part]
        names = list(found["seconds"])[::-1]
        rates = [found["tokens"] / statistics.median(found["seconds"][name]) for name in names]
        axis.bar_label(axis.barh(names, rates, color="#2a6f97"), fmt="%.0f", padding=4)
        axis.set_title(f"{title}: tokens a second", loc="left", fontsize=10)
        axis.margins(x=0.15)
    if "commands" in results:
        axis = axes[1, 0]
        for ranks, rows in results["commands"].items():
            axis.loglog(
                [r["bytes"] for r in rows], [r["whole_s"] * 1e3 for r in rows], marker="o", label=f"{ranks} ranks"
            )
        axis.set_title("A command that computes nothing: milliseconds", loc="left", fontsize=10)
        axis.set_xlabel("bytes of the command", fontsize=9)
        axis.legend(frameon=False)
        if "paper" in results:
            _plot_paper(axes[1, 1], model(setting, measured(results)))
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _plot_paper(axis: Any, times: dict[str, dict[str, float]]) -> None:
    names = list(times)[::-1]
    left = [0.0] * len(names)
    for part in next(iter(times.values())):
        if part.endswith("beside it"):
            continue
        widths = [times[name][part] for name in names]
        axis.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_title("On paper, 64 GPUs: seconds of a batch", loc="left", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, -0.1), ncols=2)
