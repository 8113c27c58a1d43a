"""What a loaded model tells of itself: outputs, limits, special tokens."""

from __future__ import annotations

from typing import Any

import torch

from guerdon.core import ModelInfo
from guerdon.engine.checkpoint.files import Checkpoint
from guerdon.engine.checkpoint.placement import dtype_name
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.engine.checkpoint.weights import Parts
from guerdon.engine.heads import Head
from guerdon.errors import ConfigError
from guerdon.settings.config import ModelConfig

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")
"""Modules and buffers with one row a position: there is nothing beyond their end."""


def describe(
    config: ModelConfig,
    checkpoint: Checkpoint,
    weights_version: str,
    parts: Parts,
    encoder: TextEncoder | None,
    eos_token_id: int | None,
    dtype: torch.dtype,
    device: torch.device,
    head: Head,
) -> ModelInfo:
    """What clients and transports need to know; raises ConfigError where `max_length` goes beyond the model's table."""
    several = parts.num_outputs > 1 and not parts.is_process_reward
    outputs = ["rewards"] + ["attributes"] * several
    if parts.per_token:
        outputs.append("step_rewards" if parts.is_process_reward else "values")
    labels = parts.trunk.config.id2label or {}
    steps = head.steps
    return ModelInfo(
        name=config.name,
        kind=parts.kind,
        source=config.model,
        outputs=tuple(outputs),
        attribute_names=tuple(labels.get(i, f"LABEL_{i}") for i in range(parts.num_outputs)) if several else (),
        vocab_size=parts.trunk.get_input_embeddings().num_embeddings,
        max_length=find_max_length(config.max_length, parts.trunk),
        eos_token_id=eos_token_id,
        takes_text=encoder is not None,
        takes_messages=encoder is not None and encoder.takes_messages,
        weights_version=weights_version,
        sampled_version=checkpoint.sampled_version,
        dtype=dtype_name(dtype),
        device=str(device),
        merges_attributes=config.merge_attributes or not several,
        pooling=head.rule,
        step_rule="" if steps is None else str(steps),
        step_separator_ids=() if steps is None else steps.separator_ids,
        vocabulary="" if encoder is None else encoder.all_tokens_digest(),
        tokenizer="" if encoder is None else encoder.identity(),
    )


def find_max_length(asked: int | None, trunk: Any) -> int | None:
    """The longest sequence: as `asked` for, else the model's own; ConfigError where its positions end before."""
    text_config = trunk.config.get_text_config()
    stated = [getattr(text_config, key, None) for key in LENGTH_KEYS]
    own = next((length for length in stated if length), None)
    if own and trunk.config.model_type in ("roberta", "xlm-roberta", "camembert"):
        # Their positions start behind the padding index.
        own -= trunk.config.pad_token_id + 1
    if asked is None:
        return own
    if asked < 1:
        raise ConfigError(f"max_length is {asked}", "give at least 1")
    names = [name for name, _ in trunk.named_modules()] + [name for name, _ in trunk.named_buffers()]
    has_table = any(name.rpartition(".")[2] in POSITION_TABLES for name in names)
    if own and asked > own and has_table:
        raise ConfigError(f"max_length is {asked}, the model has {own} positions", f"give at most {own}")
    return asked


def find_eos(model_config: Any, encoder: TextEncoder | None) -> int | None:
    """The tokenizer's EOS, else the first of the config's, else None."""
    if encoder is not None and encoder.eos_token_id is not None:
        return encoder.eos_token_id
    own = getattr(model_config.get_text_config(), "eos_token_id", None)
    return own[0] if isinstance(own, list) else own


def find_own_pad(model_config: Any, vocab_size: int) -> int | None:
    """Returns the config's padding token, None if it names none or no id of the model's, such as -1."""
    pad = getattr(model_config.get_text_config(), "pad_token_id", None)
    return pad if pad is not None and 0 <= pad < vocab_size else None


def find_pad(model_config: Any, encoder: TextEncoder | None, vocab_size: int) -> int:
    """The config's padding token, else the tokenizer's, else 0; what is no id of the model's counts as none."""
    named = [find_own_pad(model_config, vocab_size), getattr(encoder, "pad_token_id", None)]
    # Only ever masked out, so any token will do where the checkpoint names none.
    return next((token for token in named if token is not None and 0 <= token < vocab_size), 0)
