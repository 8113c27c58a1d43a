"""Sends a running server more requests than it can handle, and counts those answered in time.

`python benchmarks/deadlines.py http://127.0.0.1:5555 --connections 2` measures the rate below capacity, 40 connections
measure it above. Refused requests are sent again after Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter

import httpx
import numpy as np
import orjson


def body(rows: np.ndarray, timeout_s: float) -> bytes:
    """Returns a request to score token rows `[B,T]` with a timeout."""
    lengths = [rows.shape[1]] * len(rows)
    tokens = {"name": "tokens", "shape": rows.shape, "datatype": "INT64", "data": rows.ravel().tolist()}
    told = {"name": "sequence_lengths", "shape": [len(rows), 1], "datatype": "INT64", "data": lengths}
    return orjson.dumps({"inputs": [tokens, told], "parameters": {"timeout": int(timeout_s * 1e6)}})


async def load(asked: argparse.Namespace) -> Counter[int]:
    """Returns the statuses of all answers, with their counts."""
    luck, statuses = np.random.default_rng(0), Counter[int]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=asked.url, timeout=60, limits=limits) as client:
        end = time.monotonic() + asked.seconds

        async def one() -> None:
            while time.monotonic() < end:
                rows = luck.integers(10, 200, (asked.rows, asked.tokens))
                answer = await client.post("/v2/models/reward_model/infer", content=body(rows, asked.timeout_s))
                statuses[answer.status_code] += 1
                if answer.status_code != 200:
                    await asyncio.sleep(float(answer.headers.get("retry-after", 0)))

        await asyncio.gather(*(one() for _ in range(asked.connections)))
    return statuses


def main() -> None:
    """Prints the statuses and the answers per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--connections", type=int, default=40)
    parser.add_argument("--rows", type=int, default=64, help="sequences per request")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per sequence")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    started = time.monotonic()
    statuses = asyncio.run(load(asked))
    print(dict(statuses), f"{statuses[200] / (time.monotonic() - started):.2f} answers/s")


if __name__ == "__main__":
    main()
