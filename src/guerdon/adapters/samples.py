"""Trainers' samples as requests, and the scores' parts by their names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from guerdon.client import Scores
from guerdon.client.clients import ScoreArgs
from guerdon.core import Message
from guerdon.wire.forms import groups_of

Prompt = str | Sequence[Message]
"""A text, or the messages of a conversation."""


def samples_of(prompts: Sequence[Prompt], completions: Sequence[Prompt], suffix: str = "") -> ScoreArgs:
    """What to ask for prompts and their completions: both texts, or both lists of messages.

    `suffix` stands after each text. Equal prompts are one group, also those of other calls and processes.
    """
    pairs = list(zip(prompts, completions, strict=True))
    groups = groups_of([repr(prompt) for prompt in prompts])
    if all(isinstance(prompt, str) for prompt in prompts):
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
