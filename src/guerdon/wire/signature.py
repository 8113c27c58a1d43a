"""How models and operations describe themselves in KServe v2's and Triton's terms: tensors, metadata, state."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from guerdon.core import ModelInfo
from guerdon.critic_core import Operation, OperationInfo
from guerdon.errors import InvalidRequest
from guerdon.wire import teacher_tensors

MODEL_VERSION = "1"
"""The only version of every model; new weights change its weights_version instead."""

PLATFORM = "guerdon"

_UNIT = {"type": "number", "minimum": 0, "maximum": 1}

PARAMETERS: dict[str, dict[str, Any]] = {
    "timeout": {"type": "integer", "minimum": 0, "description": "microseconds from arrival; 0: the server's own limit"},
    "priority": {"type": "integer", "minimum": 0, "description": "1 goes first; 0 is the default"},
    "binary_data_output": {"type": "boolean"},
    "train_id": {"type": "string", "description": "names a train request, which is applied once"},
    "gamma": {**_UNIT, "description": "discounts the rewards of a train request"},
    "lam_critic": {**_UNIT, "description": "GAE's lambda of the returns that the critic learns from rewards"},
    "lam_policy": {**_UNIT, "description": "GAE's lambda of the advantages; lam_critic without it"},
    "lam_alpha": {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "lambda of the advantages is 1 - 1 / (lam_alpha * tokens of the row), at least 0",
    },
    "updates": {"type": "integer", "minimum": 1, "description": "passes of a train request over its rows"},
    **teacher_tensors.PARAMETERS,
}
"""The parameters of a request, as JSON schemas."""

Info = ModelInfo | OperationInfo
Spec = tuple[str, str, tuple[int, ...]]
"""Name, datatype and shape (-1: any) of a tensor, without a model's batch axis; an operation has none."""

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


class ModelConfig(TypedDict):
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


_ROWS = (-1, -1)
_TRAIN: tuple[Spec, ...] = (
    ("tokens", "INT64", _ROWS),
    ("returns", "FP32", _ROWS),
    ("prev_values", "FP32", _ROWS),
    ("mask", "FP32", _ROWS),
)
_TREES: tuple[Spec, ...] = (("parents", "INT64", (-1, 1)), ("sequence_lengths", "INT64", (-1, 1)))
_DUMMY: Spec = ("dummy_var", "INT64", (1,))
"""An input without meaning: NeMo-Aligner's client sends it, since the protocol has no request without tensors."""


def metadata(info: Info) -> ModelMetadata:
    """Returns the model's metadata as KServe v2 defines it, with the batch axis in every shape."""
    batch = [-1] if isinstance(info, ModelInfo) else []

    def entries(specs: Iterable[Spec]) -> list[TensorMetadata]:
        return [{"name": name, "datatype": datatype, "shape": [*batch, *shape]} for name, datatype, shape in specs]

    return {
        "name": info.name,
        "versions": [MODEL_VERSION],
        "platform": PLATFORM,
        "inputs": entries((*input_specs(info), *_more_inputs(info))),
        "outputs": entries((*output_specs(info), *_more_outputs(info))),
    }


def config(info: Info, max_batch_size: int) -> ModelConfig:
    """Returns the model's configuration in Triton's terms: shapes without the batch axis, a model's inputs optional.

    `max_batch_size` is the most samples of one request. Clients ask for every output listed here, so those that only
    our own clients read are missing; asking for `errors` would change how a failed row is reported. The parameter
    `tokenizer` identifies the vocabulary (see `vocabulary.identity`), `ending` tells how the chat template writes an
    answer (see `endings.Ending`); each is missing if unknown. `proofs` are lines.
    """

    def entries(specs: Iterable[Spec], **more: Any) -> list[dict[str, Any]]:
        return [
            {"name": name, "data_type": _config_type(datatype), "dims": list(shape), **more}
            for name, datatype, shape in specs
        ]

    must_have = isinstance(info, OperationInfo) and _is_on_rows(info.operation)
    parameters = {}
    if isinstance(info, ModelInfo):
        parameters = {name: getattr(info, name) for name in ("pooling", "tokenizer", "ending")}
        parameters["proofs"] = "\n".join(info.proofs)
    return {
        "name": info.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": max_batch_size if isinstance(info, ModelInfo) else 0,
        "input": entries(input_specs(info), optional=not must_have),
        "output": entries(output_specs(info)),
        "parameters": {name: {"string_value": value} for name, value in parameters.items() if value},
    }


@lru_cache(maxsize=64)
def input_specs(info: Info) -> tuple[Spec, ...]:
    """Returns each input that the model or the operation takes."""
    if isinstance(info, OperationInfo):
        if _is_on_rows(info.operation):
            return _TRAIN
        more = {Operation.SAVE: ("metrics", "BYTES", (1,)), Operation.LOAD: ("checkpoint", "BYTES", (1,))}
        return (_DUMMY, more[info.operation]) if info.operation in more else (_DUMMY,)
    specs: list[Spec] = []
    if info.takes_text:
        specs.append(("sentences", "BYTES", (1,)))
    if info.takes_messages:
        specs.append(("messages", "BYTES", (1,)))
    if info.takes_tokens:
        specs += [("tokens", "INT64", (-1,)), ("sequence_lengths", "INT64", (1,)), ("input_ids", "INT32", (-1,))]
    specs += [("group_ids", "INT64", (1,)), ("prompt_lengths", "INT64", (1,))]
    if "logprobs" in info.outputs:
        specs += teacher_tensors.INPUTS
    if info.takes_prompts:
        specs.append(("prompts", "BYTES", (1,)))
    if info.takes_labels:
        specs.append(("labels", "BYTES", (1,)))
    if "step_rewards" in info.outputs:
        specs.append(("step_positions", "INT64", (-1,)))
    return tuple(specs)


@lru_cache(maxsize=64)
def known_inputs(info: Info) -> tuple[str, ...]:
    """Returns the name of every input."""
    return tuple(name for name, _, _ in (*input_specs(info), *_more_inputs(info)))


@lru_cache(maxsize=64)
def output_specs(info: Info) -> tuple[Spec, ...]:
    """Returns each output that the config lists."""
    if isinstance(info, OperationInfo):
        if _is_on_rows(info.operation):
            return (("loss_mean", "FP32", (1,)),)
        if info.operation is Operation.STATE:
            return (("state", "BYTES", (1,)),)
        return (("status", "INT64", (1,)),)
    if "logprobs" in info.outputs:
        return teacher_tensors.OUTPUTS
    num_attributes = len(info.attribute_names) or -1
    widths = {"rewards": 1 if info.merges_attributes else num_attributes, "attributes": num_attributes}
    specs: list[Spec] = [(name, "FP32", (widths.get(name, -1),)) for name in info.outputs]
    if "step_rewards" in info.outputs:
        specs.append(("step_counts", "INT64", (1,)))
    return (*specs, ("exceeded", "INT32", (1,)))


@lru_cache(maxsize=64)
def known_outputs(info: Info) -> tuple[str, ...]:
    """Returns the name of every output that may be requested."""
    return tuple(name for name, _, _ in (*output_specs(info), *_more_outputs(info)))


def check_names(inputs: Iterable[str], outputs: Iterable[str] | None, info: Info) -> None:
    """Raises InvalidRequest for the first unknown input or requested output."""
    accepted = known_inputs(info)
    for name in inputs:
        if name not in accepted:
            refusal = f"unknown input '{name}'; model '{info.name}' takes {', '.join(accepted)}"
            if name in ("sentences", "messages") and isinstance(info, ModelInfo) and not info.takes_text:
                refusal += f": {why_no_text(info)}"
            raise InvalidRequest(refusal)
    known = known_outputs(info)
    for name in outputs or ():
        if name not in known:
            raise InvalidRequest(f"unknown output '{name}'; model '{info.name}' gives {', '.join(known)}")


def lacks_tokenizer(info: ModelInfo) -> bool:
    """Whether the model is a checkpoint without a tokenizer, which therefore takes no text."""
    return not info.takes_text and info.kind not in ("function", "sum")


def why_no_text(info: ModelInfo) -> str:
    """Returns why the model takes no text, and what to do."""
    if not lacks_tokenizer(info):
        return f"{info.name} reads token ids, not text; send tokens"
    return (
        f"the folder of {info.name} has no tokenizer; send tokens, or put the tokenizer's files (tokenizer.json, "
        "tokenizer_config.json) beside its config.json and restart the server"
    )


def _more_inputs(info: Info) -> tuple[Spec, ...]:
    """The inputs that are not for every request, so that the config does not list them: clients send all it lists."""
    if isinstance(info, ModelInfo):
        return (("parents", "INT64", (1,)),) if "values" in info.outputs else ()
    return (("rewards", "FP32", _ROWS), *_TREES) if _is_on_rows(info.operation) else ()


def _more_outputs(info: Info) -> tuple[Spec, ...]:
    """The outputs that may be requested, but that the config does not list."""
    if isinstance(info, OperationInfo):
        if _is_on_rows(info.operation):
            return (("report", "BYTES", (1,)), ("advantages", "FP32", _ROWS), ("returns", "FP32", _ROWS))
        has_report = info.operation in (Operation.SAVE, Operation.LOAD)
        return (("report", "BYTES", (1,)),) if has_report else ()
    has_lengths = "values" in info.outputs or "logprobs" in info.outputs
    more: tuple[Spec, ...] = (("sequence_lengths", "INT64", (1,)),) if has_lengths else ()
    if "logprobs" in info.outputs:
        more += teacher_tensors.more_outputs(info)
    if not info.merges_attributes and "attributes" not in info.outputs:
        more += (("attributes", "FP32", (-1,)),)
    return (*more, ("errors", "BYTES", (1,)))


def _is_on_rows(operation: Operation) -> bool:
    return operation in (Operation.TRAIN, Operation.VALIDATE)


def _config_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
