"""guerdon: reward models, trainable critics and teachers for RLHF, served, and their clients.

Public names are imported on first use, so that clients need neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guerdon.adapters.nemo_aligner.critic_server_trainer import CriticServerTrainer
    from guerdon.adapters.nemo_aligner.reinforce_actor import ReinforceActor
    from guerdon.adapters.nemo_aligner.reward_model_server import RewardModelServer
    from guerdon.client import (
        AsyncCriticClient,
        AsyncRewardClient,
        AsyncTeacherClient,
        CriticClient,
        Head,
        RetryPolicy,
        RewardClient,
        Scores,
        TeacherAnswers,
        TeacherClient,
        WeightsClient,
    )
    from guerdon.critic_core import Gae, TrainReport
    from guerdon.errors import (
        Cancelled,
        CheckpointError,
        ChildEnded,
        ConfigError,
        CriticReset,
        DeadlineExceeded,
        EmptyBatch,
        Forbidden,
        GuerdonError,
        InvalidRequest,
        MethodNotAllowed,
        NoVerdict,
        Offloaded,
        Overloaded,
        PayloadTooLarge,
        RanksLost,
        RewardsFailed,
        RouteNotFound,
        RunFailed,
        SampleFailed,
        ServerFault,
        StartError,
        StorageFailed,
        TooLarge,
        TrainFailed,
        Unauthenticated,
        Unavailable,
        UnknownModel,
        Unreachable,
        Unsupported,
    )
    from guerdon.local import LocalJudge, LocalRewardModel, LocalTeacher

__version__ = "0.3.0"

__all__ = [
    "AsyncCriticClient",
    "AsyncRewardClient",
    "AsyncTeacherClient",
    "Cancelled",
    "CheckpointError",
    "ChildEnded",
    "ConfigError",
    "CriticClient",
    "CriticReset",
    "CriticServerTrainer",
    "DeadlineExceeded",
    "EmptyBatch",
    "Forbidden",
    "Gae",
    "GuerdonError",
    "Head",
    "InvalidRequest",
    "LocalJudge",
    "LocalRewardModel",
    "LocalTeacher",
    "MethodNotAllowed",
    "NoVerdict",
    "Offloaded",
    "Overloaded",
    "PayloadTooLarge",
    "RanksLost",
    "ReinforceActor",
    "RetryPolicy",
    "RewardClient",
    "RewardModelServer",
    "RewardsFailed",
    "RouteNotFound",
    "RunFailed",
    "SampleFailed",
    "Scores",
    "ServerFault",
    "StartError",
    "StorageFailed",
    "TeacherAnswers",
    "TeacherClient",
    "TooLarge",
    "TrainFailed",
    "TrainReport",
    "Unauthenticated",
    "Unavailable",
    "UnknownModel",
    "Unreachable",
    "Unsupported",
    "WeightsClient",
    "__version__",
]

_MODULES = {  # all others are in guerdon.errors
    "AsyncCriticClient": "guerdon.client",
    "AsyncRewardClient": "guerdon.client",
    "AsyncTeacherClient": "guerdon.client",
    "CriticClient": "guerdon.client",
    "CriticServerTrainer": "guerdon.adapters.nemo_aligner.critic_server_trainer",
    "Gae": "guerdon.critic_core",
    "Head": "guerdon.client",
    "LocalJudge": "guerdon.local",
    "LocalRewardModel": "guerdon.local",
    "LocalTeacher": "guerdon.local",
    "ReinforceActor": "guerdon.adapters.nemo_aligner.reinforce_actor",
    "RetryPolicy": "guerdon.client",
    "RewardClient": "guerdon.client",
    "RewardModelServer": "guerdon.adapters.nemo_aligner.reward_model_server",
    "Scores": "guerdon.client",
    "TeacherAnswers": "guerdon.client",
    "TeacherClient": "guerdon.client",
    "TrainReport": "guerdon.critic_core",
    "WeightsClient": "guerdon.client",
}

_COMPUTING = {
    name for name, module in _MODULES.items() if module == "guerdon.local" or module.startswith("guerdon.adapters")
}
"""Those that compute in the process that imports them."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'guerdon' has no attribute {name!r}")
    if name in _COMPUTING:
        from guerdon.engine.host import limit_spinning
        from guerdon.errors import SERVER_MODULES, StartError, require_modules

        try:
            require_modules(*SERVER_MODULES, extra="server")
        except StartError as e:
            raise StartError(f"{name} needs what is not installed: {e}; {e.help}", e.help) from None
        limit_spinning()
    value = globals()[name] = getattr(importlib.import_module(_MODULES.get(name, "guerdon.errors")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
