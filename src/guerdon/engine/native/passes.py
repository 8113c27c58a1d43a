"""Norms, activations and rotary embeddings in one pass over memory each, by our own kernels for CPUs.

Each of these functions returns None if the kernels are missing or do not take the tensors: the caller computes it then.
The kernels round where transformers does. A row's bits depend on its own numbers alone: PyTorch's activations compute a
few numbers by other code, and which ones depends on the number of rows and of threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import CDLL, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from guerdon.engine.native.library import DTYPES, kernels


def norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor | None:
    """Returns RMSNorm of states `[*,H]` by weight `[H]`."""
    library = _library(states, weight)
    if library is None or weight.shape != states.shape[-1:] or not weight.is_contiguous():
        return None
    width = states.shape[-1]
    rows = _rows(states)
    out = torch.empty(states.shape, dtype=states.dtype)
    library.norm(
        rows.data_ptr(), weight.data_ptr(), out.data_ptr(), len(rows), width, rows.stride(0), epsilon,
        DTYPES[states.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


SILU, GELU_BY_TANH, GELU, SIGMOID = range(4)
"""The activations that there are."""


def gated(gate: Tensor, up: Tensor, kind: int) -> Tensor | None:
    """Returns the activation of the gate `[*,I]` times `up`; in place of the gate without gradients."""
    library = _library(gate, up)
    if library is None or gate.shape != up.shape:
        return None
    gates, ups = _rows(gate), _rows(up)
    in_place = gate.is_contiguous() and not torch.is_grad_enabled()
    out = gate if in_place else torch.empty(gate.shape, dtype=gate.dtype)
    library.gated(
        gates.data_ptr(), ups.data_ptr(), out.data_ptr(), len(gates), gate.shape[-1], gates.stride(0), ups.stride(0),
        kind, DTYPES[gate.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def activated(x: Tensor, kind: int) -> Tensor | None:
    """Returns the activation of `[*,I]`."""
    library = _library(x)
    if library is None or not x.dim():
        return None
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    library.gated(
        rows.data_ptr(), None, out.data_ptr(), len(rows), x.shape[-1], rows.stride(0), 0, kind, DTYPES[x.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor | None:
    """Returns the rotary embedding of `[1,H,T,D]` by cosines and sines `[1,T,D]`."""
    library = _library(x, cosines, sines)
    _, heads, tokens, size = x.shape
    fits = len(x) == 1 and size % 2 == 0 and cosines.shape == sines.shape == (1, tokens, size)
    if library is None or x.stride(3) != 1 or not fits:
        return None
    cosines, sines = cosines.contiguous(), sines.contiguous()
    out = torch.empty(tokens, heads, size, dtype=x.dtype)
    library.rotated(
        x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), out.data_ptr(), tokens, heads, size, x.stride(2),
        x.stride(1), size, DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out.transpose(0, 1)[None]


def computed(native: Callable[..., Tensor | None], chain: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Returns what a kernel of ours computes of the inputs, or the chain of operators if there is none.

    The bits are the same with gradients and without. Gradients are the chain's, which is computed again for them.
    """
    found = native(*inputs)
    if found is None:
        return chain(*inputs)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        found = _WithSlopes.apply([found], chain, *inputs)
    return found


class _WithSlopes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: list[Tensor], chain: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.chain = chain
        return found[0]  # given in a list, since a tensor would come back as a view, which FSDP warns of

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            out = ctx.chain(*leaves)
        wanted = [x for x in leaves if x.requires_grad]
        slopes = iter(torch.autograd.grad(out, wanted, grad))
        return None, None, *(next(slopes) if x.requires_grad else None for x in leaves)


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
