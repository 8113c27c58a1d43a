"""A judge's samples become a plan of questions, and the answers one score for each sample."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import numpy as np

from guerdon.comparisons import PlanOfPairs
from guerdon.core import Score, ScoreReply, ScoreRequest, Sequence
from guerdon.errors import GuerdonError, InvalidRequest
from guerdon.judge_core import (
    ComparedReply,
    Comparisons,
    GroupRequest,
    LabelTokens,
    Pair,
    Plan,
    PlanOfSingles,
    Sample,
)
from guerdon.messages import before_response, response, transcript
from guerdon.server.catalog import Asked, Judge, Served
from guerdon.server.metrics import Metrics
from guerdon.teacher_core import TokenLogprobs

_SHOWN = 40
_INLINE_QUESTIONS = 512
"""Answers to more questions are put together in a thread, because they would block the event loop."""


def read(judge: Asked, request: ScoreRequest, numbers: Iterable[int]) -> list[Sample | InvalidRequest]:
    """Returns each sample's fields for the judge, or its error."""
    made: list[Sample | InvalidRequest] = []
    for i in numbers:
        try:
            made.append(_read(judge, request, i))
        except InvalidRequest as e:
            made.append(e)
    return made


def words(judge: Asked, request: ScoreRequest, numbers: Iterable[int]) -> list[str | InvalidRequest]:
    """Returns the one question about each sample, or its error."""
    return [one if isinstance(one, InvalidRequest) else judge.render(one)[0] for one in read(judge, request, numbers)]


def make_plan(judge: Judge, request: ScoreRequest, samples: list[Sample | InvalidRequest]) -> Plan:
    """Returns the judge's questions about the request's samples; raises InvalidRequest."""
    compare, name = judge.rubric.compare, judge.info.name
    if isinstance(request, GroupRequest) and (compare is None or compare.schedule == "reference"):
        how = "judges each response alone" if compare is None else "compares each response with its reference"
        raise InvalidRequest(f"{name} {how}, not with the others of its group; name a judge whose rubric compares them")
    if compare is None:
        return PlanOfSingles(judge.rubric, samples)
    return PlanOfPairs(judge.rubric, samples, request.groups, name)


def questions(judge: Judge, subjects: Iterable[Sample | Pair]) -> list[str | InvalidRequest]:
    """Returns one text, or an error, for each criterion of each subject."""
    return [question for subject in subjects for question in judge.render(subject)]


def _read(judge: Asked, request: ScoreRequest, i: int) -> Sample:
    name, fields = judge.info.name, judge.rubric.fields
    reference = None if request.labels is None else request.labels[i]
    if not judge.rubric.needs_reference:
        reference = ""
    elif reference is None:
        what = "the template of {} has a reference" if "reference" in fields else "{} compares with a reference"
        raise InvalidRequest(
            f"{what.format(name)}, and this sample's label was not sent, or is null or NaN: send `labels` beside the "
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
    group = None if request.groups is None else int(request.groups[i])
    return Sequence(row, group=group, query=judge.labels.query(len(row)))


def find_fault(judge: Judge, row: np.ndarray) -> InvalidRequest | None:
    """Returns an error if the question's tokens do not end with the first label's."""
    if len(row) > 1 and row[-1] == judge.labels.ids[0]:
        return None
    return InvalidRequest(
        f"after this sample's question the label {judge.rubric.labels[0]!r} is no token of its own; end the template "
        f"of {judge.info.name} with words of its own"
    )


async def reduced(served: Served, plan: Plan | None, reply: ScoreReply, metrics: Metrics) -> ScoreReply:
    """Returns the samples' scores, made of a judge's answers to its plan; another model's reply as it is.

    `metrics` gets the mass that no label has, and counts comparisons.
    """
    if plan is None:
        return reply
    assert isinstance(served, Judge)
    if len(reply.results) <= _INLINE_QUESTIONS:
        return _reduce(served, plan, reply, metrics)
    return await asyncio.to_thread(_reduce, served, plan, reply, metrics)


def _reduce(served: Judge, plan: Plan, reply: ScoreReply, metrics: Metrics) -> ScoreReply:
    name, config, criteria = served.info.name, served.config, served.rubric.names
    questions = range(0, len(reply.results), len(criteria))
    answers = [_answer(reply.results[i : i + len(criteria)], served.labels) for i in questions]

    def explain(number: int, criterion: int) -> str:
        return served.explain(_said(reply.results[number * len(criteria) + criterion]))

    made = plan.judge(answers, config.verdict, config.max_other_mass, explain)
    lengths = [0] * len(made.results)
    for owner, i in zip(plan.owners, questions, strict=True):
        lengths[owner] += sum(reply.lengths[i : i + len(criteria)])
    for masses in made.other.tolist():
        for criterion, mass in zip(criteria, masses, strict=True):
            metrics.observe("guerdon_judge_other_mass", mass, name, criterion)
    if made.comparisons is not None:
        _count(made.comparisons, name, criteria, metrics)
    facts = (lengths, reply.weights_version, reply.queue_s, reply.compute_s)
    return ComparedReply(made.results, *facts, comparisons=made.comparisons)


def _count(comparisons: Comparisons, name: str, criteria: tuple[str, ...], metrics: Metrics) -> None:
    for criterion, disagreed in zip(criteria, comparisons.disagreed.T, strict=True):
        metrics.add("guerdon_judge_comparisons", len(disagreed), name, criterion)
        metrics.add("guerdon_judge_disagreements", int(disagreed.sum()), name, criterion)


def _answer(results: list[Score | GuerdonError], labels: LabelTokens) -> np.ndarray | GuerdonError:
    """Returns the labels' log-probs for each criterion, `[K,L]`, or the first question's error."""
    error = next((one for one in results if isinstance(one, GuerdonError)), None)
    return error or np.stack([labels.read(_said(one)) for one in results])


def _said(answer: Score | GuerdonError) -> TokenLogprobs:
    assert isinstance(answer, Score) and answer.logprobs is not None
    return answer.logprobs


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
