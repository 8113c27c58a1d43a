"""Several LoRA adapters over one trunk, each for the tokens of its own rows, in one forward.

A token of the i-th adapter has the id `id + i * vocab_size`. Whatever packs, sorts or compares rows of such ids keeps
the adapters apart by itself: a prompt is shared by rows of one adapter alone, because another one's hidden states
differ from its first layer on. A hook on the trunk turns the ids back, and notes whose each token is.

A changed layer adds the product of all adapters' factors, stacked: of the inner numbers only a token's own adapter's
are not zero. That needs no sorting and no waiting for the device, and a zero changes no sum.

Legend: T tokens, R ranks of all adapters together.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from guerdon.errors import CheckpointError

ALONE = "serve it as a model of its own, which merges it"


class _Owners:
    """Whose the tokens of the forward that runs now are: int64 of the tokens' shape."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.of_tokens: Tensor | None = None

    def enter(self, _: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = named.get("input_ids")
        if ids is None:  # an output head's states
            return args, named
        self.of_tokens = ids // self._vocab_size
        return args, {**named, "input_ids": ids % self._vocab_size}


def install(trunk: Any, adapters: list[dict[str, tuple[Tensor, Tensor]]], names: list[str]) -> None:
    """Makes the trunk add each token's adapter; `adapters` have two factors for each layer, `[r,in]` and `[out,r]`.

    Raises CheckpointError, with the adapter's name, if a layer is not linear, has another shape or numbers that are not
    finite, or does not take all tokens in order in one forward.
    """
    owners = _Owners(trunk.get_input_embeddings().num_embeddings)
    trunk.register_forward_pre_hook(owners.enter, with_kwargs=True)
    layers: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
    for i, adapter in enumerate(adapters):
        for path, (down, up) in adapter.items():
            layers.setdefault(path, []).append((i, down, up))
    used: set[str] = set()
    for path, parts in layers.items():
        try:
            layer = trunk.get_submodule(path)
        except AttributeError:
            layer = None
        i, down, up = parts[0]
        if type(layer) not in (nn.Linear, Conv1D):
            what = "a layer that is not linear" if layer is not None else "no layer of the base model's trunk"
            raise CheckpointError(f"the adapter {names[i]} changes {path}, which is {what}", ALONE)
        shape = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.T.shape
        for i, down, up in parts:
            if (up.shape[0], down.shape[1]) != tuple(shape):
                raise CheckpointError(
                    f"the adapter {names[i]} has {path} of {[up.shape[0], down.shape[1]]}, its base {list(shape)}",
                    "list it under the model that it was trained on",
                )
            if not all(factor.to(layer.weight.dtype).isfinite().all() for factor in (down, up)):
                raise CheckpointError(  # zeros times them would be NaN for the others' tokens
                    f"the adapter {names[i]} has numbers in {path} that are not finite as {layer.weight.dtype}",
                    "give an earlier checkpoint of it, or set dtype to float32 or bfloat16",
                )
        _add(layer, path, parts, owners, used)
    tokens = torch.arange(8, device=next(trunk.parameters()).device)[None]
    with torch.no_grad(), contextlib.suppress(NotImplementedError):
        trunk(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    if missing := sorted(layers.keys() - used):
        i = layers[missing[0]][0][0]
        raise CheckpointError(f"the adapter {names[i]} changes {missing[0]}, which does not take all tokens", ALONE)


def _add(layer: Any, path: str, parts: list[tuple[int, Tensor, Tensor]], owners: _Owners, used: set[str]) -> None:
    weight = layer.weight
    layer.register_buffer("lora_down", torch.cat([down for _, down, _ in parts]).to(weight), persistent=False)
    layer.register_buffer("lora_up", torch.cat([up for *_, up in parts], 1).to(weight), persistent=False)
    whose = torch.cat([torch.full((len(down),), i) for i, down, _ in parts]).to(weight.device)
    layer.register_buffer("lora_whose", whose, persistent=False)

    def add(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (x,), of_tokens = args, owners.of_tokens
        assert of_tokens is not None
        if x.shape[:-1].numel() != of_tokens.numel():
            raise NotImplementedError(f"{path} does not take all tokens at once")
        used.add(path)
        inner = F.linear(x, layer.lora_down)
        own = of_tokens.reshape(*x.shape[:-1], 1) == layer.lora_whose
        return output + F.linear(inner.masked_fill(~own, 0.0), layer.lora_up)

    layer.register_forward_hook(add)
