"""Norms, gated activations and rotary embeddings in one pass over memory each, by our own kernels for CPUs.

Every function returns None if the kernels are missing or do not take these tensors: the caller computes it then. The
kernels round where transformers does.
"""

from __future__ import annotations

import functools
from ctypes import CDLL, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from guerdon.engine.native.library import DTYPES, kernels


def norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor | None:
    """Returns RMSNorm of states `[*,H]` by weight `[H]`."""
    library = _library(states, weight)
    if library is None:
        return None
    width = states.shape[-1]
    rows = _rows(states)
    out = torch.empty(states.shape, dtype=states.dtype)
    library.norm(
        rows.data_ptr(), weight.data_ptr(), out.data_ptr(), len(rows), width, rows.stride(0), epsilon,
        DTYPES[states.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def gated(gate: Tensor, up: Tensor, *, is_gelu: bool) -> Tensor | None:
    """Returns SiLU of the gate `[*,I]`, or its GELU by tanh, times `up`; in place of the gate without gradients."""
    library = _library(gate, up)
    if library is None:
        return None
    gates, ups = _rows(gate), _rows(up)
    in_place = gate.is_contiguous() and not torch.is_grad_enabled()
    out = gate if in_place else torch.empty(gate.shape, dtype=gate.dtype)
    library.gated(
        gates.data_ptr(), ups.data_ptr(), out.data_ptr(), len(gates), gate.shape[-1], gates.stride(0), ups.stride(0),
        is_gelu, DTYPES[gate.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor | None:
    """Returns the rotary embedding of `[1,H,T,D]` by cosines and sines `[1,T,D]`."""
    library = _library(x, cosines, sines)
    _, heads, tokens, size = x.shape
    if library is None or x.stride(3) != 1 or cosines.shape != sines.shape or cosines.shape != (1, tokens, size):
        return None
    cosines, sines = cosines.contiguous(), sines.contiguous()
    out = torch.empty(tokens, heads, size, dtype=x.dtype)
    library.rotated(
        x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), out.data_ptr(), tokens, heads, size, x.stride(2),
        x.stride(1), size, DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out.transpose(0, 1)[None]


def _library(*tensors: Tensor) -> CDLL | None:
    """Returns the kernels if they take these tensors: plain ones on the CPU, all of one dtype."""
    dtype = tensors[0].dtype
    plain = (torch.Tensor, torch.nn.Parameter)
    takes = dtype in DTYPES and all(x.dtype == dtype and type(x) in plain and x.is_cpu for x in tensors)
    return _typed() if takes else None


@functools.cache
def _typed() -> CDLL | None:
    library = kernels()
    if library is not None:
        p, n = c_void_p, c_int64
        library.norm.argtypes = [p, p, p, n, n, n, c_float, n, n]
        library.gated.argtypes = [p, p, p, n, n, n, n, n, n, n]
        library.rotated.argtypes = [p, p, p, p, n, n, n, n, n, n, n, n]
        for function in (library.norm, library.gated, library.rotated):
            function.restype = None
    return library


def _rows(x: Tensor) -> Tensor:
    """Returns `[*,W]` as rows whose numbers stand side by side, a copy only if it must be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
