"""NeMo-RL's environment of a served reward model.

In the script that starts the run, before the data are set up:

    from guerdon.adapters import nemo_rl
    nemo_rl.register()

and in its YAML:

    env: {guerdon: {url: "http://10.0.0.1:5555"}}
    data: {default: {env_name: guerdon}}
"""

from __future__ import annotations

from typing import Any

from guerdon.adapters.nemo_rl.environment import EnvironmentReturn, RewardEnvironment

__all__ = ["EnvironmentReturn", "RewardEnvironment", "register"]

_MAX_STEPS = 128
"""Calls of `step` at once: asynchronous rollouts make one a sample, and the client sends as many requests at once."""


def register(name: str = "guerdon") -> None:
    """Makes the environment known to NeMo-RL under `name`; raises ValueError where it has another of that name."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
    from nemo_rl.environments.utils import register_env

    actor = f"{__name__}.RewardEnvironmentActor"
    register_env(name, actor)
    ACTOR_ENVIRONMENT_REGISTRY[actor] = PY_EXECUTABLES.SYSTEM


def __getattr__(name: str) -> Any:
    """`RewardEnvironmentActor`: the environment as the Ray actor that NeMo-RL looks for by this name."""
    if name != "RewardEnvironmentActor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import ray  # NeMo-RL has it

    # It holds nothing but connections: where its process is lost, another one answers what was asked.
    actor = ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=_MAX_STEPS)
    return actor(RewardEnvironment)
