"""Loads causal language models: from a `LanguageModelConfig` to a `LoadedPolicy` with trunk, head and tokenizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, GenerationConfig

from guerdon.core import ModelInfo
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.loading import loading_on, place
from guerdon.engine.checkpoint.model_config import NO_LANGUAGE_MODEL, find_max_length, find_pad
from guerdon.engine.checkpoint.placement import dtype_name
from guerdon.engine.checkpoint.stored import StoredCheckpoint
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.engine.checkpoint.tokenizer_files import load_tokenizer
from guerdon.engine.checkpoint.weights import LoadedTrunk, ModelParts, build_model
from guerdon.engine.fsdp import fsdp_of
from guerdon.engine.heads import OutputHead, TokenHead
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import LanguageModelConfig, ModelConfig

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
        with_copy = moment_bytes is not None
        opened = loading.open(config, device, moment_bytes, for_text=True, with_copy=with_copy)
        checkpoint, model_config, device, dtype = opened
        tokenizer, proofs = load_tokenizer(checkpoint.text_folder, warns=ranks.is_leader)
        generation, path = None, checkpoint.generation_file
        if path.is_file():
            try:
                generation = GenerationConfig.from_pretrained(path.parent)
            except (OSError, ValueError, TypeError) as e:
                remedy = "copy it again from where the checkpoint came"
                raise CheckpointError(f"{path} cannot be read: {e}", remedy) from e
        model = build_model(
            MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)], model_config, checkpoint.tensors, dtype, ranks
        )
        model = place(model, device, ranks).eval()
        version = loading.weights_version(checkpoint, config.model)
    if generation is not None:
        model.generation_config = generation
    name, trunk = _find_trunk(model)
    prefix = f"{name}."
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


def load_token_head(
    config: ModelConfig,
    checkpoint: StoredCheckpoint,
    model_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    encoder: TextEncoder | None,
) -> ModelParts:
    """Loads a language model whose logits give rewards, as `config.reward` says.

    Raises CheckpointError as `load_policy`, and ConfigError if a token that is named is none of the model's.
    """
    reward = config.reward
    assert reward is not None
    ids = [*reward.ids]
    for text in reward.tokens:
        own = () if encoder is None else encoder.separator_ids(text)
        if len(own) != 1:
            why = f"{len(own)} tokens, {[*own]}" if encoder is not None else "unknown: the checkpoint has no tokenizer"
            raise ConfigError(f"reward.tokens has {text!r}, which is {why}", "name one token, or give its `ids`")
        ids += own
    if len({*ids}) < len(ids):
        raise ConfigError(f"reward.tokens is {reward.tokens}, and their ids are {ids}", "name different tokens")
    vocab_size = model_config.get_text_config().vocab_size
    if strange := [token for token in ids if not 0 <= token < vocab_size]:
        raise ConfigError(
            f"reward reads the token {strange[0]}, and the model has the ids 0 to {vocab_size - 1}",
            "name ids of its own tokenizer",
        )
    mark = config.step_separator
    if mark is not None and encoder is not None:
        own = encoder.separator_ids(mark)
        if len(own) > 1 and not encoder.is_added(own[0]):
            raise ConfigError(
                f"step_separator is {mark!r}, which is {len(own)} tokens, {[*own]}, and may be others in a text",
                "give a mark of one token, or one that begins with a special token",
            )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    model = place(build_model(model_class, model_config, checkpoint.tensors, dtype, ranks), device, ranks).eval()
    _, trunk = _find_trunk(model)
    head = TokenHead(model, OutputHead(model, trunk, checkpoint.folder), ids, reward.form, reward.among)
    return ModelParts(
        trunk=trunk,
        module=head,
        num_outputs=1,
        pooling="last",
        kind="token-reward",
        per_token=mark is not None,
        is_process_reward=mark is not None,
    )


def _find_trunk(model: Any) -> tuple[str, Any]:
    """Returns the name and the module that ends in hidden states; raises CheckpointError if there is none."""
    # Not `base_model`: that of some classes is another module, or themselves.
    base_class = MODEL_MAPPING[type(model.config)]
    named = next((pair for pair in model.named_children() if isinstance(pair[1], base_class)), None)
    if named is None:
        raise CheckpointError(
            f"a {type(model).__name__} does not contain the {base_class.__name__} that its logits are computed from",
            NO_LANGUAGE_MODEL,
        )
    return named


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
