"""A loaded model as a function of sequences: `Engine.score`, and `Engine.values` with gradients for a critic.

Legend: T tokens of one forward, H hidden size, A attributes, B sequences.

There are four ways to run the trunk, best first: `packed+shared` and `packed` go through `attention`, `padded` and
`single` are the model as transformers runs it. Each ends in a `Layout`: the hidden states of all tokens in one
table, and where each sequence lies in it, so that heads are applied in one place.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from guerdon.core import Score, Sequence
from guerdon.engine import attention
from guerdon.engine.choosing import choose
from guerdon.engine.heads import to_scores
from guerdon.engine.last_layer import LastLayer
from guerdon.engine.loading import LoadedModel
from guerdon.engine.packing import PackedBatch, Span, indices, pack
from guerdon.engine.rope import LengthClasses
from guerdon.errors import CheckpointError, ConfigError, SampleFailed

MAX_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}


@dataclass(slots=True)
class Layout:
    """Hidden states `[T,H]`; rows' numbers, the spans where each lies, and the index of each row's last token."""

    hidden: torch.Tensor
    rows: list[int]
    spans: list[tuple[Span, ...]]
    last: np.ndarray

    def gather(self, i: int) -> np.ndarray:
        """Indices into `hidden` of every token of the i-th row."""
        return indices(self.spans[i])


class Engine:
    """Scores sequences with one loaded model, by the fastest path that agrees with the plain forward."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Chooses the path by a self-check; raises CheckpointError where `require_packed` cannot be met."""
        config = loaded.config
        self.trunk, self.head, self.causal = loaded.trunk, loaded.head, loaded.causal
        self.encoder = loaded.encoder
        self.device = next(self.trunk.parameters()).device
        self.dtype = next(self.trunk.parameters()).dtype
        self.pad_token_id = loaded.pad_token_id
        self.max_batch_tokens = config.max_batch_tokens or MAX_BATCH_TOKENS.get(self.device.type, 4096)
        self._plain_attention = self.trunk.config._attn_implementation
        if self.head.per_token and config.truncation != "error":
            raise ConfigError(
                f"truncation {config.truncation} is set, but {loaded.info.name} answers for single tokens",
                "leave --truncation out: cut sequences would shift the positions that clients count",
            )
        self._most_tokens = _most_tokens(self.trunk.config)
        self._classes = LengthClasses(self.trunk)
        self._last_layer = LastLayer(self.trunk)
        self.path, why = "single", "--deterministic"
        if not config.deterministic:
            self.path, why = choose(self, loaded.info, gradients=loaded.trains)
        if config.require_packed and not self.path.startswith("packed"):
            raise CheckpointError(
                f"{loaded.info.name} cannot run packed: {why}", "leave out --require-packed to serve it the plain way"
            )
        self.use(self.path)
        self.info = dataclasses.replace(loaded.info, path=self.path, why=why)

    @torch.inference_mode()
    def score(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """One result a sequence, in order; sequences with equal tokens are computed once."""
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
        outputs: dict[int, torch.Tensor] = {}
        for layout in self._layouts(rows, limits):
            if self.head.per_token:
                logits = self.head(layout.hidden)
                for i, row in enumerate(layout.rows):
                    outputs[row] = logits[self.index(layout.gather(i))]
            else:
                outputs.update(zip(layout.rows, self.head(self.pool(layout, rows)), strict=True))
        if self.head.per_token:
            return to_scores(self.head, None, [outputs[i] for i in where], sequences)
        return to_scores(self.head, torch.stack([outputs[i] for i in where]), None, sequences)

    def values(self, rows: list[np.ndarray]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """Micro-batch by micro-batch: row numbers, and for each of them its values, float32 `[T_i]` on the device.

        They are those that `score` gives for a model of one value a token, with the graph attached where gradients
        are enabled; call backward before the next micro-batch is taken, for only one fits the token budget.
        """
        assert self.head.per_token and self.head.num_outputs == 1
        for layout in self._layouts(rows, [None] * len(rows)):
            table = self.head.merged(self.head(layout.hidden))
            yield layout.rows, [torch.cat([table[a:b] for a, b in spans]) for spans in layout.spans]

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's value depends on how many tokens follow it, as some rotary embeddings have it."""
        return self._classes.depend_on_length

    def offload(self) -> None:
        """Moves the weights to the host's memory; nothing may be computed until `onload`."""
        self.trunk.to("cpu")
        self.head.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Moves the weights back to the device; where that raises, some may be there, until `offload`."""
        self.trunk.to(self.device)
        self.head.to(self.device)

    def pool(self, layout: Layout, rows: list[np.ndarray]) -> torch.Tensor:
        """The hidden state `[B,H]` that each sequence's reward is read from, by the head's pooling rule."""
        if self.head.pooling == "mean":
            own = (layout.hidden[self.index(layout.gather(i))] for i in range(len(layout.rows)))
            return torch.stack([hidden.float().mean(0) for hidden in own])
        return layout.hidden[self.index(self._read(layout, rows))]

    def index(self, indices: np.ndarray) -> torch.Tensor:
        """Indices into a layout's hidden states, where these are."""
        return torch.from_numpy(indices).to(self.device)

    def _read(self, layout: Layout | PackedBatch, rows: list[np.ndarray]) -> np.ndarray:
        """Index of the one token whose hidden state each sequence's reward is read from."""
        if self.head.pooling == "last":
            return layout.last
        if self.head.pooling == "first":
            return np.array([spans[0][0] for spans in layout.spans])
        read = layout.last.copy()
        for i, row in enumerate(layout.rows):
            ends = np.flatnonzero(rows[row] == self.head.eos_token_id)
            if len(ends):
                read[i] = layout.gather(i)[ends[0]]
        return read

    # ---------------------------------------------------------------------------------------- the four paths

    def use(self, path: str) -> None:
        """Gives the trunk the attention that `path` runs on."""
        self.trunk.set_attn_implementation(attention.NAME if path.startswith("packed") else self._plain_attention)

    def _layouts(self, rows: list[np.ndarray], limits: list[int | None]) -> Iterator[Layout]:
        for members in self._classes.split(rows):
            some, bounds = [rows[i] for i in members], [limits[i] for i in members]
            for layout in self.run(self.path, some, bounds):
                layout.rows = [members[i] for i in layout.rows]
                yield layout

    def run(self, path: str, rows: list[np.ndarray], limits: list[int | None]) -> Iterator[Layout]:
        """The rows' hidden states, a micro-batch at a time, by `path`, whose attention must be in use."""
        if path in ("packed+shared", "packed"):
            budget = min(self.max_batch_tokens, self._most_tokens)
            for batch in pack(rows, budget=budget, share=path == "packed+shared", limits=limits):
                if batch.num_tokens <= self._most_tokens or len(batch.rows) == 1:
                    yield self._packed(batch, rows)
                    continue
                for i in batch.rows:
                    (alone,) = pack([rows[i]], budget=budget, share=False)
                    alone.rows = [i]
                    yield self._packed(alone, rows)
        elif path == "padded":
            yield from self._padded(rows)
        else:
            for i, row in enumerate(rows):
                hidden = self._forward(row[None], None)[0]
                yield Layout(hidden, [i], [((0, len(row)),)], np.array([len(row) - 1]))

    def _packed(self, batch: PackedBatch, rows: list[np.ndarray]) -> Layout:
        one_state_each = not self.head.per_token and self.head.pooling != "mean"
        read = self.index(self._read(batch, rows)) if one_state_each else None
        with attention.attending(batch), self._last_layer.only(read):
            # A mask of ones: with none, transformers takes restarting positions for packing of its own kind.
            hidden = self._forward(batch.tokens[None], np.ones((1, batch.num_tokens)), self._positions(batch)[None])[0]
        return Layout(hidden, batch.rows, batch.spans, batch.last)

    def _padded(self, rows: list[np.ndarray]) -> Iterator[Layout]:
        """Right-padded batches of sequences of like length, within the token budget."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        while order:
            # The longest first: if a batch fits in memory at all, the first one shows it.
            width = len(rows[order[-1]])
            count = max(1, self.max_batch_tokens // width)
            members, order = order[-count:], order[:-count]
            tokens = np.full((len(members), width), self.pad_token_id)
            mask = np.zeros((len(members), width))
            for i, row in enumerate(members):
                tokens[i, : len(rows[row])] = rows[row]
                mask[i, : len(rows[row])] = 1
            hidden = self._forward(tokens, mask).flatten(0, 1)
            spans: list[tuple[Span, ...]] = [((i * width, i * width + len(rows[r])),) for i, r in enumerate(members)]
            yield Layout(hidden, members, spans, np.array([s[0][1] - 1 for s in spans]))

    def _forward(
        self, tokens: np.ndarray, mask: np.ndarray | None, positions: np.ndarray | None = None
    ) -> torch.Tensor:
        """The trunk's last hidden states `[B,T,H]`."""
        self._classes.prepare()
        inputs: dict[str, Any] = {"input_ids": torch.tensor(tokens, device=self.device)}
        if mask is not None:
            inputs["attention_mask"] = torch.from_numpy(mask).to(self.device, torch.long)
        if positions is not None:
            inputs["position_ids"] = torch.from_numpy(positions).to(self.device)
        if self.causal:
            inputs["use_cache"] = False
        return self.trunk(**inputs).last_hidden_state

    def _positions(self, batch: PackedBatch) -> np.ndarray:
        """Positions as the model counts them: the RoBERTa family from its padding index on, padding ids left out."""
        embeddings = getattr(self.trunk, "embeddings", None)
        if embeddings is None or not hasattr(embeddings, "create_position_ids_from_input_ids"):
            return batch.positions
        padding = int(embeddings.padding_idx)
        counted = batch.tokens != padding
        positions = np.empty_like(batch.positions)
        for s in batch.segments:  # an encoder's segments are whole sequences
            own = counted[s.start : s.stop]
            positions[s.start : s.stop] = padding + np.cumsum(own) * own
        return positions


def _most_tokens(config: Any) -> int:
    """Beyond this many tokens in a batch a sequence's place in it matters, which it must not.

    Llama 4 scales queries by their index in the batch, in steps of `floor_scale`.
    """
    return int(config.floor_scale) if getattr(config, "attn_temperature_tuning", False) else sys.maxsize
