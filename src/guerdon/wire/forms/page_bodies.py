"""Bodies of the server's page: trials that it sends, and all that it shows."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NotRequired, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

from guerdon.wire.forms.form import Conversation, ModelName, Text, TokenId

MAX_RESPONSES = 16
"""Most responses, or conversations, that Try it scores at once."""

_SOME = Meta(min_length=1, max_length=MAX_RESPONSES)


class TrialBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Responses, with or without a prompt, or whole conversations; `template` renders both as messages.

    In place of text there may be `tokens`: of each sample all ids, of which the first `prompt_length` are the prompt's.
    """

    example: ClassVar[str] = '{"model": "reward_model", "prompt": "a prompt", "responses": [" and a response"]}'
    model: ModelName = None
    prompt: str | None = None
    responses: Annotated[
        str | Annotated[list[Text], _SOME] | None,
        Meta(description=f"a string, or a list of at most {MAX_RESPONSES} strings"),
    ] = None
    messages: Annotated[
        Annotated[list[Conversation], _SOME] | None,
        Meta(description=f"at most {MAX_RESPONSES} conversations, which are lists of objects with role and content"),
    ] = None
    template: bool | None = None
    tokens: Annotated[
        Annotated[list[Annotated[list[TokenId], Meta(min_length=1)]], _SOME] | None,
        Meta(description=f"at most {MAX_RESPONSES} lists of token ids"),
    ] = None
    prompt_length: Annotated[int, Meta(ge=0, description="a whole number from 0 up")] = 0


class TrialToken(TypedDict):
    """A token with its value, or with its log-prob and a teacher's rank and likeliest alternatives."""

    text: str
    value: float | None
    in_prompt: bool
    rank: NotRequired[int]
    likeliest: NotRequired[list[tuple[str, float]]]


class TrialStep(TypedDict):
    """A step by its last token."""

    index: int
    reward: float


class TrialResult(TypedDict):
    reward: np.float32 | None
    error: str | None
    attributes: dict[str, np.float32]
    components: dict[str, np.float32]
    num_tokens: int
    tokens: list[TrialToken] | None
    steps: list[TrialStep] | None


class TrialReply(TypedDict):
    model: str
    weights_version: str
    queue_s: float
    compute_s: float
    results: list[TrialResult]


class Extreme(TypedDict):
    """One of the best or worst recent samples."""

    time: float
    reward: float
    num_tokens: int
    weights_version: str
    prompt: str | None
    response: str | None
    is_cut: bool
    attributes: NotRequired[dict[str, float]]
    components: NotRequired[dict[str, float]]


class Extremes(TypedDict):
    model: str
    window_s: float
    best: list[Extreme]
    worst: list[Extreme]


class Snapshot(TypedDict):
    """All that the page shows."""

    server: dict[str, Any]
    models: list[dict[str, Any]]
    series: dict[str, Any]
    totals: dict[str, Any]
    rewards: dict[str, Any]
    components: dict[str, Any]
    entropies: dict[str, Any]
    calls: dict[str, Any]
    errors: dict[str, Any]
    critic: dict[str, Any] | None
