"""Computes the parts of cascade attention on a CPU: some queries on some keys of a segment.

Legend: H query heads, K key/value heads, G = H / K, T packed tokens, R queries, N keys, D head size.

PyTorch's own kernel computes most parts. It calls MKL for its products, and computes masked pairs in blocks of 512
keys. On processors whose widest units MKL leaves unused (see `linear`), oneDNN's products compute large parts: the
logits are in memory, few enough for the second-level cache, and the softmax is taken in place.

oneDNN prepares a kernel for each new shape of a product, which takes longer than a small product does. So queries and
keys are padded to multiples of STEP, and there are few shapes. Padded queries are other tokens' and their results are
dropped; padded keys are zeros and masked. (Other tokens' keys would not do: 0 x NaN is NaN.)
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from guerdon.engine import linear
from guerdon.engine.packing import PackedBatch

STEP = 64
_MOST_LOGITS = 1 << 18
"""Logits of one product without a mask."""
_MOST_ROWS = 512
_FEWEST_LOGITS = 1 << 16
"""For fewer logits of a key head PyTorch's kernel is as fast, which is called once for all heads; measured."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Parts:
    """The parts of a layer's attention of query `[1,H,T,D]` on key and value `[1,K,T,D]`."""

    def __init__(self, batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        self._batch, self._scale = batch, scale
        self._query, self._key, self._value = query, key, value
        self._groups = query.shape[1] // key.shape[1]
        self._scaled: Tensor | None = None
        if query.dtype == torch.float32 and linear.is_faster():
            _, heads, tokens, size = query.shape
            self._scaled = query.new_empty(heads, tokens + STEP, size)
            torch.mul(query[0], scale, out=self._scaled[:, :tokens])
        self._segment = slice(0, 0)
        self._padded: tuple[Tensor, Tensor]

    def attend(self, queries: slice, keys: slice, segment: slice, *, causal: bool) -> tuple[Tensor, Tensor]:
        """Returns attention `[1,H,R,D]` of tokens on a segment's first keys, and the logits' log-sum-exp `[1,H,R]`.

        If `causal`, the last keys are the queries' own.
        """
        rows, num_keys = queries.stop - queries.start, keys.stop - keys.start
        if self._scaled is not None and self._groups * rows * num_keys >= _FEWEST_LOGITS:
            if segment != self._segment:
                self._segment = segment
                self._padded = _padded(self._key[0, :, segment]), _padded(self._value[0, :, segment])
            return self._by_products(self._scaled[:, queries.start :], rows, num_keys, causal)
        q, k, v = self._query[:, :, queries], self._key[:, :, keys], self._value[:, :, keys]
        mask = diagonal(self._batch, rows, num_keys, q.dtype) if causal and rows < num_keys else None
        out, lse = _flash(q, k, v, 0.0, causal and mask is None, attn_mask=mask, scale=self._scale)
        return out, lse

    def _by_products(self, query: Tensor, rows: int, num_keys: int, causal: bool) -> tuple[Tensor, Tensor]:
        (key, value), groups, wide = self._padded, self._groups, _rounded_up(num_keys)
        out = query.new_empty(1, query.shape[0], rows, query.shape[2])
        lse = query.new_empty(out.shape[:3])
        step = rows if causal else min(_MOST_ROWS, max(1, _MOST_LOGITS // (groups * wide * STEP)) * STEP)
        for start in range(0, rows, step):
            some = slice(start, min(start + step, rows))
            count = some.stop - start
            tall = _rounded_up(count)
            for head in range(len(key)):
                heads = slice(head * groups, (head + 1) * groups)
                logits = linear.onednn(query[heads, start : start + tall].flatten(0, 1), key[head, :wide])
                if causal:
                    first = num_keys - rows
                    logits.view(groups, tall, wide)[..., first:].add_(_triangle(tall, wide - first))
                else:
                    logits[:, num_keys:] = -torch.inf
                top = logits.amax(-1)
                weights = torch.softmax(logits, -1, out=logits)
                # The largest weight is exp(its logit - the log-sum-exp), and at least one in N.
                lse[0, heads, some] = top.sub_(weights.amax(-1).log_()).view(groups, tall)[:, :count]
                found = linear.onednn(weights, value[head, :wide].t())
                out[0, heads, some] = found.view(groups, tall, -1)[:, :count]
        return out, lse


def diagonal(batch: PackedBatch, rows: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Returns the mask `[rows, keys]` of the last `rows` of `keys` tokens, 0 for visible keys, else -inf.

    It is a view of a mask that all blocks with so many rows share, as wide as the longest sequence.
    """
    whole: Tensor | None = batch.cache.get((rows, dtype))
    if whole is None:
        whole = torch.full((rows, batch.max_length), float("-inf"), dtype=dtype).triu_(batch.max_length - rows + 1)
        batch.cache[rows, dtype] = whole
    return whole[:, batch.max_length - keys :]


@functools.lru_cache(maxsize=64)
def _triangle(rows: int, keys: int) -> Tensor:
    """Returns a mask `[rows, keys]`: 0 for keys up to the query's own number, -inf after it."""
    return torch.full((rows, keys), -torch.inf).triu_(1)


def _padded(x: Tensor) -> Tensor:
    """Returns a segment's keys or values `[K,N,D]`, contiguous, with zeros up to a multiple of STEP."""
    return F.pad(x, (0, 0, 0, _rounded_up(x.shape[1]) - x.shape[1])).contiguous()


def _rounded_up(count: int) -> int:
    return -(-count // STEP) * STEP
