"""Turns a critic's calls into its models' tensors, and their replies into results; no I/O."""

from __future__ import annotations

import functools
import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
import orjson

from guerdon.client import calls
from guerdon.client.calls import Call, Conversations, Integers, ModelSignature, Texts, TokenRows
from guerdon.core import ScoreRequest
from guerdon.critic_core import CheckpointInfo, ControlRequest, CriticState, Gae, Operation, TrainReport, TrainRequest
from guerdon.errors import InvalidRequest, ServerFault
from guerdon.trees import NO_TREE_REWARDS
from guerdon.wire import schema
from guerdon.wire.critic_tensors import GAE, TRAIN_ID, from_json
from guerdon.wire.schema import Field
from guerdon.wire.tensors import InferReply, InferRequest, Tensor, pad_rows

Result = TypeVar("Result", TrainReport, CheckpointInfo, CriticState)
Rows = Sequence[Sequence[float]] | Sequence[np.ndarray] | np.ndarray
"""One row a sample: an array `[N, T - 1]`, or rows of different lengths."""


Rewards = Rows | Sequence[float]
"""Rewards of tokens, one row a sample, or one reward a sample."""

_ROWS = (
    *(schema.TRAIN_TOKENS, schema.RETURNS, schema.PREV_VALUES, schema.TRAIN_REWARDS, schema.MASK),
    *(schema.TRAIN_PARENTS, schema.TRAIN_LENGTHS),
)
_ESTIMATES = (schema.ADVANTAGES, schema.OUT_RETURNS)


@dataclass(slots=True, eq=False)
class CriticScores:
    """A critic's values for one call, one entry a sample in the order sent.

    `values` is a list of float32 `[T_i]`, one a token; `rewards` is float32 `[B]` if they were asked for, else None.
    Both are NaN if the sample failed; `errors[i]` then says why, and is None otherwise. `weights_version` names the
    critic's weights; `queue_s` and `compute_s` are the seconds the server spent waiting and computing.
    """

    values: list[np.ndarray]
    errors: list[str | None]
    rewards: np.ndarray | None = None
    weights_version: str = ""
    queue_s: float = 0.0
    compute_s: float = 0.0

    def __len__(self) -> int:
        return len(self.values)

    def raise_for_failed(self) -> CriticScores:
        """Returns itself; raises SampleFailed naming the first failed sample if there is one."""
        calls.raise_first(self.errors)
        return self


class InferArgs(TypedDict, total=False):
    """The keywords of a call for values: as for `RewardClient.score`.

    Give exactly one of `texts`, `messages` and tokens, which may be padded if `lengths` has each row's own number.
    """

    texts: Texts
    messages: Conversations
    groups: Integers | None
    prompt_lengths: Integers | None
    timeout_s: float | None
    pad_to_length: int | None
    lengths: Integers | None


class TreeArgs(InferArgs, total=False):
    """`InferArgs`, and with `parents` rows of tokens are segments of trees.

    Row i follows row `parents[i]`, an earlier one, or begins a tree if that is -1. Each has the values of its own
    tokens; shared ones are computed once.
    """

    parents: Integers | None


class BatchArgs(TypedDict, total=False):
    """The keywords of a call that trains or validates, besides its rows.

    Rows may be padded if `lengths` has each T_i. With `rewards`, one or T_i - 1 per row, in place of returns and
    previous values, the critic estimates both by `gae` (default: no discount, λ 1). With `parents` rows are segments of
    trees, as for `infer`, and have T_i entries of each other array: entry t belongs to the action at token t. A root's
    first is not read.
    """

    rewards: Rewards | None
    gae: Gae | None
    lengths: Integers | None
    parents: Integers | None


class TrainArgs(BatchArgs, total=False):
    """`BatchArgs`; the critic is trained on all rows `updates` times (1).

    A `train_id` (default: a new one) is never applied twice; the second time the server repeats its answer.
    """

    updates: int
    train_id: str | None


def make_infer_request(
    tokens: TokenRows | None, parents: Integers | None = None, **samples: Unpack[InferArgs]
) -> tuple[ScoreRequest, np.ndarray | None]:
    """Returns the request for the samples' values, and each row's parent, int64; raises InvalidRequest."""
    request = calls.make_request(tokens=tokens, **samples)
    return request, None if parents is None else parent_row(parents, len(request))


def make_train_request(
    tokens: TokenRows,
    returns: Rows | None = None,
    prev_values: Rows | None = None,
    mask: Rows | None = None,
    train_id: str | None = None,
    lengths: Integers | None = None,
    *,
    updates: int = 1,
    rewards: Rewards | None = None,
    gae: Gae | None = None,
    parents: Integers | None = None,
) -> TrainRequest:
    """Returns the request to train on N rows, padded to the longest; copies the arrays, because it may be sent again.

    Row i of `tokens` has T_i ids, and row i of the others T_i - 1 numbers; with `lengths`, which has each T_i, all may
    be padded. `rewards`, in place of `returns` and `prev_values`, may also be one number a row. With `parents` rows are
    segments of trees, and the others have T_i numbers. Raises InvalidRequest naming the row at fault.
    """
    ids = calls.token_rows(tokens, lengths)
    is_tree = parents is not None
    if is_tree and rewards is not None:
        raise InvalidRequest(NO_TREE_REWARDS)
    given = {"returns": returns, "prev_values": prev_values, "rewards": rewards, "mask": mask}
    needed = ("returns", "prev_values", "mask") if rewards is None else ("rewards", "mask")
    for name, table in given.items():
        if (table is None) == (name in needed):
            raise InvalidRequest(
                f"{name} is {'missing' if table is None else 'given beside rewards'}; give returns, prev_values and "
                "mask, or rewards and mask"
            )
    if gae is not None and rewards is None:
        raise InvalidRequest("gae goes with rewards, which are missing")
    tables = {
        name: _table(name, rows, ids, lengths is not None, is_tree)
        for name in needed
        if (rows := given[name]) is not None
    }
    unknown, request_id = np.empty((len(ids), 0), np.float32), train_id or uuid.uuid4().hex
    made = TrainRequest(request_id, pad_rows(ids, np.int64), unknown, unknown, tables["mask"], updates=updates)
    for name, table in tables.items():
        setattr(made, name, table)
    if rewards is not None:
        made.gae = gae or Gae()
    if parents is not None:
        made.parents, made.lengths = parent_row(parents, len(ids)), np.array([len(row) for row in ids], np.int64)
    return made


def parent_row(parents: Integers, num_rows: int) -> np.ndarray:
    """Returns each row's parent, int64; raises InvalidRequest unless there are as many as rows."""
    made = calls.integer_row("parents", parents)
    if len(made) != num_rows:
        raise InvalidRequest(f"parents has {len(made)} entries for {num_rows} rows of tokens")
    return made


def _table(name: str, rows: Any, ids: list[np.ndarray], is_padded: bool, is_tree: bool) -> np.ndarray:
    """Returns float32 `[N, T-1]`, `[N, T]` for trees, or `[N, 1]` of rewards that are one a row."""
    if len(rows) != len(ids):
        raise InvalidRequest(f"{name} has {len(rows)} rows, tokens {len(ids)}")
    if name == "rewards" and all(np.ndim(row) == 0 for row in rows):
        return calls.number_row(name, rows, "biuf", np.float32).reshape(-1, 1)
    numbers = [calls.number_row(f"{name}[{i}]", row, "biuf", np.float32) for i, row in enumerate(rows)]
    counts = [max(0, len(row) - (not is_tree)) for row in ids]
    if is_padded:
        numbers = [found[:count] for count, found in zip(counts, numbers, strict=True)]
    for i, (row, found) in enumerate(zip(ids, numbers, strict=True)):
        if is_tree and len(found) != len(row):
            raise InvalidRequest(
                f"{name}[{i}] has {len(found)} entries for {len(row)} tokens; beside parents it must have as many: "
                "entry t belongs to the action at token t"
            )
        if not is_tree and len(found) != len(row) - 1:
            raise InvalidRequest(
                f"{name}[{i}] has {len(found)} entries for {len(row)} tokens; it must have one fewer than tokens: "
                "entry t belongs to the action at token t+1"
            )
    return pad_rows(numbers, np.float32)


def prepare_infer(
    model: str, request: ScoreRequest, *, needs_rewards: bool = False, parents: np.ndarray | None = None
) -> Call[CriticScores]:
    """Returns the call for the values of `request`, and for its rewards with `needs_rewards` only.

    With `parents` the rows of its tokens are segments of trees.
    """

    def build(signature: ModelSignature, left_s: float) -> InferRequest:
        calls.check_gives(signature, schema.VALUES)
        if needs_rewards and schema.REWARDS.name not in signature.outputs:
            raise InvalidRequest(
                f"model '{model}' gives no rewards; start its server with --reward-model, or use infer and a "
                "RewardClient of another server"
            )
        built = calls.build(request, signature, left_s)
        if not needs_rewards and built.outputs is not None:
            built.outputs.pop(schema.REWARDS.name, None)  # spares the reward model's run
        if parents is not None:
            _check_takes_trees(signature)
            built.inputs[schema.PARENTS.name] = Tensor.of(schema.PARENTS.name, parents[:, None])
        return built

    parse = functools.partial(_scores, request)
    return Call(model, build, parse, calls.estimate_cost(request), request.timeout_s)


def _check_takes_trees(signature: ModelSignature) -> None:
    if schema.PARENTS.name not in signature.inputs:
        raise InvalidRequest(
            f"model '{signature.name}' takes no parents: its server is older; update it, or send whole sequences"
        )


def prepare_train(model: str, request: TrainRequest) -> Call[TrainReport]:
    """Returns the call that trains or validates on `request`."""

    def build(signature: ModelSignature, left_s: float) -> InferRequest:
        calls.check_gives(signature, schema.LOSS)
        if schema.REPORT.name not in signature.outputs:
            raise InvalidRequest(
                f"model '{model}' gives no report: its server could not recognise a request that is sent again, and "
                "would train on it twice; this client trains guerdon's critics only"
            )
        if (request.updates != 1 or request.gae is not None) and schema.ADVANTAGES.name not in signature.outputs:
            raise InvalidRequest(
                f"model '{model}' is an older server's, which knows neither updates nor rewards; update it, or send "
                "returns and prev_values, once for each update"
            )
        if request.parents is not None:
            _check_takes_trees(signature)
        outputs = [schema.REPORT] if request.rewards is None else [schema.REPORT, *_ESTIMATES]
        return _train_request(request, outputs, left_s)

    def parse(reply: InferReply, *_: float) -> TrainReport:
        report = _read_result(TrainReport, reply, schema.REPORT)
        if request.rewards is not None:
            found = {tensor.name: np.asarray(tensor.data) for tensor in reply.outputs}
            tables = [found.get(field.name) for field in _ESTIMATES]
            if any(table is None or table.shape != request.mask.shape for table in tables):
                raise ServerFault(f"model '{reply.model_name}' sent no advantages and returns of the mask's shape")
            report.advantages, report.returns = tables
        return report

    return Call(model, build, parse, request.tokens.size)


def prepare_train_loss(model: str, request: TrainRequest) -> Call[float]:
    """Returns the call that trains on `request` at any server of these tensors, and gives the loss.

    Only a server that gives a report recognises a request that is sent again.
    """

    def build(signature: ModelSignature, left_s: float) -> InferRequest:
        calls.check_gives(signature, schema.LOSS)
        return _train_request(request, [schema.LOSS], left_s)

    def parse(reply: InferReply, *_: float) -> float:
        name = schema.LOSS.name
        losses = [np.ravel(np.asarray(t.data, np.float32)) for t in reply.outputs if t.name == name]
        if not losses or losses[0].size != 1:
            raise ServerFault(f"model '{reply.model_name}' sent no '{name}' of one number")
        return float(losses[0][0])

    return Call(
        model, build, parse, request.tokens.size, may_repeat=lambda signature: schema.REPORT.name in signature.outputs
    )


def prepare_control(model: str, request: ControlRequest) -> Call[Any]:
    """Returns the call of any other operation: it gives state's CriticState, save's and load's CheckpointInfo or None.

    Raises InvalidRequest for metrics that are not finite numbers.
    """
    metrics = {name: _metric(name, value) for name, value in request.metrics.items()}
    result = _RESULTS.get(request.operation)

    def build(signature: ModelSignature, left_s: float) -> InferRequest:
        inputs = [Tensor.of(schema.DUMMY.name, np.zeros(1, np.int64))]  # PyTriton's servers require an input
        if metrics:
            inputs.append(Tensor(schema.METRICS.name, "BYTES", (1,), [orjson.dumps(metrics)]))
        if request.checkpoint is not None:
            inputs.append(Tensor(schema.CHECKPOINT.name, "BYTES", (1,), [request.checkpoint.encode()]))
        return _request(inputs, signature.outputs, left_s)

    def parse(reply: InferReply, queue_s: float, compute_s: float) -> Any:
        if result is None or all(tensor.name != result[0].name for tensor in reply.outputs):
            return None
        output, cls = result
        return _read_result(cls, reply, output)

    return Call(model, build, parse)


_RESULTS: dict[Operation, tuple[Field, type]] = {
    Operation.SAVE: (schema.REPORT, CheckpointInfo),
    Operation.LOAD: (schema.REPORT, CheckpointInfo),
    Operation.STATE: (schema.STATE, CriticState),
}


def _metric(name: Any, value: Any) -> float:
    """Returns a number, or a scalar of numpy or torch, as a float; raises InvalidRequest for anything else."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not isinstance(name, str) or not math.isfinite(number):
        raise InvalidRequest(f"metrics[{name!r}] is {value!r}; give finite numbers by names")
    return number


def _train_request(request: TrainRequest, outputs: list[Field], left_s: float) -> InferRequest:
    rows = []
    for field in _ROWS:
        array = getattr(request, field.at)
        if array is not None and not (request.rewards is not None and field in (schema.RETURNS, schema.PREV_VALUES)):
            rows.append(Tensor.of(field.name, array[:, None] if field.axes == "N 1" else array))
    parameters: dict[str, Any] = {TRAIN_ID: request.id}
    if request.updates != 1:
        parameters["updates"] = request.updates
    if request.gae is not None:
        parameters |= {name: value for name in GAE if (value := getattr(request.gae, name)) is not None}
    return _request(rows, [field.name for field in outputs], left_s, **parameters)


def _request(inputs: list[Tensor], outputs: Iterable[str], left_s: float, **parameters: Any) -> InferRequest:
    parameters["timeout"] = max(1, round(left_s * 1e6))
    return InferRequest({tensor.name: tensor for tensor in inputs}, dict.fromkeys(outputs, True), "", parameters)


def _read_result(cls: type[Result], reply: InferReply, output: Field) -> Result:
    try:
        (text,) = next(tensor.data for tensor in reply.outputs if tensor.name == output.name)
        return from_json(cls, text)
    except (StopIteration, ValueError, TypeError) as e:
        raise ServerFault(f"model '{reply.model_name}' sent no '{output.name}', or not a {cls.__name__}: {e}") from e


def _scores(request: ScoreRequest, reply: InferReply, queue_s: float, compute_s: float) -> CriticScores:
    outputs = {tensor.name: tensor.data for tensor in reply.outputs}
    num_samples = len(request)
    errors = calls.sample_errors(outputs, num_samples)
    values = calls.sample_values(outputs, request)
    if values is None and all(errors):
        values = [np.empty(0 if request.tokens is None else len(request.tokens[i])) for i in range(num_samples)]
    if values is None:
        raise ServerFault("the server sent no values")
    rewards = None
    if schema.REWARDS.name in outputs:
        rewards = np.asarray(outputs[schema.REWARDS.name], np.float32)
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
