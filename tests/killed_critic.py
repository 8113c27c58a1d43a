"""A critic's server in a process of its own, which kills itself with SIGKILL where it is told to."""

from __future__ import annotations

import torch

from guerdon import assembly
from guerdon.server import runtime
from guerdon.server.critic.checkpoint_folder import CheckpointFolder
from guerdon.server.critic.store import Journal
from guerdon.settings.config import ServerConfig
from guerdon.training.critic_trainer import CriticTrainer
from guerdon.training.optimiser import Optimiser
from killing import Points, kill_at

POINTS: Points = {
    "between the estimate and the journal": (CriticTrainer, "estimate", False),
    "before the journal": (Journal, "append", True),
    "between the journal and training": (Journal, "append", False),
    "between two steps of a request": (Optimiser, "apply", False),
    "between training and the mark": (CriticTrainer, "train", False),
    "between the mark and the answer": (Journal, "mark_done", False),
    "before a save": (CriticTrainer, "save", True),
    "amid a save": (CriticTrainer, "save", False),
    "at the end of a save": (CheckpointFolder, "commit", False),
    "between a save and the journal's pruning": (Journal, "forget", True),
}


def serve(config: ServerConfig, point: str | None, nth: int) -> None:
    """Serves the critic until it is stopped, or until the n-th call of what `point` names."""
    torch.set_num_threads(1)
    kill_at(POINTS, point, nth)
    runtime.run(assembly.build_service(config), config)
