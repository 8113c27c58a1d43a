"""Picks a model's device and dtype, and checks whether it fits into memory there."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from guerdon import memory
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.stored import StoredCheckpoint
from guerdon.errors import ConfigError, TooLarge

SMALLER_TRAINING = "train with lora, optimizer adamw_8bit or activation_checkpointing, or take a smaller model"
"""Advice if there is not enough memory to train."""


def pick_device(name: str) -> torch.device:
    """Returns the device of that name, for `auto` the first GPU, else the CPU; raises ConfigError if there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # Without the backend torch raises RuntimeError or AssertionError, for an unknown name RuntimeError.
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise ConfigError(f"there is no device {name!r} here", "use --device cpu, or auto") from e
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the trunk's dtype; `auto` is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def check_memory(
    checkpoint: StoredCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    moment_bytes: int | None = None,
    *,
    with_copy: bool = False,
    ranks: Ranks = ALONE,
) -> None:
    """Raises TooLarge if the weights in `dtype` do not fit into the free memory of the host or of the device.

    Weights for a GPU pass through the host's memory, too. If all of them will be trained, `moment_bytes` are the
    optimiser's moments for each weight; gradients and float32 masters come on top. `with_copy` counts the weights twice
    on a CPU; on a GPU without room the copy stays in the host's memory. Each of `ranks` may need only a shard, and the
    ranks of one host share its memory.
    """
    parts = ranks.tensor_size * (ranks.data_size if ranks.fsdp else 1)
    hosts = [member.machine or member.host for member in ranks.members]
    neighbours = hosts.count(hosts[ranks.rank]) if hosts else 1
    num_all = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    num_weights = math.ceil(num_all / parts)
    own_bytes, training_bytes = num_weights * dtype.itemsize, 0
    if moment_bytes is not None:
        master_bytes = 0 if dtype == torch.float32 else 4
        training_bytes = num_weights * (master_bytes + 4 + moment_bytes)
    copy_bytes = own_bytes if with_copy else 0
    on_gpu = device.type == "cuda"
    # An adapter is merged in float32, by each rank.
    merging_bytes = 0 if checkpoint.adapter is None else 4 * num_all
    host_bytes = own_bytes + merging_bytes + (0 if on_gpu else training_bytes + copy_bytes)
    free_here = _host_bytes()
    if free_here is not None and host_bytes * neighbours > free_here:
        memory.release()  # memory that malloc keeps for the next batch counts as used
        free_here = _host_bytes()
    places = [("this machine", free_here, host_bytes * neighbours)]
    if on_gpu:
        needed_there = own_bytes + training_bytes
        places.append((str(device), gpu_bytes(device, needed_there), needed_there))
    for place, free_bytes, needed_bytes in places:
        if free_bytes is not None and needed_bytes > free_bytes:
            what = "" if moment_bytes is None else " with its optimiser's state"
            what += " and a frozen copy" if with_copy else ""
            what += " and to merge its adapter" if merging_bytes else ""
            remedy = "free some, choose another machine or --device, or a smaller --dtype such as bfloat16"
            if merging_bytes:
                remedy = "merge it once, by `guerdon convert`, where there is more memory"
            raise TooLarge(
                f"{checkpoint.folder} needs about {needed_bytes / 2**30:.1f} GiB in {dtype_name(dtype)}{what}, "
                f"{free_bytes / 2**30:.1f} GiB are free on {place}",
                remedy if moment_bytes is None else SMALLER_TRAINING,
            )


def gpu_bytes(device: torch.device, wanted_bytes: int) -> int:
    """Returns the GPU's free bytes; empties PyTorch's cache first if they are fewer than wanted."""
    free_bytes = torch.cuda.mem_get_info(device)[0]
    if free_bytes < wanted_bytes:
        memory.release()
        free_bytes = torch.cuda.mem_get_info(device)[0]
    return free_bytes


def _host_bytes() -> int | None:
    """Returns the bytes that this process may still allocate, by kernel and cgroup; None except on Linux."""
    try:
        available = _fields(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    except OSError:
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        cached = _fields(group / "memory.stat")
    except OSError:
        return available
    if limit == "max":
        return available
    # The page cache counts as used, but is reclaimable.
    return min(available, int(limit) - used + cached["active_file"] + cached["inactive_file"])


def _fields(path: Path) -> dict[str, int]:
    """Returns the numbers of a file of lines `name number ...`."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}
