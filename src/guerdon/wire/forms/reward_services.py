"""Remote reward models as trainers ask them: the forms of OpenRLHF, slime, UniRL, SkyPilot and LlamaFactory."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest, Truncation
from guerdon.errors import InvalidRequest
from guerdon.messages import answered
from guerdon.wire.bodies import MAX_ROWS, check_depth, cut, kind_of
from guerdon.wire.forms import form
from guerdon.wire.forms.labels import attributes_of, components_of, number, rewards_of
from guerdon.wire.kserve import to_error
from guerdon.wire.score_tensors import prompt_groups, scores_of

LABEL_KEYS = ("label", "expected_answer", "ground_truth", "answer")
"""Keys of a UniRL request's metadata that may hold the label, in order of preference."""


class GetRewardUrl(form.Url, kw_only=True, forbid_unknown_fields=True):
    """`extra_logs=false` leaves the components out, at which OpenRLHF 0.8.3 to 0.8.11 would stop.

    `ending=true` ends texts that the model's chat template has made as it ends an answer.
    """

    extra_logs: form.Switch = None
    ending: form.Switch = None


class GetRewardBody(form.GroupBody, kw_only=True):
    """Whole texts, since 0.5.8 with their prompts and since 0.6 with their labels; empty lists count as none."""

    example: ClassVar[str] = '{"query": ["a prompt and its response"], "prompts": ["a prompt"], "labels": [null]}'
    query: Annotated[
        str | Annotated[list[form.Text], Meta(max_length=MAX_ROWS)], Meta(description="a string, or a list of strings")
    ]
    prompts: Annotated[str | list[form.Text] | None, Meta(description="a string, or a list of strings")] = None
    labels: Annotated[Any, Meta(description="any value, one a text of query, or none")] = None


class GetRewardReply(msgspec.Struct):
    """One number a text, under both names; `extra_logs` has the components of each."""

    rewards: np.ndarray
    scores: np.ndarray
    extra_logs: dict[str, list[np.float32]]


@form.serves("/get_reward", "OpenRLHF's remote reward model", GetRewardReply, to_error=to_error)
def _get_reward(body: GetRewardBody, url: GetRewardUrl) -> form.FormRequest:
    wants_logs = url.extra_logs != "false"

    def to_reply(reply: ScoreReply, info: ModelInfo) -> GetRewardReply:
        rewards = rewards_of(reply)
        components = [attributes_of(score, info) for score in scores_of(reply)] if wants_logs else []
        logs = {name: [one[name] for one in components] for name in (components[0] if components else ())}
        return GetRewardReply(rewards, rewards, logs)

    request = None if body.query == [] else _to_request(body)
    if request is not None:
        request.completes = url.ending == "true"
    return form.FormRequest(request, to_reply)


def _to_request(body: GetRewardBody) -> ScoreRequest:
    texts, labels = form.to_texts(body.query), body.labels
    if isinstance(body.query, str) and not isinstance(labels, list | None):
        labels = [labels]  # one sample's label may stand without a list
    prompts = form.to_texts(body.prompts) if body.prompts else None
    if labels is not None and not isinstance(labels, list):
        raise InvalidRequest(f"labels is {kind_of(labels)}; send a list with one label a text of query")
    for name, values in (("prompts", prompts), ("labels", labels)):
        if values and len(values) != len(texts):
            raise InvalidRequest(f"{name} has {len(values)} entries, query {len(texts)}; send one a text, or none")
    check_depth(labels, "labels")
    return ScoreRequest(
        texts=texts, groups=prompt_groups(prompts) if prompts else None, prompts=prompts, references=labels or None
    )


class RewardUrl(form.Url, kw_only=True, forbid_unknown_fields=True):
    """With `key`, as `--reward-key` of slime names it, the reply is an object that has the number under that name.

    `ending=false` scores a text prompt and its response as they are, without the ending of the model's chat template.
    """

    ending: form.Switch = None
    key: Annotated[str, Meta(extra_json_schema={"not": {"const": "components"}})] = ""


class RewardBody(form.GroupBody, kw_only=True):
    """One sample, its prompt a text or messages."""

    example: ClassVar[str] = '{"prompt": "a prompt", "response": " and its response", "label": null}'
    prompt: Annotated[str | form.Conversation, Meta(description="a string, or a list of objects with role and content")]
    response: form.Text
    label: Any | UnsetType = UNSET


@form.serves("/reward", "slime's remote reward model", float, dict[str, Any], to_error=to_error)
def _reward(body: RewardBody, url: RewardUrl) -> form.FormRequest:
    """The reply is the bare number, or with `key` an object with the number and its `components`."""
    key = url.key
    if key == "components":
        raise InvalidRequest("the URL has key=components, the key of a sum's parts; choose another key")
    if isinstance(body.prompt, str):
        request = form.pair_samples([body.prompt], [body.response])
        request.completes = url.ending != "false"
    else:
        request = form.of_conversation(answered(form.check_conversation(body.prompt, "prompt"), body.response))
    request.references = None if body.label is UNSET else [body.label]
    check_depth(request.references, "label")

    def to_reply(reply: ScoreReply, info: ModelInfo) -> np.float32 | dict[str, Any]:
        (score,) = scores_of(reply)
        reward = number(score.reward)
        if not key:
            return reward
        components = attributes_of(score, info)
        return {"components": components, key: reward} if components else {key: reward}

    return form.FormRequest(request, to_reply)


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


@form.serves("", "UniRL's reward service", UniRLReply, to_error=to_error)
def of_unirl(body: UniRLBody, url: form.Url) -> form.FormRequest:
    """The turns alternate, and end with the assistant's."""
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
    return form.FormRequest(request, to_reply, check, model=model, fails_apart=True)


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

    return form.FormRequest(request, to_reply)


class EvaluationBody(form.Body, kw_only=True):
    """Whole texts, as in `sentences`; `max_length` cuts their ends off."""

    example: ClassVar[str] = '{"model": "reward_model", "messages": ["a prompt and its response"]}'
    messages: Annotated[list[form.Text], Meta(min_length=1, max_length=MAX_ROWS, description="a list of strings")]
    max_length: Annotated[int, Meta(ge=1)] | None = None


class EvaluationReply(msgspec.Struct):
    """One number a text."""

    model: str
    scores: np.ndarray
    object: Literal["score.evaluation"] = "score.evaluation"


@form.serves("/v1/score/evaluation", "LlamaFactory's reward API", EvaluationReply, to_error=to_error)
def _evaluate(body: EvaluationBody, url: form.Url) -> form.FormRequest:
    def to_reply(reply: ScoreReply, info: ModelInfo) -> EvaluationReply:
        return EvaluationReply(info.name, rewards_of(reply))

    bound = None if body.max_length is None else Truncation(body.max_length, "right")
    return form.FormRequest(ScoreRequest(texts=body.messages, truncation=bound), to_reply)
