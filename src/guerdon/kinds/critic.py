"""Critics: token-level value models that learn while they serve, and the values that they give."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from guerdon.errors import StartError
from guerdon.kinds.function import FunctionKind
from guerdon.kinds.kind import Kind, Subcommand
from guerdon.kinds.reward import RewardKind
from guerdon.settings.config import CriticConfig, EngineConfig, ModelConfig
from guerdon.settings.fields import check_settings
from guerdon.settings.sources import CRITIC_PORTS, read_critic_settings


class CriticKind(Kind):
    """A checkpoint that gives a value for every token; its operations are in `server/critic/`."""

    settings = CriticConfig
    command = Subcommand(
        "serve-critic",
        "Serve a critic that trains, over HTTP and gRPC.",
        "config host port api_keys_file checkpoint_dir reward_model learning_rate global_batch_size dtype device",
        read_critic_settings,
        CRITIC_PORTS,
    )

    def load(self, config: CriticConfig, ranks: Any) -> Any:
        """Returns the critic that learns, together with a reward model if the config names one.

        Raises StartError if the settings contradict each other, or if memory does not suffice.
        """
        from guerdon.engine.checkpoint.reward_models import load_critic
        from guerdon.training.combined import CriticWithReward
        from guerdon.training.critic_trainer import CriticTrainer
        from guerdon.training.optimiser import check_layout, moment_bytes

        check_settings(config)
        check_layout(config, ranks)
        with ranks.raise_on_all_ranks(), _needing_memory(config):
            # The memory of partial training is known only after loading.
            moments = moment_bytes(config) if config.trains_all else None
            loaded = load_critic(infer_config(config), moment_bytes=moments, ranks=ranks)
            trainer = CriticTrainer(loaded, config, ranks)
        if config.reward_model is None:
            return trainer
        reward_model = dataclasses.replace(
            infer_config(config),
            model=config.reward_model,
            revision=config.reward_revision,
            base=None,
            attribute_weights=config.reward_attribute_weights,
            pooling=config.reward_pooling,
            mean=config.reward_mean,
            std=config.reward_std,
        )
        with _needing_memory(config):
            beside = next(kind for kind in (FunctionKind(), RewardKind()) if kind.owns(reward_model))
            return CriticWithReward(
                trainer, lambda: beside.load(reward_model, ranks), config.reward_model_memory, ranks
            )


@contextlib.contextmanager
def _needing_memory(config: CriticConfig) -> Iterator[None]:
    """Turns a lack of device memory within the context into a StartError."""
    import torch

    from guerdon.engine.checkpoint.placement import SMALLER_TRAINING

    try:
        yield
    except torch.OutOfMemoryError as e:
        raise StartError(f"{config.model} leaves no memory to train it: {e}", SMALLER_TRAINING) from e


def infer_config(config: CriticConfig) -> ModelConfig:
    """Returns the config of the critic as a model that answers score requests."""
    engine = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
    return ModelConfig(**engine, model=config.model, name=f"{config.name}_infer")
