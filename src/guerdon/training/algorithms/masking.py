"""Masked tensors: checked shapes, masks that keep NaN out, and sums that add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over a part of a batch; `+` adds them field by field.

    Only sums add up over micro-batches and ranks: a mean of means weighs a short micro-batch like a long one.
    """

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class MaskedMoments(Sums):
    """First and second moments over masked tokens, as sums weighted by the mask."""

    sum_mask: float = 0.0
    sum_values: float = 0.0
    sum_squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> MaskedMoments:
        """Returns the moments of float32 `[T]` or `[B, T]`; raises ValueError if shapes or dtypes differ."""
        check_tokens({"values": values, "mask": mask})
        weights, values = (tensor.detach().double() for tensor in fill_left_out(mask, values))
        sums = torch.stack([weights.sum(), (weights * values).sum(), (weights * values.square()).sum()])
        return cls(*sums.tolist())

    @property
    def mean(self) -> float:
        """The masked mean; 0 without any token."""
        return self.sum_values / self.sum_mask if self.sum_mask > 0 else 0.0

    @property
    def variance(self) -> float:
        """The masked variance, divided by the number of tokens, not one less; 0 without any."""
        if self.sum_mask <= 0:
            return 0.0
        return max(self.sum_squares / self.sum_mask - self.mean**2, 0.0)


def check_tokens(tensors: Mapping[str, Tensor], rows_only: bool = False) -> None:
    """Raises ValueError unless all the named tensors are float32 of one shape, `[T]` or `[B, T]`.

    With `rows_only` only `[B, T]` is accepted. Shapes must be equal, without broadcasting: `[B, T] * [B]` would run if
    B equals T, and multiply along the wrong axis.
    """
    first, shape = next((name, tensor.shape) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, not {_dtype(tensor)}")
        if tensor.dim() not in ((2,) if rows_only else (1, 2)) or tensor.shape != shape:
            expected = "[B, T]" if rows_only else "[T] or [B, T]"
            beside = "" if name == first else f", {first} are {list(shape)}"
            raise ValueError(f"{name} is {list(tensor.shape)}{beside}: all must be {expected} of one shape")


def check_samples(tensors: Mapping[str, tuple[Tensor, torch.dtype]], num_samples: int | None = None) -> None:
    """Raises ValueError unless each named tensor has its dtype and shape `[B]`, with one B for all (`num_samples`)."""
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
    """Returns the mask and the tensors with 0 wherever the mask is not above 0, even if they are NaN or infinite there.

    Call it before any arithmetic: 0 * NaN is NaN, in a result and in its gradient.
    """
    is_left_out = ~(mask > 0)
    return tuple(tensor.masked_fill(is_left_out, 0.0) for tensor in (mask, *tensors))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
