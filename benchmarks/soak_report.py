"""Reports a soak: the checks of its samples, its numbers as Markdown, and its plot."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from soak_ledger import Account, counters

RSS_SHARE = 0.05
"""By so much may the resident memory differ from that after the warm-up, in the median of any part of the time: for a
moment it is more, as while a model is loaded beside the one that serves."""
NEEDED = (
    "connections cut", "gRPC calls cancelled", "bad bodies", "bodies too large", "no HTTP", "slow writers",
    "slow readers", "readers that never read", "stalled bodies", "stalled heads", "refused for their key or path",
    "swaps", "bad swaps", "unloads and loads", "trains cut", "trains with other content",
)  # fmt: skip
"""Events that must have happened, besides the kills; without them a soak has shown less than it claims."""
HALF_OPEN, NOT_PERMITTED = "half-open connections", "half-open connections were not permitted here"
_LEAST_PART_S = 120.0
"""Large bodies, and models beside the one that serves, move the memory by a tenth for half a minute at a time."""


def memory(samples: list[dict[str, float]], from_s: float, to_s: float) -> dict[str, float]:
    """Returns MiB: the medians of the first, the last and the highest tenth of the time, and minimum and maximum."""
    found = [s for s in samples if from_s <= s["s"] <= to_s]
    begun, span = found[0]["s"], found[-1]["s"] - found[0]["s"]
    part = max(_LEAST_PART_S, span / 10)
    count = max(1, round(span / part))
    starts = [begun + i * (span - part) / max(1, count - 1) for i in range(count)]
    medians = [median(s["rss_mb"] for s in found if start <= s["s"] <= start + part) for start in starts]
    sizes = [s["rss_mb"] for s in found]
    return {
        "first": medians[0], "last": medians[-1], "share": medians[-1] / medians[0] - 1, "highest": max(medians),
        "least": min(sizes), "most": max(sizes),
    }  # fmt: skip


def check(
    results: dict[str, Any],
    samples: list[dict[str, float]],
    events: list[tuple[float, str]],
    made: Account,
    metrics: str,
) -> list[str]:
    """Returns the broken checks of memory, of the faults made, and of rechecked scores."""
    wrong = []
    found = results["memory_mb"] = memory(samples, results["measured_from_s"], results["measured_to_s"])
    if abs(found["share"]) > RSS_SHARE:
        wrong.append(f"the memory went from {found['first']:.0f} to {found['last']:.0f} MiB ({found['share']:+.1%})")
    if found["highest"] > (1 + RSS_SHARE) * found["first"]:
        wrong.append(f"the memory went from {found['first']:.0f} to {found['highest']:.0f} MiB between")
    happened = made.notes + Counter(what for _, what in events)
    happened["a worker's exceptions"] = made.sequences["flaky"]["failed"]
    needed = [*NEEDED, "client killed", "trainer killed", "a worker's exceptions"]
    needed += [] if happened[NOT_PERMITTED] else [HALF_OPEN]
    wrong += [f"none of the faults: {fault}" for fault in needed if not happened[fault]]
    rechecked = counters(metrics, "guerdon_recheck_sequences_total", "outcome")
    for outcome in ("differs", "failed"):
        if count := rechecked[outcome,]:
            wrong.append(f"{count:.0f} live scores, when they were computed again: {outcome}")
    waiting = sum(counters(metrics, "guerdon_queue_sequences", "model").values())
    if waiting:
        wrong.append(f"{waiting:.0f} sequences wait although nobody asks")
    return wrong


def summary(made: Account, metrics: str) -> dict[str, Any]:
    """Returns the ledger's outcome, for the file of results."""
    outcomes: Counter[str] = Counter()
    for known in made.known.values():
        outcomes.update(known)
    counted = counters(metrics, "guerdon_requests_total", "model", "outcome")
    rechecked = counters(metrics, "guerdon_recheck_sequences_total", "outcome")
    by_model: dict[str, dict[str, Any]] = {}
    for model in sorted(made.known.keys() | made.doubts.keys()):
        server = {outcome: int(n) for (name, outcome), n in counted.items() if name == model}
        by_model[model] = {"clients": dict(made.known[model]), "in_doubt": made.doubts[model], "server": server}
    return {
        "sent": made.num_sent,
        "answered": sum(outcomes.values()),
        "in_doubt": sum(made.doubts.values()),
        "outcomes": dict(outcomes.most_common()),
        "by_model": by_model,
        "sequences": {model: dict(counts) for model, counts in made.sequences.items()},
        "versions": [f"{model} {version}: {'/'.join(sorted(v))}" for (model, version), v in made.versions.items()],
        "trains": len(made.trained),
        "train_steps": sum(made.trained.values()),
        "faults": dict(made.notes.most_common()),
        "rechecked": {outcome: int(n) for (outcome,), n in rechecked.items()},
    }


def report(results: dict[str, Any]) -> str:
    """Formats the results as Markdown."""
    about, ledger = results["about"], results.get("ledger")
    lines = [f"{about['date']}, commit {about['commit']}, {about['hardware']}, one thread a process.", ""]
    if ledger is not None:
        found, rest, end = results["memory_mb"], results["rest"], results["end"]
        kills = Counter(what for _, what in results["events"])
        faults = ", ".join(f"{count:,} {what}" for what, count in sorted({**ledger["faults"], **kills}.items()))
        outcomes = ", ".join(f"{count:,} {what}" for what, count in ledger["outcomes"].items())
        lines += [
            "| what | found |",
            "| --- | --- |",
            f"| minutes, requests | {results['minutes']:g}, {ledger['sent']:,} ({results['rate_per_s']:.0f}/s wanted, "
            f"{results['share']:.0%} of one client's peak of {results['peak_per_s']:.0f}/s) |",
            f"| answers, each checked | {ledger['answered']:,}: {outcomes} |",
            f"| in doubt: cut, killed, vanished | {ledger['in_doubt']:,} |",
            f"| train requests, steps | {ledger['trains']:,}, {ledger['train_steps']:,}: each applied once |",
            f"| versions that answered | {len(ledger['versions'])} |",
            f"| faults | {faults} |",
            f"| memory after the warm-up, at the end | {found['first']:.0f} MiB, {found['last']:.0f} MiB "
            f"({found['share']:+.1%}; at most {found['highest']:.0f} in any tenth, {found['most']:.0f} for a moment) |",
            f"| files, threads, memory without clients | {rest['fds']}, {rest['threads']}, {rest['rss_mb']:.0f} MiB; "
            f"at the end {end['fds']}, {end['threads']}, {end['rss_mb']:.0f} MiB |",
            f"| live scores looked at again | {ledger['rechecked'] or 'none'} |",
            "",
        ]
    verdict = "All of it held." if results["passed"] else f"NOT held ({results['num_wrong']}):"
    return "\n".join([*lines, verdict, *(f"- {text}" for text in results["wrong"][:40])])


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws memory, files, threads and answers per second over the minutes, with kills and switches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = results["samples"]
    minutes = [s["s"] / 60 for s in samples]
    figure, axes = plt.subplots(3, 1, figsize=(11, 8), sharex=True)
    axes[0].plot(minutes, [s["rss_mb"] for s in samples], color="#2a6f97", linewidth=1)
    if "memory_mb" in results:
        first = results["memory_mb"]["first"]
        axes[0].axhspan(first * (1 - RSS_SHARE), first * (1 + RSS_SHARE), color="#2a6f97", alpha=0.12)
    axes[0].set_title("The server's resident memory, MiB; the band is 5% about that after the warm-up", loc="left")
    axes[1].plot(minutes, [s["fds"] for s in samples], color="#bc6c25", linewidth=1, label="open files")
    axes[1].plot(minutes, [s["threads"] for s in samples], color="#606c38", linewidth=1, label="threads")
    axes[1].set_title("Open files and threads", loc="left")
    axes[1].legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    step = 10
    rates = [
        max(0.0, (b["answered"] - a["answered"]) / (b["s"] - a["s"]))
        for a, b in zip(samples[:-step], samples[step:], strict=True)
    ]
    axes[2].plot(minutes[step:], rates, color="#2a6f97", linewidth=1)
    axes[2].set_title(
        "Requests a second that the server has counted; below: killed (red), switched (green)", loc="left"
    )
    top = max(rates, default=1.0) or 1.0
    for colour, words, height in (("#c1121f", ("killed",), -0.06), ("#2b9348", ("swap", "spare"), -0.12)):
        times = [(at - results["begun"]) / 60 for at, what in results["events"] if any(w in what for w in words)]
        axes[2].scatter(times, [height * top] * len(times), marker="|", color=colour, s=30)
    axes[2].set_xlabel("minutes")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        if "measured_from_s" in results:
            axis.axvline(results["measured_from_s"] / 60, color="#888888", linewidth=0.8, linestyle="--")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
