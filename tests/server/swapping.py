"""A service whose models are swapped, and checkpoints to swap them for."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from guerdon.assembly import PLAIN, Parts, build_service
from guerdon.core import ScoreReply, ScoreRequest
from guerdon.server.batching.orders import Order
from guerdon.server.service import Service
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig, ServerConfig

ROWS = zoo.rows(3)


def checkpoints(root: Path) -> tuple[Path, Path]:
    """Two reward models that differ in nothing but their weights, `root/old` and `root/new`."""
    made = [zoo.tokenizer(zoo.checkpoint("llama", root / name, seed=i)) for i, name in enumerate(("old", "new"))]
    return made[0], made[1]


@contextlib.asynccontextmanager
async def serving(root: Path, *, parts: Parts = PLAIN, **model: Any) -> AsyncIterator[Service]:
    """`root/old` as `reward_model`, the function `length`, and `total`, the sum of both; `root` is the repository."""
    models = [
        ModelConfig(**{"model": str(root / "old"), "name": "reward_model", **model}),
        ModelConfig(model="rewarding:brevity", name="length"),
    ]
    components = [ComponentConfig(model="reward_model"), ComponentConfig(model="length")]
    total = RewardConfig(name="total", components=components)
    config = ServerConfig(models=models, rewards=[total], model_repository=str(root))
    service = build_service(config, parts)
    service.start()
    try:
        yield service
    finally:
        await asyncio.to_thread(service.stop)


async def score(service: Service, *, texts: list[str] | None = None, name: str = "reward_model") -> ScoreReply:
    return await service.score(name, ScoreRequest(tokens=None if texts else ROWS, texts=texts))


def rewards(reply: ScoreReply) -> np.ndarray:
    return np.array([result.reward for result in reply.results])  # type: ignore[union-attr]


def version(service: Service, name: str = "reward_model") -> str:
    return service.catalog.scored_by(name).weights_version


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.contextmanager
def held(service: Service, name: str = "reward_model") -> Any:
    """Within it the thread that computes stands still; what is asked meanwhile waits."""
    go_on, stands = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        stands.set()
        go_on.wait(120)

    service.loops.of[name].order(name, Order(wait))
    stands.wait(120)
    try:
        yield
    finally:
        go_on.set()
