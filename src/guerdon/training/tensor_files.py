"""Tensors to safetensors files and back, whole or sharded over ranks by `torch.distributed.checkpoint`.

Weights are gathered into whole tensors, which any library can read. The optimiser's state, three times as large and of
no use to other libraries, stays sharded: all ranks write their shards at the same time. Both can be read with any
number of ranks, because each rank reads only the slices that it holds.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from guerdon.distributed.ranks import Ranks
from guerdon.engine.checkpoint.stored import StoredTensor, open_safetensors
from guerdon.errors import CheckpointError, RanksLost, ServerFault, StorageFailed
from guerdon.training import collectives

SHARD_BYTES = 4 << 30
"""Size of one file, which is gathered in host memory before it is written."""


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
    part = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(dict(_unshared(part)), path, metadata={"format": "pt"})
        _fsync(path)
    except (SafetensorError, OSError) as e:
        raise _write_failed(path, e) from e


def write_index(folder: Path, stem: str, plan: Any) -> None:
    """Writes the index of a stem's files, as planned by `huggingface_hub`; raises StorageFailed."""
    index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
    write_bytes(folder / f"{stem}.safetensors.index.json", to_json(index))


def _unshared(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Copies tensors that share memory, which safetensors refuses to write."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        yield name, tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())


def _fsync(path: Path) -> None:
    """Fsyncs a file that safetensors has written, and replaces its owner-only mode by the folder's."""
    path.chmod(path.parent.stat().st_mode & 0o666)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


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
            whole = _gathered(tensors[name])
            try:
                if writes_here and error is None:
                    part[name] = whole.cpu()
            # Shared with the other ranks after the loop: the host may be out of memory or out of disk.
            except Exception as e:
                error = e
                part.clear()
            del whole
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


@torch.no_grad()
def _gathered(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
        raise RanksLost(f"another rank was lost: {(str(e).splitlines() or [''])[0]}") from e


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


@torch.no_grad()
def copy_into(own: dict[str, Tensor], stored: dict[str, StoredTensor]) -> None:
    """Overwrites the model's own tensors with the stored ones of the same names."""
    for name, tensor in own.items():
        tensor.copy_(stored[name][...])


# ------------------------------------------------------------------------------------------- reading shards


class StoredShards:
    """A folder that `write_shards` wrote, with the shapes of its tensors."""

    def __init__(self, folder: Path, own: dict[str, Tensor]) -> None:
        """Raises CheckpointError if a file is damaged or a shard is missing.

        `own` are the tensors to read it into.
        """
        self.folder = folder
        metadata = _metadata(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, found in metadata.items():
            self.shapes[name] = tuple(found.size)
            num_read = sum(math.prod(chunk.sizes) for chunk in found.chunks)
            expected = _expected_shape(self.shapes[name], tuple(own[name].shape) if name in own else ())
            if num_read != math.prod(expected):
                raise CheckpointError(
                    f"{folder} holds {num_read} of the {math.prod(expected)} values of {name}: files are missing",
                    "copy the whole checkpoint, or load another",
                )


def _expected_shape(found: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that the files should cover: the stored one, or the model's own if the stored one is smaller.

    Files do not show that shards after the last stored one are missing.
    """
    is_short = len(found) == len(own) and all(a <= b for a, b in zip(found, own, strict=True))
    return own if is_short else found


def _metadata(folder: Path) -> dict[str, Any]:
    for file in sorted(folder.glob("*.safetensors")):
        open_safetensors(file)  # raises the error that names the damaged file
    found: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    if not found:
        raise CheckpointError(f"{folder} has no tensor files", "load another checkpoint")
    return found


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
