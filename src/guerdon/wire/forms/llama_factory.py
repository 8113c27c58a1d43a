"""LlamaFactory's API for reward models: `/v1/score/evaluation`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from guerdon.core import ModelInfo, ScoreReply, ScoreRequest, Truncation
from guerdon.wire.bodies import MAX_ROWS
from guerdon.wire.forms.form import Body, FormRequest, Text, Url, serves
from guerdon.wire.forms.labels import number
from guerdon.wire.kserve import to_error
from guerdon.wire.score_tensors import scores_of


class EvaluationBody(Body, kw_only=True):
    """Whole texts, tokenised without special tokens; `max_length` cuts their ends off."""

    example: ClassVar[str] = '{"model": "reward_model", "messages": ["a prompt and its response"]}'
    messages: Annotated[list[Text], Meta(min_length=1, max_length=MAX_ROWS, description="a list of strings")]
    max_length: Annotated[int, Meta(ge=1)] | None = None


class EvaluationReply(msgspec.Struct):
    """One number a text."""

    model: str
    scores: np.ndarray
    object: Literal["score.evaluation"] = "score.evaluation"


@serves("/v1/score/evaluation", "LlamaFactory's reward API", EvaluationReply, to_error=to_error)
def _evaluate(body: EvaluationBody, url: Url) -> FormRequest:
    def to_reply(reply: ScoreReply, info: ModelInfo) -> EvaluationReply:
        return EvaluationReply(info.name, np.array([number(score.reward) for score in scores_of(reply)], np.float32))

    cut = None if body.max_length is None else Truncation(body.max_length, "right")
    return FormRequest(body.model or "", ScoreRequest(texts=body.messages, truncation=cut), to_reply)
