"""Decode-step attention over a KV cache that stores each prompt once for all its rows; for CPUs.

Legend: B rows that are generated at once, n those of one prompt, G prompts, H query heads, K key/value heads,
R = H / K, D head size, P tokens of the longest prompt of a block, S tokens generated since.

The rows of one prompt are adjacent, so that their queries are multiplied with the prompt's keys as one matrix, and the
prompt's keys are read once for all of them. Rows that began together have generated the same number of tokens, which
therefore need neither padding nor masks. For so few queries plain products and one softmax are faster than the fused
kernels, and support every mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guerdon.engine.packing import PackedBatch

FIRST_CAPACITY = 32
"""Initial capacity of a cohort in tokens; it doubles when it is full."""
PADDING, MORE_PADDING = 1.25, 32
"""Prompts share a block if the longest has at most PADDING times the shortest's tokens, plus MORE_PADDING."""

Allows = Callable[..., Tensor]
"""A mask function of transformers: (batch, head, query position, key position) to whether the key is visible."""


@dataclass(eq=False)
class Block:
    """Adjacent prompts of similar length: their lengths and numbers of rows, int64 `[G]`, none of them 0.

    Its rows begin at `start`. `stored` has each layer's keys and values `[K,G,P,D]`, 0 beyond a prompt.
    """

    start: int
    lengths: np.ndarray
    counts: np.ndarray
    stored: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.width = int(self.lengths.max())
        self.stop = self.start + int(self.counts.sum())
        self._places: tuple[Tensor, Tensor] | None = None
        most = int(self.counts.max())
        if (self.counts < most).any():
            # Pad prompts with fewer rows than others by repeating any row.
            places = np.concatenate([g * most + np.arange(n) for g, n in enumerate(self.counts)])
            rows = np.zeros(most * len(self.counts), dtype=np.int64)
            rows[places] = np.arange(len(places))
            self._places = torch.from_numpy(rows), torch.from_numpy(places)
        padded = np.arange(self.width) >= self.lengths[:, None]
        self.padding = torch.from_numpy(padded.repeat(self.counts, 0))[:, None] if padded.any() else None

    def by_prompt(self, table: Tensor) -> Tensor:
        """Returns the block's rows of a cohort's table `[K,B,R,*]` as matrices `[KG,nR,*]`."""
        own = table[:, self.start : self.stop]
        if self._places is not None:
            own = own[:, self._places[0]]
        return own.reshape(len(table) * len(self.counts), -1, table.shape[-1])

    def by_row(self, matrices: Tensor, repeats: int) -> Tensor:
        """Reverses `by_prompt`: returns `[K,rows,R,*]`."""
        num_kv = len(matrices) // len(self.counts)
        table = matrices.view(num_kv, -1, repeats, matrices.shape[-1])
        return table if self._places is None else table[:, self._places[1]]

    def keep(self, rows: np.ndarray, start: int) -> Block | None:
        """Returns the block with only the rows of these numbers, ascending, from `start` on; None if there are none."""
        counts = np.bincount(np.repeat(np.arange(len(self.counts)), self.counts)[rows], minlength=len(self.counts))
        chosen = np.flatnonzero(counts)
        if not len(chosen):
            return None
        kept = Block(start, self.lengths[chosen], counts[chosen])
        for layer, tables in self.stored.items():
            kept.stored[layer] = tables
            if len(chosen) < len(counts):
                keys, values = (table[:, chosen, : kept.width] for table in tables)
                kept.stored[layer] = keys, values
        return kept


@dataclass(eq=False)
class Cohort:
    """Rows that began together; `stored` has each layer's keys and values `[K,B,capacity,D]` of `num_tokens` since."""

    blocks: list[Block]
    num_tokens: int = 0
    stored: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.blocks[-1].stop

    @property
    def lengths(self) -> np.ndarray:
        """Each row's prompt length, int64 `[B]`."""
        return np.concatenate([np.repeat(block.lengths, block.counts) for block in self.blocks])

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only the rows of these numbers, ascending int64, at least one."""
        kept: list[Block] = []
        for block in self.blocks:
            own = rows[(rows >= block.start) & (rows < block.stop)] - block.start
            if (smaller := block.keep(own, kept[-1].stop if kept else 0)) is not None:
                kept.append(smaller)
        self.blocks = kept
        chosen = torch.from_numpy(rows)
        for layer, (keys, values) in self.stored.items():
            self.stored[layer] = keys.index_select(1, chosen), values.index_select(1, chosen)


class Decoding:
    """The KV cache that attention reads in decode steps and writes in prefill; on a CPU.

    A decode step's forward is one row `[1,B]` of all rows' newest tokens, cohort by cohort. While `prompts` is set, the
    forward is a prefill of that packed batch.
    """

    def __init__(self) -> None:
        self.cohorts: list[Cohort] = []
        self.prompts: PackedBatch | None = None
        self._masks: dict[tuple[int, int], tuple[Any, list[Tensor]]] = {}

    @property
    def positions(self) -> np.ndarray:
        """The position of each row's next token, int64 `[B]`."""
        return np.concatenate([cohort.lengths + cohort.num_tokens for cohort in self.cohorts])

    def begin(self, lengths: list[int], counts: list[int]) -> None:
        """Begins a cohort of prompts of these lengths, with so many rows each; then set `prompts` to store them."""
        blocks: list[Block] = []
        first = 0
        for i in range(len(lengths)):
            own = lengths[first : i + 2]
            if i + 1 == len(lengths) or max(own) > PADDING * min(own) + MORE_PADDING:
                start = blocks[-1].stop if blocks else 0
                blocks.append(Block(start, np.array(lengths[first : i + 1]), np.array(counts[first : i + 1])))
                first = i + 1
        self.cohorts.append(Cohort(blocks))

    def store(self, layer: Any, key: Tensor, value: Tensor) -> None:
        """Stores the keys and values `[1,K,T,D]` of `prompts`, whose rows are the newest cohort's prompts."""
        assert self.prompts is not None
        places = [(block, g) for block in self.cohorts[-1].blocks for g in range(len(block.lengths))]
        for row, spans in zip(self.prompts.rows, self.prompts.spans, strict=True):
            block, g = places[row]
            if layer not in block.stored:
                shapes = [(x.shape[1], len(block.lengths), block.width, x.shape[3]) for x in (key, value)]
                block.stored[layer] = key.new_zeros(shapes[0]), value.new_zeros(shapes[1])
            for table, computed in zip(block.stored[layer], (key, value), strict=True):
                filled = 0
                for a, b in spans:
                    table[:, g, filled : filled + b - a] = computed[0, :, a:b]
                    filled += b - a

    def advance(self) -> None:
        """Adds one token to each row, which the next forward computes."""
        self._masks.clear()
        for cohort in self.cohorts:
            cohort.num_tokens += 1

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only the rows of these numbers, ascending int64 over all cohorts."""
        start, kept = 0, []
        for cohort in self.cohorts:
            stop = start + cohort.num_rows
            own = rows[(rows >= start) & (rows < stop)] - start
            start = stop
            if len(own):
                cohort.keep(own)
                kept.append(cohort)
        self.cohorts = kept

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        allows: Allows | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Stores key and value `[1,K,B,D]`; returns attention `[1,H,B,D]` of query `[1,H,B,D]` over the cache."""
        num_kv, rows, size = key.shape[1:]
        query = (query[0] * scale).view(num_kv, -1, rows, size).transpose(1, 2)
        out, start = [], 0
        for cohort in self.cohorts:
            own = slice(start, start + cohort.num_rows)
            start = own.stop
            _append(cohort, layer, key[0, :, own], value[0, :, own])
            masks = None if allows is None else self._mask(cohort, allows)
            out.append(_attend(cohort, layer, query[:, own].contiguous(), masks, softcap, sinks))
        whole = out[0] if len(out) == 1 else torch.cat(out, 1)
        return whole.transpose(1, 2).reshape(1, -1, rows, value.shape[-1])

    def _mask(self, cohort: Cohort, allows: Allows) -> list[Tensor]:
        """Returns each block's masked keys, bool `[rows,1,S+P]`, cached for all layers of one pattern."""
        known = self._masks.get((id(cohort), id(allows)))
        if known is None:
            zero, new = torch.zeros((), dtype=torch.long), cohort.num_tokens
            masks = []
            for block in cohort.blocks:
                lengths = torch.from_numpy(np.repeat(block.lengths, block.counts))[:, None]
                prompt = torch.arange(block.width).expand(len(lengths), -1)
                at = torch.cat([lengths + torch.arange(new), prompt], 1)
                hidden = ~allows(zero, zero, lengths + new - 1, at)[:, None]
                if block.padding is not None:
                    hidden[..., new:] |= block.padding
                masks.append(hidden)
            # Keep a reference to the function, so that no other object can get its id.
            known = self._masks[id(cohort), id(allows)] = allows, masks
        return known[1]


def _append(cohort: Cohort, layer: Any, key: Tensor, value: Tensor) -> None:
    """Appends the newest token's keys and values `[K,B,D]` to the cohort."""
    stored = cohort.stored.get(layer)
    filled = cohort.num_tokens - 1
    if stored is None or stored[0].shape[2] == filled:
        capacity = max(FIRST_CAPACITY, 2 * filled)
        wider = tuple(x.new_empty(*x.shape[:2], capacity, x.shape[2]) for x in (key, value))
        if stored is not None:
            for table, old in zip(wider, stored, strict=True):
                table[:, :, :filled] = old
        cohort.stored[layer] = stored = wider[0], wider[1]
    stored[0][:, :, filled] = key
    stored[1][:, :, filled] = value


def _attend(
    cohort: Cohort, layer: Any, query: Tensor, masks: list[Tensor] | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Returns attention `[K,B,R,D]` of one cohort; query `[K,B,R,D]` is scaled and contiguous."""
    num_kv, rows, repeats, _ = query.shape
    new, longest = cohort.num_tokens, max(block.width for block in cohort.blocks)
    keys, values = (table[:, :, :new] for table in cohort.stored[layer])
    logits = query.new_empty(num_kv, rows, repeats, new + longest)
    logits[..., :new] = query @ keys.transpose(2, 3)
    for block in cohort.blocks:
        of_prompts = block.stored[layer][0].flatten(0, 1).transpose(1, 2)
        own = logits[:, block.start : block.stop, :, new : new + block.width]
        own.copy_(block.by_row(block.by_prompt(query) @ of_prompts, repeats))
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    for i, block in enumerate(cohort.blocks):
        own = logits[:, block.start : block.stop]
        own[..., new + block.width :] = float("-inf")
        if masks is not None:
            own[..., : new + block.width].masked_fill_(masks[i], float("-inf"))
        elif block.padding is not None:
            own[..., new : new + block.width].masked_fill_(block.padding, float("-inf"))
    if sinks is not None:  # add a logit with a value of zero
        column = sinks.reshape(num_kv, 1, -1, 1).expand(*logits.shape[:3], 1).to(logits.dtype)
        logits = torch.cat([logits, column], -1)
    weights = torch.softmax(logits, -1, dtype=torch.float32)[..., : new + longest].to(logits.dtype)
    out = weights[..., :new] @ values
    for block in cohort.blocks:
        own = block.by_prompt(weights[..., new : new + block.width])
        out[:, block.start : block.stop] += block.by_row(own @ block.stored[layer][1].flatten(0, 1), repeats)
    return out
