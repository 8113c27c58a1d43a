"""A loaded reward model or critic as a function of sequences: `Engine.score`, and `Engine.values` with gradients.

Legend: T tokens, H hidden size, A attributes, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint.loading import LoadedModel
from guerdon.engine.checkpoint.sharding import alike
from guerdon.engine.choosing import probe_rows
from guerdon.engine.forward import Forward, Layout
from guerdon.engine.heads import to_scores
from guerdon.engine.packing import PackedBatch
from guerdon.errors import CheckpointError, ConfigError, SampleFailed

_NOT_FINITE = "its weights are broken, or too large for its dtype: try --dtype float32, or an earlier checkpoint"


class Engine(Forward):
    """Scores sequences with one loaded model, by the fastest path that agrees with the plain forward."""

    takes_all = False

    def __init__(self, loaded: LoadedModel) -> None:
        """Raises ConfigError where truncation does not go with the head, and as `Forward`."""
        self.head, self.encoder = loaded.head, loaded.encoder
        if self.head.per_token and loaded.config.truncation != "error":
            raise ConfigError(
                f"truncation {loaded.config.truncation} is set, but {loaded.info.name} answers for single tokens",
                "leave --truncation out: cut sequences would shift the positions that clients count",
            )
        super().__init__(loaded)
        with alike(self.ranks):
            failed = self._failed_probes()
            if failed and len(failed) == len(self._probes()):
                raise CheckpointError(f"{loaded.info.name} scores nothing: {failed[0]}", _NOT_FINITE)

    def check_scores(self) -> None:
        """Raises CheckpointError where not every one of the self-check's sequences has a finite score.

        A model may be served that fails on some; one that takes another's place while it serves has to do better.
        """
        with alike(self.ranks):
            if failed := self._failed_probes():
                count = len(self._probes())
                raise CheckpointError(f"{len(failed)} of {count} random sequences fail: {failed[0]}", _NOT_FINITE)

    def score(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """One result a sequence, in order; sequences with equal tokens are computed once.

        Ranks in step call it at the same time, those without sequences, too.
        """
        with self.no_gradients():
            return self._score(sequences, self.path)

    def score_plainly(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """As `score`, by the model as transformers runs it, one sequence at a time: what every path is held against."""
        with self.no_gradients(), self.plain_attention():
            return self._score(sequences, "single")

    def _probes(self) -> list[Sequence]:
        """The self-check's sequences, with a step at the end of each."""
        info = self.info
        rows = probe_rows(info.vocab_size, info.max_length, self.pad_token_id)
        return [Sequence(row, steps=np.array([len(row) - 1])) for row in rows]

    def _failed_probes(self) -> list[SampleFailed]:
        return [result for result in self.score(self._probes()) if isinstance(result, SampleFailed)]

    def _score(self, sequences: list[Sequence], path: str) -> list[Score | SampleFailed]:
        slots: dict[bytes, int] = {}
        rows: list[np.ndarray] = []
        limits: list[int | None] = []
        where = []
        for s in sequences:
            slot = slots.setdefault(s.tokens.tobytes(), len(rows))
            if slot == len(rows):
                rows.append(s.tokens)
                limits.append(s.prompt_length)
            where.append(slot)
        per_token = self.head.per_token
        outputs: list[torch.Tensor] = []
        places: list[Any] = [None] * len(rows)  # where in all outputs a row has its own: index, or those of its tokens
        size = 0
        for layout in self.layouts(rows, limits, path=path):
            for i, row in enumerate(layout.rows):
                places[row] = size + (layout.gather(i) if per_token else i)
            if layout.rows:
                outputs.append(self.head(layout.hidden if per_token else self.pool(layout, rows)))
                size += len(outputs[-1])
        if not sequences:
            return []
        own = [places[slot] for slot in where]
        at = torch.from_numpy(np.concatenate(own) if per_token else np.array(own))
        # Nothing before this has waited for the device.
        logits = torch.cat(outputs).cpu()[at]
        return to_scores(self.head, logits, sequences)

    def values(self, rows: list[np.ndarray]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """Micro-batch by micro-batch: row numbers, and for each of them its values, float32 `[T_i]` on the device.

        They are those that `score` gives for a model of one value a token, with the graph attached where gradients
        are enabled; call backward before the next micro-batch is taken, for only one fits the token budget. Ranks in
        step make fillers at the end, with no numbers and values of which nothing counts, but backward must be called.
        """
        assert self.head.per_token and self.head.num_outputs == 1
        for layout in self.layouts(rows):
            table = self.head.merged(self.head(layout.hidden))
            if not layout.rows:
                yield [], [table]
                continue
            yield layout.rows, [torch.cat([table[a:b] for a, b in spans]) for spans in layout.spans]

    def offload(self) -> None:
        """Moves the weights to the host's memory; nothing may be computed until `onload`."""
        self._gathering.reset()
        self.trunk.to("cpu")
        self.head.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def discard(self) -> None:
        """Gives up the weights, whoever else knows of this; nothing can be computed any more."""
        for module in (*self.trunk.modules(), *self.head.modules()):
            module._parameters.clear()
            module._buffers.clear()

    def onload(self) -> None:
        """Moves the weights back to the device; where that raises, some may be there, until `offload`."""
        self.trunk.to(self.device)
        self.head.to(self.device)

    def pool(self, layout: Layout, rows: list[np.ndarray]) -> torch.Tensor:
        """The hidden state `[B,H]` that each sequence's reward is read from, by the head's pooling rule."""
        if self.head.pooling == "mean":
            own = (torch.cat([layout.hidden[a:b] for a, b in spans]) for spans in layout.spans)
            return torch.stack([hidden.float().mean(0) for hidden in own])
        return layout.hidden[self.index(self._places(layout, rows)) if layout.read is None else layout.read]

    def readable(self, layout: Layout, rows: list[np.ndarray]) -> list[torch.Tensor]:
        """Of each row the hidden states that its reward or values are made from."""
        if self.head.per_token or self.head.pooling == "mean":
            return super().readable(layout, rows)
        return list(self.pool(layout, rows)[:, None])

    def _read(self, batch: PackedBatch, rows: list[np.ndarray]) -> np.ndarray | None:
        one_state_each = not self.head.per_token and self.head.pooling != "mean"
        return self._places(batch, rows) if one_state_each else None

    def _places(self, layout: Layout | PackedBatch, rows: list[np.ndarray]) -> np.ndarray:
        """Index of the one token whose hidden state each sequence's reward is read from."""
        own = [rows[row] for row in layout.rows]
        read = layout.last.copy()
        for i, position in enumerate(self.head.positions(own).tolist()):
            if position != len(own[i]) - 1:
                read[i] = layout.gather(i)[position]
        return read
