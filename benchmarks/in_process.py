"""Scores without a server: guerdon's engine, and transformers padded, sorted and one by one."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from workload import Group

Score = Callable[[str, list[np.ndarray]], list[float]]
"""Scores rows of ids, in one way."""

BATCH = 16
"""Rows that transformers pads into one rectangle, as many as the servers join."""


@dataclass(frozen=True)
class InProcess:
    """A row of the table; `way` is one of `Worker`'s."""

    name: str
    way: str
    pads: bool


ENGINE = InProcess("in process: guerdon's engine", "engine", False)
ONE_BY_ONE = InProcess("in process: transformers, one by one", "one by one", False)
SORTED = InProcess("in process: transformers, sorted by length and padded", "sorted", True)
IN_PROCESS = [
    ENGINE,
    InProcess("in process: transformers, padded as they come", "padded", True),
    SORTED,
    ONE_BY_ONE,
]


class Worker:
    """A process that has loaded the model, by guerdon's engine or transformers, and scores on request.

    Never both in one process: transformers must not profit from guerdon's settings, such as the allocator's.
    """

    def __init__(self, model: Path, *, engine: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._mine, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, str(model), engine), daemon=True)
        self._process.start()
        theirs.close()  # so that a process that ends while it loads is seen to have ended
        self._mine.recv()

    def run(self, way: str, groups: list[Group]) -> tuple[float, list[float]]:
        """Returns the seconds, and the scores in the groups' order."""
        self._mine.send((way, [row for group in groups for row in group.rows]))
        return self._mine.recv()

    def stop(self) -> None:
        """Ends the process."""
        with suppress(OSError):
            self._mine.send(None)
        self._process.join()


def _work(asked: Connection, model: str, engine: bool) -> None:
    score = _engine(model) if engine else _transformers(model)
    score("padded", [np.arange(3, 99)] * 4)
    asked.send("ready")
    while (job := asked.recv()) is not None:
        started = time.perf_counter()
        scores = score(*job)
        asked.send((time.perf_counter() - started, scores))


def _engine(model: str) -> Score:
    from guerdon.assembly import build_scorer
    from guerdon.core import Sequence
    from guerdon.settings.config import ModelConfig

    engine = build_scorer(ModelConfig(model=model, dtype="float32"))
    return lambda _, rows: [score.reward for score in engine.score([Sequence(row) for row in rows])]


def _transformers(model: str) -> Score:
    from peers.scorer import Scorer

    scorer = Scorer(model, BATCH)

    def score(way: str, rows: list[np.ndarray]) -> list[float]:
        if way == "one by one":
            return [scorer.alone(row) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i])) if way == "sorted" else list(range(len(rows)))
        found = scorer.score([rows[i].tolist() for i in order])
        return [score for _, score in sorted(zip(order, found, strict=True))]

    return score
