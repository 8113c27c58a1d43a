"""Trainers' samples as requests, and the scores' parts by their names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from guerdon.client import Scores
from guerdon.client.reward_client import ScoreArgs
from guerdon.core import Message
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.wire.score_tensors import prompt_groups

Prompt = str | Sequence[Message]
"""A text, or the messages of a conversation."""


def samples_of(prompts: Sequence[Prompt], completions: Sequence[Prompt], suffix: str = "") -> ScoreArgs:
    """What to ask for prompts and their completions: all of them texts, or all of them lists of messages.

    `suffix` stands after each text. Equal prompts are one group, also those of other calls and processes. Raises
    InvalidRequest for a sample that is neither, or of another kind than the first one.
    """
    pairs = list(zip(prompts, completions, strict=True))
    is_text = not pairs or isinstance(pairs[0][0], str)
    for i, pair in enumerate(pairs):
        for name, part in zip(("prompt", "completion"), pair, strict=True):
            if isinstance(part, str) != is_text or not (is_text or _is_conversation(part)):
                what = "an empty list" if isinstance(part, list) and not part else f"a {type(part).__name__}"
                wanted = "a text" if is_text else "a list of messages"
                raise InvalidRequest(
                    f"sample {i}: the {name} is {what}, and must be {wanted} as those before it: give either texts or "
                    "lists of messages, for prompts and completions alike"
                )
    groups = prompt_groups([repr(prompt) for prompt in prompts])
    if is_text:
        texts = [f"{prompt}{completion}{suffix}" for prompt, completion in pairs]
        return {"texts": texts, "prompts": [str(prompt) for prompt in prompts], "groups": groups}
    return {"messages": [[*prompt, *completion] for prompt, completion in pairs], "groups": groups}


def components_of(scores: Scores) -> dict[str, np.ndarray]:
    """Each attribute, or each component of a sum, by its name: float32 `[B]`, NaN where the sample failed.

    Attributes that the server does not name are left out.
    """
    if scores.attributes is None or not scores.attribute_names:
        return {}
    return dict(zip(scores.attribute_names, scores.attributes.T, strict=True))


def none_for_nan(values: np.ndarray) -> list[float | None]:
    """float32 `[B]` as a list of numbers, None where there is none."""
    return [None if np.isnan(value) else value for value in values.tolist()]


def mean_of(values: np.ndarray) -> float:
    """The mean of the values that are numbers; NaN where none is."""
    numbers = values[np.isfinite(values)]
    return float(numbers.mean()) if len(numbers) else math.nan


def refuse_unknown(names: Iterable[str], where: str, known: str) -> None:
    """Raises ConfigError where there are names of settings that are not `known`."""
    for name in sorted(names):
        raise ConfigError(f"unknown setting {where}{name}; known here: {known}", "correct its name, or leave it out")


def _is_conversation(part: Any) -> bool:
    """Whether it is a list of messages; Parquet gives arrays of them."""
    is_list = isinstance(part, list | tuple | np.ndarray)
    return is_list and len(part) > 0 and all(isinstance(message, Mapping) for message in part)
