"""guerdon: reward models and trainable critics for RLHF, served, and their clients.

The public names are loaded when they are first used, so that a client needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guerdon.actor.reinforce_actor import ReinforceActor
    from guerdon.client import AsyncCriticClient, AsyncRewardClient, CriticClient, RetryPolicy, RewardClient, Scores
    from guerdon.core import TrainReport
    from guerdon.critic_server_trainer import CriticServerTrainer
    from guerdon.errors import GuerdonError
    from guerdon.local import LocalRewardModel
    from guerdon.reward_model_server import RewardModelServer

__version__ = "0.1.0"

__all__ = [
    "AsyncCriticClient",
    "AsyncRewardClient",
    "CriticClient",
    "CriticServerTrainer",
    "GuerdonError",
    "LocalRewardModel",
    "ReinforceActor",
    "RetryPolicy",
    "RewardClient",
    "RewardModelServer",
    "Scores",
    "TrainReport",
    "__version__",
]

_HOME = {
    "AsyncCriticClient": "guerdon.client",
    "AsyncRewardClient": "guerdon.client",
    "CriticClient": "guerdon.client",
    "CriticServerTrainer": "guerdon.critic_server_trainer",
    "GuerdonError": "guerdon.errors",
    "LocalRewardModel": "guerdon.local",
    "ReinforceActor": "guerdon.actor.reinforce_actor",
    "RetryPolicy": "guerdon.client",
    "RewardClient": "guerdon.client",
    "RewardModelServer": "guerdon.reward_model_server",
    "Scores": "guerdon.client",
    "TrainReport": "guerdon.core",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'guerdon' has no attribute {name!r}")
    if name in ("CriticServerTrainer", "RewardModelServer"):
        from guerdon.engine.host_threads import limit_spinning

        limit_spinning()
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
