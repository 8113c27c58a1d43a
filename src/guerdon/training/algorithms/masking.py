"""What all these functions share: checked shapes, masks that nothing gets past, and sums that add up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over a part of a batch; `+`, field by field, makes them those of the whole.

    Only sums add up over micro-batches and ranks; means of means weigh a short micro-batch like a long one.
    """

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def check_tokens(tensors: Mapping[str, Tensor], rows_only: bool = False) -> None:
    """Raises ValueError unless all the named tensors are float32 of one shape, `[T]` or `[B, T]`.

    With `rows_only` that is `[B, T]` alone. Equal shapes, never mere broadcasting: `[B, T] * [B]` would run where B and
    T happen to be equal, and multiply the wrong way round.
    """
    first, shape = next((name, tensor.shape) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, not {_dtype(tensor)}")
        if tensor.dim() not in ((2,) if rows_only else (1, 2)) or tensor.shape != shape:
            expected = "[B, T]" if rows_only else "[T] or [B, T]"
            beside = "" if name == first else f", {first} are {list(shape)}"
            raise ValueError(f"{name} is {list(tensor.shape)}{beside}: all must be {expected} alike")


def check_samples(tensors: Mapping[str, tuple[Tensor, torch.dtype]], num_samples: int | None = None) -> None:
    """Raises ValueError unless each named tensor has its dtype and is `[B]`, with one B for all (`num_samples`)."""
    for name, (tensor, dtype) in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {str(dtype).removeprefix('torch.')}, not {_dtype(tensor)}")
        if num_samples is None and tensor.dim() == 1:
            num_samples = len(tensor)
        if tensor.shape != (num_samples,):
            expected = "B" if num_samples is None else num_samples
            raise ValueError(f"{name} is {list(tensor.shape)}, not [{expected}]: one number for each sample")


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raises ValueError, with the known names, unless `name` is one of them."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known are {', '.join(known)}")


def fill_left_out(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The mask and the tensors with 0 wherever the mask is not above 0, be they NaN or infinite there.

    To be called before anything is computed: 0 * NaN is NaN, in a result and in its gradient.
    """
    is_left_out = ~(mask > 0)
    return tuple(tensor.masked_fill(is_left_out, 0.0) for tensor in (mask, *tensors))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
