"""Attention over a packed batch with one call of PyTorch's attention per segment; for any device and any mask.

Legend: H query heads, K key/value heads, T packed tokens, D head size.

The reference for the other forms, and the fallback for all masks. On a GPU PyTorch's fused kernels accept a mask only
if each query head has keys of its own; without these kernels all [H,queries,keys] logits are in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from guerdon.engine.attention import cascade
from guerdon.engine.attention.patterns import Pattern
from guerdon.engine.packing import PackedBatch, Segment

QUERY_BLOCK = 1024
"""Queries of one call on a GPU if their logits are materialised or a window masks keys: few large calls."""


def by_segment(
    batch: PackedBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    pattern: Pattern | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns `[1,H,T,D]` for any mask, by one call per segment or block of its queries; differentiable."""
    window = pattern.window if pattern is not None and causal else None
    materialised = bool(softcap) or sinks is not None
    out = []
    on_cpu = query.device.type == "cpu"
    size = cascade.QUERY_BLOCK if on_cpu else QUERY_BLOCK if materialised or pattern is not None else batch.num_tokens
    for s in _pieces(batch, size) if causal else batch.segments:
        seen, first = visible(s, window)
        q = query[:, :, s.start : s.stop]
        k, v = (
            t[:, :, seen[0][0] : seen[0][1]] if len(seen) == 1 else torch.cat([t[:, :, a:b] for a, b in seen], 2)
            for t in (key, value)
        )
        triangle = causal and pattern is None and q.shape[2] == k.shape[2] and not materialised
        mask = None
        if not triangle and (causal or pattern is not None):
            mask = _mask(batch, s, first, k, pattern, torch.bool if materialised else q.dtype)
        if materialised:
            out.append(_materialised(q, k, v, mask, scale, softcap, sinks))
        else:
            if not on_cpu:
                k, v = _by_query_head(q, k, v)
            gqa = q.shape[1] != k.shape[1]
            out.append(
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=triangle, scale=scale, enable_gqa=gqa)
            )
    return torch.cat(out, 2)


def _pieces(batch: PackedBatch, size: int) -> Iterator[Segment]:
    """Splits segments into blocks of queries, each a child of the previous one, to compute fewer masked pairs."""
    for s in batch.segments:
        for start in range(s.start, s.stop, size):
            stop = min(start + size, s.stop)
            before = ((s.start, start),) if start > s.start else ()
            yield Segment(start, stop, s.position + start - s.start, (*s.ancestors, *before), stop)


def visible(s: Segment, window: int | None) -> tuple[list[tuple[int, int]], int]:
    """Returns the spans visible to a segment, oldest first, cropped to the window, and their first key's position."""
    spans: list[tuple[int, int]] = []
    for a, b in (*s.ancestors, (s.start, s.stop)):
        if spans and spans[-1][1] == a:
            spans[-1] = spans[-1][0], b
        else:
            spans.append((a, b))
    first = surplus = max(0, s.position - window + 1) if window else 0
    while surplus >= spans[0][1] - spans[0][0]:
        a, b = spans.pop(0)
        surplus -= b - a
    spans[0] = (spans[0][0] + surplus, spans[0][1])
    return spans, first


def _mask(
    batch: PackedBatch, s: Segment, first: int, keys: Tensor, pattern: Pattern | None, dtype: torch.dtype
) -> Tensor:
    """Returns the mask `[queries, keys]`, made of positions only: bool, True if visible, or 0 and -inf.

    It is cached for all layers of a pattern.
    """
    num_keys, device = keys.shape[2], keys.device
    name = ("mask", s.start, None if pattern is None else id(pattern.allows), device, dtype)
    known = batch.cache.get(name)
    if known is None:
        q = torch.arange(s.position, s.position + s.stop - s.start, device=device)[:, None]
        k = torch.arange(first, first + num_keys, device=device)[None]
        zero = torch.zeros((), dtype=torch.long)  # on the CPU: functions that index by it would wait for a GPU
        seen = k <= q if pattern is None else pattern.allows(zero, zero, q, k).expand(q.shape[0], num_keys)
        if dtype != torch.bool:
            seen = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
        # Keep a reference to the pattern, so that no other object can get its id.
        known = batch.cache[name] = pattern, seen
    mask: Tensor = known[1]
    return mask


def _materialised(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Computes what PyTorch's fused call lacks: soft-capped logits (Gemma 2) and attention sinks (gpt-oss)."""
    k, v = _by_query_head(q, k, v)
    weights = (q @ k.transpose(-1, -2)) * scale
    if softcap:
        weights = torch.tanh(weights / softcap) * softcap
    if mask is not None:
        weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(1, -1, weights.shape[2], 1).to(weights.dtype)
        weights = torch.cat([weights, column], -1)
    probs = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return probs[..., : k.shape[2]] @ v


def _by_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats keys and values for each query head."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def of_few(batch: PackedBatch, read: np.ndarray, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Returns causal attention `[1,H,T,D]` of the queries at tokens `read` only, zero elsewhere; for CPUs.

    In the last layer only the tokens that scores are read from matter, one of each sequence. The keys and values that
    such a query sees are copied for it: as many as the sequence has tokens, instead of its number of tokens squared.
    """
    out = torch.zeros_like(query)
    grouped = query.shape[1] != key.shape[1]
    segments = np.searchsorted([s.start for s in batch.segments], read, side="right") - 1
    for i, segment in zip(read.tolist(), segments.tolist(), strict=True):
        spans, _ = visible(dataclasses.replace(batch.segments[segment], stop=i + 1), None)
        # Copy the keys instead of masking others: 0 x NaN is NaN.
        k, v = (torch.cat([x[:, :, a:b] for a, b in spans], 2) for x in (key, value))
        one = slice(i, i + 1)
        out[:, :, one] = F.scaled_dot_product_attention(query[:, :, one], k, v, scale=scale, enable_gqa=grouped)
    return out
