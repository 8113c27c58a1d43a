"""What a trainer's ranks do together: each its part of a batch, sums over all parts, and one outcome for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from guerdon.distributed.ranks import Ranks
from guerdon.distributed.shards import shards
from guerdon.training.algorithms.masking import Sums

BUCKET_BYTES = 32 << 20
"""Gradients smaller than that are summed together, for each sum by itself costs a round through the network."""
DATA, TENSOR = "fsdp", "tp"
"""The dimensions of a sharded parameter's mesh."""

T = TypeVar("T")
S = TypeVar("S", bound=Sums)


# ------------------------------------------------------------------------------------------- rows, outcomes, numbers


def own_part(rows: list[np.ndarray], ranks: Ranks) -> list[int]:
    """The numbers of those of the rows that this rank computes."""
    return shards(rows, ranks.data_size)[ranks.data_rank]


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns on this rank, once it has succeeded on all of them; all must call it, in the same place.

    Else every rank raises the same, what befell the first of those that failed, named by its rank; RanksLost where one
    is not there to tell. A process by itself raises what `work` does.
    """
    if ranks.size == 1:
        return work()
    made: Any = None
    error = None
    try:
        made = work()
    # Whatever a device, a disk or a model raises: the others must hear of it.
    except Exception as e:
        error = e
    told = ranks.tell_all(None if error is None else ranks.portable(error))
    if (first := next((other for other in told if other is not None), None)) is not None:
        try:
            raise first from error
        finally:
            # Else the errors and their frames, in which the tensors of `work` are, would hold each other until a
            # collection.
            del first, error, told
    return made


def sum_over_parts(sums: S, ranks: Ranks) -> S:
    """The sums over all data-parallel ranks' parts, the same on every rank."""
    if ranks.data_size == 1:
        return sums
    return type(sums)(*ranks.total(astuple(sums)).tolist())


def add_up(table: Tensor, ranks: Ranks) -> None:
    """Adds up all data-parallel ranks' tables in place: each has its own rows filled in, and the others 0."""
    if ranks.data_size > 1:
        distributed.all_reduce(table, group=ranks.data_group)


# ------------------------------------------------------------------------------------------- sharded parameters


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the very memory, and all of it where it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's part of the parameter's gradient, the very memory, laid out as the parameter is."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:
        # Put in its place, for whoever sums it over ranks must do that to the parameter's own.
        moved = gradient.redistribute(parameter.device_mesh, parameter.placements).to_local()
        part = moved.wait() if isinstance(moved, AsyncCollectiveTensor) else moved
        parameter.grad = whole_of(part, parameter)
        return part
    return gradient.to_local()


def whole_of(part: Tensor, like: Tensor) -> Tensor:
    """The tensor laid out as the parameter `like` whose part on this rank is `part`; that itself where it is whole."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_sharded_over(tensor: Tensor, dimension: str) -> bool:
    """Whether the ranks of that dimension of its mesh hold different parts of the tensor."""
    return not _placement(tensor, dimension).is_replicate()


def _placement(tensor: Tensor, dimension: str) -> Placement:
    names = (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()
    return tensor.placements[names.index(dimension)] if dimension in names else Replicate()  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------- gradients


def sum_gradients(gradients: Iterable[Tensor], group: ProcessGroup) -> None:
    """Sums each of the gradients over the group in place; all ranks must give the same ones, in the same order."""
    bucket: list[Tensor] = []
    size_bytes = 0
    for gradient in gradients:
        bucket.append(gradient)
        size_bytes += gradient.numel() * gradient.element_size()
        if size_bytes >= BUCKET_BYTES:
            _sum_bucket(bucket, group)
            bucket, size_bytes = [], 0
    if bucket:
        _sum_bucket(bucket, group)


def _sum_bucket(bucket: list[Tensor], group: ProcessGroup) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        distributed.all_reduce(bucket[0], group=group)
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    distributed.all_reduce(flat, group=group)
    for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
        gradient.copy_(part.view_as(gradient))


def total_norm(gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], ranks: Ranks) -> float:
    """The norm of all ranks' gradients together, bitwise the same on every rank, as all decide by it.

    `gradients` are this rank's parts by the parameters' names. A part that several ranks have counts once.
    """
    counted = [gradient for name, gradient in gradients.items() if _counts_here(parameters[name], ranks)]
    norm = torch.nn.utils.get_total_norm(counted).item() if counted else 0.0
    square = torch.tensor(norm, dtype=torch.float64).square()
    distributed.all_reduce(square, group=ranks.control)
    return float(square.sqrt())


def _counts_here(parameter: Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the one of those with the same part of the parameter that counts it."""
    of_data = ranks.data_rank == 0 or is_sharded_over(parameter, DATA)
    return of_data and (ranks.tensor_rank == 0 or is_sharded_over(parameter, TENSOR))
