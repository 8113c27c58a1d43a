"""slime's remote reward model: `/reward`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import InvalidRequest
from guerdon.messages import answered
from guerdon.wire.bodies import check_depth
from guerdon.wire.forms.form import (
    Body,
    Conversation,
    Form,
    FormRequest,
    Switch,
    Text,
    Url,
    check_conversation,
    of_conversation,
    pair_samples,
)
from guerdon.wire.forms.labels import attributes_of, number
from guerdon.wire.kserve import ErrorBody, to_error
from guerdon.wire.score_tensors import scores_of


class RewardUrl(Url, kw_only=True, forbid_unknown_fields=True):
    """With `key`, as `--reward-key` of slime names it, the reply is an object that has the number under that name.

    `ending=false` scores a text prompt and its response as they are, without the ending of the model's chat template.
    """

    ending: Switch = None
    key: Annotated[str, Meta(extra_json_schema={"not": {"const": "components"}})] = ""


class RewardBody(Body, kw_only=True):
    """One sample, its prompt a text or messages."""

    example: ClassVar[str] = '{"prompt": "a prompt", "response": " and its response", "label": null}'
    prompt: Annotated[str | Conversation, Meta(description="a string, or a list of objects with role and content")]
    response: Text
    label: Any | UnsetType = UNSET


def _reward(body: RewardBody, url: RewardUrl) -> FormRequest:
    """The reply is the bare number, or with `key` an object with the number and its `components`."""
    key = url.key
    if key == "components":
        raise InvalidRequest("the URL has key=components, the key of a sum's parts; choose another key")
    if isinstance(body.prompt, str):
        request = pair_samples([body.prompt], [body.response])
        request.completes = url.ending != "false"
    else:
        request = of_conversation(answered(check_conversation(body.prompt, "prompt"), body.response))
    request.labels = None if body.label is UNSET else [body.label]
    check_depth(request.labels, "label")

    def to_reply(reply: ScoreReply, info: ModelInfo) -> np.float32 | dict[str, Any]:
        (score,) = scores_of(reply)
        reward = number(score.reward)
        if not key:
            return reward
        components = attributes_of(score, info)
        return {"components": components, key: reward} if components else {key: reward}

    return FormRequest(body.model or "", request, to_reply)


FORMS = {
    "/reward": Form(
        "slime's remote reward model", (RewardBody,), RewardUrl, (float, dict[str, Any]), _reward, ErrorBody, to_error
    )
}
"""slime's form by its path."""
