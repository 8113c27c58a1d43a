"""Collectives of the trainers: rows of each rank, shared errors, sums over ranks, and the gradient's norm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from guerdon.distributed.ranks import Ranks
from guerdon.distributed.shards import shards
from guerdon.training.algorithms.masking import Sums

BUCKET_BYTES = 32 << 20
"""Gradients are summed in buckets of this size, because each all-reduce costs a network round trip."""
DATA, TENSOR = "fsdp", "tp"  # the mesh dimensions of a sharded parameter

S = TypeVar("S", bound=Sums)


# ------------------------------------------------------------------------------------------- rows, errors, numbers


def rows_of_this_rank(rows: list[np.ndarray], ranks: Ranks) -> list[int]:
    """Returns the indices of the rows that this rank computes."""
    return shards(rows, ranks.data_size)[ranks.data_rank]


@contextlib.contextmanager
def share_errors(ranks: Ranks) -> Iterator[None]:
    """Collective; re-raises the first failing rank's error, named by that rank, on every rank.

    Raises RanksLost if a rank is gone. A single process raises its own error unchanged.
    """
    if ranks.size == 1:
        yield
        return
    own_error = None
    try:
        yield
    except Exception as e:
        # Drops this generator's frame: from Python 3.12 on it keeps its caller's, which keeps the error.
        own_error = e.with_traceback(None if e.__traceback__ is None else e.__traceback__.tb_next)
    errors = ranks.tell_all(None if own_error is None else ranks.portable(own_error))
    if (first := next((error for error in errors if error is not None), None)) is not None:
        try:
            raise first from own_error
        finally:
            # Breaks the reference cycle between the errors and their frames, which hold the block's tensors.
            del first, own_error, errors


def sum_over_parts(sums: S, ranks: Ranks) -> S:
    """Collective; returns the sums over all data-parallel ranks."""
    if ranks.data_size == 1:
        return sums
    return type(sums)(*ranks.total(astuple(sums)).tolist())


def sum_tables(table: Tensor, ranks: Ranks) -> None:
    """Collective; sums the tables of all data-parallel ranks in place.

    Each rank fills in its own rows and leaves the others 0.
    """
    if ranks.data_size > 1:
        distributed.all_reduce(table, group=ranks.data_group)


# ------------------------------------------------------------------------------------------- sharded parameters


@torch.no_grad()
def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor without a copy, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def local_gradient(parameter: Tensor) -> Tensor | None:
    """Returns this rank's shard of the parameter's gradient without a copy, laid out as the parameter is."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:
        # Assigned to the parameter, because that is the gradient which is then summed over ranks.
        moved = gradient.redistribute(parameter.device_mesh, parameter.placements).to_local()
        part = moved.wait() if isinstance(moved, AsyncCollectiveTensor) else moved
        parameter.grad = as_distributed(part, parameter)
        return part
    return gradient.to_local()


def as_distributed(part: Tensor, like: Tensor) -> Tensor:
    """Returns the distributed tensor whose shard on this rank is `part`, laid out as the parameter `like`.

    Returns `part` itself if `like` is not sharded.
    """
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_sharded_over(tensor: Tensor, dimension: str) -> bool:
    """Whether the ranks along that mesh dimension hold different shards of the tensor."""
    names = (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()
    return dimension in names and not tensor.placements[names.index(dimension)].is_replicate()  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------- gradients


def sum_gradients(gradients: Iterable[Tensor], group: ProcessGroup) -> None:
    """Collective; sums each gradient over the group in place. All ranks must pass the same ones in the same order."""
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


def gradient_norm(gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], ranks: Ranks) -> float:
    """Collective; returns the norm of all ranks' gradients together, bitwise equal on every rank because all decide by
    it.

    `gradients` are this rank's shards by the parameters' names. A shard that several ranks hold counts once.
    """

    def counts_here(parameter: Tensor) -> bool:
        of_data = ranks.data_rank == 0 or is_sharded_over(parameter, DATA)
        return of_data and (ranks.tensor_rank == 0 or is_sharded_over(parameter, TENSOR))

    counted = [gradient for name, gradient in gradients.items() if counts_here(parameters[name])]
    norm = torch.nn.utils.get_total_norm(counted).item() if counted else 0.0
    square = torch.tensor(norm, dtype=torch.float64).square()
    distributed.all_reduce(square, group=ranks.control)
    return float(square.sqrt())
