"""Ray Serve over {"input_ids": [[...], ...]}, requests joined by @serve.batch."""

from __future__ import annotations

import argparse
import os
import time

import ray
import torch
from ray import serve


@serve.deployment(
    max_ongoing_requests=4096,
    ray_actor_options={"num_cpus": 1, "num_gpus": int(torch.cuda.is_available())},
)
class Reward:
    def __init__(self, folder: str, path: str) -> None:
        import sys

        sys.path.insert(0, path)
        from scorer import Scorer

        torch.set_num_threads(os.cpu_count() or 1)  # Ray would give an actor of one processor a single thread
        self.scorer = None if folder == "null" else Scorer(folder)

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.005)
    async def scored(self, requests: list[list[list[int]]]) -> list[list[float]]:
        rows = [row for request in requests for row in request]
        rewards = iter([0.0] * len(rows) if self.scorer is None else self.scorer.score(rows))
        return [[next(rewards) for _ in request] for request in requests]

    async def __call__(self, request) -> dict:
        return {"scores": await self.scored((await request.json())["input_ids"])}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder, or `null`")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    ray.init(
        num_cpus=os.cpu_count(), include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=200 << 20
    )
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    from pathlib import Path

    serve.run(Reward.bind(args.model, str(Path(__file__).parent)), route_prefix="/")
    while True:
        time.sleep(3600)
