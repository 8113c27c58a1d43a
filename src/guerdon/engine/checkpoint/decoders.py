"""Decoders with a reward head: finds the head among the file's tensors, whichever library saved it, and loads both.

| saved by | head's tensors | scored |
| --- | --- | --- |
| transformers, TRL RewardTrainer | `score.weight` | last token that is not pad |
| token classification, TRL PRMTrainer | `score` or `classifier` | every token |
| Qwen's and INF's reward models, WorldPM | `score.0`, `score.2` (ReLU between) | last token that is not pad |
| Qwen's process reward models | the same | separators |
| OpenRLHF | `<value_head_prefix>.weight`: `score`, `value_head`, ... | last token; every token for a critic |
| trlX reward models | `v_head.weight`, trunk under `transformer.` | last token, by lengths |
| trlX critics | `v_head.0`, `v_head.2` (ReLU between), the model under `base_model.` | every token |
| TRL critics | `v_head.summary` | every token |
| LlamaFactory's reward models | the same in `value_head.safetensors` | last token |
| Skywork's process reward models | `v_head.summary`, `ForPrmModel` in the architecture | separators, by a sigmoid |
| ArmoRM, QRM | `regression_layer`, and `gating` from where the answer begins | last token that is not pad |
| URM | the means among `score`'s pairs, and `weights.fc` | last token that is not pad |

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
from guerdon.engine.checkpoint.stored import HEAD_FILES, StoredCheckpoint
from guerdon.engine.checkpoint.weights import ModelParts, build_model, check_labels_per_token, no_architectures
from guerdon.engine.heads import GatedHead, Pooling
from guerdon.errors import CheckpointError

LINEAR = ("",)
SUMMARY = ("summary.",)
MLP = ("0.", "2.")
_COMPASS_POOLING: dict[str | None, Pooling] = {"bos": "first", "mean": "mean"}
PREFIXES = ("v_head", "score", "value_head", "classifier")
TRANSFORM = "reward_transform_matrix"
_GATING, _WEIGHTS = "gating.", "weights.fc."
_BEFORE_ANSWER: dict[str, tuple[int, ...]] = {
    "llama": (128009, 128006, 78191, 128007, 271),
    "gemma2": (107, 108, 106, 2516, 108),
}
"""The ids with which an answer begins in Llama 3's and Gemma 2's templates; a gate reads the first of them."""


@dataclass(frozen=True)
class HeadLayout:
    """A head's place in the file: the names of its `layers` after `prefix`, and the meaning of its outputs."""

    prefix: str
    layers: tuple[str, ...]
    num_outputs: int
    per_token: bool
    is_process_reward: bool
    kind: str
    gate: str = ""

    def owns(self, name: str) -> bool:
        return name.startswith(f"{self.prefix}.") or (bool(self.gate) and name.startswith((self.gate, TRANSFORM)))


def load_decoder(
    checkpoint: StoredCheckpoint, config: Any, dtype: torch.dtype, ranks: Ranks = ALONE, trunk: Any = None
) -> ModelParts:
    """Loads a decoder's trunk, unless it is given, and head.

    Raises CheckpointError if a tensor is missing or the head is unknown.
    """
    layout = find_head(checkpoint, config)
    pooling: Pooling = "last"  # OpenRLHF and trlX read where the attention mask ends, so at the end of what was sent
    if layout.kind == "sequence-classification":
        is_compass = config.model_type == "cohere_compass_text"  # the one decoder whose config names a rule
        pooling = _COMPASS_POOLING.get(config.pooling, "last_non_pad") if is_compass else "last_non_pad"
    gate_ids = _BEFORE_ANSWER.get(config.model_type, ()) if layout.gate == _GATING else ()
    if layout.gate == _GATING and not gate_ids:
        raise CheckpointError(
            f"{checkpoint.folder} has a gate, and where that reads the prompt of a {config.model_type} is not known",
            "wrap the model in module:function",
        )
    return ModelParts(
        trunk=load_trunk(checkpoint, config, layout, dtype, ranks) if trunk is None else trunk,
        module=load_gated_head(checkpoint, layout) if layout.gate else load_head(checkpoint, layout),
        gate_ids=gate_ids,
        num_outputs=layout.num_outputs,
        pooling=pooling,
        kind=layout.kind,
        per_token=layout.per_token,
        is_process_reward=layout.is_process_reward,
    )


def find_head(checkpoint: StoredCheckpoint, config: Any) -> HeadLayout:
    """Finds the reward head's tensors; raises CheckpointError if there is no head, or none that can be served."""
    architecture = (config.architectures or [""])[0]
    for prefix, gate in (("regression_layer", _GATING), ("score", _WEIGHTS)):
        if f"{prefix}.weight" in checkpoint.tensors and any(name.startswith(gate) for name in checkpoint.tensors):
            last = max((n for n in checkpoint.tensors if n.startswith(gate) and n.endswith(".bias")), key=_place)
            num_outputs = 1 + checkpoint.tensors[last].shape[0]
            return HeadLayout(prefix, LINEAR, num_outputs, False, False, "sequence-classification", gate)
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
        has_names = weights <= names <= weights | {f"{layer}bias" for layer in layers}
        if has_names and all(len(checkpoint.tensors[f"{prefix}.{name}"].shape) == 2 for name in weights):
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
    is_sigmoid = architecture.endswith("ForPrmModel") and num_outputs == 1
    is_token_classifier = architecture.endswith("ForTokenClassification") or "ProcessReward" in architecture
    is_apart = any(path.name in HEAD_FILES for path in checkpoint.files.weights)  # a reward model of LlamaFactory's
    has_values = (layers == SUMMARY and not is_apart) or (prefix == "v_head" and layers == MLP)
    is_critic = has_values or architecture == "CriticModel"
    per_token = is_token_classifier or is_critic
    is_process_reward = per_token and (num_outputs == 2 or is_sigmoid)
    if per_token:
        check_labels_per_token(num_outputs, checkpoint.folder)
    if architecture.endswith("ForSequenceClassification") and config.num_labels != num_outputs:
        raise CheckpointError(
            f"{prefix} has {num_outputs} outputs, config.json says {config.num_labels} labels",
            "correct id2label (or num_labels) in config.json",
        )
    reads_before_pad = architecture.endswith(("ForSequenceClassification", "ForRewardModel"))
    kind = "sequence-classification" if reads_before_pad else "value-head"
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
    if layout.is_process_reward and layout.num_outputs == 1:
        modules[-1:] = [nn.Sigmoid(), nn.ReLU()]
    return nn.Sequential(*modules[:-1]).eval()


def load_gated_head(checkpoint: StoredCheckpoint, layout: HeadLayout) -> nn.Module:
    """Returns the module of a head with a gate; quantiles are averaged, and of URM's pairs the means count."""
    num_objectives, weight = layout.num_outputs - 1, checkpoint.read(f"{layout.prefix}.weight")
    weight = weight.view(num_objectives, -1, weight.shape[1])
    reads_two = layout.gate == _GATING
    transform = checkpoint.read(TRANSFORM) if TRANSFORM in checkpoint.tensors else torch.eye(num_objectives)
    found = {name.rpartition(".")[0] for name in checkpoint.tensors if name.startswith(layout.gate)}
    names = sorted(found - {_GATING.rstrip(".")}, key=_place)
    layers: list[nn.Module] = []
    for name in names:
        own = {n.rpartition(".")[2]: checkpoint.read(n) for n in checkpoint.tensors if n.rpartition(".")[0] == name}
        is_linear = own["weight"].dim() == 2
        if is_linear and reads_two and name == names[-1]:
            temperature = float(checkpoint.settings.get("gating_temperature", 10))
            own = {n: tensor / temperature for n, tensor in own.items()}
        made: nn.Module = nn.BatchNorm1d(len(own["weight"]))
        if is_linear:
            width, num_inputs = own["weight"].shape
            made = nn.Linear(num_inputs, width, "bias" in own)
        made.load_state_dict(own)
        layers += [made, nn.ReLU() if reads_two else nn.SELU()] if is_linear else [made]
    layers.pop()
    if reads_two:
        transform = transform * checkpoint.read("gating.logit_scale")
        layers.append(nn.Softmax(-1))
    by = weight.mean(1) if reads_two else weight[:, 0]
    return GatedHead(by.contiguous(), nn.Sequential(*layers), transform, reads_two).eval()


def _place(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


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
