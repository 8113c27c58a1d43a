"""Judges: language models that answer a rubric's questions about samples, each by one token.

A judge's samples become a plan of questions, and the answers one score for each sample. Criteria that come with a
sample, in its label, are in guerdon's own form, or read as open-instruct's `RubricVerifier`, verifiers' `RubricJudge`,
tinker-cookbook's rubric recipe and HealthBench have them. What belongs to their judges' prompts, such as a format of
the answer, is ignored: the template here asks for it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from guerdon.core import Message, Score, ScoreReply, ScoreRequest, Sequence, Truncation
from guerdon.errors import GuerdonError, InvalidRequest
from guerdon.judge_core import (
    SAMPLE_CRITERIA,
    Criterion,
    GroupRequest,
    JudgedReply,
    LabelTokens,
    Pair,
    Plan,
    PlanOfSingles,
    Rubric,
    Sample,
)
from guerdon.kinds.compare import PlanOfPairs
from guerdon.kinds.kind import Asks, Kind, Numbers, SampleReader, Served, Steps, Subcommand
from guerdon.kinds.samples import find_fault as find_fault_in_sequence
from guerdon.kinds.teachers import read_next_tokens, size_answers
from guerdon.messages import before_response, plain, response, shown, transcript
from guerdon.settings.config import JudgeConfig
from guerdon.settings.sources import read_server_settings
from guerdon.teacher_core import NextTokenRequest, TokenLogprobs

_LISTS = ("criteria", "rubrics", "rubric", "rubric_items")
"""Keys of a label that hold the list, in order of preference."""
_TEXTS = ("criterion", "text", "description", "rubric_item", "rubric_str", "criteria", "Ingredient")
"""Keys of a criterion that hold its text."""
_NAMES, _WEIGHTS = ("name", "title"), ("weight", "points")
_REFERENCES = ("reference", "answer", "ground_truth")
"""Keys of a label with criteria that hold the reference."""

_FORM = 'send a list such as [{"criterion": "Is it brief?", "weight": 1}], or an object with it under `criteria`'
_MOST_NAME = 64
_MOST = float(np.finfo(np.float32).max)
_BEGUN = re.compile(r"""\s*"?(\[\s*)?\{\s*\\?["']\w""")
"""How JSON begins that has a criterion or a list of them; Python's own notation as well, and what was cut off."""


class Rendering(Served, Protocol):
    """A model that is asked about every sample, in words, as its rubric says."""

    rubric: Rubric

    def render(self, subject: Sample | Pair) -> list[str | InvalidRequest]: ...


class Judging(Rendering, Protocol):
    """A language model that answers every sample's criteria, each by one of the `labels`."""

    config: JudgeConfig
    labels: LabelTokens
    text: Any

    def explain(self, said: TokenLogprobs) -> str: ...

    def encode_in_steps(self, texts: list[str]) -> Steps: ...


class JudgeKind(Kind):
    """A language model that answers every sample's criteria, each by one of the rubric's labels."""

    names = ("judge",)
    settings = JudgeConfig
    command = Subcommand(
        "serve-judge",
        "Serve a language model's rewards by a rubric.",
        "rubric verdict max_other_mass config host port api_keys_file dtype device max_length",
        functools.partial(read_server_settings, cls=JudgeConfig),
    )

    def load(self, config: JudgeConfig, ranks: Any) -> Any:
        """Returns the engine over the language model and the rubric."""
        from guerdon.engine.judging import build_judge

        return build_judge(config, ranks.frozen())

    async def read(self, reading: SampleReader, served: Any, request: ScoreRequest, cut: Truncation | None) -> Asks:
        """Returns a sequence for each question of the plan."""
        judge: Judging = served
        if isinstance(request, NextTokenRequest):
            return await read_next_tokens(reading, judge, judge.text, request)
        plan, owners, rows = await read_questions(reading, judge, request)
        places = [i for i, row in enumerate(rows) if isinstance(row, str)]
        steps = judge.encode_in_steps([str(rows[i]) for i in places])
        for i, ids in zip(places, await reading.tokenize(steps, judge.info.name), strict=True):
            rows[i] = ids
        asked = Asks(judge, [], [], plan)
        for i, row in enumerate(rows):
            fault = row if isinstance(row, InvalidRequest) else None
            ids = row if isinstance(row, np.ndarray) else np.empty(0, np.int64)
            made = make_question(judge, ids, request, owners[i])
            asked.sequences.append(made)
            asked.errors.append(fault or find_fault_in_sequence(made, judge.info) or find_fault(judge, ids))
        size_answers(asked)
        return asked

    def finish(self, asked: Asks, reply: ScoreReply, metrics: Numbers) -> ScoreReply:
        """Returns the samples' scores, made of the answers to the plan.

        `metrics` gets the mass that no label has, and counts comparisons.
        """
        if asked.plan is None:
            return reply
        served: Any = asked.served
        plan, config = asked.plan, served.config
        logprobs = [one if isinstance(one, GuerdonError) else served.labels.read(_said(one)) for one in reply.results]

        def explain(number: int) -> str:
            return served.explain(_said(reply.results[number]))

        rubric, most = served.rubric, config.max_other_mass
        answers, masses = rubric.read_answers(plan.subjects, logprobs, config.verdict, most, explain)
        counts = [len(rubric.criteria_of(subject)) for subject in plan.subjects]
        names = [*(one.name for one in rubric.named), SAMPLE_CRITERIA]  # names of samples' own are too many
        labels = (names[min(k, len(names) - 1)] for count in counts for k in range(count))
        for label, mass in zip(labels, masses.tolist(), strict=True):
            if not math.isnan(mass):
                metrics.observe("guerdon_judge_other_mass", mass, served.info.name, label)
        return make_reply(served, plan, answers, reply, metrics)

    def tokenizer(self, served: Any) -> Any:
        """Returns the language model's own."""
        return served.text


async def read_questions(
    reading: SampleReader, judge: Rendering, request: ScoreRequest
) -> tuple[Plan, list[int], list[Any]]:
    """Returns the plan of a request, and each of its questions: the sample that it counts for, and its text or error.

    Raises InvalidRequest.
    """
    samples: list[Sample | InvalidRequest] = await reading.run_in_parts(
        range(len(request)), functools.partial(read_samples, judge, request)
    )
    plan = await reading.run(functools.partial(make_plan, judge, request, samples))
    rows = await reading.run_in_parts(plan.subjects, functools.partial(render_subjects, judge))
    counts = [len(judge.rubric.criteria_of(subject)) for subject in plan.subjects]
    return plan, [owner for owner, count in zip(plan.owners, counts, strict=True) for _ in range(count)], rows


def read_samples(judge: Rendering, request: ScoreRequest, numbers: Iterable[int]) -> list[Sample | InvalidRequest]:
    """Returns each sample's fields for the judge, or its error."""
    made: list[Sample | InvalidRequest] = []
    for i in numbers:
        try:
            made.append(_read_sample(judge, request, i))
        except InvalidRequest as e:
            made.append(e)
    return made


def make_plan(judge: Rendering, request: ScoreRequest, samples: list[Sample | InvalidRequest]) -> Plan:
    """Returns the judge's questions about the request's samples; raises InvalidRequest."""
    compare, name = judge.rubric.compare, judge.info.name
    if isinstance(request, GroupRequest) and not judge.rubric.compares:
        how = "judges each response alone" if compare is None else "compares each response with its reference"
        raise InvalidRequest(f"{name} {how}, not with the others of its group; name a judge whose rubric compares them")
    if compare is None:
        return PlanOfSingles(judge.rubric, samples, name)
    return PlanOfPairs(judge.rubric, samples, request.groups, name)


def render_subjects(judge: Rendering, subjects: Iterable[Sample | Pair]) -> list[str | InvalidRequest]:
    """Returns the question of each criterion about each subject, or its error."""
    return [question for subject in subjects for question in judge.render(subject)]


def _read_sample(judge: Rendering, request: ScoreRequest, i: int) -> Sample:
    name, fields = judge.info.name, judge.rubric.fields
    reference = None if request.references is None else request.references[i]
    criteria: tuple[Criterion, ...] = ()
    if judge.rubric.own != "ignore":
        ascending = sorted(zip(judge.rubric.values, judge.rubric.labels, strict=True))
        criteria, reference = read_criteria(reference, tuple(label.strip().casefold() for _, label in ascending))
        if not (criteria or judge.rubric.criteria):
            raise InvalidRequest(
                f"the rubric of {name} has no criteria, and this sample's label has none: send them as `labels`, such "
                'as [{"criterion": "Is it brief?", "weight": 1}]'
            )
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
        before = before_response(conversation)
        return Sample(answer, transcript(before), reference, criteria, tuple(plain(before)) if before else ())
    assert request.texts is not None
    text, prompt = request.texts[i], None if request.prompts is None else request.prompts[i]
    if prompt is None and "prompt" in fields:
        raise InvalidRequest(
            f"the template of {name} has a prompt, and this text's was not sent: send `prompts` beside the texts, or "
            "messages"
        )
    if prompt is not None and not text.startswith(prompt):
        raise InvalidRequest(
            f"{name} judges responses, and the text, {shown(text)}, does not begin with its prompt, {shown(prompt)}"
        )
    history: tuple[Message, ...] = ({"role": "user", "content": prompt},) if prompt else ()
    return Sample(text.removeprefix(prompt or ""), prompt or "", reference, criteria, history)


def read_criteria(label: Any, choices: tuple[str, ...]) -> tuple[tuple[Criterion, ...], Any]:
    """Returns the criteria in a label, none if it has no list of them, and the reference beside them.

    `choices` are the rubric's labels from worst to best, the only ones that a criterion may ask for. Raises
    InvalidRequest for a criterion without a text, a weight that no float32 has, weights that are all 0, or broken JSON.
    """
    whole, label = label, _decoded(label)
    if isinstance(label, list):  # each entry may be JSON in open-instruct's datasets, and one the whole label
        label = [*map(_decoded, label)]
        inner = label[0] if len(label) == 1 else None
        if isinstance(inner, list) or (isinstance(inner, dict) and isinstance(_decoded(_first(inner, _LISTS)), list)):
            label = inner
    for text in label if isinstance(label, list) else [label]:
        if isinstance(text, str) and _BEGUN.match(text):
            raise InvalidRequest(f"this sample's label, {_kind(text)}, begins as JSON, and is none; {_FORM}")
    if isinstance(label, dict):
        is_criterion = "criterion" in label or None not in (_first(label, _TEXTS), _first(label, _WEIGHTS))
        found = _first(label, _LISTS) or ([label] if is_criterion else None)
        if found is None:
            return (), whole
        items, reference = _decoded(found), _first(label, _REFERENCES)
    elif isinstance(label, list) and any(isinstance(item, dict) for item in label):
        items, reference = label, None
    else:
        return (), whole
    if not isinstance(items, list):
        raise InvalidRequest(f"the criteria of this sample's label are {_kind(items)}; {_FORM}")
    criteria = tuple(_criterion(item, i, choices) for i, item in enumerate(items))
    if criteria and not any(one.weight for one in criteria):
        raise InvalidRequest("the weights of all criteria in this sample's label are 0; give one another weight")
    return criteria, reference


def _criterion(item: Any, i: int, choices: tuple[str, ...]) -> Criterion:
    item = _decoded(item)
    given = {"text": item} if isinstance(item, str) and not _BEGUN.match(item) else item
    text = _first(given, _TEXTS) if isinstance(given, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequest(f"criterion {i} of this sample's label has no text; {_FORM}")
    weight = _first(given, _WEIGHTS)
    weight = 1.0 if weight is None else weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not -_MOST <= weight <= _MOST:
        raise InvalidRequest(f"the weight of criterion {i} of this sample's label is {_kind(weight)}; send a float32")
    asked = given.get("choices")
    listed = asked if isinstance(asked, list) else [asked]
    if asked is not None and [str(one).strip().casefold() for one in listed] != [*dict.fromkeys(choices)]:
        raise InvalidRequest(
            f"criterion {i} of this sample's label has the choices {asked!r:.80}, and the rubric's labels are, from "
            f"worst to best, {', '.join(choices) or 'none'}; leave them out, or serve a judge with these labels"
        )
    name = re.sub(r"[^\w.-]+", "_", str(_first(given, _NAMES) or ""), flags=re.ASCII).strip("_")
    return Criterion(name[:_MOST_NAME], text, float(weight))


def _first(given: dict[str, Any], keys: Iterable[str]) -> Any:
    return next((given[key] for key in keys if given.get(key) is not None), None)


def _decoded(label: Any) -> Any:
    """Returns the list or object whose JSON a text is, also JSON of JSON; other values as they are."""
    found = label
    while isinstance(found, str) and found.lstrip()[:1] in ("[", "{", '"'):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            break
    return found if isinstance(found, list | dict) else label


def _kind(value: Any) -> str:
    return f"the {type(value).__name__} {value!r:.40}"


def make_question(judge: Judging, row: np.ndarray, request: ScoreRequest, i: int) -> Sequence:
    """Returns the sequence of a question about sample `i`; its last token is the first label's."""
    group = None if request.groups is None else int(request.groups[i])
    return Sequence(row, group=group, ask=judge.labels.query(len(row)))


def find_fault(judge: Judging, row: np.ndarray) -> InvalidRequest | None:
    """Returns an error if the question's tokens do not end with the first label's."""
    if len(row) > 1 and row[-1] == judge.labels.ids[0]:
        return None
    return InvalidRequest(
        f"after this sample's question the label {judge.rubric.labels[0]!r} is no token of its own; end the template "
        f"of {judge.info.name} with words of its own"
    )


def make_reply(
    served: Rendering, plan: Plan, answers: list[np.ndarray | GuerdonError], reply: ScoreReply, metrics: Numbers
) -> ScoreReply:
    """Returns the samples' scores from the answers about each subject; counts comparisons."""
    name, rubric = served.info.name, served.rubric
    made = plan.judge(answers)
    lengths = [0] * len(made.results)
    for owner, part in zip(plan.owners, rubric.parts(plan.subjects), strict=True):
        lengths[owner] += sum(reply.lengths[part])
    if made.comparisons is not None:
        for criterion, disagreed in zip(rubric.criteria, made.comparisons.disagreed.T, strict=True):
            metrics.add("guerdon_judge_comparisons", len(disagreed), name, criterion.name or name)
            metrics.add("guerdon_judge_disagreements", int(disagreed.sum()), name, criterion.name or name)
    facts = (lengths, reply.weights_version, reply.queue_s, reply.compute_s)
    return JudgedReply(made.results, *facts, comparisons=made.comparisons)


def _said(answer: Score | GuerdonError) -> TokenLogprobs:
    assert isinstance(answer, Score) and answer.answer is not None
    return answer.answer
