"""Varlen attention over a packed batch, in few calls of FlashAttention; for GPUs.

Legend: H query heads, K key/value heads, T packed tokens, D head size, S sequences of a part.

A part is one call of the kernel: S runs of queries, each on a run of keys. There are two divisions of a batch:
`gathered` is one part, in which each segment attends to a copy of its ancestors' keys followed by its own, and supports
windows; `levels` is one part for all segments on themselves and one for each level of the tree, in which all
descendants of a segment attend to it, so that no shared keys are copied. Parts are merged by their log-sum-exp.

The backward pass depends neither on the merging nor on the division: given the *merged* output and log-sum-exp, the
kernel computes exp(logits - lse), the weights of attention over all keys, and with them each part's exact share of the
gradients, which add up. So gathered keys are not kept for it, and it may use the other division. An attention sink is
one more logit in the log-sum-exp, with a value of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from guerdon.engine.attention.by_segment import visible
from guerdon.engine.attention.patterns import CAUSAL, FULL, Reach
from guerdon.engine.microbatches import to_device
from guerdon.engine.packing import PackedBatch, Span, indices

Rows = slice | Tensor
"""Tokens of the packed row, in order: a contiguous run, or indices (int64)."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call: the runs `cu_queries[i]:cu_queries[i+1]` of the rows `queries`, and likewise of the rows `keys`.

    `cu_queries` and `cu_keys` are int32 `[S+1]`, `max_queries` and `max_keys` their longest runs. `reach` counts
    positions as if the last query and the last key of a run were the same token.
    """

    queries: Rows
    keys: Rows
    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    reach: Reach


class Flash:
    """PyTorch's FlashAttention: half precision, head sizes up to 256 in steps of 8; one call for the tokens of a part.

    `torch.nn.attention.varlen` calls the same operators, but its backward pass does not accept the merged output and
    log-sum-exp. If another FlashAttention is installed and activated with
    `torch.nn.attention.activate_flash_attention_impl`, these operators call it.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: KernelCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the output `[Tq,H,D]` of queries `[Tq,H,D]`, keys and values `[Tk,K,D]`, and the log-sum-exp of all
        logits, float32 `[H,Tq]`."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, part.cu_queries, part.cu_keys, part.max_queries, part.max_keys, 0.0,
            part.reach == CAUSAL, False, scale=scale, window_size_left=part.reach[0], window_size_right=part.reach[1],
        )  # fmt: skip
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, part: KernelCall,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns gradients of query, key and value; `out` and `lse` may be of a softmax over more than the part."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, part.cu_queries, part.cu_keys, part.max_queries, part.max_keys, 0.0,
            part.reach == CAUSAL, no_dropout, torch.empty(0, device=query.device), scale=scale,
            window_size_left=part.reach[0], window_size_right=part.reach[1],
        )  # fmt: skip
        return dq, dk, dv


FLASH = Flash()


def varlen(
    batch: PackedBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    reach: Reach,
    sinks: Tensor | None = None,
    *,
    gathers: bool = True,
    kernel: Flash = FLASH,
) -> Tensor:
    """Returns attention `[1,H,T,D]` of query `[1,H,T,D]` on key and value `[1,K,T,D]`, sinks `[H]`; differentiable.

    Without `gathers` the forward pass does not copy the keys of ancestors, which requires a causal reach.
    """
    device = query.device
    forward = gathered(batch, reach, device) if gathers else levels(batch, device)
    # The kernel requires the last dimension to be contiguous.
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, sinks) if x is not None):
        # In `levels` the keys of a part are distinct, so there are no gradients of copies to sum.
        backward = levels(batch, device) if reach == CAUSAL else gathered(batch, reach, device)
        out: Tensor = _Varlen.apply(query, key, value, sinks, scale, (forward, backward), kernel)
    else:
        out = _forward(query, key, value, sinks, scale, forward, kernel)[0]
    return out.transpose(0, 1)[None]


def gathered(batch: PackedBatch, reach: Reach, device: torch.device) -> list[KernelCall]:
    """Returns one part: each segment on its ancestors and itself, as far back as `reach` allows."""
    known: list[KernelCall] | None = batch.cache.get(("gathered", reach, device))
    if known is None:
        window = reach[0] + 1 if reach[0] >= 0 and reach[1] == 0 else None
        seen = [visible(s, window)[0] for s in batch.segments]
        own = [[(s.start, s.stop)] for s in batch.segments]
        known = batch.cache["gathered", reach, device] = [_part(own, seen, reach, device)]
    return known


def levels(batch: PackedBatch, device: torch.device) -> list[KernelCall]:
    """Returns one part of all segments on themselves, and one for each level of the tree with everything below it."""
    known: list[KernelCall] | None = batch.cache.get(("levels", device))
    if known is None:
        own = [[(s.start, s.stop)] for s in batch.segments]
        known = [_part(own, own, CAUSAL, device)]
        parents = [s for s in batch.segments if s.end > s.stop]
        for depth in range(1 + max((len(s.ancestors) for s in parents), default=-1)):
            at = [s for s in parents if len(s.ancestors) == depth]
            known.append(_part([[(s.stop, s.end)] for s in at], [[(s.start, s.stop)] for s in at], FULL, device))
        batch.cache["levels", device] = known
    return known


def _part(queries: Sequence[list[Span]], keys: Sequence[list[Span]], reach: Reach, device: torch.device) -> KernelCall:
    """Returns the part of these sequences, given the runs of each one's queries and keys."""
    lengths = [np.array([sum(b - a for a, b in runs) for runs in some]) for some in (queries, keys)]
    sums = [np.concatenate([[0], np.cumsum(some)]).astype(np.int32) for some in lengths]
    cu_queries, cu_keys = (to_device(x, device) for x in sums)
    most = [int(some.max()) for some in lengths]
    return KernelCall(_rows(queries, device), _rows(keys, device), cu_queries, cu_keys, most[0], most[1], reach)


def _rows(sequences: Sequence[list[Span]], device: torch.device) -> Rows:
    runs = [run for some in sequences for run in some]
    if all(before[1] == after[0] for before, after in pairwise(runs)):
        return slice(runs[0][0], runs[-1][1])
    return to_device(indices(tuple(runs)), device)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float,
        divisions: tuple[list[KernelCall], list[KernelCall]], kernel: Flash,
    ) -> Tensor:  # fmt: skip
        out, lse = _forward(query, key, value, sinks, scale, divisions[0], kernel)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.scale, ctx.parts, ctx.kernel = scale, divisions[1], kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        slopes = _backward(grad, query, key, value, sinks, out, lse, ctx.scale, ctx.parts, ctx.kernel)
        return *slopes, None, None, None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    parts: list[KernelCall],
    kernel: Flash,
) -> tuple[Tensor, Tensor]:
    """Returns the output `[T,H,D]` and the log-sum-exp of all logits and sinks, float32 `[H,T]`, part by part."""
    first, *others = parts
    out, lse = kernel.forward(query, _taken(key, first.keys), _taken(value, first.keys), first, scale)
    for part in others:
        rows = part.queries
        some, of_part = kernel.forward(
            _taken(query, rows), _taken(key, part.keys), _taken(value, part.keys), part, scale
        )  # fmt: skip
        both = torch.logaddexp(_taken(lse, rows, 1), of_part)
        share, before = _share(of_part, both), _taken(out, rows)
        _put(out, rows, torch.lerp(before.to(share.dtype), some.to(share.dtype), share).to(out.dtype))
        _put(lse, rows, both, 1)
    if sinks is not None:
        both = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))
        out, lse = (out * _share(lse, both)).to(out.dtype), both
    return out, lse


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    scale: float, parts: list[KernelCall], kernel: Flash,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns the gradients of query, key, value and sinks from the output's; parts are summed in float32."""

    def of_part(part: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = part.queries, part.keys
        return kernel.backward(
            _taken(grad, queries), _taken(query, queries), _taken(key, keys), _taken(value, keys), _taken(out, queries),
            _taken(lse, queries, 1).contiguous(), part, scale,
        )  # fmt: skip

    if len(parts) == 1 and isinstance(parts[0].keys, slice) and parts[0].keys == parts[0].queries:
        # The only part is the whole row on itself: there is nothing to sum.
        dq, dk, dv = of_part(parts[0])
    else:
        sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
        for part in parts:
            for total, some, rows in zip(sums, of_part(part), (part.queries, part.keys, part.keys), strict=True):
                if isinstance(rows, slice):
                    _taken(total, rows).add_(some)
                else:
                    total.index_add_(0, rows, some.to(total.dtype))
        dq, dk, dv = (total.to(query.dtype) for total in sums)
    slope = None
    if sinks is not None:
        # The sink's weight times the difference of its value, zero, from the output.
        lost = torch.exp(sinks.to(lse.dtype).unsqueeze(1) - lse) * (grad.to(lse.dtype) * out).sum(-1).T
        slope = -lost.sum(1).to(sinks.dtype)
    return dq, dk, dv, slope


def _taken(x: Tensor, rows: Rows, dim: int = 0) -> Tensor:
    return x.narrow(dim, rows.start, rows.stop - rows.start) if isinstance(rows, slice) else x.index_select(dim, rows)


def _put(x: Tensor, rows: Rows, values: Tensor, dim: int = 0) -> None:
    if isinstance(rows, slice):
        x.narrow(dim, rows.start, rows.stop - rows.start).copy_(values)
    else:
        x.index_copy_(dim, rows, values)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Returns a part's share `[T,H,1]` of the softmax weights, from log-sum-exps `[H,T]`."""
    return torch.exp(part - whole).T.unsqueeze(2)
