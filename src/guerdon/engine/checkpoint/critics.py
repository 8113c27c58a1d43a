"""From a `ModelConfig` to a critic: any decoder's reward head made into one that values every token."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import nn

from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.loading import LoadedModel, load
from guerdon.engine.heads import Head
from guerdon.errors import CheckpointError
from guerdon.settings.config import ModelConfig

STARTS = "start the critic from a decoder with a scalar reward head, or from a critic"


def load_critic(
    config: ModelConfig,
    device: torch.device | None = None,
    *,
    moment_bytes: int | None = None,
    ranks: Ranks = ALONE,
) -> LoadedModel:
    """Loads what `load` loads, as a model that gives one value a token and can be trained.

    A scalar head is applied to every token, as PPO starts its critic; several attributes become one output by their
    weights. Mean and std stay. Raises CheckpointError for what has no value before a sequence is over: encoders,
    which see the future, process reward models and functions.
    """
    if ":" in config.model and not Path(config.model).exists():
        raise CheckpointError(f"{config.model} is a function, and has no weights to train", STARTS)
    loaded = load(config, device, moment_bytes=moment_bytes, ranks=ranks, trains=True)
    if not loaded.causal:
        raise CheckpointError(
            f"{config.model} is an encoder: the value of a token would be made from the tokens behind it", STARTS
        )
    if loaded.head.steps is not None:
        raise CheckpointError(f"{config.model} is a process reward model, whose outputs are probabilities", STARTS)
    head = _value_head(loaded.head)
    info = dataclasses.replace(loaded.info, outputs=("values",), attribute_names=(), pooling="")
    return dataclasses.replace(loaded, head=head, info=info, trains=True)


@torch.no_grad()
def _value_head(head: Head) -> Head:
    """The same head for every token, its outputs merged into one by their weights."""
    if head.num_outputs > 1 or head.weights[0] != 1.0:
        _merge(head.module, head.weights)
    return Head(head.module, 1, "last", per_token=True, mean=head.mean, std=head.std)


def _merge(module: nn.Module, weights: np.ndarray) -> None:
    """Makes the last linear layer give what its outputs sum up to by `weights` (float64 `[A]`)."""
    last = [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
    by = torch.from_numpy(weights).to(last.weight.device)[None]
    last.weight = nn.Parameter((by @ last.weight.double()).float())
    if last.bias is not None:
        last.bias = nn.Parameter((by @ last.bias.double()).float())
    last.out_features = 1
