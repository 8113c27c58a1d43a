"""Keeps the best and worst samples of the last day, if the settings allow it. Pure: no clock."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

import numpy as np

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.messages import plain

EACH = 6
"""Number of best, and of worst, samples that are kept per slot and shown per window."""

FINE_S, FINE_WINDOW_S = 60.0, 3600.0
COARSE_S, COARSE_WINDOW_S = 600.0, 86_400.0
"""Length of a slot, and its retention."""

MOST_TEXT = 2000
"""Characters kept of a prompt's end and of a response's beginning."""

_HEAD = 1000
"""Characters kept of the beginning of a text without a known prompt."""

_MOST_TOKENS = 1000
_MOST_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class KeptSample:
    """A sample: its texts if the client sent text, else its token ids, which `vocabulary` decodes."""

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

    @property
    def num_bytes(self) -> int:
        """Returns the approximate memory."""
        texts = sum(sys.getsizeof(text) for text in (self.prompt, self.response) if text is not None)
        return 500 + texts + (0 if self.tokens is None else self.tokens.nbytes)


@dataclass(slots=True, eq=False)
class _Slot:
    best: list[KeptSample] = field(default_factory=list)
    worst: list[KeptSample] = field(default_factory=list)

    def may_take(self, rewards: list[float]) -> bool:
        """Whether one of the rewards, which may be NaN, may be an extreme."""
        if len(self.best) < EACH or len(self.worst) < EACH:
            return True
        return not (max(rewards) <= self.best[-1].reward and min(rewards) >= self.worst[-1].reward)  # also of a NaN

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in (*self.best, *self.worst))


class ExtremeSamples:
    """The best and worst samples of one model, within about `most_bytes`."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._fine: dict[int, _Slot] = {}
        self._coarse: dict[int, _Slot] = {}

    def note(
        self, time: float, request: ScoreRequest, reply: ScoreReply, info: ModelInfo, lengths: ListLike[int]
    ) -> None:
        """Keeps those of the request's samples that are extremes of their slot; `lengths` in tokens."""
        fine = self._slot(self._fine, time, FINE_S, FINE_WINDOW_S)
        coarse = self._slot(self._coarse, time, COARSE_S, COARSE_WINDOW_S)
        scored = [r.reward if isinstance(r, Score) else math.nan for r in reply.results]
        if not (fine.may_take(scored) or coarse.may_take(scored)):  # as of nearly all requests
            return
        rewards = np.array(scored)
        kept: dict[int, KeptSample] = {}
        for slots, sign in (((fine.best, coarse.best), 1), ((fine.worst, coarse.worst), -1)):
            for i in _largest(sign * rewards):
                for found in slots:
                    if len(found) < EACH or sign * rewards[i] > sign * found[-1].reward:
                        if i not in kept:
                            kept[i] = _kept(time, request, reply, info, i, lengths[i])
                        found[:] = _first([*found, kept[i]], sign)

    def best(self, start: float) -> list[KeptSample]:
        """Returns the best since then, best first, each text once."""
        return _first(self._since(start, "best"), 1)

    def worst(self, start: float) -> list[KeptSample]:
        """Returns the worst since then, worst first, each text once."""
        return _first(self._since(start, "worst"), -1)

    def _since(self, start: float, which: str) -> Iterator[KeptSample]:
        for slots, seconds in ((self._fine, FINE_S), (self._coarse, COARSE_S)):
            for at, slot in slots.items():
                if (at + 1) * seconds > start:
                    yield from (one for one in getattr(slot, which) if one.time >= start)

    def _slot(self, slots: dict[int, _Slot], time: float, seconds: float, window_s: float) -> _Slot:
        at = int(time // seconds)
        if at not in slots:
            for old in [i for i in slots if (i + 1) * seconds <= time - window_s]:
                del slots[old]
            slots[at] = _Slot()
            # Evicts the oldest slots if all exceed the memory limit.
            total = sum(slot.num_bytes for kept in (self._coarse, self._fine) for slot in kept.values())
            for kept in (self._coarse, self._fine):
                while total > self._most_bytes and len(kept) > 1:
                    total -= kept.pop(min(kept)).num_bytes
        return slots[at]


def _largest(rewards: np.ndarray) -> list[int]:
    """Returns the indices of the EACH largest finite numbers, largest first."""
    places = np.flatnonzero(np.isfinite(rewards))
    if len(places) > EACH:
        places = places[np.argpartition(rewards[places], -EACH)[-EACH:]]
    return places[np.argsort(-rewards[places], kind="stable")].tolist()


def _first(samples: Iterable[KeptSample], sign: int) -> list[KeptSample]:
    """Returns the EACH samples with the largest `sign` times reward; of equal ones the latest.

    Alike is the same text before the same weights: the last digits of its reward may depend on its batch.
    """
    found: dict[tuple[object, ...], KeptSample] = {}
    for one in sorted(samples, key=lambda one: (one.time, sign * one.reward)):
        tokens = None if one.tokens is None else one.tokens.tobytes()
        found[one.weights_version, one.prompt, one.response, tokens] = one
    return sorted(found.values(), key=lambda one: (sign * one.reward, one.time), reverse=True)[:EACH]


def _kept(time: float, request: ScoreRequest, reply: ScoreReply, info: ModelInfo, i: int, length: int) -> KeptSample:
    score = reply.results[i]
    assert isinstance(score, Score)
    made = KeptSample(time, score.reward, length, reply.weights_version)
    if score.attributes is not None:
        names = score.names or info.names_of(len(score.attributes))
        made.attributes = dict(zip(names, map(float, score.attributes), strict=True))
    if request.tokens is not None:
        tokens = request.tokens[i]
        made.tokens, made.vocabulary = tokens[-_MOST_TOKENS:].astype(np.int32), info.vocabulary
        made.is_cut = len(tokens) > _MOST_TOKENS
        if request.prompt_lengths is not None:
            made.num_prompt_tokens = max(0, int(request.prompt_lengths[i]) - max(0, len(tokens) - _MOST_TOKENS))
        return made
    prompt, response = _texts(request, i)
    if prompt is None:  # the response may be anywhere, so most likely at the end
        made.is_cut = len(response) > 2 * MOST_TEXT
        made.response = f"{response[:_HEAD]}\n…\n{response[_HEAD - 2 * MOST_TEXT :]}" if made.is_cut else response
        return made
    made.is_cut = len(prompt) > MOST_TEXT or len(response) > MOST_TEXT
    made.prompt, made.response = prompt[-MOST_TEXT:], response[:MOST_TEXT]
    return made


def _texts(request: ScoreRequest, i: int) -> tuple[str | None, str]:
    """Splits the text into the prompt, if known, and the rest."""
    if request.messages is not None:
        *before, last = plain(request.messages[i])
        return "\n".join(map(_said, before)) or None, _said(last)
    assert request.texts is not None
    text, prompt = request.texts[i], None if request.prompts is None else request.prompts[i]
    if prompt and text.startswith(prompt):
        return prompt, text[len(prompt) :]
    return None, text


def _said(message: Message) -> str:
    return f"{message['role']}: {message['content']}"
