"""A language model's output head as a safetensors file, so that a trainer makes logits of hidden states itself.

The file has `weight` `[V,H]` and, if the head has one, `bias` `[V]`, in the model's dtype. With the metadata's
`logit_scale` s (1 if missing) and `soft_cap` c (no cap if missing), the logits of hidden states h are

    logits = (h @ weight.T + bias) * s        and with a cap        c * tanh(logits / c)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from guerdon.engine.heads import AGREEMENT, OutputHead
from guerdon.errors import Unsupported
from guerdon.teacher_core import HeadFile

PIECE_BYTES = 8 << 20

_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "output_multiplier": 1, "logits_scaling": -1}
"""Settings of transformers' models that scale logits, and the power in which they do."""
_SOFT_CAP = "final_logit_softcapping"

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def export_head(model: Any, head: OutputHead, name: str, weights_version: str) -> HeadFile:
    """Returns the head of the model; raises Unsupported if the logits need more than this file can express."""
    output = model.get_output_embeddings()
    tensors: dict[str, Tensor] = {"weight": output.weight.detach()}
    if getattr(output, "bias", None) is not None:
        tensors["bias"] = output.bias.detach()
    config = model.config.get_text_config()
    scale = math.prod(float(getattr(config, key, None) or 1.0) ** power for key, power in _SCALES.items())
    soft_cap = getattr(config, _SOFT_CAP, None)
    _check(head, tensors, scale, soft_cap, name)
    metadata = {"format": "pt", "logit_scale": repr(scale)}
    if soft_cap:
        metadata["soft_cap"] = repr(float(soft_cap))
    hashing = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for piece in _pieces(tensors):
        hashing.update(piece)
    metadata |= {"digest": hashing.hexdigest(), "weights_version": weights_version}
    header = _header(tensors, metadata)

    def pieces() -> Iterator[bytes | memoryview]:
        yield header
        yield from _pieces(tensors)

    num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    return HeadFile(metadata["digest"], weights_version, num_bytes, pieces)


def rebuild(hidden: Tensor, tensors: dict[str, Tensor], scale: float, soft_cap: float | None) -> Tensor:
    """Returns the logits `[N,V]` of hidden states `[N,H]`."""
    logits = torch.nn.functional.linear(hidden, tensors["weight"], tensors.get("bias")) * scale
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


def _check(head: OutputHead, tensors: dict[str, Tensor], scale: float, soft_cap: float | None, name: str) -> None:
    """Raises Unsupported unless the logits equal the model's own."""
    weight = tensors["weight"]
    if weight.shape[1] == head.width:
        states = torch.randn(8, head.width, generator=torch.Generator().manual_seed(0)).to(weight)
        with torch.no_grad():
            want, got = head(states).float(), rebuild(states, tensors, scale, soft_cap).float()
        difference = ((got - want).abs().max() / want.square().mean().sqrt()).item()
        if difference <= AGREEMENT.get(weight.dtype, 2e-2):
            return
    raise Unsupported(
        f"the logits of {name} are not one matrix times its hidden states, as a head's file requires; "
        "request log-probs instead"
    )


def _header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    described: dict[str, Any] = {"__metadata__": metadata}
    stop = 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.nbytes
        described[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns the data
    return len(text).to_bytes(8, "little") + text


def _pieces(tensors: dict[str, Tensor]) -> Iterator[memoryview]:
    """Yields the tensors' bytes in order, a few MiB at a time; copies only those that are on another device."""
    for tensor in tensors.values():
        flat = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES].cpu().numpy().data
