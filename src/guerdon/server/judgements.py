"""A judge's samples become one question for each criterion, and the answers one score for each sample."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import numpy as np

from guerdon.core import Score, ScoreReply, ScoreRequest, Sequence
from guerdon.errors import GuerdonError, InvalidRequest
from guerdon.judge_core import Sample
from guerdon.messages import before_response, response, transcript
from guerdon.server.catalog import Judge, Served
from guerdon.server.metrics import Metrics
from guerdon.teacher_core import LogprobQuery

_SHOWN = 40
_INLINE_QUESTIONS = 512
"""Answers to more questions are put together in a thread, because they would block the event loop."""


def questions(judge: Judge, request: ScoreRequest, numbers: Iterable[int]) -> list[str | InvalidRequest]:
    """Returns one text, or what is wrong, for each criterion of each of these samples."""
    made: list[str | InvalidRequest] = []
    for i in numbers:
        try:
            made += judge.render(_read(judge, request, i))
        except InvalidRequest as e:
            made += [e] * len(judge.rubric.criteria)
    return made


def _read(judge: Judge, request: ScoreRequest, i: int) -> Sample:
    name, fields = judge.info.name, judge.rubric.fields
    reference = None if request.labels is None else request.labels[i]
    if "reference" not in fields:
        reference = ""
    elif reference is None:
        raise InvalidRequest(
            f"the template of {name} has a reference, and this sample's label was not sent: send `labels` beside the "
            "samples, as the page of the trainer or the protocol says"
        )
    reference = reference if isinstance(reference, str) else json.dumps(reference, ensure_ascii=False)
    if request.messages is not None:
        conversation = request.messages[i]
        answer = response(conversation)
        return Sample(answer, transcript(before_response(conversation)), reference)
    assert request.texts is not None
    text, prompt = request.texts[i], None if request.prompts is None else request.prompts[i]
    if prompt is None and "prompt" in fields:
        raise InvalidRequest(
            f"the template of {name} has a prompt, and this text's was not sent: send `prompts` beside the texts, or "
            "messages"
        )
    if prompt is not None and not text.startswith(prompt):
        raise InvalidRequest(
            f"{name} judges responses, and the text, {_shown(text)}, does not begin with its prompt, {_shown(prompt)}"
        )
    return Sample(text.removeprefix(prompt or ""), prompt or "", reference)


def question(judge: Judge, row: np.ndarray, request: ScoreRequest, i: int) -> Sequence:
    """Returns the sequence of a question about sample `i`; its last token is the first label's."""
    query = LogprobQuery(start=max(1, len(row) - 1), given=judge.label_ids, with_logprobs=False)
    return Sequence(row, group=None if request.groups is None else int(request.groups[i]), query=query)


def find_fault(judge: Judge, row: np.ndarray) -> InvalidRequest | None:
    """Returns an error if the question's tokens do not end with the first label's."""
    if len(row) > 1 and row[-1] == judge.label_ids[0]:
        return None
    return InvalidRequest(
        f"behind this sample's question the label {judge.rubric.labels[0]!r} is no token of its own; end the template "
        f"of {judge.info.name} with words of its own"
    )


async def reduced(served: Served, reply: ScoreReply, metrics: Metrics) -> ScoreReply:
    """Returns the samples' scores, made of a judge's answers about their criteria; another model's reply as it is.

    A sample fails if one of its questions failed, with that error. `metrics` gets the mass that no label has.
    """
    if served.info.kind != "judge":
        return reply
    assert isinstance(served, Judge)
    if len(reply.results) <= _INLINE_QUESTIONS:
        return _reduce(served, reply, metrics)
    return await asyncio.to_thread(_reduce, served, reply, metrics)


def _reduce(served: Judge, reply: ScoreReply, metrics: Metrics) -> ScoreReply:
    names, starts = served.rubric.names, range(0, len(reply.results), len(served.rubric.criteria))
    answers = [reply.results[i : i + len(names)] for i in starts]
    lengths = [sum(reply.lengths[i : i + len(names)]) for i in starts]
    errors = [next((one for one in some if isinstance(one, GuerdonError)), None) for some in answers]
    results: dict[int, Score | GuerdonError] = {i: error for i, error in enumerate(errors) if error is not None}
    if fine := [i for i in range(len(answers)) if i not in results]:
        logprobs = np.stack([[_given(answer) for answer in answers[i]] for i in fine])
        scores, other = served.rubric.judge(logprobs, served.config.verdict, served.config.max_other_mass)
        for i, score, masses in zip(fine, scores, other.tolist(), strict=True):
            results[i] = score
            for name, mass in zip(names, masses, strict=True):
                metrics.observe("guerdon_judge_other_mass", mass, served.info.name, name)
    return ScoreReply(
        [results[i] for i in range(len(answers))], lengths, reply.weights_version, reply.queue_s, reply.compute_s
    )


def _given(answer: Score | GuerdonError) -> np.ndarray:
    assert isinstance(answer, Score) and answer.logprobs is not None and answer.logprobs.given_logprobs is not None
    return answer.logprobs.given_logprobs[0]


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
