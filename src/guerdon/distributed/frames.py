"""Broadcast, gather and all-gather of bytes, with as few collectives as possible.

A message travels as a block of fixed size that begins with the message's length; what does not fit follows. So most
commands and results take one collective each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _get_object_coll_device

from guerdon.distributed import portable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_HEAD_BYTES = 8
_DOWN_BYTES, _UP_BYTES = 1 << 16, 1 << 14
"""Block sizes from rank 0 to all, and from each rank to rank 0."""


def send_to_all(data: bytes, group: ProcessGroup) -> None:
    """Broadcasts from rank 0; collective with `receive` on the others."""
    block, rest = _blocks(data, _DOWN_BYTES)
    distributed.broadcast(block, src=0, group=group)
    if len(rest):
        distributed.broadcast(rest, src=0, group=group)


def receive(group: ProcessGroup) -> bytes:
    """Receives what rank 0 broadcasts."""
    block = torch.empty(_DOWN_BYTES, dtype=torch.uint8)
    distributed.broadcast(block, src=0, group=group)
    size, data = _read(block)
    if size <= len(data):
        return data[:size]
    rest = torch.empty(size - len(data), dtype=torch.uint8)
    distributed.broadcast(rest, src=0, group=group)
    return data + rest.numpy().tobytes()


def send_to_leader(data: bytes, group: ProcessGroup) -> None:
    """Sends to rank 0; collective with `gather` there."""
    block, rest = _blocks(data, _UP_BYTES)
    distributed.gather(block, dst=0, group=group)
    if len(rest):
        distributed.send(rest, dst=0, group=group)


def gather(group: ProcessGroup) -> list[bytes]:
    """Returns on rank 0 the others' data, by rank; rank 0's own entry is empty."""
    size = distributed.get_world_size(group)
    own, _ = _blocks(b"", _UP_BYTES)
    blocks = [torch.empty_like(own) for _ in range(size)]
    distributed.gather(own, blocks, dst=0, group=group)
    messages = []
    for rank, block in enumerate(blocks):
        length, data = _read(block)
        if length > len(data):
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            distributed.recv(rest, src=rank, group=group)
            data += rest.numpy().tobytes()
        messages.append(data[:length])
    return messages


def exchange(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """All-gathers objects: returns every rank's value, by rank. Collective.

    Raises UnpicklingError if a value is not plain data, after all values were exchanged.
    """
    device = torch.device(_get_object_coll_device(group))  # a group of GPUs may have no way over the CPU
    own = torch.frombuffer(bytearray(portable.dumps(value)), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    tables = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(tables, padded, group=group)
    found = [table[: int(size)].cpu().numpy().tobytes() for table, size in zip(tables, sizes, strict=True)]
    return [portable.loads(data) for data in found]


def _blocks(data: bytes, size_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the block of that size, and the rest of the message, which may be empty."""
    room = size_bytes - _HEAD_BYTES
    block = bytearray(size_bytes)
    block[:_HEAD_BYTES] = len(data).to_bytes(_HEAD_BYTES, "little")
    first = data[:room]
    block[_HEAD_BYTES : _HEAD_BYTES + len(first)] = first
    rest = bytearray(data[room:])
    return torch.frombuffer(block, dtype=torch.uint8), (
        torch.frombuffer(rest, dtype=torch.uint8) if rest else torch.empty(0, dtype=torch.uint8)
    )


def _read(block: torch.Tensor) -> tuple[int, bytes]:
    """Returns the message's length, and as much of it as the block holds."""
    data = block.numpy().tobytes()
    return int.from_bytes(data[:_HEAD_BYTES], "little"), data[_HEAD_BYTES:]
