"""Attention over a packed batch, as a function in transformers' attention registry.

Legend: H query heads, K key/value heads, T packed tokens, D head size.

`packed_attention` replaces the attention of any model that uses the registry; each segment sees its ancestors
and, if the model is causal, itself up to the query. `forms` says by which form it is computed: `by_segment`
handles every mask and is the reference, the others read a shared beginning once for all its continuations, or take
few calls. All carry gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch

from guerdon.engine.attention.forms import CASCADE_ON_CPU, asking, chosen
from guerdon.engine.attention.of_few import of_few
from guerdon.engine.attention.patterns import Pattern, cut, packed_mask
from guerdon.engine.decoding import Decoding
from guerdon.engine.packing import PackedBatch

NAME = "guerdon_packed"
UNSUPPORTED = ("position_bias", "head_mask", "block_indices", "block_mask", "indices", "sinks")
"""Keywords by which some models change what is attended to; with one of them a model runs the plain way."""
_batch: ContextVar[PackedBatch | Decoding] = ContextVar("guerdon_packed_batch")
_queries: ContextVar[Mapping[torch.nn.Module, np.ndarray]] = ContextVar("guerdon_queries")


def attended() -> PackedBatch | Decoding | None:
    """The batch that attention reads now; None outside of `attending`."""
    return _batch.get(None)


@contextmanager
def attending(
    batch: PackedBatch | Decoding, queries: Mapping[torch.nn.Module, np.ndarray] | None = None
) -> Iterator[None]:
    """Makes `batch` the one that attention reads; a context variable, for some models drop unknown keywords.

    `queries` names modules of whose attention only the outputs of these queries are seen.
    """
    tokens = _batch.set(batch), _queries.set(queries or {})
    try:
        yield
    finally:
        _batch.reset(tokens[0])
        _queries.reset(tokens[1])


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
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The entry for transformers' attention registry: query `[1,H,T,D]`, key and value `[1,K,T,D]` to `[1,T,H,D]`.

    A `sliding_window` keyword is ignored: the mask is the truth, and for some models the only place of it. Raises
    NotImplementedError where more is asked than the batch tells of.
    """
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise NotImplementedError(f"packed attention knows no {name}")
    batch = _batch.get()
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(batch, Decoding):
        if batch.prompts is None:
            allows = None if attention_mask is None else attention_mask.allows
            return batch.attend(module, query, key, value, scale, allows, softcap, s_aux).transpose(1, 2), None
        batch.store(module, key, value)
        batch = batch.prompts
    if key.shape[2] != batch.num_tokens:
        # Some models append entries that are no tokens, such as DeepSeek-V4 one for every 128 of them.
        raise NotImplementedError(f"packed attention knows no {key.shape[2]} keys of {batch.num_tokens} tokens")
    pattern, span = cut(attention_mask, causal, batch.max_length)
    if pattern is None and attention_mask is not None and query.device.type != "cpu":
        # Rows this short need no window: its forms are tried now, at the start, and not when a long one is waited for.
        chosen(asking(batch, query, key, value, causal, attention_mask.span, softcap, s_aux))
    asked = asking(batch, query, key, value, causal, span, softcap, s_aux)
    form, read = chosen(asked), _queries.get({}).get(module)
    if read is not None and form is CASCADE_ON_CPU:
        out = of_few(batch, read, query, key, value, scale)
    else:
        out = form.compute(batch, query, key, value, scale, asked, pattern, s_aux)
    return out.transpose(1, 2), None


def register() -> None:
    """Enters both functions into transformers' registries under `NAME`; again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, packed_mask)
