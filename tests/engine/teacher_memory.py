"""Prints by how many MiB a teacher's memory grows while it answers about 32,768 tokens; `test_teacher` runs it."""

import re
import sys
from pathlib import Path

import numpy as np
import torch

from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.teacher import TeacherEngine
from guerdon.settings.config import TeacherConfig
from guerdon.teacher_core import LogprobQuery

ASKED = LogprobQuery(top_k=20, with_entropy=True, with_ranks=True, given=np.arange(4))


def resident_mb(which: str) -> float:
    """Returns what is resident now, VmRSS, or was at most, VmHWM; `ru_maxrss` would begin at the parent process's."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    torch.set_num_threads(1)
    loaded = load_policy(TeacherConfig(model=sys.argv[1]))
    before = resident_mb("VmRSS")
    engine = TeacherEngine(loaded)
    rows = np.random.default_rng(0).integers(4, loaded.vocab_size, (8, 4097))
    results = engine.score([Sequence(row, ask=ASKED) for row in rows])
    assert all(isinstance(result, Score) for result in results)
    print(f"GROWN {resident_mb('VmHWM') - before:.0f}")


if __name__ == "__main__":
    main()
