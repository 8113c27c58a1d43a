"""From a `ModelConfig` to a `LoadedModel`: the checkpoint, its kind, its trunk and head, its tokenizer."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING, AutoConfig

from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint import decoders, encoders
from guerdon.engine.checkpoint.describe import describe, find_eos, find_own_pad, find_pad
from guerdon.engine.checkpoint.files import Checkpoint, open_checkpoint
from guerdon.engine.checkpoint.placement import check_memory, pick_device, pick_dtype
from guerdon.engine.checkpoint.sharding import Alike, alike, place
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.engine.checkpoint.weights import Parts
from guerdon.engine.forward import LoadedTrunk
from guerdon.engine.gathering import gathering
from guerdon.engine.heads import Head, StepRule
from guerdon.engine.host_memory import keep_freed
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import ModelConfig

log = logging.getLogger(__name__)

TRL_SEPARATOR = "\n"
QWEN_SEPARATOR = "<extra_0>"


@dataclass(kw_only=True)
class LoadedModel(LoadedTrunk):
    """A reward model ready to run: `head` is float32 on the trunk's device.

    `encoder` is None where the checkpoint has no tokenizer.
    """

    head: Head
    encoder: TextEncoder | None
    config: ModelConfig


def load(
    config: ModelConfig,
    device: torch.device | None = None,
    *,
    moment_bytes: int | None = None,
    ranks: Ranks = ALONE,
    trains: bool = False,
) -> LoadedModel:
    """Loads the checkpoint that `config.model` names onto `device` (default: the ranks', else the config's).

    Where all its weights will be trained, `moment_bytes` says how much an optimiser keeps for each of them. All
    `ranks` must call it alike; by `fsdp` they shard only what `trains`.

    Raises CheckpointError where it is missing, incomplete, too large or no reward model, and ConfigError where a
    setting does not fit it; each says in one line what to do.
    """
    ranks = ranks if trains else ranks.frozen()
    with alike(ranks) as others:
        loaded = _load(config, device, moment_bytes, ranks, others)
    if ranks.is_leader and not trains:
        _warn_if_pad_is_eos(loaded)
    return loaded


def _warn_if_pad_is_eos(loaded: LoadedModel) -> None:
    head, own = loaded.head, getattr(loaded.trunk.config.get_text_config(), "eos_token_id", None)
    eos_token_ids = {head.eos_token_id, *(own if isinstance(own, list) else [own])}
    if loaded.config.pooling == "auto" and head.pooling == "last_non_pad" and head.pad_token_id in eos_token_ids:
        log.warning(
            "%s: the pad token of %s is an EOS (%d), so the reward of a sequence that ends in it is read before it, "
            "as transformers does; --pooling last reads it at the EOS",
            loaded.info.name,
            loaded.config.model,
            head.pad_token_id,
        )


def _load(
    config: ModelConfig, device: torch.device | None, moment_bytes: int | None, ranks: Ranks, others: Alike
) -> LoadedModel:
    device = device or ranks.device or pick_device(config.device)
    keep_freed(device)
    dtype = pick_dtype(config.dtype, device)
    checkpoint = open_checkpoint(config.model, config.revision)
    model_config = read_config(checkpoint)
    check_memory(checkpoint, dtype, device, moment_bytes, ranks=ranks)
    # Behind it, so that no rank counts what its neighbours have taken already as taken by others.
    others.compare(checkpoint, dtype, config)
    encoder = TextEncoder.load(checkpoint.folder)
    causal = model_config.model_type not in encoders.SEQUENCE_HEADS
    parts = (decoders if causal else encoders).load(checkpoint, model_config, dtype, ranks)
    eos_token_id = find_eos(model_config, encoder)
    vocab_size = parts.trunk.get_input_embeddings().num_embeddings
    own_pad = find_own_pad(model_config, vocab_size)
    head = _head(config, checkpoint, parts, encoder, eos_token_id, own_pad)
    trunk = place(parts.trunk, device, ranks).eval()
    trunk.config.use_cache = False
    version = others.weights_version(checkpoint, config.model)
    info = describe(config, checkpoint, version, parts, encoder, eos_token_id, dtype, device, head)
    return LoadedModel(
        trunk=trunk,
        head=head.to(device),
        encoder=encoder,
        causal=causal,
        info=info,
        pad_token_id=find_pad(model_config, encoder, vocab_size),
        config=config,
        ranks=ranks,
        gathering=gathering(trunk, ranks),
        summed_over_tensor_ranks=getattr(trunk, "summed_over_tensor_ranks", frozenset()),
    )


def read_config(checkpoint: Checkpoint) -> Any:
    """The checkpoint's config; CheckpointError unless it is a decoder's or a known encoder's, of plain weights."""
    settings = checkpoint.settings
    model_type = settings.get("model_type")
    if "quantization_config" in settings:
        raise CheckpointError(
            f"{checkpoint.folder} is quantised, and models run in full precision only",
            "give the checkpoint it was made from",
        )
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError) as e:
        if "auto_map" in settings:
            why, remedy = (
                "brings its own Python code, which is never run",
                "wrap it in a function and serve module:function",
            )
        else:
            why = "is of a type that the installed transformers does not know"
            remedy = "check config.json, or upgrade transformers"
        raise CheckpointError(f"{checkpoint.folder} (model_type {model_type!r}) {why}", remedy) from e
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{checkpoint.folder} holds a sequence-to-sequence model ({model_type})",
            "only decoders and encoders with a reward head can be served",
        )
    is_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_MAPPING
    architecture = (config.architectures or [""])[0]
    if model_type not in encoders.SEQUENCE_HEADS and (not is_decoder or _is_other_encoder(config, architecture)):
        what = f"{model_type} ({architecture})" if architecture else model_type
        raise CheckpointError(
            f"{checkpoint.folder} holds a {what}, which is neither a causal decoder nor a known encoder",
            f"served are decoders and {', '.join(encoders.SEQUENCE_HEADS)}; wrap another in module:function",
        )
    return config


def _is_other_encoder(config: Any, architecture: str) -> bool:
    # Encoder families also have a causal class; only there does the config say by `is_decoder` which one is meant. What
    # classifies sequences there reads the first token through layers of its own, whatever the config says.
    is_one = architecture.endswith("ForSequenceClassification") or not getattr(config, "is_decoder", False)
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and is_one


def _head(
    config: ModelConfig,
    checkpoint: Checkpoint,
    parts: Parts,
    encoder: TextEncoder | None,
    eos_token_id: int | None,
    pad_token_id: int | None,
) -> Head:
    weights = None
    if config.attribute_weights is not None:
        weights = np.array(config.attribute_weights, dtype=np.float64)
        if len(weights) != parts.num_outputs or parts.is_process_reward:
            count = "no attributes" if parts.is_process_reward else f"{parts.num_outputs} outputs"
            raise ConfigError(
                f"attribute_weights has {len(weights)} numbers, the model has {count}", "give one weight an output"
            )
    pooling = parts.pooling if config.pooling == "auto" else config.pooling
    if pooling == "last_non_pad" and pad_token_id is None:
        if config.pooling != "auto":
            raise ConfigError(
                "pooling last_non_pad needs a pad token, and config.json names none (pad_token_id)",
                "use --pooling last, which is the same without one",
            )
        pooling = "last"
    if pooling == "first_eos" and eos_token_id is None:
        raise ConfigError("pooling first_eos needs an EOS token, and the checkpoint names none", "use --pooling last")
    mean, std = _standardisation(config, checkpoint.settings)
    if not config.merge_attributes and (weights is not None or (mean, std) != (0, 1)):
        raise ConfigError(
            "merge_attributes is off, so attribute_weights, mean and std have no merged reward to apply to",
            "leave them out, or merge the attributes",
        )
    return Head(
        parts.module,
        parts.num_outputs,
        pooling,
        per_token=parts.per_token,
        weights=weights,
        mean=mean,
        std=std,
        steps=_step_rule(config, encoder) if parts.is_process_reward else None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def _standardisation(config: ModelConfig, settings: dict[str, Any]) -> tuple[float, float]:
    # OpenRLHF writes mean and std into every checkpoint it evaluates, and its server leaves the reward as it is unless
    # told to normalise; so the two count only where the checkpoint says so, or the settings name them.
    own = settings if settings.get("normalize_reward") else {}
    mean = config.mean if config.mean is not None else float(own.get("mean", 0.0))
    std = config.std if config.std is not None else float(own.get("std", 1.0))
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ConfigError(
            f"mean {mean} and std {std} cannot standardise a reward", "give a finite mean and a positive std"
        )
    return mean, std


def _step_rule(config: ModelConfig, encoder: TextEncoder | None) -> StepRule:
    separator = config.step_separator
    if separator is None:
        separator = QWEN_SEPARATOR if encoder and encoder.has_token(QWEN_SEPARATOR) else TRL_SEPARATOR
    ids = encoder.separator_ids(separator) if encoder else ()
    if encoder and not ids:
        raise ConfigError(
            f"the step separator {separator!r} has no tokens", "give --step-separator a text that has some"
        )
    return StepRule(separator, ids, config.step_reduction)
