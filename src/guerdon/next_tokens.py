"""Queries of a language model, a teacher's or a judge's without its rubric, for the token after a sample."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from guerdon.core import ScoreRequest, Sequence
from guerdon.teacher_core import LogprobQuery

NEXT_TOKENS = "next_tokens"
"""The interface of a model for `NextTokenRequest`; every teacher and every judge has it."""


@dataclass(slots=True, eq=False)
class NextTokenRequest(ScoreRequest):
    """Asks a teacher, or the model of a judge without its rubric, for the log-probs of `ids` after each sample.

    The text or token ids `shared` precede each sample, or follow it if `is_item_first`. Both parts are tokenised by
    themselves, a text of `shared` with special tokens if `shared_special_tokens`. `ids` are int64 `[G]`. Nobody reads
    rewards.
    """

    ids: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    shared: str | np.ndarray = ""
    is_item_first: bool = False
    shared_special_tokens: bool = False

    def __post_init__(self) -> None:
        self.wants_rewards = False

    def sequence(self, item: np.ndarray, shared: np.ndarray) -> Sequence:
        """Returns the sequence of a sample's token ids; its last token is a placeholder for the one asked about."""
        parts = (item, shared) if self.is_item_first else (shared, item)
        row = np.concatenate([*parts, self.ids[:1]])
        query = LogprobQuery(start=max(1, len(row) - 1), given=self.ids, with_logprobs=False, ends_in_placeholder=True)
        return Sequence(row, wants_reward=False, query=query)
