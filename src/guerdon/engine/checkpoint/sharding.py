"""Loads a model sharded over ranks, by transformers' plans: tensor parallelism, FSDP2, or both.

transformers makes the parameters as DTensors without data, and each rank reads only its own slices from the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from guerdon.distributed.ranks import Ranks, agreed
from guerdon.engine.checkpoint.stored import StoredCheckpoint, digest_of
from guerdon.engine.layers import layer_lists
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import LanguageModelConfig, ModelConfig

NEEDED = "5.23"
"""The version of transformers whose loading code this relies on."""
OWN = frozenset({"model", "name", "revision", "base", "device", "max_queue_tokens", "max_queue_sequences"})
"""Settings that may differ between ranks: where the files are, and what does not change any result."""
PARTIAL = "replicated_with_grad_allreduce"
"""transformers' style for parameters that tensor-parallel ranks replicate, each with a part of the gradient."""


def sharded_class(model_class: Any, config: Any, ranks: Ranks) -> tuple[Any, dict[str, Any]]:
    """Returns a class whose `from_pretrained` loads this rank's shard, and the arguments for it.

    The model gets an attribute `summed_over_tensor_ranks`. Raises CheckpointError if the model cannot be sharded like
    this, ConfigError if a library is too old.
    """
    utils, distributed_config = _libraries(ranks)
    sizes = {"tp_size": ranks.tensor_size, "fsdp_size": ranks.data_size if ranks.fsdp else 1}
    if ranks.tensor_size > 1:
        _check_heads(config, ranks.tensor_size)

    class Sharded(model_class):
        @classmethod
        def prepare_distribute_model(cls, settings: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
            # transformers' own method needs a mesh of all processes, and cannot replicate tensor-parallel groups.
            assert ranks.mesh is not None
            mesh = ranks.mesh["pp", "dp_replicate", "fsdp", "tp"]
            return settings, ranks.device, utils.TransformersDeviceMesh(mesh, mesh)

        def _resolve_parallel_plans(self, settings: Any) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
            if ranks.tensor_size > 1 and not any("." in rule for rule in self.tp_plan or {}):
                raise CheckpointError(
                    f"a {type(self).__name__} has no plan for tensor parallelism in transformers",
                    "leave tensor_parallel at 1, or take a model of another architecture",
                )
            self._fsdp_plan = {f"{name}.*": "free_full_weight" for name in layer_lists(self)}
            tensor, expert, data = super()._resolve_parallel_plans(settings)
            # That style reduces the gradient after every backward pass, including what is already reduced.
            partial = {name for name, style in tensor.items() if style == PARTIAL}
            self.summed_over_tensor_ranks = frozenset(partial & dict(self.named_parameters()).keys())
            return tensor | dict.fromkeys(partial, "replicate"), expert, data

    return named_as(model_class, Sharded), {"distributed_config": distributed_config(**sizes)}


def named_as(model_class: Any, made: Any) -> Any:
    """Gives `made` the names of the class that it derives from, by which transformers finds a class's source code."""
    made.__name__, made.__qualname__ = model_class.__name__, model_class.__qualname__
    made.__module__ = model_class.__module__
    return made


class RankLoading:
    """Checks that all ranks load the same model."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._hashes = True

    def compare(
        self, checkpoint: StoredCheckpoint, dtype: torch.dtype, config: ModelConfig | LanguageModelConfig
    ) -> None:
        """Collective; raises CheckpointError on all ranks unless they load the same weights with the same settings.

        Raises another rank's error if it failed before. Afterwards the weights' bytes are hashed in the background; if
        several ranks of a host share the files, one of them does it.
        """
        ranks = self._ranks
        if ranks.size > 1:
            facts: dict[str, Any] = {"config.json": digest_of(checkpoint.settings)}
            facts["weights"] = checkpoint.sample
            facts |= {name: value for name, value in dataclasses.asdict(config).items() if name not in OWN}
            facts["dtype"] = str(dtype).removeprefix("torch.")
            # Agree first: a rank that failed earlier sends its error and not these facts.
            ranks.agree()
            self._compare(facts, config.model)
            own = f"{ranks.members[ranks.rank].host} {checkpoint.stamps}"
            self._hashes = ranks.tell_all(own).index(own) == ranks.rank
        if self._hashes:
            checkpoint.start_hashing()

    def weights_version(self, checkpoint: StoredCheckpoint, model: str) -> str:
        """Collective; returns the version of the weights that all ranks have read.

        Raises CheckpointError if the versions differ, and as `check_unchanged`.
        """
        checkpoint.check_unchanged()
        own = {"weights": checkpoint.version} if self._hashes else {}
        if self._ranks.size == 1:
            return own["weights"]
        self._ranks.agree()
        return self._compare(own, model)["weights"]

    def _compare(self, facts: dict[str, Any], model: str) -> dict[str, Any]:
        """Returns the facts of rank 0; raises CheckpointError on all ranks if any of them has other facts."""
        ranks = self._ranks
        first, *others = ranks.tell_all(facts)
        for rank, other in enumerate(others, 1):
            for name, value in other.items():
                if value != first[name]:
                    error = CheckpointError(
                        f"the ranks would load different models as {model}: {name} is {first[name]} on rank 0 "
                        f"({ranks.members[0].host}) and {value} on rank {rank} ({ranks.members[rank].host})",
                        "give all hosts the same files, revision and settings",
                    )
                    raise agreed(error)
        return first


@contextlib.contextmanager
def loading_on(ranks: Ranks) -> Iterator[RankLoading]:
    """Collective; re-raises any rank's error on all ranks, which would otherwise wait for it in their first forward."""
    with ranks.raise_on_all_ranks():
        yield RankLoading(ranks)


def place(model: Any, device: torch.device, ranks: Ranks) -> Any:
    """Moves the model to its device; a sharded one is there already and becomes a plain model again."""
    if not ranks.is_sharded:
        return model.to(device)
    # Keep it out of the config.json that a trainer writes.
    del model.config.distributed_config
    return model


def _libraries(ranks: Ranks) -> tuple[Any, Any]:
    """Returns transformers' module for meshes and its class of settings; raises ConfigError if they are too old."""
    old = f"transformers {transformers.__version__} cannot load the sharded models that tensor_parallel and fsdp need"
    help_ = f"pip install 'transformers>={NEEDED}'"
    try:
        from transformers.distributed import DistributedConfig, utils
    except ImportError as e:
        raise ConfigError(old, help_) from e
    complete = hasattr(DistributedConfig, "fsdp_size") and hasattr(utils, "TransformersDeviceMesh")
    if not complete or not hasattr(transformers.PreTrainedModel, "_resolve_parallel_plans"):
        raise ConfigError(old, help_)
    if ranks.fsdp:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "reset_iter_state"):
            raise ConfigError(f"torch {torch.__version__} is too old for fsdp", "pip install 'torch>=2.13'")
    return utils, DistributedConfig


def _check_heads(config: Any, tensor_size: int) -> None:
    text_config = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text_config, name, None)
        if isinstance(count, int) and count % tensor_size:
            raise CheckpointError(
                f"tensor_parallel is {tensor_size}, and the model's {name} is {count}, which it does not divide",
                f"leave tensor_parallel at 1, or choose one that divides {count}",
            )
