"""In the last layer the feed-forward is computed only for the tokens whose hidden states are read.

A reward is read from one token a sequence; what the last layer's feed-forward does to all others is never seen. The
attention of that layer still needs every key and value, so only position-wise work can be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class LastLayer:
    """Narrows the `mlp` of a trunk's last layer, where it has one; else changes nothing."""

    def __init__(self, trunk: nn.Module) -> None:
        self._read: torch.Tensor | None = None
        self._width = 0
        layers = next((x for x in (getattr(trunk, name, None) for name in ("layers", "h")) if x is not None), None)
        mlp = getattr(layers[-1], "mlp", None) if isinstance(layers, nn.ModuleList) and len(layers) else None
        if isinstance(mlp, nn.Module):
            mlp.register_forward_pre_hook(self._narrow)
            mlp.register_forward_hook(self._widen)

    @contextmanager
    def only(self, read: torch.Tensor | None) -> Iterator[None]:
        """Within it the feed-forward sees the tokens `read` (indices into the one packed row); None: all."""
        self._read = read
        try:
            yield
        finally:
            self._read = None

    def _narrow(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._read is None:
            return None
        self._width = args[0].shape[1]
        return (args[0][:, self._read], *args[1:])

    def _widen(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if self._read is None:
            return None
        narrow = output[0] if isinstance(output, tuple) else output
        wide = narrow.new_zeros(narrow.shape[0], self._width, narrow.shape[2])
        wide[:, self._read] = narrow
        return (wide, *output[1:]) if isinstance(output, tuple) else wide
