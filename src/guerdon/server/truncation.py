"""What the samples of a request are to a model: cut to its length where that is asked for, or refused. Pure."""

from __future__ import annotations

import dataclasses

import numpy as np

from guerdon.core import ModelInfo, ScoreRequest, Sequence, Truncation
from guerdon.errors import InvalidRequest
from guerdon.settings.config import ModelConfig


def sequence(row: np.ndarray | str | InvalidRequest, request: ScoreRequest, i: int) -> Sequence:
    """What is computed of the request's sample `i`, of which the scorer reads `row`."""
    return Sequence(
        row if isinstance(row, np.ndarray) else np.empty(0, dtype=np.int64),
        row if isinstance(row, str) else None,
        None if request.groups is None else int(request.groups[i]),
        None if request.prompt_lengths is None else int(request.prompt_lengths[i]),
        None if request.steps is None else request.steps[i],
        request.wants_rewards,
        None if request.prompts is None else request.prompts[i],
        None if request.labels is None else request.labels[i],
        request.messages is not None,
        request.width,
    )


def truncation(request: ScoreRequest, model: ModelConfig, info: ModelInfo) -> Truncation | None:
    """What is cut off of samples that are too long: as the request says, else as the server's setting does.

    Its bound is the model's where that is the smaller one; raises InvalidRequest where positions would be lost.
    """
    asked = request.truncation
    if asked is None:
        return None if model.truncation == "error" else Truncation(info.max_length, model.truncation)
    if _is_by_token(info):
        raise InvalidRequest(
            f"{info.name} answers for single tokens: truncation would shift the positions that clients count; send "
            "shorter samples"
        )
    bounds = [bound for bound in (asked.max_tokens, info.max_length) if bound is not None]
    return Truncation(min(bounds, default=None), asked.side)


def truncated(s: Sequence, truncation: Truncation) -> Sequence:
    """The sequence without its surplus at that side."""
    max_length = len(s.tokens) if truncation.max_tokens is None else truncation.max_tokens
    surplus = len(s.tokens) - max_length
    if surplus <= 0:
        return s
    first = surplus if truncation.side == "left" else 0
    prompt = None if s.prompt_length is None else min(max(0, s.prompt_length - first), max_length)
    return dataclasses.replace(s, tokens=s.tokens[first : first + max_length], prompt_length=prompt, steps=None)


def wrong(s: Sequence, info: ModelInfo) -> InvalidRequest | None:
    """What is wrong with one sequence, if anything."""
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
    if s.prompt_length is not None and not 0 <= s.prompt_length <= len(tokens):
        return InvalidRequest(f"prompt length {s.prompt_length} lies outside the sample's {len(tokens)} tokens")
    if info.max_length is not None and len(tokens) > info.max_length:
        # Only what answers for whole samples may lose some of their tokens.
        instead = "" if _is_by_token(info) else ", or start the server with --truncation left or right"
        return InvalidRequest(
            f"the sample has {len(tokens)} tokens, {info.name} takes at most {info.max_length}; shorten it{instead}"
        )
    return None


def _is_by_token(info: ModelInfo) -> bool:
    """Whether the model answers for single tokens or steps, whose positions clients count."""
    return bool({"values", "step_rewards"} & {*info.outputs})
