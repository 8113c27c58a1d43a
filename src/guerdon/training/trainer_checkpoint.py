"""A trainer's checkpoint: safetensors and JSON, so that reading it runs no code.

| file | holds |
| --- | --- |
| `model*.safetensors`, `config.json`, the tokenizer's files | the model, as a checkpoint that other libraries load |
| `adapter_model.safetensors`, `adapter_config.json` | the adapters instead, if adapters are trained |
| `value_head.safetensors` | the value head of a critic with adapters |
| `optimizer*.safetensors` | the optimiser's state, and float32 masters of lower-precision weights |
| `optimizer/` | the same if it is sharded over ranks: every rank's shards, by `torch.distributed.checkpoint` |
| `rng.safetensors` | the state of torch's random number generators |
| `trainer.json` | the step, and the settings that the checkpoint was made with |

A critic is written as OpenRLHF writes its critics: the trunk under its own names, a `score` head for every token, mean
and std in `config.json`.

Weights are gathered into whole tensors, which any library can read. The optimiser's state, three times as large and of
no use to other libraries, stays sharded: all ranks write their shards at the same time. Both can be read with any
number of ranks, because each rank reads only the slices that it holds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.placement import dtype_name
from guerdon.engine.checkpoint.reward_models import LoadedModel
from guerdon.engine.checkpoint.stored import Origin, StoredTensor, open_safetensors
from guerdon.engine.checkpoint.tokenizer_files import TOKENIZER_FILES
from guerdon.errors import CheckpointError, RanksLost, ServerFault, StorageFailed, first_line
from guerdon.settings.config import LearningConfig
from guerdon.training import collectives
from guerdon.training.optimiser import Optimiser

T = TypeVar("T")

HEAD = "score"
MORE_FILES = ("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
SHARD_BYTES = 4 << 30
"""Size of one file, which is gathered in host memory before it is written."""
OPTIMISER_FOLDER = "optimizer"
"""The folder of the optimiser's state if that is sharded."""


@dataclass(frozen=True, slots=True)
class TrainerCheckpoint:
    """The parts of a trainer that its checkpoint holds, to write or to restore, on one rank or several.

    `weights` are the tensors by the stem of their file. `made_with` must be equal when the checkpoint is loaded;
    `mismatches` has the start of the error if it differs. `setting` names the setting that chooses the folder. The
    number of `ranks` and their layout may differ at loading.
    """

    weights: dict[str, dict[str, Tensor]]
    optimiser: Optimiser
    device: torch.device
    made_with: dict[str, Any]
    mismatches: dict[str, str]
    setting: str
    ranks: Ranks = ALONE

    def write(self, folder: Path, files: dict[str, bytes], facts: dict[str, Any]) -> None:
        """Collective; writes everything, with `files` by name and more `facts`, into an existing, empty folder.

        Every file is fsynced. Raises StorageFailed on all ranks if any rank cannot write its part.
        """
        with collectives.share_errors(self.ranks):
            if self.ranks.size > 1 and not folder.is_dir():
                raise StorageFailed(
                    f"{folder} does not exist here: ranks on several hosts need a {self.setting} on a shared file "
                    "system"
                )
        optimiser = self.optimiser.tensors()
        for stem, tensors in self.weights.items():
            if is_sharded(tensors):
                write_gathered(folder, stem, tensors, self.ranks)
        if is_sharded(optimiser):
            write_shards(folder / OPTIMISER_FOLDER, optimiser, self.ranks)
        with collectives.share_errors(self.ranks):
            if self.ranks.is_leader:  # what it has in whole; random number generators are the same on all ranks
                rng = {"cpu": torch.get_rng_state()}
                if self.device.type == "cuda":
                    rng["cuda"] = torch.cuda.get_rng_state(self.device)
                for stem, tensors in [*self.weights.items(), ("optimizer", optimiser), ("rng", rng)]:
                    if not is_sharded(tensors):
                        write_tensors(folder, stem, tensors)
                for name, data in files.items():
                    write_bytes(folder / name, data)
                known = {"step": self.optimiser.step, "learning_rate": self.optimiser.learning_rate}
                write_bytes(folder / "trainer.json", to_json(self.made_with | known | facts))

    def open(self, folder: Path) -> tuple[dict[str, Any], Callable[[], None]]:
        """Returns the facts, and a function that restores everything; nothing changes before it is called.

        Not collective. Raises CheckpointError if the folder is damaged or was made with other settings.
        """
        facts = read_json(folder / "trainer.json")
        for name, own in self.made_with.items():
            if facts.get(name) != own:
                what = self.mismatches.get(name, f"was made with {name}")
                raise CheckpointError(
                    f"{folder} {what} {facts.get(name)}, this run has {own}",
                    f"start with the model and the settings that it was made with, or give another {self.setting}",
                )
        restores = [self._open_weights(folder, stem, own) for stem, own in self.weights.items()]
        restores.append(self._open_optimiser(folder, facts["step"]))
        rng = open_tensors(folder, "rng")

        def restore() -> None:
            for part in restores:
                part()
            torch.set_rng_state(rng["cpu"][...])
            if self.device.type == "cuda" and "cuda" in rng:  # a device that was absent at saving keeps its state
                torch.cuda.set_rng_state(rng["cuda"][...], self.device)

        return facts, restore

    def _open_weights(self, folder: Path, stem: str, own: dict[str, Tensor]) -> Callable[[], None]:
        stored = open_tensors(folder, stem)
        check_shapes({name: tensor.shape for name, tensor in stored.items()}, own, folder)
        if is_sharded(own):
            return lambda: read_into(folder, own)

        def restore() -> None:
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(stored[name][...])

        return restore

    def _open_optimiser(self, folder: Path, step: int) -> Callable[[], None]:
        own = self.optimiser.tensors()
        is_stored_sharded = (folder / OPTIMISER_FOLDER).is_dir()
        if not is_stored_sharded and not is_sharded(own):
            stored = open_tensors(folder, "optimizer")
            check_shapes({name: tensor.shape for name, tensor in stored.items()}, own, folder)
            return lambda: self.optimiser.restore(step, lambda name: stored[name][...])
        shapes = (
            shapes_of_shards(folder / OPTIMISER_FOLDER, own)
            if is_stored_sharded
            else {name: tensor.shape for name, tensor in open_tensors(folder, "optimizer").items()}
        )
        check_shapes(shapes, own, folder)

        def restore() -> None:
            # Reads into the state itself, except for numbers that are not tensors.
            read_into(folder / OPTIMISER_FOLDER if is_stored_sharded else folder, own)
            self.optimiser.restore(step, own.__getitem__)

        return restore


class TrainableWeights:
    """What critic and policy have in common: after a change of the weights that broke off, nothing may be computed."""

    _broken = ""
    _corrupt: str
    """What a fault has done, and what to do about it."""

    def _check_whole(self) -> None:
        if self._broken:
            raise ServerFault(self._broken)

    @contextlib.contextmanager
    def _changing_weights(self, fault: str) -> Iterator[None]:
        """Marks the weights as corrupt if the block fails."""
        self._broken = f"{fault}, {self._corrupt}"
        yield
        self._broken = ""


# ------------------------------------------------------------------------------------------- what a model's folder has


def model_tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    """Returns the tensors of trunk and head under their names in a checkpoint."""
    prefix = _trunk_prefix(loaded)
    trunk = {f"{prefix}{name}": tensor for name, tensor in loaded.trunk.state_dict().items()}
    return trunk | head_tensors(loaded)


def head_tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    """Returns the head's tensors under their names in a checkpoint: a single layer without its number."""
    return _named_head(loaded.head.module.state_dict())


def model_parameters(loaded: LoadedModel) -> dict[str, nn.Parameter]:
    """Returns the parameters of trunk and head under their names in a checkpoint."""
    prefix = _trunk_prefix(loaded)
    trunk = {f"{prefix}{name}": parameter for name, parameter in loaded.trunk.named_parameters()}
    return trunk | _named_head(dict(loaded.head.module.named_parameters()))


def _trunk_prefix(loaded: LoadedModel) -> str:
    return f"{loaded.trunk.base_model_prefix}." if loaded.trunk.base_model_prefix else ""


def _named_head(tensors: Mapping[str, T]) -> dict[str, T]:
    alone = all(name.startswith("0.") for name in tensors)
    return {f"{HEAD}.{name.removeprefix('0.') if alone else name}": tensor for name, tensor in tensors.items()}


def critic_files(loaded: LoadedModel) -> dict[str, bytes]:
    """Returns `config.json` and the tokenizer's files of a critic, by name."""
    settings = {
        "architectures": ["CriticModel"],
        "value_head_prefix": HEAD,
        "num_labels": 1,
        "normalize_reward": True,
        "mean": loaded.head.mean,
        "std": loaded.head.std,
    }
    return model_files(
        loaded.origin, next(loaded.trunk.parameters()).dtype, settings, leave_out=("id2label", "label2id")
    )


def model_files(
    origin: Origin, dtype: torch.dtype, more_settings: dict[str, Any], leave_out: tuple[str, ...] = ()
) -> dict[str, bytes]:
    """Returns the model's `config.json`, with other settings, and its small files: tokenizer and generation settings.

    They are kept in memory from the start, because the folder may be gone when the trainer saves, hours or weeks later.
    """
    left_out = ("torch_dtype", "quantization_config", *leave_out)
    settings = {name: value for name, value in origin.settings.items() if name not in left_out}
    settings |= {**more_settings, "dtype": dtype_name(dtype)}
    paths = [*(origin.text_folder / name for name in (*TOKENIZER_FILES, *MORE_FILES)), origin.generation_file]
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    return files | {"config.json": to_json(settings)}


def learning_settings(config: LearningConfig) -> dict[str, Any]:
    """Returns the settings without which a checkpoint's tensors mean nothing."""
    return {
        "optimizer": config.optimizer,
        "lora": config.lora,
        "lora_alpha": config.lora_alpha if config.lora else None,
        "lora_targets": config.lora_targets if config.lora else None,
    }


# ------------------------------------------------------------------------------------------- writing whole tensors


def to_json(data: Any) -> bytes:
    """Returns indented JSON, because people read it."""
    return json.dumps(data, indent=2).encode() + b"\n"


def write_bytes(path: Path, data: bytes) -> None:
    """Writes and fsyncs a new file; raises StorageFailed."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise _write_failed(path, e) from e


def write_tensors(folder: Path, stem: str, tensors: dict[str, Tensor]) -> None:
    """Writes and fsyncs `<stem>.safetensors`, or several files and their index if large; raises StorageFailed."""
    plan = split_torch_state_dict_into_shards(
        tensors, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=SHARD_BYTES
    )
    for file, names in plan.filename_to_tensors.items():
        write_file(folder / file, {name: tensors[name] for name in names})
    if plan.is_sharded:
        write_index(folder, stem, plan)


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes and fsyncs one file of whole tensors; raises StorageFailed."""
    part: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        # A copy of memory that is shared, which safetensors refuses to write.
        part[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    try:
        save_file(part, path, metadata={"format": "pt"})
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors writes for the owner only
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    except (SafetensorError, OSError) as e:
        raise _write_failed(path, e) from e


def write_index(folder: Path, stem: str, plan: Any) -> None:
    """Writes the index of a stem's files, as planned by `huggingface_hub`; raises StorageFailed."""
    index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
    write_bytes(folder / f"{stem}.safetensors.index.json", to_json(index))


def _write_failed(path: Path, error: Exception) -> StorageFailed:
    return StorageFailed(f"cannot write {path}: {error}; free disk space, or check the disk")


# ------------------------------------------------------------------------------------------- writing sharded tensors


def is_sharded(tensors: dict[str, Tensor]) -> bool:
    """Whether any of the tensors is sharded over ranks."""
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def write_gathered(folder: Path, stem: str, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Collective; writes the files that `write_tensors` would write for the whole tensors.

    The ranks take turns by file: each gathers the tensors of its own files only, so that no rank holds more than one
    file. Raises StorageFailed on every rank if any rank cannot write. If a rank cannot gather, it raises at once,
    because the others wait in the collective.
    """
    without_data = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    plan = split_torch_state_dict_into_shards(
        without_data, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=SHARD_BYTES
    )
    error: Exception | None = None
    for number, (file, names) in enumerate(plan.filename_to_tensors.items()):
        writes_here = number % ranks.size == ranks.rank and error is None
        part: dict[str, Tensor] = {}
        for name in names:
            # Collective: a rank whose disk is full still takes part in it.
            with torch.no_grad():
                own = tensors[name].detach()
                whole = own.full_tensor() if isinstance(own, DTensor) else own
            try:
                if writes_here and error is None:
                    part[name] = whole.cpu()
            # Shared with the other ranks after the loop: the host may be out of memory or out of disk.
            except Exception as e:
                error = e
                part.clear()
            del own, whole
        try:
            if writes_here and error is None:
                write_file(folder / file, part)
        except Exception as e:
            error = e

    with collectives.share_errors(ranks):
        if error is not None:
            raise error
        if plan.is_sharded and ranks.is_leader:
            write_index(folder, stem, plan)


def write_shards(folder: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Collective; writes every rank's shards into a new folder, fsynced. Raises StorageFailed."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=ranks.control)
    except CheckpointException as e:
        rank, (why, _) = min(e.failures.items())
        if isinstance(why, OSError) or "SafetensorError" in type(why).__name__:
            raise _write_failed(folder, why) from e  # type: ignore[arg-type]
        raise ServerFault(f"{folder} cannot be written by rank {rank}: {type(why).__name__}: {why}") from e
    except RuntimeError as e:
        # dcp reports its own errors as CheckpointException, so that this one comes from a lost connection.
        raise RanksLost(f"another rank was lost: {first_line(e)}") from e


# ------------------------------------------------------------------------------------------- reading whole tensors


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in the file; raises CheckpointError if there is none."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}", "load another checkpoint") from e
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object", "load another checkpoint")
    return data


def open_tensors(folder: Path, stem: str) -> dict[str, StoredTensor]:
    """Opens the tensors that `write_tensors` wrote, by name and not yet read; raises CheckpointError if they are
    missing.
    """
    files = sorted(folder.glob(f"{stem}*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no {stem}.safetensors", "load another checkpoint")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= open_safetensors(file)
    return tensors


def check_shapes(found: dict[str, tuple[int, ...]], own: dict[str, Tensor], folder: Path) -> None:
    """Raises CheckpointError unless names and shapes are those of the model's own tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder} is of another model: {name} is {found.get(name, 'absent')} there, "
            f"{shapes.get(name, 'absent')} here",
            "start with the model and the settings that it was made with",
        )


# ------------------------------------------------------------------------------------------- reading shards


def shapes_of_shards(folder: Path, own: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in a folder that `write_shards` wrote; `own` are the tensors to read it into.

    Raises CheckpointError if a file is damaged or a shard is missing.
    """
    for file in sorted(folder.glob("*.safetensors")):
        open_safetensors(file)  # raises the error that names the damaged file
    metadata: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    if not metadata:
        raise CheckpointError(f"{folder} has no tensor files", "load another checkpoint")
    for name, found in metadata.items():
        num_read = sum(math.prod(chunk.sizes) for chunk in found.chunks)
        # Files do not show that shards after the last stored one are missing: the model's own shape counts then.
        expected, whole = tuple(found.size), tuple(own[name].shape) if name in own else ()
        if len(expected) == len(whole) and all(a <= b for a, b in zip(expected, whole, strict=True)):
            expected = whole
        if num_read != math.prod(expected):
            raise CheckpointError(
                f"{folder} holds {num_read} of the {math.prod(expected)} values of {name}: files are missing",
                "copy the whole checkpoint, or load another",
            )
    return {name: tuple(found.size) for name, found in metadata.items()}


def read_into(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Overwrites the tensors, whole or sharded, with those of the same names in the folder's files.

    Each rank reads by itself. Raises CheckpointError if a file cannot be read; some tensors are overwritten then.
    """
    try:
        with warnings.catch_warnings():
            # Each rank reads by itself on purpose.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as e:
        why = next(iter(e.failures.values()))[0]
        raise CheckpointError(f"{folder} cannot be read: {why}", "load another checkpoint") from e
