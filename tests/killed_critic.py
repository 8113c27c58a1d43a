"""A critic's server in a process of its own, which kills itself with SIGKILL where it is told to."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import torch

from guerdon import assembly
from guerdon.config import ServerConfig
from guerdon.server import runtime
from guerdon.server.checkpoints import Checkpoints
from guerdon.server.journal import Journal
from guerdon.training.critic import CriticTrainer
from guerdon.training.optimiser import Optimiser

POINTS: dict[str, tuple[type, str, bool]] = {  # (class, method, whether before it or after it)
    "before the journal": (Journal, "append", True),
    "between the journal and training": (Journal, "append", False),
    "between two steps of a request": (Optimiser, "apply", False),
    "between training and the answer": (CriticTrainer, "train", False),
    "before a save": (CriticTrainer, "save", True),
    "amid a save": (CriticTrainer, "save", False),
    "at the end of a save": (Checkpoints, "commit", False),
    "between a save and the journal's pruning": (Journal, "forget", True),
}


def serve(config: ServerConfig, point: str | None, nth: int) -> None:
    """Serves the critic until it is stopped, or until the n-th call of what `point` names."""
    torch.set_num_threads(1)
    if point is not None:
        _kill_at(*POINTS[point], nth)
    runtime.run(assembly.build_service(config), config)


def _kill_at(cls: type, name: str, before: bool, nth: int) -> None:
    original = getattr(cls, name)
    calls = itertools.count(1)

    def wrapped(*args: Any, **kw: Any) -> Any:
        is_it = next(calls) == nth
        if is_it and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kw)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(cls, name, wrapped)
