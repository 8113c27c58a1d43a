"""Tunes the C library and OpenMP for models on a CPU: freed memory that malloc keeps, and threads that spin briefly.

**Memory.** A forward allocates and frees the same large blocks in every layer. By default glibc returns blocks of more
than 32 MiB to the kernel when they are freed, and in any thread but the main one maps each block that exceeds a heap of
64 MiB: allocated again, each page costs a page fault and is zeroed. malloc's cache grows until it fits every batch
size; it is released when a model is unloaded or memory is short (`computing.release`).

**Threads.** Each Python thread that computes has its own pool of OpenMP threads. Between two operators the threads of a
pool spin for a while before they sleep. If there are more threads than cores, idle pools included, libgomp puts all of
them to sleep at once, and waking them takes longer than a small operator. If another process needs the core of one
thread, the others spin at the barrier in vain, for longer than that process's time slice would have taken. So threads
that compute at the same time on the CPU divide its cores.

Importing this does not import torch: `limit_spinning` only works before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of mallopt, from malloc.h."""
_NEVER = -1
"""Value of M_TRIM_THRESHOLD that disables trimming the top of the heap."""
_MMAP_THRESHOLDS = (1 << 30, 1 << 25)
"""Bytes from which malloc maps a block; older versions of glibc accept 32 MiB at most."""
_WEIGHT = 1 << 18
"""Bytes from which a block is mapped while `mapping_blocks`."""
_TUNABLES = {
    "thresholds": ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad"),
    "arenas": ("arena_max", "arena_test"),
}
"""The settings of glibc with which the environment overrides ours."""

_SOFT = 1
"""`omp_pause_soft`: the pool comes back when it is needed."""
_SPIN_COUNT = "1000"
"""Iterations that a thread spins before it sleeps; measured, see docs/engine.md. libgomp's own default is 300,000."""


def keep_freed(device: torch.device) -> None:
    """Makes malloc keep the memory that models on a CPU free, for the whole process; a no-op for other devices.

    Call it before the process starts threads. It changes nothing if the C library is not glibc, or if the environment
    has `MALLOC_*` variables or GLIBC_TUNABLES for the same settings.
    """
    if device.type == "cpu":
        _keep_freed()


@functools.cache
def _keep_freed() -> None:
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    if not _is_in_environment("thresholds"):
        mallopt(_TRIM_THRESHOLD, _NEVER)
        _map_few_blocks()
    if not _is_in_environment("arenas"):
        # Heaps of other arenas have 64 MiB: larger blocks would be mapped and unmapped each time.
        mallopt(_ARENA_MAX, 1)


def _map_few_blocks() -> None:
    any(ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS)


@contextlib.contextmanager
def mapping_blocks() -> Iterator[None]:
    """Makes malloc map each larger block apart, a no-op where `keep_freed` is.

    For weights that take the place of others: in the heap they would leave gaps that fit no batch, and batches would
    make it grow by as much.
    """
    if _keep_freed.cache_info().currsize == 0 or platform.libc_ver()[0] != "glibc" or _is_in_environment("thresholds"):
        yield
        return
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _WEIGHT)
    try:
        yield
    finally:
        _map_few_blocks()


def _is_in_environment(what: str) -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    names = _TUNABLES[what]
    # The older variables end with an underscore, except MALLOC_ARENA_MAX and MALLOC_ARENA_TEST.
    variables = {f"MALLOC_{name.upper()}{end}" for name in names for end in ("", "_")}
    return not variables.isdisjoint(os.environ) or any(f"glibc.malloc.{name}" in tunables for name in names)


def limit_spinning() -> None:
    """Makes libgomp's threads spin briefly, unless the environment sets it or torch is already imported.

    libgomp reads the setting when it is loaded, which torch does on import. Child processes inherit it.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() and "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def divide_cores(num_loops: int) -> None:
    """Divides torch's threads by the number of threads that will compute on the CPU at the same time.

    It holds for this thread and for those that are started later. Call it before computing anything whose bits matter:
    with another number of threads sums may be added in another order.
    """
    import torch

    torch.set_num_threads(max(1, _num_threads() // num_loops))


@functools.cache
def _num_threads() -> int:
    """Returns torch's threads before they were divided for the first time."""
    import torch

    return torch.get_num_threads()


def end_pool() -> None:
    """Ends the calling thread's pool when it has nothing more to compute; a no-op if it has none."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if os.name == "posix" else None
    if pause is not None:
        pause(_SOFT)
