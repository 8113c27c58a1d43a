"""Loads causal language models: from a `LanguageModelConfig` to a `LoadedPolicy` with trunk, head and tokenizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, GenerationConfig

from guerdon.core import ModelInfo
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.encoders import SEQUENCE_HEADS
from guerdon.engine.checkpoint.merging import merge_adapter
from guerdon.engine.checkpoint.model_config import find_max_length, find_pad, read_config
from guerdon.engine.checkpoint.placement import check_memory, dtype_name, pick_device, pick_dtype
from guerdon.engine.checkpoint.sharding import loading_on, place
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.engine.checkpoint.tokenizer_files import load_tokenizer
from guerdon.engine.checkpoint.weights import LoadedTrunk, build_model
from guerdon.engine.fsdp import fsdp_of
from guerdon.engine.heads import OutputHead
from guerdon.engine.host import keep_freed
from guerdon.engine.products import warn_if_slow
from guerdon.errors import CheckpointError
from guerdon.settings.config import LanguageModelConfig

REMEDY = "give the checkpoint of a causal language model"
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LoadedPolicy(LoadedTrunk):
    """A causal language model ready to generate and to learn.

    `model` is transformers' own in eval mode, `trunk` the part of it that ends in hidden states (the same modules), and
    `head` turns these into logits. `tokenizer` is transformers' own, None if the checkpoint has none. `eos_token_ids`
    are all that the checkpoint names.
    """

    model: Any
    head: OutputHead
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    config: LanguageModelConfig

    @property
    def max_length(self) -> int | None:
        """The longest sequence, prompt and response together; None if it is unbounded."""
        return self.info.max_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model accepts."""
        assert self.info.vocab_size is not None
        return self.info.vocab_size


def load_policy(
    config: LanguageModelConfig,
    device: torch.device | None = None,
    *,
    moment_bytes: int | None = None,
    ranks: Ranks = ALONE,
) -> LoadedPolicy:
    """Collective; loads the checkpoint `config.model` onto `device` (default: the ranks', else the config's).

    `moment_bytes` is the optimiser state per weight, if all of them will be trained; memory must then have room for a
    frozen copy, too. Pass `ranks.frozen()` for a model that FSDP must not shard.

    Raises CheckpointError if the checkpoint is missing, incomplete, too large or no causal language model.
    """
    with loading_on(ranks) as loading:
        device = device or ranks.device or pick_device(config.device)
        keep_freed(device)
        dtype = pick_dtype(config.dtype, device)
        if ranks.is_leader:
            warn_if_slow(dtype, device)
        checkpoint = open_checkpoint(config.model, config.revision, config.base)
        model_config = read_config(checkpoint)
        if model_config.model_type in SEQUENCE_HEADS:
            raise CheckpointError(
                f"{checkpoint.folder} holds an encoder ({model_config.model_type}), which generates no text", REMEDY
            )
        _refuse_classifier(model_config, checkpoint.folder)
        check_memory(checkpoint, dtype, device, moment_bytes, with_copy=moment_bytes is not None, ranks=ranks)
        # After the check, so that no rank counts memory that its neighbours have allocated for theirs.
        loading.compare(checkpoint, dtype, config)
        checkpoint = merge_adapter(checkpoint, for_text=True)
        model_config = read_config(checkpoint)
        tokenizer, proofs = load_tokenizer(checkpoint.text_folder, warns=ranks.is_leader)
        generation = _generation_config(checkpoint.generation_file)
        model = build_model(
            MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)], model_config, checkpoint.tensors, dtype, ranks
        )
        model = place(model, device, ranks).eval()
        version = loading.weights_version(checkpoint, config.model)
    if generation is not None:
        model.generation_config = generation
    trunk = _trunk(model)
    prefix = next(name for name, child in model.named_children() if child is trunk) + "."
    summed: frozenset[str] = getattr(model, "summed_over_tensor_ranks", frozenset())
    fsdp = fsdp_of(model, ranks)
    vocab_size = model.get_input_embeddings().num_embeddings
    return LoadedPolicy(
        trunk=trunk,
        causal=True,
        info=ModelInfo(
            name=config.model,
            kind="causal-lm",
            outputs=(),
            vocab_size=vocab_size,
            max_length=find_max_length(config.max_length, trunk),
            eos_token_id=tokenizer.eos_token_id if tokenizer is not None else None,
            takes_text=tokenizer is not None,
            takes_messages=tokenizer is not None and bool(tokenizer.chat_template),
            weights_version=version,
            dtype=dtype_name(dtype),
            device=str(device),
            proofs=proofs,
        ),
        pad_token_id=find_pad(model_config, tokenizer, vocab_size),
        config=config,
        model=model,
        head=OutputHead(model, trunk, checkpoint.folder, fsdp),
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(model_config, generation, tokenizer, vocab_size),
        origin=checkpoint.origin,
        ranks=ranks,
        fsdp=fsdp,
        summed_over_tensor_ranks=frozenset(name.removeprefix(prefix) for name in summed if name.startswith(prefix)),
    )


def _refuse_classifier(model_config: Any, folder: Path) -> None:
    """Raises CheckpointError for a reward model, which has a head of its own in place of the language model's."""
    architecture = (model_config.architectures or [""])[0]
    if architecture.endswith(("ForSequenceClassification", "ForTokenClassification", "ForRewardModel")):
        raise CheckpointError(
            f"{folder} holds a {architecture}, which has a head for rewards and none for the next token", REMEDY
        )


def _trunk(model: Any) -> Any:
    """Returns the child that is the base model; the `base_model` of some classes is another module, or themselves."""
    base_class = MODEL_MAPPING[type(model.config)]
    for child in model.children():
        if isinstance(child, base_class):
            return child
    raise CheckpointError(
        f"a {type(model).__name__} does not contain the {base_class.__name__} that its logits are computed from", REMEDY
    )


def _generation_config(path: Path) -> GenerationConfig | None:
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(path.parent)
    except (OSError, ValueError, TypeError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}", "copy it again from where the checkpoint came") from e


def _eos_token_ids(
    model_config: Any, generation: GenerationConfig | None, tokenizer: Any, vocab_size: int
) -> tuple[int, ...]:
    """Returns every EOS token that any of the three names; chat models often name different ones.

    Tokens that the model has no logit for are left out, because they are never sampled.
    """
    found: dict[int, None] = {}
    for source in (model_config.get_text_config(), generation, tokenizer):
        own = getattr(source, "eos_token_id", None)
        found |= dict.fromkeys(own if isinstance(own, list) else [] if own is None else [own])
    if strange := [token for token in found if not 0 <= token < vocab_size]:
        log.warning("ignoring EOS %s: the ids of the model are 0 to %d", strange, vocab_size - 1)
    return tuple(token for token in found if token not in strange)
