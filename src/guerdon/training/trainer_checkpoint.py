"""The files of a trainer's checkpoint: safetensors and JSON, nothing that runs when it is read.

| file | holds |
| --- | --- |
| `model*.safetensors`, `config.json`, the tokenizer's files | the model as a checkpoint that others load |
| `adapter_model.safetensors`, `adapter_config.json` | in its place where adapters train |
| `value_head.safetensors` | beside them, of a critic |
| `optimizer*.safetensors` | the optimiser's state, and float32 masters of weights of less precision |
| `optimizer/` | in its place where it is sharded over ranks: the parts of each, by `torch.distributed.checkpoint` |
| `rng.safetensors` | the state of torch's random number generators |
| `trainer.json` | step, and what the checkpoint was made with |

A critic is written as OpenRLHF writes its critics: the trunk under its own names, a `score` head for every token,
mean and std in `config.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from guerdon.engine.checkpoint.files import StoredTensor, open_safetensors
from guerdon.engine.checkpoint.loading import LoadedModel
from guerdon.engine.checkpoint.placement import dtype_name
from guerdon.engine.checkpoint.text import TOKENIZER_FILES
from guerdon.errors import CheckpointError, StorageFailed
from guerdon.settings.config import LearningConfig

HEAD = "score"
SHARD_BYTES = 4 << 30
"""Of one file, which is gathered in the host's memory before it is written."""
MORE_FILES = (
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


# ------------------------------------------------------------------------------------------- what a model's folder has


def model_tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    """Trunk and head under the names that a checkpoint has for them."""
    prefix = f"{loaded.trunk.base_model_prefix}." if loaded.trunk.base_model_prefix else ""
    trunk = {f"{prefix}{name}": tensor for name, tensor in loaded.trunk.state_dict().items()}
    return trunk | head_tensors(loaded)


def head_tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    """The head's tensors as a checkpoint names them: a lone layer without its number."""
    state = loaded.head.module.state_dict()
    alone = all(name.startswith("0.") for name in state)
    return {f"{HEAD}.{name.removeprefix('0.') if alone else name}": tensor for name, tensor in state.items()}


def critic_files(loaded: LoadedModel, folder: Path) -> dict[str, bytes]:
    """`config.json` and the tokenizer's files for this critic, which came from `folder`, by name."""
    settings = {
        "architectures": ["CriticModel"],
        "value_head_prefix": HEAD,
        "num_labels": 1,
        "normalize_reward": True,
        "mean": loaded.head.mean,
        "std": loaded.head.std,
    }
    return model_files(folder, next(loaded.trunk.parameters()).dtype, settings, leave_out=("id2label", "label2id"))


def model_files(
    folder: Path, dtype: torch.dtype, more_settings: dict[str, Any], leave_out: tuple[str, ...] = ()
) -> dict[str, bytes]:
    """The folder's `config.json` with other settings, and its small files: the tokenizer's, and generation's settings.

    They are held in memory from the start, for a trainer of minutes or weeks cannot count on that folder to stay.
    """
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("torch_dtype", *leave_out):
        settings.pop(key, None)
    settings |= {**more_settings, "dtype": dtype_name(dtype)}
    names = (*TOKENIZER_FILES, *MORE_FILES)
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    return files | {"config.json": to_json(settings)}


def learning_settings(config: LearningConfig) -> dict[str, Any]:
    """The settings without which a checkpoint's tensors mean nothing."""
    return {
        "optimizer": config.optimizer,
        "lora": config.lora,
        "lora_alpha": config.lora_alpha if config.lora else None,
        "lora_targets": config.lora_targets if config.lora else None,
    }


# ------------------------------------------------------------------------------------------- writing


def to_json(data: Any) -> bytes:
    """Readable JSON, for people look into checkpoints."""
    return json.dumps(data, indent=2).encode() + b"\n"


def write(path: Path, data: bytes) -> None:
    """Writes and fsyncs a new file; raises StorageFailed where the disk does not take it."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise storage_failed(path, e) from e


def write_tensors(folder: Path, stem: str, tensors: dict[str, Tensor]) -> None:
    """Writes and fsyncs `<stem>.safetensors`, or where it grows large its parts and their index.

    Raises StorageFailed where the disk does not take them.
    """
    plan = split_torch_state_dict_into_shards(
        tensors, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=SHARD_BYTES
    )
    for file, names in plan.filename_to_tensors.items():
        write_file(folder / file, {name: tensors[name] for name in names})
    if plan.is_sharded:
        write_index(folder, stem, plan)


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes and fsyncs one file of whole tensors; raises StorageFailed where the disk does not take it."""
    part = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(dict(_unshared(part)), path, metadata={"format": "pt"})
        _settle(path)
    except (SafetensorError, OSError) as e:
        raise storage_failed(path, e) from e


def write_index(folder: Path, stem: str, plan: Any) -> None:
    """Writes which of a stem's files holds which tensor, as `huggingface_hub` has planned it; raises StorageFailed."""
    index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
    write(folder / f"{stem}.safetensors.index.json", to_json(index))


def _unshared(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Layers that share their weights are written once for each name; safetensors wants them apart for that."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        yield name, tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())


def _settle(path: Path) -> None:
    """Fsyncs a file that safetensors has written; it is for its owner alone then, and should be as its folder is."""
    path.chmod(path.parent.stat().st_mode & 0o666)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def storage_failed(path: Path, error: Exception) -> StorageFailed:
    """What is raised where the disk does not take that file."""
    return StorageFailed(f"cannot write {path}: {error}; make room on the disk, or mend it")


# ------------------------------------------------------------------------------------------- reading


def read_json(path: Path) -> dict[str, Any]:
    """The object in that file; raises CheckpointError where there is none."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}", "load another checkpoint") from e
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object", "load another checkpoint")
    return data


def open_tensors(folder: Path, stem: str) -> dict[str, StoredTensor]:
    """The tensors that `write_tensors` wrote, by name, not yet read; raises CheckpointError where they are missing."""
    files = sorted(folder.glob(f"{stem}*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no {stem}.safetensors", "load another checkpoint")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= open_safetensors(file)
    return tensors


def check_same(found: dict[str, tuple[int, ...]], own: dict[str, Tensor], folder: Path) -> None:
    """Raises CheckpointError unless the shapes found by name are those of the model's own tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder} is of another model: {name} is {found.get(name, 'absent')} there, "
            f"{shapes.get(name, 'absent')} here",
            "start with the model and the settings that it was made with",
        )


@torch.no_grad()
def copy_into(own: dict[str, Tensor], stored: dict[str, StoredTensor]) -> None:
    """Overwrites the model's own tensors with those stored under the same names."""
    for name, tensor in own.items():
        tensor.copy_(stored[name][...])


# ------------------------------------------------------------------------------------------- random numbers


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """The state of the generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(stored: dict[str, StoredTensor], device: torch.device) -> None:
    """Puts them back; a generator of a device that was not there when they were saved stays as it is."""
    torch.set_rng_state(stored["cpu"][...])
    if device.type == "cuda" and "cuda" in stored:
        torch.cuda.set_rng_state(stored["cuda"][...], device)
