"""Attention over a packed batch, as a function in transformers' attention registry.

Legend: H query heads, K key/value heads, T packed tokens, D head size.

`packed_attention` replaces the attention of any model that uses the registry; each segment sees its ancestors and, if
the model is causal, itself up to the query. `forms` chooses the implementation: `by_segment` supports every mask and is
the reference, the others read a shared prefix once for all its continuations, or need few calls. All are
differentiable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from guerdon.engine.attention.forms import choose_form, need_of
from guerdon.engine.attention.patterns import Pattern, cut, packed_mask
from guerdon.engine.decoding import Decoding
from guerdon.engine.packing import PackedBatch

NAME = "guerdon_packed"
UNSUPPORTED = ("position_bias", "head_mask", "block_indices", "block_mask", "indices", "sinks")
"""Keywords with which some models change attention; with any of these a model does not run packed."""
_batch: ContextVar[PackedBatch | Decoding | None] = ContextVar("guerdon_packed_batch")
_queries: ContextVar[Mapping[torch.nn.Module, np.ndarray]] = ContextVar("guerdon_queries")


def attended() -> PackedBatch | Decoding | None:
    """Returns the batch that attention reads now, None outside of `attending`."""
    return _batch.get(None)


@contextmanager
def attending(
    batch: PackedBatch | Decoding | None, queries: Mapping[torch.nn.Module, np.ndarray] | None = None
) -> Iterator[None]:
    """Makes attention read `batch` inside the context, None for models' own attention.

    A context variable instead of a keyword, because some models drop unknown keywords. `queries` maps attention modules
    to the only queries whose outputs are read.
    """
    tokens = _batch.set(batch), _queries.set(queries or {})
    try:
        yield
    finally:
        _batch.reset(tokens[0])
        _queries.reset(tokens[1])


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pattern | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Replaces attention in transformers' registry: query `[1,H,T,D]`, key and value `[1,K,T,D]` to `[1,T,H,D]`.

    Ignores a `sliding_window` keyword: the mask has the window, too, and for some models nothing else has. Raises
    NotImplementedError for arguments that a packed batch does not support.
    """
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise NotImplementedError(f"packed attention does not support {name}")
    batch = _batch.get()
    assert batch is not None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(batch, Decoding):
        if batch.prompts is None:
            allows = None if attention_mask is None else attention_mask.allows
            out = batch.attend(module, query, key, value, scale, allows, softcap, s_aux)
            return out.transpose(1, 2).contiguous(), None
        batch.store(module, key, value)
        batch = batch.prompts
    if key.shape[2] != batch.num_tokens:
        # Some models append keys that are no tokens, such as DeepSeek-V4 one for every 128 tokens.
        raise NotImplementedError(f"packed attention does not support {key.shape[2]} keys of {batch.num_tokens} tokens")
    pattern, reach = cut(attention_mask, causal, batch.max_length)
    if pattern is None and attention_mask is not None and query.device.type != "cpu":
        # These rows are too short for the window. Try its forms now, at start, and not when a long row arrives.
        choose_form(need_of(batch, query, key, value, causal, attention_mask.reach, softcap, s_aux))
    chunk = None if pattern is None else pattern.chunk
    need = need_of(batch, query, key, value, causal, reach, softcap, s_aux, chunk)
    form, read = choose_form(need), _queries.get({}).get(module)
    if read is not None and form.of_few is not None and not need.gradients:
        out = form.of_few(batch, read, query, key, value, scale, need, s_aux)
    else:
        out = form.compute(batch, query, key, value, scale, need, pattern, s_aux)
    return out.transpose(1, 2).contiguous(), None  # some models view it in another shape


def register() -> None:
    """Registers both functions with transformers as `NAME`; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, packed_mask)
