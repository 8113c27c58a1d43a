"""Shared by the adapters of critics: the served critic, its checkpoints beside a trainer's, and rows of responses.

A trainer has one number for each token of a response; a critic's train request has one for each token but the last,
where index t concerns the value at token t, which the action t+1 followed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.adapters.judge import read_config, refuse_other_tokenizer
from guerdon.client import CriticClient, RetryPolicy
from guerdon.errors import ConfigError

TIMEOUT_S = 21_600.0
"""The default time limit of a call with all its tries: a critic that restarts replays its journal first."""
NOTE = "served_critic.json"
"""The file in a trainer's checkpoint that names the critic's."""


def connect(
    url: str,
    name: str = "critic",
    timeout_s: float = TIMEOUT_S,
    *,
    saves: bool = False,
    instead: str = "",
    tokenizer: Any = None,
) -> CriticClient:
    """Returns a client of the served critic, which waits for a server that is away or has not started yet.

    If the trainer `saves` checkpoints, raises ConfigError if the critic keeps none, without which the trainer's own are
    of no use; `instead` says how the trainer saves none. Raises it as well if ids of the policy's `tokenizer` mean
    other tokens to the critic.
    """
    critic = CriticClient(url, name, policy=RetryPolicy.patient(timeout_s, wait_for_start=True))
    check_tokenizer(critic, tokenizer)
    if saves and not critic.state().is_durable:
        raise ConfigError(
            f"the trainer saves checkpoints, and the critic at {url} keeps none",
            f"start it with --checkpoint-dir, or {instead}",
        )
    return critic


def check_tokenizer(critic: CriticClient, tokenizer: Any) -> None:
    """Raises ConfigError if ids of the policy's tokenizer, if it is known, mean other tokens to the critic."""
    if tokenizer is not None:
        remedy = "start the critic from a model with the policy's tokenizer"
        refuse_other_tokenizer(tokenizer, read_config(critic), "the critic, which is sent token ids", remedy)


def rows_where(mask: Any, table: Any) -> list[np.ndarray]:
    """Returns each row of a tensor `[B, S]` without what the mask `[B, S]` leaves out, such as padding."""
    return [row[kept.bool()].cpu().numpy() for kept, row in zip(mask, table, strict=True)]


def before_response(num_tokens: int, length: int) -> slice:
    """Returns the places of the states before each token of a response, which ends a row of so many tokens."""
    return slice(num_tokens - 1 - length, num_tokens - 1)


def at_tokens_before(responses: Iterable[np.ndarray], tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the responses' numbers `[R_i]` as float32 `[T_i - 1]`, each at the token before its own; 0 elsewhere.

    `tokens` are the whole rows `[T_i]`, which end with their responses.
    """
    rows = []
    for numbers, row in zip(responses, tokens, strict=True):
        placed = np.zeros(len(row) - 1, np.float32)
        placed[before_response(len(row), len(numbers))] = numbers
        rows.append(placed)
    return rows


def before_responses(values: Iterable[np.ndarray], lengths: Iterable[int]) -> list[np.ndarray]:
    """Returns the values of the states before each token of the responses, `[R_i]`, out of whole rows' `[T_i]`."""
    return [row[before_response(len(row), length)] for row, length in zip(values, lengths, strict=True)]


def save_beside(critic: CriticClient, folder: str | Path, step: int) -> None:
    """Saves a checkpoint at the server, and its name in the folder of the trainer's checkpoint of that step."""
    info = critic.save(metrics={"trainer_step": float(step)})
    assert info is not None  # only servers of one's own have none
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / NOTE).write_text(json.dumps({"checkpoint": info.name, "weights_version": info.weights_version}))


def load_beside(critic: CriticClient, folder: str | Path) -> None:
    """Takes the critic back to the checkpoint that `save_beside` named there; raises ConfigError without its file."""
    note = Path(folder) / NOTE
    if not note.exists():
        raise ConfigError(
            f"the trainer's checkpoint has no {note}, so the critic's state at that step is not known",
            "resume from a checkpoint that was saved with the served critic, or start the training anew",
        )
    critic.load(json.loads(note.read_text())["checkpoint"])
