"""Attention over a packed batch in one call of our own kernel, on CPUs; see `attention.cpp`.

Legend: H query heads, K key/value heads, T packed tokens, D head size, E value size.

A row's bits depend on its query and on the keys and values that it sees, and on nothing else: neither on what shares
the batch, nor on whether its prompt is shared, nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from guerdon.engine.native.library import DTYPES, kernels
from guerdon.engine.packing import PackedBatch

MOST_SCRATCH = 1 << 24
"""Numbers of scratch, 64 MiB, beyond which key/value heads are computed one group after the other."""


class _Call(ctypes.Structure):
    """The arguments of one call, as `Attention` in attention.cpp; all strides in elements."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "out", "lse", "sinks")),
        *((name, c_int64) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, c_int64) for name in ("value_token", "value_head", "out_token", "tokens", "heads", "kv_heads")),
        *((name, c_int64) for name in ("size", "value_size", "dtype", "threads")),
        *((name, c_void_p) for name in ("segments", "chain_starts", "chains", "panel_segments", "blocks")),
        *((name, c_void_p) for name in ("rows", "low", "high")),
        *((name, c_int64) for name in ("num_segments", "num_panels", "num_blocks")),
        ("scale", c_float),
        ("softcap", c_float),
        ("scratch", c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Mask:
    """Which positions a query sees: so many before and after its own, -1 for all; none before its `chunk`, if any."""

    reach: tuple[int, int]
    chunk: int | None = None


def forest(
    batch: PackedBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Mask,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    read: np.ndarray | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Returns attention `[1,H,T,E]` of query `[1,H,T,D]`, key `[1,K,T,D]` and value `[1,K,T,E]`, without gradients.

    `read` are the indices of the only queries that are computed, int64; all others are 0. `lse`, float32 `[1,H,T]` and
    contiguous, gets the logarithm of each row's sum of exponentials.
    """
    library = kernels()
    assert library is not None
    query, key, value = (x.detach() if x.stride(3) == 1 else x.detach().contiguous() for x in (query, key, value))
    _, heads, tokens, size = query.shape
    kv_heads, value_size = key.shape[1], value.shape[3]
    make = torch.empty if read is None else torch.zeros
    out = make(tokens, heads, value_size, dtype=query.dtype)
    if not tokens or (read is not None and not len(read)):
        return out.transpose(0, 1)[None]
    tables = _tables(batch, library)
    rows = _rows(batch, mask, read, max(1, _constant(library, "attention_rows") // (heads // kv_heads)))
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    call = _Call(
        lse=None if lse is None else lse.data_ptr(),
        query_token=query.stride(2), query_head=query.stride(1), key_token=key.stride(2), key_head=key.stride(1),
        value_token=value.stride(2), value_head=value.stride(1), out_token=heads * value_size, tokens=tokens, size=size,
        value_size=value_size, dtype=DTYPES[query.dtype], threads=torch.get_num_threads(),
        segments=tables.segments.ctypes.data, chain_starts=tables.chain_starts.ctypes.data,
        chains=tables.chains.ctypes.data, panel_segments=tables.panel_segments.ctypes.data,
        blocks=rows.blocks.ctypes.data, rows=rows.tokens.ctypes.data, low=rows.low.ctypes.data,
        high=rows.high.ctypes.data, num_segments=len(tables.segments), num_panels=len(tables.panel_segments),
        num_blocks=len(rows.blocks), scale=scale, softcap=softcap or 0.0,
    )  # fmt: skip
    library.attention_scratch.restype = c_int64
    call.kv_heads, call.heads = 1, heads // kv_heads
    at_once = max(1, min(kv_heads, MOST_SCRATCH // library.attention_scratch(ctypes.byref(call))))
    for start in range(0, kv_heads, at_once):
        own = min(at_once, kv_heads - start)
        first = start * (heads // kv_heads)
        call.kv_heads, call.heads = own, own * (heads // kv_heads)
        call.query = query[:, first:].data_ptr()
        call.key, call.value = key[:, start:].data_ptr(), value[:, start:].data_ptr()
        call.out = out[:, first:].data_ptr()
        if lse is not None:
            call.lse = lse[:, first:].data_ptr()
        if sinks is not None:
            call.sinks = sinks[first:].data_ptr()
        size = library.attention_scratch(ctypes.byref(call))
        scratch = batch.cache.get("scratch")  # the same for all layers of a batch
        if scratch is None or len(scratch) < size:
            batch.cache.pop("scratch", None)
            scratch = batch.cache["scratch"] = torch.empty(size, dtype=torch.float32)
        call.scratch = scratch.data_ptr()
        library.attention(ctypes.byref(call))
    return out.transpose(0, 1)[None]


def _constant(library: ctypes.CDLL, name: str) -> int:
    return c_int64.in_dll(library, name).value


# ------------------------------------------------------------------------------------------------ tables


@dataclass(frozen=True, slots=True)
class _Tables:
    """The segments as the kernel reads them, int64.

    `segments` `[S,4]` has each one's first token, that token's position, its length and its first panel, `chains` each
    one's ancestors, root first, and itself, from `chain_starts` on; `panel_segments` is each panel's segment.
    """

    segments: np.ndarray
    chain_starts: np.ndarray
    chains: np.ndarray
    panel_segments: np.ndarray


def _tables(batch: PackedBatch, library: ctypes.CDLL) -> _Tables:
    known: _Tables | None = batch.cache.get("forest")
    if known is not None:
        return known
    lanes = _constant(library, "attention_lanes")
    number = {s.start: i for i, s in enumerate(batch.segments)}
    starts, stops, positions = (
        np.array([getattr(s, name) for s in batch.segments], dtype=np.int64) for name in ("start", "stop", "position")
    )
    lengths = stops - starts
    panels = (positions + lengths - 1) // lanes - positions // lanes + 1
    chains = [[*(number[a] for a, _ in s.ancestors), i] for i, s in enumerate(batch.segments)]
    tables = _Tables(
        np.stack([starts, positions, lengths, np.cumsum(panels) - panels], 1),
        np.cumsum([0, *map(len, chains)], dtype=np.int64),
        np.array([i for chain in chains for i in chain], dtype=np.int64),
        np.repeat(np.arange(len(panels)), panels),
    )
    batch.cache["forest"] = tables
    return tables


@dataclass(frozen=True, slots=True)
class _Rows:
    """Queries in blocks, int64: each query's token and the positions `[low, high)` that it sees.

    `blocks` `[W,3]` has each one's segment, first query and number of queries; those that take longest come first.
    """

    tokens: np.ndarray
    low: np.ndarray
    high: np.ndarray
    blocks: np.ndarray


def _rows(batch: PackedBatch, mask: Mask, read: np.ndarray | None, size: int) -> _Rows:
    name = ("forest rows", mask, size, None if read is None else read.tobytes())
    known: _Rows | None = batch.cache.get(name)
    if known is not None:
        return known
    tokens = np.arange(batch.num_tokens) if read is None else np.unique(read)
    starts = np.array([s.start for s in batch.segments], dtype=np.int64)
    segment = np.searchsorted(starts, tokens, side="right") - 1
    ends = np.array([s.position + s.stop - s.start for s in batch.segments], dtype=np.int64)[segment]
    at = batch.positions[tokens]
    before, after = mask.reach
    low = np.zeros_like(at) if before < 0 else np.maximum(at - before, 0)
    high = ends if after < 0 else np.minimum(at + after + 1, ends)
    if mask.chunk is not None:
        low = at // mask.chunk * mask.chunk
    counts = np.bincount(segment, minlength=len(starts))
    pieces = -(-counts // size)
    own = np.repeat(np.arange(len(starts)), pieces)
    nth = np.arange(len(own)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = (np.cumsum(counts) - counts)[own] + nth * size
    count = np.minimum(size, counts[own] - nth * size)
    work = count * (high[first + count - 1] - low[first])
    blocks = np.stack([own, first, count], 1)[np.argsort(-work, kind="stable")]
    rows = _Rows(*(np.ascontiguousarray(x, dtype=np.int64) for x in (tokens, low, high, blocks)))
    batch.cache[name] = rows
    return rows
