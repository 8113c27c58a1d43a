"""Measures the cost of each protocol: one short text per request, many in flight, a function that computes nothing.

  python benchmarks/protocols.py        a table on the terminal and under --out

All protocols alternate in one run against one server; medians of the rounds are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import load
import report
from guerdon import RetryPolicy, RewardClient

PROMPT, RESPONSE = "Question: what is two and two?\nAnswer:", " four, as every child knows."
TEXT = PROMPT + RESPONSE
BODIES = {
    "KServe v2": (
        "/v2/models/reward_model/infer",
        {"inputs": [{"name": "sentences", "datatype": "BYTES", "shape": [1, 1], "data": [TEXT]}]},
    ),
    "OpenRLHF /get_reward": ("/get_reward", {"query": [TEXT], "prompts": [PROMPT], "labels": [None]}),
    "slime /reward": ("/reward", {"prompt": PROMPT, "response": RESPONSE, "label": None}),
    "vLLM /classify": ("/classify", {"input": TEXT, "use_activation": False}),
    "vLLM /pooling": ("/pooling", {"input": TEXT, "use_activation": False}),
    "SGLang /v1/embeddings": ("/v1/embeddings", {"model": "default", "input": TEXT}),
    "TEI /predict": ("/predict", {"inputs": TEXT}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all protocols (default: 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of one measurement (default: 2)")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight (default: 64)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the results")
    args = parser.parse_args()
    rates: dict[str, list[float]] = defaultdict(list)
    with serving() as port:
        for round_ in range(args.rounds + 1):  # the first one warms up
            for name, (path, body) in BODIES.items():
                request = load.post(path, json.dumps(body).encode())
                result = load.run(port, [request], args.concurrency, seconds=args.seconds)
                if round_:
                    rates[name].append(result.per_s)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    rows = [f"| {name} | {medians[name]:,.0f} | {min(v):,.0f} to {max(v):,.0f} |" for name, v in rates.items()]
    table = "\n".join(
        [" · ".join(report.machine().values()), "", "| protocol | requests/s | range |", "| --- | --- | --- |", *rows]
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "protocols.md").write_text(table + "\n")
    print(table)


@contextlib.contextmanager
def serving() -> Iterator[int]:
    """Runs a server of the function in a process of its own; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "guerdon", "serve", "null_scorer:score_texts", "--port", str(port), "--no-grpc"]
    server = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)
    try:
        with RewardClient(f"http://127.0.0.1:{port}", policy=RetryPolicy(timeout_s=60)) as client:
            client.wait_ready(60)
        yield port
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
