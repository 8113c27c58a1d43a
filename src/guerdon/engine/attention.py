"""Attention over a packed batch, as a function in transformers' attention registry.

Legend: H query heads, K key/value heads, T packed tokens, D head size.

`packed_attention` replaces the attention of any model that uses the registry; each segment sees its ancestors
and, if the model is causal, itself up to the query. Two forms: `by_segment`, one call of PyTorch's attention a
segment over the concatenation of what it sees, which handles every mask and is the reference; and `cascade`, on a
CPU and for plain causal attention, which reads a shared beginning once for all its continuations. Both carry
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from guerdon.engine.cascade import cascade
from guerdon.engine.decoding import Decoding
from guerdon.engine.packing import PackedBatch, Segment

NAME = "guerdon_packed"
UNSUPPORTED = ("position_bias", "head_mask", "block_indices", "block_mask", "indices", "sinks")
"""Keywords by which some models change what is attended to; with one of them a model runs the plain way."""
_batch: ContextVar[PackedBatch | Decoding] = ContextVar("guerdon_packed_batch")


def attended() -> PackedBatch | Decoding | None:
    """The batch that attention reads now; None outside of `attending`."""
    return _batch.get(None)


@contextmanager
def attending(batch: PackedBatch | Decoding) -> Iterator[None]:
    """Makes `batch` the one that attention reads; a context variable, for some models drop unknown keywords."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


@dataclass(slots=True)
class Pattern:
    """What a layer's mask says beyond causal or full: evaluated on positions, a segment at a time.

    `allows(batch, head, query_position, key_position)` is transformers' mask function; no key further back
    than `window` is ever seen.
    """

    allows: Any
    window: int | None


def packed_mask(*, mask_function: Any, local_size: int | None = None, **_: Any) -> Pattern | None:
    """The entry for transformers' mask registry: never a `[T, T]` mask, but None where causal or full says it all."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return None
    return Pattern(mask_function, local_size)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Pattern | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The entry for transformers' attention registry: query `[1,H,T,D]`, key and value `[1,K,T,D]` to `[1,T,H,D]`.

    A `sliding_window` keyword is ignored: the mask is the truth, and for some models the only place of it.
    """
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise NotImplementedError(f"packed attention knows no {name}")
    batch = _batch.get()
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    pattern = attention_mask
    if isinstance(batch, Decoding):
        if batch.prompts is None:
            allows = None if pattern is None else pattern.allows
            return batch.attend(module, query, key, value, scale, allows, softcap, s_aux).transpose(1, 2), None
        batch.store(module, key, value)
        batch = batch.prompts
    if pattern is not None and causal and pattern.window and pattern.window >= batch.max_length:
        pattern = None
    plain = pattern is None and not softcap and s_aux is None and query.shape[-1] == value.shape[-1]
    if plain and causal and query.device.type == "cpu":
        out = cascade(batch, query, key, value, scale)
    else:
        out = by_segment(batch, query, key, value, scale, causal, pattern, softcap, s_aux)
    return out.transpose(1, 2), None


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
    """One attention call a segment over its ancestors and itself; `[1,H,T,D]`, differentiable, any mask."""
    window = pattern.window if pattern is not None and causal else None
    out = []
    for s in batch.segments:
        seen, first = _visible(s, window)
        q = query[:, :, s.start : s.stop]
        k, v = (
            t[:, :, seen[0][0] : seen[0][1]] if len(seen) == 1 else torch.cat([t[:, :, a:b] for a, b in seen], 2)
            for t in (key, value)
        )
        num_q, num_k = q.shape[2], k.shape[2]
        triangle = causal and pattern is None and num_q == num_k
        mask = None if triangle or (pattern is None and not causal) else _mask(s, first, num_k, pattern, q.device)
        if softcap or sinks is not None:
            if triangle:
                mask = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril()
            out.append(_written_out(q, k, v, mask, scale, softcap, sinks))
        else:
            gqa = q.shape[1] != k.shape[1]
            out.append(
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=triangle, scale=scale, enable_gqa=gqa)
            )
    return torch.cat(out, 2)


def _visible(s: Segment, window: int | None) -> tuple[list[tuple[int, int]], int]:
    """The spans that a segment sees, oldest first and cropped to the window, and the position of their first key."""
    spans, first = [*s.ancestors, (s.start, s.stop)], 0
    surplus = max(0, s.position - window + 1) if window else 0
    while surplus >= spans[0][1] - spans[0][0]:
        a, b = spans.pop(0)
        surplus, first = surplus - (b - a), first + (b - a)
    spans[0] = (spans[0][0] + surplus, spans[0][1])
    return spans, first + surplus


def _mask(s: Segment, first: int, num_keys: int, pattern: Pattern | None, device: torch.device) -> torch.Tensor:
    """Bool `[queries, keys]`, True where the key is seen, from positions alone."""
    q = torch.arange(s.position, s.position + s.stop - s.start, device=device)[:, None]
    k = torch.arange(first, first + num_keys, device=device)[None]
    if pattern is None:
        return k <= q
    zero = torch.zeros((), dtype=torch.long, device=device)
    return pattern.allows(zero, zero, q, k).expand(q.shape[0], num_keys)


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
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
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


def register() -> None:
    """Enters both functions into transformers' registries under `NAME`; again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, packed_mask)
