"""Computes products by oneDNN on CPUs: a row's bits never depend on how many rows are computed with it.

PyTorch computes float32 products by MKL, which rounds differently for few rows, and uses AVX-512 on Intel's processors
only: on AMD's, oneDNN, which PyTorch brings as well, is more than twice as fast with the same plain weights, and with
AVX2 as fast. `benchmarks/RESULTS.md` has the figures. oneDNN gives a row the same bits among any number of rows, with
any number of threads, but for a row alone, which it computes by other code: it is computed twice.

Where oneDNN has no products of a dtype, or they do not agree, PyTorch's are used: in half precision these keep the bits
as well, and in float32 the start finds that they do not.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from guerdon.engine.fsdp import shallow_copy

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest accepted difference from PyTorch's own product, relative to the largest output."""

_MANY_ROWS = 1024
"""For about as many rows oneDNN chooses a weight's order; a batch has up to 8,192."""


def replacement(module: nn.Module) -> Any:
    """Returns a function that computes the module's forward by oneDNN; None if the module is no linear layer."""
    return REPLACEMENTS.get(type(module))


def with_row_products(module: Any) -> Any:
    """Returns a copy of a linear layer that computes by oneDNN, with the same parameters; other modules as they are."""
    forward = replacement(module)
    if forward is None or "forward" in vars(module):
        return module  # tensor parallelism gives layers a forward of their own
    copied = shallow_copy(module)
    copied.forward = MethodType(forward, copied)
    return copied


def _linear(self: Any, x: Tensor) -> Tensor:
    return product(x, self.weight, self.bias)


def by_dense(self: Any, x: Tensor) -> Tensor:
    """PyTorch's own forward of a linear layer whose weight is reordered."""
    return F.linear(x, dense(self.weight), self.bias)


def _conv1d(self: Any, x: Tensor) -> Tensor:
    """GPT-2's linear layer, whose weight is transposed."""
    return product(x, self.weight.t(), self.bias)


def is_plain(module: nn.Module) -> bool:
    """Whether the layer's forward is its class's or ours: tensor parallelism gives layers a forward of their own."""
    return getattr(vars(module).get("forward"), "__func__", _linear) in (_linear, by_dense)


REPLACEMENTS: dict[type[nn.Module], Any] = {nn.Linear: _linear, Conv1D: _conv1d}


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `F.linear(x, weight, bias)`, on a CPU by oneDNN if it can, and of two rows or more; differentiable."""
    is_known = type(weight) in (Tensor, nn.Parameter) and x.dtype == weight.dtype in _TOLERANCE and x.is_cpu
    if not is_known or not x.numel() or x.dim() < 2:
        return F.linear(x, dense(weight), bias)
    if x.numel() == x.shape[-1]:
        return product(torch.cat([x.reshape(1, -1)] * 2), weight, bias)[:1].reshape(*x.shape[:-1], len(weight))
    if not _agrees(x.dtype):
        return torch.ops.aten.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Product.apply(x, dense(weight), bias)
    return _onednn(x, weight, bias)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def can_reorder(dtype: torch.dtype) -> bool:
    """Whether products of that dtype are oneDNN's."""
    return dtype in _TOLERANCE and _agrees(dtype)


def reordered(weight: Tensor) -> Tensor:
    """Returns the weight `[N,D]` in oneDNN's own order, which only `product`, `dense` and sizes understand."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _MANY_ROWS)


def dense(weight: Tensor) -> Tensor:
    """Returns a reordered weight in the plain order, any other as it is."""
    return weight.to_dense() if weight.is_mkldnn else weight


def restore(trunk: nn.Module) -> None:
    """Brings all reordered weights of linear layers into the plain order."""
    for module in trunk.modules():
        if isinstance(module, nn.Linear) and module.weight.is_mkldnn:
            module.weight = nn.Parameter(dense(module.weight.detach()), requires_grad=False)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            _onednn(rows, weight.t()).view(x.shape) if of_x else None,
            _onednn(rows.t(), x.flatten(0, -2).t()) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


@functools.cache
@torch.inference_mode(False)  # or gradients could not be taken, wherever this is asked first
def _agrees(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes what PyTorch does, gradients too: the operator is not part of PyTorch's public API."""
    numbers = torch.Generator().manual_seed(0)
    shapes = ((2, 8, 48), (32, 48), (32,))
    x, weight, bias = (torch.randn(shape, generator=numbers).to(dtype) for shape in shapes)
    try:
        found = _with_gradients(_Product.apply, x, weight, bias)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    with torch._C.DisableTorchFunction():  # inside of RowProducts this would compare oneDNN with itself
        wanted = _with_gradients(F.linear, x, weight, bias)
    pairs = zip(found, wanted, strict=True)
    return all((a - b).abs().max().item() <= _TOLERANCE[dtype] * b.abs().max().item() for a, b in pairs)


def _with_gradients(function: Any, *inputs: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
