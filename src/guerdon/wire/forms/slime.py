"""slime's remote reward model: `/reward`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import InvalidRequest
from guerdon.messages import answered
from guerdon.wire.bodies import check_depth
from guerdon.wire.forms import form
from guerdon.wire.forms.labels import attributes_of, number
from guerdon.wire.kserve import to_error
from guerdon.wire.score_tensors import scores_of


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

    return form.FormRequest(body.model or "", request, to_reply)
