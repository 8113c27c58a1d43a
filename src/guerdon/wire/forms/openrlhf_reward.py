"""OpenRLHF's remote reward model: `/get_reward`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from guerdon.core import ModelInfo, ScoreReply, ScoreRequest
from guerdon.errors import InvalidRequest
from guerdon.wire.bodies import MAX_ROWS, check_depth, kind_of
from guerdon.wire.forms.form import FormRequest, GroupBody, Switch, Text, Url, serves, to_texts
from guerdon.wire.forms.labels import attributes_of, number
from guerdon.wire.kserve import to_error
from guerdon.wire.score_tensors import prompt_groups, scores_of


class GetRewardUrl(Url, kw_only=True, forbid_unknown_fields=True):
    """`extra_logs=false` leaves the components out, at which OpenRLHF 0.8.3 to 0.8.11 would stop.

    `ending=true` ends texts that the model's chat template has made as it ends an answer.
    """

    extra_logs: Switch = None
    ending: Switch = None


class GetRewardBody(GroupBody, kw_only=True):
    """Whole texts, since 0.5.8 with their prompts and since 0.6 with their labels; empty lists count as none."""

    example: ClassVar[str] = '{"query": ["a prompt and its response"], "prompts": ["a prompt"], "labels": [null]}'
    query: Annotated[
        str | Annotated[list[Text], Meta(max_length=MAX_ROWS)], Meta(description="a string, or a list of strings")
    ]
    prompts: Annotated[str | list[Text] | None, Meta(description="a string, or a list of strings")] = None
    labels: Annotated[Any, Meta(description="any value, one a text of query, or none")] = None


class GetRewardReply(msgspec.Struct):
    """One number a text, under both names; `extra_logs` has the components of each."""

    rewards: np.ndarray
    scores: np.ndarray
    extra_logs: dict[str, list[np.float32]]


@serves("/get_reward", "OpenRLHF's remote reward model", GetRewardReply, to_error=to_error)
def _get_reward(body: GetRewardBody, url: GetRewardUrl) -> FormRequest:
    wants_logs = url.extra_logs != "false"

    def to_reply(reply: ScoreReply, info: ModelInfo) -> GetRewardReply:
        scores = scores_of(reply)
        rewards = np.array([number(score.reward) for score in scores], np.float32)
        components = [attributes_of(score, info) for score in scores] if wants_logs else []
        logs = {name: [one[name] for one in components] for name in (components[0] if components else ())}
        return GetRewardReply(rewards, rewards, logs)

    request = None if body.query == [] else _to_request(body)
    if request is not None:
        request.completes = url.ending == "true"
    return FormRequest(body.model or "", request, to_reply)


def _to_request(body: GetRewardBody) -> ScoreRequest:
    texts, labels = to_texts(body.query), body.labels
    if isinstance(body.query, str) and not isinstance(labels, list | None):
        labels = [labels]  # one sample's label may stand without a list
    prompts = to_texts(body.prompts) if body.prompts else None
    if labels is not None and not isinstance(labels, list):
        raise InvalidRequest(f"labels is {kind_of(labels)}; send a list with one label a text of query")
    for name, values in (("prompts", prompts), ("labels", labels)):
        if values and len(values) != len(texts):
            raise InvalidRequest(f"{name} has {len(values)} entries, query {len(texts)}; send one a text, or none")
    check_depth(labels, "labels")
    return ScoreRequest(
        texts=texts, groups=prompt_groups(prompts) if prompts else None, prompts=prompts, references=labels or None
    )
