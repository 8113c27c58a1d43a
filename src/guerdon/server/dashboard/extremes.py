"""The best and the worst samples of the last day, kept only where the settings allow it. Pure: no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest

EACH = 6
"""So many of the best, and of the worst, are kept of every SLOT_S seconds, and told of any window."""

SLOT_S = 300.0
_NUM_SLOTS = 290
MOST_TEXT = 2000
"""Characters of a prompt's end and of a response's beginning."""

_MOST_TOKENS = 1000


@dataclass(slots=True, eq=False)
class Kept:
    """One sample: its texts as far as they were sent, else its ids, which `vocabulary` has a text for."""

    time: float
    reward: float
    num_tokens: int
    weights_version: str
    prompt: str | None = None
    response: str | None = None
    tokens: np.ndarray | None = None
    num_prompt_tokens: int = 0
    vocabulary: str = ""
    attributes: dict[str, float] = field(default_factory=dict)
    is_cut: bool = False


@dataclass(slots=True, eq=False)
class _Slot:
    best: list[Kept] = field(default_factory=list)
    worst: list[Kept] = field(default_factory=list)


class Extremes:
    """The best and the worst samples of one model; all it holds is bounded."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def note(self, time: float, request: ScoreRequest, reply: ScoreReply, info: ModelInfo) -> None:
        """Keeps what of the request's samples is among the extremes of its time."""
        at = int(time // SLOT_S)
        if at not in self._slots:
            for old in [i for i in self._slots if i <= at - _NUM_SLOTS]:
                del self._slots[old]
            self._slots[at] = _Slot()
        slot = self._slots[at]
        scored = [(r.reward, i) for i, r in enumerate(reply.results) if isinstance(r, Score)]
        scored = sorted((reward, i) for reward, i in scored if np.isfinite(reward))
        kept: dict[int, Kept] = {}
        for found, sign, wanted in ((slot.best, 1, scored[: -EACH - 1 : -1]), (slot.worst, -1, scored[:EACH])):
            for reward, i in wanted:
                if len(found) < EACH or sign * reward > sign * found[-1].reward:
                    if i not in kept:
                        kept[i] = _kept(time, request, reply, info, i)
                    found[:] = _first([*found, kept[i]], sign)

    def best(self, start: float) -> list[Kept]:
        """The best since then, the best first, each text once."""
        return _first(self._since(start, "best"), 1)

    def worst(self, start: float) -> list[Kept]:
        """The worst since then, the worst first, each text once."""
        return _first(self._since(start, "worst"), -1)

    def _since(self, start: float, which: str) -> Iterator[Kept]:
        for at, slot in self._slots.items():
            if (at + 1) * SLOT_S > start:
                yield from (one for one in getattr(slot, which) if one.time >= start)


def _first(samples: Iterable[Kept], sign: int) -> list[Kept]:
    """The EACH with the largest rewards times `sign`, of those that are alike the latest."""
    found: dict[tuple[object, ...], Kept] = {}
    for one in sorted(samples, key=lambda one: (sign * one.reward, one.time), reverse=True):
        tokens = None if one.tokens is None else one.tokens.tobytes()
        found.setdefault((one.reward, one.prompt, one.response, tokens), one)
        if len(found) == EACH:
            break
    return [*found.values()]


def _kept(time: float, request: ScoreRequest, reply: ScoreReply, info: ModelInfo, i: int) -> Kept:
    score = reply.results[i]
    assert isinstance(score, Score)
    made = Kept(time, score.reward, reply.lengths[i], reply.weights_version)
    if score.attributes is not None:
        made.attributes = dict(zip(info.attribute_names, map(float, score.attributes), strict=True))
    if request.tokens is not None:
        tokens = request.tokens[i]
        made.tokens, made.vocabulary = tokens[-_MOST_TOKENS:].copy(), info.vocabulary
        made.is_cut = len(tokens) > _MOST_TOKENS
        if request.prompt_lengths is not None:
            made.num_prompt_tokens = max(0, int(request.prompt_lengths[i]) - max(0, len(tokens) - _MOST_TOKENS))
        return made
    prompt, response = _texts(request, i)
    made.is_cut = len(prompt or "") > MOST_TEXT or len(response) > MOST_TEXT
    made.prompt = None if prompt is None else prompt[-MOST_TEXT:]
    made.response = response[:MOST_TEXT]
    return made


def _texts(request: ScoreRequest, i: int) -> tuple[str | None, str]:
    """The prompt, where it is told, and the rest."""
    if request.messages is not None:
        *before, last = request.messages[i]
        return "\n".join(map(_said, before)) or None, _said(last)
    assert request.texts is not None
    text, prompt = request.texts[i], None if request.prompts is None else request.prompts[i]
    if prompt and text.startswith(prompt):
        return prompt, text[len(prompt) :]
    return None, text


def _said(message: Message) -> str:
    content = message.get("content")
    return f"{message.get('role')}: {content if isinstance(content, str) else ''}"
