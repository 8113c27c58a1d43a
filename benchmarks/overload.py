"""Measures a server under ten times its peak load, beside the same server at its peak, alternating in one run.

  python benchmarks/overload.py        prints a table, writes results and a plot under --out

Peak: a client waits for its answers, with enough requests in flight that the model never waits. Overload: a client
sends at ten times that rate and never waits. Fair: the same, and beside it a client with a key of its own that sends a
tenth of the peak. Medians of the rounds are printed. The promises: 90% of the peak's rate, and 99% of the accepted
requests answered within twice the time that a full queue takes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

import load
import report
from promises import LEAST_SHARE, MOST_WAITS, broken_of
from workload import MAX_LENGTH, SHAPE, VOCAB_SIZE

INFER = "/v2/models/reward_model/infer"
NUM_REQUESTS, NUM_SEQUENCES, SHORTEST, LONGEST = 512, 4, 32, 96
TIMES, LITTLE = 10.0, 0.1
"""The rates of the flooding client and of the one beside it, relative to the peak."""
FLOOD, SMALL = "flood", "small"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds over peak, overload and fair (default: 5)")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of one measurement (default: 20)")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds of warm-up, not counted (default: 5)")
    parser.add_argument("--queue", type=int, default=16_384, help="maximum number of queued tokens (default: 16384)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the server's model (default: 1)")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="layers of the model")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the model, results and plot")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bodies, mean_tokens = make_bodies()
    keys = {name: secrets.token_hex(16) for name in (FLOOD, SMALL)}
    requests = {name: [post(body, key) for body in bodies] for name, key in keys.items()}
    rounds: list[dict[str, dict[str, float]]] = []
    samples: dict[str, list[float]] = {}
    with serving(make_model(args.out / "overload-model", args.layers), keys, args) as port:
        in_flight = max(8, args.queue // int(2 * mean_tokens))  # two batches at least, and all of them may wait
        load.run(port, requests[FLOOD], in_flight, seconds=args.settle)  # warm
        for number in range(args.rounds):
            peak = measure_peak(port, requests[FLOOD], in_flight, args)
            limit_s = args.queue / (peak["per_s"] * mean_tokens)
            told = {"peak": peak}
            for name, small_share in (("overload", 0.0), ("fair", LITTLE)):
                plan = make_plan(requests, peak["per_s"], small_share, args.settle + args.seconds, seed=number)
                answers = load.run_plan(port, [(due_s, body) for due_s, _, body in plan]).answers
                sent = [Sent(plan[a.index][1], plan[a.index][0], a.status, a.seconds) for a in answers]
                clients = ("", FLOOD, SMALL) if small_share else ("",)
                told |= {f"{name} {client}".strip(): of_client(sent, client, args) for client in clients}
                samples.setdefault(name, []).extend(s.seconds for s in counted(sent, args) if s.status == 200)
                samples.setdefault(f"{name}: refused", []).extend(
                    s.seconds for s in counted(sent, args) if s.status == 503
                )
                if small_share:
                    mine = [s.seconds for s in counted(sent, args) if s.status == 200 and s.client == SMALL]
                    samples.setdefault(f"{name}: {SMALL}", []).extend(mine)
            for of in told.values():
                of["limit_s"] = limit_s
            rounds.append(told)
            print(json.dumps({name: {k: round(v, 4) for k, v in of.items()} for name, of in told.items()}), flush=True)
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {keys[FLOOD]}"}).text
    results = {
        "about": report.machine(), "mean_tokens": mean_tokens, "in_flight": in_flight,
        "settings": {k: str(v) for k, v in vars(args).items()}, "rounds": rounds, "metrics": metrics,
    }  # fmt: skip
    (args.out / "overload.json").write_text(json.dumps(results, indent=1))
    text = table(results)
    (args.out / "overload.md").write_text(text + "\n")
    plot(results, samples, args.out / "overload.png")
    print(text)
    broken = broken_of(rounds)
    print("All of it held." if not broken else "NOT held:\n" + "\n".join(f"- {what}" for what in broken))
    return 1 if broken else 0


def make_model(folder: Path, num_layers: int) -> Path:
    """Makes a random reward model without a tokenizer: its samples are token ids."""
    torch.manual_seed(0)
    settings = {**SHAPE, "num_hidden_layers": num_layers, "max_position_embeddings": MAX_LENGTH}
    config = LlamaConfig(**settings, vocab_size=VOCAB_SIZE, num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def make_bodies() -> tuple[list[bytes], float]:
    """Returns requests of random ids without shared prefixes, and their mean number of tokens."""
    luck = np.random.default_rng(0)
    bodies, num_tokens = [], 0
    for _ in range(NUM_REQUESTS):
        lengths = luck.integers(SHORTEST, LONGEST + 1, NUM_SEQUENCES)
        rows = luck.integers(4, VOCAB_SIZE, (NUM_SEQUENCES, lengths.max()))
        num_tokens += int(lengths.sum())
        inputs = [
            {"name": "tokens", "datatype": "INT64", "shape": list(rows.shape), "data": rows.tolist()},
            {"name": "sequence_lengths", "datatype": "INT64", "shape": [len(rows), 1], "data": lengths.tolist()},
        ]
        bodies.append(json.dumps({"inputs": inputs}).encode())
    return bodies, num_tokens / NUM_REQUESTS


def post(body: bytes, key: str) -> bytes:
    """Returns the bytes of one request with a key."""
    head, _, rest = load.post(INFER, body).partition(b"\r\n")
    return head + b"\r\nAuthorization: Bearer " + key.encode() + b"\r\n" + rest


@contextlib.contextmanager
def serving(model: Path, keys: dict[str, str], args: argparse.Namespace) -> Iterator[int]:
    """Runs a server of the model in a process of its own; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = os.environ | {
        "GUERDON_API_KEYS": ",".join(f"score {name} {key}" for name, key in keys.items()),
        "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "guerdon", "serve", str(model), "--port", str(port), "--no-grpc"]
    command += ["--max-queue-tokens", str(args.queue)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        if not any("ready at" in line for line in server.stdout):
            raise SystemExit("the server did not start; see above")
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def measure_peak(port: int, requests: list[bytes], in_flight: int, args: argparse.Namespace) -> dict[str, float]:
    """Returns the rate of a client that always has so many requests in flight."""
    load.run(port, requests, in_flight, seconds=args.settle / 2)
    result = load.run(port, requests, in_flight, seconds=args.seconds)
    # Those still under way at the end are waited for and counted, as is their time.
    return {"per_s": result.per_s, "p50_s": result.latency_ms(50) / 1e3, "p99_s": result.latency_ms(99) / 1e3}


def make_plan(
    requests: dict[str, list[bytes]], peak_per_s: float, small_share: float, seconds: float, seed: int
) -> list[tuple[float, str, bytes]]:
    """Plans when each request is sent: both clients' at random (Poisson) times, at their rates."""
    luck = random.Random(seed)
    plan = []
    for client, times in ((FLOOD, TIMES), (SMALL, small_share)):
        due, bodies = 0.0, itertools.cycle(requests[client])
        while times and (due := due + luck.expovariate(times * peak_per_s)) < seconds:
            plan.append((due, client, next(bodies)))
    return sorted(plan, key=lambda entry: entry[0])


@dataclass(frozen=True, slots=True)
class Sent:
    """A request of the plan, with the status and time of its answer."""

    client: str
    due_s: float
    status: int
    seconds: float


def counted(sent: list[Sent], args: argparse.Namespace) -> list[Sent]:
    """Returns those that were due after the warm-up."""
    return [s for s in sent if s.due_s >= args.settle]


def of_client(sent: list[Sent], client: str, args: argparse.Namespace) -> dict[str, float]:
    """Summarises the requests of one client, or of all."""
    mine = [s for s in sent if client in ("", s.client)]
    # The rate is of answers in the time measured: what was sent before, and answered in it, stands for what was sent
    # in it and answered after.
    ends = [s.due_s + s.seconds for s in mine if s.status == 200]
    per_s = sum(args.settle <= end < args.settle + args.seconds for end in ends) / args.seconds
    of = {status: [s.seconds for s in counted(mine, args) if s.status == status] for status in (200, 503)}
    num_others = sum(s.status not in of for s in counted(mine, args))
    told = {"sent_per_s": len(counted(mine, args)) / args.seconds, "per_s": per_s, "others": float(num_others)}
    told["refused"] = float(len(of[503]))
    for name, seconds in (("", of[200]), ("refused_", of[503])):
        for percentile in (50, 99):
            told[f"{name}p{percentile}_s"] = float(np.percentile(seconds, percentile)) if seconds else float("nan")
    return told


def table(results: dict) -> str:
    """Formats medians over the rounds, with the ranges of what is promised."""
    rounds, median = results["rounds"], statistics.median
    lines = [
        " · ".join(results["about"].values())
        + f". {NUM_SEQUENCES} sequences and {results['mean_tokens']:.0f} tokens a "
        f"request, a queue of {results['settings']['queue']} tokens; medians of {len(rounds)} rounds.",
        "",
        "| | sent/s | answered/s | of the peak | p50 s | p99 s | a full queue, s | refused p50 ms | p99 ms | failed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    names = {
        "peak": "peak", "overload": f"overload, {TIMES:g} times the peak", "fair": "overload and another client",
        "fair flood": "of it the client that floods", "fair small": f"of it the other, {LITTLE:g} of the peak",
    }  # fmt: skip
    for name, title in names.items():
        of = [told[name] for told in rounds]
        shares = [told[name]["per_s"] / told["peak"]["per_s"] for told in rounds]
        share = f"{median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"
        cells = [_cell(of, "sent_per_s", 1), _cell(of, "per_s", 1), share, _cell(of, "p50_s", 2), _cell(of, "p99_s", 2)]
        cells += [_cell(of, "limit_s", 2), _cell(of, "refused_p50_s", 1, 1e3), _cell(of, "refused_p99_s", 1, 1e3)]
        lines.append(f"| {title} | {' | '.join(cells)} | {sum(told.get('others', 0) for told in of):.0f} |")
    return "\n".join(lines)


def _cell(of: list[dict[str, float]], name: str, digits: int, unit: float = 1.0) -> str:
    values = [told[name] * unit for told in of if not np.isnan(told.get(name, float("nan")))]
    return f"{statistics.median(values):.{digits}f}" if values else ""


def plot(results: dict, samples: dict[str, list[float]], path: Path) -> None:
    """Draws rates by round, and the times of accepted and refused requests."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rounds = results["rounds"]
    figure, (rates, accepted, refused) = plt.subplots(1, 3, figsize=(15, 4.5))
    numbers = np.arange(1, len(rounds) + 1)
    for name, colour in (("peak", "#777777"), ("overload", "#2a6f97"), ("fair", "#e07a5f")):
        rates.plot(numbers, [told[name]["per_s"] for told in rounds], "o-", color=colour, label=name)
    least = [LEAST_SHARE * told["peak"]["per_s"] for told in rounds]
    rates.plot(numbers, least, "--", color="#bbbbbb", label=f"{LEAST_SHARE:.0%} of the peak")
    rates.set(title="answered requests/s", xlabel="round", ylim=(0, None), xticks=numbers)
    limit_s = statistics.median(told["peak"]["limit_s"] for told in rounds)
    for name, colour in (("overload", "#2a6f97"), ("fair", "#e07a5f"), (f"fair: {SMALL}", "#81b29a")):
        _cumulative(accepted, samples[name], name, colour)
    accepted.axvline(limit_s, color="#777777", linestyle=":", label="a full queue")
    accepted.axvline(MOST_WAITS * limit_s, color="#bbbbbb", linestyle="--", label=f"{MOST_WAITS:g} times that")
    accepted.set(title="seconds of accepted requests", xlabel="s", ylabel="share answered", xlim=(0, None))
    for name, colour in (("overload: refused", "#2a6f97"), ("fair: refused", "#e07a5f")):
        _cumulative(refused, [1e3 * s for s in samples[name]], name, colour)
    refused.set(title="milliseconds of refusals", xlabel="ms", ylabel="share answered", xscale="log")
    for axis in (rates, accepted, refused):
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _cumulative(axis: object, seconds: list[float], name: str, colour: str) -> None:
    if seconds:
        axis.plot(np.sort(seconds), np.linspace(0, 1, len(seconds)), color=colour, label=name)


if __name__ == "__main__":
    sys.exit(main())
