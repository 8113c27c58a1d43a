"""A critic as the server builds one, over a small random checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint.reward_models import load_critic
from guerdon.settings.config import CriticConfig, EngineConfig, ModelConfig
from guerdon.training.critic_trainer import CriticTrainer

LR = 1e-3
"""Large enough that a step is seen in every weight."""


def build(folder: Path, **settings: Any) -> CriticTrainer:
    """A trainer of the checkpoint: batches of 5, micro-batches that cut them, a step that is seen."""
    config = CriticConfig(
        **{"model": str(folder), "learning_rate": LR, "global_batch_size": 5, "max_batch_tokens": 150, **settings}
    )
    engine = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
    return CriticTrainer(load_critic(ModelConfig(**engine, model=config.model, name=f"{config.name}_infer")), config)


def weights(trainer: CriticTrainer) -> dict[str, torch.Tensor]:
    """A copy of all parameters, the frozen ones too."""
    modules = {"trunk": trainer.engine.trunk, "head": trainer.engine.head}
    return {
        f"{prefix}.{name}": parameter.detach().clone()
        for prefix, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether all weights are bitwise equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def values(scorer: Any, rows: list[np.ndarray]) -> np.ndarray:
    """The values of all tokens of all rows, one after another."""
    results = scorer.score([Sequence(row) for row in rows])
    assert all(isinstance(r, Score) and r.values is not None for r in results), results
    return np.concatenate([r.values for r in results])
