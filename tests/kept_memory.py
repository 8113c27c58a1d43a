"""Measures how much memory a process that runs a model keeps after it is freed; prints a line of JSON for each kind.

python kept_memory.py KIND=FOLDER ...   the folder's checkpoint is a reward_model or a policy; one process for each
python kept_memory.py nothing           no model, no torch: only the page faults after `keep_freed`, in a few rounds
"""

import contextlib
import json
import os
import resource
import statistics
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from guerdon.engine.host import keep_freed

MIB = 1 << 20
BLOCKS_MIB = (40, 80)
"""Both larger than what glibc keeps by default, the second larger than a thread's heap."""
FAR_TOO_MANY = 1 << 40


def main() -> None:
    if sys.argv[1:] == ["nothing"]:
        cpu: Any = types.SimpleNamespace(type="cpu")
        keep_freed(cpu)
        in_a_thread(lambda: {"faults": faults(4, lambda size: b"1" * size)})
        return
    import torch

    import guerdon.assembly
    import guerdon.engine.checkpoint.language_models  # noqa: F401 - before the forks, because it takes seconds

    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        child = os.fork()  # malloc is not tuned yet, and there is no other thread
        if child == 0:
            hold(*argument.split("="))
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


def hold(kind: str, folder: str) -> None:
    """Loads the model and measures beside it."""
    from guerdon.assembly import build_scorer
    from guerdon.engine.checkpoint.language_models import load_policy
    from guerdon.settings.config import LanguageModelConfig, ModelConfig

    model: Any
    if kind == "reward_model":
        model = build_scorer(ModelConfig(model=folder))
    else:
        model = load_policy(LanguageModelConfig(model=folder))
    in_a_thread(lambda: measure(Path(folder)))
    assert model is not None


def in_a_thread(work: Callable[[], dict[str, float]]) -> None:
    """Prints what `work` returns in a thread, as in a server."""
    thread = threading.Thread(target=lambda: print(json.dumps(work()), flush=True))
    thread.start()
    thread.join()


def measure(folder: Path) -> dict[str, float]:
    import torch

    from guerdon.engine.checkpoint.placement import check_memory
    from guerdon.engine.checkpoint.stored import open_checkpoint
    from guerdon.errors import TooLarge
    from guerdon.memory import release

    def allocate(size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8).fill_(1)

    told = {"faults": faults(24, allocate), "held_mib": resident()}
    with contextlib.suppress(TooLarge):
        check_memory(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"), FAR_TOO_MANY)
    told["looked_mib"] = resident()
    blocks(allocate)
    told["held_again_mib"] = resident()
    release()
    return told | {"released_mib": resident()}


def faults(rounds: int, allocate: Callable[[int], Any]) -> float:
    # A block does not always land where the last one was, until there are enough such places.
    return statistics.mean([blocks(allocate) for _ in range(rounds)][-(rounds // 3) :])


def blocks(allocate: Callable[[int], Any]) -> int:
    """Returns the page faults while blocks are allocated, written to and freed, two of a size at a time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in BLOCKS_MIB:
        held = [allocate(size * MIB) for _ in range(2)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> float:
    return psutil.Process().memory_info().rss / MIB


if __name__ == "__main__":
    main()
