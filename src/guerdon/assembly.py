"""Scorers, worker, group and service put together: what `guerdon serve` and `RewardModelServer` both run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from guerdon.config import ModelConfig, ServerConfig
from guerdon.distributed.group import Group
from guerdon.distributed.worker import Worker
from guerdon.errors import ConfigError
from guerdon.server.scheduler import Limits
from guerdon.server.service import Service


def build_scorer(config: ModelConfig) -> Any:
    """The scorer for one configured model: a checkpoint's Engine, or the user's function `module:function`."""
    if ":" in config.model and not Path(config.model).exists():
        from guerdon.engine.callable import FunctionScorer

        return FunctionScorer(config)
    from guerdon.engine.engine import Engine
    from guerdon.engine.loading import load

    return Engine(load(config))


def build_service(
    config: ServerConfig,
    *,
    scorer: Callable[[ModelConfig], Any] = build_scorer,
    limits: dict[str, Limits] | None = None,
) -> Service:
    """Loads every configured model and puts a service before them; raises StartError where one cannot be served."""
    names = [m.name for m in config.models]
    if not names:
        raise ConfigError("no model to serve", "name one: guerdon serve MODEL, or `models:` in the YAML file")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are named {name}", "give each its own `name:`")
    scorers = {m.name: scorer(m) for m in config.models}
    group = Group(Worker(scorers))
    return Service(group, [(m, scorers[m.name]) for m in config.models], config, limits)
