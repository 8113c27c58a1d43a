"""An actor in its own process, which kills itself with SIGKILL at a given point; and a server to kill."""

from __future__ import annotations

import sys

import pytest
import torch

from actor.runs import loop_of, without_curves
from guerdon import assembly, durable
from guerdon.actor.run_checkpoints import RunCheckpoints
from guerdon.actor.trackers import Trackers
from guerdon.actor.training_run import Run
from guerdon.client import CriticClient
from guerdon.server import runtime
from guerdon.settings.actors import ActorConfig
from guerdon.settings.config import ServerConfig
from guerdon.training.optimiser import Optimiser
from guerdon.training.policy_trainer import PolicyTrainer
from killing import Points, kill_at

POINTS: Points = {
    "amid the rollouts": (Run, "check_preemption", True),
    "before the update": (PolicyTrainer, "logprobs", False),
    "between two optimiser steps": (Optimiser, "apply", False),
    "before the metrics are logged": (Trackers, "log", True),
    "between the metrics and the save": (Trackers, "log", False),
    "amid a save": (PolicyTrainer, "save", False),
    "at the end of a save": (RunCheckpoints, "save", False),
    "amid a resume": (PolicyTrainer, "load", False),
}
POINTS_WITH_CRITIC: Points = POINTS | {
    "when the critic's training is asked for": (CriticClient, "train", False),
    "between the critic's save and the actor's": (durable, "seal", True),
    "between the actor's load and the critic's": (CriticClient, "load", True),
    "at the end of a resume": (CriticClient, "load", False),
}


def train(config: ActorConfig, point: str | None, nth: int) -> None:
    """Trains, or until the n-th call of what `point` names, and exits with the run's status."""
    torch.set_num_threads(1)
    without_curves(pytest.MonkeyPatch())
    kill_at(POINTS_WITH_CRITIC, point, nth)
    sys.exit(loop_of(config)(config).exit_status)


def serve(config: ServerConfig, point: str | None, nth: int) -> None:
    """Serves reward models and teachers until it is stopped."""
    torch.set_num_threads(1)
    kill_at({}, point, nth)
    runtime.run(assembly.build_service(config), config)
