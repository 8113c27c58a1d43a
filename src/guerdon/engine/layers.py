"""Hooks on a trunk's layers: progress, activation checkpointing, and a last layer narrowed to what is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from guerdon.engine import caught_calls
from guerdon.engine.attention import registry


def layer_lists(model: nn.Module) -> list[str]:
    """Returns the names of the outermost module lists; lists inside a layer, such as experts, belong to the layer."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def layers(trunk: nn.Module) -> list[nn.Module]:
    """Returns the modules in these lists."""
    return [layer for name in layer_lists(trunk) for layer in trunk.get_submodule(name).children()]


def free_weights(*modules: nn.Module) -> None:
    """Frees the modules' weights, even if something else refers to the modules; they can compute nothing any more."""
    for module in (part for whole in modules for part in whole.modules()):
        module._parameters.clear()
        module._buffers.clear()


def watch_layers(trunk: nn.Module, tick: Callable[..., None]) -> bool:
    """Calls `tick` after each layer's forward and backward; returns False if the trunk has no list of layers."""

    def on_forward(_: Any, __: Any, output: Any) -> None:
        tick()
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: tick())

    found = layers(trunk)
    for layer in found:
        layer.register_forward_hook(on_forward)
    return bool(found)


# ------------------------------------------------------------------------------------ activation checkpointing


def recompute_activations(trunk: nn.Module) -> None:
    """Enables activation checkpointing: layers keep only their inputs and recompute activations in the backward pass.

    transformers' own way needs train mode, which would enable dropout. Here the trunk stays in eval mode, and names
    and parameters do not change. Without gradients it is a no-op.
    """
    for layer in layers(trunk):
        _recompute(layer)


def _recompute(layer: Any) -> None:
    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        batch, products = registry.attended(), caught_calls.again()

        def again(*args: Any, **kwargs: Any) -> Any:
            # On a GPU the recomputation runs in autograd's thread, and always after `attending` has ended.
            with registry.attending(batch) if batch is not None else contextlib.nullcontext(), products:
                return plain(*args, **kwargs)

        # There is no dropout, so no random state to preserve.
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    layer.forward = forward


# --------------------------------------------------------------------------------------------- the last layer


class LastLayer:
    """Narrows a trunk's last layer to the tokens that are read; a no-op if the layer lacks the usual parts.

    A reward is read from one token of a sequence, so the last layer's output for all others is never used. Attention
    still needs every key and value. It skips the other tokens' query and output projections, their attention (see
    `AttentionForm.of_few`) and their feed-forward. The parts are `self_attn` with `q_proj` and `o_proj`, and `mlp`.
    """

    def __init__(self, trunk: nn.Module) -> None:
        self._read: torch.Tensor | None = None
        self._width = 0
        found = next((x for x in (getattr(trunk, name, None) for name in ("layers", "h")) if x is not None), None)
        last = found[-1] if isinstance(found, nn.ModuleList) and len(found) else None
        self._attention: Any = getattr(last, "self_attn", None)
        for part in (
            getattr(self._attention, "q_proj", None),
            getattr(self._attention, "o_proj", None),
            getattr(last, "mlp", None),
        ):
            if isinstance(part, nn.Module):
                part.register_forward_pre_hook(self._narrow)
                part.register_forward_hook(self._widen)

    @contextlib.contextmanager
    def only(self, read: torch.Tensor | None) -> Iterator[None]:
        """Narrows the last layer to the tokens `read`, indices into the packed row, inside the context; None: all."""
        # Two rows at least: PyTorch computes some functions of a single row by other code, with other bits.
        self._read = read.repeat(2) if read is not None and len(read) == 1 else read
        try:
            yield
        finally:
            self._read = None

    def queries(self, read: np.ndarray | None) -> dict[nn.Module, np.ndarray]:
        """Returns the last layer's attention and the queries whose outputs are used, for `registry.attending`."""
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
