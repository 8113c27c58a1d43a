"""NeMo Gym's `/compare`: the responses to a conversation are compared with each other, and get one reward each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import InvalidRequest
from guerdon.judge_core import DISAGREED, Comparisons, GroupRequest, JudgedReply
from guerdon.messages import answered, plain
from guerdon.wire.forms import form
from guerdon.wire.forms.gym import PolicyResponse, text_of
from guerdon.wire.forms.labels import number
from guerdon.wire.kserve import to_error
from guerdon.wire.score_tensors import scores_of

_BEST, _WORST = 1, 6
"""Gym's ranking, if the first response is much better, and if the second is."""


class CompareBody(form.Body, kw_only=True):
    """A conversation without its last answer, and the responses that are compared as that answer.

    The `principle` stands where the rubric's template has `{reference}`.
    """

    example: ClassVar[str] = (
        '{"conversation_history": [{"role": "user", "content": "a prompt"}], "response_objs": [{"output": [{"type": '
        '"message", "content": [{"type": "output_text", "text": "a response"}]}]}, {"output": []}]}'
    )
    conversation_history: form.Conversation
    response_objs: Annotated[list[PolicyResponse], form.SOME]
    principle: str | None = None


class ComparisonResult(msgspec.Struct):
    """A criterion's verdict on two responses, by their places: both scores sum to 1, and `ranking` is from 1 to 6.

    `judge_idx` counts the rubric's criteria. If the two orders `disagreed`, it is a tie: 0.5, 0.5 and 3.5.
    """

    response_i: int
    response_j: int
    judge_idx: int
    score_1: float
    score_2: float
    ranking: float
    criterion: str
    disagreed: bool


class CompareReply(msgspec.Struct):
    """One reward for each response, the verdicts that they are made of, and statistics of these."""

    rewards: np.ndarray
    comparison_results: list[ComparisonResult]
    metrics: dict[str, float]


FORMS: dict[str, form.Form] = {}
"""The form by its path."""


@form.serves(FORMS, "/compare", "NeMo Gym's genrm_compare", CompareReply, to_error=to_error, output=DISAGREED)
def _compare(body: CompareBody, url: form.Url) -> form.FormRequest:
    history = plain(form.check_conversation(body.conversation_history, "conversation_history"))
    num_characters = len(body.response_objs) * sum(len(message["content"]) for message in history)
    if num_characters > form.MAX_JOINED:
        raise InvalidRequest(
            f"conversation_history before each of {len(body.response_objs):,} responses makes {num_characters:,} "
            f"characters, at most {form.MAX_JOINED:,} are accepted; send fewer responses in a request"
        )
    texts = [_text(response, f"response_objs[{i}]") for i, response in enumerate(body.response_objs)]
    request = GroupRequest(
        messages=[answered(history, text) for text in texts],
        groups=np.zeros(len(texts), np.int64),
        references=[body.principle] * len(texts) if body.principle else None,
    )

    def check(info: ModelInfo) -> None:
        if not info.has_components or DISAGREED not in info.attribute_names:
            raise InvalidRequest(f"{info.name} does not compare; name a judge whose rubric has `compare`")
        if body.principle and not info.takes_labels:
            raise InvalidRequest(
                f"{info.name} has no place for a principle: write {{reference}} where its template should have it, or "
                "send none"
            )
        if info.takes_labels and not body.principle:
            raise InvalidRequest(
                f"the template of {info.name} has a {{reference}}, which is the principle here: send one"
            )

    def to_reply(reply: ScoreReply, info: ModelInfo) -> CompareReply:
        rewards = np.array([number(score.reward) for score in scores_of(reply)], np.float32)
        assert isinstance(reply, JudgedReply) and reply.comparisons is not None
        return CompareReply(rewards, [*_results(reply.comparisons, info)], _metrics(reply.comparisons))

    return form.FormRequest(body.model or "", request, to_reply, check)


def _text(response: PolicyResponse, where: str) -> str:
    """Returns the assistant's texts, empty without any; reasoning and tool calls are left out."""
    return "\n\n".join(
        text_of(item, f"{where}.output[{i}]")
        for i, item in enumerate(response.output)
        if item.get("type", "message") == "message" and item.get("role", "assistant") == "assistant"
    )


def _results(comparisons: Comparisons, info: ModelInfo) -> Iterator[ComparisonResult]:
    for (i, j), verdicts, disagreed in zip(
        comparisons.pairs.tolist(), comparisons.verdicts.tolist(), comparisons.disagreed.tolist(), strict=True
    ):
        for k, verdict in enumerate(verdicts):
            ranking = _WORST - (_WORST - _BEST) * verdict
            name = info.attribute_names[k]
            yield ComparisonResult(i, j, k, verdict, 1 - verdict, ranking, name, disagreed[k])


def _metrics(comparisons: Comparisons) -> dict[str, float]:
    """Returns Gym's statistics of all verdicts, and how often the two orders disagreed."""
    verdicts = comparisons.verdicts.ravel()
    scores = np.concatenate([verdicts, 1 - verdicts])
    return {
        "mean_individual_score": float(scores.mean()),
        "std_individual_score": float(scores.std()),
        "tiebreak_usage_rate": float((verdicts == 0.5).mean()),
        "disagreement_rate": float(comparisons.disagreed.mean()),
    }
