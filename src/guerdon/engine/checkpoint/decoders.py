"""Decoders with a reward head: finds the head among the file's tensors, whichever library saved it, and loads both.

| saved by | head's tensors | scored |
| --- | --- | --- |
| transformers, TRL RewardTrainer | `score.weight` | last token that is not pad |
| token classification, TRL PRMTrainer | `score` or `classifier` | every token |
| Qwen's reward and process reward models | `score.0`, `score.2` (ReLU between) | last token, or separators |
| OpenRLHF | `<value_head_prefix>.weight`: `score`, `value_head`, ... | last token; every token for a critic |
| trlX reward models | `v_head.weight`, trunk under `transformer.` | last token, by lengths |
| trlX critics | `v_head.0`, `v_head.2` (ReLU between), the model under `base_model.` | every token |
| TRL critics | `v_head.summary` | every token |

trlX reads the score at the first EOS in one example and right before it in another, from the same format. Both are the
last token of the length that the client sends, so lengths decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING

from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.stored import StoredCheckpoint
from guerdon.engine.checkpoint.weights import ModelParts, build_model, check_labels_per_token, no_architectures
from guerdon.engine.heads import Pooling
from guerdon.errors import CheckpointError

LINEAR = ("",)
SUMMARY = ("summary.",)
MLP = ("0.", "2.")
_COMPASS_POOLING: dict[str | None, Pooling] = {"bos": "first", "mean": "mean"}
PREFIXES = ("v_head", "score", "value_head", "classifier")


@dataclass(frozen=True)
class HeadLayout:
    """A head's place in the file: the names of its `layers` after `prefix`, and the meaning of its outputs."""

    prefix: str
    layers: tuple[str, ...]
    num_outputs: int
    per_token: bool
    is_process_reward: bool
    kind: str

    def owns(self, name: str) -> bool:
        return name.startswith(f"{self.prefix}.")


def load_decoder(checkpoint: StoredCheckpoint, config: Any, dtype: torch.dtype, ranks: Ranks = ALONE) -> ModelParts:
    """Loads a decoder's trunk and head; raises CheckpointError if a tensor is missing or the head is unknown."""
    layout = find_head(checkpoint, config)
    pooling: Pooling = "last"  # OpenRLHF and trlX read where the attention mask ends, so at the end of what was sent
    if layout.kind == "sequence-classification":
        is_compass = config.model_type == "cohere_compass_text"  # the one decoder whose config names a rule
        pooling = _COMPASS_POOLING.get(config.pooling, "last_non_pad") if is_compass else "last_non_pad"
    return ModelParts(
        trunk=load_trunk(checkpoint, config, layout, dtype, ranks),
        module=load_head(checkpoint, layout),
        num_outputs=layout.num_outputs,
        pooling=pooling,
        kind=layout.kind,
        per_token=layout.per_token,
        is_process_reward=layout.is_process_reward,
    )


def find_head(checkpoint: StoredCheckpoint, config: Any) -> HeadLayout:
    """Finds the reward head's tensors; raises CheckpointError if there is no head, or none that can be served."""
    architecture = (config.architectures or [""])[0]
    named = checkpoint.settings.get("value_head_prefix")
    prefixes = (named, *PREFIXES) if isinstance(named, str) else PREFIXES
    for prefix in prefixes:
        names = {name.removeprefix(f"{prefix}.") for name in checkpoint.tensors if name.startswith(f"{prefix}.")}
        if names:
            if not architecture and prefix != "v_head":
                raise no_architectures(checkpoint, config)
            return _layout(checkpoint, config, architecture, prefix, names)
    raise CheckpointError(
        f"{checkpoint.folder} holds a {architecture or config.model_type} without a reward head "
        f"(no {', '.join(prefixes)} among its tensors)",
        "give a reward model's checkpoint; if the head has another name, set value_head_prefix in config.json; if the "
        "reward is read from logits, say so by `reward:` in a YAML file",
    )


def _layout(checkpoint: StoredCheckpoint, config: Any, architecture: str, prefix: str, names: set[str]) -> HeadLayout:
    for layers in (LINEAR, SUMMARY, MLP):
        weights = {f"{layer}weight" for layer in layers}
        if weights <= names <= weights | {f"{layer}bias" for layer in layers}:
            break
    else:
        raise CheckpointError(
            f"the head {prefix} of {checkpoint.folder} is of an unknown form: {', '.join(sorted(names)[:4])}",
            "a linear layer, or two with a ReLU between them, can be served; wrap another in module:function",
        )
    num_outputs, width = checkpoint.tensors[f"{prefix}.{layers[-1]}weight"].shape
    inner = checkpoint.tensors[f"{prefix}.{layers[0]}weight"].shape
    text_config = config.get_text_config()
    widths = {text_config.hidden_size, getattr(text_config, "word_embed_proj_dim", text_config.hidden_size)}
    if inner[1] not in widths or (len(layers) > 1 and inner[0] != width):
        raise CheckpointError(
            f"the head {prefix} of {checkpoint.folder} takes {inner[1]} features, the model gives {max(widths)}",
            "config.json is another model's: copy it again from where the weights came",
        )
    is_token_classifier = architecture.endswith("ForTokenClassification") or "ProcessReward" in architecture
    is_critic = layers == SUMMARY or (prefix == "v_head" and layers == MLP) or architecture == "CriticModel"
    per_token = is_token_classifier or is_critic
    is_process_reward = per_token and num_outputs == 2
    if per_token:
        check_labels_per_token(num_outputs, checkpoint.folder)
    if architecture.endswith("ForSequenceClassification") and config.num_labels != num_outputs:
        raise CheckpointError(
            f"{prefix} has {num_outputs} outputs, config.json says {config.num_labels} labels",
            "correct id2label (or num_labels) in config.json",
        )
    kind = "sequence-classification" if architecture.endswith("ForSequenceClassification") else "value-head"
    kind = "process-reward" if is_process_reward else "token-classification" if is_token_classifier else kind
    return HeadLayout(prefix, layers, num_outputs, per_token, is_process_reward, kind)


def load_head(checkpoint: StoredCheckpoint, layout: HeadLayout) -> nn.Module:
    """Returns the head's module in float32, from the precision that the file has."""
    modules: list[nn.Module] = []
    for layer in layout.layers:
        name = f"{layout.prefix}.{layer}"
        rows, columns = checkpoint.tensors[f"{name}weight"].shape
        has_bias = f"{name}bias" in checkpoint.tensors
        linear = nn.Linear(columns, rows, bias=has_bias, dtype=torch.float32)
        linear.weight = nn.Parameter(checkpoint.read(f"{name}weight"))
        if has_bias:
            linear.bias = nn.Parameter(checkpoint.read(f"{name}bias"))
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1]).eval()


def load_trunk(
    checkpoint: StoredCheckpoint, config: Any, layout: HeadLayout, dtype: torch.dtype, ranks: Ranks = ALONE
) -> Any:
    """Returns the base model, whatever prefix its tensors have; raises CheckpointError if one is missing."""
    model_class = MODEL_MAPPING[type(config)]
    own = f"{model_class.base_model_prefix}."
    tensors = {
        name.removeprefix("base_model."): tensor for name, tensor in checkpoint.tensors.items() if not layout.owns(name)
    }
    if own != "transformer." and not any(name.startswith(own) for name in tensors):
        # trlX's reward models name the trunk `transformer`, whatever its class is.
        tensors = {
            (own + name.removeprefix("transformer.") if name.startswith("transformer.") else name): tensor
            for name, tensor in tensors.items()
        }
    return build_model(model_class, config, tensors, dtype, ranks)
