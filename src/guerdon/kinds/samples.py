"""Samples as sequences: what a scorer gets of each, and what is wrong with it whatever the model is."""

from __future__ import annotations

import dataclasses

import numpy as np

from guerdon.core import Message, ModelInfo, ScoreRequest, Sequence
from guerdon.errors import InvalidRequest
from guerdon.kinds.kind import Rows
from guerdon.messages import response


def sequence(row: np.ndarray | Sequence | str | InvalidRequest, request: ScoreRequest, i: int) -> Sequence:
    """Returns the request's sample `i`, which the scorer reads as `row`."""
    if isinstance(row, Sequence):
        # The sender has not counted the special tokens of a pair.
        made = sequence(row.tokens, request, i)
        return dataclasses.replace(made, second_start=row.second_start, prompt_length=row.prompt_length)
    return Sequence(
        row if isinstance(row, np.ndarray) else np.empty(0, dtype=np.int64),
        row if isinstance(row, str) else None,
        None if request.groups is None else int(request.groups[i]),
        None if request.prompt_lengths is None else int(request.prompt_lengths[i]),
        None if request.steps is None else request.steps[i],
        request.wants_rewards,
        None if request.prompts is None else request.prompts[i],
        None if request.references is None else request.references[i],
        request.messages is not None,
        request.width,
        None if request.asks is None else request.asks[i],
    )


def find_fault(s: Sequence, info: ModelInfo) -> InvalidRequest | None:
    """Returns the error of one sequence, if any."""
    if s.text is not None:
        return None
    tokens = s.tokens
    if not len(tokens):
        return InvalidRequest("the sample has no tokens; send at least one")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0:
        return InvalidRequest(f"token id {low} is negative; send padding only beyond a row's length")
    if info.vocab_size is not None and high >= info.vocab_size:
        return InvalidRequest(
            f"token id {high} is outside the vocabulary of {info.name} (0 to {info.vocab_size - 1}); was it "
            "tokenised for another model?"
        )
    if s.steps is not None and len(s.steps) and (s.steps.min() < 0 or s.steps.max() >= len(tokens)):
        return InvalidRequest(f"a step position lies outside the sample's {len(tokens)} tokens")
    if info.step_rule and not len(s.step_ends(info.step_separator_ids)):
        if not info.step_separator_ids:
            return InvalidRequest("no step to reward: this model has no tokenizer, so send step_positions")
        return InvalidRequest(
            f"no step to reward: {info.name} gives the {info.step_rule}, and no such token follows the prompt, or it "
            "is merged into another token; end each step with it, or send step_positions"
        )
    if info.gate_ids and not len(Sequence(tokens).step_ends(info.gate_ids)):
        return InvalidRequest(
            f"{info.name} weights its objectives by the prompt, and no answer begins in this sample: the tokens "
            f"{[*info.gate_ids]} of its chat template are missing; send messages"
        )
    if s.prompt_length is not None and not 0 <= s.prompt_length <= len(tokens):
        return InvalidRequest(f"prompt length {s.prompt_length} lies outside the sample's {len(tokens)} tokens")
    if s.ask is not None:
        fault = s.ask.find_fault(len(tokens), s.prompt_length, info.vocab_size or 0)
        if fault is not None:
            return InvalidRequest(fault)
    if info.max_length is not None and len(tokens) > info.max_length:
        # Only of samples that are answered as a whole, and that clients make themselves, may some tokens be lost.
        may_cut = info.takes_tokens and not info.is_by_token
        instead = ", or start the server with --truncation left or right" if may_cut else ""
        return InvalidRequest(
            f"the sample has {len(tokens)} tokens, {info.name} takes at most {info.max_length}; shorten it{instead}"
        )
    return None


def estimate_lengths(request: ScoreRequest) -> list[int]:
    """Returns about the lengths in tokens of a request's samples, for whom nobody has counted them."""
    rows: Rows = request.tokens or request.texts or [read_response(messages) for messages in request.messages or ()]
    return [sequence(row, request, i).num_tokens for i, row in enumerate(rows)]


def read_response(conversation: list[Message]) -> str | InvalidRequest:
    """Returns a conversation's fields for a function."""
    try:
        return response(conversation)
    except InvalidRequest as e:
        return e


def or_nothing(text: str | InvalidRequest) -> str:
    """Returns the text, an empty one in place of an error."""
    return text if isinstance(text, str) else ""
