"""A critic's operations as tensors, under NeMo-Aligner's names: requests, replies, and reports as JSON."""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from typing import Any, TypeVar

import numpy as np
import orjson

from guerdon.critic_core import (
    CheckpointInfo,
    ControlRequest,
    CriticState,
    Gae,
    Operation,
    OperationInfo,
    TrainReport,
    TrainRequest,
)
from guerdon.errors import InvalidRequest
from guerdon.trees import NO_TREE_REWARDS
from guerdon.wire.bodies import parse, shown
from guerdon.wire.signature import MODEL_VERSION, check_names, input_specs, known_outputs
from guerdon.wire.tensors import InferReply, InferRequest, Tensor, floats, integer_per_row, integers

Noun = TypeVar("Noun")

TRAIN_ID = "train_id"
"""The request parameter that names a train request. The protocol's own `id` will not do: clients count it from 0."""
GAE = tuple(f.name for f in dataclasses.fields(Gae))
"""The request parameters beside the input rewards."""

_LARGEST = 1e30
"""Largest of them; JSON has whole numbers beyond any float."""
_ESTIMATED = ("returns", "prev_values")
"""The inputs that rewards stand for."""
_TARGETS = ("returns", "prev_values", "mask", "rewards")
_TREES = ("parents", "sequence_lengths")
"""The inputs that make the rows segments of trees."""
_ESTIMATES = ("advantages", "returns")
"""The outputs that they have, the fields of a report that are tensors."""


def to_request(request: InferRequest, info: OperationInfo) -> TrainRequest | ControlRequest:
    """Returns the request that the tensors carry; raises InvalidRequest, which names the tensor and shape at fault.

    A train request without an id has an empty one. The critic itself checks the numbers.
    """
    check_names(request.inputs, request.outputs, info)
    if info.operation in (Operation.TRAIN, Operation.VALIDATE):
        return _train_request(request, info)
    control = ControlRequest(info.operation, timeout_s=request.timeout_s)
    if "checkpoint" in request.inputs:
        control.checkpoint = _text(request.inputs["checkpoint"]) or None
    if "metrics" in request.inputs:
        control.metrics = _metrics(_text(request.inputs["metrics"]))
    return control


def to_reply(
    answer: TrainReport | CheckpointInfo | CriticState | None, request: InferRequest, info: OperationInfo
) -> InferReply:
    """Returns the tensors that answer `request`: those that it names, else all."""
    outputs: list[Tensor] = []
    for name in request.outputs or known_outputs(info):
        if name == "loss_mean":
            assert isinstance(answer, TrainReport)
            outputs.append(Tensor.of(name, np.array([answer.loss], np.float32)))
        elif name in _ESTIMATES:
            if (table := getattr(answer, name)) is not None:
                outputs.append(Tensor.of(name, table))
        elif name == "status":
            outputs.append(Tensor.of(name, np.zeros(1, np.int64)))
        elif answer is not None:
            outputs.append(Tensor(name, "BYTES", (1,), [to_json(answer)]))
    parameters = {} if answer is None else {"weights_version": answer.weights_version}
    return InferReply(info.name, MODEL_VERSION, outputs, request.id, parameters)


def to_json(noun: TrainReport | CheckpointInfo | CriticState) -> bytes:
    """Returns the noun as a JSON object without tensors; non-finite numbers are null."""
    fields = {f.name: getattr(noun, f.name) for f in dataclasses.fields(noun) if f.name not in _ESTIMATES}
    return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)


def from_json(cls: type[Noun], text: bytes) -> Noun:
    """Returns the noun of class `cls` in a JSON object, with NaN for null numbers; raises ValueError."""
    value = orjson.loads(text)
    try:
        return _noun(cls, value)
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"not a {cls.__name__}: {text[:200]!r}") from e


def _noun(cls: type[Noun], value: dict[str, Any]) -> Noun:
    """Unknown keys are ignored, and fields with a default may be missing: the other side may be newer or older."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    missing = dataclasses.MISSING
    optional = {f.name for f in fields if f.default is not missing or f.default_factory is not missing}
    read = [f.name for f in fields if f.name in value or f.name not in optional]
    return cls(**{name: _field(hints[name], value[name]) for name in read})


def _field(hint: Any, value: Any) -> Any:
    if hint is float:
        return math.nan if value is None else float(value)
    if typing.get_origin(hint) is list:
        return [_field(typing.get_args(hint)[0], v) for v in value]
    if typing.get_origin(hint) is dict:
        return {k: _field(typing.get_args(hint)[1], v) for k, v in value.items()}
    return _noun(typing.cast(type, hint), value) if dataclasses.is_dataclass(hint) else value


def _train_request(request: InferRequest, info: OperationInfo) -> TrainRequest:
    inputs = request.inputs
    needed = _needed(request, info)
    missing = [name for name in needed if name not in inputs]
    if missing:
        raise InvalidRequest(f"model '{info.name}' needs the inputs {', '.join(needed)}; missing: {', '.join(missing)}")
    name = request.parameters.get(TRAIN_ID, "")
    if not isinstance(name, str):
        raise InvalidRequest(f"parameter '{TRAIN_ID}' is {shown(name)}; it must be a text")
    tokens = integers(inputs["tokens"])
    if tokens.ndim != 2:
        raise InvalidRequest(f"input 'tokens' must have shape [N, T], not {list(tokens.shape)}")
    num_rows, width = tokens.shape
    is_tree = "parents" in needed
    if num_rows == 0 or width < 2 - is_tree:
        raise InvalidRequest(
            f"input 'tokens' has shape {list(tokens.shape)}: at least one row of two tokens is needed, as values are "
            "trained on the actions that follow them"
        )
    updates = request.count("updates") if "updates" in request.parameters else 1
    if updates != 1 and info.operation is Operation.VALIDATE:
        raise InvalidRequest(f"parameter 'updates' is {updates}, but '{info.name}' makes none; leave it out")
    tables = {name: _target(inputs[name], num_rows, width, is_tree) for name in needed if name in _TARGETS}
    if "rewards" not in tables:
        returns, prev_values, mask = tables["returns"], tables["prev_values"], tables["mask"]
        made = TrainRequest(name, tokens, returns, prev_values, mask, request.timeout_s, updates)
        if is_tree:
            made.parents, made.lengths = (integer_per_row(inputs[name], num_rows) for name in _TREES)
        return made
    unknown = np.empty((num_rows, 0), np.float32)
    rewards, rule = tables["rewards"], _gae(request)
    return TrainRequest(name, tokens, unknown, unknown, tables["mask"], request.timeout_s, updates, rewards, rule)


def _needed(request: InferRequest, info: OperationInfo) -> list[str]:
    """Returns the inputs that the request must have; raises InvalidRequest for what does not go together."""
    names = [name for name, _, _ in input_specs(info)]
    is_tree = any(name in request.inputs for name in _TREES)
    if is_tree and "rewards" in request.inputs:
        raise InvalidRequest(NO_TREE_REWARDS)
    if "rewards" not in request.inputs:
        for name in GAE:
            if name in request.parameters:
                raise InvalidRequest(f"parameter '{name}' goes with the input rewards, which is missing")
        for name in request.outputs or ():
            if name in _ESTIMATES:
                raise InvalidRequest(f"output '{name}' needs the input rewards, in place of returns and prev_values")
        return [*names, *_TREES] if is_tree else names
    for name in _ESTIMATED:
        if name in request.inputs:
            raise InvalidRequest(f"inputs 'rewards' and '{name}' are both given: of rewards the critic makes {name}")
    return [*(name for name in names if name not in _ESTIMATED), "rewards"]


def _gae(request: InferRequest) -> Gae:
    given: dict[str, float] = {}
    for name in GAE:
        value = request.parameters.get(name)
        if value is None:
            if name in ("gamma", "lam_critic"):
                raise InvalidRequest(f"the input rewards needs the parameter {name}, a number from 0 to 1")
        elif type(value) not in (int, float) or abs(value) > _LARGEST:
            raise InvalidRequest(f"parameter '{name}' is {shown(value)}; it must be a number")
        else:
            given[name] = float(value)
    return Gae(**given)


def _target(tensor: Tensor, num_rows: int, width: int, is_tree: bool) -> np.ndarray:
    is_of_rows = tensor.name == "rewards" and tensor.shape == (num_rows, 1)
    if is_tree:
        if tensor.shape != (num_rows, width):
            raise InvalidRequest(
                f"input '{tensor.name}' must have shape [N, T] = [{num_rows}, {width}] beside parents, not "
                f"{list(tensor.shape)}: column t of a segment concerns the action at its token t"
            )
    elif tensor.shape != (num_rows, width - 1) and not is_of_rows:
        other = f" or [N, 1] = [{num_rows}, 1]" if tensor.name == "rewards" else ""
        raise InvalidRequest(
            f"input '{tensor.name}' must have shape [N, T-1] = [{num_rows}, {width - 1}]{other} beside tokens "
            f"[{num_rows}, {width}], not {list(tensor.shape)}: column t concerns the action at token t+1"
        )
    return floats(tensor)


def _text(tensor: Tensor) -> str:
    if not isinstance(tensor.data, list) or len(tensor.data) != 1:
        raise InvalidRequest(f"input '{tensor.name}' must be BYTES [1], not {tensor.datatype} {list(tensor.shape)}")
    try:
        return bytes(tensor.data[0]).decode()
    except UnicodeDecodeError as e:
        raise InvalidRequest(f"input '{tensor.name}': not valid UTF-8 at byte {e.start}") from e


def _metrics(text: str) -> dict[str, float]:
    metrics = parse(text.encode(), "input 'metrics'")
    if not isinstance(metrics, dict):
        raise InvalidRequest("input 'metrics': must be a JSON object of names and numbers")
    for name, value in metrics.items():
        if type(value) not in (int, float) or abs(value) > sys.float_info.max:
            raise InvalidRequest(
                f"input 'metrics': must be a JSON object of names and numbers; {name[:100]!r} is not a finite number"
            )
    return {name: float(value) for name, value in metrics.items()}
