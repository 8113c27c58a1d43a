"""Measures a server alone and beside a busy process, for several ways in which OpenMP's idle threads may wait.

  python benchmarks/neighbour.py --data FILE.jsonl[.gz] [--rounds 3] [--seconds 10]

One server per setting, in a process of its own with two threads, on the random 384 x 6 model of workload.py; requests
of one sequence's token ids, 16 in flight. Settings alternate within a round; the other servers are stopped meanwhile.
Prints the median sequences/s of every setting, alone and beside the busy process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from guerdon import RewardClient
from report import machine
from workload import MAX_LENGTH, make_models, read_groups

SETTINGS = {
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
    "10,000": {"GOMP_SPINCOUNT": "10000"},
    "guerdon's (1,000)": {},
    "100": {"GOMP_SPINCOUNT": "100"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
IN_FLIGHT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help='JSONL of {"prompt", "responses"}')
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of one measurement (default: 10)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the model")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = [text for group in read_groups(args.data, 48) for text in group]
    model = make_models(args.out, [texts])
    encode = AutoTokenizer.from_pretrained(model)
    rows = [np.array(ids[:MAX_LENGTH]) for ids in encode(texts)["input_ids"]]
    found: dict[tuple[str, bool], list[float]] = {}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(serving(model, more)) for name, more in SETTINGS.items()}
        for _ in range(args.rounds):
            for name, beside in itertools.product(SETTINGS, (False, True)):
                process, url = servers[name]
                process.send_signal(signal.SIGCONT)
                with neighbour() if beside else contextlib.nullcontext():
                    found.setdefault((name, beside), []).append(rate(url, rows, args.seconds))
                process.send_signal(signal.SIGSTOP)
    print(machine())
    print("| threads spin | alone, sequences/s | beside a busy process |\n| --- | --- | --- |")
    for name in SETTINGS:
        alone, beside = (statistics.median(found[name, where]) for where in (False, True))
        print(f"| {name} | {alone:.1f} | {beside:.1f} ({beside / alone:.0%}) |")


@contextlib.contextmanager
def serving(model: Path, variables: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Starts a server, waits until it has loaded the model, and stops it with SIGSTOP; yields it and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "guerdon", "serve", model, "--port", str(port), "--no-grpc"]
    with subprocess.Popen(command, env={"OMP_NUM_THREADS": "2", **os.environ, **variables}) as process:
        try:
            RewardClient(url).wait_ready(120)
            process.send_signal(signal.SIGSTOP)
            yield process, url
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """Runs a process that never waits."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def rate(url: str, rows: list[np.ndarray], seconds: float) -> float:
    """Returns answered sequences/s with IN_FLIGHT requests in flight, after an uncounted first round."""
    with RewardClient(url) as client, ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(lambda row: client.score(tokens=[row]), rows[:IN_FLIGHT]))
        begun = time.perf_counter()

        def work(first: int) -> int:
            count = 0
            for row in itertools.islice(itertools.cycle(rows), first, None):
                if time.perf_counter() - begun > seconds:
                    return count
                client.score(tokens=[row])
                count += 1
            return count

        count = sum(pool.map(work, range(0, len(rows), max(1, len(rows) // IN_FLIGHT))))
        return count / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
