"""Encoders (BERT and its family) with a reward head: takes their classes apart into trunk and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.stored import StoredCheckpoint
from guerdon.engine.checkpoint.weights import ModelParts, build_model, check_labels_per_token, no_architectures
from guerdon.engine.heads import Pooling
from guerdon.errors import CheckpointError


class FirstToken(nn.Module):
    """Applies a module that picks the first token of `[B,T,H]` itself to hidden states `[N,H]`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor) -> Tensor:
        return self.module(hidden[:, None])


def _bert(model: Any) -> nn.Module:
    pooler, model.bert.pooler = model.bert.pooler, None
    return nn.Sequential(FirstToken(pooler), model.classifier)


def _own_pooler(model: Any) -> nn.Module:
    return nn.Sequential(FirstToken(model.pooler), model.classifier)


def _classifier_pools(model: Any) -> nn.Module:
    return FirstToken(model.classifier)


def _modernbert(model: Any) -> nn.Module:
    return nn.Sequential(model.head, model.classifier)


SEQUENCE_HEADS: dict[str, Callable[[Any], nn.Module]] = {
    "bert": _bert,
    "roberta": _classifier_pools,
    "xlm-roberta": _classifier_pools,
    "camembert": _classifier_pools,
    "electra": _classifier_pools,
    "distilbert": lambda model: nn.Sequential(model.pre_classifier, nn.ReLU(), model.classifier),
    "deberta": _own_pooler,
    "deberta-v2": _own_pooler,
    "modernbert": _modernbert,
}
"""How each family's sequence-classification class turns the pooled state into logits, without dropout."""


def load_encoder(checkpoint: StoredCheckpoint, config: Any, dtype: torch.dtype, ranks: Ranks = ALONE) -> ModelParts:
    """Loads an encoder's trunk and head; raises CheckpointError if a tensor is missing or the kind is unknown."""
    if ranks.is_sharded:
        raise CheckpointError(
            f"{checkpoint.folder} holds an encoder ({config.model_type}), which is never sharded over ranks",
            "leave tensor_parallel at 1 and fsdp off; more ranks share the samples then",
        )
    architecture = (config.architectures or [""])[0]
    if not architecture:
        raise no_architectures(checkpoint, config)
    per_token = architecture.endswith("ForTokenClassification")
    if not per_token and not architecture.endswith("ForSequenceClassification"):
        raise CheckpointError(
            f"{checkpoint.folder} holds a {architecture or config.model_type} without a reward head",
            "give a checkpoint saved as sequence or token classification",
        )
    if per_token:
        check_labels_per_token(config.num_labels, checkpoint.folder)
    classes = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING if per_token else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    model = build_model(classes[type(config)], config, checkpoint.tensors, dtype)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trunk = model.base_model
    if per_token:
        module = _modernbert(model) if config.model_type == "modernbert" else model.classifier
    else:
        module = SEQUENCE_HEADS[config.model_type](model)
    # The trunk's dtype has rounded the head's weights; read them again from the file.
    module.float()
    with torch.no_grad():
        for parameter in module.parameters():
            name = names[id(parameter)]
            if name in checkpoint.tensors:
                parameter.copy_(checkpoint.read(name))
    pools_mean = config.model_type == "modernbert" and config.classifier_pooling == "mean"
    pooling: Pooling = "last" if per_token else "mean" if pools_mean else "first"
    is_process_reward = per_token and config.num_labels == 2
    kind = "token-classification" if per_token else "sequence-classification"
    return ModelParts(
        trunk=trunk,
        module=module.eval(),
        num_outputs=config.num_labels,
        pooling=pooling,
        kind="process-reward" if is_process_reward else kind,
        per_token=per_token,
        is_process_reward=is_process_reward,
    )
