"""A critic's calls as tensors and back: what its clients know of them, without I/O."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import orjson

from guerdon.client import arrays, calls
from guerdon.client.calls import Errand, ModelSignature
from guerdon.client.results import CriticScores
from guerdon.core import CheckpointInfo, ControlRequest, CriticState, Operation, ScoreRequest, TrainReport, TrainRequest
from guerdon.errors import InvalidRequest, ServerFault
from guerdon.wire.critic import TRAIN_ID, from_json
from guerdon.wire.kserve import InferReply, InferRequest
from guerdon.wire.tensors import Tensor

Noun = TypeVar("Noun", TrainReport, CheckpointInfo, CriticState)
Rows = Sequence[Sequence[float]] | Sequence[np.ndarray] | np.ndarray
"""One row a sample: an array `[N, T]`, or rows of their own lengths."""


def make_train_request(
    tokens: Rows, returns: Rows, prev_values: Rows, mask: Rows, train_id: str | None = None
) -> TrainRequest:
    """The request to train on N rows, padded to the longest; the arrays are copied, as it may be sent again.

    Row i of `tokens` has T_i ids, and of the others T_i - 1 numbers. Raises InvalidRequest naming the row at fault.
    """
    ids = arrays.ids("tokens", tokens)
    if not ids:
        raise InvalidRequest("tokens must have at least one row")
    targets = {}
    for name, rows in (("returns", returns), ("prev_values", prev_values), ("mask", mask)):
        if len(rows) != len(ids):
            raise InvalidRequest(f"{name} has {len(rows)} rows, tokens {len(ids)}")
        numbers = [arrays.row(f"{name}[{i}]", row, "biuf", np.float32) for i, row in enumerate(rows)]
        for i, (row, found) in enumerate(zip(ids, numbers, strict=True)):
            if len(found) != len(row) - 1:
                raise InvalidRequest(
                    f"{name}[{i}] has {len(found)} entries for {len(row)} tokens; it must have one less than tokens: "
                    "entry t concerns the action at token t+1"
                )
        targets[name] = arrays.padded(numbers, np.float32)
    padded = arrays.padded(ids, np.int64)
    return TrainRequest(
        train_id or uuid.uuid4().hex, padded, targets["returns"], targets["prev_values"], targets["mask"]
    )


def inferring(model: str, request: ScoreRequest, *, needs_rewards: bool = False) -> Errand[CriticScores]:
    """The errand of asking for the values of `request`, and only with `needs_rewards` for its rewards."""

    def build(signature: ModelSignature, left_s: float) -> InferRequest:
        if needs_rewards and "rewards" not in signature.outputs:
            raise InvalidRequest(
                f"model '{model}' gives no rewards; start its server with --reward-model, or use infer and a "
                "RewardClient of another server"
            )
        made = calls.build(request, signature, left_s)
        if not needs_rewards and made.outputs is not None:
            made.outputs.pop("rewards", None)  # so that its reward model need not run
        return made

    def parse(reply: InferReply, queue_s: float, compute_s: float) -> CriticScores:
        return _scores(reply, request, queue_s, compute_s)

    return Errand(model, build, parse, calls.cost_of(request), request.timeout_s)


def training(model: str, request: TrainRequest) -> Errand[TrainReport]:
    """The errand of training or validating on `request`."""

    def build(signature: ModelSignature, left_s: float) -> InferRequest:
        if "report" not in signature.outputs:
            raise InvalidRequest(
                f"model '{model}' gives no report, so its server would not know a request that is sent again and train "
                "on it twice; this client trains guerdon's critics only"
            )
        return _request(_rows(request), ["report"], left_s, **{TRAIN_ID: request.id})

    return Errand(model, build, lambda reply, *_: _noun(TrainReport, reply, "report"), request.tokens.size)


def training_loss(model: str, request: TrainRequest) -> Errand[float]:
    """The errand of training on `request` at any server of these tensors, for the loss, which each of them gives.

    Only one that gives a report knows a request that is sent again.
    """

    def build(_: ModelSignature, left_s: float) -> InferRequest:
        return _request(_rows(request), ["loss_mean"], left_s, **{TRAIN_ID: request.id})

    def parse(reply: InferReply, *_: float) -> float:
        losses = [np.ravel(np.asarray(t.data, np.float32)) for t in reply.outputs if t.name == "loss_mean"]
        if not losses or losses[0].size != 1:
            raise ServerFault(f"model '{reply.model_name}' sent no 'loss_mean' of one number")
        return float(losses[0][0])

    return Errand(model, build, parse, request.tokens.size, may_repeat=lambda signature: "report" in signature.outputs)


def controlling(model: str, request: ControlRequest) -> Errand[Any]:
    """The errand of any other operation: a CriticState of state, of save and load a CheckpointInfo or None.

    Raises InvalidRequest for metrics that are not finite numbers.
    """
    metrics = {name: _metric(name, value) for name, value in request.metrics.items()}
    output, noun = _ANSWERS.get(request.operation, ("", None))

    def build(signature: ModelSignature, left_s: float) -> InferRequest:
        inputs = [Tensor.of("dummy_var", np.zeros(1, np.int64))]  # which PyTriton's servers insist on
        if metrics:
            inputs.append(Tensor("metrics", "BYTES", (1,), [orjson.dumps(metrics)]))
        if request.checkpoint is not None:
            inputs.append(Tensor("checkpoint", "BYTES", (1,), [request.checkpoint.encode()]))
        return _request(inputs, list(signature.outputs), left_s)

    def parse(reply: InferReply, queue_s: float, compute_s: float) -> Any:
        is_there = any(tensor.name == output for tensor in reply.outputs)
        return _noun(noun, reply, output) if noun is not None and is_there else None

    return Errand(model, build, parse)


_ANSWERS: dict[Operation, tuple[str, type]] = {
    Operation.SAVE: ("report", CheckpointInfo),
    Operation.LOAD: ("report", CheckpointInfo),
    Operation.STATE: ("state", CriticState),
}


def _metric(name: Any, value: Any) -> float:
    """Also numpy's and torch's scalars as plain numbers."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not isinstance(name, str) or not math.isfinite(number):
        raise InvalidRequest(f"metrics[{name!r}] is {value!r}; give finite numbers by names")
    return number


def _rows(request: TrainRequest) -> list[Tensor]:
    return [Tensor.of(name, getattr(request, name)) for name in ("tokens", "returns", "prev_values", "mask")]


def _request(inputs: list[Tensor], outputs: list[str], left_s: float, **parameters: Any) -> InferRequest:
    parameters["timeout"] = max(1, round(left_s * 1e6))
    return InferRequest({tensor.name: tensor for tensor in inputs}, dict.fromkeys(outputs, True), "", parameters)


def _noun(cls: type[Noun], reply: InferReply, output: str) -> Noun:
    try:
        (text,) = next(tensor.data for tensor in reply.outputs if tensor.name == output)
        return from_json(cls, text)
    except (StopIteration, ValueError, TypeError) as e:
        raise ServerFault(f"model '{reply.model_name}' sent no '{output}', or not a {cls.__name__}: {e}") from e


def _scores(reply: InferReply, request: ScoreRequest, queue_s: float, compute_s: float) -> CriticScores:
    outputs = {tensor.name: tensor.data for tensor in reply.outputs}
    num_samples = len(request)
    errors = calls.errors_of(outputs, num_samples)
    values = calls.values_of(outputs, request)
    if values is None and all(errors):
        values = [np.empty(0 if request.tokens is None else len(request.tokens[i])) for i in range(num_samples)]
    if values is None:
        raise ServerFault("the server sent no values")
    rewards = None
    if "rewards" in outputs:
        rewards = np.asarray(outputs["rewards"], np.float32)
        if len(rewards) != num_samples:
            raise ServerFault(f"the server sent {len(rewards)} rewards for {num_samples} samples")
        rewards = rewards.reshape(num_samples, -1).mean(axis=1)
    for i, row in enumerate(values):
        if errors[i] is None and not np.isfinite(row).all():
            errors[i] = "the server gave a value that is not finite"
        if errors[i] is None and rewards is not None and not np.isfinite(rewards[i]):
            errors[i] = "the server gave no finite reward"
        if errors[i] is not None:
            values[i] = np.full(len(row), np.nan, np.float32)
            if rewards is not None:
                rewards[i] = np.nan
    return CriticScores(
        values=values,
        errors=errors,
        rewards=rewards,
        weights_version=str(reply.parameters.get("weights_version", "")),
        queue_s=queue_s,
        compute_s=compute_s,
    )
