"""From a `LanguageModelConfig` to a `LoadedPolicy`: a causal language model, its trunk, its head, its tokenizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, GenerationConfig

from guerdon.core import ModelInfo
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint import encoders
from guerdon.engine.checkpoint.describe import find_max_length, find_pad
from guerdon.engine.checkpoint.files import open_checkpoint
from guerdon.engine.checkpoint.loading import read_config
from guerdon.engine.checkpoint.placement import check_memory, dtype_name, pick_device, pick_dtype
from guerdon.engine.checkpoint.sharding import alike, place
from guerdon.engine.checkpoint.text import load_tokenizer
from guerdon.engine.checkpoint.weights import fill
from guerdon.engine.forward import LoadedTrunk
from guerdon.engine.gathering import gathering
from guerdon.engine.host_memory import keep_freed
from guerdon.engine.language import OutputHead
from guerdon.errors import CheckpointError
from guerdon.settings.config import LanguageModelConfig

REMEDY = "give the checkpoint of a causal language model"
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LoadedPolicy(LoadedTrunk):
    """A causal language model ready to generate and to learn.

    `model` is transformers' own, whole, in eval mode; `trunk` is the part of it that ends in hidden states, the same
    modules, and `head` makes logits of these. `tokenizer` is transformers' own, None where the checkpoint has none;
    `eos_token_ids` are all ids of the model's that the checkpoint names so, and `folder` is where it lies.
    """

    model: Any
    head: OutputHead
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    folder: Path
    config: LanguageModelConfig

    @property
    def max_length(self) -> int | None:
        """The longest sequence, prompt and response together; None where nothing bounds it."""
        return self.info.max_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model takes."""
        assert self.info.vocab_size is not None
        return self.info.vocab_size


def load_policy(
    config: LanguageModelConfig,
    device: torch.device | None = None,
    *,
    moment_bytes: int | None = None,
    ranks: Ranks = ALONE,
) -> LoadedPolicy:
    """Loads the checkpoint that `config.model` names onto `device` (default: the ranks', else the config's).

    Where all its weights will be trained, `moment_bytes` says how much an optimiser keeps for each of them; memory must
    have room for a frozen copy beside them then. All `ranks` must call it alike, and shard it as they say; give
    `ranks.frozen()` for one that FSDP is to leave whole.

    Raises CheckpointError where it is missing, incomplete, too large or no causal language model.
    """
    with alike(ranks) as others:
        device = device or ranks.device or pick_device(config.device)
        keep_freed(device)
        dtype = pick_dtype(config.dtype, device)
        checkpoint = open_checkpoint(config.model, config.revision)
        model_config = read_config(checkpoint)
        if model_config.model_type in encoders.SEQUENCE_HEADS:
            raise CheckpointError(
                f"{checkpoint.folder} holds an encoder ({model_config.model_type}), which generates no text", REMEDY
            )
        check_memory(checkpoint, dtype, device, moment_bytes, with_copy=moment_bytes is not None, ranks=ranks)
        # Behind it, so that no rank counts what its neighbours have taken already as taken by others.
        others.compare(checkpoint, dtype, config)
        tokenizer = load_tokenizer(checkpoint.folder)
        generation = _generation_config(checkpoint.folder)
        model = fill(MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)], model_config, checkpoint.tensors, dtype, ranks)
        model = place(model, device, ranks).eval()
        version = others.weights_version(checkpoint, config.model)
    if generation is not None:
        model.generation_config = generation
    trunk = _trunk(model)
    prefix = next(name for name, child in model.named_children() if child is trunk) + "."
    summed: frozenset[str] = getattr(model, "summed_over_tensor_ranks", frozenset())
    weights = gathering(model, ranks)
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
            sampled_version=checkpoint.sampled_version,
            dtype=dtype_name(dtype),
            device=str(device),
        ),
        pad_token_id=find_pad(model_config, tokenizer, vocab_size),
        config=config,
        model=model,
        head=OutputHead(model, trunk, checkpoint.folder, weights),
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(model_config, generation, tokenizer, vocab_size),
        folder=checkpoint.folder,
        ranks=ranks,
        gathering=weights,
        summed_over_tensor_ranks=frozenset(name.removeprefix(prefix) for name in summed if name.startswith(prefix)),
    )


def _trunk(model: Any) -> Any:
    """The child of the model that is its base model; some classes' own `base_model` names another, or themselves."""
    base_class = MODEL_MAPPING[type(model.config)]
    for child in model.children():
        if isinstance(child, base_class):
            return child
    raise CheckpointError(
        f"a {type(model).__name__} has no {base_class.__name__} in it, of whose states its logits are made", REMEDY
    )


def _generation_config(folder: Path) -> GenerationConfig | None:
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}", "copy it again from where the checkpoint came") from e


def _eos_token_ids(
    model_config: Any, generation: GenerationConfig | None, tokenizer: Any, vocab_size: int
) -> tuple[int, ...]:
    """Every end-of-sequence token that any of the three names; chat models often name one here and one there.

    One that the model has no logit for is left out, for it is never drawn.
    """
    found: dict[int, None] = {}
    for source in (model_config.get_text_config(), generation, tokenizer):
        own = getattr(source, "eos_token_id", None)
        found |= dict.fromkeys(own if isinstance(own, list) else [] if own is None else [own])
    if strange := [token for token in found if not 0 <= token < vocab_size]:
        log.warning("EOS %s ends no response: the model has the ids 0 to %d", strange, vocab_size - 1)
    return tuple(token for token in found if token not in strange)
