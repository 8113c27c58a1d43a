"""Catches products and activations in modules' own code, so that a row's bits never depend on the number of rows.

Experts, routers and heads multiply by `matmul`, `bmm` or `F.linear` in code of their own. Inside `RowProducts` these
go by `onednn.product`, as those of linear layers do, and activations by `passes`. Every other operator is PyTorch's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from guerdon.engine.native import passes
from guerdon.engine.onednn import product

_active: ContextVar[RowProducts | None] = ContextVar("guerdon_row_products", default=None)


def again() -> contextlib.AbstractContextManager[Any]:
    """Returns a context for computing something once more that is computed now: by rows if that is."""
    active = _active.get()
    return contextlib.nullcontext() if active is None else RowProducts(active)


class RowProducts(TorchFunctionMode):
    """Inside the context products of rows by weights go by `onednn.product`, and activations by `passes.activated`.

    `caught` says whether there has been one. Each operator inside takes a little longer to call.
    """

    def __init__(self, outer: RowProducts | None = None) -> None:
        """Counts what it catches for the `outer` one as well, which may be active around it or in another thread."""
        super().__init__()
        self.caught, self._outer = False, outer

    def __enter__(self) -> Any:
        self._before = _active.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.reset(self._before)
        if self._outer is not None:
            self._outer.caught |= self.caught

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes one call."""
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            found = replacement(*args, **(kwargs or {}))
            if found is not None:
                self.caught = True
                return found
        return func(*args, **(kwargs or {}))


def _linear(*args: Tensor | None, **named: Any) -> Tensor | None:
    x, weight, bias = (*args, None)[:3] if len(args) > 1 else (None, None, None)
    if x is None or weight is None or not x.is_cpu or set(named) - {"bias"}:
        return None
    return product(x, weight, named.get("bias", bias))


def _matmul(x: Tensor, y: Any, **named: Any) -> Tensor | None:
    """Multiplies rows by a matrix, or each of several tables by one of its own; None for all other shapes."""
    if named or not isinstance(y, Tensor) or not x.is_cpu or x.shape[-1] < 2:
        return None  # a product of one number a row has nothing to sum
    if y.dim() == 2 and x.dim() >= 2:
        return product(x, y.t(), None)
    if y.dim() < 3 or x.shape[:-2] != y.shape[:-2] or not x.numel():
        return None
    tables = zip(x.flatten(0, -3), y.flatten(0, -3), strict=True)
    return torch.stack([product(rows, matrix.t(), None) for rows, matrix in tables]).unflatten(0, x.shape[:-2])


def _addmm(added: Tensor, x: Tensor, y: Tensor, **named: Any) -> Tensor | None:
    if named or not x.is_cpu:
        return None
    return product(x, y.t(), added) if added.dim() == 1 else product(x, y.t(), None) + added


def _grouped(x: Tensor, matrices: Tensor, *, offs: Tensor | None = None, **named: Any) -> Tensor | None:
    """Multiplies runs of rows, each by its own matrix `[E,D,N]`; `offs` are the runs' ends."""
    if offs is None or any(value is not None for value in named.values()) or not x.is_cpu or x.dim() != 2:
        return None
    ends = offs.tolist()
    parts = [product(x[a:b], matrices[i].t(), None) for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], matrices.shape[2])])


def _silu(x: Tensor, inplace: bool = False) -> Tensor | None:
    return None if inplace or not x.is_cpu else passes.computed(lambda x: passes.activated(x, passes.SILU), F.silu, x)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor | None:
    kind = passes.GELU_BY_TANH if approximate == "tanh" else passes.GELU
    chain = functools.partial(F.gelu, approximate=approximate)
    return passes.computed(lambda x: passes.activated(x, kind), chain, x) if x.is_cpu else None


def _sigmoid(x: Tensor, **named: Any) -> Tensor | None:
    if named or not x.is_cpu:
        return None
    return passes.computed(lambda x: passes.activated(x, passes.SIGMOID), torch.sigmoid, x)


def _by_scalar_code(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """Returns the elementwise function of numbers that do not stand side by side, which PyTorch computes one by one.

    Of those that do, it computes the last ones of each thread's share by this code, and all others by vectors.
    """

    def computed(x: Tensor, *args: Any, inplace: bool = False, **named: Any) -> Tensor | None:
        if inplace or any(arg is True for arg in args) or not x.is_cpu:  # modules pass `inplace` by position
            return None
        return function(torch.stack([x, x], -1)[..., 0], *args, **named)

    return computed


_GROUPED = [getattr(place, name, None) for place, name in ((F, "grouped_mm"), (torch, "_grouped_mm"))]
_MATMULS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)
_REPLACEMENTS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.silu: _silu,
    F.gelu: _gelu,
    **{function: _by_scalar_code(function) for function in (F.softplus, F.mish, F.elu, F.selu)},
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, F.sigmoid), _sigmoid),
    torch.addmm: _addmm,
    **dict.fromkeys(_MATMULS, _matmul),
    **dict.fromkeys((function for function in _GROUPED if function is not None), _grouped),
}
