"""Prints by how many MiB a teacher's memory grows while it answers about 32,768 tokens; `test_teacher` runs it."""

from __future__ import annotations

import resource
import sys

import numpy as np
import torch

from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.teacher import TeacherEngine
from guerdon.settings.config import TeacherConfig
from guerdon.teacher_core import LogprobQuery

ASKED = LogprobQuery(top_k=20, with_entropy=True, with_ranks=True, given=np.arange(4))


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def main() -> None:
    torch.set_num_threads(1)
    loaded = load_policy(TeacherConfig(model=sys.argv[1]))
    before = resident_mb()
    engine = TeacherEngine(loaded)
    rows = np.random.default_rng(0).integers(4, loaded.vocab_size, (8, 4097))
    results = engine.score([Sequence(row, query=ASKED) for row in rows])
    assert all(isinstance(result, Score) for result in results)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"GROWN {peak - before:.0f}")


if __name__ == "__main__":
    main()
