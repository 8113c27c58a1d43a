"""The threads that OpenMP computes with on a CPU: each thread of Python's that computes has a pool of its own.

Between two operators a pool's threads wait actively for a while. Where there are more of them than cores, counting
those of other pools that have nothing to do, libgomp lets all sleep at once, and waking them takes longer than many an
operator.
"""

from __future__ import annotations

import ctypes
import os

_SOFT = 1
"""`omp_pause_soft`: what is given up comes back where it is needed."""


def end_pool() -> None:
    """Ends the pool of the calling thread, which is to compute no more; where there is none, nothing changes."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if os.name == "posix" else None
    if pause is not None:
        pause(_SOFT)
