"""Causal attention of a few queries of a packed batch, one call a query; for CPUs.

Legend: H query heads, K key/value heads, T packed tokens, D head size.

Of a last layer only the tokens that scores are read from are seen, one a sequence. What such a query sees is copied for
it: as many keys as the sequence has tokens, where the whole layer would compute as many pairs squared.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from guerdon.engine.attention.by_segment import visible
from guerdon.engine.packing import PackedBatch


def of_few(batch: PackedBatch, read: np.ndarray, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention `[1,H,T,D]` of queries `[1,H,T,D]` on keys and values `[1,K,T,D]`: zero but at tokens `read`."""
    out = torch.zeros_like(query)
    grouped = query.shape[1] != key.shape[1]
    segments = np.searchsorted([s.start for s in batch.segments], read, side="right") - 1
    for i, segment in zip(read.tolist(), segments.tolist(), strict=True):
        spans, _ = visible(dataclasses.replace(batch.segments[segment], stop=i + 1), None)
        # No mask over more keys than these: a weight of zero does not keep a value that is no number out.
        k, v = (torch.cat([x[:, :, a:b] for a, b in spans], 2) for x in (key, value))
        one = slice(i, i + 1)
        out[:, :, one] = F.scaled_dot_product_attention(query[:, :, one], k, v, scale=scale, enable_gqa=grouped)
    return out
