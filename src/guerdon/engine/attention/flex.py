"""Attention over a packed batch as one call of PyTorch's flex attention, which leaves out blocks that nobody sees.

Legend: H query heads, K key/value heads, T packed tokens, D and E sizes of a query's and a value's head.

The descendants of a segment lie right behind it, so that the queries that see a key are one run, from the key itself to
the end of its segment's descendants: the tree is one number a key, and what a layer's pattern says is added to it. On
a GPU the call is compiled, which takes seconds once for each kind of layer, and has gradients. Uncompiled it would
write the whole table of [H,T,T].

Batches are made such that one compiled for a kind of layer does for all that come: tensors are laid out alike, and a
batch that the compiler would take for a special one gets a few tokens more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from guerdon.engine.attention.patterns import Pattern, Span
from guerdon.engine.packing import PackedBatch
from guerdon.engine.transfers import to_device

BLOCK = 128
"""Tokens of a block, of queries and of keys."""
VARIANTS = 64
"""Kinds of layers that may be compiled in one process, all models together.

PyTorch's own limit is 8, and one layer can need half of these: with gradients and without, with its window and without.
Beyond the limit a call raises, where without `fullgraph` it would run uncompiled from then on.
"""


def flex(
    batch: PackedBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    pattern: Pattern | None = None,
    span: Span | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention `[1,H,T,E]` of query `[1,H,T,D]` on key `[1,K,T,D]` and value `[1,K,T,E]`, any pattern.

    `span` is the pattern's, where it has one. On a CPU it is PyTorch's written-out form, without gradients, for tests.
    """
    attend: Any = flex_attention if query.device.type == "cpu" else _compiled()
    gradients = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    gqa = query.shape[1] != key.shape[1]
    fill = _fill(batch.num_tokens, query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    query, key, value = (_laid_out(x, fill) for x in (query, key, value))
    mask = block_mask(batch, causal, pattern, span, query.device, fill=fill, gradients=gradients)
    cap = _cap(softcap, query.device) if softcap else None
    _allow_variants()
    out: Tensor = attend(query, key, value, score_mod=cap, block_mask=mask, scale=scale, enable_gqa=gqa)
    return out[:, :, : batch.num_tokens]


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _allow_variants() -> None:
    """Lets the calling thread compile so many, if that is not so yet; for nothing longer, as `patch` leaves traces."""
    # The setting is a thread's own, and what is checkpointed is computed again on a thread of autograd's.
    if torch._dynamo.config.recompile_limit < VARIANTS:
        torch._dynamo.config.recompile_limit = VARIANTS


def _fill(num_tokens: int, *sizes: int) -> int:
    """How many tokens more there must be for neither them nor their blocks to be as many as any of the sizes, or one.

    The compiler takes equal numbers for the same and 1 for itself, and for fewer than 128 tokens another kernel: such a
    batch would be compiled for, while clients wait.
    """
    special, total = {1, *sizes}, num_tokens
    while (num_blocks := -(-total // BLOCK)) in special or total in special:
        total = num_blocks * BLOCK + 1 if num_blocks in special else total + 1
    return total - num_tokens


def _laid_out(x: Tensor, fill: int) -> Tensor:
    """The tensor and so many zeros behind it, token by token in memory: for other strides it is compiled anew."""
    by_token = x.transpose(1, 2)
    return (pad(by_token, (0, 0, 0, 0, 0, fill)) if fill else by_token.contiguous()).transpose(1, 2)


# Numbers are tensors in these functions: plain ones are symbols to the compiler, which it does not take everywhere.


def _cap(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    most = torch.full((), softcap, device=device)
    return lambda score, _, __, ___, ____: torch.tanh(score / most) * most


def _within(span: Span, device: torch.device) -> Callable[..., Tensor]:
    before, after = _apart(to_device(np.array(_unbounded(span), dtype=np.int32), device))
    return lambda _, __, q, k: (q - k <= before) & (k - q <= after)


def _apart(table: Tensor) -> tuple[Tensor, ...]:
    """The rows as tensors of their own: the compiler takes a table of n rows and a batch of n blocks for alike."""
    return tuple(row.clone() for row in table)


def _unbounded(span: Span) -> tuple[int, int]:
    most = np.iinfo(np.int32).max
    return span[0] if span[0] >= 0 else most, span[1] if span[1] >= 0 else most


def block_mask(
    batch: PackedBatch,
    causal: bool,
    pattern: Pattern | None,
    span: Span | None,
    device: torch.device,
    *,
    fill: int = 0,
    gradients: bool = True,
) -> BlockMask:
    """Which blocks are seen whole, in part, or not at all; made once a batch for all layers of a pattern.

    It counts, for each key and block of queries, who sees the key: PyTorch's own `create_block_mask` would ask for each
    of the T x T pairs. It is of `fill` tokens more, each of which sees itself. Without `gradients` it lacks the same by
    keys, which only the backward pass reads.
    """
    name = ("block mask", causal, None if pattern is None else id(pattern.allows), device, fill, gradients)
    known = batch.cache.get(name)
    if known is None:
        # The pattern is kept, so that no other can get its id.
        known = batch.cache[name] = pattern, _block_mask(batch, causal, pattern, span, device, fill, gradients)
    return known[1]


def _block_mask(
    batch: PackedBatch,
    causal: bool,
    pattern: Pattern | None,
    span: Span | None,
    device: torch.device,
    fill: int,
    gradients: bool,
) -> BlockMask:
    lengths = np.array([s.stop - s.start for s in batch.segments])
    first_seeing = np.arange(batch.num_tokens) if causal else np.repeat([s.start for s in batch.segments], lengths)
    table = np.stack([first_seeing, np.repeat([s.end for s in batch.segments], lengths), batch.positions])
    num_tokens = batch.num_tokens + fill
    own = np.arange(batch.num_tokens, num_tokens)
    table = np.concatenate([table, np.stack([own, own + 1, np.zeros_like(own)])], 1)
    begin, end, at = _apart(to_device(table.astype(np.int32), device))

    def tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= begin[k]) & (q < end[k])

    allows = None if pattern is None else pattern.allows if span is None else _within(span, device)

    def patterned(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert allows is not None
        return (q >= begin[k]) & (q < end[k]) & allows(b, h, at[q], at[k])

    num_blocks = -(-num_tokens // BLOCK)
    first = torch.arange(0, num_blocks * BLOCK, BLOCK, dtype=torch.int32, device=device)[:, None]
    seeing = torch.minimum(end, first + BLOCK) - torch.maximum(begin, first)
    missing = num_blocks * BLOCK - num_tokens
    seeing = pad(seeing.clamp_(min=0), (0, missing))
    pairs = seeing.view(num_blocks, num_blocks, BLOCK).sum(-1)  # [blocks of queries, blocks of keys]
    some, whole = pairs > 0, pairs == BLOCK * BLOCK
    if pattern is not None:
        within, beyond = _reach(at, missing, span)
        some, whole = some & ~beyond, whole & within
    parts = [_ordered(x[None, None]) for x in (some & ~whole, whole)]
    size = (num_tokens, num_tokens)
    mask = tree if allows is None else patterned
    return BlockMask.from_kv_blocks(
        *parts[0], *parts[1], BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=size, compute_q_blocks=gradients
    )


def _reach(at: Tensor, missing: int, span: Span | None) -> tuple[Tensor, Tensor]:
    """Of each block of queries and of keys whether all pairs are within the span, and whether none can be."""
    blocks = torch.cat([at, at[-1:].expand(missing)]).view(-1, BLOCK)
    low, high = blocks.amin(1), blocks.amax(1)
    least, most = low[:, None] - high[None], high[:, None] - low[None]  # how far back a key can be
    if span is None:
        return torch.zeros_like(least, dtype=torch.bool), torch.zeros_like(least, dtype=torch.bool)
    before, after = _unbounded(span)
    return (most <= before) & (least >= -after), (least > before) | (most < -after)


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the last dimension are true, and the indices of all with those first; int32."""
    order = torch.argsort(table.int(), dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32), order.int()
