"""Builds a transformers model from a checkpoint's tensors: none may be missing, and none is initialised at random.

A model that is sharded over ranks is loaded by transformers' plans, for tensor parallelism, FSDP2 or both: transformers
makes the parameters as DTensors without data, and each rank reads only its own slices from the files.

`ModelParts` is a reward model as it comes from the files, `LoadedTrunk` the part of any model that is ready to run.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from guerdon.core import ModelInfo
from guerdon.distributed import computing
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.stored import Origin, StoredCheckpoint, StoredTensor
from guerdon.engine.fsdp import NOT_SHARDED, Fsdp
from guerdon.engine.heads import Pooling
from guerdon.engine.host import mapping_blocks
from guerdon.engine.layers import layer_lists
from guerdon.errors import CheckpointError, ConfigError, GuerdonError, first_line, is_out_of_memory
from guerdon.settings.config import ForwardConfig

HARMLESS = re.compile(
    r"(^|\.)(lm_head|v_head|embed_out|output_projection|cls|generator_lm_head|generator_predictions|discriminator_predictions"
    r"|lm_predictions|frozen_head|mtp|pooler)\."
    r"|(inv_freq|position_ids|\.attn\.bias|\.attention\.bias|masked_bias)$|^(mean|std|n_averaged)$"
)
"""Tensors that a file may have besides trunk and head: other heads, buffers, trlX's frozen copy, counters."""

INCOMPLETE = "the checkpoint is incomplete, and weights are never made up: save or download the whole model again"


NEEDED = "5.23"
"""The version of transformers whose loading code sharded models rely on."""
PARTIAL = "replicated_with_grad_allreduce"
"""transformers' style for parameters that tensor-parallel ranks replicate, each with a part of the gradient."""


@dataclass(frozen=True)
class ModelParts:
    """The parts of a reward model: the trunk in its dtype, the head in float32, and the meaning of its outputs.

    `pooling` is the rule of the library that saved the checkpoint.
    """

    trunk: Any
    module: nn.Module
    num_outputs: int
    pooling: Pooling
    kind: str
    per_token: bool
    is_process_reward: bool
    gate_ids: tuple[int, ...] = ()


@dataclass(kw_only=True)
class LoadedTrunk:
    """A model without its head, ready to run.

    `trunk` maps `input_ids` to `last_hidden_state`, on its device, in its dtype, in eval mode. `causal` is True for a
    decoder. With `trains` the self-check covers gradients, too.

    `ranks` are those that have loaded it, each its shard, and `fsdp` says when the weights are gathered.
    `summed_over_tensor_ranks` names parameters of the trunk that tensor-parallel ranks replicate, each with a part of
    the gradient: reduce these over `ranks.tensor_group` once a step.
    """

    trunk: Any
    causal: bool
    info: ModelInfo
    origin: Origin
    pad_token_id: int
    config: ForwardConfig
    trains: bool = False
    ranks: Ranks = ALONE
    fsdp: Fsdp = NOT_SHARDED
    summed_over_tensor_ranks: frozenset[str] = frozenset()


def build_model(
    model_class: Any, config: Any, tensors: dict[str, StoredTensor], dtype: torch.dtype, ranks: Ranks = ALONE
) -> Any:
    """Returns the model in eval mode and `dtype` on the CPU, or this rank's shard on its device, all from `tensors`.

    Raises CheckpointError with the names of weights that are missing, have another shape or do not belong to the model,
    and as `sharded_class`.
    """
    how: dict[str, Any] = {}
    if ranks.is_sharded:
        model_class, how = sharded_class(model_class, config, ranks)
    with _quiet(), mapping_blocks():
        try:
            model, found = _exclusively_built(model_class).from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **how,
            )
        except GuerdonError:
            raise
        # For a setting or a tensor that a class does not expect it raises anything.
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as e:
            if is_out_of_memory(e):
                raise
            raise CheckpointError(
                f"transformers cannot build a {model_class.__name__} of these files: {type(e).__name__}: "
                f"{first_line(e)}",
                "correct config.json, or save or download the whole model again",
            ) from e
    if not ranks.is_sharded:  # FSDP may have replaced the class
        model.__class__ = model_class
    has_cap = bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))
    if has_cap and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")  # older transformers choose sdpa, which leaves the cap out silently
    if found["missing_keys"]:
        raise CheckpointError(f"the files lack {list_names(found['missing_keys'])}", INCOMPLETE)
    if found["mismatched_keys"]:
        name, stored, wanted = sorted(found["mismatched_keys"])[0]
        raise CheckpointError(
            f"{name} has shape {list(stored)} in the files, {list(wanted)} by config.json",
            "config.json is another model's: copy it again from where the weights came",
        )
    strange = [name for name in found["unexpected_keys"] if not HARMLESS.search(name)]
    if strange:
        raise CheckpointError(
            f"the files hold {list_names(strange)}, which {type(model).__name__} does not have",
            "config.json is another model's, or this head is of a kind that cannot be served",
        )
    return model


def _exclusively_built(model_class: Any) -> Any:
    """Returns the class, but it makes its modules, without weights, while nothing else in this process computes.

    A model that replaces another is loaded while the other one serves.
    """

    class ExclusivelyBuilt(model_class):
        @classmethod
        def get_init_context(cls, *args: Any, **kwargs: Any) -> list[Any]:
            return [computing.HERE.building(), *super().get_init_context(*args, **kwargs)]

    return named_as(model_class, ExclusivelyBuilt)


def check_labels_per_token(num_outputs: int, folder: Path) -> None:
    """Raises CheckpointError unless a token classifier has one label (values) or two (a wrong and a right step)."""
    if num_outputs > 2:
        raise CheckpointError(
            f"{folder} has {num_outputs} labels per token",
            "one (values) or two (a wrong and a right step) can be served",
        )


def no_architectures(checkpoint: StoredCheckpoint, config: Any) -> CheckpointError:
    """Returns the error for a reward model whose config does not say which class saved it."""
    usual = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, "...ForSequenceClassification")
    return CheckpointError(
        f"{checkpoint.model_folder}/config.json names no architectures, and libraries read rewards in different ways",
        f'add the class that saved it, such as "architectures": ["{usual}"]',
    )


def list_names(names: Iterable[str]) -> str:
    """Returns the first three names, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' logs, which `build_model` replaces, and its progress bars if stderr is no terminal."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# ------------------------------------------------------------------------------------------ sharded over ranks


def sharded_class(model_class: Any, config: Any, ranks: Ranks) -> tuple[Any, dict[str, Any]]:
    """Returns a class whose `from_pretrained` loads this rank's shard, and the arguments for it.

    The model gets an attribute `summed_over_tensor_ranks`. Raises CheckpointError if the model cannot be sharded like
    this, ConfigError if a library is too old.
    """
    utils, distributed_config = _libraries(ranks)
    sizes = {"tp_size": ranks.tensor_size, "fsdp_size": ranks.data_size if ranks.fsdp else 1}
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config.get_text_config(), name, None)
        if isinstance(count, int) and count % ranks.tensor_size:
            raise CheckpointError(
                f"tensor_parallel is {ranks.tensor_size}, and the model's {name} is {count}, which it does not divide",
                f"leave tensor_parallel at 1, or choose one that divides {count}",
            )

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
