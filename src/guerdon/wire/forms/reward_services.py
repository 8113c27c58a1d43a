"""Reward services of other projects: UniRL's `/score`, and `/batch_reward` of SkyPilot's examples. Texts only."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import InvalidRequest
from guerdon.wire.bodies import MAX_ROWS, check_depth, cut
from guerdon.wire.forms import form
from guerdon.wire.forms.labels import attributes_of, components_of, number
from guerdon.wire.kserve import to_error
from guerdon.wire.score_tensors import prompt_groups, scores_of

LABEL_KEYS = ("label", "expected_answer", "ground_truth", "answer")
"""Keys of a request's metadata that may hold the label, in order of preference."""


@form.refuses("image_b64 video_b64 video_path", "models here read texts; send the turn's text alone")
class Turn(form.Keys, kw_only=True):
    """A turn of a conversation; the last one is the response."""

    text: form.Text


class HistoryRequest(form.Keys, kw_only=True):
    """One sample, and the rewards that it needs: a model's name, or names of a sum's or judge's components."""

    history: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_ROWS, description="a list of objects with text")]
    required_rewards: Annotated[list[str], Meta(min_length=1, description="a list of names, at least one")]
    metadata: dict[str, Any] | None = None


class UniRLBody(form.GroupBody, kw_only=True):
    """Samples with the rewards that they need.

    If all need only one and the same, the model of that name answers; otherwise `model`, of which they are components.
    """

    example: ClassVar[str] = (
        '{"requests": [{"history": [{"text": "a prompt"}, {"text": "a response"}], "required_rewards": ["a model"]}]}'
    )
    requests: Annotated[list[HistoryRequest], Meta(max_length=MAX_ROWS, description="a list of objects with history")]


class UniRLReply(msgspec.Struct):
    """For each sample the numbers of each reward by name, and the errors of rewards that it has not got."""

    results: list[dict[str, dict[str, np.float32]]]
    errors: list[dict[str, str]]


def of_unirl(body: UniRLBody) -> form.FormRequest:
    """Returns the request of a body, whose turns alternate and end with the assistant's."""
    names = dict.fromkeys(name for one in body.requests for name in one.required_rewards)
    model = body.model or (next(iter(names)) if len(names) == 1 else "")

    def check(info: ModelInfo) -> None:
        form.check_rewards(info)
        known = (info.name, *info.attribute_names)
        if unknown := [name for name in names if name not in known and name != model]:
            raise InvalidRequest(
                f"required_rewards has {unknown[0]!r}, and {info.name} gives {', '.join(known)}; name one served model "
                "in all of them, or by `model` a sum that has them as components"
            )

    def to_reply(reply: ScoreReply, info: ModelInfo) -> UniRLReply:
        made = UniRLReply([], [])
        for one, result in zip(body.requests, reply.results, strict=True):
            numbers: dict[str, dict[str, np.float32]] = {}
            errors: dict[str, str] = {}
            if isinstance(result, Score):
                parts = attributes_of(result, info) if info.has_components else {}
                whole = {**parts, "reward": number(result.reward)}
                numbers = {n: {"reward": parts[n]} if n in parts else whole for n in one.required_rewards}
            else:
                errors = dict.fromkeys(one.required_rewards, cut(str(result)))
            made.results.append(numbers)
            made.errors.append(errors)
        return made

    request = _conversations(body) if body.requests else None
    return form.FormRequest(model, request, to_reply, check, fails_apart=True)


def _conversations(body: UniRLBody) -> ScoreRequest:
    messages: list[list[Message]] = []
    for one in body.requests:
        turns = [{"role": ("assistant", "user")[i % 2], "content": t.text} for i, t in enumerate(one.history[::-1])]
        messages.append(turns[::-1])
    check_depth([one.metadata for one in body.requests], "metadata")
    given = [one.metadata or {} for one in body.requests]
    labels = [next((row[key] for key in LABEL_KEYS if row.get(key) is not None), None) for row in given]
    groups = prompt_groups(repr(one[:-1]) for one in messages)
    return ScoreRequest(messages=messages, groups=groups, references=_or_none(labels))


def _or_none(labels: list[Any]) -> list[Any] | None:
    return None if all(label is None for label in labels) else labels


class Item(form.Keys, kw_only=True):
    prompt: form.Text
    response: form.Text
    ground_truth: Any = None


class BatchRewardBody(form.GroupBody, kw_only=True):
    """Texts with their prompts and labels."""

    example: ClassVar[str] = '{"items": [{"prompt": "a prompt", "response": " and its response", "ground_truth": "4"}]}'
    items: Annotated[list[Item], Meta(max_length=MAX_ROWS, description="a list of objects with prompt and response")]


class ItemReward(msgspec.Struct):
    reward: np.float32
    components: dict[str, np.float32] | UnsetType = UNSET


class BatchRewardReply(msgspec.Struct):
    """One reward an item, and their mean; 0 without items."""

    rewards: list[ItemReward]
    mean_reward: float


@form.serves("/batch_reward", "SkyPilot's reward servers", BatchRewardReply, to_error=to_error)
def _batch_reward(body: BatchRewardBody, url: form.Url) -> form.FormRequest:
    request = None
    if body.items:
        request = form.pair_samples([one.prompt for one in body.items], [one.response for one in body.items])
        labels = [one.ground_truth for one in body.items]
        check_depth(labels, "ground_truth")
        request.references = _or_none(labels)

    def to_reply(reply: ScoreReply, info: ModelInfo) -> BatchRewardReply:
        rows = [ItemReward(number(one.reward), **components_of(one, info)) for one in scores_of(reply)]
        mean = float(np.mean([row.reward for row in rows], dtype=np.float64)) if rows else 0.0
        return BatchRewardReply(rows, mean)

    return form.FormRequest(body.model or "", request, to_reply)
