"""Measures a request to a scorer that computes nothing, without sockets: CPU of all threads, minimum of the rounds.

PYTHONPATH=src python benchmarks/request_cost.py        PYTHONPATH may also name another tree's src
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
import uvloop

from guerdon.assembly import build_service
from guerdon.server.front import http_app
from guerdon.settings.config import ModelConfig, ServerConfig
from guerdon.wire import kserve
from guerdon.wire.tensors import InferRequest, Tensor

ROUNDS, REQUESTS = 12, 500
PATH = "/v2/models/reward_model/infer"


async def measure() -> None:
    tensors = (
        Tensor.of("tokens", np.arange(8 * 64).reshape(8, 64)),
        Tensor.of("sequence_lengths", np.full((8, 1), 64)),
    )
    body, json_length = kserve.encode_request(InferRequest({tensor.name: tensor for tensor in tensors}))
    headers = {
        "host": "localhost",
        "inference-header-content-length": str(json_length),
        "content-length": str(len(body)),
    }
    head = [(name.encode(), value.encode()) for name, value in headers.items()]
    config = ServerConfig(models=[ModelConfig(model="null_scorer:score")])
    service = build_service(config)
    service.start()
    app = http_app.app(service, config)

    async def ask() -> None:
        sent: list[dict] = []
        coming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict:
            return coming.pop() if coming else await asyncio.sleep(3600, {})

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": list(head)}
        await app(scope, receive, send)
        assert sent[0]["status"] == 200, sent

    seconds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(REQUESTS):
            await ask()
        seconds.append((time.process_time() - started) / REQUESTS)
    service.stop()
    print(f"{1e6 * min(seconds):.0f} microseconds of CPU a request of eight sequences")


if __name__ == "__main__":
    uvloop.run(measure())
