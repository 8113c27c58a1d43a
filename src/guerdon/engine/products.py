"""Measures how fast this processor multiplies matrices: not every one has units for bfloat16 or float16.

Without them torch converts the numbers back and forth, and half precision takes several times as long as float32.
"""

from __future__ import annotations

import functools
import logging
import time

import torch

from guerdon.engine import linear

_SHAPE = (256, 576, 1536)
"""Rows, inputs and outputs of the measured product: a small language model's, for a batch of some sequences."""
_SECONDS = 0.05
_MUCH_SLOWER = 1.5
"""From this factor on, half precision is warned of: below it, half the memory may be worth the time."""

log = logging.getLogger(__name__)


@functools.cache
def flops_per_second(dtype: torch.dtype) -> float:
    """Returns the FLOP/s of products in `dtype` on the CPU, by the fastest of 50 ms of tries; measured once."""
    rows, inputs, outputs = _SHAPE
    x, weight = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    product = linear.product if linear.is_faster() else torch.nn.functional.linear  # as the engine computes
    fastest, end = float("inf"), time.perf_counter() + _SECONDS
    with torch.inference_mode():
        product(x, weight, None)  # the first call chooses and prepares a kernel
        while time.perf_counter() < end or fastest == float("inf"):
            started = time.perf_counter()
            product(x, weight, None)
            fastest = min(fastest, time.perf_counter() - started)
    return 2 * rows * inputs * outputs / fastest


def warn_if_slow(dtype: torch.dtype, device: torch.device) -> None:
    """Logs a warning with the measured factor if half precision is much slower than float32 on this CPU."""
    if device.type != "cpu" or dtype == torch.float32:
        return
    factor = flops_per_second(torch.float32) / flops_per_second(dtype)
    if factor >= _MUCH_SLOWER:
        name = str(dtype).removeprefix("torch.")
        log.warning(
            "%s takes %.1f times as long as float32 on this processor, which has no fast products for it; "
            "--dtype float32 is faster and takes twice the memory",
            name,
            factor,
        )
