"""Decides which ranks a command starts on this host, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass

from guerdon.distributed.ranks import check_device
from guerdon.errors import ConfigError
from guerdon.settings.config import ParallelConfig

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of one host: `data_size` parts of `tensor_size` ranks each, on GPUs or on the CPU."""

    data_size: int
    tensor_size: int
    on_gpu: bool
    num_threads: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data_size * self.tensor_size

    def __str__(self) -> str:
        parts = f"{self.data_size} data-parallel x {self.tensor_size} tensor-parallel"
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''} each"
        return f"{self.size} ranks: {parts}, {'one GPU each' if self.on_gpu else 'on cpu'}, {threads}"


def wants_ranks(config: ParallelConfig) -> bool:
    """Returns whether this process must start ranks: the settings ask for several, and no launcher has started it."""
    return "WORLD_SIZE" not in os.environ and (config.tensor_parallel * (config.data_parallel or 1) > 1 or config.fsdp)


def choose_layout(config: ParallelConfig, device: str) -> Layout:
    """Returns the ranks that the settings ask for; raises ConfigError if this machine has too few GPUs for them.

    `device` is `auto`, `cpu` or `cuda`. `fsdp` without `data_parallel` takes all GPUs.
    """
    check_device(device)
    num_gpus = 0
    if device != "cpu":
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    layout = fit(config, num_gpus=num_gpus, num_cores=num_cores)
    if device == "cuda" and not layout.on_gpu:
        raise ConfigError("device is cuda, and torch sees no GPU", "use --device cpu, or auto")
    return layout


def fit(config: ParallelConfig, *, num_gpus: int, num_cores: int) -> Layout:
    """Returns the ranks for a machine with `num_gpus`, or for its `num_cores` if it has none; raises ConfigError."""
    tensor_size, data_size = config.tensor_parallel, config.data_parallel
    if data_size is None and config.fsdp:
        if not num_gpus:
            raise ConfigError("fsdp is on, and there are no GPUs to share", "say how many ranks: --data-parallel 2")
        data_size = max(1, num_gpus // tensor_size)
    size = tensor_size * (data_size or 1)
    if size == 1:
        raise ConfigError("fsdp is on, and there is one rank", "leave it out, or give --data-parallel 2 or more")
    if num_gpus and size > num_gpus:
        # The most ranks that fit; a divisor of `tensor_size` divides the model's heads as well.
        tensor_size = max(count for count in range(1, num_gpus + 1) if tensor_size % count == 0)
        counts = {"tensor": tensor_size, "data": min(data_size or 1, num_gpus // tensor_size)}
        flags = " ".join(f"--{name}-parallel {count}" for name, count in counts.items() if count > 1)
        advice = f"give {flags}" if flags else "leave out --tensor-parallel, --data-parallel and --fsdp"
        raise ConfigError(f"{size} ranks need a GPU each, and torch sees {num_gpus}", f"{advice}, or --device cpu")
    given = os.environ.get(THREADS, "")
    num_threads = int(given) if given.isdecimal() else max(1, num_cores // size)
    return Layout(data_size or 1, tensor_size, num_gpus > 0, num_threads)
