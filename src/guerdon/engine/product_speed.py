"""Measures how fast this processor multiplies matrices: not every one has units for bfloat16 or float16.

Without them torch converts the numbers back and forth, and half precision takes several times as long as float32.
"""

from __future__ import annotations

import functools
import logging
import time

import torch

from guerdon.engine import onednn

_SHAPE = (256, 576, 1536)
"""Rows, inputs and outputs of the measured product: a small language model's, for a batch of some sequences."""
_SECONDS = 0.02
_MUCH_SLOWER = 1.5
"""From this factor on, half precision is warned of: below it, half the memory may be worth the time."""
_MUCH_FASTER = 1.3
"""From this factor on, bfloat16 is named to those who compute in float32."""

log = logging.getLogger(__name__)


@functools.cache
def flops_per_second(*dtypes: torch.dtype) -> tuple[float, ...]:
    """Returns the FLOP/s of products in each dtype on one core, by the fastest of 20 ms of tries; measured once.

    It counts the CPU time of one thread, which other processes on a busy machine hardly change.
    """
    rows, inputs, outputs = _SHAPE
    rates, num_threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for dtype in dtypes:
                x, weight = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
                onednn.product(x, weight, None)  # the first call chooses and prepares a kernel
                fastest, end = float("inf"), time.thread_time() + _SECONDS
                while (started := time.thread_time()) < end:
                    onednn.product(x, weight, None)
                    fastest = min(fastest, time.thread_time() - started)
                rates.append(2 * rows * inputs * outputs / fastest)
    finally:
        torch.set_num_threads(num_threads)
    return tuple(rates)


@functools.cache
def say_if_other_is_faster(dtype: torch.dtype, device: torch.device) -> None:
    """Logs once the measured factor if another dtype multiplies much faster than this one on this CPU, else nothing."""
    if device.type != "cpu":
        return
    if dtype == torch.float32:
        if torch.backends.cpu.get_cpu_capability() == "AVX2":
            return  # it has no units for bfloat16, and to measure that would take 0.15 s of the start
        base, half = flops_per_second(torch.float32, torch.bfloat16)
        if half / base >= _MUCH_FASTER:
            log.info(
                "--dtype bfloat16 would multiply %.1f times as fast as float32 on this processor, in half the memory; "
                "scores would be rounded",
                half / base,
            )
        return
    base, own = flops_per_second(torch.float32, dtype)
    if base / own >= _MUCH_SLOWER:
        log.warning(
            "%s takes %.1f times as long as float32 on this processor, which has no fast products for it; "
            "--dtype float32 is faster and takes twice the memory",
            str(dtype).removeprefix("torch."),
            base / own,
        )
