"""Checks a train request before it is journalled or queued."""

from __future__ import annotations

import math

import numpy as np

from guerdon.core import ModelInfo
from guerdon.critic_core import Gae, TrainRequest
from guerdon.errors import InvalidRequest
from guerdon.server.critic.records import digest_of
from guerdon.trees import NO_TREE_REWARDS, Forest

MAX_ID_LENGTH = 200
MAX_UPDATES = 100
MAX_METRICS = 64
MAX_METRIC_LENGTH = 100


def check(request: TrainRequest, info: ModelInfo) -> str:
    """Returns the request's digest; raises InvalidRequest naming the tensor, row and column at fault.

    Checks only trained entries: targets whose mask is above 0, and tokens up to the action after the last such column.
    """
    tokens, mask = request.tokens, request.mask
    if len(request.id) > MAX_ID_LENGTH:
        raise InvalidRequest(f"train_id has {len(request.id)} characters; {MAX_ID_LENGTH} are the most")
    if not 1 <= request.updates <= MAX_UPDATES:
        raise InvalidRequest(f"updates is {request.updates}; give 1 to {MAX_UPDATES} passes over the rows")
    is_tree = request.parents is not None
    if tokens.ndim != 2 or not len(tokens) or tokens.shape[1] < 2 - is_tree:
        raise InvalidRequest(
            f"tokens has shape {list(tokens.shape)}, not [N, T] of at least one row of two tokens: values are trained "
            "on the actions that follow them"
        )
    if is_tree and request.rewards is not None:
        raise InvalidRequest(NO_TREE_REWARDS)
    num_rows, width = tokens.shape
    columns, form = (width, "[N, T]") if is_tree else (width - 1, "[N, T-1]")
    given = ("returns", "prev_values", "mask") if request.rewards is None else ("rewards", "mask")
    for name in given:
        shape = getattr(request, name).shape
        if shape != (num_rows, columns) and not (name == "rewards" and shape == (num_rows, 1)):
            hint = (
                "; it has T columns: leave out the last one, which no action follows" if shape == tokens.shape else ""
            )
            raise InvalidRequest(f"{name} has shape {list(shape)}, not {form} = [{num_rows}, {columns}]{hint}")
    _refuse(~(np.isfinite(mask) & (mask >= 0)), mask, "mask", "give numbers from 0 up")
    is_learnt = mask > 0
    if not is_learnt.any():
        raise InvalidRequest("mask is 0 everywhere: there is nothing to learn from")
    for name in given[:-1]:
        values = getattr(request, name)
        is_read = is_learnt if values.shape == mask.shape else is_learnt.any(axis=1, keepdims=True)
        _refuse(is_read & ~np.isfinite(values), values, name, "give finite numbers wherever the mask is above 0")
    if request.gae is not None:
        _check_gae(request.gae)
    if is_tree:
        lengths, is_read = _check_trees(request, is_learnt)
    else:
        lengths = (is_learnt * np.arange(1, width)).max(axis=1)  # tokens up to the last learnt column
        is_read = (np.arange(width) <= lengths[:, None]) & (lengths[:, None] > 0)
    _refuse(is_read & (tokens < 0), tokens, "tokens", "ids are never negative")
    if info.vocab_size is not None:
        outside = f"the vocabulary ends at {info.vocab_size - 1}; was it tokenised for another model?"
        _refuse(is_read & (tokens >= info.vocab_size), tokens, "tokens", outside)
    if info.max_length is not None and lengths.max() > info.max_length:
        row = int(lengths.argmax())
        ancestors = ", its ancestors' included" if is_tree else ""
        raise InvalidRequest(
            f"row {row} learns from {lengths[row]} tokens{ancestors}, {info.name} takes at most {info.max_length}; "
            "shorten it"
        )
    return digest_of(request)


def _check_trees(request: TrainRequest, is_learnt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many tokens of its path each segment learns from, and which of its tokens are its own."""
    assert request.parents is not None and request.lengths is not None
    forest = Forest.of(request.parents, request.lengths, request.tokens.shape[1])
    columns, mask = np.arange(request.tokens.shape[1]), request.mask
    is_own = columns < request.lengths[:, None]
    _refuse(is_learnt & ~is_own, mask, "mask", "the segment has no token there; leave it 0")
    is_begin = (request.parents[:, None] < 0) & (columns == 0)
    _refuse(is_learnt & is_begin, mask, "mask", "no state comes before a root's first token; leave it 0")
    learnt = np.where(is_learnt.any(axis=1), forest.starts + (is_learnt * columns).max(axis=1), 0)
    return learnt, is_own


def _check_gae(rule: Gae) -> None:
    for name in ("gamma", "lam_critic", "lam_policy"):
        value = getattr(rule, name)
        if value is not None and not 0 <= value <= 1:
            raise InvalidRequest(f"{name} is {value}; give a number from 0 to 1")
    if rule.lam_alpha is not None:
        if not (rule.lam_alpha > 0 and math.isfinite(rule.lam_alpha)):
            raise InvalidRequest(f"lam_alpha is {rule.lam_alpha}; give a number above 0, such as 0.05")
        if rule.lam_policy is not None:
            raise InvalidRequest("lam_policy and lam_alpha exclude each other; send one")


def check_metrics(metrics: dict[str, float]) -> None:
    """Raises InvalidRequest for metrics that a checkpoint cannot keep."""
    if len(metrics) > MAX_METRICS:
        raise InvalidRequest(f"metrics has {len(metrics)} numbers; {MAX_METRICS} are the most")
    for name, value in metrics.items():
        if len(name) > MAX_METRIC_LENGTH:
            raise InvalidRequest(
                f"a name in metrics has {len(name)} characters ({name[:20]!r}...); {MAX_METRIC_LENGTH} are the most"
            )
        if not math.isfinite(value):
            raise InvalidRequest(f"metrics has {name!r}, which is not finite: {value}")


def _refuse(is_wrong: np.ndarray, values: np.ndarray, name: str, advice: str) -> None:
    if is_wrong.any():
        row, column = np.unravel_index(int(is_wrong.argmax()), is_wrong.shape)
        raise InvalidRequest(f"{name} is {values[row, column]} in row {row}, column {column}: {advice}")
