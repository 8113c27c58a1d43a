"""A service whose process may have little more memory than it has, scored by; prints what came of it as JSON.

python short_of_memory.py FOLDER        the folder's checkpoint is a reward model without a tokenizer
"""

import asyncio
import json
import re
import resource
import sys
from typing import Any

import numpy as np
import psutil

from guerdon.assembly import build_service
from guerdon.core import Score, ScoreRequest
from guerdon.server.service import Service
from guerdon.settings.config import ModelConfig, ServerConfig

SPARE = 48 << 20
SHORT, LONG = 96, 7000
COUNT = 40


def main() -> None:
    model = ModelConfig(model=sys.argv[1], max_batch_tokens=10**6, max_length=LONG)
    service = build_service(ServerConfig(models=[model]))
    print(json.dumps(asyncio.run(scored(service))), flush=True)


async def scored(service: Service) -> dict[str, Any]:
    service.start()
    random = np.random.default_rng(0)
    rows = [random.integers(4, 300, SHORT) for _ in range(COUNT)]
    alone = [await rewards(service, [row]) for row in rows]
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + SPARE, resource.RLIM_INFINITY))
    told: dict[str, Any] = {"alone": [r for (r,) in alone], "before": state(service)}
    told["first"] = await rewards(service, rows)
    told["after_first"] = state(service)
    await rewards(service, rows)  # what the allocators keep differs from the first time
    told["settled"] = state(service)
    told["again"] = await rewards(service, rows)
    told["after_again"] = state(service)
    told["with_long"] = await rewards(service, [*rows[:3], random.integers(4, 300, LONG), *rows[3:6]])
    told["after_long"] = state(service)
    told["still"] = await rewards(service, rows[:5])
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await asyncio.to_thread(service.stop)
    return told


async def rewards(service: Service, rows: list[np.ndarray]) -> list[Any]:
    """Of each row its reward, or the text of its error."""
    reply = await service.score("reward_model", ScoreRequest(tokens=rows))
    return [r.reward if isinstance(r, Score) else f"{type(r).__name__}: {r}" for r in reply.results]


def state(service: Service) -> dict[str, float]:
    """The metrics that tell of memory."""
    text = service.metrics.render().decode()
    found = dict(re.findall(r'^(guerdon_\w+)\{model="reward_model"\} (\S+)$', text, re.MULTILINE))
    return {
        "budget": float(found["guerdon_batch_budget_tokens"]),
        "out_of_memory": float(found.get("guerdon_out_of_memory_total", 0)),
    }


if __name__ == "__main__":
    main()
