"""Attention written out in full, packed trees to try it on, and a kernel for parts that says what it was given."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import masking_utils as masks

from guerdon.engine.attention.patterns import Pattern, packed_mask
from guerdon.engine.attention.varlen import KernelCall
from guerdon.engine.packing import PackedBatch, indices, pack

SCALE = 0.3
WINDOW = 21
CHUNK = 24


@dataclass(frozen=True)
class Case:
    """What a layer asks: its mask function beyond causal or full, a soft cap, sinks."""

    causal: bool = True
    mask: Callable | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def pattern(self) -> Pattern | None:
        """The mask as the registry's entry gives it; a window is as many keys, as transformers tells."""
        window = CHUNK if self.mask is CHUNKED else WINDOW
        return None if self.mask is None else packed_mask(mask_function=self.mask, local_size=window)


CHUNKED = masks.chunked_causal_mask_function(CHUNK, torch.zeros(1, dtype=torch.long))
WINDOWED = masks.sliding_window_causal_mask_function(WINDOW)
AROUND = masks.sliding_window_bidirectional_mask_function(WINDOW)
CASES = {
    "plain": Case(),
    "window": Case(mask=WINDOWED),
    "sinks": Case(sinks=True),
    "window and sinks": Case(mask=WINDOWED, sinks=True),
    "softcap": Case(softcap=1.5),
    "window and softcap": Case(mask=WINDOWED, softcap=1.5),
    "chunks": Case(mask=CHUNKED),
    "encoder": Case(causal=False),
    "encoder, window": Case(causal=False, mask=AROUND),
}


def tree(seed: int, *, share: bool = True, longest: int = 30) -> PackedBatch:
    """Packs three levels of sharing, rows that are prefixes of others, and single tokens after a prompt and alone."""
    random = np.random.default_rng(seed)

    def some(n: int) -> np.ndarray:
        return random.integers(0, 99, n)

    rows = []
    for _ in range(2):
        prompt = some(random.integers(17, longest))
        for _ in range(2):
            turn = np.concatenate([prompt, some(random.integers(17, longest))])
            third = np.concatenate([turn, some(random.integers(17, longest))])
            rows += [turn, *(np.concatenate([turn, some(n)]) for n in (1, random.integers(1, longest)))]
            rows += [np.concatenate([third, some(n)]) for n in (1, 1 + random.integers(1, longest))]
        rows += [np.concatenate([prompt, some(n)]) for n in (1, random.integers(1, longest))]
    rows += [some(1), some(random.integers(1, 2 * longest))]
    order = random.permutation(len(rows))
    (batch,) = pack([rows[i] for i in order], budget=10**6, share=share)
    return batch


def tensors(
    batch: PackedBatch, *, heads: int = 4, kv_heads: int = 1, size: int = 16, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Query, key, value, sinks and the output's gradient; heads lie side by side in memory, as the models have them."""
    random = torch.Generator().manual_seed(batch.num_tokens)
    shapes = [(1, batch.num_tokens, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    query, key, value, grad = (torch.randn(*x, generator=random).to(dtype).transpose(1, 2) for x in shapes)
    return [query, key, value, torch.linspace(-1, 2, heads).to(dtype), grad]


def visible(batch: PackedBatch, case: Case) -> Tensor:
    """Bool `[T,T]`, which keys each query sees; from the rows' spans, not from the segments."""
    seen = torch.zeros(batch.num_tokens, batch.num_tokens, dtype=torch.bool)
    positions = torch.from_numpy(batch.positions)
    for i in range(len(batch.rows)):
        at = torch.from_numpy(indices(batch.spans[i]))
        own = torch.ones(len(at), len(at), dtype=torch.bool)
        if case.causal:
            own.tril_()
        if case.mask is not None:
            own &= case.mask(0, 0, positions[at][:, None], positions[at][None])
        seen[at[:, None], at[None]] |= own
    return seen


def written_out(
    batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, case: Case
) -> Tensor:
    """Attention `[1,H,T,D]` over all pairs of tokens."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(2, 3) * SCALE
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    logits = logits.masked_fill(~visible(batch, case), float("-inf"))
    if case.sinks and sinks is not None:
        logits = torch.cat([logits, sinks[None, :, None, None].expand(*logits.shape[:3], 1)], 3)
    return torch.softmax(logits, 3)[..., : key.shape[2]] @ value


@dataclass
class WrittenOut:
    """A kernel for parts in plain torch, of any dtype, that holds callers to what FlashAttention wants."""

    parts: list[KernelCall] = field(default_factory=list)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: KernelCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        self._check(part, query, key, value)
        self.parts.append(part)
        out = torch.empty(query.shape, dtype=query.dtype)
        lse = torch.empty(query.shape[1], query.shape[0], dtype=query.dtype)
        for queries, keys in _runs(part):
            logits, _ = _logits(query[queries], key[keys], part, scale)
            lse[:, queries] = logits.logsumexp(2)
            weights = torch.exp(logits - lse[:, queries, None])
            out[queries] = (weights @ _by_head(value[keys], query)).transpose(0, 1)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        part: KernelCall,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._check(part, query, key, value)
        assert out.shape == grad.shape == query.shape and out.is_contiguous()
        assert lse.shape == (query.shape[1], query.shape[0]) and lse.is_contiguous()
        slopes = [torch.zeros(x.shape, dtype=x.dtype) for x in (query, key, value)]
        for queries, keys in _runs(part):
            logits, k = _logits(query[queries], key[keys], part, scale)
            g, o, q = (x[queries].transpose(0, 1) for x in (grad, out, query))
            weights = torch.exp(logits - lse[:, queries, None])
            of_logits = weights * (g @ _by_head(value[keys], query).mT - (g * o).sum(2, keepdim=True)) * scale
            parts = (of_logits @ k, of_logits.mT @ q, weights.mT @ g)
            for slope, of_part, rows, x in zip(slopes, parts, (queries, keys, keys), (query, key, value), strict=True):
                by_group = of_part.transpose(0, 1).unflatten(1, (x.shape[1], -1))
                slope[rows] = by_group.sum(2)
        return slopes[0], slopes[1], slopes[2]

    def _check(self, part: KernelCall, query: Tensor, key: Tensor, value: Tensor) -> None:
        assert query.stride(2) == key.stride(2) == value.stride(2) == 1
        for cu, longest, rows in ((part.cu_queries, part.max_queries, query), (part.cu_keys, part.max_keys, key)):
            assert cu.dtype == torch.int32 and cu.is_contiguous() and cu[0] == 0 and cu[-1] == len(rows)
            assert longest == cu.diff().max() and cu.diff().min() > 0
        assert len(part.cu_queries) == len(part.cu_keys) and len(key) == len(value)


def _runs(part: KernelCall) -> list[tuple[slice, slice]]:
    queries, keys = part.cu_queries.tolist(), part.cu_keys.tolist()
    return [(slice(*queries[i : i + 2]), slice(*keys[i : i + 2])) for i in range(len(queries) - 1)]


def _by_head(x: Tensor, query: Tensor) -> Tensor:
    return x.transpose(0, 1).repeat_interleave(query.shape[1] // x.shape[1], 0)


def _logits(query: Tensor, key: Tensor, part: KernelCall, scale: float) -> tuple[Tensor, Tensor]:
    """Logits `[H,Tq,Tk]` of one run, and the keys by query head; the last query is where the last key is."""
    keys = _by_head(key, query)
    q, k = torch.arange(len(query))[:, None] + len(key) - len(query), torch.arange(len(key))[None]
    before, after = (x if x >= 0 else len(key) + len(query) for x in part.reach)
    seen = (k >= q - before) & (k <= q + after)
    return (query.transpose(0, 1) @ keys.mT * scale).masked_fill(~seen, float("-inf")), keys
