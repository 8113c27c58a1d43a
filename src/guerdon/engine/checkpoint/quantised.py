"""Quantised checkpoints as unquantised ones: each weight is computed from its parts when it is read, without a GPU.

| method | a weight's parts | computed as |
| --- | --- | --- |
| fp8, fbgemm_fp8 | `weight`, `weight_scale_inv` or `weight_scale` | each block times its scale |
| mxfp4 (gpt-oss) | `_blocks`, `_scales` | E2M1 times 2 to the power of a byte less 127, transposed |
| compressed-tensors | `weight`, `weight_scale`, zeros; or `weight_packed` | above the zero, times the scale |
| gptq | `qweight`, `qzeros`, `scales`, `g_idx` | the same, packed along the inputs, the zeros less one |
| awq (gemm) | `qweight`, `qzeros`, `scales` | the same, packed along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 |
| bitsandbytes, 8 bits | `weight`, `SCB` | times the row's largest, divided by 127 |
| bitsandbytes, 4 bits | `weight`, `absmax`, `quant_map`, `quant_state` | the table's number times the block's largest |

The layouts are those of the libraries that write them: transformers, compressed-tensors, GPTQModel, AutoAWQ,
bitsandbytes. Only weights are quantised then: what a method does to activations is not computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from guerdon.engine.checkpoint import faults
from guerdon.engine.checkpoint.stored import StoredCheckpoint, StoredTensor
from guerdon.errors import CheckpointError

log = logging.getLogger(__name__)

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SCALES = ("weight_scale_inv", "weight_scale")
_IGNORED = ("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale", "q_scale", "input_zero_point")
"""Parts of activations."""
_BYTE = 127
"""The largest number of a row in 8 bits, and the exponent of a scale of 1."""

Parts = dict[str, StoredTensor]


@dataclass(frozen=True)
class _Wrong:
    """What is said of a weight whose parts do not fit each other."""

    what: str
    held: str

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Makes CheckpointError of whatever is raised inside the context: settings and tensors may be anything."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as e:
            why = (str(e).splitlines() or ["its layout"])[0]
            advice = "give the unquantised checkpoint, or report this with config.json"
            raise CheckpointError(f"{self.what} ({why}): it has {self.held}", advice) from e


@dataclass(frozen=True)
class _Computed:
    """A tensor that is computed whenever it is indexed."""

    compute: Callable[[], Tensor]
    shape: tuple[int, ...]
    wrong: _Wrong

    def __getitem__(self, index: Any) -> Tensor:
        with self.wrong.told():
            made = self.compute()
            if tuple(made.shape) != self.shape:
                raise ValueError(f"it makes {list(made.shape)}, not {list(self.shape)}")
        return made[index]


def dequantised(checkpoint: StoredCheckpoint, dtype: torch.dtype) -> StoredCheckpoint:
    """Returns a quantised checkpoint, or an adapter of one, as an unquantised one, and logs its size in `dtype`.

    Any other is returned unchanged. Raises CheckpointError if the method, or the layout of a tensor, is not known.
    """
    if checkpoint.adapter is not None:
        base = dequantised(checkpoint.adapter.base, dtype)
        adapter = dataclasses.replace(checkpoint.adapter, base=base)
        return dataclasses.replace(checkpoint, settings=base.settings, tensors=base.tensors, adapter=adapter)
    method, own = faults.find_quantised(checkpoint.settings)
    if not method:
        return checkpoint
    if method not in _READERS:
        raise CheckpointError(
            f"{checkpoint.folder} is quantised by {method}, which cannot be dequantised here",
            f"these can: {', '.join(_READERS)}; give the unquantised checkpoint",
        )
    tensors, modules = Parts(), dict[str, Parts]()
    for name, tensor in checkpoint.tensors.items():
        module, part = _split(name, method)
        if part:
            modules.setdefault(module, {})[part] = tensor
        elif name.rpartition(".")[2] not in _IGNORED:
            tensors[name] = tensor
    for module, parts in modules.items():
        if parts.keys() == {"weight"} and parts["weight"].is_float:  # a layer that is not quantised
            tensors[f"{module}.weight"] = parts["weight"]
            continue
        held = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in sorted(parts.items()))
        wrong = _Wrong(f"{module} of {checkpoint.folder} is not as {method} writes it", held)
        with wrong.told():
            name, shape, compute = _READERS[method](module, parts, own)
        tensors[name] = StoredTensor(_Computed(compute, shape, wrong), shape)
    count = sum(math.prod(tensor.shape) for tensor in tensors.values())
    stored = sum(path.stat().st_size for path in checkpoint.files.weights)
    log.info(
        "%s is dequantised from %s: %.1f GiB as %s, %.1f GiB in its files",
        checkpoint.folder,
        method,
        count * dtype.itemsize / 2**30,
        str(dtype).removeprefix("torch."),
        stored / 2**30,
    )
    return dataclasses.replace(checkpoint, settings=faults.without_quantisation(checkpoint.settings), tensors=tensors)


def _split(name: str, method: str) -> tuple[str, str]:
    """Returns the module and the part of a quantised weight; no part for any other tensor."""
    module, _, part = name.rpartition(".")
    if method == "mxfp4":
        for end in ("_blocks", "_scales"):
            if name.endswith(end):
                return name.removesuffix(end), end[1:]
        return "", ""
    if method == "bitsandbytes" and ".weight." in name:
        module, _, part = name.rpartition(".weight.")
    return (module, part) if part in _PARTS[method] or part == "weight" else ("", "")


# ---------------------------------------------------------------------------------------------- the formats

Read = tuple[str, tuple[int, ...], Callable[[], Tensor]]
"""The weight's name and shape, and what computes it in float32."""


def _size(numbers: int, groups: int, stated: Iterable[Any]) -> int:
    """Returns the size of the groups that have one scale each; the last is smaller only if a size is `stated`.

    All numbers may have one scale. Raises ValueError if no size fits.
    """
    sizes = [int(size) for size in stated if size and int(size) > 0]
    if fitting := [size for size in sizes if -(-numbers // size) == groups]:
        return fitting[0]
    if numbers % groups or (sizes and groups != 1):
        raise ValueError(f"{groups} scales for {numbers} numbers" + f" in groups of {sizes}" * bool(sizes))
    return numbers // groups


def _scaled(weight: Tensor, scale: Tensor, block: Any = None) -> Tensor:
    """Multiplies blocks of a matrix `[R,C]` by their scales, of the sizes `block` if they are stated."""
    weight, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return weight * scale.reshape(())
    scale = scale.reshape(len(scale), -1)
    if not block or scale.shape == (len(weight), 1):  # a scale for each row
        block = [_size(n, m, ()) for n, m in zip(weight.shape, scale.shape, strict=True)]
    if any(-(-n // size) != m for n, size, m in zip(weight.shape, block, scale.shape, strict=True)):
        raise ValueError(f"scales {list(scale.shape)} for blocks of {list(block)}")
    for axis, size in enumerate(block):
        scale = scale.repeat_interleave(size, axis).narrow(axis, 0, weight.shape[axis])
    return weight * scale


def _unpacked(packed: Tensor, bits: int, axis: int) -> Tensor:
    """Returns the unsigned numbers of int32 words, lowest bits first, beside each other along `axis`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    words = packed.movedim(axis, -1)[..., None] >> shifts
    return (words & (2**bits - 1)).flatten(-2).movedim(-1, axis)


def _fp8(module: str, parts: Parts, settings: dict[str, Any]) -> Read:
    weight, scale = parts["weight"], next(parts[name] for name in _SCALES if name in parts)
    if not weight.is_float:
        raise ValueError("integers")
    block = settings.get("weight_block_size")
    return f"{module}.weight", weight.shape, lambda: _scaled(weight[...], scale[...], block)


def _mxfp4(name: str, parts: Parts, settings: dict[str, Any]) -> Read:
    blocks, scales = parts["blocks"], parts["scales"]
    *before, rows, groups, width = blocks.shape
    if scales.shape != blocks.shape[:-1]:
        raise ValueError("scales for other blocks")

    def compute() -> Tensor:
        nibbles, table = blocks[...], torch.tensor([*_E2M1, *(-x for x in _E2M1)])
        pairs = torch.stack([nibbles & 15, nibbles >> 4], -1).flatten(-2)
        numbers = torch.ldexp(table[pairs.int()], scales[...].int()[..., None] - _BYTE)
        return numbers.flatten(-2).transpose(-1, -2).contiguous()

    return name, (*before, 2 * groups * width, rows), compute


def _compressed(module: str, parts: Parts, settings: dict[str, Any]) -> Read:
    scale, zero, owners = parts["weight_scale"], parts.get("weight_zero_point"), parts.get("weight_g_idx")
    packed, bits = parts.get("weight_packed"), 0
    groups = [x["weights"] for x in (settings.get("config_groups") or {}).values() if x.get("weights")]
    if packed is None:
        weight, shape = parts["weight"], parts["weight"].shape
        if weight.is_float and zero is None:  # FP8
            block = next((x.get("block_structure") for x in groups), None)
            return f"{module}.weight", shape, lambda: _scaled(weight[...], scale[...], block)
    else:
        rows, columns = shape = tuple(parts["weight_shape"][...].tolist())
        bits = 32 // -(-columns // packed.shape[1])
        if bits not in (4, 8) or packed.shape[0] != rows:
            raise ValueError(f"{bits} bits")

    def compute() -> Tensor:
        if packed is None:
            numbers = weight[...].float()
        else:
            numbers = _unpacked(packed[...], bits, 1)[:, : shape[1]].float() - 2 ** (bits - 1)
        scales, zeros = scale[...].float().reshape(-1, scale.shape[-1] if scale.shape else 1), torch.zeros(1, 1)
        if zero is not None:
            zeros = zero[...].float().reshape(-1, scales.shape[1])
            if packed is not None:
                zeros = _unpacked(zero[...], bits, 0)[: shape[0]].float() - 2 ** (bits - 1)
        group = [x.get("group_size") for x in groups]
        own = (
            owners[...].long()
            if owners is not None
            else torch.arange(shape[1]) // _size(shape[1], scales.shape[1], group)
        )
        return (numbers - zeros.expand_as(scales)[:, own]) * scales[:, own]

    return f"{module}.weight", shape, compute


def _gptq(module: str, parts: Parts, settings: dict[str, Any]) -> Read:
    bits, words, scale = int(settings["bits"]), parts["qweight"], parts["scales"]
    num_inputs = words.shape[0] * 32 // bits
    if bits not in (2, 4, 8):
        raise ValueError(f"{bits} bits")
    # The first format stores zeros less one, modulo the largest number.
    shift = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def compute() -> Tensor:
        zeros = (_unpacked(parts["qzeros"][...], bits, 1) + shift) & (2**bits - 1)
        if "g_idx" in parts:
            owners = parts["g_idx"][...].long()
        else:
            owners = torch.arange(num_inputs) // _size(num_inputs, scale.shape[0], [settings.get("group_size")])
        numbers = _unpacked(words[...], bits, 0).float() - zeros.float()[owners]
        return (numbers * scale[...].float()[owners]).T.contiguous()

    return f"{module}.weight", (words.shape[1], num_inputs), compute


def _awq(module: str, parts: Parts, settings: dict[str, Any]) -> Read:
    words, scale, version = parts["qweight"], parts["scales"], settings.get("version", "gemm")
    if int(settings.get("bits", settings.get("w_bit", 4))) != 4 or str(version).lower() != "gemm":
        raise ValueError(f"version {version}, {settings.get('bits')} bits")

    def numbers(packed: Tensor) -> Tensor:
        found = _unpacked(packed, 4, 1).unflatten(1, (-1, 8))
        return found[..., torch.tensor(_AWQ_ORDER).argsort()].flatten(1).float()

    def compute() -> Tensor:
        group = settings.get("group_size", settings.get("q_group_size"))
        owners = torch.arange(words.shape[0]) // _size(words.shape[0], scale.shape[0], [group])
        zeros = numbers(parts["qzeros"][...])[owners]
        return ((numbers(words[...]) - zeros) * scale[...].float()[owners]).T.contiguous()

    return f"{module}.weight", (8 * words.shape[1], words.shape[0]), compute


def _bitsandbytes(module: str, parts: Parts, settings: dict[str, Any]) -> Read:
    weight = parts["weight"]
    if "SCB" in parts:
        if "weight_format" in parts and parts["weight_format"][...].item() != 0:
            raise ValueError("its rows are in a GPU's order")
        return (
            f"{module}.weight",
            weight.shape,
            lambda: weight[...].float() * (parts["SCB"][...].float() / _BYTE)[:, None],
        )
    (state,) = (part for name, part in parts.items() if name.startswith("quant_state."))
    facts = json.loads(bytes(state[...].tolist()))
    shape = tuple(facts["shape"])

    def compute() -> Tensor:
        most = parts["absmax"][...]
        if "nested_absmax" in parts:  # the blocks' largest are quantised, too
            nested = parts["nested_absmax"][...].repeat_interleave(facts["nested_blocksize"])[: len(most)]
            most = parts["nested_quant_map"][...][most.int()] * nested + facts["nested_offset"]
        nibbles = weight[...].flatten()
        pairs = torch.stack([nibbles >> 4, nibbles & 15], -1).flatten()[: math.prod(shape)]
        return (parts["quant_map"][...][pairs.int()] * most.repeat_interleave(facts["blocksize"])[: len(pairs)]).view(
            shape
        )

    return f"{module}.weight", shape, compute


_READERS: dict[str, Callable[[str, Parts, dict[str, Any]], Read]] = {
    "fp8": _fp8, "fbgemm_fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq,
    "bitsandbytes": _bitsandbytes,
}  # fmt: skip
_STATE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4",
          "quant_state.bitsandbytes__fp4")  # fmt: skip
_PARTS = {
    "fp8": _SCALES,
    "fbgemm_fp8": _SCALES,
    "compressed-tensors": (*_SCALES, "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "bitsandbytes": ("SCB", "weight_format", *_STATE),
}
