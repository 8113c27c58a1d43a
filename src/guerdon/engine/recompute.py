"""Activation checkpointing: a layer keeps only its input, and its activations are computed again for the backward."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from guerdon.engine.attention import registry
from guerdon.engine.checkpoint.sharding import layers


def recompute_activations(trunk: nn.Module) -> None:
    """Makes every layer of the trunk compute its activations twice in place of keeping them.

    transformers' own way needs train mode, which would bring dropout; here the trunk stays in eval mode, and names
    and parameters stay as they are. Without gradients nothing changes.
    """
    for layer in layers(trunk):
        _recompute(layer)


def _recompute(layer: Any) -> None:
    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        batch = registry.attended()

        def again(*args: Any, **kwargs: Any) -> Any:
            # On a GPU the second time is in autograd's own thread, and always after the batch was left.
            with registry.attending(batch) if batch is not None else contextlib.nullcontext():
                return plain(*args, **kwargs)

        # No dropout, so nothing random that would have to come out the same.
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    layer.forward = forward
