"""A trunk as a function of rows of tokens: `plan` makes micro-batches of them, `run` their hidden states.

Legend: T tokens of one forward, H hidden size, B sequences.

The trunk runs by one of five paths, best first: `packed+shared` and `packed` use the attention in `attention`;
`shared` (see `continuing`), `padded` and `single` are the model as transformers runs it. Each ends in `HiddenStates`:
all tokens' hidden states in one table, and where each sequence lies in it, so that heads are applied in one place.

On a GPU `run` only launches kernels and never waits for the device: while it computes a micro-batch, the next one is
planned and copied. The caller waits when it reads a number of the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from guerdon.engine.attention import registry
from guerdon.engine.caught_calls import RowProducts
from guerdon.engine.checkpoint.weights import LoadedTrunk
from guerdon.engine.continuing import Continuation
from guerdon.engine.fallback import Fallback
from guerdon.engine.fewer_passes import FewerPasses
from guerdon.engine.layers import LastLayer, watch_layers
from guerdon.engine.microbatches import Batcher, MicroBatch, to_device
from guerdon.engine.packing import Span, indices

MAX_BATCH_TOKENS = {"cpu": 8192, "cuda": 16384}


@dataclass(slots=True)
class HiddenStates:
    """Hidden states `[T,H]` of a micro-batch: its row numbers, each row's spans, the index of each row's last token.

    `read` are the indices of the only states that anybody reads, one for each row, None for all. A filler has no rows;
    its hidden states mean nothing.
    """

    hidden: torch.Tensor
    rows: list[int]
    spans: list[tuple[Span, ...]]
    last: np.ndarray
    read: torch.Tensor | None = None

    def gather(self, i: int) -> np.ndarray:
        """Returns the indices into `hidden` of all tokens of the i-th row."""
        return indices(self.spans[i])


class Forward(Fallback):
    """Runs one loaded trunk; `info` says by which path and why."""

    def __init__(self, loaded: LoadedTrunk) -> None:
        """Runs the trunk by the path `single`, until `self_check.choose_path` has found a better one."""
        self.trunk, self.causal, self.pad_token_id = loaded.trunk, loaded.causal, loaded.pad_token_id
        self.ranks, self._fsdp = loaded.ranks, loaded.fsdp
        self.run_trunk = loaded.fsdp.through_root(loaded.trunk)
        self.device = next(self.trunk.parameters()).device
        self.dtype = next(self.trunk.parameters()).dtype
        self.max_batch_tokens = loaded.config.max_batch_tokens or MAX_BATCH_TOKENS.get(self.device.type, 4096)
        self._plain_attention = self.trunk.config._attn_implementation
        self.batcher = Batcher(self.trunk, self.pad_token_id)
        self.length_classes = self.batcher.length_classes
        self._last_layer = LastLayer(self.trunk)
        self.continuation = Continuation(self.trunk, pads=self.device.type != "cpu")
        self._fewer_passes = FewerPasses(self.trunk) if self.device.type == "cpu" else None
        self._row_products, self._by_rows = RowProducts(), False
        self.path, self.info = "single", loaded.info

    # ------------------------------------------------------------------------------- rows -> hidden states

    def plan(
        self, rows: list[np.ndarray], limits: list[int | None] | None = None, *, path: str | None = None
    ) -> Iterator[MicroBatch]:
        """Yields the rows' micro-batches for `path` (default: the chosen one), each within `max_batch_tokens`.

        `limits` bounds how many tokens of each row may be shared, as in `pack`. If `ranks.in_step`, it is collective:
        each rank gets as many micro-batches as the one with the most, with fillers at the end. With gradients the path
        `shared` is `single`: activation checkpointing would run a layer twice over its cache.
        """
        path, limits = path or self.path, limits or [None] * len(rows)
        if path == "shared" and torch.is_grad_enabled():
            path = "single"

        def planned() -> Iterator[MicroBatch]:
            for members in self.length_classes.split(rows):
                some, bounds = [rows[i] for i in members], [limits[i] for i in members]
                for batch in self.batcher.plan(path, some, bounds, self.max_batch_tokens):
                    batch.rows = [members[i] for i in batch.rows]
                    batch.read = self.read_indices(batch, rows)
                    yield batch

        if not self.ranks.in_step:
            yield from planned()
            return
        own = list(planned())
        missing = self.ranks.most(len(own)) - len(own)
        yield from own
        pad, nothing = [np.array([self.pad_token_id])], np.zeros(0, dtype=np.int64)
        for _ in range(missing):  # one token and no rows, through the same layers
            (filler,) = self.batcher.plan(path, pad, [None], self.max_batch_tokens)
            read = self.read_indices(filler, pad)
            yield dataclasses.replace(filler, rows=[], spans=[], last=nothing, read=read)

    def run(self, batches: Iterable[MicroBatch]) -> Iterator[HiddenStates]:
        """Yields each micro-batch's hidden states, with the graph attached if gradients are enabled.

        The attention of the batches' path must be in use. Call backward before taking the next one: only one fits into
        the token budget. If `ranks.in_step`, all ranks run as many, and call backward for fillers, too.
        """
        upcoming = ((batch, *batch.to_device(self.device)) for batch in batches)
        current = next(upcoming, None)
        while current is not None:
            batch, inputs, read = current
            if self.causal:
                inputs["use_cache"] = False  # type: ignore[assignment]
            self.length_classes.reset()
            products = self._row_products if self._by_rows else contextlib.nullcontext()
            attending = registry.attending(batch.packed, self._last_layer.queries(batch.read))
            with attending, self._last_layer.only(read), products:
                if batch.segments is None:
                    hidden = self.run_trunk(**inputs).last_hidden_state.flatten(0, 1)
                else:
                    tokens, most = inputs["input_ids"][0], self.max_batch_tokens
                    hidden = self.continuation.hidden_states(self.run_trunk, tokens, batch.segments, most)
            states = HiddenStates(hidden, batch.rows, batch.spans, batch.last, read)
            del hidden, batch, inputs  # nothing but the states stays until the next forward
            # Plan and copy the next micro-batch before anybody waits for this one's result.
            current = next(upcoming, None)
            yield states
            del states  # frees them before the next are computed

    def read_indices(self, batch: MicroBatch, rows: list[np.ndarray]) -> np.ndarray | None:
        """Returns the indices of the only hidden states that anybody reads; None for all."""
        return None

    def readable(self, states: HiddenStates, rows: list[np.ndarray]) -> list[torch.Tensor]:
        """Returns each row's hidden states `[T_i,H]` that a result may be read from: here all of them."""
        return [states.hidden[self.to_device(states.gather(i))] for i in range(len(states.rows))]

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Returns the array as a tensor on the trunk's device; does not wait for the copy."""
        return to_device(array, self.device)

    # -------------------------------------------------------------------------------------- how the trunk runs

    def use(self, path: str) -> None:
        """Sets the trunk to the attention that `path` needs, and to the fastest modules for it."""
        packed = path.startswith("packed")
        self.trunk.set_attn_implementation(registry.NAME if packed else self._plain_attention)
        if self._fewer_passes is not None:
            self._fewer_passes.use(packed)
            # Once the self-check has run, models without products of their own need not look for them.
            self._by_rows = packed and (self._row_products.caught or not self.path.startswith("packed"))

    @contextlib.contextmanager
    def plain_attention(self) -> Iterator[None]:
        """Runs the trunk as transformers does inside the context, for `generate` and the like."""
        self.use("single")
        try:
            yield
        finally:
            self.use(self.path)

    def no_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Disables gradients inside the context; use it in place of PyTorch's own, which FSDP does not survive."""
        return self._fsdp.no_gradients()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Collective; gathers the weights of this rank's part of the model inside the context.

        The rank may run any number of forwards without gradients then, whatever other data-parallel ranks do.
        """
        return self._fsdp.gathered()

    def reset_after_error(self) -> None:
        """Makes the trunk usable again after a forward or backward pass that raised."""
        self._fsdp.reset()

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick` after each layer's forward and backward; returns False if the trunk has no list of layers."""
        return watch_layers(self.trunk, tick)
