"""Arrays from the host to the model's device, without waiting for what the device does.

Out of ordinary memory CUDA copies only once all that was asked of it before is done, and is idle afterwards, until the
next forward has been launched. A copy out of pinned memory takes its place in the queue as a kernel does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on the device; on a CPU it is the array's own memory, which must be writable."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def all_to_device(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of one dtype and one dimension, by one copy; the tensors share no memory with them."""
    together = to_device(np.concatenate(arrays), device)
    return list(together.split([len(array) for array in arrays]))
