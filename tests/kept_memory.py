"""Measures how much memory a process that runs a model keeps after it is freed; prints it as JSON.

python kept_memory.py KIND FOLDER       the folder's checkpoint is a reward_model or a policy
python kept_memory.py nothing           no model: only the page faults after `keep_freed`, in a few rounds
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import torch

from guerdon.distributed import computing
from guerdon.engine.host import keep_freed
from guerdon.errors import TooLarge
from guerdon.settings.config import LanguageModelConfig, ModelConfig

MIB = 1 << 20
BLOCKS_MIB = (40, 80)
"""Both larger than what glibc keeps by default, the second larger than a thread's heap."""
FAR_TOO_MANY = 1 << 40


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[-1])
    torch.set_num_threads(1)
    measured: dict[str, float] = {}
    if kind == "nothing":
        keep_freed(torch.device("cpu"))
        work = threading.Thread(target=lambda: measured.update(faults=faults(4)))
        work.start()
        work.join()
        print(json.dumps(measured))
        return
    model: Any
    if kind == "reward_model":
        from guerdon.assembly import build_scorer

        model = build_scorer(ModelConfig(model=str(folder)))
    else:
        from guerdon.engine.checkpoint.language_models import load_policy

        model = load_policy(LanguageModelConfig(model=str(folder)))
    work = threading.Thread(target=measure, args=(folder, measured))  # as in a server
    work.start()
    work.join()
    assert model is not None
    print(json.dumps(measured))


def measure(folder: Path, told: dict[str, float]) -> None:
    from guerdon.engine.checkpoint.placement import check_memory
    from guerdon.engine.checkpoint.stored import open_checkpoint

    told["faults"] = faults(24)
    told["held_mib"] = resident()
    with contextlib.suppress(TooLarge):
        check_memory(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"), FAR_TOO_MANY)
    told["looked_mib"] = resident()
    blocks()
    told["held_again_mib"] = resident()
    computing.release()
    told["released_mib"] = resident()


def faults(rounds: int) -> float:
    # A block does not always land where the last one was, until there are enough such places.
    return statistics.mean([blocks() for _ in range(rounds)][-(rounds // 3) :])


def blocks() -> int:
    """Returns the page faults while blocks are allocated, written to and freed, two of a size at a time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in BLOCKS_MIB:
        held = [torch.empty(size * MIB, dtype=torch.uint8).fill_(1) for _ in range(2)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> float:
    return psutil.Process().memory_info().rss / MIB


if __name__ == "__main__":
    main()
