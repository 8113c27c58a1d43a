"""Measures a critic's train step: plain transformers on padded batches, guerdon in process and over HTTP, alternating.

  python benchmarks/critic.py --data FILE.jsonl[.gz]       prints a table, writes results and a plot under --out

Two loads: the text of FILE, and random ids with lengths as in RLHF (prompts of about 180 tokens, eight responses of
about 150 each). The served form has a journal on the disk of --out; the cost of network and journal is the client's
time minus the time inside the trainer, which the server's metrics report.

Padding is measured twice: as it is, and in a process that keeps freed memory, as guerdon's do. The promise is LEAST
times the speed of the faster; the last line says whether it holds, and the exit status is 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from critic_forms import KEEPS_MEMORY
from critic_server import serving
from guerdon.core import common_prefix
from report import machine
from workload import DEMO_PROMPTS, MAX_LENGTH, VOCAB_SIZE, make_models, read_groups

HERE = Path(__file__).parent
PADDED = {"padded": {}, "padded, keeping memory": KEEPS_MEMORY}  # with what in the environment
OWN = ("guerdon", "guerdon over HTTP")
LEAST = 3.6
RESPONSES = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help='JSONL of {"prompt", "responses"}; default: the demo\'s prompts')
    parser.add_argument("--out", type=Path, default=Path("out/bench-critic"), help="folder of models and results")
    parser.add_argument("--prompts", type=int, default=8, help="prompts, each with all its responses (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all forms; medians are shown (default: 3)")
    parser.add_argument("--steps", type=int, default=1, help="steps per form and round (default: 1)")
    parser.add_argument("--port", type=int, default=5556, help="the server's port (default: 5556)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.data or DEMO_PROMPTS
    texts = read_groups(data, args.prompts)
    folder = make_models(args.out, texts)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    loads = {
        "random ids, 180 + 8 x 150": random_groups(args.prompts),
        data.name: [[np.array(tokenizer(text)["input_ids"][:MAX_LENGTH]) for text in group] for group in texts],
    }
    results: dict = {"about": machine(), "loads": {}}
    for name, groups in loads.items():
        batch = make_batch(groups)
        np.savez(args.out / "batch.npz", **batch)
        results["loads"][name] = measure(folder, batch, args) | {
            "sequences": len(batch["tokens"]),
            "tokens": int(batch["lengths"].sum()),
        }
    (args.out / "critic.json").write_text(json.dumps(results, indent=1))
    text = report(results)
    (args.out / "critic.md").write_text(text)
    print(text)
    plot(results, args.out / "critic.png")
    broken = broken_of(results)
    print(f"Promised is {LEAST} times the faster padded step: {'; '.join(broken) or 'that holds'}.")
    return int(bool(broken))


def random_groups(count: int) -> list[list[np.ndarray]]:
    """Returns the sequences of each of `count` prompts: log-normal lengths of medians 180 and 150."""
    rng = np.random.default_rng(0)

    def ids(median: int, low: int, high: int) -> np.ndarray:
        length = int(np.clip(rng.lognormal(np.log(median), 0.7), low, high))
        return rng.integers(3, VOCAB_SIZE, length)

    groups = []
    for _ in range(count):
        prompt = ids(180, 16, 768)
        groups.append([np.concatenate([prompt, ids(150, 8, 768)]) for _ in range(RESPONSES)])
    return groups


def make_batch(groups: list[list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Makes a PPO trainer's request: a target for every token of the responses, rows prompt by prompt."""
    rng = np.random.default_rng(1)
    rows = [(min(common_prefix(group[0], row) for row in group), row) for group in groups for row in group]
    count, width = len(rows), max(len(row) for _, row in rows)
    tokens = np.zeros((count, width), np.int64)
    mask = np.zeros((count, width - 1), np.float32)
    for i, (prompt, row) in enumerate(rows):
        tokens[i, : len(row)] = row
        mask[i, prompt - 1 : len(row) - 1] = 1
    return {
        "tokens": tokens,
        "mask": mask,
        "returns": rng.normal(size=mask.shape).astype(np.float32),
        "prev_values": rng.normal(size=mask.shape).astype(np.float32),
        "lengths": np.array([len(row) for _, row in rows]),
    }


def measure(folder: Path, batch: dict[str, np.ndarray], args: argparse.Namespace) -> dict:
    """Returns the seconds of every step by form, and the server's seconds per step outside the trainer."""
    seconds: dict[str, list[float]] = {form: [] for form in (*PADDED, *OWN)}
    outside: list[float] = []
    for _ in range(args.rounds):
        for form in tqdm(seconds, leave=False):
            if form == "guerdon over HTTP":
                times, rest = over_http(folder, batch, args)
                outside += rest
            else:
                kind = "padded" if form in PADDED else form
                command = [sys.executable, HERE / "critic_forms.py", kind, folder, args.out / "batch.npz"]
                command += ["--steps", str(args.steps)]
                environment = os.environ | PADDED.get(form, {})
                printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
                times = [float(line) for line in printed.split()]
            seconds[form] += times
    return {"seconds": seconds, "outside_s": outside}


def over_http(folder: Path, batch: dict[str, np.ndarray], args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Returns the seconds of each train call as the client sees it, and the part outside the trainer."""
    url = f"http://127.0.0.1:{args.port}"
    journal = args.out / f"checkpoints-{time.time_ns()}"
    flags = ("--checkpoint-dir", str(journal), "--global-batch-size", str(len(batch["tokens"])))
    inputs = {k: batch[k] for k in ("tokens", "returns", "prev_values", "mask")}
    times, outside = [], []
    with serving(folder, args.port, args.out / "server.log", *flags) as client:
        client.train(**{k: x[:16] for k, x in inputs.items()}).result()  # to warm up
        for _ in range(args.steps):
            before = in_trainer(url)
            started = time.perf_counter()
            client.train(**inputs).result()
            times.append(time.perf_counter() - started)
            outside.append(times[-1] - (in_trainer(url) - before))
    return times, outside


def in_trainer(url: str) -> float:
    """Returns the seconds that all train requests so far took inside the trainer."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(x) for x in re.findall(r"^guerdon_train_seconds_sum\S* (\S+)$", text, re.MULTILINE))


def report(results: dict) -> str:
    """Formats the results as Markdown: medians over the steps."""
    median, about = statistics.median, results["about"]
    lines = [f"{about['date']}, commit {about['commit']}, {about['hardware']}, float32. Medians of all steps.", ""]
    for name, load in results["loads"].items():
        lines += [
            f"{name}: {load['sequences']} sequences, {load['tokens']} tokens.",
            "",
            "| step | seconds | range | tokens/s | times padded |",
            "| --- | --- | --- | --- | --- |",
        ]
        base = fastest_padded(load)
        for form, seconds in load["seconds"].items():
            s, rate = median(seconds), load["tokens"] / median(seconds)
            spread = f"{min(seconds):.2f}–{max(seconds):.2f}"
            lines.append(f"| {form} | {s:.2f} | {spread} | {rate:.0f} | {base / s:.2f} |")
        share = median(o / s for o, s in zip(load["outside_s"], load["seconds"]["guerdon over HTTP"], strict=True))
        lines += [
            "",
            f"Network and journal: {median(load['outside_s']) * 1e3:.0f} ms a step, {share:.1%} of it.",
            "",
        ]
    return "\n".join(lines)


def fastest_padded(load: dict) -> float:
    """Returns the median seconds of the faster padded step."""
    return min(statistics.median(load["seconds"][form]) for form in PADDED)


def broken_of(results: dict) -> list[str]:
    """Returns the loads on which guerdon's speed-up is below the promise."""
    broken = []
    for name, load in results["loads"].items():
        for form in OWN:
            times = fastest_padded(load) / statistics.median(load["seconds"][form])
            if not times >= LEAST:
                broken.append(f"{form} is {times:.2f} times as fast on {name}")
    return broken


def plot(results: dict, path: Path) -> None:
    """Draws bars: tokens per second by form and load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    loads = results["loads"]
    figure, axes = plt.subplots(len(loads), 1, figsize=(9, 2.2 * len(loads)), squeeze=False)
    for axis, (name, load) in zip(axes[:, 0], loads.items(), strict=True):
        forms = list(load["seconds"])[::-1]
        rates = [load["tokens"] / statistics.median(load["seconds"][form]) for form in forms]
        colours = ["#2a6f97" if "guerdon" in form else "#b5b5b5" for form in forms]
        axis.bar_label(axis.barh(forms, rates, color=colours), fmt="%.0f", padding=4)
        axis.set_title(f"Critic training: tokens a second (higher is better); {name}", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
