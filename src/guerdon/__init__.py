"""guerdon: a reward-model server for RLHF, and its clients.

The public names are loaded when they are first used, so that a client needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guerdon.client import AsyncRewardClient, RetryPolicy, RewardClient, Scores
    from guerdon.errors import GuerdonError
    from guerdon.reward_model_server import RewardModelServer

__version__ = "0.1.0"

__all__ = [
    "AsyncRewardClient",
    "GuerdonError",
    "RetryPolicy",
    "RewardClient",
    "RewardModelServer",
    "Scores",
    "__version__",
]

_HOME = {
    "AsyncRewardClient": "guerdon.client",
    "GuerdonError": "guerdon.errors",
    "RetryPolicy": "guerdon.client",
    "RewardClient": "guerdon.client",
    "RewardModelServer": "guerdon.reward_model_server",
    "Scores": "guerdon.client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'guerdon' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
