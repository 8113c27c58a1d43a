"""Offers `RewardModelServer` with NeMo-Aligner's signature: guerdon's server for your own padded `infer_fn`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from guerdon.assembly import Parts, build_service, run
from guerdon.core import ModelInfo, Score, Sequence
from guerdon.distributed.parts import BatchParts, data_parallel_size
from guerdon.distributed.ranks import Ranks
from guerdon.engine.functions import FunctionEncoder, PaddedScorer, check_batching
from guerdon.errors import ConfigError, InvalidRequest, SampleFailed
from guerdon.padded_rows import read_rows
from guerdon.server.batching.jobs import Limits
from guerdon.server.service import Service
from guerdon.settings.config import ModelConfig, ServedModelConfig, ServerConfig


@dataclass(eq=False)
class RewardModelServer:
    """Serves `infer_fn(inputs=(tokens [B,T], lengths [B])) -> rewards [B]`, `[B,1]` or `[B,A]`, over KServe v2.

    `tokenize_func(sentences) -> (tokens [B,T], lengths [B])` turns text into ids. Requests are collected into batches
    of the preferred sizes `inference_micro_batch_size`; the first in the queue waits at most
    `max_queue_delay_microseconds` for more; then all requests in the queue go with it. A request is never split.
    Batches larger than `model_forward_micro_batch_size` are padded to a multiple of it. T is the longest of the batch,
    rounded up to a multiple of `strip_sequence_length_to_multiple`, but no wider than the tensors sent.

    `data_parallel_size` ranks each compute an equal part of every batch, and sizes are multiplied by it, as in
    NeMo-Aligner. Default: that of Megatron if it is initialised in this process; else 1, and every rank computes all
    rows. A `host` that other machines reach, such as 0.0.0.0, needs keys in GUERDON_API_KEYS, or `allow_anonymous`.
    """

    infer_fn: Callable[..., Any]
    tokenize_func: Callable[..., Any]
    model_name: str
    port: int
    inference_micro_batch_size: int | Iterable[int]
    model_forward_micro_batch_size: int
    strip_sequence_length_to_multiple: int | None = None
    max_queue_delay_microseconds: float = 2000
    _: KW_ONLY
    host: str = "127.0.0.1"
    allow_anonymous: bool = False
    data_parallel_size: int | None = None

    def __post_init__(self) -> None:
        sizes = self.inference_micro_batch_size
        self.inference_micro_batch_size = sizes = [sizes] if isinstance(sizes, int) else list(sizes)
        if not sizes or min(*sizes, self.model_forward_micro_batch_size) < 1:
            raise ConfigError("a micro batch size is below 1", "give sizes of at least 1")
        check_batching(self.max_queue_delay_microseconds, self.strip_sequence_length_to_multiple)
        self.data_parallel_size = data_parallel_size(self.data_parallel_size)
        self.preferred_batch_size = [size * self.data_parallel_size for size in sizes]
        self.config = ServerConfig(
            host=self.host,
            port=self.port,
            grpc_port=None,
            allow_anonymous=self.allow_anonymous,
            models=[ModelConfig(name=self.model_name)],
        )
        self.scorer = PaddedScorer(
            self.infer_fn,
            ModelInfo(self.model_name, "function", path="padded", why="a user's infer_fn", merges_attributes=False),
            encoder=FunctionEncoder(self.tokenize_func),
            forward_batch_size=self.model_forward_micro_batch_size,
            strip_to_multiple=self.strip_sequence_length_to_multiple,
        )

    def infer(self, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Scores `sentences` (bytes or str `[B,1]`), or `tokens` `[B,T]` with `sequence_lengths` `[B,1]`.

        This process computes all rows. Returns `rewards` float32 `[B,1]`, or `[B,A]` if `infer_fn` gives attributes;
        raises InvalidRequest for other inputs, SampleFailed if a reward is not finite. Any number of threads may call
        it: `infer_fn` runs in one at a time.
        """
        if set(inputs) == {"sentences"}:
            tokens, lengths = self.scorer.encoder.padded(inputs["sentences"])
        elif set(inputs) == {"tokens", "sequence_lengths"}:
            tokens, lengths = read_rows(inputs["tokens"], inputs["sequence_lengths"])
        else:
            raise InvalidRequest(f"infer takes sentences, or tokens with sequence_lengths, not {sorted(inputs)}")
        sequences = [Sequence(row[:n], width=len(row)) for row, n in zip(tokens, lengths, strict=True)]
        scores = self.scorer.score_here(sequences)
        for score in scores:
            if isinstance(score, SampleFailed):
                raise score
        rewards = [
            [score.reward] if score.attributes is None else score.attributes
            for score in scores
            if isinstance(score, Score)
        ]
        return {"rewards": np.array(rewards, dtype=np.float32)}

    def run_server(self) -> None:
        """Serves until SIGTERM or SIGINT; then finishes what was accepted and returns.

        If this process is one of several, started by torchrun or joined by torch.distributed, all must call it: rank 0
        serves, and `infer_fn` is called on every rank once a batch, with the rows of that rank's data-parallel part.
        If ranks have the same rows, the first one's rewards count.
        """
        run(self.config, self._parts())

    def build_service(self) -> Service:
        """Returns the service that `run_server` runs, for your own event loop; in this process only."""
        return build_service(self.config, self._parts())

    def _parts(self) -> Parts:
        limits = Limits(
            max_batch_tokens=self.scorer.max_batch_tokens,
            shares=False,
            batch_sizes=tuple(self.preferred_batch_size),
            max_delay_s=self.max_queue_delay_microseconds / 1e6,
        )
        return Parts(scorer=self._scorer, limits={self.model_name: limits})

    def _scorer(self, _: ServedModelConfig, ranks: Ranks) -> PaddedScorer:
        assert self.data_parallel_size is not None
        self.scorer.parts = BatchParts.of(ranks, self.data_parallel_size)
        return self.scorer
