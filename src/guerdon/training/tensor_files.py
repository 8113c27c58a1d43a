"""Tensors that lie in parts on several ranks, to files and back, by `torch.distributed.checkpoint`.

Weights become whole ones, in the files that any library reads. The optimiser's state, which is three times as much
and of use to nobody else, stays in parts: every rank writes its own at the same time. Both can be read in any layout:
a rank reads those slices of the files that it holds.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from guerdon.distributed.ranks import Ranks
from guerdon.errors import CheckpointError, RanksLost, ServerFault
from guerdon.training import collectives, trainer_checkpoint


def is_sharded(tensors: dict[str, Tensor]) -> bool:
    """Whether any of them lies in parts."""
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


# ------------------------------------------------------------------------------------------- writing


def write_whole(folder: Path, stem: str, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Writes what `trainer_checkpoint.write_tensors` writes of the whole tensors; all ranks must call it.

    The ranks take turns by file: each gathers all parts of its own, and no rank holds more than a file of them. Raises
    StorageFailed, on every rank, where the disk of any does not take them; and at once where a rank cannot gather, for
    which the others wait.
    """
    on_paper = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    plan = split_torch_state_dict_into_shards(
        on_paper, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=trainer_checkpoint.SHARD_BYTES
    )
    error: Exception | None = None
    for number, (file, names) in enumerate(plan.filename_to_tensors.items()):
        is_own = number % ranks.size == ranks.rank and error is None
        part: dict[str, Tensor] = {}
        for name in names:
            # What gathers is a collective: a rank whose disk is full goes on with it.
            whole = _whole(tensors[name])
            try:
                if is_own and error is None:
                    part[name] = whole.cpu()
            # To be told to the others, once they are through, too: the host's memory, or below its disk.
            except Exception as e:
                error = e
                part.clear()
            del whole
        try:
            if is_own and error is None:
                trainer_checkpoint.write_file(folder / file, part)
        except Exception as e:
            error = e

    def finish() -> None:
        if error is not None:
            raise error
        if plan.is_sharded and ranks.is_leader:
            trainer_checkpoint.write_index(folder, stem, plan)

    collectives.together(ranks, finish)


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_parts(folder: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Writes every rank's own parts into a new folder, fsynced; all ranks must call it. Raises StorageFailed."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=ranks.control)
    except CheckpointException as e:
        rank, (why, _) = min(e.failures.items())
        if isinstance(why, OSError) or "SafetensorError" in type(why).__name__:
            raise trainer_checkpoint.storage_failed(folder, why) from e  # type: ignore[arg-type]
        raise ServerFault(f"{folder} cannot be written by rank {rank}: {type(why).__name__}: {why}") from e
    except RuntimeError as e:
        # What dcp does by itself on a rank it reports as above; this is a connection's.
        raise RanksLost(f"another rank was lost: {(str(e).splitlines() or [''])[0]}") from e


# ------------------------------------------------------------------------------------------- reading


class StoredParts:
    """A folder that `write_parts` wrote, whose shapes are known and whose files are open to be read."""

    def __init__(self, folder: Path, own: dict[str, Tensor]) -> None:
        """`own` are the tensors that it is to be read into.

        Raises CheckpointError where a file is damaged, or a part of a tensor is missing.
        """
        self.folder = folder
        metadata = _metadata(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, found in metadata.items():
            self.shapes[name] = tuple(found.size)
            num_read = sum(math.prod(chunk.sizes) for chunk in found.chunks)
            wanted = _wanted(self.shapes[name], tuple(own[name].shape) if name in own else ())
            if num_read != math.prod(wanted):
                raise CheckpointError(
                    f"{folder} holds {num_read} of the {math.prod(wanted)} numbers of {name}: files are missing",
                    "copy the whole checkpoint, or load another",
                )


def _wanted(found: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of which the files should have all: as far as their parts reach, or the model's own.

    That parts are missing behind the last one that is there does not show in the files.
    """
    is_short = len(found) == len(own) and all(a <= b for a, b in zip(found, own, strict=True))
    return own if is_short else found


def _metadata(folder: Path) -> dict[str, Any]:
    for file in sorted(folder.glob("*.safetensors")):
        trainer_checkpoint.open_safetensors(file)  # says what is damaged, and what to do
    found: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    if not found:
        raise CheckpointError(f"{folder} has no files of tensors", "load another checkpoint")
    return found


def read_into(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Overwrites the tensors, whole or this rank's parts of them, with those of the same names in the folder's files.

    Each rank reads by itself. Raises CheckpointError where a file cannot be read; some are overwritten then.
    """
    try:
        with warnings.catch_warnings():
            # That each rank reads by itself is what is wanted here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as e:
        why = next(iter(e.failures.values()))[0]
        raise CheckpointError(f"{folder} cannot be read: {why}", "load another checkpoint") from e
