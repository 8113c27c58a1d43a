"""Tries a rubric at the start: how much of the probability its labels have, and what the model would say instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.engine.rubric_labels import plain_spelling, render, try_subjects
from guerdon.errors import ConfigError, SampleFailed
from guerdon.judge_core import LabelTokens, Rubric
from guerdon.teacher_core import TokenLogprobs
from guerdon.thinking import answer_of

ENOUGH = 0.5
"""Least probability of the labels that is not warned of."""

_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn thinking off."""
_CHANNEL = "<|channel|>"
"""The token with which gpt-oss begins to think."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial found: a line of text, and whether labels had too little of the probability."""

    text: str
    is_poor: bool = False


class Adviser:
    """Describes a model's likeliest answers outside the labels, and the remedy."""

    def __init__(self, text: TextEncoder, rubric: Rubric) -> None:
        self._text, self._labels, template = text, rubric.labels, text.chat_template
        prompt = render(text, rubric, try_subjects(rubric)[0])[0]
        self._opens_thinking = isinstance(prompt, str) and answer_of(prompt) is None
        self._switch = next((name for name in _SWITCHES if re.search(rf"\b(if|not|and|or) {name}\b", template)), "")

    def explain(self, said: TokenLogprobs) -> str:
        """Returns the likeliest tokens with their probabilities, and advice."""
        assert said.top_ids is not None and said.top_logprobs is not None
        texts, probabilities = self._text.texts_of(said.top_ids[0]), np.exp(said.top_logprobs[0]).tolist()
        shown = ", ".join(f"{text!r} {share:.2g}" for text, share in zip(texts, probabilities, strict=True))
        return f"the likeliest tokens are {shown}; {self._advise(texts)}"

    def _advise(self, likeliest: list[str]) -> str:
        first, labels = likeliest[0], {plain_spelling(label): label for label in self._labels}
        if self._opens_thinking or answer_of(first) is None or first.strip() == _CHANNEL:
            variable, unless = self._switch or "enable_thinking", "" if self._switch else " if its template has it"
            return (
                f"the model thinks before it answers: set `chat_template_kwargs: {{{variable}: false}}` in the rubric"
                f"{unless}, or use a judge in words"
            )
        spelled = [
            f"{text!r} for {labels[plain_spelling(text)]!r}"
            for text in likeliest
            if plain_spelling(text) in labels and text not in self._labels
        ]
        if spelled:
            return (
                f"the model spells labels otherwise, {', '.join(spelled)}: write them so, or set `spellings: any` in "
                "the rubric"
            )
        if not first.strip():
            return "the model begins with a blank: without a chat template, end the template with it"
        return "let the template ask for a label alone, choose labels that the model says, or take a larger model"


def try_rubric(
    text: TextEncoder,
    rubric: Rubric,
    labels: LabelTokens,
    score: Callable[[list[Sequence]], list[Score | SampleFailed]],
    max_length: int | None,
) -> Trial:
    """Collective; asks every criterion about a sample.

    Raises ConfigError if not even that fits into `max_length` tokens.
    """
    questions = [
        str(one) for subject in try_subjects(rubric) for one in render(text, rubric, subject, rubric.labels[0])
    ]
    rows = [np.asarray(row) for row in text.encode(questions, not text.takes_messages)]
    longest = max(map(len, rows))
    if max_length is not None and longest > max_length:
        raise ConfigError(
            f"{rubric.path}: a question about a short sample has {longest} tokens, and the model takes {max_length}",
            "shorten the template, system or criteria, or raise --max-length",
        )
    masses, answers = [], []
    for result in score([Sequence(row, query=labels.query(len(row))) for row in rows]):
        if isinstance(result, SampleFailed) or result.logprobs is None:
            return Trial(f"a sample fails: {result}", is_poor=True)
        answers.append(result.logprobs)
        masses.append(float(np.exp(labels.read(result.logprobs)).sum()))
    worst = int(np.argmin(masses))
    has = f"{min(masses):.3g}" if len(masses) == 1 else f"{min(masses):.3g} to {max(masses):.3g}"
    told = "; ".join([*_spellings(text, rubric, labels), f"on a sample, labels have {has} of the probability"])
    if masses[worst] >= ENOUGH:
        return Trial(told)
    criterion = rubric.names[worst % len(rubric.criteria)]
    return Trial(f"{told}; for {criterion} {Adviser(text, rubric).explain(answers[worst])}", is_poor=True)


def _spellings(text: TextEncoder, rubric: Rubric, labels: LabelTokens) -> list[str]:
    """Returns what counts as each label, if other spellings do."""
    if rubric.spellings == "exact":
        return []
    parts = np.split(labels.ids, labels.starts[1:])
    shown = (
        f"{label!r}: {', '.join(map(repr, text.texts_of(ids)))}"
        for label, ids in zip(rubric.labels, parts, strict=True)
    )
    return [f"spellings of {'; of '.join(shown)}"]
