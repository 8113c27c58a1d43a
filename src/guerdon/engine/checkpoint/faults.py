"""Names the cause if a checkpoint's files cannot be loaded: other programs' layouts, broken files, strange tensors.

Every error says which file is at fault, why, and what to do about it.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from guerdon.errors import CheckpointError

COPY = "copy or download it again"
_ADAPTER_NAMES = re.compile(r"\.(lora_[A-Z]|lora_embedding_[A-Z]|lora_magnitude_vector|base_layer)(\.|$)")
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)(?=\.)")
"""Parts of names that torch.compile, FSDP, activation checkpointing, and DDP or DeepSpeed put around a module."""


@dataclass(frozen=True)
class ForeignLayout:
    """Files that transformers cannot load: patterns, descriptions and remedies.

    `patterns` are globs in the given folder. `{found}` in `what` and `remedy` is the file or folder that matched,
    `{inside}` the folder that holds it.
    """

    what: str
    patterns: tuple[str, ...]
    remedy: str


LAYOUTS = (
    ForeignLayout(
        "an unfinished download, {found}",
        ("*.incomplete", "../../blobs/*.incomplete", ".cache/huggingface/download/**/*.incomplete", "*.aria2", "*.part",
         "*.crdownload"),
        "run the same download again, which finishes it",
    ),
    ForeignLayout(
        "the parts of verl's FSDP ranks, {found}",
        ("model_world_size_*_rank_*.pt", "../model_world_size_*_rank_*.pt", "*/model_world_size_*_rank_*.pt"),
        "merge them: python -m verl.model_merger merge --backend fsdp --local_dir {inside} --target_dir OUT",
    ),
    ForeignLayout(
        "the parts of verl's Megatron ranks, {found}",
        ("dist_ckpt/*.distcp", "../dist_ckpt/*.distcp", "*/dist_ckpt/*.distcp"),
        "merge them: python -m verl.model_merger merge --backend megatron --local_dir {inside}/.. --target_dir OUT",
    ),
    ForeignLayout(
        "the parts of DeepSpeed's ranks, {found}",
        ("*zero_pp_rank_*", "mp_rank_*_model_states.pt"),
        "in the folder above it: python zero_to_fp32.py . OUT --safe_serialization; then copy config.json and the "
        "tokenizer to OUT",
    ),
    ForeignLayout(
        "the parts of DeepSpeed's ranks, {found}",
        ("global_step[0-9]*/*zero_pp_rank_*", "global_step[0-9]*/mp_rank_*", "*/global_step[0-9]*/mp_rank_*",
         "*/global_step[0-9]*/*zero_pp_rank_*", "zero_to_fp32.py"),
        "in the folder with zero_to_fp32.py: python zero_to_fp32.py . OUT --safe_serialization; then copy config.json "
        "and the tokenizer to OUT",
    ),
    ForeignLayout(
        "the parts of accelerate's FSDP ranks, {found}",
        ("pytorch_model_fsdp_[0-9]*/*.distcp", "*/pytorch_model_fsdp_[0-9]*/*.distcp"),
        "merge them: accelerate merge-weights {inside} OUT; then copy config.json and the tokenizer to OUT",
    ),
    ForeignLayout(
        "a checkpoint of NeMo, {found}",
        ("*.nemo", "model_weights", "context/model.yaml", "../context/model.yaml"),
        "export it to Hugging Face's format with NeMo: llm.export_ckpt, or its scripts/checkpoint_converters",
    ),
    ForeignLayout(
        "a checkpoint of Megatron, {found}",
        ("latest_checkpointed_iteration.txt", "../latest_checkpointed_iteration.txt", "mp_rank_*",
         "iter_[0-9]*/mp_rank_*", "iter_[0-9]*/*.distcp", "iter_[0-9]*", "common.pt"),
        "convert it to Hugging Face's format: AutoBridge.export_ckpt of Megatron Bridge, or "
        "tools/convert_torch_dist_to_hf.py of slime",
    ),
    ForeignLayout(
        "parts of torch.distributed.checkpoint, {found}",
        ("*.distcp", "*/*.distcp", "*/*/*.distcp", ".metadata"),
        "join them: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {inside} OUT/pytorch_model.bin, "
        "or the trainer's own converter (NeMo RL: examples/converters/convert_dcp_to_hf.py)",
    ),
    ForeignLayout(
        "one file for each rank, {found}",
        ("*_rank_[0-9]*", "*_rank[0-9]*", "rank[0-9]*", "rank_[0-9]*"),
        "save the model again in whole, gathered from all ranks (FSDP: a full state dict)",
    ),
    ForeignLayout(
        "Meta's or Mistral's own format, {found}",
        ("consolidated*",),
        "take the files of transformers' format (model*.safetensors and config.json) from the same place",
    ),
    ForeignLayout(
        "a GGUF file, {found}",
        ("*.gguf",),
        "`guerdon convert {inside}/{found} FOLDER` writes a folder that can be served",
    ),
    ForeignLayout(
        "the weights of another framework, {found}",
        ("tf_model.h5", "flax_model.msgpack", "*.onnx", "onnx/*.onnx", "*.ckpt.index", "*.mlmodel", "*.msgpack"),
        "load it with transformers' PyTorch class and save that: save_pretrained writes model.safetensors",
    ),
    ForeignLayout(
        "a file that may hold more than weights, {found}",
        ("*.ckpt", "*.pth"),
        "save its state dict alone, as model.safetensors",
    ),
    ForeignLayout(
        "an archive, {found}", ("*.tar.gz", "*.tgz", "*.tar", "*.zip"), "unpack it and give the folder inside"
    ),
    ForeignLayout("a diffusion pipeline, {found}", ("model_index.json",), "give the folder of a reward model"),
    ForeignLayout("an adapter without its adapter_config.json, {found}", ("adapter_model.*",), "copy that file, too"),
    ForeignLayout(
        "a checkpoint in a folder inside, {found}",
        ("*/config.json", "*/adapter_config.json", "*/*/config.json", "*/*/adapter_config.json",
         "checkpoints/*/policy/*config.json"),
        "give {inside}",
    ),
)  # fmt: skip
"""Tried in this order, which decides if a folder has files of several of them."""


def raise_lacking(folder: Path, what: str, remedy: str) -> NoReturn:
    """Raises CheckpointError: the folder has no `what`, but files of one of `LAYOUTS`; else `remedy` is the advice."""
    for layout in LAYOUTS:
        found = [path for pattern in layout.patterns for path in folder.glob(pattern)]
        if found:
            path = max(found, key=lambda path: path.lstat().st_mtime)
            names = {"found": os.path.relpath(path, folder), "inside": os.path.normpath(path.parent)}
            raise CheckpointError(
                f"{folder} has no {what}; it has {layout.what.format(**names)}", layout.remedy.format(**names)
            )
    raise CheckpointError(f"{folder} has no {what}", remedy)


# ------------------------------------------------------------------------------------------------ single files


def check_file(path: Path, *, may_be_empty: bool = False) -> None:
    """Raises CheckpointError if the file is a dangling link, empty, unreadable, or stands for a file elsewhere."""
    if path.is_symlink() and not path.exists():
        hub = re.search(r"models--(.+?)/snapshots/", path.absolute().as_posix())
        again = f"`hf download {hub[1].replace('--', '/')}` downloads it" if hub else "copy the folder with `cp -rL`"
        raise CheckpointError(f"{path} is a link to {path.readlink()}, which does not exist", f"{again} again")
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}", "check its permissions and the disk") from e
    if not head and not may_be_empty:
        raise CheckpointError(f"{path} is empty", COPY)
    if head.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d+)$", head, re.MULTILINE)
        of = f" of {int(size[1]):,} bytes" if size else ""
        raise CheckpointError(
            f"{path} is a git-lfs pointer to a file{of}, not that file", "`git lfs pull` in the clone gets the files"
        )
    if re.match(rb"(\.\./)*(\.git)?/annex/objects/", head):
        raise CheckpointError(
            f"{path} is a git-annex pointer, not the file", "`git annex get .` in the clone gets the files"
        )
    if re.match(rb"\s*<(!doctype|html|\?xml)", head, re.IGNORECASE):
        raise CheckpointError(
            f"{path} is a web page, not the file: an error or a login in its place", "download it again, with a token"
        )


def unreadable_safetensors(path: Path, error: Exception) -> CheckpointError:
    """Returns the error for a safetensors file that cannot be opened, with its cause."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        head = file.read(header_bytes) if header_bytes < min(size, 100 << 20) else b""
    try:
        parts = [part["data_offsets"][1] for name, part in json.loads(head).items() if name != "__metadata__"]
        wanted = 8 + header_bytes + max(parts)
    except (ValueError, TypeError, KeyError, AttributeError, LookupError):
        wanted = 8 + header_bytes
        if size >= 8 and wanted > 8 + (100 << 20):
            return CheckpointError(f"{path} is no safetensors file: {error}", COPY)
    if wanted > size:
        return CheckpointError(f"{path} is truncated: it has {size:,} bytes, its header names {wanted:,}", COPY)
    return CheckpointError(f"{path} cannot be read: {error}", COPY)


def unreadable_torch(path: Path, error: Exception) -> CheckpointError:
    """Returns the error for a file of `torch.save` that cannot be opened, with its cause."""
    reason = str(error)
    if "torch.distributed" in reason or "DTensor" in reason:
        return _sharded(path)
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
        file.seek(-min(path.stat().st_size, 1000), os.SEEK_END)
        end = file.read().replace(b"\n", b".")
    found = re.search(r"GLOBAL ([\w.]+)", reason)
    # A file may end amid the name of a class, which stands in two lines and is told without its last letter then.
    if found and (name := found[1].rstrip(".").encode()) not in end[-len(name) - 3 :]:
        return CheckpointError(
            f"{path} holds a Python object ({found[1]}), and objects are never loaded",
            "save the state dict alone, as model.safetensors",
        )
    is_cut = isinstance(error, EOFError | IndexError | struct.error) or any(
        part in reason for part in ("truncated", "unexpected EOF", "Ran out of")
    )
    if found or is_cut or (is_zip and not zipfile.is_zipfile(path)):
        return CheckpointError(f"{path} is truncated", COPY)
    what = (
        "no file of tensors" if isinstance(error, pickle.UnpicklingError | RuntimeError | ValueError) else "unreadable"
    )
    return CheckpointError(
        f"{path} is {what}: {(reason.splitlines() or [type(error).__name__])[0][:200]}",
        f"{COPY}, or save the model again as safetensors",
    )


def check_state_dict(path: Path, data: Any) -> None:
    """Raises CheckpointError unless the content of a file of `torch.save` is tensors by name."""
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, no state dict", "save the model's state_dict()")
    strange = [name for name, value in data.items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise CheckpointError(
            f"{path} is not a state dict: {', '.join(map(str, strange[:4]))} are no tensors",
            "save the model's state_dict() alone, as safetensors",
        )
    if any(type(value) not in (torch.Tensor, torch.nn.Parameter) for value in data.values()):
        raise _sharded(path)


def _sharded(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} holds DTensors, one rank's part of each weight",
        "save the model again in whole (FSDP2: full_tensor() of each weight), or with the trainer's own converter",
    )


# ------------------------------------------------------------------------------------------------ tensors


_QUANTISED = ("quantization_config", "compression_config", "quantization")
"""Keys by which transformers, compressed-tensors and MLX say that weights are quantised."""


def find_quantised(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the method by which the config, or a config inside it, says that weights are quantised, and its settings.

    Both are empty if it does not.
    """
    for name in _QUANTISED:
        if own := settings.get(name):  # null and {} mean none
            return (str(own.get("quant_method", name)), own) if isinstance(own, dict) else (name, {})
    inside = (find_quantised(part) for part in settings.values() if isinstance(part, dict))
    return next((found for found in inside if found[0]), ("", {}))


def without_quantisation(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the config, and configs inside it, without what they say of quantised weights."""
    kept = {name: value for name, value in settings.items() if name not in _QUANTISED}
    return {name: without_quantisation(part) if isinstance(part, dict) else part for name, part in kept.items()}


def check_tensor(path: Path, name: str, shape: tuple[int, ...], is_float: bool) -> None:
    """Raises CheckpointError if a stored tensor cannot be a whole, merged weight, quantised only if it may be."""
    if 0 in shape:
        raise CheckpointError(
            f"{path} was saved by one rank without gathering: {name} is empty, {list(shape)}",
            "DeepSpeed ZeRO-3: set stage3_gather_16bit_weights_on_model_save, or run zero_to_fp32.py in the checkpoint "
            "with global_step*/; FSDP: save a full state dict",
        )
    if "_flat_param" in name or name.rpartition(".")[2] == "flat_param":
        raise CheckpointError(
            f"{path} holds weights that FSDP has flattened: {name}", "save a full state dict (FULL_STATE_DICT)"
        )
    if not is_float and name.endswith("weight"):
        raise CheckpointError(f"{path} holds quantised weights: {name} has integers", "give the unquantised checkpoint")


def check_merged(path: Path, names: Iterable[str]) -> None:
    """Raises CheckpointError if a model's file has unmerged adapters."""
    if found := next(filter(_ADAPTER_NAMES.search, names), None):
        raise CheckpointError(
            f"{path} holds a model with unmerged adapters: {found}",
            "save the adapter by itself (PeftModel.save_pretrained) and give its folder, or merge_and_unload() first",
        )


def without_wrappers(name: str) -> str:
    """Returns a tensor's name without the parts that wrappers of modules have put into it."""
    return _WRAPPERS.sub("", name).removeprefix(".")
