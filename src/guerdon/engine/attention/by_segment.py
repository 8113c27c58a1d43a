"""Attention over a packed batch as one call of PyTorch's attention a segment; for any device and any mask.

Legend: H query heads, K key/value heads, T packed tokens, D head size.

It is the reference of the other forms, and computes what none of them can. On a GPU PyTorch's fused kernels take a
mask only where every query head has keys of its own; without them all [H,queries,keys] logits would be held at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from guerdon.engine.attention import cascade
from guerdon.engine.attention.patterns import Pattern
from guerdon.engine.packing import PackedBatch, Segment

QUERY_BLOCK = 1024
"""Queries of one call on a GPU, where all their logits are written out or a window hides keys: few large calls."""


def by_segment(
    batch: PackedBatch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    pattern: Pattern | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One call a segment or a block of its queries, over all it sees; `[1,H,T,D]`, differentiable, any mask."""
    window = pattern.window if pattern is not None and causal else None
    written_out = bool(softcap) or sinks is not None
    out = []
    on_cpu = query.device.type == "cpu"
    size = cascade.QUERY_BLOCK if on_cpu else QUERY_BLOCK if written_out or pattern is not None else batch.num_tokens
    for s in _pieces(batch, size) if causal else batch.segments:
        seen, first = visible(s, window)
        q = query[:, :, s.start : s.stop]
        k, v = (
            t[:, :, seen[0][0] : seen[0][1]] if len(seen) == 1 else torch.cat([t[:, :, a:b] for a, b in seen], 2)
            for t in (key, value)
        )
        triangle = causal and pattern is None and q.shape[2] == k.shape[2] and not written_out
        mask = None
        if not triangle and (causal or pattern is not None):
            mask = _mask(batch, s, first, k.shape[2], pattern, q.device, torch.bool if written_out else q.dtype)
        if written_out:
            out.append(_written_out(q, k, v, mask, scale, softcap, sinks))
        else:
            if not on_cpu:
                k, v = _by_query_head(q, k, v)
            gqa = q.shape[1] != k.shape[1]
            out.append(
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=triangle, scale=scale, enable_gqa=gqa)
            )
    return torch.cat(out, 2)


def _pieces(batch: PackedBatch, size: int) -> Iterator[Segment]:
    """The segments in blocks of queries, each a child of the one before: of what a mask hides less is computed."""
    for s in batch.segments:
        for start in range(s.start, s.stop, size):
            stop = min(start + size, s.stop)
            before = ((s.start, start),) if start > s.start else ()
            yield Segment(start, stop, s.position + start - s.start, (*s.ancestors, *before), stop)


def visible(s: Segment, window: int | None) -> tuple[list[tuple[int, int]], int]:
    """The spans that a segment sees, oldest first and cropped to the window, and the position of their first key."""
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
    batch: PackedBatch,
    s: Segment,
    first: int,
    num_keys: int,
    pattern: Pattern | None,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """From positions alone, `[queries, keys]`: bool, True where the key is seen, or 0 there and else -inf.

    It is made once for all layers of a pattern.
    """
    name = ("mask", s.start, None if pattern is None else id(pattern.allows), device, dtype)
    known = batch.cache.get(name)
    if known is None:
        q = torch.arange(s.position, s.position + s.stop - s.start, device=device)[:, None]
        k = torch.arange(first, first + num_keys, device=device)[None]
        zero = torch.zeros((), dtype=torch.long)  # some functions index by it: on a GPU they would wait for it
        seen = k <= q if pattern is None else pattern.allows(zero, zero, q, k).expand(q.shape[0], num_keys)
        if dtype != torch.bool:
            seen = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
        # The pattern is kept, so that no other can get its id.
        known = batch.cache[name] = pattern, seen
    mask: torch.Tensor = known[1]
    return mask


def _written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention for what PyTorch's fused call lacks: soft-capped logits (Gemma 2) and attention sinks (gpt-oss)."""
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


def _by_query_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every query head."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
