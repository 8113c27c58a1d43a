"""A critic asked for one thing after another without an event loop of the test's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.core import ScoreRequest
from guerdon.critic_core import ControlRequest, CriticState, Operation, TrainReport, TrainRequest
from server.arithmetic_critic import ArithmeticService

SAVE = Operation.SAVE


def run(folder: Path, *asked: TrainRequest | Operation, **settings: Any) -> None:
    """Starts a critic, does train requests and operations in turn, and stops it."""
    with Driver(folder, **settings) as critic:
        critic.do(*asked)


class Driver:
    """A running ArithmeticService whose calls block; a context that stops it."""

    def __init__(self, folder: Path | None, **settings: Any) -> None:
        self.service = ArithmeticService(folder, **settings)
        self.trainer = self.service.trainer
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    async def _start(self) -> None:
        self.service.start()

    def train(self, asked: TrainRequest) -> TrainReport:
        return self._runner.run(self.service.call("critic_train", asked))  # type: ignore[arg-type]

    def ask(self, operation: Operation, **more: Any) -> Any:
        request = ControlRequest(operation, **more)
        return self._runner.run(self.service.call(f"critic_{operation}", request))  # type: ignore[arg-type]

    def do(self, *asked: TrainRequest | Operation) -> None:
        """Does train requests and operations in turn."""
        for one in asked:
            self.ask(one) if isinstance(one, Operation) else self.train(one)

    def state(self) -> CriticState:
        return self.ask(Operation.STATE)

    def values(self, *tokens: int) -> tuple[list[float], str]:
        """The values of one sequence, and the version of the weights that gave them."""
        asked = ScoreRequest(tokens=[np.array(tokens)])
        reply = self._runner.run(self.service.score("critic_infer", asked))
        (score,) = reply.results
        return score.values.tolist(), reply.weights_version  # type: ignore[union-attr]

    def close(self) -> None:
        self.service.stop()
        self._runner.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
