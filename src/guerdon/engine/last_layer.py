"""In the last layer only what is read is computed: queries, attention and feed-forward of a few tokens.

A reward is read from one token a sequence; what the last layer does to all others is never seen. Its attention still
needs every key and value. What is left out are the query and output projections of other tokens, their attention
(see `attention.of_few`) and their feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


class LastLayer:
    """Narrows a trunk's last layer to the tokens that are read, as far as it has the usual parts; else changes nothing.

    The parts are `self_attn` with `q_proj` and `o_proj`, and `mlp`.
    """

    def __init__(self, trunk: nn.Module) -> None:
        self._read: torch.Tensor | None = None
        self._width = 0
        layers = next((x for x in (getattr(trunk, name, None) for name in ("layers", "h")) if x is not None), None)
        last = layers[-1] if isinstance(layers, nn.ModuleList) and len(layers) else None
        self._attention: Any = getattr(last, "self_attn", None)
        for part in (
            getattr(self._attention, "q_proj", None),
            getattr(self._attention, "o_proj", None),
            getattr(last, "mlp", None),
        ):
            if isinstance(part, nn.Module):
                part.register_forward_pre_hook(self._narrow)
                part.register_forward_hook(self._widen)

    @contextmanager
    def only(self, read: torch.Tensor | None) -> Iterator[None]:
        """Within it the last layer sees only the tokens `read` (indices into the one packed row); None: all."""
        self._read = read
        try:
            yield
        finally:
            self._read = None

    def queries(self, read: np.ndarray | None) -> dict[nn.Module, np.ndarray]:
        """The last layer's attention and the queries whose outputs alone are seen, as `registry.attending` has them."""
        return {} if read is None or self._attention is None else {self._attention: read}

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
