"""Measures the server's share of its engine's throughput, its peak request rate, and the spread of its latencies.

  python benchmarks/server_adds.py --data FILE.jsonl[.gz]   prints a table, writes results and a plot under --out
  python benchmarks/server_adds.py --only model             one of the three parts; the others keep their last results

model: the server in a process of its own against one `Engine.score` of the same sequences in this one, alternating, on
the random model of workload.py; both tokenise "texts". "Computing" is the share of the server's time in which it
computed batches, by its own count: the rest of the loss lies between batches. null: requests of one sequence of 512
tokens to a function that computes nothing. latency: times of requests from a client that keeps a number in flight
(closed), and of requests at random times at a share of that rate (open).

The promises, by medians over the rounds: LEAST_SHARE of the engine's rate in every form, LEAST_RATE requests/s in every
protocol, and in a closed loop, in which the model never waits, a p99 within MOST_TIMES the p50. The exit status is 1 if
one does not hold. Nothing is promised for the open loop, whose random bursts are the client's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np

import load
from guerdon import RetryPolicy, RewardClient
from guerdon.assembly import build_scorer
from guerdon.core import Sequence
from guerdon.settings.config import ModelConfig
from report import machine
from server_adds_report import broken_of, plot, table
from ways import GRPC, TEXTS, WAYS, ask_grpc, binary
from workload import DEMO_PROMPTS, MAX_LENGTH, VOCAB_SIZE, make_models, read_groups

IN_FLIGHT = {"a prompt": 16, "a sequence": 64}
NULL_ROW = np.arange(3, 515)
EQUAL_LENGTH, NUM_EQUAL = 256, 512
SHARES = (0.5, 0.8, 0.9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help='JSONL of {"prompt", "responses"}; default: the demo\'s prompts')
    parser.add_argument("--only", choices=["model", "null", "latency"], help="one part; default: all three")
    parser.add_argument("--prompts", type=int, default=24, help="prompts with all their responses (default: 24)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all forms; medians are shown (default: 5)")
    parser.add_argument(
        "--form", default="", help="measure only the forms of model and latency whose names contain this text"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of one latency measurement (default: 15)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the model, results and plot")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    groups = read_groups(args.data or DEMO_PROMPTS, args.prompts)
    kept = args.out / "server_adds.json"
    results = json.loads(kept.read_text()) if args.only and kept.exists() else {}
    for part, measure in (("model", measure_model), ("null", measure_null), ("latency", measure_latency)):
        if args.only in (None, part):
            forms = results.get(part, {}).get("forms", {}) if args.form else {}
            results[part] = {**machine(), "rounds": args.rounds, "forms": forms | measure(groups, args)}
            kept.write_text(json.dumps(results, indent=1))
    text = table(results)
    (args.out / "server_adds.md").write_text(text + "\n")
    plot(results, args.out / "server_adds.png")
    broken = broken_of(results)
    print(text, "\n\nAll of it held." if not broken else "\n\nNOT held:\n" + "\n".join(f"- {what}" for what in broken))
    return 1 if broken else 0


def measure_model(groups: list[list[str]], args: argparse.Namespace) -> dict:
    """Returns each form's sequences/s, share of the engine's, latencies and largest difference from it."""
    engine = build_scorer(ModelConfig(model=str(make_models(args.out, groups))))
    texts = [text for group in groups for text in group]

    def encoded() -> list[np.ndarray]:
        return [row[:MAX_LENGTH] for row in engine.encoder.encode(texts)]

    rows = encoded()
    in_process = {
        "ids": lambda: engine.score([Sequence(row) for row in rows]),
        "texts": lambda: engine.score([Sequence(row) for row in encoded()]),
    }
    wanted = np.array([score.reward for score in in_process["ids"]()])
    ends = [0, *itertools.accumulate(len(group) for group in groups)]
    cuts = {
        "a prompt": list(itertools.starmap(range, itertools.pairwise(ends))),
        "a sequence": [range(i, i + 1) for i in range(len(rows))],
    }
    forms = [(way, size) for size in cuts for way in (*WAYS, TEXTS) if args.form in f"{way.name}, a request {size}"]
    found: dict = {f"{way.name}, a request {size}": {} for way, size in forms}
    with serving(str(args.out / "model")) as (port, grpc_port):
        for number, (way, size) in enumerate([*forms[:1], *forms * args.rounds]):  # the first warms up
            started = time.perf_counter()
            in_process["texts" if way is TEXTS else "ids"]()
            engine_s = len(rows) / (time.perf_counter() - started)
            requests = [way.write([rows[i] for i in cut], [texts[i] for i in cut]) for cut in cuts[size]]
            ask = functools.partial(ask_grpc, grpc_port) if way is GRPC else functools.partial(load.run, port)
            computed_s = batch_seconds(port)
            result = ask(requests, IN_FLIGHT[size], count=len(requests))
            computed_s = batch_seconds(port) - computed_s
            differs = [np.abs(way.read(a) - wanted[list(cuts[size][a.index])]).max() for a in result.answers]
            if number:
                rate = len(rows) / result.seconds
                told = {"engine_s": engine_s, "seq_s": rate, "share": rate / engine_s}
                told |= {"computing": computed_s / result.seconds, "max_diff": float(max(differs))}
                tell(found[f"{way.name}, a request {size}"], told | percentiles(result))
    return found


def measure_null(_: list[list[str]], args: argparse.Namespace) -> dict:
    """Returns requests/s and latencies for one sequence of 512 tokens, by protocol and number in flight."""
    found: dict = {f"{way.name}, {count} in flight": {} for way in WAYS for count in (1, 8, 64)}
    with serving("null_scorer:score") as (port, grpc_port):
        for number in range(args.rounds + 1):
            for way in WAYS:
                ask = functools.partial(ask_grpc, grpc_port) if way is GRPC else functools.partial(load.run, port)
                for count in (1, 8, 64):
                    result = ask([way.write([NULL_ROW], [])], count, seconds=1.5)
                    if number:
                        tell(found[f"{way.name}, {count} in flight"], {"per_s": result.per_s} | percentiles(result))
    return found


def measure_latency(groups: list[list[str]], args: argparse.Namespace) -> dict:
    """Returns requests/s and latencies, by requests, load and round."""
    engine = build_scorer(ModelConfig(model=str(make_models(args.out, groups))))
    real = [row[:MAX_LENGTH] for group in groups for row in engine.encoder.encode(group)]
    equal = list(np.random.default_rng(0).integers(4, VOCAB_SIZE, (NUM_EQUAL, EQUAL_LENGTH)))
    found: dict = {}
    for kind, rows in {"requests of 256 tokens": equal, "real text": real}.items():
        if args.form not in kind:
            continue
        requests = [binary([row], []) for row in rows]
        with serving(str(args.out / "model")) as (port, _):
            for number in range(args.rounds):
                load.run(port, requests, IN_FLIGHT["a sequence"], seconds=3)
                closed = load.run(port, requests, IN_FLIGHT["a sequence"], seconds=args.seconds)
                tell(found.setdefault(f"{kind}, closed", {}), {"per_s": closed.per_s} | percentiles(closed))
                for share in SHARES:
                    luck, dues = random.Random(number), [0.0]
                    while dues[-1] < args.seconds:
                        dues.append(dues[-1] + luck.expovariate(share * closed.per_s))
                    done = load.run_plan(port, list(zip(dues, itertools.cycle(requests), strict=False)))
                    done.seconds = args.seconds
                    row = found.setdefault(f"{kind}, open at {share:.0%} of that", {})
                    tell(row, {"per_s": done.per_s} | percentiles(done))
    return found


def batch_seconds(port: int) -> float:
    """Returns the seconds that the server has computed batches since its start."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("guerdon_batch_seconds_sum"))


def percentiles(result: load.Result) -> dict[str, float]:
    """Returns percentiles in milliseconds, and p99 over p50; raises if a request failed."""
    if wrong := [a for a in result.answers if a.status != 200]:
        raise SystemExit(f"{len(wrong)} requests failed, the first with {wrong[0].status}: {wrong[0].body[:200]!r}")
    p50, p99 = result.latency_ms(50), result.latency_ms(99)
    return {"p50_ms": p50, "p99_ms": p99, "p99/p50": p99 / p50}


def tell(row: dict[str, list[float]], told: dict[str, float]) -> None:
    """Adds one round's figures to those of the rounds before."""
    for name, value in told.items():
        row.setdefault(name, []).append(value)


@contextlib.contextmanager
def serving(model: str) -> Iterator[tuple[int, int]]:
    """Runs a server in a process of its own; yields its ports."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, grpc_port = one.getsockname()[1], other.getsockname()[1]
    model = model if ":" in model else str(Path(model).absolute())
    command = [sys.executable, "-m", "guerdon", "serve", model, "--port", str(port), "--grpc-port", str(grpc_port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(command, cwd=Path(__file__).parent, env=environment, stdout=subprocess.DEVNULL)
    try:
        with RewardClient(f"http://127.0.0.1:{port}", policy=RetryPolicy(timeout_s=60)) as client:
            client.wait_ready(60)
        yield port, grpc_port
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
