"""The nouns of a critic that learns: its requests and their results; numpy only, as `core`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np


class Operation(StrEnum):
    """An operation on a critic besides scoring; each is served as a model named `<critic>_<operation>`."""

    TRAIN = "train"
    VALIDATE = "validate"
    SAVE = "save"
    LOAD = "load"
    OFFLOAD = "offload"
    ONLOAD = "onload"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class OperationInfo:
    """An operation on a critic as clients see it: a model that takes one request at a time."""

    name: str
    operation: Operation
    critic: str


@dataclass(frozen=True, slots=True)
class Gae:
    """How returns and advantages are made of rewards and values: by generalised advantage estimation, all in [0, 1].

    `lam_critic` is the λ of the returns that the critic learns, `lam_policy` that of the advantages. With `lam_alpha`
    in its place each sequence has 1 - 1 / (lam_alpha * l), at least 0, for its l masked tokens, as in VAPO. With
    neither, the advantages have `lam_critic`, too.
    """

    gamma: float = 1.0
    lam_critic: float = 1.0
    lam_policy: float | None = None
    lam_alpha: float | None = None


@dataclass(slots=True, eq=False)
class TrainRequest:
    """Training or validation data of a critic: N sequences with a target for every token.

    `tokens` is int64 `[N, T]`, right-padded with anything; `returns`, `prev_values` and `mask` are float32
    `[N, T-1]`. Index t concerns the value at token t, the state before the action t+1; it is read
    only if `mask` is above 0. A request's `id` makes it idempotent. All rows are trained on `updates` times, as if
    the request came so many times.

    A request may have `rewards` and `gae` instead: float32 `[N, T-1]`, or `[N, 1]`, one a row, for its last masked
    token. Then `returns` and `prev_values` are `[N, 0]` until the critic has estimated them with its own values, and
    `advantages` float32 `[N, T-1]` beside them. All three are 0 where the mask is.

    With `parents` and `lengths`, int64 `[N]`, the rows are segments of trees: row i has `lengths[i]` tokens, which
    follow those of row `parents[i]`, an earlier one, or begin a tree if that is -1. Then `returns`, `prev_values` and
    `mask` are `[N, T]`: index t concerns the action at token t itself, and the value at the token before it, the
    parent's last for t = 0. There are no rewards then.
    """

    id: str
    tokens: np.ndarray
    returns: np.ndarray
    prev_values: np.ndarray
    mask: np.ndarray
    timeout_s: float | None = None
    updates: int = 1
    rewards: np.ndarray | None = None
    gae: Gae | None = None
    advantages: np.ndarray | None = None
    parents: np.ndarray | None = None
    lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class TrainReport:
    """The result of a train request or a validation.

    `step` counts the critic's optimiser steps, this request's included; `loss` is the mean over all its masked
    tokens in the first pass, whatever the number of `updates`, `pass_losses` that of each pass, and `losses` that of
    each global batch of all passes. `clip_fraction`, `explained_variance` (NaN where the returns do not vary),
    `value_mean` and `return_mean` are the first pass's, too: each batch is measured before its update. `num_tokens`
    counts the masked tokens of all passes. `grad_norm` is the last step's before clipping, `learning_rate` the one that
    it used. `num_steps` were made, `num_skipped` left out because their gradient was not finite. `advantages` and
    `returns`, float32 `[N, T-1]`, answer a request with rewards.
    """

    id: str
    step: int
    weights_version: str
    loss: float
    losses: list[float]
    num_tokens: int
    clip_fraction: float
    explained_variance: float
    grad_norm: float
    learning_rate: float
    num_steps: int
    num_skipped: int
    pass_losses: list[float] = field(default_factory=list)
    value_mean: float = math.nan
    return_mean: float = math.nan
    advantages: np.ndarray | None = field(default=None, compare=False, repr=False)
    returns: np.ndarray | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class ControlRequest:
    """Any other operation on a critic.

    `checkpoint` names the one to load (None: the newest). `metrics` are kept with a checkpoint that is saved.
    """

    operation: Operation
    checkpoint: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(slots=True)
class CheckpointInfo:
    """One checkpoint on the server's disk; `number` counts up with every save, `step` is the critic's."""

    name: str
    number: int
    step: int
    weights_version: str
    metrics: dict[str, float]


@dataclass(slots=True)
class CriticState:
    """A critic's current state.

    `num_unsaved` counts the train requests since the newest checkpoint; where the server has no folder for
    checkpoints, `is_durable` is False and they would be lost with it.
    """

    step: int
    weights_version: str
    learning_rate: float
    is_offloaded: bool
    is_durable: bool
    num_unsaved: int
    num_parameters: int
    num_trainable: int
    checkpoints: list[CheckpointInfo]
