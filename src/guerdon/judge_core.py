"""The nouns of a judge, a language model that answers each criterion of a rubric by one token; numpy only, as `core`.

Legend: N samples, K criteria, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal, Protocol

import numpy as np

from guerdon.core import Score, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest, NoVerdict
from guerdon.teacher_core import LogprobQuery, TokenLogprobs

FIELDS = ("prompt", "response", "reference", "criterion")
"""Fields of a template."""
COMPARED_FIELDS = ("prompt", "response_a", "response_b", "reference", "criterion")
"""Fields of the template of a rubric that compares."""
OTHER_MASS = "other_mass"
"""The component beside the criteria: the most probability that any of them leaves to tokens that are no labels."""
DISAGREED = "disagreed"
"""The component of a judge that compares: the share of a sample's verdicts on which the two orders disagreed."""

Verdict = Literal["expected", "likeliest"]
Schedule = Literal["round_robin", "circular", "reference"]
GroupScores = Literal["bradley_terry", "wins"]
Spellings = Literal["exact", "any"]

Explain = Callable[[int, int], str]
"""Returns the model's likeliest tokens in place of a label, by indices of answer and criterion."""

NUM_LIKELIEST = 5
"""How many of the likeliest tokens a question asks for, to explain a sample without a verdict."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """One question about a response; its value counts `weight` times in the reward."""

    name: str
    text: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A judge's sample: a response, and the prompt and reference if its template has them."""

    response: str
    prompt: str = ""
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two samples in one question: `a` is read first. They have the same prompt and reference."""

    a: Sample
    b: Sample


@dataclass(frozen=True, slots=True)
class Comparing:
    """Which responses of a group are compared, and what scores their verdicts make."""

    schedule: Schedule = "round_robin"
    scores: GroupScores = "bradley_terry"


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Results from the labels' probabilities, each float64 `[N,K]`.

    `expected` are the means of the labels' values by their probabilities, which are normalised to 1 over the labels;
    `likeliest` the likeliest labels' values; `other` the probability of no label. Both values are NaN if no label is
    possible.
    """

    expected: np.ndarray
    likeliest: np.ndarray
    other: np.ndarray

    def values(self, verdict: Verdict) -> np.ndarray:
        """Returns the values that the setting `verdict` chooses."""
        return self.expected if verdict == "expected" else self.likeliest


@dataclass(frozen=True, slots=True)
class Rubric:
    """A judge's questions about each response, and the values of its labels.

    The `template` has FIELDS in braces, or COMPARED_FIELDS if it compares; `system` is the system message of a chat, if
    any. Each of the `labels` is an answer that has the value at the same place in `values`, which is the first
    response's if there are two. With the `spellings` any, all tokens count that are the label but for case and blanks.
    `chat_template_kwargs` are variables of the chat template. `path` is the file that it was read from.
    """

    template: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    criteria: tuple[Criterion, ...]
    system: str = ""
    path: str = ""
    compare: Comparing | None = None
    spellings: Spellings = "exact"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> set[str]:
        """The template's fields."""
        return {name for _, name, _, _ in Formatter().parse(self.template) if name is not None}

    @property
    def names(self) -> tuple[str, ...]:
        """The criteria's names, in order."""
        return tuple(criterion.name for criterion in self.criteria)

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """The names of a sample's attributes: the criteria's, and the diagnostics."""
        return (*self.names, OTHER_MASS) if self.compare is None else (*self.names, OTHER_MASS, DISAGREED)

    @property
    def attribute_weights(self) -> tuple[float, ...]:
        """Weights of the attributes in the reward."""
        beside = len(self.attribute_names) - len(self.names)
        return (*(criterion.weight for criterion in self.criteria), *[0.0] * beside)

    @property
    def needs_reference(self) -> bool:
        """Whether every sample needs a reference."""
        return "reference" in self.fields or (self.compare is not None and self.compare.schedule == "reference")

    def render(self, subject: Sample | Pair) -> list[str]:
        """Returns the template filled for each criterion; braces in the subject's own texts stay as they are."""
        if isinstance(subject, Sample):
            sample, responses = subject, {"response": subject.response}
        else:
            sample, responses = subject.a, {"response_a": subject.a.response, "response_b": subject.b.response}
        given = {"prompt": sample.prompt, "reference": sample.reference, **responses}
        return [self.template.format(**given, criterion=criterion.text) for criterion in self.criteria]

    def read(self, logprobs: np.ndarray) -> Reading:
        """Returns the results from the labels' log-probs `[N,K,L]`."""
        wide = logprobs.astype(np.float64)
        other = np.clip(1 - np.exp(wide).sum(-1), 0, 1)
        with np.errstate(invalid="ignore"):
            shares = np.exp(wide - wide.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            values = np.asarray(self.values)
            # Not by products of matrices, whose sums depend on the number of rows.
            return Reading((shares * values).sum(-1), values[shares.argmax(-1)] + 0 * shares.sum(-1), other)

    def rewards(self, values: np.ndarray) -> np.ndarray:
        """Returns the weighted sums of the criteria's values `[N,K]`."""
        return (values * [criterion.weight for criterion in self.criteria]).sum(-1)

    def find_faults(
        self, reading: Reading, answers: list[np.ndarray | GuerdonError], max_other_mass: float, explain: Explain
    ) -> dict[int, NoVerdict]:
        """Returns an error for each row of the reading that leaves more than `max_other_mass` to other tokens.

        The rows are those of the `answers` that are no errors.
        """
        is_bad = (reading.other > max_other_mass).any(-1) | ~np.isfinite(reading.expected).all(-1)
        numbers = [i for i, answer in enumerate(answers) if isinstance(answer, np.ndarray)]
        found = {}
        for row in np.flatnonzero(is_bad).tolist():
            worst = int(reading.other[row].argmax())
            found[row] = NoVerdict(
                f"{self.names[worst]}: {reading.other[row, worst]:.3g} of the probability is on tokens that are no "
                f"labels, and at most {max_other_mass:g} may be (max_other_mass); {explain(numbers[row], worst)}"
            )
        return found


@dataclass(frozen=True, slots=True, eq=False)
class LabelTokens:
    """The tokens that the labels are: `ids`, int64, those of one label after the other; `starts`, int64 `[L]`, where
    each label's begin. The first of a label's tokens is the label as it is written, the others its other spellings."""

    ids: np.ndarray
    starts: np.ndarray

    def query(self, num_tokens: int) -> LogprobQuery:
        """Returns the query of a question of so many tokens, whose last is in a label's place."""
        return LogprobQuery(
            start=max(1, num_tokens - 1), top_k=NUM_LIKELIEST, given=self.ids, with_logprobs=False,
            ends_in_placeholder=True,
        )  # fmt: skip

    def read(self, answer: TokenLogprobs) -> np.ndarray:
        """Returns the labels' log-probs, float64 `[L]`: each label has the probability of all its tokens."""
        assert answer.given_logprobs is not None
        return np.logaddexp.reduceat(answer.given_logprobs[0].astype(np.float64), self.starts)


@dataclass(frozen=True, slots=True, eq=False)
class Comparisons:
    """The verdicts on pairs of a request's samples, which `pairs`, int64 `[C,2]`, counts from 0.

    `verdicts`, float64 `[C,K]`, are the first sample's: 1 if it is certainly better, 0.5 for a tie. `disagreed`, bool
    `[C,K]`, is true if the two orders disagreed, which makes a tie.
    """

    pairs: np.ndarray
    verdicts: np.ndarray
    disagreed: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """A score or an error for each sample of a request.

    `other`, float64 `[M,K]`, is the probability of no label for everything that was answered. `comparisons` are there
    if the judge compares.
    """

    results: list[Score | GuerdonError]
    other: np.ndarray
    comparisons: Comparisons | None = None


@dataclass(slots=True, eq=False)
class GroupRequest(ScoreRequest):
    """Asks a judge to compare all samples of the request with each other."""


@dataclass(slots=True, eq=False)
class JudgedReply(ScoreReply):
    """The reply of a judge, with the comparisons that did not fail if it compares."""

    comparisons: Comparisons | None = None


class Plan(Protocol):
    """A judge's questions about a request's samples, and the reduction of its answers to scores.

    Each of the `subjects` is asked every criterion; its tokens count as those of the sample at the same place in
    `owners`.
    """

    subjects: list[Sample | Pair]
    owners: list[int]

    def judge(
        self, answers: list[np.ndarray | GuerdonError], verdict: Verdict, max_other_mass: float, explain: Explain
    ) -> Judgement:
        """Returns the samples' scores; an answer is a subject's log-probs of the labels, `[K,L]`, or an error."""
        ...


class PlanOfSingles:
    """Asks about each sample alone.

    A criterion's value is the labels' mean, or the likeliest label's value. A sample fails if one of its questions
    failed, or if a criterion leaves more than `max_other_mass` to other tokens. Attributes are the criteria's values,
    and OTHER_MASS after them.
    """

    def __init__(self, rubric: Rubric, samples: list[Sample | InvalidRequest]) -> None:
        """An error among the `samples` is that sample's."""
        self._rubric, self._samples = rubric, samples
        self.owners = [i for i, sample in enumerate(samples) if isinstance(sample, Sample)]
        self.subjects: list[Sample | Pair] = [sample for sample in samples if isinstance(sample, Sample)]

    def judge(
        self, answers: list[np.ndarray | GuerdonError], verdict: Verdict, max_other_mass: float, explain: Explain
    ) -> Judgement:
        """Returns the samples' scores, as `Plan.judge`."""
        rubric = self._rubric
        results: dict[int, Score | GuerdonError] = {
            i: sample for i, sample in enumerate(self._samples) if isinstance(sample, GuerdonError)
        }
        answered = [i for i, answer in zip(self.owners, answers, strict=True) if isinstance(answer, np.ndarray)]
        results |= {i: a for i, a in zip(self.owners, answers, strict=True) if isinstance(a, GuerdonError)}
        reading = rubric.read(stacked(rubric, answers))
        values = reading.values(verdict)
        attributes = np.concatenate([values, reading.other.max(-1, keepdims=True)], -1).astype(np.float32)
        scores: list[Score | GuerdonError] = list(map(Score, rubric.rewards(values).tolist(), attributes))
        for i, error in rubric.find_faults(reading, answers, max_other_mass, explain).items():
            scores[i] = error
        results |= zip(answered, scores, strict=True)
        return Judgement([results[i] for i in range(len(self._samples))], reading.other)


def stacked(rubric: Rubric, answers: list[np.ndarray | GuerdonError]) -> np.ndarray:
    """Returns the log-probs of all answers that are no errors, `[M,K,L]`."""
    shape = (-1, len(rubric.criteria), len(rubric.labels))
    return np.array([answer for answer in answers if isinstance(answer, np.ndarray)], np.float64).reshape(shape)
