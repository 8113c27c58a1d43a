"""A trunk as a function of rows of tokens: their hidden states, by the fastest path that agrees with the plain forward.

Legend: T tokens of one forward, H hidden size, B sequences.

There are four ways to run a trunk, best first: `packed+shared` and `packed` go through `attention`, `padded` and
`single` are the model as transformers runs it. Each ends in a `Layout`: the hidden states of all tokens in one
table, and where each sequence lies in it, so that heads are applied in one place.

On a GPU a forward is only launched here: nothing on the way from tokens to hidden states waits for the device, and
while it computes a micro-batch the next is packed and copied. Whoever reads a number of the result waits for it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from guerdon.core import ModelInfo
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.attention import registry
from guerdon.engine.checkpoint.sharding import layers
from guerdon.engine.choosing import choose
from guerdon.engine.fewer_passes import FewerPasses
from guerdon.engine.gathering import WHOLE, Gathering
from guerdon.engine.last_layer import LastLayer
from guerdon.engine.packing import PackedBatch, Span, indices, pack
from guerdon.engine.rope import LengthClasses
from guerdon.engine.transfers import all_to_device, to_device
from guerdon.errors import CheckpointError
from guerdon.settings.config import ForwardConfig

MAX_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}


@dataclass(kw_only=True)
class LoadedTrunk:
    """A model without its head, ready to run.

    `trunk` maps `input_ids` to `last_hidden_state`, on its device, in its dtype, in eval mode. `causal` tells a decoder
    from an encoder. With `trains` it will be asked for gradients, so these are checked, too.

    `ranks` are those that have loaded it, each its part, and `gathering` tells when FSDP's parts are whole.
    `summed_over_tensor_ranks` are the trunk's names of parameters that are whole on every tensor-parallel rank and see
    a part of the gradient there: these must be summed over `ranks.tensor_group` once a step.
    """

    trunk: Any
    causal: bool
    info: ModelInfo
    pad_token_id: int
    config: ForwardConfig
    trains: bool = False
    ranks: Ranks = ALONE
    gathering: Gathering = WHOLE
    summed_over_tensor_ranks: frozenset[str] = frozenset()


@dataclass(slots=True)
class Layout:
    """Hidden states `[T,H]`; rows' numbers, the spans where each lies, and the index of each row's last token.

    `read` are the indices of the only states that are read, one a row, where there are such and the device knows them.
    A filler has no rows, and hidden states of which nothing counts.
    """

    hidden: torch.Tensor
    rows: list[int]
    spans: list[tuple[Span, ...]]
    last: np.ndarray
    read: torch.Tensor | None = None

    def gather(self, i: int) -> np.ndarray:
        """Indices into `hidden` of every token of the i-th row."""
        return indices(self.spans[i])


Launch = Callable[[], Layout]
"""Runs the trunk on inputs that are on the device already."""
Prepare = Callable[[], Launch]
"""Makes these inputs of what was planned."""


class Forward:
    """Runs one loaded trunk, and says in `info` by which path and why."""

    def __init__(self, loaded: LoadedTrunk) -> None:
        """Chooses the path by a self-check; raises CheckpointError where `require_packed` cannot be met."""
        config = loaded.config
        self.trunk, self.causal = loaded.trunk, loaded.causal
        self.ranks, self._gathering = loaded.ranks, loaded.gathering
        self.run_trunk = loaded.gathering.through_root(loaded.trunk)
        self.device = next(self.trunk.parameters()).device
        self.dtype = next(self.trunk.parameters()).dtype
        self.pad_token_id = loaded.pad_token_id
        self.max_batch_tokens = config.max_batch_tokens or MAX_BATCH_TOKENS.get(self.device.type, 4096)
        self._plain_attention = self.trunk.config._attn_implementation
        self._most_tokens = _most_tokens(self.trunk.config.get_text_config())
        self._classes = LengthClasses(self.trunk)
        self._last_layer = LastLayer(self.trunk)
        self._fewer_passes = FewerPasses(self.trunk) if self.device.type == "cpu" else None
        self.path, why = "single", "--deterministic"
        if not config.deterministic:
            self.path, why = choose(self, loaded.info, gradients=loaded.trains)
        if config.require_packed and not self.path.startswith("packed"):
            raise CheckpointError(
                f"{loaded.info.name} cannot run packed: {why}", "leave out --require-packed to serve it the plain way"
            )
        self.use(self.path)
        self.info = dataclasses.replace(loaded.info, path=self.path, why=why)

    @property
    def depends_on_length(self) -> bool:
        """Whether what is computed for a token depends on how many tokens follow it, as with some rotary embeddings."""
        return self._classes.depend_on_length

    def in_one_class(self, *lengths: int) -> bool:
        """Whether sequences of these lengths may share a forward, and a cache while they grow from one to another."""
        return len({self._classes.of(length) for length in lengths}) == 1

    @property
    def bounds_tokens(self) -> bool:
        """Whether only so many tokens may share a batch, as their places in it matter beyond."""
        return self._most_tokens < sys.maxsize

    def forget_lengths(self) -> None:
        """Makes what is computed next independent of the lengths seen before; `layouts` does so by itself."""
        self._classes.prepare()

    def layouts(
        self, rows: list[np.ndarray], limits: list[int | None] | None = None, *, path: str | None = None
    ) -> Iterator[Layout]:
        """The rows' hidden states, micro-batch by micro-batch, with the graph attached where gradients are enabled.

        They go by `path`, whose attention must be in use, where that is not the chosen one. `limits` bounds what may be
        shared of each row, as `pack` has it. Call backward before the next micro-batch is taken, for only one fits the
        token budget. Where `ranks.in_step`, all must call it at the same time, with rows or without, and each gets as
        many layouts as the one with most: fillers at the end, whose backward the others wait for.
        """
        limits = limits or [None] * len(rows)
        path = path or self.path
        plan = self._whole_plan(rows, limits, path)
        if not self.ranks.in_step:
            yield from _one_ahead(plan)
            return
        planned = list(plan)
        missing = self.ranks.most(len(planned)) - len(planned)
        yield from _one_ahead(planned)
        for _ in range(missing):
            yield self._filler(path)

    def _whole_plan(self, rows: list[np.ndarray], limits: list[int | None], path: str) -> Iterator[Prepare]:
        for members in self._classes.split(rows):
            some, bounds = [rows[i] for i in members], [limits[i] for i in members]
            for prepare in self._plan(path, some, bounds, self.max_batch_tokens):
                yield functools.partial(_numbered, prepare, members)

    def _filler(self, path: str) -> Layout:
        """A layout of one token and no rows, by way of the same layers."""
        layout = next(self.run(path, [np.array([self.pad_token_id])], [None]))
        return Layout(layout.hidden, [], [], np.zeros(0, dtype=np.int64))

    def no_gradients(self) -> AbstractContextManager[Any]:
        """Within it nothing is differentiated; for all that runs the trunk, in place of PyTorch's own."""
        return self._gathering.no_gradients()

    def gathered(self) -> AbstractContextManager[None]:
        """Within it this rank has all weights of its part of the model, so that it may run as many forwards as it
        likes without gradients, whatever other data-parallel ranks do; all must enter it at the same time."""
        return self._gathering.gathered()

    def forget_broken(self) -> None:
        """Makes a trunk fit to run again after a forward or backward pass that raised."""
        self._gathering.reset()

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick` whenever a layer has run, forwards or backwards; False where the trunk shows no layers."""

        def ran(_: Any, __: Any, output: Any) -> None:
            tick()
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: tick())

        found = layers(self.trunk)
        for layer in found:
            layer.register_forward_hook(ran)
        return bool(found)

    def readable(self, layout: Layout, rows: list[np.ndarray]) -> list[torch.Tensor]:
        """Of each row of the layout the hidden states `[T_i,H]` that anything is ever read from: here all."""
        return [layout.hidden[self.index(layout.gather(i))] for i in range(len(layout.rows))]

    def index(self, indices: np.ndarray) -> torch.Tensor:
        """Indices into a layout's hidden states, where these are."""
        return to_device(indices, self.device)

    def _read(self, batch: PackedBatch, rows: list[np.ndarray]) -> np.ndarray | None:
        """Indices of the only tokens whose hidden states are read; None for all."""
        return None

    # ---------------------------------------------------------------------------------------- the four paths

    def use(self, path: str) -> None:
        """Gives the trunk the attention that `path` runs on, and its other modules what computes them fastest there."""
        packed = path.startswith("packed")
        self.trunk.set_attn_implementation(registry.NAME if packed else self._plain_attention)
        if self._fewer_passes is not None:
            self._fewer_passes.use(packed)

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """Within it the trunk runs as transformers runs it, for `generate` and the like, and nothing else does."""
        self.use("single")
        try:
            yield
        finally:
            self.use(self.path)

    def run(
        self, path: str, rows: list[np.ndarray], limits: list[int | None], *, budget: int | None = None
    ) -> Iterator[Layout]:
        """The rows' hidden states, a micro-batch at a time, by `path`, whose attention must be in use.

        `budget` is taken in place of `max_batch_tokens`.
        """
        yield from _one_ahead(self._plan(path, rows, limits, budget or self.max_batch_tokens))

    def _plan(self, path: str, rows: list[np.ndarray], limits: list[int | None], budget: int) -> Iterator[Prepare]:
        """The forwards that `run` makes, of which nothing is on the device yet."""
        if path in ("packed+shared", "packed"):
            budget = min(budget, self._most_tokens)
            for batch in pack(rows, budget=budget, share=path == "packed+shared", limits=limits):
                if batch.num_tokens <= self._most_tokens or len(batch.rows) == 1:
                    yield functools.partial(self._packed, batch, rows)
                    continue
                for i in batch.rows:
                    (alone,) = pack([rows[i]], budget=budget, share=False)
                    alone.rows = [i]
                    yield functools.partial(self._packed, alone, rows)
        elif path == "padded":
            order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
            while order:
                # The longest first: if a batch fits in memory at all, the first one shows it.
                count = max(1, budget // len(rows[order[-1]]))
                members, order = order[-count:], order[:-count]
                yield functools.partial(self._padded, members, rows)
        else:
            for i, row in enumerate(rows):
                yield functools.partial(self._single, i, row)

    def _packed(self, batch: PackedBatch, rows: list[np.ndarray]) -> Launch:
        where = self._read(batch, rows)
        inputs = [batch.tokens, self._positions(batch), *([] if where is None else [where])]
        tokens, positions, *rest = all_to_device(inputs, self.device)
        read = rest[0] if rest else None
        # With no mask, transformers takes restarting positions for packing of its own kind.
        mask = torch.ones_like(tokens)

        def launch() -> Layout:
            with registry.attending(batch, self._last_layer.queries(where)), self._last_layer.only(read):
                hidden = self._forward(tokens[None], mask[None], positions[None])[0]
            return Layout(hidden, batch.rows, batch.spans, batch.last, read)

        return launch

    def _padded(self, members: list[int], rows: list[np.ndarray]) -> Launch:
        """A right-padded batch of the rows of these numbers, the longest last."""
        width = len(rows[members[-1]])
        tokens = np.full((len(members), width), self.pad_token_id)
        mask = np.zeros_like(tokens)
        for i, row in enumerate(members):
            tokens[i, : len(rows[row])] = rows[row]
            mask[i, : len(rows[row])] = 1
        inputs = to_device(np.stack([tokens, mask]), self.device)
        spans: list[tuple[Span, ...]] = [((i * width, i * width + len(rows[r])),) for i, r in enumerate(members)]
        last = np.array([s[0][1] - 1 for s in spans])
        return lambda: Layout(self._forward(inputs[0], inputs[1]).flatten(0, 1), members, spans, last)

    def _single(self, number: int, row: np.ndarray) -> Launch:
        tokens = to_device(np.array(row)[None], self.device)
        spans: list[tuple[Span, ...]] = [((0, len(row)),)]
        return lambda: Layout(self._forward(tokens, None)[0], [number], spans, np.array([len(row) - 1]))

    def _forward(
        self, tokens: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The trunk's last hidden states `[B,T,H]`."""
        self._classes.prepare()
        inputs: dict[str, Any] = {"input_ids": tokens}
        if mask is not None:
            inputs["attention_mask"] = mask
        if positions is not None:
            inputs["position_ids"] = positions
        if self.causal:
            inputs["use_cache"] = False
        return self.run_trunk(**inputs).last_hidden_state

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


def _numbered(prepare: Prepare, members: list[int]) -> Launch:
    """The forward, whose layout will have the callers' numbers of its rows."""
    launch = prepare()

    def launch_numbered() -> Layout:
        layout = launch()
        layout.rows = [members[i] for i in layout.rows]
        return layout

    return launch_numbered


def _one_ahead(plan: Iterable[Prepare]) -> Iterator[Layout]:
    """Runs each; before anyone can wait for one's result, the next has been packed and its inputs are on their way."""
    prepared = map(operator.call, plan)
    launch = next(prepared, None)
    while launch is not None:
        layout = launch()
        launch = next(prepared, None)
        yield layout
        del layout  # its states are not to stay while the next are computed


def _most_tokens(config: Any) -> int:
    """Beyond this many tokens in a batch a sequence's place in it matters, which it must not.

    Llama 4 scales queries by one more than their index in the batch, in steps of `floor_scale`.
    """
    return max(1, int(config.floor_scale) - 1) if getattr(config, "attn_temperature_tuning", False) else sys.maxsize
