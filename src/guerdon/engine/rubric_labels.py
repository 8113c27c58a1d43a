"""A rubric's questions as texts, and the tokens that its labels are after them."""

from __future__ import annotations

import re

import numpy as np

from guerdon.core import Message
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.judge_core import LabelTokens, Pair, Rubric, Sample

_RESPONSES = ("The capital of France is Paris.", "I think that it is Lyon.")
_SAMPLES = [Sample(text, "What is the capital of France?", "Paris") for text in _RESPONSES]


def try_subjects(rubric: Rubric) -> list[Sample | Pair]:
    """Returns what the rubric is tried on at the start; two responses in both orders if it compares."""
    return [_SAMPLES[0]] if rubric.compare is None else [Pair(*_SAMPLES), Pair(*_SAMPLES[::-1])]


def render(text: TextEncoder, rubric: Rubric, subject: Sample | Pair, label: str = "") -> list[str | InvalidRequest]:
    """Returns the question of each criterion, by the chat template if there is one, with a label after it."""
    questions = rubric.render(subject)
    if not text.takes_messages:
        before = f"{rubric.system}\n\n" if rubric.system else ""
        return [before + question + label for question in questions]
    system: list[Message] = [{"role": "system", "content": rubric.system}] if rubric.system else []
    conversations = [[*system, {"role": "user", "content": question}] for question in questions]
    rendered = text.render_prompts(conversations, rubric.chat_template_kwargs)
    return [one + label if isinstance(one, str) else one for one in rendered]


def check_variables(text: TextEncoder, rubric: Rubric) -> None:
    """Raises ConfigError if the chat template does not have a variable of the rubric."""
    for name in rubric.chat_template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", text.chat_template):
            what = f"the chat template has no {name}" if text.takes_messages else "the checkpoint has no chat template"
            raise ConfigError(
                f"{rubric.path}: chat_template_kwargs has {name}, and {what}", "leave it out, or correct its name"
            )


def find_label_tokens(text: TextEncoder, rubric: Rubric, vocab_size: int) -> LabelTokens:
    """Returns the tokens of the labels, below `vocab_size`.

    Raises ConfigError unless each label is one separate token after every criterion, and changes no token before it.
    """
    ids = _find_ids(text, rubric)
    if rubric.spellings == "exact":
        return LabelTokens(ids, np.arange(len(ids)))
    plain = [plain_spelling(label) for label in rubric.labels]
    if twice := next((label for label, one in zip(rubric.labels, plain, strict=True) if plain.count(one) > 1), None):
        raise ConfigError(
            f"{rubric.path}: the label {twice!r} and another differ only in case or blanks, and spellings is any",
            "leave one of them out, or set `spellings: exact`",
        )
    spelled: dict[str, list[int]] = {one: [int(i)] for one, i in zip(plain, ids, strict=True)}
    for i, token in enumerate(text.all_texts()[:vocab_size]):
        if (found := spelled.get(plain_spelling(token))) is not None and i not in ids:
            found.append(i)
    lengths = [len(found) for found in spelled.values()]
    return LabelTokens(np.concatenate([*spelled.values()]), np.cumsum([0, *lengths[:-1]]))


def plain_spelling(text: str) -> str:
    """Returns the text without case, and without the blanks and line breaks around it."""
    return text.strip(" \t\r\n▁").casefold()


def _find_ids(text: TextEncoder, rubric: Rubric) -> np.ndarray:
    """Returns the token of each label as it is written, int64 `[L]`."""

    def encode(label: str) -> list[np.ndarray]:
        made = []
        for row in render(text, rubric, try_subjects(rubric)[0], label):
            ids = row if isinstance(row, InvalidRequest) else text.encode([row], not text.takes_messages)[0]
            if isinstance(ids, InvalidRequest):
                raise ConfigError(f"{rubric.path}: the tokenizer refuses the template: {ids}", "correct it, or system")
            made.append(ids)
        return made

    alone = encode("")
    found: dict[str, int] = {}
    for label in rubric.labels:
        for name, before, row in zip(rubric.names, alone, encode(label), strict=True):
            added = row[len(before) :]
            if len(added) != 1 or not np.array_equal(row[:-1], before):
                what = f"{len(added)} tokens" if np.array_equal(row[: len(before)], before) else "no token of its own"
                raise ConfigError(
                    f"{rubric.path}: after the criterion {name} the label {label!r} is {what}, and must be one",
                    "choose a label that is one token, with a leading space if the template ends with a word, or "
                    "another end of the template",
                )
            if found.setdefault(label, int(added[0])) != added[0]:
                raise ConfigError(
                    f"{rubric.path}: the label {label!r} is another token after the criterion {name}",
                    "end the template with words of its own",
                )
    ids = [*found.values()]
    same = next((label for label, i in found.items() if ids.count(i) > 1), None)
    if same is not None:
        raise ConfigError(
            f"{rubric.path}: the label {same!r} and another are the same token ({found[same]})", "choose others"
        )
    return np.array(ids, np.int64)
