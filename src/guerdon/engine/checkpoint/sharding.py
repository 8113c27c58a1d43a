"""Loading a model in parts over ranks, by transformers' plans: tensor parallelism, FSDP2, or both.

transformers makes the parameters as DTensors without data, and each rank reads only its own slices from the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn

from guerdon.distributed.ranks import Ranks, agreed
from guerdon.engine.checkpoint.files import Checkpoint, digest_of
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import LanguageModelConfig, ModelConfig

NEEDED = "5.23"
"""The transformers whose loading this was made for."""
OWN = frozenset({"model", "name", "revision", "device", "max_queue_tokens", "max_queue_sequences"})
"""Settings that a rank may have for itself: where it finds the model, and what decides nothing that is computed."""
PARTIAL = "replicated_with_grad_allreduce"
"""Its style for parameters that every tensor-parallel rank has whole and sees a part of the gradient of."""


def sharded_class(model_class: Any, config: Any, ranks: Ranks) -> tuple[Any, dict[str, Any]]:
    """A class whose `from_pretrained` loads this rank's part, and the arguments that it takes for that.

    The model has `summed_over_tensor_ranks` then. Raises CheckpointError where the model cannot be divided so,
    ConfigError where a library is too old for it.
    """
    utils, distributed_config = _libraries(ranks)
    sizes = {"tp_size": ranks.tensor_size, "fsdp_size": ranks.data_size if ranks.fsdp else 1}
    if ranks.tensor_size > 1:
        _check_heads(config, ranks.tensor_size)

    class Sharded(model_class):
        @classmethod
        def prepare_distribute_model(cls, settings: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
            # Its own way wants a mesh of all processes, and knows no replicas of what is only tensor-parallel.
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
            # That style sums the gradient after every backward pass, what was summed before once more.
            partial = {name for name, style in tensor.items() if style == PARTIAL}
            self.summed_over_tensor_ranks = frozenset(partial & dict(self.named_parameters()).keys())
            return tensor | dict.fromkeys(partial, "replicate"), expert, data

    return named_as(model_class, Sharded), {"distributed_config": distributed_config(**sizes)}


def named_as(model_class: Any, made: Any) -> Any:
    """`made`, by the names of the class that it is made of: transformers looks for a class's code by these."""
    made.__name__, made.__qualname__ = model_class.__name__, model_class.__qualname__
    made.__module__ = model_class.__module__
    return made


class Alike:
    """Ranks that load one model, and compare what they load."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._hashes = True

    def compare(self, checkpoint: Checkpoint, dtype: torch.dtype, config: ModelConfig | LanguageModelConfig) -> None:
        """Returns if all ranks are to load the same weights by the same settings, once all have come so far.

        From then on the weights' bytes are hashed, files that several ranks of one host have by one of them. Raises
        CheckpointError if they are not, on all of them, and what another one has failed with before it.
        """
        ranks = self._ranks
        if ranks.size > 1:
            facts: dict[str, Any] = {"config.json": digest_of(checkpoint.settings)}
            facts["weights"] = checkpoint.sampled_version
            facts |= {name: value for name, value in dataclasses.asdict(config).items() if name not in OWN}
            facts["dtype"] = str(dtype).removeprefix("torch.")
            # First by itself: what a rank that does not come so far tells is none of these facts.
            ranks.agree()
            self._compare(facts, config.model)
            own = f"{ranks.members[ranks.rank].host} {checkpoint.files.stamps}"
            self._hashes = ranks.tell_all(own).index(own) == ranks.rank
        if self._hashes:
            checkpoint.start_hashing()

    def weights_version(self, checkpoint: Checkpoint, model: str) -> str:
        """The version of the weights that all ranks have read; raises CheckpointError if it is not one, or as
        `check_unchanged`."""
        checkpoint.check_unchanged()
        own = {"weights": checkpoint.version} if self._hashes else {}
        if self._ranks.size == 1:
            return own["weights"]
        self._ranks.agree()
        return self._compare(own, model)["weights"]

    def _compare(self, facts: dict[str, Any], model: str) -> dict[str, Any]:
        """What rank 0 tells; raises CheckpointError on all ranks if any of them tells something else."""
        ranks = self._ranks
        first, *others = ranks.tell_all(facts)
        for rank, told in enumerate(others, 1):
            for name, value in told.items():
                if value != first[name]:
                    error = CheckpointError(
                        f"the ranks would load different models as {model}: {name} is {first[name]} on rank 0 "
                        f"({ranks.members[0].host}) and {value} on rank {rank} ({ranks.members[rank].host})",
                        "give all hosts the same files, revision and settings",
                    )
                    raise agreed(error)
        return first


@contextlib.contextmanager
def alike(ranks: Ranks) -> Iterator[Alike]:
    """What raises within it on one rank raises on all: else these would wait for it in their first forward."""
    with ranks.alike():
        yield Alike(ranks)


def place(model: Any, device: torch.device, ranks: Ranks) -> Any:
    """The model on its device; one that lies in parts is there already, as a plain model again for all else."""
    if not ranks.is_sharded:
        return model.to(device)
    # It belongs into no config.json, where a trainer writes one.
    del model.config.distributed_config
    return model


def layer_lists(model: nn.Module) -> list[str]:
    """The names of the outermost lists of modules: those within a layer, such as experts, belong to it."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def layers(trunk: nn.Module) -> list[nn.Module]:
    """The modules in these lists."""
    return [layer for name in layer_lists(trunk) for layer in trunk.get_submodule(name).children()]


def _libraries(ranks: Ranks) -> tuple[Any, Any]:
    """transformers' module for meshes and its class of settings."""
    old = f"transformers {transformers.__version__} cannot load a model in parts as tensor_parallel and fsdp need it"
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
