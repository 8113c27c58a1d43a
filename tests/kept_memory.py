"""What a process that runs a model keeps of the large blocks that are freed in it; prints it as JSON.

python kept_memory.py KIND FOLDER       the folder's checkpoint is a reward_model, or a policy
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import sys
import threading
from pathlib import Path

import psutil
import torch

from guerdon.assembly import build_scorer
from guerdon.distributed import computing
from guerdon.engine.checkpoint.files import open_checkpoint
from guerdon.engine.checkpoint.placement import check_memory
from guerdon.engine.checkpoint.policies import load_policy
from guerdon.errors import TooLarge
from guerdon.settings.config import LanguageModelConfig, ModelConfig

MIB = 1 << 20
BLOCKS_MIB = (40, 80)
"""Both more than glibc keeps by itself, the second more than a heap of a thread's own holds."""
FAR_TOO_MANY = 1 << 40


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    held = (
        build_scorer(ModelConfig(model=str(folder)))
        if kind == "reward_model"
        else load_policy(LanguageModelConfig(model=str(folder)))
    )
    told: dict[str, float] = {}
    computing_thread = threading.Thread(target=compute, args=(folder, told))  # as in a server
    computing_thread.start()
    computing_thread.join()
    assert held is not None
    print(json.dumps(told))


def compute(folder: Path, told: dict[str, float]) -> None:
    # Where a block lands is not always where the last one lay, until there are enough such places.
    told["faults"] = statistics.mean([blocks() for _ in range(24)][-8:])
    told["held_mib"] = resident()
    with contextlib.suppress(TooLarge):
        check_memory(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"), FAR_TOO_MANY)
    told["looked_mib"] = resident()
    blocks()
    told["held_again_mib"] = resident()
    computing.release()
    told["released_mib"] = resident()


def blocks() -> int:
    """Page faults while some blocks are taken, written to and freed, two of a size at a time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in BLOCKS_MIB:
        held = [torch.empty(size * MIB, dtype=torch.uint8).fill_(1) for _ in range(2)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> float:
    return psutil.Process().memory_info().rss / MIB


if __name__ == "__main__":
    main()
