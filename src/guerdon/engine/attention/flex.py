"""Attention over a packed batch in one call of PyTorch's flex attention, which skips fully masked blocks.

Legend: H query heads, K key/value heads, T packed tokens, D and E sizes of a query's and a value's head.

The descendants of a segment follow it directly, so that the queries that see a key are one run, from the key itself to
the end of its segment's descendants: one number per key describes the tree, and the layer's pattern is added to it. On
a GPU the call is compiled, which takes seconds once for each kind of layer, and is differentiable. Uncompiled it would
materialise the whole table of [H,T,T].

One compilation for a kind of layer serves all later batches, because recompilation is avoided: all tensors have the
same stride order, and a batch that the compiler would specialise on is padded with a few tokens.
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

from guerdon.engine.attention.patterns import Pattern, Reach
from guerdon.engine.microbatches import to_device
from guerdon.engine.packing import PackedBatch

BLOCK = 128
"""Tokens of a block of queries or of keys."""
VARIANTS = 64
"""Limit of compilations in one process, for the kinds of layers of all models.

PyTorch's own limit is 8, and one layer can need half of these: with and without gradients, with and without its window.
Beyond the limit a call raises; without `fullgraph` it would silently run uncompiled.
"""


def flex(
    batch: PackedBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    pattern: Pattern | None = None,
    reach: Reach | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Returns attention `[1,H,T,E]` of query `[1,H,T,D]` on key `[1,K,T,D]` and value `[1,K,T,E]`, for any pattern.

    `reach` is the pattern's, if it has one. On a CPU it runs uncompiled, without gradients, for tests.
    """
    attend: Any = flex_attention if query.device.type == "cpu" else _compiled()
    gradients = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    gqa = query.shape[1] != key.shape[1]
    fill = _fill(batch.num_tokens, query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    query, key, value = (_laid_out(x, fill) for x in (query, key, value))
    mask = block_mask(batch, causal, pattern, reach, query.device, fill=fill, gradients=gradients)
    cap = _cap(softcap, query.device) if softcap else None
    # The setting is thread-local, and activation checkpointing recomputes on autograd's thread; `patch` leaves traces.
    if torch._dynamo.config.recompile_limit < VARIANTS:
        torch._dynamo.config.recompile_limit = VARIANTS
    out: Tensor = attend(query, key, value, score_mod=cap, block_mask=mask, scale=scale, enable_gqa=gqa)
    return out[:, :, : batch.num_tokens]


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _fill(num_tokens: int, *sizes: int) -> int:
    """Returns how many tokens to add so that neither their number nor that of their blocks is 1 or one of the sizes.

    The compiler specialises on sizes that are equal or 1, and uses another kernel for fewer than 128 tokens: such a
    batch would be recompiled for while clients wait.
    """
    special, total = {1, *sizes}, num_tokens
    while (num_blocks := -(-total // BLOCK)) in special or total in special:
        total = num_blocks * BLOCK + 1 if num_blocks in special else total + 1
    return total - num_tokens


def _laid_out(x: Tensor, fill: int) -> Tensor:
    """Pads the tensor with so many zeros, contiguous by token: other strides would cause a recompilation."""
    by_token = x.transpose(1, 2)
    return (pad(by_token, (0, 0, 0, 0, 0, fill)) if fill else by_token.contiguous()).transpose(1, 2)


# Numbers are tensors in these functions: plain ones become symbols, which the compiler does not support everywhere.


def _cap(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    most = torch.full((), softcap, device=device)
    return lambda score, _, __, ___, ____: torch.tanh(score / most) * most


def _apart(table: Tensor) -> tuple[Tensor, ...]:
    """Returns the rows as separate tensors: the compiler would unify a table of n rows with a batch of n blocks."""
    return tuple(row.clone() for row in table)


def _unbounded(reach: Reach) -> tuple[int, int]:
    most = np.iinfo(np.int32).max
    return reach[0] if reach[0] >= 0 else most, reach[1] if reach[1] >= 0 else most


def block_mask(
    batch: PackedBatch,
    causal: bool,
    pattern: Pattern | None,
    reach: Reach | None,
    device: torch.device,
    *,
    fill: int = 0,
    gradients: bool = True,
) -> BlockMask:
    """Returns which blocks are visible whole, in part, or not at all; cached for all layers of a pattern.

    It counts, for each key and block of queries, the queries that see the key: PyTorch's `create_block_mask` would
    evaluate all T x T pairs. It covers `fill` more tokens, which see only themselves. Without `gradients` it has no
    blocks by key, which only the backward pass reads.
    """
    name = ("block mask", causal, None if pattern is None else id(pattern.allows), device, fill, gradients)
    known = batch.cache.get(name)
    if known is not None:
        return known[1]
    lengths = np.array([s.stop - s.start for s in batch.segments])
    first_seeing = np.arange(batch.num_tokens) if causal else np.repeat([s.start for s in batch.segments], lengths)
    table = np.stack([first_seeing, np.repeat([s.end for s in batch.segments], lengths), batch.positions])
    num_tokens = batch.num_tokens + fill
    own = np.arange(batch.num_tokens, num_tokens)
    table = np.concatenate([table, np.stack([own, own + 1, np.zeros_like(own)])], 1)
    begin, end, at = _apart(to_device(table.astype(np.int32), device))

    def tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= begin[k]) & (q < end[k])

    allows = None if pattern is None else pattern.allows
    if pattern is not None and reach is not None:
        before, after = _apart(to_device(np.array(_unbounded(reach), dtype=np.int32), device))
        allows = lambda _, __, q, k: (q - k <= before) & (k - q <= after)  # noqa: E731

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
        within, beyond = _in_reach(at, missing, reach)
        some, whole = some & ~beyond, whole & within
    parts = [_ordered(x[None, None]) for x in (some & ~whole, whole)]
    size = (num_tokens, num_tokens)
    mask = tree if allows is None else patterned
    made = BlockMask.from_kv_blocks(
        *parts[0], *parts[1], BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=size, compute_q_blocks=gradients
    )
    batch.cache[name] = pattern, made  # with the pattern, so that no other object can get its id
    return made


def _in_reach(at: Tensor, missing: int, reach: Reach | None) -> tuple[Tensor, Tensor]:
    """Returns for each block of queries and keys whether all pairs are inside the reach, and whether none can be."""
    blocks = torch.cat([at, at[-1:].expand(missing)]).view(-1, BLOCK)
    low, high = blocks.amin(1), blocks.amax(1)
    least, most = low[:, None] - high[None], high[:, None] - low[None]  # how far back a key can be
    if reach is None:
        return torch.zeros_like(least, dtype=torch.bool), torch.zeros_like(least, dtype=torch.bool)
    before, after = _unbounded(reach)
    return (most <= before) & (least >= -after), (least > before) | (most < -after)


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the count of true values in the last dimension, and its indices with true ones first; int32."""
    order = torch.argsort(table.int(), dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32), order.int()
