"""Truncation of samples that are too long, and the part that must remain."""

from __future__ import annotations

import dataclasses

from guerdon.core import ModelInfo, ScoreRequest, Sequence, Truncation
from guerdon.errors import InvalidRequest
from guerdon.kinds.kind import Tokenizer
from guerdon.messages import plain
from guerdon.settings.config import ServedModelConfig


def truncation(request: ScoreRequest, model: ServedModelConfig, info: ModelInfo) -> Truncation | None:
    """Returns what to cut off of long samples: as the request says, else as the server's setting does.

    The bound is the smaller of the request's and the model's. Raises InvalidRequest if positions would be lost.
    """
    asked = request.truncation
    if asked is None:
        return None if model.truncation == "error" else Truncation(info.max_length, model.truncation)
    if info.is_by_token:
        raise InvalidRequest(
            f"{info.name} answers for single tokens: truncation would shift the positions that clients count; send "
            "shorter samples"
        )
    bounds = [bound for bound in (asked.max_tokens, info.max_length) if bound is not None]
    return Truncation(min(bounds, default=None), asked.side)


def truncated(s: Sequence, cut: Truncation) -> Sequence:
    """Returns the sequence without its surplus at that side."""
    max_length = len(s.tokens) if cut.max_tokens is None else cut.max_tokens
    surplus = len(s.tokens) - max_length
    if surplus <= 0:
        return s
    first = surplus if cut.side == "left" else 0
    prompt = None if s.prompt_length is None else min(max(0, s.prompt_length - first), max_length)
    return dataclasses.replace(s, tokens=s.tokens[first : first + max_length], prompt_length=prompt, steps=None)


def find_loss(s: Sequence, cut: Truncation) -> InvalidRequest | None:
    """Returns an error if `truncated` would leave nothing of the response after a prompt of known length."""
    if cut.max_tokens is None or s.prompt_length is None or cut.side == "left":
        return None
    has_response = len(s.tokens) > max(cut.max_tokens, s.prompt_length)
    return nothing_left(cut) if has_response and s.prompt_length >= cut.max_tokens else None


def nothing_left(cut: Truncation) -> InvalidRequest:
    """Returns the error for a sample that truncation leaves without any of its response."""
    other = "truncate at the left, or allow more tokens" if cut.side == "right" else "allow more tokens"
    return InvalidRequest(
        f"truncation to {cut.max_tokens} tokens at the {cut.side} leaves nothing of the response; {other}"
    )


def split_at_cut(encoder: Tokenizer, request: ScoreRequest, i: int, cut: Truncation) -> tuple[str, str] | None:
    """Returns sample `i` as one text, and the part that truncation keeps before it keeps any of the response.

    None if the response's place is unknown, or if it is empty. A conversation's response is its last message.
    """
    if request.messages is not None:
        text = encoder.render(request.messages[i])
        assert isinstance(text, str), "it has token ids"
        start, end = _find_last_message(encoder, request, i, text)
    else:
        assert request.texts is not None
        text, prompt = request.texts[i], "" if request.prompts is None else request.prompts[i]
        start, end = (len(prompt) if text.startswith(prompt) else 0), len(text)
    if start == end:
        return None
    return text, text[:start] if cut.side == "right" else text[end:]


def _find_last_message(encoder: Tokenizer, request: ScoreRequest, i: int, text: str) -> tuple[int, int]:
    """Returns the characters between which the content of a rendered conversation's last message stands."""
    assert request.messages is not None
    *before, last = plain(request.messages[i])
    content = last["content"].strip()  # as templates do
    prompt: str | InvalidRequest = ""
    if before:
        prompt = encoder.render_prompts([before])[0] if last["role"] == "assistant" else encoder.render(before)
    start = len(prompt) if isinstance(prompt, str) and text.startswith(prompt) else 0
    at = text.find(content, start) if start else text.rfind(content)
    return (start, len(text)) if at < 0 else (at, at + len(content))  # some templates rewrite contents
