"""Loads reward models and critics: from a `ModelConfig` to a `LoadedModel` with trunk, head and tokenizer."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from guerdon.core import ModelInfo
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine import low_rank
from guerdon.engine.checkpoint.decoders import load_decoder
from guerdon.engine.checkpoint.encoders import SEQUENCE_HEADS, load_encoder
from guerdon.engine.checkpoint.language_models import load_token_head
from guerdon.engine.checkpoint.loading import Loading, loading_on, place
from guerdon.engine.checkpoint.merging import read_apart
from guerdon.engine.checkpoint.model_config import find_eos, find_max_length, find_own_pad, find_pad, read_config
from guerdon.engine.checkpoint.placement import dtype_name
from guerdon.engine.checkpoint.stored import (
    ADAPTER_CONFIG,
    StoredCheckpoint,
    digest_of,
    find_folder,
    joined,
    open_checkpoint,
)
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.engine.checkpoint.weights import LoadedTrunk, ModelParts
from guerdon.engine.fsdp import fsdp_of
from guerdon.engine.heads import GatedHead, RewardHead, StepRule
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import ModelConfig

log = logging.getLogger(__name__)

TRL_SEPARATOR = "\n"
QWEN_SEPARATOR = "<extra_0>"
_ACTIVATIONS = {"regression": "none", "multi_label_classification": "sigmoid"}
"""What a loss applies to a label's output, by transformers' `problem_type`; else what fits their number."""
STARTS = "start the critic from a decoder with a scalar reward head, or from a critic"


@dataclass(kw_only=True)
class LoadedModel(LoadedTrunk):
    """A reward model ready to run: `head` is float32 on the trunk's device.

    `encoder` is None if the checkpoint has no tokenizer.
    """

    head: RewardHead
    encoder: TextEncoder | None
    config: ModelConfig


def load_reward_model(
    config: ModelConfig,
    device: torch.device | None = None,
    *,
    moment_bytes: int | None = None,
    ranks: Ranks = ALONE,
    trains: bool = False,
) -> LoadedModel:
    """Collective; loads the checkpoint `config.model` onto `device` (default: the ranks', else the config's).

    `moment_bytes` is the optimiser state per weight, if all of them will be trained. FSDP shards only a model that
    `trains`.

    Raises CheckpointError if the checkpoint is missing, incomplete, too large or no reward model, and ConfigError if a
    setting does not fit it.
    """
    ranks = ranks if trains else ranks.frozen()
    with loading_on(ranks) as loading:
        opened = loading.open(config, device, moment_bytes, for_text=config.reward is not None)
        checkpoint, model_config, device, dtype = opened
        encoder = TextEncoder.load(checkpoint.text_folder, warns=ranks.is_leader, rendering=config)
        if config.reward is not None:
            parts = load_token_head(config, checkpoint, model_config, dtype, device, ranks, encoder)
        else:
            load = load_encoder if model_config.model_type in SEQUENCE_HEADS else load_decoder
            parts = load(checkpoint, model_config, dtype, ranks)
        return _assemble(loading, config, opened, parts, encoder, ranks, trains=trains)


def load_adapters(config: ModelConfig, ranks: Ranks = ALONE) -> list[LoadedModel]:
    """Collective; loads the base model `config.model` once, and a model for each of `config.adapters` over it.

    All have the same trunk, which reads the ids of the i-th as `i * vocab_size` more (see `low_rank`). Raises as
    `load_reward_model` and `read_apart`, and CheckpointError for an encoder.
    """
    ranks, models = ranks.frozen(), []
    with loading_on(ranks) as loading:
        opened = loading.open(config, None, None, for_text=config.reward is not None)
        base, model_config, device, dtype = opened
        if model_config.model_type in SEQUENCE_HEADS or ranks.is_sharded:
            why = "ranks share its weights" if ranks.is_sharded else "it is an encoder"
            raise CheckpointError(f"adapters cannot share {config.model}: {why}", "list each as a model of its own")
        encoders: dict[Path, TextEncoder | None] = {}
        parts: ModelParts | None = None
        layers = []
        for own in config.adapted():
            apart = read_apart(_open_over(base, own), base)
            folder = apart.model.text_folder
            if folder not in encoders:
                encoders[folder] = TextEncoder.load(folder, warns=ranks.is_leader, rendering=own)
            encoder, own_config = encoders[folder], read_config(apart.model)
            if config.reward is None:
                parts = load_decoder(apart.model, own_config, dtype, trunk=None if parts is None else parts.trunk)
            elif parts is None:
                parts = load_token_head(config, base, model_config, dtype, device, ranks, encoder)
            layers.append(apart.layers)
            loading.compare(apart.model, dtype, own)
            made = _assemble(loading, own, (apart.model, own_config, device, dtype), parts, encoder, ranks)
            made.info = dataclasses.replace(made.info, shared_base=config.model)
            models.append(made)
        low_rank.install(models[0].trunk, layers, [own.model for own in config.adapted()])
    return models


def _open_over(base: StoredCheckpoint, config: ModelConfig) -> StoredCheckpoint:
    """Opens an adapter over a base model that is open already."""
    if not (find_folder(config.model, config.revision) / ADAPTER_CONFIG).exists():
        raise CheckpointError(f"{config.model} stands under adapters, and is none", "list it as a model of its own")
    opened = open_checkpoint(config.model, config.revision, str(base.folder))
    assert opened.adapter is not None
    return dataclasses.replace(opened, adapter=dataclasses.replace(opened.adapter, base=base))


def _assemble(
    loading: Loading,
    config: ModelConfig,
    opened: tuple[StoredCheckpoint, Any, torch.device, torch.dtype],
    parts: ModelParts,
    encoder: TextEncoder | None,
    ranks: Ranks,
    *,
    trains: bool = False,
) -> LoadedModel:
    """Puts the parts of a model on its device, and describes it; its version changes with what its scores mean."""
    checkpoint, model_config, device, dtype = opened
    eos_token_id = find_eos(model_config, encoder)
    vocab_size = parts.trunk.get_input_embeddings().num_embeddings
    head = _head(config, checkpoint, parts, encoder, eos_token_id, find_own_pad(model_config, vocab_size))
    trunk = place(parts.trunk, device, ranks).eval()
    trunk.config.use_cache = False
    version = loading.weights_version(checkpoint, config.model)
    if not trains and (meaning := config.meaning()):  # a critic's store compares settings by itself
        version = joined(version, digest_of(meaning))
    own = getattr(trunk.config.get_text_config(), "eos_token_id", None)
    is_eos = head.pad_token_id in {eos_token_id, *(own if isinstance(own, list) else [own])}
    if ranks.is_leader and not trains and config.pooling == "auto" and head.pooling == "last_non_pad" and is_eos:
        log.warning(
            "%s: the pad token of %s is an EOS (%d), so the reward of a sequence that ends in it is read before it, "
            "as transformers does; --pooling last reads it at the EOS",
            config.name,
            config.model,
            head.pad_token_id,
        )
    return LoadedModel(
        trunk=trunk,
        head=head.to(device),
        encoder=encoder,
        causal=model_config.model_type not in SEQUENCE_HEADS,
        info=describe(config, version, parts, encoder, eos_token_id, dtype, device, head),
        origin=checkpoint.origin,
        pad_token_id=find_pad(model_config, encoder, vocab_size),
        config=config,
        ranks=ranks,
        fsdp=fsdp_of(trunk, ranks),
        summed_over_tensor_ranks=getattr(trunk, "summed_over_tensor_ranks", frozenset()),
    )


def _head(
    config: ModelConfig,
    checkpoint: StoredCheckpoint,
    parts: ModelParts,
    encoder: TextEncoder | None,
    eos_token_id: int | None,
    pad_token_id: int | None,
) -> RewardHead:
    weights = None
    if isinstance(parts.module, GatedHead):
        weights = np.eye(parts.num_outputs)[-1]
    if config.attribute_weights is not None:
        weights = np.array(config.attribute_weights, dtype=np.float64)
        if len(weights) != parts.num_outputs or parts.is_process_reward:
            count = "no attributes" if parts.is_process_reward else f"{parts.num_outputs} outputs"
            raise ConfigError(
                f"attribute_weights has {len(weights)} numbers, the model has {count}", "give one weight per output"
            )
    elif weights is None and parts.num_outputs > 1 and not parts.is_process_reward:
        _check_merge(config, parts)
    pooling = parts.pooling if config.pooling == "auto" else config.pooling
    if pooling == "last_non_pad" and pad_token_id is None:
        if config.pooling != "auto":
            raise ConfigError(
                "pooling last_non_pad needs a pad token, and config.json names none (pad_token_id)",
                "use --pooling last, which is the same without one",
            )
        pooling = "last"
    if parts.per_token and config.truncation != "error":
        raise ConfigError(
            f"truncation {config.truncation} is set, but {config.name} answers for single tokens",
            "leave --truncation out: cut sequences would shift the positions that clients count",
        )
    if pooling == "mean" and parts.gate_ids:
        raise ConfigError("pooling is mean, and the gate of this model reads a state of its own", "leave it out")
    if pooling == "first_eos" and eos_token_id is None:
        raise ConfigError("pooling first_eos needs an EOS token, and the checkpoint names none", "use --pooling last")
    # OpenRLHF writes mean and std into every checkpoint it evaluates, but its server normalises only on request. So
    # they apply only if the checkpoint says so (normalize_reward) or the settings have them.
    own = checkpoint.settings if checkpoint.settings.get("normalize_reward") else {}
    mean = config.mean if config.mean is not None else float(own.get("mean", 0.0))
    std = config.std if config.std is not None else float(own.get("std", 1.0))
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ConfigError(
            f"mean {mean} and std {std} cannot standardise a reward", "give a finite mean and a positive std"
        )
    if not config.merge_attributes and (weights is not None or (mean, std) != (0, 1)):
        raise ConfigError(
            "merge_attributes is off, so attribute_weights, mean and std have no merged reward to apply to",
            "leave them out, or merge the attributes",
        )
    of_steps = {"step_separator": None, "step_reduction": ModelConfig.step_reduction}
    for name, default in of_steps.items():
        if (value := getattr(config, name)) != default and not parts.is_process_reward:
            raise ConfigError(
                f"{name} is {value!r}, and this checkpoint gives no step rewards",
                "leave it out; a process reward model has two labels for every token",
            )
    steps = None
    if parts.is_process_reward:
        separator = config.step_separator
        if separator is None:
            separator = QWEN_SEPARATOR if encoder and encoder.has_token(QWEN_SEPARATOR) else TRL_SEPARATOR
        ids = encoder.separator_ids(separator) if encoder else ()
        if encoder and not ids:
            raise ConfigError(
                f"the step separator {separator!r} has no tokens", "set --step-separator to a text that has tokens"
            )
        steps = StepRule(separator, ids, config.step_reduction)
    return RewardHead(
        parts.module,
        parts.num_outputs,
        pooling,
        per_token=parts.per_token,
        weights=weights,
        mean=mean,
        std=std,
        steps=steps,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        gate_ids=parts.gate_ids,
    )


# ------------------------------------------------------------------------------------------------ critics


def load_critic(config: ModelConfig, *, moment_bytes: int | None = None, ranks: Ranks = ALONE) -> LoadedModel:
    """Loads a reward model as a critic, which gives one value for each token and can be trained.

    A scalar head is applied to every token, as PPO starts its critic; several attributes are merged by their weights.
    Mean and std stay. Raises CheckpointError, also as `load_reward_model`, for models without a value before the
    sequence is over: encoders, which see later tokens, process reward models and functions.
    """
    if ":" in config.model and not Path(config.model).exists():
        raise CheckpointError(f"{config.model} is a function, and has no weights to train", STARTS)
    loaded = load_reward_model(config, moment_bytes=moment_bytes, ranks=ranks, trains=True)
    if not loaded.causal:
        raise CheckpointError(f"{config.model} is an encoder: a token's value would depend on later tokens", STARTS)
    if isinstance(loaded.head.module, GatedHead):
        raise CheckpointError(f"{config.model} has a gate, which weights whole answers", STARTS)
    if loaded.head.steps is not None:
        raise CheckpointError(f"{config.model} is a process reward model, whose outputs are probabilities", STARTS)
    head = loaded.head
    if head.num_outputs > 1 or head.weights[0] != 1.0:
        with torch.no_grad():  # merges the last linear layer's outputs into one by their weights
            last = [layer for layer in head.module.modules() if isinstance(layer, nn.Linear)][-1]
            by = torch.from_numpy(head.weights).to(last.weight.device)[None]
            last.weight = nn.Parameter((by @ last.weight.double()).float())
            if last.bias is not None:
                last.bias = nn.Parameter((by @ last.bias.double()).float())
            last.out_features = 1
    head = RewardHead(head.module, 1, "last", per_token=True, mean=head.mean, std=head.std)
    info = dataclasses.replace(loaded.info, outputs=("values",), attribute_names=(), pooling="")
    return dataclasses.replace(loaded, head=head, info=info, trains=True)


# ------------------------------------------------------------------------------------ the description of a model


def _check_merge(config: ModelConfig, parts: ModelParts) -> None:
    """Raises ConfigError if the labels exclude each other: the mean of their logits says nothing; warns of any mean."""
    names, problem_type = ", ".join(_labels(parts)), getattr(parts.trunk.config, "problem_type", None)
    if problem_type == "single_label_classification":
        raise ConfigError(
            f"{config.model} chooses one of the labels {names}, and the mean of their logits is no reward",
            "give attribute_weights, such as 1 for what is good and -1 for what is bad; replies have each label's "
            "number, too",
        )
    if problem_type != "regression" and config.merge_attributes:
        log.warning(
            "%s: the reward is the plain mean of %s; give attribute_weights if they do not count alike, or if one of "
            "them is chosen",
            config.name,
            names,
        )


def _labels(parts: ModelParts) -> tuple[str, ...]:
    labels = parts.trunk.config.id2label or {}
    return tuple(labels.get(i, f"LABEL_{i}") for i in range(parts.num_outputs))


def _activation(model_config: Any) -> str:
    """Returns what is applied to a label's output on request: what a cross-encoder names, else what its loss applies.

    sentence-transformers writes a class's path, under the first key since its version 4.
    """
    own = getattr(model_config, "sentence_transformers", None)
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or getattr(model_config, "sbert_ce_default_activation_function", None)
    if named is None:
        return _ACTIVATIONS.get(str(getattr(model_config, "problem_type", "")), "fitting")
    name = str(named).rpartition(".")[2]
    return {"Identity": "none", "Sigmoid": "sigmoid"}.get(name, name)


def describe(
    config: ModelConfig,
    weights_version: str,
    parts: ModelParts,
    encoder: TextEncoder | None,
    eos_token_id: int | None,
    dtype: torch.dtype,
    device: torch.device,
    head: RewardHead,
) -> ModelInfo:
    """Returns the model's description; raises ConfigError if `max_length` exceeds the model's."""
    several = parts.num_outputs > 1 and not parts.is_process_reward
    outputs = ["rewards"] + ["attributes"] * several
    if parts.per_token:
        outputs.append("step_rewards" if parts.is_process_reward else "values")
    steps = head.steps
    is_special = bool(steps and steps.separator_ids and encoder and encoder.is_added(steps.separator_ids[0]))
    reads_pairs = encoder is not None and parts.trunk.config.model_type in SEQUENCE_HEADS
    return ModelInfo(
        name=config.name,
        kind=parts.kind,
        source=config.model,
        outputs=tuple(outputs),
        attribute_names=_labels(parts) if several else (),
        vocab_size=parts.trunk.get_input_embeddings().num_embeddings,
        max_length=find_max_length(config.max_length, parts.trunk),
        eos_token_id=eos_token_id,
        takes_text=encoder is not None,
        takes_messages=encoder is not None and encoder.takes_messages,
        # Truncation on the right has to leave something after the prompt.
        takes_prompts=reads_pairs or (encoder is not None and (steps is not None or config.truncation == "right")),
        takes_labels=encoder is not None and encoder.takes_reference,
        reads_pairs=reads_pairs,
        weights_version=weights_version,
        dtype=dtype_name(dtype),
        device=str(device),
        merges_attributes=config.merge_attributes or not several,
        pooling=head.rule,
        step_rule="" if steps is None else str(steps),
        step_separator_ids=() if steps is None else steps.separator_ids,
        # TRL and Skywork tokenise each step by itself; cards that read logits, and special tokens, whole texts.
        splits_at=steps.separator if steps and encoder and not (config.reward or is_special) else "",
        gate_ids=parts.gate_ids,
        activation=_activation(parts.trunk.config),
        vocabulary="" if encoder is None else encoder.all_tokens_digest(),
        tokenizer="" if encoder is None else encoder.identity(),
        proofs=(*(encoder.proofs if encoder else ()), *([f"rewards: {parts.module}"] if config.reward else ())),
        ending="" if encoder is None else encoder.reported_ending(),
    )
