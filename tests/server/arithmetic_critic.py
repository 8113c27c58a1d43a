"""A real service over a critic that computes by simple arithmetic, so that whatever it has learnt can be foretold.

`values = tokens * weight`, and a global batch makes of the weight `weight / 2 + sum(mask * returns)`: a batch that is
lost, applied twice, or applied out of order gives another weight. `after` foretells it.
"""

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from guerdon.core import Message, ModelInfo, Score, Sequence, Truncation
from guerdon.critic_core import TrainReport, TrainRequest
from guerdon.distributed.commands import Worker
from guerdon.errors import GuerdonError, Offloaded, TrainFailed
from guerdon.server.critic.controller import Critic
from guerdon.server.service import Service
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig

VOCAB_SIZE = 100_000
MAX_LENGTH = 4096
FIRST_WEIGHT = 1.0

# As the first token of a row of a train request.
FAIL_TOKEN = 91_001
"""Its global batch fails, those before it stand."""
BUG_TOKEN = 91_002
"""Its global batch is applied in part, and then the trainer raises what it should not."""
SKIP_TOKEN = 91_003
"""Its global batch has a gradient that is not finite, and is skipped."""
SLOW_TOKEN = 91_004
"""Its global batch takes `slow_s` seconds."""
WAIT_TOKEN = 91_005
"""Its global batch waits for `go`."""


def request(id: str, *returns: float, first_token: int = 1, length: int = 3) -> TrainRequest:  # noqa: A002
    """A train request of one row for each of `returns`, which stands in all its columns; mask 1 in the last alone."""
    num_rows = len(returns)
    tokens = np.tile(np.arange(1, length + 1), (num_rows, 1))
    tokens[0, 0] = first_token
    targets = np.tile(np.array(returns, np.float32)[:, None], (1, length - 1))
    mask = np.zeros_like(targets)
    mask[:, -1] = 1
    return TrainRequest(id, tokens, targets, np.zeros_like(targets), mask)


def after(requests: Iterable[TrainRequest], global_batch_size: int = 64, weight: float = FIRST_WEIGHT) -> float:
    """The weight after all of them, each once and in this order."""
    for asked in requests:
        for start in [*range(0, len(asked), global_batch_size)] * asked.updates:
            rows = slice(start, start + global_batch_size)
            if asked.mask[rows].any():
                weight = _learnt(weight, asked, rows)
    return weight


def _learnt(weight: float, asked: TrainRequest, rows: slice) -> float:
    learnt = np.where(asked.mask[rows] > 0, asked.mask[rows] * asked.returns[rows], 0)
    return weight / 2 + float(learnt.sum(dtype=np.float64))


class ArithmeticTrainer:
    """Scores and learns by arithmetic; a text is its characters. Everything is as the worker wants a real trainer."""

    max_batch_tokens = 1_000_000
    takes_all = False

    def __init__(self, config: CriticConfig, *, with_rewards: bool = False) -> None:
        self.info = ModelInfo(
            f"{config.name}_infer",
            "arithmetic",
            outputs=("values", "rewards") if with_rewards else ("values",),
            vocab_size=VOCAB_SIZE,
            max_length=MAX_LENGTH,
        )
        self.encoder = self
        self.weight = FIRST_WEIGHT
        self.step = 0
        self.lineage = 0
        self.run_token = ""
        self.broken = ""
        self.is_offloaded = False
        self.slow_s = 0.5
        self.go = threading.Event()
        self.trained: list[str] = []
        """The ids of all train requests that were begun, in order."""
        self.estimated: list[str] = []
        """The ids of all requests for whose rewards returns were estimated, in order."""
        self.num_batches = 0
        self.num_bytes = 0
        """How many bytes a checkpoint has besides the weight, to fill disks with."""
        self._config = config

    def encode(
        self, texts: list[str], add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def encode_messages(self, conversations: list[list[Message]]) -> list[np.ndarray]:
        return self.encode([str(conversation) for conversation in conversations])

    def score(self, sequences: list[Sequence]) -> list[Score | GuerdonError]:
        self.num_batches += 1
        if self.is_offloaded:
            raise Offloaded("the critic is offloaded: it scores again after `onload`")
        return [Score(float(s.tokens.sum()), values=(s.tokens * self.weight).astype(np.float32)) for s in sequences]

    def train(self, request: TrainRequest, first_batches: int | None = None) -> TrainReport:
        self.trained.append(request.id)
        losses, num_skipped = [], 0
        size = self._config.global_batch_size
        for i, start in enumerate([*range(0, len(request), size)] * request.updates):
            if i == first_batches:
                break
            rows = slice(start, start + size)
            marks = {int(row[0]) for row in request.tokens[rows]}
            if FAIL_TOKEN in marks:
                raise TrainFailed(f"global batch {i} failed; the {i} before it stand", i)
            if WAIT_TOKEN in marks:
                assert self.go.wait(120)
            if SLOW_TOKEN in marks:
                time.sleep(self.slow_s)
            if SKIP_TOKEN in marks:
                num_skipped += 1
            elif request.mask[rows].any():
                losses.append(self._loss(request, rows))
                self._set(_learnt(self.weight, request, rows), self.step + 1)
            if BUG_TOKEN in marks:
                raise RuntimeError("a bug of the trainer")
        return self._report(request, losses, num_skipped)

    def validate(self, request: TrainRequest) -> TrainReport:
        return self._report(request, [self._loss(request, slice(None))], 0)

    def estimate(self, request: TrainRequest) -> TrainRequest:
        """Returns what real ones do for λ = γ = 1 and rewards of tokens: sums of the rewards to come, minus the value.

        Only masked tokens count.
        """
        self.estimated.append(request.id)
        counts = request.mask > 0
        assert request.rewards is not None
        rewards = np.where(counts, request.rewards, 0)
        returns = np.where(counts, rewards[:, ::-1].cumsum(axis=1)[:, ::-1], 0).astype(np.float32)
        values = np.where(counts, request.tokens[:, :-1] * self.weight, 0).astype(np.float32)
        return replace(request, returns=returns, prev_values=values, advantages=returns - values)

    def save(self, folder: Path) -> None:
        state = {"weight": self.weight, "step": self.step, "lineage": self.lineage}
        for name, data in (("weight.json", orjson.dumps(state)), ("rest.bin", b"\0" * self.num_bytes)):
            (folder / name).write_bytes(data)

    def load(self, folder: Path, lineage: int | None = None) -> None:
        state = orjson.loads((folder / "weight.json").read_bytes())
        self.lineage = state["lineage"] if lineage is None else lineage
        self._set(state["weight"], state["step"])

    def offload(self) -> None:
        self.is_offloaded = True

    def onload(self) -> None:
        self.is_offloaded = False

    def state(self) -> dict[str, Any]:
        return {"broken": self.broken, "step": self.step, "learning_rate": 0.5, "num_parameters": 1, "num_trainable": 1}

    def _set(self, weight: float, step: int) -> None:
        self.weight, self.step = weight, step
        run = f"-run{self.run_token}" if self.run_token else ""
        version = f"1+{step}{run}" + (f".{self.lineage}" if self.lineage else "")
        self.info = replace(self.info, weights_version=version)

    def _loss(self, request: TrainRequest, rows: slice) -> float:
        """The mean over the masked tokens of how far the values are from the returns."""
        is_learnt = request.mask[rows] > 0
        off = np.abs(request.tokens[rows, :-1] * self.weight - request.returns[rows])[is_learnt]
        return float(off.mean()) if off.size else 0.0

    def _report(self, request: TrainRequest, losses: list[float], num_skipped: int) -> TrainReport:
        return TrainReport(
            id=request.id,
            step=self.step,
            weights_version=self.info.weights_version,
            loss=float(np.mean(losses)) if losses else 0.0,
            losses=losses,
            num_tokens=int((request.mask > 0).sum()),
            clip_fraction=0.0,
            explained_variance=float("nan"),
            grad_norm=1.0,
            learning_rate=0.5,
            num_steps=len(losses),
            num_skipped=num_skipped,
            value_mean=self.weight,
        )


class ArithmeticService(Service):
    """The real service, restored and not yet started; `trainer` is its critic's, for the tests to look into."""

    def __init__(
        self,
        checkpoint_dir: Path | str | None = None,
        *,
        with_rewards: bool = False,
        server: ServerConfig | None = None,
        **settings: Any,
    ) -> None:
        folder = None if checkpoint_dir is None else str(checkpoint_dir)
        config = CriticConfig(model="arithmetic", checkpoint_dir=folder, **settings)
        self.trainer = ArithmeticTrainer(config, with_rewards=with_rewards)
        group = Worker({self.trainer.info.name: self.trainer}, {config.name: self.trainer})
        self.critic = Critic(config, self.trainer)
        try:
            self.critic.restore(group)
        except BaseException:
            self.critic.close()
            raise
        model = ModelConfig(
            name=self.trainer.info.name,
            max_queue_tokens=config.max_queue_tokens,
            max_queue_sequences=config.max_queue_sequences,
        )
        super().__init__(group, [(model, self.trainer)], server or ServerConfig(), critic=self.critic)


def arrays_of(asked: TrainRequest) -> dict[str, Any]:
    """The arguments of a client's `train` for this request."""
    return {name: getattr(asked, name) for name in ("tokens", "returns", "prev_values", "mask")}
