"""Building a transformers model from a checkpoint's tensors: all of its own must be there, none may be made up."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from guerdon.distributed import computing
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.files import StoredTensor
from guerdon.engine.checkpoint.sharding import named_as, sharded_class
from guerdon.engine.heads import Pooling
from guerdon.errors import CheckpointError

HARMLESS = re.compile(
    r"(^|\.)(lm_head|embed_out|output_projection|cls|generator_lm_head|generator_predictions|discriminator_predictions"
    r"|lm_predictions|frozen_head|mtp)\."
    r"|(inv_freq|position_ids|\.attn\.bias|\.attention\.bias|masked_bias)$|^(mean|std)$"
)
"""Tensors that a file may hold beyond trunk and head: language-model heads, buffers, trlX's frozen copy."""

INCOMPLETE = "the checkpoint is incomplete, and weights are never made up: save or download the whole model again"


@dataclass(frozen=True)
class Parts:
    """A reward model taken apart: the trunk in its dtype, the head's module in float32, and what its outputs mean.

    `pooling` is the rule of the library that made the checkpoint.
    """

    trunk: Any
    module: nn.Module
    num_outputs: int
    pooling: Pooling
    kind: str
    per_token: bool
    is_process_reward: bool


def fill(
    model_class: Any, config: Any, tensors: dict[str, StoredTensor], dtype: torch.dtype, ranks: Ranks = ALONE
) -> Any:
    """The model in eval mode and `dtype` on the CPU, every weight from `tensors`; a part of it on the ranks' device
    where they shard it.

    Raises CheckpointError naming weights that are absent, of another shape, or not the model's, and as
    `sharded_class`.
    """
    how: dict[str, Any] = {}
    if ranks.is_sharded:
        model_class, how = sharded_class(model_class, config, ranks)
    with _quiet():
        model, found = _laid_out_alone(model_class).from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **how,
        )
    if not ranks.is_sharded:  # where FSDP may have made a class of its own of it
        model.__class__ = model_class
    if found["missing_keys"]:
        raise CheckpointError(f"the files lack {_some(found['missing_keys'])}", INCOMPLETE)
    if found["mismatched_keys"]:
        name, stored, wanted = sorted(found["mismatched_keys"])[0]
        raise CheckpointError(
            f"{name} has shape {list(stored)} in the files, {list(wanted)} by config.json",
            "config.json is another model's: copy it again from where the weights came",
        )
    strange = [name for name in found["unexpected_keys"] if not HARMLESS.search(name)]
    if strange:
        raise CheckpointError(
            f"the files hold {_some(strange)}, which {type(model).__name__} does not have",
            "config.json is another model's, or this head is of a kind that cannot be served",
        )
    return model


def _laid_out_alone(model_class: Any) -> Any:
    """The class, whose modules are made without weights while nothing in this process computes.

    A model that takes another's place is loaded while that one serves.
    """

    class Alone(model_class):
        @classmethod
        def get_init_context(cls, *args: Any, **kwargs: Any) -> list[Any]:
            return [computing.HERE.building(), *super().get_init_context(*args, **kwargs)]

    return named_as(model_class, Alone)


def check_labels_per_token(num_outputs: int, folder: Path) -> None:
    """Raises CheckpointError unless a token classifier has one label (values) or two (a wrong and a right step)."""
    if num_outputs > 2:
        raise CheckpointError(
            f"{folder} gives {num_outputs} labels a token",
            "one (values) or two (a wrong and a right step) can be served",
        )


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from logging what `fill` says itself, and from drawing bars where nobody watches."""
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
