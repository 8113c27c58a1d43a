"""What the clients of a critic whose ranks are killed ask for, must get, and did get."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

import zoo
from guerdon import CriticClient, RetryPolicy, TrainReport, assembly
from guerdon.client.critic_calls import make_train_request
from guerdon.core import Sequence
from guerdon.errors import GuerdonError, RanksLost
from guerdon.settings.config import CriticConfig

GBS, LEARNING_RATE = 4, 1e-3
TOLERANCE = 2e-4
"""Of values and losses, and of weights relative to their norm, after hundreds of AdamW's steps with other rounding."""
START_S = 180.0
"""What a start may take on a busy machine."""


@dataclass
class Found:
    """What a run has come to."""

    num_rounds: int = 0
    blows: Counter[str] = field(default_factory=Counter)
    num_acknowledged: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    told: dict[str, str] = field(default_factory=dict)
    """By class, one error's text."""
    try_s: float = 0.0
    call_s: float = 0.0
    back_s: float = 0.0
    difference: float = 0.0
    least_of_a_step: float = float("inf")
    """The smallest change of the probe's values by one request: a lost or doubled one would be seen by it."""

    def __str__(self) -> str:
        blows = ", ".join(f"{count} {name}" for name, count in sorted(self.blows.items()))
        errors = ", ".join(f"{count} {name}" for name, count in self.errors.most_common())
        return (
            f"{self.num_rounds} rounds ({blows}): {self.num_acknowledged} requests acknowledged, none lost, none "
            f"doubled; longest single try {self.try_s:.1f} s, longest call with retries {self.call_s:.1f} s, longest "
            f"way back {self.back_s:.1f} s; errors: {errors or 'none'}; values differ by at most {self.difference:.1e} "
            f"(one request changes them by at least {self.least_of_a_step:.1e}); no process and no port left"
        )


class Work:
    """The requests of a run, by number: any two runs of one seed ask for the same."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = np.random.default_rng(seed)
        self.probe = [rng.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n) for n in (9, 17, 30, 5)]

    def rows(self, number: int) -> tuple[np.ndarray, ...]:
        """Tokens, returns, previous values and mask of that train request: two or three global batches."""
        rng = np.random.default_rng((self._seed, number))
        num_rows, width = int(rng.integers(GBS + 1, 3 * GBS)), int(rng.integers(12, 40))
        tokens = rng.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, (num_rows, width))
        tokens[: num_rows // 2, : width // 2] = tokens[0, : width // 2]
        returns, values = rng.normal(size=(2, num_rows, width - 1)).astype(np.float32)
        mask = (np.arange(width - 1) >= width // 2 - 1).astype(np.float32)[None].repeat(num_rows, 0)
        return tokens, 3 * returns, values, mask


class Reference:
    """The critic of one process that is given what was acknowledged."""

    def __init__(self, model: Path, work: Work) -> None:
        config = CriticConfig(model=str(model), global_batch_size=GBS, learning_rate=LEARNING_RATE)
        self.trainer = assembly.build_trainer(config)
        self._work = work

    def train(self, number: int) -> TrainReport:
        return self.trainer.train(make_train_request(*self._work.rows(number)))

    def values(self) -> np.ndarray:
        scores = self.trainer.score([Sequence(tokens) for tokens in self._work.probe])
        return np.concatenate([score.values for score in scores])

    def weights(self, folder: Path) -> dict[str, torch.Tensor]:
        folder.mkdir()
        self.trainer.save(folder)
        return weights_of(folder)


class Witnesses:
    """Threads that ask for the probe's values again and again, one try each, and note how long each took."""

    def __init__(self, url: str, work: Work, found: Found, limit_s: float, count: int = 2) -> None:
        self.slow: list[str] = []
        self._found, self._limit_s = found, limit_s
        self._over, self._paused = threading.Event(), threading.Event()
        once = RetryPolicy(timeout_s=START_S, tries=1)
        self._clients = [CriticClient(url, policy=once) for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(c, work)) for c in self._clients]
        self._resting = [threading.Event() for _ in range(count)]

    def __enter__(self) -> Witnesses:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client, thread in zip(self._clients, self._threads, strict=True):
            client.close()
            thread.join()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While within it they ask for nothing, and nothing is under way."""
        self._paused.set()
        for resting in self._resting:
            resting.clear()
        for resting in self._resting:
            resting.wait(self._limit_s)
        try:
            yield
        finally:
            self._paused.clear()

    def _run(self, client: CriticClient, work: Work) -> None:
        resting = self._resting[self._clients.index(client)]
        while not self._over.is_set():
            if self._paused.is_set():
                resting.set()
                self._over.wait(0.01)
                continue
            resting.clear()
            started, pause_s = time.monotonic(), 0.03
            try:
                client.infer(tokens=work.probe).raise_for_failed()
            except GuerdonError as e:
                if self._over.is_set():
                    return
                note(self._found, e)
                pause_s = 0.3
            took = time.monotonic() - started
            self._found.try_s = max(self._found.try_s, took)
            if took > self._limit_s:
                self.slow.append(f"a witness waited {took:.1f} s")
            self._over.wait(pause_s)


def note(found: Found, error: GuerdonError) -> None:
    """Counts the error of a try that was under way, or came while the server was away."""
    kind = type(error).__name__
    if isinstance(error, RanksLost) and "process" in str(error):
        kind += " naming the rank"
    found.errors[kind] += 1
    found.told.setdefault(kind, str(error))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors of a checkpoint."""
    return {name: t for path in sorted(folder.glob("model*.safetensors")) for name, t in load_file(path).items()}
