"""The real service over a model that computes by simple arithmetic, so that every value on the wire can be foretold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest, Sequence, Truncation
from guerdon.distributed.commands import Worker
from guerdon.errors import GuerdonError, Overloaded, SampleFailed
from guerdon.kinds.kind import PairSteps, Steps
from guerdon.server.service import Service
from guerdon.settings.config import ModelConfig, ServerConfig

EOS = 2
VOCAB_SIZE = 100_000
MAX_LENGTH = 4096

TEXT_TOKEN = 555
NAN_TOKEN = 666
SLOW_TOKEN = 777
CRASH_TOKEN = 888
BUSY_TOKEN = 999

MARKS = {"<nan>": NAN_TOKEN, "<slow>": SLOW_TOKEN, "<crash>": CRASH_TOKEN, "<busy>": BUSY_TOKEN}
"""What does the same in a text as the token does at the beginning of a row."""


def reward_of(tokens: list[int]) -> float:
    """The reward that the echo service gives a sequence."""
    return float(sum(tokens) % 1000)


def reward_of_text(text: str) -> float:
    """The reward that the echo service gives a text."""
    return float(len(text))


class EchoScorer:
    """Rewards by arithmetic; a text is its characters. Marks can make it slow or fail its sample."""

    encoder: EchoScorer
    max_batch_tokens = 1_000_000
    takes_all = False

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.encoder = self
        self.slow_s = 1.0
        self._go = threading.Event()

    def encode(
        self, texts: list[str], add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[np.ndarray]:
        rows = [np.full(len(text), TEXT_TOKEN) for text in texts]
        for row, text in zip(rows, texts, strict=True):
            row[:1] = next((token for mark, token in MARKS.items() if mark in text), TEXT_TOKEN)
        return rows

    def has_special_tokens(self, text: str) -> bool:
        return False

    def encode_messages(self, conversations: list[list[Message]]) -> list[np.ndarray]:
        return self.encode([str(conversation) for conversation in conversations])

    def encode_in_steps(
        self,
        texts: list[str],
        add_special_tokens: bool,
        truncation: Truncation | None,
        max_tokens: int | None,
        **more: Any,
    ) -> Steps:
        yield
        return self.encode(texts, add_special_tokens, truncation)

    def encode_pairs(self, pairs: list[tuple[str, str]], add_special_tokens: bool = False) -> list[Sequence]:
        return [Sequence(row) for row in self.encode([first + second for first, second in pairs])]

    def encode_pairs_in_steps(
        self,
        pairs: list[tuple[str, str]],
        add_special_tokens: bool,
        truncation: Truncation | None,
        max_tokens: int | None,
        **more: Any,
    ) -> PairSteps:
        yield
        return self.encode_pairs(pairs)

    def encode_messages_in_steps(
        self, conversations: list[list[Message]], truncation: Truncation | None, max_tokens: int | None, **more: Any
    ) -> Steps:
        yield
        return self.encode_messages(conversations)

    def render(self, conversation: list[Message]) -> str:
        return str(conversation)

    def render_prompts(self, conversations: list[list[Message]]) -> list[str]:
        return [str(conversation) for conversation in conversations]

    def pieces(self, tokens: np.ndarray) -> list[str]:
        return ["?"] * len(tokens)

    def texts_of(self, ids: np.ndarray) -> list[str]:
        return ["?"] * len(ids)

    def score(self, sequences: list[Sequence]) -> list[Score | GuerdonError]:
        if any(s.tokens[0] == SLOW_TOKEN for s in sequences):
            self._go.wait(self.slow_s)
        return [self._score(s) for s in sequences]

    @contextmanager
    def held(self) -> Iterator[threading.Event]:
        """Within it what is slow waits for the event that it gives, and for its end."""
        slow_s, self.slow_s = self.slow_s, 120.0
        try:
            yield self._go
        finally:
            self._go.set()
            self._go, self.slow_s = threading.Event(), slow_s

    def _score(self, s: Sequence) -> Score | GuerdonError:
        row = s.tokens
        if row[0] == NAN_TOKEN:
            return SampleFailed("the reward is not finite")
        is_text = row[-1] == TEXT_TOKEN
        score = Score(float(len(row)) if is_text else reward_of(row.tolist()))
        if "values" in self.info.outputs:
            score.attributes = np.array([len(row), row[0]], np.float32)
            score.values = row.astype(np.float32)
            score.steps = None if s.steps is None else row[s.steps].astype(np.float32)
        return score


class EchoService(Service):
    """The service, which also keeps what it was asked; some marks make it crash or refuse."""

    def __init__(self, config: ServerConfig | None = None) -> None:
        common = {"vocab_size": VOCAB_SIZE, "max_length": MAX_LENGTH, "eos_token_id": EOS, "takes_messages": True}
        infos = [
            ModelInfo(name="reward_model", kind="echo", **common),
            ModelInfo(
                name="many", kind="echo", outputs=("rewards", "attributes", "values", "step_rewards"),
                attribute_names=("length", "first"), weights_version="7", source="./checkpoints/many", **common,
            ),
        ]  # fmt: skip
        scorers = {info.name: EchoScorer(info) for info in infos}
        self.scorer = scorers["reward_model"]
        self.cancelled = 0
        self.num_open = 0
        self.requests: list[ScoreRequest] = []
        models = [(ModelConfig(name=name), scorer) for name, scorer in scorers.items()]
        super().__init__(Worker(scorers), models, config or ServerConfig())

    async def score(self, name: str, request: ScoreRequest, client: str = "", **more: Any) -> ScoreReply:
        self.requests = [*self.requests[-9:], request]
        marks = {int(row[0]) for row in request.tokens or [] if len(row)}
        marks |= {token for mark, token in MARKS.items() if mark in str(request.texts or request.messages)}
        if CRASH_TOKEN in marks:
            raise RuntimeError("a secret of the server")
        if BUSY_TOKEN in marks:
            raise Overloaded("the queue is full", 2.5)
        self.num_open += 1
        try:
            return await super().score(name, request, client, **more)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.num_open -= 1
