"""A teacher's queries and answers as tensors: inputs, parameters and outputs that only teachers have.

Legend: B samples, W asked tokens of the sample with the most, K likeliest ids, G given ids, N asked tokens of all
samples, H hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from guerdon.core import ModelInfo, Score
from guerdon.errors import GuerdonError, InvalidRequest
from guerdon.teacher_core import LogprobQuery, TokenLogprobs
from guerdon.wire.bodies import shown
from guerdon.wire.tensors import InferRequest, Tensor, integers

PARAMETERS: dict[str, dict[str, Any]] = {
    "top_k": {"type": "integer", "minimum": 0, "description": "a teacher's likeliest ids per scored token"},
    "temperature": {"type": "number", "exclusiveMinimum": 0, "description": "divides a teacher's logits"},
    "start": {"type": "integer", "minimum": 1, "description": "the first token that a teacher scores"},
    "hidden_dtype": {"type": "string", "enum": ["bfloat16"], "description": "rounds a teacher's hidden states"},
}

INPUTS = (("target_ids", "INT64", (-1, -1)),)
OUTPUTS = (("logprobs", "FP32", (-1,)), ("logprob_counts", "INT64", (1,)))
_MORE_OUTPUTS = (
    ("top_ids", "INT32", (-1, -1)),
    ("top_logprobs", "FP32", (-1, -1)),
    ("target_logprobs", "FP32", (-1, -1)),
    ("entropy", "FP32", (-1,)),
    ("ranks", "INT32", (-1,)),
    ("next_ids", "INT32", (-1,)),
    ("next_logprobs", "FP32", (-1,)),
)

_FIELDS = {
    "logprobs": "logprobs",
    "top_ids": "top_ids",
    "top_logprobs": "top_logprobs",
    "target_logprobs": "given_logprobs",
    "entropy": "entropy",
    "ranks": "ranks",
    "next_ids": "next_ids",
    "next_logprobs": "next_logprobs",
}
"""The tables with a row for each sample, and where a sample's part of them is."""

_DATATYPES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
_NUMPY = {"FP32": np.float32, "BF16": np.uint16, "FP16": np.float16}
_NO_ID = -1
_LARGEST = 1e30
"""Largest temperature, within float32; JSON has numbers beyond any float."""


def more_outputs(info: ModelInfo) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Returns the outputs that a teacher gives only on request; `hidden_states` are `[N,H]`."""
    hidden = ("hidden_states", _DATATYPES.get(info.dtype, "FP32"), (info.hidden_size,))
    return (*_MORE_OUTPUTS, hidden, ("hidden_offsets", "INT64", ()))


def to_queries(request: InferRequest, num_rows: int) -> list[LogprobQuery]:
    """Returns each sample's query; raises InvalidRequest for contradictions.

    `reading` checks numbers against the model and the samples.
    """
    wanted, top_k = set(usual_outputs(request)), request.count("top_k")
    of_top = wanted & {"top_ids", "top_logprobs"}
    if of_top and not top_k:
        raise InvalidRequest(f"output '{min(of_top)}' needs the parameter top_k, how many ids to give for each token")
    targets = request.inputs.get("target_ids")
    if "target_logprobs" in wanted and targets is None:
        raise InvalidRequest("output 'target_logprobs' needs the input target_ids, the ids of each position")
    query = LogprobQuery(
        start=request.count("start") if "start" in request.parameters else None,
        top_k=top_k if of_top or "next_ids" in wanted else 0,
        temperature=_temperature(request),
        with_logprobs="logprobs" in wanted,
        with_entropy="entropy" in wanted,
        with_ranks="ranks" in wanted,
        with_next=not wanted.isdisjoint({"next_ids", "next_logprobs"}),
        with_hidden=not wanted.isdisjoint({"hidden_states", "hidden_offsets"}),
        rounds_hidden=_rounds_hidden(request),
    )
    if targets is None or "target_logprobs" not in wanted:
        return [query] * num_rows
    ids = integers(targets)
    if ids.ndim not in (2, 3) or len(ids) != num_rows or not ids.shape[-1]:
        raise InvalidRequest(
            f"input 'target_ids' must have shape [{num_rows}, K], the same ids for every token of a sample, or "
            f"[{num_rows}, tokens, K], not {list(targets.shape)}"
        )
    return [query.with_given(row) for row in ids]


def usual_outputs(request: InferRequest) -> list[str]:
    """Returns the requested outputs; if the request names none, those that its parameters and inputs ask for."""
    if request.outputs is not None:
        return list(request.outputs)
    names = [name for name, _, _ in OUTPUTS]
    if request.count("top_k"):
        names += ["top_ids", "top_logprobs"]
    return [*names, "target_logprobs"] if "target_ids" in request.inputs else names


def output(name: str, results: list[Score | GuerdonError], request: InferRequest, info: ModelInfo) -> Tensor | None:
    """Returns the tensor of that name, None if it is none of a teacher's.

    Rows are 0 beyond a sample's asked tokens, and ids are -1 there; a failed sample's are NaN and -1.
    """
    said = [result.logprobs if isinstance(result, Score) else None for result in results]
    if name in _FIELDS:
        return Tensor.of(name, _table(name, said))
    if name == "logprob_counts":
        return Tensor.of(name, np.array([_count(one) for one in said], np.int64).reshape(-1, 1))
    if name == "hidden_offsets":
        rows = [0 if one is None or one.hidden is None else len(one.hidden) for one in said]
        return Tensor.of(name, np.cumsum([0, *rows]).astype(np.int64))
    if name == "hidden_states":
        datatype = "BF16" if _rounds_hidden(request) else _DATATYPES.get(info.dtype, "FP32")
        nothing = np.empty((0, info.hidden_size), _NUMPY[datatype])
        table = np.concatenate([nothing, *(one.hidden for one in said if one is not None and one.hidden is not None)])
        return Tensor(name, datatype, table.shape, table)
    return None


def _table(name: str, said: list[TokenLogprobs | None]) -> np.ndarray:
    parts = [None if one is None else getattr(one, _FIELDS[name]) for one in said]
    found = [part for part in parts if part is not None]
    is_ids = name in ("top_ids", "next_ids")
    dtype: Any = np.int32 if is_ids or name == "ranks" else np.float32
    widest = max((part.shape for part in found), default=(0,))
    shape = (max((len(part) for part in found), default=0), *widest[1:])
    table = np.full((len(parts), *shape), _NO_ID if is_ids else 0, dtype)
    for out, part in zip(table, parts, strict=True):
        if part is not None:
            out[: len(part)] = part
        elif dtype == np.float32:
            out[:] = np.nan
    return table


def _count(one: TokenLogprobs | None) -> int:
    """Returns how many tokens were asked about."""
    tables = [] if one is None else [one.logprobs, one.entropy, one.ranks, one.top_ids, one.given_logprobs, one.hidden]
    return max((len(table) for table in tables if table is not None), default=0)


def _temperature(request: InferRequest) -> float:
    value = request.parameters.get("temperature", 1.0)
    if type(value) not in (int, float) or abs(value) > _LARGEST:
        raise InvalidRequest(f"parameter 'temperature' is {shown(value)}; it must be a number above 0")
    return float(value)


def _rounds_hidden(request: InferRequest) -> bool:
    value = request.parameters.get("hidden_dtype")
    if value not in (None, "bfloat16"):
        raise InvalidRequest(
            f"parameter 'hidden_dtype' is {shown(value)}; it can be 'bfloat16', and without it hidden states come in "
            "the model's own dtype"
        )
    return value is not None
