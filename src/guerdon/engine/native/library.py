"""Finds the compiled kernels for this processor, and loads them beside the OpenMP runtime that PyTorch has loaded.

The kernels are one source in C++, compiled for each level of instructions when the package is built. Numba, Triton's
CPU back end and torch.compile would each bring a compiler to the user's machine, or minutes of compiling at start.

They are linked without an OpenMP runtime: a second one in the process would have threads of its own, which would wait
for the same cores. PyTorch's is opened again, so that its symbols become visible to the kernels.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

_LEVELS = {"AVX512": "avx512", "AVX2": "avx2"}
"""Which build serves which of PyTorch's levels, which obey ATEN_CPU_CAPABILITY; all others the baseline.

With AVX512-BF16, which PyTorch has no level for, `avx512_bf16` serves, unless ATEN_CPU_CAPABILITY names avx512.
"""


@functools.cache
def find() -> tuple[ctypes.CDLL | None, str]:
    """Returns the kernels for this processor and the name of their build, or None and why there are none."""
    build = _LEVELS.get(torch.backends.cpu.get_cpu_capability(), "baseline")
    path = Path(__file__).with_name(f"kernels_{build}.so")
    if (
        build == "avx512"
        and os.environ.get("ATEN_CPU_CAPABILITY") != "avx512"
        and torch.cpu._is_avx512_bf16_supported()
    ):
        faster = path.with_name("kernels_avx512_bf16.so")  # an older compiler makes none
        build, path = ("avx512_bf16", faster) if faster.is_file() else (build, path)
    if not path.is_file():
        return None, "guerdon was installed without a C++ compiler"
    runtime = _openmp()
    if runtime is None:
        return None, "PyTorch has not loaded libgomp here"
    try:
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path)), build
    except OSError as e:  # built for another machine or libc
        return None, str(e)


def kernels() -> ctypes.CDLL | None:
    """Returns the kernels for this processor, None if there are none."""
    return find()[0]


def _openmp() -> Path | None:
    """Returns the libgomp that is loaded, PyTorch's own if there are several."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return None
    files = [line.split(maxsplit=5)[5] for line in lines if "libgomp" in line]
    own = str(Path(torch.__file__).parent)
    return Path(min(files, key=lambda file: not file.startswith(own))) if files else None


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kernels' numbers for dtypes."""
