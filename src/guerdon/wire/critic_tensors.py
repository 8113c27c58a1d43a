"""A critic's operations as tensors, under NeMo-Aligner's names: requests, replies, and reports as JSON."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any, TypeVar

import msgspec
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
from guerdon.wire import schema
from guerdon.wire.bodies import parse, shown
from guerdon.wire.schema import Field, inputs_of, outputs_of
from guerdon.wire.signature import MODEL_VERSION, check_names
from guerdon.wire.tensors import InferReply, InferRequest, Tensor, floats, integer_per_row, integers

Noun = TypeVar("Noun")

TRAIN_ID = "train_id"
"""The request parameter that names a train request. The protocol's own `id` will not do: clients count it from 0."""
GAE = tuple(f.name for f in dataclasses.fields(Gae))
"""The request parameters beside rewards."""

_LARGEST = 1e30
"""Largest of them; JSON has whole numbers beyond any float."""
_ESTIMATED = (schema.RETURNS.name, schema.PREV_VALUES.name)
"""The inputs that rewards replace."""
_TREES = (schema.TRAIN_PARENTS, schema.TRAIN_LENGTHS)
"""The inputs that make the rows segments of trees."""
_ESTIMATES = (schema.ADVANTAGES, schema.OUT_RETURNS)
"""The outputs that rewards have, the attributes of a report that are tensors."""


def to_request(request: InferRequest, info: OperationInfo) -> TrainRequest | ControlRequest:
    """Returns the request that the tensors carry; raises InvalidRequest, which names the tensor and shape at fault.

    A train request without an id has an empty one. The critic itself checks the numbers.
    """
    check_names(request, info)
    if info.operation in (Operation.TRAIN, Operation.VALIDATE):
        return _train_request(request, info)
    control = ControlRequest(info.operation, timeout_s=request.timeout_s)
    if (checkpoint := request.inputs.get(schema.CHECKPOINT.name)) is not None:
        control.checkpoint = _text(checkpoint) or None
    if (metrics := request.inputs.get(schema.METRICS.name)) is not None:
        control.metrics = _metrics(_text(metrics))
    return control


def to_reply(
    answer: TrainReport | CheckpointInfo | CriticState | None, request: InferRequest, info: OperationInfo
) -> InferReply:
    """Returns the tensors that answer `request`: those that it names, else all."""
    known = outputs_of(info)
    outputs: list[Tensor] = []
    for name in request.outputs or known:
        field = known[name]
        if field is schema.LOSS:
            outputs.append(Tensor.of(name, np.array([getattr(answer, field.at)], np.float32)))
        elif field in _ESTIMATES:
            if (table := getattr(answer, field.at)) is not None:
                outputs.append(Tensor.of(name, table))
        elif field is schema.STATUS:
            outputs.append(Tensor.of(name, np.zeros(1, np.int64)))
        elif answer is not None:
            outputs.append(Tensor(name, "BYTES", (1,), [to_json(answer)]))
    parameters = {} if answer is None else {"weights_version": answer.weights_version}
    return InferReply(info.name, MODEL_VERSION, outputs, request.id, parameters)


def to_json(noun: TrainReport | CheckpointInfo | CriticState) -> bytes:
    """Returns the noun as a JSON object without tensors; non-finite numbers are null."""
    left_out = {field.at for field in _ESTIMATES}
    found = {f.name: getattr(noun, f.name) for f in dataclasses.fields(noun) if f.name not in left_out}
    return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)


def from_json(cls: type[Noun], text: bytes) -> Noun:
    """Returns the noun of class `cls` in a JSON object, with NaN for null numbers; raises ValueError.

    Unknown keys are ignored, and fields with a default may be missing: the other side may be newer or older.
    """
    found = orjson.loads(text)
    if isinstance(found, dict):
        for field in _ESTIMATES:  # null in a report that the server has kept
            found.pop(field.at, None)
    try:
        return msgspec.convert(_with_nan(found), cls)
    except msgspec.ValidationError as e:
        raise ValueError(f"not a {cls.__name__}: {e}: {text[:200]!r}") from e


def _with_nan(value: Any) -> Any:
    """Returns the value with NaN in place of null."""
    if isinstance(value, list):
        return [_with_nan(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _with_nan(inner) for name, inner in value.items()}
    return math.nan if value is None else value


def _train_request(request: InferRequest, info: OperationInfo) -> TrainRequest:
    inputs = request.inputs
    needed = _needed(request, info)
    missing = [field.name for field in needed if field.name not in inputs]
    if missing:
        names = ", ".join(field.name for field in needed)
        raise InvalidRequest(f"model '{info.name}' needs the inputs {names}; missing: {', '.join(missing)}")
    train_id = request.parameters.get(TRAIN_ID, "")
    if not isinstance(train_id, str):
        raise InvalidRequest(f"parameter '{TRAIN_ID}' is {shown(train_id)}; it must be a text")
    name = schema.TRAIN_TOKENS.name
    tokens = integers(inputs[name])
    if tokens.ndim != 2:
        raise InvalidRequest(f"input '{name}' must have shape [N, T], not {list(tokens.shape)}")
    num_rows, width = tokens.shape
    is_tree = schema.TRAIN_PARENTS in needed
    if num_rows == 0 or width < 2 - is_tree:
        raise InvalidRequest(
            f"input '{name}' has shape {list(tokens.shape)}: at least one row of two tokens is needed, as values are "
            "trained on the actions that follow them"
        )
    updates = request.count("updates") if "updates" in request.parameters else 1
    if updates != 1 and info.operation is Operation.VALIDATE:
        raise InvalidRequest(f"parameter 'updates' is {updates}, but '{info.name}' makes none; leave it out")
    unknown = np.empty((num_rows, 0), np.float32)
    made = TrainRequest(train_id, tokens, unknown, unknown, unknown, request.timeout_s, updates)
    for field in needed:
        if field in _TREES:
            setattr(made, field.at, integer_per_row(inputs[field.name], num_rows))
        elif field is not schema.TRAIN_TOKENS:
            setattr(made, field.at, _target(inputs[field.name], num_rows, width, is_tree))
    if made.rewards is not None:
        made.gae = _gae(request)
    return made


def _needed(request: InferRequest, info: OperationInfo) -> list[Field]:
    """Returns the inputs that the request must have; raises InvalidRequest for what does not go together."""
    usual = [field for field in inputs_of(info).values() if field.is_listed]
    is_tree = any(field.name in request.inputs for field in _TREES)
    rewards = schema.TRAIN_REWARDS.name
    if rewards not in request.inputs:
        for name in GAE:
            if name in request.parameters:
                raise InvalidRequest(f"parameter '{name}' goes with the input {rewards}, which is missing")
        for field in _ESTIMATES:
            if field.name in (request.outputs or ()):
                raise InvalidRequest(
                    f"output '{field.name}' needs the input {rewards}, in place of {' and '.join(_ESTIMATED)}"
                )
        return [*usual, *_TREES] if is_tree else usual
    if is_tree:
        raise InvalidRequest(NO_TREE_REWARDS)
    for name in _ESTIMATED:
        if name in request.inputs:
            raise InvalidRequest(f"inputs '{rewards}' and '{name}' are both given: of rewards the critic makes {name}")
    return [*(field for field in usual if field.name not in _ESTIMATED), schema.TRAIN_REWARDS]


def _gae(request: InferRequest) -> Gae:
    given: dict[str, float] = {}
    for name in GAE:
        value = request.parameters.get(name)
        if value is None:
            if name in ("gamma", "lam_critic"):
                raise InvalidRequest(
                    f"the input {schema.TRAIN_REWARDS.name} needs the parameter {name}, a number from 0 to 1"
                )
        elif type(value) not in (int, float) or abs(value) > _LARGEST:
            raise InvalidRequest(f"parameter '{name}' is {shown(value)}; it must be a number")
        else:
            given[name] = float(value)
    return Gae(**given)


def _target(tensor: Tensor, num_rows: int, width: int, is_tree: bool) -> np.ndarray:
    is_rewards = tensor.name == schema.TRAIN_REWARDS.name
    ids, parents = schema.TRAIN_TOKENS.name, schema.TRAIN_PARENTS.name
    if is_tree:
        if tensor.shape != (num_rows, width):
            raise InvalidRequest(
                f"input '{tensor.name}' must have shape [N, T] = [{num_rows}, {width}] beside {parents}, not "
                f"{list(tensor.shape)}: column t of a segment concerns the action at its token t"
            )
    elif tensor.shape != (num_rows, width - 1) and not (is_rewards and tensor.shape == (num_rows, 1)):
        other = f" or [N, 1] = [{num_rows}, 1]" if is_rewards else ""
        raise InvalidRequest(
            f"input '{tensor.name}' must have shape [N, T-1] = [{num_rows}, {width - 1}]{other} beside {ids} "
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
    what = f"input '{schema.METRICS.name}'"
    metrics = parse(text.encode(), what)
    if not isinstance(metrics, dict):
        raise InvalidRequest(f"{what}: must be a JSON object of names and numbers")
    for name, value in metrics.items():
        if type(value) not in (int, float) or abs(value) > sys.float_info.max:
            raise InvalidRequest(
                f"{what}: must be a JSON object of names and numbers; {name[:100]!r} is not a finite number"
            )
    return {name: float(value) for name, value in metrics.items()}
