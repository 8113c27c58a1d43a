"""`RewardModelServer` with NeMo-Aligner's signature: a user's padded `infer_fn` behind guerdon's server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from guerdon.assembly import Parts, build_service, run
from guerdon.config import ModelConfig, ServerConfig
from guerdon.core import ModelInfo, Score, Sequence
from guerdon.engine.callable import FunctionEncoder, PaddedScorer
from guerdon.errors import ConfigError, InvalidRequest, SampleFailed
from guerdon.server.batching.scheduler import Limits
from guerdon.server.service import Service


class RewardModelServer:
    """Serves `infer_fn(inputs=(tokens [B,T], lengths [B])) -> rewards [B]`, `[B,1]` or `[B,A]`, over KServe v2.

    `tokenize_func(sentences) -> (tokens [B,T], lengths [B])` turns text into ids. Sequences are collected into
    batches of the preferred sizes `inference_micro_batch_size`; the first in line waits at most
    `max_queue_delay_microseconds` for company. Batches beyond `model_forward_micro_batch_size` are filled up
    to a multiple of it. T is the longest of the batch, rounded up to `strip_sequence_length_to_multiple`. A `host`
    that other machines reach, such as 0.0.0.0, needs keys in GUERDON_API_KEYS, or `allow_anonymous`.
    """

    def __init__(
        self,
        infer_fn: Callable[..., Any],
        tokenize_func: Callable[..., Any],
        model_name: str,
        port: int,
        inference_micro_batch_size: int | Iterable[int],
        model_forward_micro_batch_size: int,
        strip_sequence_length_to_multiple: int | None = None,
        max_queue_delay_microseconds: float = 2000,
        *,
        host: str = "127.0.0.1",
        allow_anonymous: bool = False,
    ) -> None:
        sizes = inference_micro_batch_size
        self.batch_sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        if not self.batch_sizes or min(*self.batch_sizes, model_forward_micro_batch_size) < 1:
            raise ConfigError("a micro batch size is below 1", "give sizes of at least 1")
        self.max_delay_s = max_queue_delay_microseconds / 1e6
        self.config = ServerConfig(
            host=host,
            port=port,
            grpc_port=None,
            allow_anonymous=allow_anonymous,
            models=[ModelConfig(name=model_name)],
        )
        self.scorer = PaddedScorer(
            infer_fn,
            ModelInfo(model_name, "function", path="padded", why="a user's infer_fn", merges_attributes=False),
            encoder=FunctionEncoder(tokenize_func),
            forward_batch_size=model_forward_micro_batch_size,
            strip_to_multiple=strip_sequence_length_to_multiple,
        )

    def infer(self, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Scores `sentences` (bytes `[B,1]`), or `tokens` `[B,T]` with `sequence_lengths` `[B,1]`, in this process.

        Returns `rewards` float32 `[B,1]`, or `[B,A]` if `infer_fn` gives attributes; raises InvalidRequest for other
        inputs, SampleFailed where a reward is not finite.
        """
        if set(inputs) == {"sentences"}:
            texts = [bytes(x).decode() for x in np.asarray(inputs["sentences"], dtype=object).reshape(-1)]
            rows = self.scorer.encoder.encode(texts)
        elif set(inputs) == {"tokens", "sequence_lengths"}:
            lengths = np.asarray(inputs["sequence_lengths"]).reshape(-1)
            rows = [np.asarray(t[:n], dtype=np.int64) for t, n in zip(inputs["tokens"], lengths, strict=True)]
        else:
            raise InvalidRequest(f"infer takes sentences, or tokens with sequence_lengths, not {sorted(inputs)}")
        scores = self.scorer.score([Sequence(row) for row in rows])
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

        Where this process is one of several, started by torchrun or joined by torch.distributed, all must call it: rank
        0 serves, and `infer_fn` is called on every rank with the same inputs; rank 0's rewards count.
        """
        run(self.config, self._parts())

    def build_service(self) -> Service:
        """The service that `run_server` runs, for an event loop of your own; this process's alone."""
        return build_service(self.config, self._parts())

    def _parts(self) -> Parts:
        limits = Limits(shares=False, batch_sizes=self.batch_sizes, max_delay_s=self.max_delay_s)
        return Parts(scorer=lambda *_: self.scorer, limits={self.scorer.info.name: limits})
