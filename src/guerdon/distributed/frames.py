"""Bytes from rank 0 to all others, and from each of them back, by as few collectives as will do; and from all to all.

What is sent travels as a block of a fixed size, which begins with its length; what the block does not hold follows it.
So most commands and results take one collective each.
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
"""Of a block to all ranks, and of one to rank 0, which is sent one by each."""


def send_to_all(data: bytes, group: ProcessGroup) -> None:
    """Sends it from rank 0; the others must call `receive`."""
    block, rest = _blocks(data, _DOWN_BYTES)
    distributed.broadcast(block, src=0, group=group)
    if len(rest):
        distributed.broadcast(rest, src=0, group=group)


def receive(group: ProcessGroup) -> bytes:
    """What rank 0 sends."""
    block = torch.empty(_DOWN_BYTES, dtype=torch.uint8)
    distributed.broadcast(block, src=0, group=group)
    size, data = _read(block)
    if size <= len(data):
        return data[:size]
    rest = torch.empty(size - len(data), dtype=torch.uint8)
    distributed.broadcast(rest, src=0, group=group)
    return data + rest.numpy().tobytes()


def send_to_leader(data: bytes, group: ProcessGroup) -> None:
    """Sends it to rank 0, which must call `gather`, as all others must call this."""
    block, rest = _blocks(data, _UP_BYTES)
    distributed.gather(block, dst=0, group=group)
    if len(rest):
        distributed.send(rest, dst=0, group=group)


def gather(group: ProcessGroup) -> list[bytes]:
    """What the other ranks send, by rank; rank 0's own place is empty."""
    size = distributed.get_world_size(group)
    own, _ = _blocks(b"", _UP_BYTES)
    blocks = [torch.empty_like(own) for _ in range(size)]
    distributed.gather(own, blocks, dst=0, group=group)
    told = []
    for rank, block in enumerate(blocks):
        length, data = _read(block)
        if length > len(data):
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            distributed.recv(rest, src=rank, group=group)
            data += rest.numpy().tobytes()
        told.append(data[:length])
    return told


def exchange(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """What all ranks of the group, which must call it, give: each reads all others' values, by rank.

    Raises UnpicklingError where one gives what is no data; all values have been exchanged then.
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
    """The block of that size, and what follows it, which may be nothing."""
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
    """The object's length, and as much of it as the block has room for."""
    data = block.numpy().tobytes()
    return int.from_bytes(data[:_HEAD_BYTES], "little"), data[_HEAD_BYTES:]
