"""How models and operations describe themselves in KServe v2's and Triton's terms: tensors, metadata, state."""

from __future__ import annotations

import re
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from guerdon.core import SAME_BITS, ModelInfo
from guerdon.critic_core import Operation, OperationInfo
from guerdon.errors import InvalidRequest
from guerdon.wire.bodies import shown
from guerdon.wire.schema import IGNORED, MESSAGES, PARAMETERS, SENTENCES, Field, Info, inputs_of, outputs_of
from guerdon.wire.tensors import InferRequest

MODEL_VERSION = "1"
"""The only version of every model; new weights change its weights_version instead."""

PLATFORM = "guerdon"

_TEXTS = (MESSAGES.name, SENTENCES.name)

Count = Annotated[int, Meta(ge=0)]


class ServerMetadata(TypedDict):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(TypedDict):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TritonConfig(TypedDict):
    name: str
    platform: str
    backend: str
    max_batch_size: Count
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]
    parameters: dict[str, Any]


class Duration(TypedDict):
    count: Count
    ns: Count


class ModelStatistics(TypedDict):
    name: str
    version: str
    last_inference: Count
    inference_count: Count
    execution_count: Count
    inference_stats: dict[str, Duration]
    batch_stats: list[dict[str, Any]]


class Statistics(TypedDict):
    model_stats: list[ModelStatistics]


class Liveness(TypedDict):
    live: bool


class Readiness(TypedDict):
    """Metadata of the server, or of the model `name`."""

    name: NotRequired[str]
    ready: bool


def metadata(info: Info) -> ModelMetadata:
    """Returns the model's metadata as KServe v2 defines it, with the batch axis in every shape."""
    batch = [-1] if isinstance(info, ModelInfo) else []

    def entries(found: dict[str, Field]) -> list[TensorMetadata]:
        specs = (field.spec(info) for field in found.values())
        return [{"name": name, "datatype": datatype, "shape": [*batch, *shape]} for name, datatype, shape in specs]

    return {
        "name": info.name,
        "versions": [MODEL_VERSION],
        "platform": PLATFORM,
        "inputs": entries(inputs_of(info)),
        "outputs": entries(outputs_of(info)),
    }


def config(info: Info, max_batch_size: int) -> TritonConfig:
    """Returns the model's configuration in Triton's terms: shapes without the batch axis, a model's inputs optional.

    `max_batch_size` is the most samples of one request. The parameter `tokenizer` identifies the vocabulary (see
    `vocabulary.identity`), `ending` describes the chat template's form of an answer (see `endings.Ending`); each is
    missing if unknown. `proofs` are lines; a checkpoint's `dtype` is its weights', and `same_bits` says whether its
    numbers are proved to have the same bits in any batch.
    """

    def entries(found: dict[str, Field], **more: Any) -> list[dict[str, Any]]:
        specs = (field.spec(info) for field in found.values() if field.is_listed)
        return [
            {"name": name, "data_type": f"TYPE_{datatype.replace('BYTES', 'STRING')}", "dims": list(shape), **more}
            for name, datatype, shape in specs
        ]

    is_training = isinstance(info, OperationInfo) and info.operation in (Operation.TRAIN, Operation.VALIDATE)
    parameters = {}
    if isinstance(info, ModelInfo):
        parameters = {name: getattr(info, name) for name in ("pooling", "tokenizer", "ending")}
        parameters["proofs"] = "\n".join(info.proofs)
        parameters["dtype"] = info.dtype if info.is_checkpoint else ""
        parameters["same_bits"] = str(SAME_BITS in info.proofs).lower() if info.is_checkpoint else ""
    return {
        "name": info.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": max_batch_size if isinstance(info, ModelInfo) else 0,
        "input": entries(inputs_of(info), optional=not is_training),
        "output": entries(outputs_of(info)),
        "parameters": {name: {"string_value": value} for name, value in parameters.items() if value},
    }


def check_names(request: InferRequest, info: Info) -> None:
    """Raises InvalidRequest for the first unknown input, requested output or parameter."""
    accepted = inputs_of(info)
    for name in request.inputs:
        if name not in accepted:
            refusal = f"unknown input '{name}'; model '{info.name}' takes {', '.join(accepted)}"
            if name in _TEXTS and isinstance(info, ModelInfo) and not info.takes_text:
                refusal += f": {why_no_text(info)}"
            raise InvalidRequest(refusal)
    known = outputs_of(info)
    for name in request.outputs or ():
        if name not in known:
            raise InvalidRequest(f"unknown output '{name}'; model '{info.name}' gives {', '.join(known)}")
    for name in request.parameters:
        if name not in PARAMETERS and not re.match(IGNORED, name):
            raise InvalidRequest(f"unknown parameter {shown(name)}; requests take {', '.join(PARAMETERS)}")


def why_no_text(info: ModelInfo) -> str:
    """Returns why the model takes no text, and what to do."""
    if info.takes_text or not info.is_checkpoint:
        return f"{info.name} reads token ids, not text; send tokens"
    return (
        f"the folder of {info.name} has no tokenizer; send tokens, or put the tokenizer's files (tokenizer.json, "
        "tokenizer_config.json) beside its config.json and restart the server"
    )
