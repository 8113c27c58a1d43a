"""Rows of tokens into micro-batches: what one forward computes, by the path that the model runs on.

`packed` and `packed+shared` make one row without padding (see `packing`), `shared` the segments of a forest (see
`continuing`), `padded` a right-padded batch, `single` a batch of one sequence. Only rows that do not change each
other's scores share a micro-batch.

Micro-batches are planned on the host. They are copied from pinned memory, which does not wait for the device: from
pageable memory CUDA would copy only after all queued kernels are done, and the device would be idle afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guerdon.core import WHOLE_GROUP, Sequence
from guerdon.engine.packing import PackedBatch, Segment, Span, indices, pack


@dataclass(slots=True)
class MicroBatch:
    """The inputs of one forward, on the host, and where each of its rows lies in the hidden states `[T,H]`.

    `tokens` is int64 `[T]`, or `[B,width]` if padded, with a `mask` of the same shape. `rows` are the callers' row
    numbers, `spans` where each of them lies, `last` (int64 `[B]`) the index of each row's last token. `packed` tells
    attention the forest; `segments` are its segments if each has a forward of its own. `read` are the indices of the
    only hidden states that anybody reads, None for all of them.
    `types` are the tokens' types, of their shape; None if all are 0.
    """

    tokens: np.ndarray
    rows: list[int]
    spans: list[tuple[Span, ...]]
    last: np.ndarray
    mask: np.ndarray | None = None
    positions: np.ndarray | None = None
    packed: PackedBatch | None = None
    read: np.ndarray | None = None
    types: np.ndarray | None = None
    segments: list[Segment] | None = None

    def gather(self, i: int) -> np.ndarray:
        """Returns the indices (int64 `[len]`) of the hidden states of the i-th row."""
        return indices(self.spans[i])

    def to_device(self, device: torch.device) -> tuple[dict[str, Tensor], Tensor | None]:
        """Copies the model's inputs and `read` to the device, in a single copy."""
        more = {} if self.types is None else {"token_type_ids": self.types}
        if self.packed is not None:
            assert self.positions is not None
            arrays = {"input_ids": self.tokens, "position_ids": self.positions, **more}
            tensors = all_to_device([*arrays.values(), *([] if self.read is None else [self.read])], device)
            inputs = {name: tensor[None] for name, tensor in zip(arrays, tensors, strict=False)}
            # Without a mask transformers takes positions that restart for its own kind of packing.
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            return inputs, None if self.read is None else tensors[-1]
        if self.mask is not None:
            more["attention_mask"] = self.mask
        table = to_device(
            np.stack([self.tokens, *more.values()]).reshape(1 + len(more), -1, self.tokens.shape[-1]), device
        )
        return dict(zip(("input_ids", *more), table, strict=True)), None


def deduplicate(sequences: list[Sequence]) -> tuple[list[np.ndarray], list[int | None], list[int | None], list[int]]:
    """Returns the distinct rows, the first prompt length and the second start of each, and each sequence's row."""
    slots: dict[tuple[bytes, int | None], int] = {}
    rows: list[np.ndarray] = []
    limits: list[int | None] = []
    starts: list[int | None] = []
    where = []
    for s in sequences:
        slot = slots.setdefault((s.tokens.tobytes(), s.second_start), len(rows))
        if slot == len(rows):
            rows.append(s.tokens)
            limits.append(s.prompt_length)
            starts.append(s.second_start)
        where.append(slot)
    return rows, limits, starts, where


def typed(batches: Iterator[MicroBatch], second_starts: list[int | None]) -> Iterator[MicroBatch]:
    """Yields micro-batches of rows that share no tokens; those of each row from its second start on get the type 1."""
    for batch in batches:
        types = np.zeros(batch.tokens.size, np.int64)
        for i, row in enumerate(batch.rows):
            if (start := second_starts[row]) is not None:
                types[batch.gather(i)[start:]] = 1
        batch.types = types.reshape(batch.tokens.shape)
        yield batch


class Batcher:
    """Plans micro-batches for one trunk."""

    def __init__(self, trunk: Any, pad_token_id: int) -> None:
        self.length_classes = LengthClasses(trunk)
        self._pad_token_id = pad_token_id
        self._on_cpu = next(trunk.parameters()).device.type == "cpu"
        # Beyond so many tokens the place of one in its batch changes its hidden state: Llama 4 scales queries by one
        # more than their index in the batch, in steps of `floor_scale`.
        config = trunk.config.get_text_config()
        is_scaled = getattr(config, "attn_temperature_tuning", False)
        self._most_tokens = max(1, int(config.floor_scale) - 1) if is_scaled else sys.maxsize
        embeddings: Any = getattr(trunk, "embeddings", None)
        counts_from_padding = hasattr(embeddings, "create_position_ids_from_input_ids")
        self._padding_idx = int(embeddings.padding_idx) if counts_from_padding else None

    @property
    def bounds_tokens(self) -> bool:
        """Whether the place of a token in its batch matters beyond some number of tokens."""
        return self._most_tokens < sys.maxsize

    def plan(self, path: str, rows: list[np.ndarray], limits: list[int | None], budget: int) -> Iterator[MicroBatch]:
        """Yields micro-batches of at most about `budget` tokens; any rows may share one (see `LengthClasses.split`).

        `limits` bounds how many tokens of each row may be shared, as in `pack`.
        """
        if path.startswith("packed"):
            yield from self._packed(path, rows, limits, min(budget, self._most_tokens))
        elif path == "shared":
            for x in pack(rows, budget=budget, share=True, limits=limits, most=self._most(budget)):
                yield MicroBatch(x.tokens, x.rows, x.spans, x.last, segments=x.segments)
        elif path == "padded":
            order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
            while order:
                # Start with the longest: if any batch runs out of memory, it is the first one.
                count = max(1, budget // len(rows[order[-1]]))
                members, order = order[-count:], order[:-count]
                yield self._padded(members, rows)
        else:
            for i, row in enumerate(rows):
                yield MicroBatch(row, [i], [((0, len(row)),)], np.array([len(row) - 1]))

    def _packed(self, path: str, rows: list[np.ndarray], limits: list[int | None], budget: int) -> Iterator[MicroBatch]:
        most = min(self._most(budget), self._most_tokens)
        for batch in pack(rows, budget=budget, share=path == "packed+shared", limits=limits, most=most):
            if batch.num_tokens == 1:
                # Its only row again beside it: PyTorch computes some functions of a single token with other bits.
                own = batch.rows[0]
                (twice,) = pack([rows[own]] * 2, budget=2, share=False)
                twice.rows, twice.spans, twice.last = [own], twice.spans[:1], twice.last[:1]
                yield self._of_packed(twice)
                continue
            if batch.num_tokens <= self._most_tokens or len(batch.rows) == 1:
                yield self._of_packed(batch)
                continue
            for i in batch.rows:
                (alone,) = pack([rows[i]], budget=budget, share=False)
                alone.rows = [i]
                yield self._of_packed(alone)

    def _most(self, budget: int) -> int:
        """Returns the tokens of a batch that ends with a whole group; on CPUs without gradients memory is plenty."""
        return WHOLE_GROUP * budget if self._on_cpu and not torch.is_grad_enabled() else budget

    def _of_packed(self, batch: PackedBatch) -> MicroBatch:
        positions, padding = batch.positions, self._padding_idx
        if padding is not None:  # RoBERTa's family starts at the padding index and skips pads
            counted = batch.tokens != padding
            positions = np.empty_like(positions)
            for s in batch.segments:  # an encoder's segments are whole sequences
                own = counted[s.start : s.stop]
                positions[s.start : s.stop] = padding + np.cumsum(own) * own
        return MicroBatch(batch.tokens, batch.rows, batch.spans, batch.last, positions=positions, packed=batch)

    def _padded(self, members: list[int], rows: list[np.ndarray]) -> MicroBatch:
        """Pads the rows of these numbers, the longest last, on the right."""
        width = len(rows[members[-1]])
        tokens = np.full((len(members), width), self._pad_token_id)
        mask = np.zeros_like(tokens)
        for i, row in enumerate(members):
            tokens[i, : len(rows[row])] = rows[row]
            mask[i, : len(rows[row])] = 1
        spans: list[tuple[Span, ...]] = [((i * width, i * width + len(rows[r])),) for i, r in enumerate(members)]
        return MicroBatch(tokens, members, spans, np.array([s[0][1] - 1 for s in spans]), mask=mask)


# ------------------------------------------------------------------------------------------ rotary embeddings


class LengthClasses:
    """Splits rows into classes that may share a batch: a single class unless rotary frequencies depend on the length.

    transformers picks the frequencies of `longrope` and `dynamic` rotary embeddings by the largest position in the
    batch, so that a long neighbour would change the score of a short sequence.
    """

    def __init__(self, trunk: Any) -> None:
        config = trunk.config.get_text_config()
        own = getattr(config, "rope_parameters", None) or {}
        parameters = [own] if "rope_type" in own else [p for p in own.values() if isinstance(p, dict)]
        changing = [p for p in parameters if p.get("rope_type") in ("longrope", "dynamic")]
        # Only longrope has a limit of its own.
        known = [p.get("original_max_position_embeddings") if p["rope_type"] == "longrope" else None for p in changing]
        self._limits = sorted({limit or config.max_position_embeddings for limit in known})
        dynamic = any(p["rope_type"] == "dynamic" for p in changing)
        self._dynamic: list[Any] = [m for m in trunk.modules() if hasattr(m, "max_seq_len_cached")] if dynamic else []

    @property
    def depend_on_length(self) -> bool:
        """Whether the hidden state of a token depends on how many tokens follow it."""
        return bool(self._limits)

    def split(self, rows: list[np.ndarray]) -> Iterator[list[int]]:
        """Yields lists of row numbers; one forward may compute the rows of one list."""
        classes: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(rows):
            classes.setdefault(self.of(len(row)), []).append(i)
        yield from classes.values()

    def of(self, length: int) -> tuple[int, int]:
        """Returns the class of a sequence of that length."""
        above = sum(length > limit for limit in self._limits)
        # Beyond the limit a dynamic embedding has other frequencies for every length.
        return above, length if above and self._dynamic else 0

    def is_same(self, *lengths: int) -> bool:
        """Whether sequences of these lengths may share a forward, and a cache while they grow from one to another."""
        return len({self.of(length) for length in lengths}) == 1

    def reset(self) -> None:
        """Resets dynamic embeddings, which keep the longest sequence seen: else scores would depend on history."""
        for embedding in self._dynamic:
            embedding.max_seq_len_cached = embedding.original_max_seq_len
            # With several layer types there is one for each of them, made in the first forward.
            for name in [name for name in vars(embedding) if name.endswith("_max_seq_len_cached")]:
                delattr(embedding, name)
            for name in embedding._buffers:
                if name.endswith("inv_freq") and "original" not in name:
                    original = getattr(embedding, f"{name.removesuffix('inv_freq')}original_inv_freq")
                    # Clone: a longrope embedding beside it writes in place.
                    embedding._buffers[name] = original.clone()


# ------------------------------------------------------------------------------------------- host to device


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns the array as a tensor on the device; on a CPU it shares the array's memory, which must be writable."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def all_to_device(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copies one-dimensional arrays of one dtype to the device in a single copy; the result shares no memory."""
    together = to_device(np.concatenate(arrays), device)
    return list(together.split([len(array) for array in arrays]))
