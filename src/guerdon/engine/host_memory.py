"""What the C library does with memory that a model on a CPU is done with: it keeps it for the next batch.

A forward takes and frees the same large blocks in every layer. glibc by itself gives blocks of more than 32 MiB back to
the kernel when they are freed, and on any thread but the main one maps each that does not fit a heap of 64 MiB: taken
again, it is page by page a fault and a zeroed page. What is kept grows until each size of batch has found its place; it
goes back where a model is given up, or memory seems short (`computing.release`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""mallopt's names of them, as malloc.h has them."""
_NEVER = -1
"""Tells mallopt that of free memory at the end of the heap nothing goes back by itself."""
_LARGEST_BLOCKS = (1 << 30, 1 << 25)
"""From this size on a block lies outside the heap, and goes back when it is free; older ones take 32 MiB at most."""
_SETTLED = {
    "thresholds": ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad"),
    "arenas": ("arena_max", "arena_test"),
}
"""The settings of glibc's by which whoever starts this process may have decided the same."""


def keep_freed(device: torch.device) -> None:
    """Has malloc keep what models on a CPU free, from now on and for this whole process; for a GPU changes nothing.

    Best before this process has threads. Where the C library is not glibc, or the environment has settled it by
    variables `MALLOC_*_` or by GLIBC_TUNABLES, all stays as it is.
    """
    if device.type == "cpu":
        _keep_freed()


@functools.cache
def _keep_freed() -> None:
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    if not _is_settled("thresholds"):
        mallopt(_TRIM_THRESHOLD, _NEVER)
        any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST_BLOCKS)
    if not _is_settled("arenas"):
        # A thread's own heaps are of 64 MiB: what does not fit one would be mapped and given back each time.
        mallopt(_ARENA_MAX, 1)


def _is_settled(what: str) -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    names = _SETTLED[what]
    # The older variables end with an underscore, but for MALLOC_ARENA_MAX and MALLOC_ARENA_TEST.
    variables = {f"MALLOC_{name.upper()}{end}" for name in names for end in ("", "_")}
    return not variables.isdisjoint(os.environ) or any(f"glibc.malloc.{name}" in tunables for name in names)
