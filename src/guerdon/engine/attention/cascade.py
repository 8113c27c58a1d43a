"""Cascade attention: causal attention over a packed batch in parts, merged by their log-sum-exp; for CPUs.

Legend: H query heads, K key/value heads, T packed tokens, D head size.

A part is some queries on some keys. Each segment attends to itself, causally, in blocks of queries; then all
descendants of a segment attend to it in one unmasked part, so that a shared prefix is read once for all of them. With
the log-sum-exp l_p of each part's logits and l of all logits, the output is the sum of exp(l_p - l) times the part's.

The backward pass does not depend on the merging: given the *merged* output and log-sum-exp, the kernel computes
exp(logits - l), the weights of attention over all keys, and with them each part's exact share of the gradients, which
add up. (PyTorch does not differentiate the kernel's log-sum-exp: gradients by autograd would be silently wrong.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from guerdon.engine.packing import PackedBatch

QUERY_BLOCK = 192
"""Queries of one kernel call: the kernel also computes masked pairs inside blocks of 512 keys."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Forward = Callable[[PackedBatch, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def cascade(
    batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor, scale: float, forward: Forward | None = None
) -> Tensor:
    """Returns causal attention `[1,H,T,D]` of query `[1,H,T,D]` on key and value `[1,K,T,D]`; differentiable.

    `forward` replaces the forward pass: it returns the output and the log-sum-exp of all logits, float32 `[1,H,T]`.
    """
    forward = forward or _forward
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out: Tensor = _Cascade.apply(query, key, value, batch, scale, forward)
        return out
    return forward(batch, query, key, value, scale)[0]


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, scale: float, forward: Forward
    ) -> Tensor:
        out, lse = forward(batch, query, key, value, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.batch, ctx.scale = batch, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        return *_backward(ctx.batch, grad, query, key, value, out, lse, ctx.scale), None, None, None


def _forward(batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output `[1,H,T,D]` and the log-sum-exp of all logits, float32 `[1,H,T]`."""
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32)
    for s in batch.segments:
        for start in range(s.start, s.stop, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, s.stop)
            mask = None if start == s.start else _diagonal(batch, stop - start, stop - s.start, query.dtype)
            out[:, :, start:stop], lse[:, :, start:stop] = _flash(
                query[:, :, start:stop], key[:, :, s.start : stop], value[:, :, s.start : stop], 0.0, mask is None,
                attn_mask=mask, scale=scale,
            )  # fmt: skip
    for s in batch.segments:
        if s.end == s.stop:
            continue
        below, own = slice(s.stop, s.end), slice(s.start, s.stop)
        o, weight = _flash(query[:, :, below], key[:, :, own], value[:, :, own], 0.0, False, scale=scale)
        before = lse[:, :, below]
        both = torch.logaddexp(before, weight)
        share = torch.exp(weight - both)[..., None]
        merged = out[:, :, below]
        mean = merged.float().lerp_(o.float(), share)
        if mean is not merged:  # float() returns float32 tensors themselves
            merged.copy_(mean)
        lse[:, :, below] = both
    return out, lse


def _backward(
    batch: PackedBatch, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value from the output's; parts are summed in float32."""
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]

    def add(queries: slice, keys: slice, mask: Tensor | None, causal: bool) -> None:
        parts = _flash_backward(
            grad[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys], out[:, :, queries],
            lse[:, :, queries], 0.0, causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
        for total, part, where in zip(sums, parts, (queries, keys, keys), strict=True):
            total[:, :, where] += part

    for s in batch.segments:
        for start in range(s.start, s.stop, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, s.stop)
            mask = None if start == s.start else _diagonal(batch, stop - start, stop - s.start, query.dtype)
            add(slice(start, stop), slice(s.start, stop), mask, mask is None)
        if s.end > s.stop:
            add(slice(s.stop, s.end), slice(s.start, s.stop), None, False)
    dq, dk, dv = (total.to(query.dtype) for total in sums)
    return dq, dk, dv


def _diagonal(batch: PackedBatch, rows: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Returns the mask `[rows, keys]` of the last `rows` of `keys` tokens, 0 for visible keys, else -inf.

    It is a view of a mask that all blocks with so many rows share, as wide as the longest sequence.
    """
    whole: Tensor | None = batch.cache.get((rows, dtype))
    if whole is None:
        whole = torch.full((rows, batch.max_length), float("-inf"), dtype=dtype).triu_(batch.max_length - rows + 1)
        batch.cache[rows, dtype] = whole
    return whole[:, batch.max_length - keys :]
