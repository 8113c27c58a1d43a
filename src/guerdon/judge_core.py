"""The nouns of a judge, a language model that answers each criterion of a rubric by one token; numpy only, as `core`.

Legend: N samples, K criteria, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from string import Formatter
from typing import Any, Literal, Protocol

import numpy as np

from guerdon.core import Message, Score, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest, NoVerdict, SampleFailed
from guerdon.teacher_core import LogprobQuery, TokenLogprobs

FIELDS = ("prompt", "response", "reference", "criterion")
"""Fields of a template."""
COMPARED_FIELDS = ("prompt", "response_a", "response_b", "reference", "criterion")
"""Fields of the template of a rubric that compares."""
OTHER_MASS = "other_mass"
"""The component beside the criteria: the most probability that any of them leaves to tokens that are no labels."""
DISAGREED = "disagreed"
"""The component of a judge that compares: the share of a sample's verdicts on which the two orders disagreed."""
LABEL_ENTROPY = "label_entropy"
"""The component that shows an unsure judge: the largest entropy over the labels' values of any criterion, in nats."""
SAMPLE_CRITERIA = "sample_criteria"
"""The component of the criteria that came with the sample: what they add to the reward."""
RESERVED = (OTHER_MASS, DISAGREED, LABEL_ENTROPY, SAMPLE_CRITERIA, "score")
"""Names in replies or trainers' logs that no criterion may have."""

MAX_QUESTIONS, MAX_CHARACTERS = 1 << 16, 1 << 28
"""Limits of one request, because comparisons and criteria multiply its size."""
MOST_NAMED = 64
"""Most own criteria of samples that are components by their names."""

Verdict = Literal["expected", "likeliest"]
Schedule = Literal["round_robin", "circular", "reference"]
GroupScores = Literal["bradley_terry", "wins"]
Spellings = Literal["exact", "any"]
Own = Literal["ignore", "add", "replace"]
Reduce = Literal["sum", "mean"]

Explain = Callable[[int], str]
"""Returns the model's likeliest tokens in place of a label, by the question's index."""

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
    """A judge's sample: a response, and the prompt and reference if its template has them.

    `criteria` came with it. `history` is the prompt as messages.
    """

    response: str
    prompt: str = ""
    reference: str = ""
    criteria: tuple[Criterion, ...] = ()
    history: tuple[Message, ...] = field(default=(), compare=False, repr=False)


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


NUM_READINGS = 4
VALUE, SIDE, OTHER, ENTROPY = range(NUM_READINGS)
"""Rows of a judge's answers, float64 `[4,K]` for K criteria: the value that `verdict` chooses, the likeliest value,
the probability of no label, and the entropy over the labels' values."""


@dataclass(frozen=True, slots=True)
class Rubric:
    """A judge's questions about each response, and the values of its labels.

    The `template` has FIELDS in braces, or COMPARED_FIELDS if it compares; `system` is the system message of a chat, if
    any. Each of the `labels` is an answer that has the value at the same place in `values`, which is the first
    response's if there are two. With the `spellings` any, all tokens count that are the label but for case and blanks.
    `chat_template_kwargs` are variables of the chat template. `path` is the file that it was read from. `own` says
    what criteria of a sample's own do: `add` to the rubric's, or `replace` them. The reward is the weighted `sum` of
    the criteria's values, or their weighted `mean`, by the weights' magnitudes. A judge in words has no labels.
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
    own: Own = "ignore"
    reduce: Reduce = "sum"

    @property
    def fields(self) -> set[str]:
        """The template's fields."""
        return {name for _, name, _, _ in Formatter().parse(self.template) if name is not None}

    @property
    def named(self) -> tuple[Criterion, ...]:
        """The criteria that every sample is asked, if they have names."""
        return () if self.own == "replace" else tuple(one for one in self.criteria if one.name)

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """The names of every sample's attributes: the criteria's, and the diagnostics; empty without any."""
        beside = (
            (SAMPLE_CRITERIA, self.own != "ignore"),
            (OTHER_MASS, bool(self.labels)),
            (DISAGREED, self.compare is not None),
            (LABEL_ENTROPY, bool(self.labels)),
        )
        return (*(one.name for one in self.named), *(name for name, is_there in beside if is_there))

    @property
    def attribute_weights(self) -> tuple[float, ...]:
        """Weights of the attributes in the reward; empty if they differ by sample."""
        if self.reduce == "mean":
            return ()
        weights = {one.name: one.weight for one in self.named} | {SAMPLE_CRITERIA: 1.0}
        return tuple(weights.get(name, 0.0) for name in self.attribute_names)

    def criteria_of(self, subject: Sample | Pair) -> tuple[Criterion, ...]:
        """Returns the criteria that a subject is asked, the rubric's first."""
        own = subject.criteria if isinstance(subject, Sample) else ()
        return own if own and self.own == "replace" else (*self.criteria, *own)

    def parts(self, subjects: Iterable[Sample | Pair]) -> list[slice]:
        """Returns which of all questions are about each subject, if those about one follow those about the other."""
        ends = [0, *accumulate(len(self.criteria_of(subject)) for subject in subjects)]
        return [slice(start, end) for start, end in pairwise(ends)]

    @property
    def compares(self) -> bool:
        """Whether a sample's reward depends on the others of its group."""
        return self.compare is not None and self.compare.schedule != "reference"

    @property
    def needs_reference(self) -> bool:
        """Whether every sample needs a reference."""
        return "reference" in self.fields or (self.compare is not None and self.compare.schedule == "reference")

    def facts(self) -> dict[str, Any]:
        """Returns the fields of a judge's `ModelInfo` that it decides."""
        names, has_own = self.attribute_names, self.own != "ignore"
        return {
            "outputs": ("rewards", "attributes") if names else ("rewards",),
            "attribute_names": names,
            "attribute_weights": self.attribute_weights,
            "has_components": bool(names),
            "adds_attributes": has_own,
            "compares": self.compares,
            "takes_messages": True,
            "takes_tokens": False,
            "takes_prompts": True,
            "takes_labels": self.needs_reference or has_own,
        }

    def render(self, subject: Sample | Pair) -> list[str]:
        """Returns the template filled for each criterion; braces in the subject's own texts stay as they are."""
        if isinstance(subject, Sample):
            sample, responses = subject, {"response": subject.response}
        else:
            sample, responses = subject.a, {"response_a": subject.a.response, "response_b": subject.b.response}
        given = {"prompt": sample.prompt, "reference": sample.reference, **responses}
        return [self.template.format(**given, criterion=criterion.text) for criterion in self.criteria_of(subject)]

    def read(self, logprobs: np.ndarray, verdict: Verdict) -> np.ndarray:
        """Returns the answers, float64 `[4,Q]`, from the labels' log-probs `[Q,L]`; NaN if no label is possible.

        The values' mean is by the labels' probabilities, which are normalised to 1 over the labels.
        """
        wide = logprobs.astype(np.float64)
        other = np.clip(1 - np.exp(wide).sum(-1), 0, 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.exp(wide - wide.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            values, distinct = np.asarray(self.values), np.array([*dict.fromkeys(self.values)])
            # Not by products of matrices, whose sums depend on the number of rows.
            expected = (shares * values).sum(-1)
            # Labels of one value, such as two spellings, are one answer. An index by a mask would transpose the memory,
            # in which many labels' sums have other bits in another batch.
            each = np.stack([shares.compress(values == value, -1).sum(-1) for value in distinct])
            likeliest = distinct[each.argmax(0)] + 0 * expected
            entropy = -np.where(each > 0, each * np.log(each), each).sum(0)
        return np.stack([expected if verdict == "expected" else likeliest, likeliest, other, entropy])

    def read_answers(
        self,
        subjects: list[Sample | Pair],
        logprobs: list[np.ndarray | GuerdonError],
        verdict: Verdict,
        max_other_mass: float,
        explain: Explain,
    ) -> tuple[list[np.ndarray | GuerdonError], np.ndarray]:
        """Returns the answers about each subject, float64 `[4,K]`, or its first error, and each question's other mass.

        `logprobs` are the labels' for each question, `[L]`, or its error. A subject fails if a criterion leaves more
        than `max_other_mass` to other tokens.
        """
        places = [i for i, one in enumerate(logprobs) if isinstance(one, np.ndarray)]
        whole = np.full((NUM_READINGS, len(logprobs)), np.nan)
        told = np.array([logprobs[i] for i in places], np.float64).reshape(-1, len(self.labels))
        whole[:, places] = self.read(told, verdict)
        is_bad = (whole[OTHER] > max_other_mass) | ~np.isfinite(whole[VALUE])
        answers: list[np.ndarray | GuerdonError] = []
        for subject, part in zip(subjects, self.parts(subjects), strict=True):
            answer: np.ndarray | GuerdonError = whole[:, part]
            if is_bad[part].any():
                worst = int(np.nan_to_num(whole[OTHER, part]).argmax())
                criterion, place = self.criteria_of(subject)[worst], part.start + worst
                answer = next((one for one in logprobs[part] if isinstance(one, GuerdonError)), None) or NoVerdict(
                    f"{criterion.name or criterion.text}: {whole[OTHER, place]:.3g} of the probability is on tokens "
                    f"that are no labels, and at most {max_other_mass:g} may be (max_other_mass); {explain(place)}"
                )
            answers.append(answer)
        return answers, whole[OTHER]


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
    """A score or an error for each sample of a request; `comparisons` are there if the judge compares."""

    results: list[Score | GuerdonError]
    comparisons: Comparisons | None = None


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The group that single calls are of: those with the same `key`, `size` samples in all; 0 is the server's setting.

    `place` is the sample's number in it, if the sender counts them.
    """

    key: str
    size: int = 0
    place: int | None = None


@dataclass(slots=True, eq=False)
class GroupRequest(ScoreRequest):
    """Asks a judge to compare all samples of the request with each other."""


@dataclass(slots=True, eq=False)
class JudgedReply(ScoreReply):
    """The reply of a judge, with the comparisons that did not fail if it compares."""

    comparisons: Comparisons | None = None


class Plan(Protocol):
    """A judge's questions about a request's samples, and the reduction of its answers to scores.

    Each of the `subjects` is asked all its criteria; its tokens count as those of the sample at the same place in
    `owners`.
    """

    subjects: list[Sample | Pair]
    owners: list[int]

    def judge(self, answers: list[np.ndarray | GuerdonError]) -> Judgement:
        """Returns the samples' scores from the answers about each subject, float64 `[4,K]`, or its error."""
        ...


class PlanOfSingles:
    """Asks about each sample alone.

    Attributes are the values of the rubric's criteria, what the sample's own add to the reward, and the diagnostics;
    then the values of own criteria whose names all scored samples of the request share.
    """

    def __init__(self, rubric: Rubric, samples: list[Sample | InvalidRequest], name: str = "") -> None:
        """An error among the `samples` is that sample's; raises InvalidRequest if `name`, the judge, is asked much."""
        self._rubric, self._samples = rubric, samples
        self.owners = [i for i, sample in enumerate(samples) if isinstance(sample, Sample)]
        read = [sample for sample in samples if isinstance(sample, Sample)]
        self.subjects: list[Sample | Pair] = [*read]
        if rubric.own != "ignore":
            counts = [len(rubric.criteria_of(sample)) for sample in read]
            check_questions(name, sum(counts), sum(map(len_with, read, counts)), "criteria of this request's samples")

    def judge(self, answers: list[np.ndarray | GuerdonError]) -> Judgement:
        """Returns the samples' scores, as `Plan.judge`."""
        results: dict[int, Score | GuerdonError] = {
            i: sample for i, sample in enumerate(self._samples) if isinstance(sample, GuerdonError)
        }
        results |= {i: a for i, a in zip(self.owners, answers, strict=True) if isinstance(a, GuerdonError)}
        answered = [i for i, a in zip(self.owners, answers, strict=True) if isinstance(a, np.ndarray)]
        if answered:
            scored = [self._samples[i] for i in answered]
            told = [answer for answer in answers if isinstance(answer, np.ndarray)]
            results |= zip(answered, self._score([s for s in scored if isinstance(s, Sample)], told), strict=True)
        return Judgement([results[i] for i in range(len(self._samples))])

    def _score(self, samples: list[Sample], answers: list[np.ndarray]) -> list[Score | GuerdonError]:
        """Returns the scores of samples whose questions did not fail."""
        rubric = self._rubric
        asked, whole = [rubric.criteria_of(sample) for sample in samples], np.concatenate(answers, -1)
        starts = np.cumsum([0, *map(len, asked[:-1])])
        weights = np.array([one.weight for criteria in asked for one in criteria], np.float64)
        if rubric.reduce == "mean":
            weights /= np.repeat(np.add.reduceat(np.abs(weights), starts), [*map(len, asked)])
        worth = whole[VALUE] * weights
        rewards = np.add.reduceat(worth, starts)
        columns = [whole[VALUE, starts + k] for k in range(len(rubric.named))]
        if rubric.own != "ignore":
            is_own = np.concatenate([np.arange(len(criteria)) >= len(rubric.named) for criteria in asked])
            columns.append(np.add.reduceat(np.where(is_own, worth, 0.0), starts))
        if rubric.labels:
            columns += [np.maximum.reduceat(whole[row], starts) for row in (OTHER, ENTROPY)]
        names: list[str] = []
        if columns:  # those that each sample's own criteria have once, and nothing else has
            rows = [[one.name for one in criteria] for criteria in asked]
            shared = set(rows[0]).intersection(*rows[1:]) - {"", *RESERVED, *rubric.attribute_names}
            once = [name for name in rows[0] if name in shared and all(row.count(name) == 1 for row in rows)]
            names = once[:MOST_NAMED]
        places = [{one.name: k for k, one in enumerate(criteria)} for criteria in asked]
        columns += [whole[VALUE, starts + [place[name] for place in places]] for name in names]
        with np.errstate(over="ignore"):  # the sample fails instead
            table = np.stack([rewards, *columns], -1).astype(np.float32)
        every = (*rubric.attribute_names, *names) if names else ()
        return [
            Score(reward, row[1:] if columns else None, names=every)
            if fine
            else SampleFailed(f"its criteria's weights make a reward of {reward:g}, or parts as large; send smaller")
            for reward, row, fine in zip(rewards.tolist(), table, np.isfinite(table).all(-1).tolist(), strict=True)
        ]


def len_with(subject: Sample | Pair, num_criteria: int) -> int:
    """Returns about the characters of a subject's questions."""
    a, b = (subject, None) if isinstance(subject, Sample) else (subject.a, subject.b.response)
    return num_criteria * (len(a.response) + len(b or "") + len(a.prompt) + len(a.reference))


def check_questions(name: str, num_questions: int, num_characters: int, what: str) -> None:
    """Raises InvalidRequest if so many questions to a judge, of so many characters, are too many for one request."""
    for number, most, unit in (
        (num_questions, MAX_QUESTIONS, "questions to"),
        (num_characters, MAX_CHARACTERS, "characters for"),
    ):
        if number > most:
            raise InvalidRequest(
                f"the {what} make {number:,} {unit} {name}, and at most {most:,} may be; send fewer samples at once"
            )
