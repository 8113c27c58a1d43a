"""Scorers, trainers, worker, group and service put together: what the command and the NeMo-Aligner classes all run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guerdon.config import CriticConfig, EngineConfig, ModelConfig, ServerConfig, check
from guerdon.distributed.group import Group
from guerdon.distributed.worker import Worker
from guerdon.errors import ConfigError, StartError
from guerdon.server.critic import Critic
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


def build_trainer(config: CriticConfig) -> Any:
    """The critic that learns, and beside it the reward model where the config names one.

    Raises StartError where the settings contradict each other, or memory does not suffice.
    """
    import torch

    from guerdon.engine.critics import load_critic
    from guerdon.engine.placement import SMALLER_TRAINING
    from guerdon.training.combined import CriticWithReward
    from guerdon.training.critic import CriticTrainer
    from guerdon.training.optimiser import moment_bytes

    check(config)
    try:
        loaded = load_critic(_infer_config(config), moment_bytes=moment_bytes(config))
        trainer = CriticTrainer(loaded, config)
        if config.reward_model is None:
            return trainer
        reward_model = dataclasses.replace(
            _infer_config(config),
            model=config.reward_model,
            revision=config.reward_revision,
            attribute_weights=config.reward_attribute_weights,
            mean=config.reward_mean,
            std=config.reward_std,
        )
        return CriticWithReward(trainer, lambda: build_scorer(reward_model), config.reward_model_memory)
    except torch.OutOfMemoryError as e:
        raise StartError(f"{config.model} leaves no memory to train it: {e}", SMALLER_TRAINING) from e


def build_service(
    config: ServerConfig,
    *,
    scorer: Callable[[ModelConfig], Any] = build_scorer,
    trainer: Callable[[CriticConfig], Any] = build_trainer,
    critic: Callable[[CriticConfig, Any], Critic] = Critic,
    limits: dict[str, Limits] | None = None,
) -> Service:
    """Loads every configured model and puts a service before them; raises StartError where one cannot be served.

    A critic with a folder for checkpoints is brought to where it was when its last server ended.
    """
    check(config)
    models = [*config.models, *([_infer_config(config.critic)] if config.critic else [])]
    if not models:
        raise ConfigError("no model to serve", "name one: guerdon serve MODEL, or `models:` in the YAML file")
    scorers = {m.name: scorer(m) for m in config.models}
    if config.critic is None:
        return Service(Group(Worker(scorers)), [(m, scorers[m.name]) for m in models], config, limits)
    learner = trainer(config.critic)
    scorers[models[-1].name] = learner
    group = Group(Worker(scorers, {config.critic.name: learner}))
    operations = critic(config.critic, learner)
    try:
        operations.restore(group)
        return Service(group, [(m, scorers[m.name]) for m in models], config, limits, operations)
    except BaseException:
        operations.close()
        raise


def _infer_config(config: CriticConfig) -> ModelConfig:
    """The critic as one more model that answers score requests."""
    engine = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
    return ModelConfig(**engine, model=config.model, name=f"{config.name}_infer")
