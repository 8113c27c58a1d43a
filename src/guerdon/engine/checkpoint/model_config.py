"""A checkpoint's `config.json`: kind, limits, special tokens."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
)

from guerdon.engine.checkpoint import faults, internlm2
from guerdon.engine.checkpoint.encoders import SEQUENCE_HEADS
from guerdon.engine.checkpoint.stored import StoredCheckpoint
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.errors import CheckpointError, ConfigError

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")
"""Modules and buffers with one row for each position: no position beyond their end exists."""


def read_config(checkpoint: StoredCheckpoint) -> Any:
    """Returns the config; raises CheckpointError unless it is an unquantised decoder's or known encoder's."""
    folder, settings = checkpoint.model_folder, dict(checkpoint.settings)
    path = folder / "config.json"
    if quantised := faults.find_quantised(settings)[0]:
        by = ", or another by --base" if checkpoint.base else ""
        raise CheckpointError(
            f"{folder} is quantised ({quantised}), and only full-precision models can be served",
            f"have it dequantised at loading (--dequantize), or give the unquantised checkpoint{by}",
        )
    settings = faults.without_quantisation(settings)  # transformers takes any value, even null, for a quantised model
    model_type = settings.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{path} has no model_type", "copy the config.json that transformers has saved")
    if isinstance(settings.get("architectures"), str):
        settings["architectures"] = [settings["architectures"]]
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in settings:
            why, remedy = (
                "brings its own Python code, which is never run",
                "`guerdon convert` it to Llama's layout"
                if model_type == internlm2.MODEL_TYPE
                else "wrap it in a function and serve module:function",
            )
        else:
            why = "is of a type that the installed transformers does not know"
            remedy = "check config.json, or upgrade transformers"
        raise CheckpointError(f"{folder} (model_type {model_type!r}) {why}", remedy)
    try:
        with tempfile.TemporaryDirectory() as own:  # AutoConfig reads files alone
            (Path(own) / "config.json").write_text(json.dumps(settings), encoding="utf-8")
            config = AutoConfig.from_pretrained(own, trust_remote_code=False)
    # A config class computes with the file's values, and raises anything for an unexpected one.
    except Exception as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[-1].strip()
        raise CheckpointError(
            f"{path} is no config of a {model_type}: {reason}", "copy it again from where the checkpoint came"
        ) from e
    config.return_dict = True  # what a file says of it is for other callers
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{folder} holds a sequence-to-sequence model ({model_type})",
            "only decoders and encoders with a reward head can be served",
        )
    is_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_MAPPING
    architecture = (config.architectures or [""])[0]
    # Encoder families also have a causal class; only for these `is_decoder` distinguishes them. Their sequence
    # classifiers read the first token through layers of their own, whatever the config says.
    reads_first = architecture.endswith("ForSequenceClassification") or not getattr(config, "is_decoder", False)
    is_other_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and reads_first
    if model_type not in SEQUENCE_HEADS and (not is_decoder or is_other_encoder):
        what = f"{model_type} ({architecture})" if architecture else model_type
        raise CheckpointError(
            f"{folder} holds a {what}, which is neither a causal decoder nor a known encoder",
            f"decoders and {', '.join(SEQUENCE_HEADS)} can be served; wrap another in module:function",
        )
    return config


NO_LANGUAGE_MODEL = "give the checkpoint of a causal language model"


def check_generates(checkpoint: StoredCheckpoint, config: Any) -> None:
    """Raises CheckpointError for an encoder, and for a reward model, which has a head for rewards and no other."""
    if config.model_type in SEQUENCE_HEADS:
        raise CheckpointError(
            f"{checkpoint.folder} holds an encoder ({config.model_type}), which generates no text", NO_LANGUAGE_MODEL
        )
    architecture = (config.architectures or [""])[0]
    if architecture.endswith(("ForSequenceClassification", "ForTokenClassification", "ForRewardModel")):
        raise CheckpointError(
            f"{checkpoint.folder} holds a {architecture}, which has a head for rewards and none for the next token",
            NO_LANGUAGE_MODEL,
        )


def find_max_length(asked: int | None, trunk: Any) -> int | None:
    """Returns the longest sequence: `asked`, else the model's own; raises ConfigError beyond the position table."""
    text_config = trunk.config.get_text_config()
    stated = [getattr(text_config, key, None) for key in LENGTH_KEYS]
    own = next((length for length in stated if length), None)
    if own and trunk.config.model_type in ("roberta", "xlm-roberta", "camembert"):
        # Their positions start after the padding index.
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
    """Returns the tokenizer's EOS, else the first of the config's, else None."""
    if encoder is not None and encoder.eos_token_id is not None:
        return encoder.eos_token_id
    own = getattr(model_config.get_text_config(), "eos_token_id", None)
    return own[0] if isinstance(own, list) else own


def find_own_pad(model_config: Any, vocab_size: int) -> int | None:
    """Returns the config's padding token, None if there is none or if it is no token id, such as -1."""
    pad = getattr(model_config.get_text_config(), "pad_token_id", None)
    return pad if pad is not None and 0 <= pad < vocab_size else None


def find_pad(model_config: Any, encoder: TextEncoder | None, vocab_size: int) -> int:
    """Returns the config's padding token, else the tokenizer's, else 0; skips ids that the model lacks."""
    named = [find_own_pad(model_config, vocab_size), getattr(encoder, "pad_token_id", None)]
    # Padding is always masked, so any token will do.
    return next((token for token in named if token is not None and 0 <= token < vocab_size), 0)
