"""Manages OpenMP's threads on a CPU: each Python thread that computes has its own pool of them.

Between two operators the threads of a pool spin for a while before they sleep. If there are more threads than cores,
idle pools included, libgomp puts all of them to sleep at once, and waking them takes longer than a small operator.
If another process needs the core of one thread, the others spin at the barrier in vain, for longer than that process's
time slice would have taken.
"""

from __future__ import annotations

import ctypes
import os
import sys

_SOFT = 1
"""`omp_pause_soft`: what is given up comes back where it is needed."""


_SPIN_COUNT = "1000"
"""Iterations that a thread spins before it sleeps; measured, see docs/engine.md. libgomp's own default is 300,000."""


def limit_spinning() -> None:
    """Has libgomp's threads spin briefly, unless the environment says how long or torch is loaded already.

    libgomp reads the setting when it is loaded, which torch does on import. Child processes inherit it.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() and "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def end_pool() -> None:
    """Ends the pool of the calling thread, which will compute no more; a no-op if it has none."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if os.name == "posix" else None
    if pause is not None:
        pause(_SOFT)
