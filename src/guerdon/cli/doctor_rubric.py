"""`guerdon doctor MODEL --rubric FILE --rows FILE`: tries a rubric on a file's first rows, and shows what is said."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.cli.findings import Finding, note, ok, problem
from guerdon.client.jsonl import read_rows, samples_of
from guerdon.core import Message, ScoreRequest
from guerdon.errors import SERVER_MODULES, InvalidRequest, SampleFailed, StartError, require_modules
from guerdon.judge_core import Pair, Rubric
from guerdon.settings.config import JudgeConfig

NUM_ROWS = 10
ENOUGH = 1 - JudgeConfig().max_other_mass
"""Least probability of the labels of a sample that does not fail by default."""
_BIASED = 0.1
"""Largest mean preference for the first place that is not noted, of 0.5."""


def examine_rubric(model: str, rubric: str, rows: str) -> Iterator[Finding]:
    """Asks the model the rubric's questions about the first rows; reports each answer, and what they have in common."""
    try:
        require_modules(*SERVER_MODULES, extra="server")
        yield from _examine(model, rubric, Path(rows))
    except StartError as e:
        yield problem(rubric, str(e), e.help or "docs/judge.md explains rubrics")


def _examine(model: str, rubric: str, path: Path) -> Iterator[Finding]:
    from guerdon.distributed.ranks import ALONE
    from guerdon.engine.judging import build_judge
    from guerdon.kinds import judges

    lines, request = _read(path)
    judge: Any = build_judge(JudgeConfig(model=model, rubric=rubric, max_other_mass=1.0), ALONE)
    samples = judges.read_samples(judge, request, range(len(request)))
    for line, sample in zip(lines, samples, strict=True):
        if isinstance(sample, InvalidRequest):
            yield problem(f"{path}, line {line}", str(sample), "correct the row, or the rubric's template")
    try:
        plan = judges.make_plan(judge, request, samples)
    except InvalidRequest as e:
        raise StartError(str(e), "take fewer responses") from e
    masses: list[float] = []
    firsts: list[float] = []
    for subject, owner in zip(plan.subjects, plan.owners, strict=True):
        where = f"line {lines[owner]}"
        if isinstance(subject, Pair):
            where += f", response {1 + lines[:owner].count(lines[owner])} first"
        for criterion, text in zip(judge.rubric.criteria_of(subject), judge.render(subject), strict=True):
            finding, mass, value = _ask(judge, request, owner, f"{where}, {criterion.name or criterion.text}", text)
            yield finding
            if mass is not None:
                masses.append(mass)
                firsts.append(value)
    yield from _summary(judge.rubric, rubric, masses, firsts)


def _ask(
    judge: Any, request: ScoreRequest, owner: int, where: str, text: str | InvalidRequest
) -> tuple[Finding, float | None, float]:
    """Returns the answer to one question as a finding, the labels' probability, and the answer's value."""
    from guerdon.kinds import judges, samples

    ids = text if isinstance(text, InvalidRequest) else judge.text.encode([text], not judge.text.takes_messages)[0]
    if isinstance(ids, InvalidRequest):
        return problem(where, str(ids), "correct the row"), None, 0.0
    asked = judges.make_question(judge, ids, request, owner)
    if fault := samples.find_fault(asked, judge.info) or judges.find_fault(judge, ids):
        return problem(where, str(fault), "shorten the row, or correct the template"), None, 0.0
    (said,) = judge.score([asked])
    if isinstance(said, SampleFailed) or said.answer is None:
        return problem(where, str(said), "docs/judge_labels.md"), None, 0.0
    logprobs = judge.labels.read(said.answer)
    value, _, other, entropy = judge.rubric.read(logprobs[None], "expected")[:, 0].tolist()
    shares = zip(judge.rubric.labels, np.exp(logprobs).tolist(), strict=True)
    shown = ", ".join(f"{label!r} {share:.3f}" for label, share in shares)
    table = f"{shown}; no label {other:.3f}, entropy {entropy:.2f}"
    if 1 - other < ENOUGH:
        return problem(where, table, judge.explain(said.answer)), 1 - other, value
    likeliest = judge.explain(said.answer).partition(";")[0]
    return ok(where, f"{table}; {likeliest}"), 1 - other, value


def _summary(rubric: Rubric, name: str, masses: list[float], firsts: list[float]) -> Iterator[Finding]:
    if not masses:
        yield problem(name, "no question was answered", "docs/judge.md explains what a judge reads")
        return
    text = f"{len(masses)} answers; labels have {min(masses):.3f} to {max(masses):.3f} of the probability"
    few = sum(mass < ENOUGH for mass in masses)
    yield problem(name, f"{text}, below {ENOUGH:g} in {few}", "docs/judge_labels.md") if few else ok(name, text)
    if rubric.compare is not None:
        bias = float(np.mean(firsts)) - 0.5
        said = f"the response that is read first gets {bias:+.3f} beyond an even share, over both orders"
        help_text = "verdicts are made of both orders, which costs certainty: try another template or model"
        yield note(f"{name}, order", said, help_text) if abs(bias) > _BIASED else ok(f"{name}, order", said)


def _read(path: Path) -> tuple[list[int], ScoreRequest]:
    """Returns the line of each sample of the first rows, and the samples; raises StartError."""
    lines: list[int] = []
    messages: list[list[Message]] = []
    labels: list[Any] = []
    for line, row in itertools.islice(read_rows(path), NUM_ROWS):
        for sample in samples_of(row, path, line, template=True):
            said = [{"role": "assistant", "content": sample}] if isinstance(sample, str) else sample
            lines.append(line)
            messages.append(said)
            labels.append(row.get("label"))
    if not lines:
        raise StartError(f"{path} has no rows", "give a JSONL file with prompts and responses")
    return lines, ScoreRequest(messages=messages, references=labels)
