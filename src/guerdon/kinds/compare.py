"""Comparisons of responses by a judge: pairings, verdicts from both orders, scores of a group; numpy only.

Legend: N samples, C comparisons, K criteria. Each comparison is asked in both orders.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from guerdon.core import Score
from guerdon.errors import GuerdonError, InvalidRequest, named
from guerdon.judge_core import (
    ENTROPY,
    NUM_READINGS,
    OTHER,
    SIDE,
    VALUE,
    Comparisons,
    Judgement,
    Pair,
    Rubric,
    Sample,
    Schedule,
    check_questions,
    len_with,
)

PRIOR = 0.01
"""Virtual wins of each side of a comparison, so that strengths stay finite if a response wins all of its own."""

_MAX_STEPS, _MAX_HALVINGS = 100, 50
_SMALLEST_STEP, _SLACK = 1e-12, 1e-9
"""When Newton's method ends, and what share of the likelihood may be lost to rounding by a step."""


def make_pairs(schedule: Schedule, responses: list[str]) -> list[tuple[int, int]]:
    """Returns the pairs of a group that are compared, as numbers of its responses; `reference` has none.

    `circular` compares each with the next in the order of the texts' digests, so that the order in which a group is
    sent does not matter.
    """
    if schedule == "round_robin":
        return [*combinations(range(len(responses)), 2)]
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in responses]
    order = sorted(range(len(responses)), key=digests.__getitem__)
    pairs = [*pairwise(order)]
    return [*pairs, (order[-1], order[0])] if len(order) > 2 else pairs


def combine_orders(values: np.ndarray, likeliest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first responses' verdicts, float64 `[C,K]`, and whether the two orders disagreed, bool `[C,K]`.

    Both arguments are `[C,2,K]`: what the answers are worth to the response that was read first, which is the first of
    the pair in one order and the second in the other. If the likeliest values prefer different responses, the verdict
    is a tie, 0.5; else it is the mean of both orders.
    """
    side = np.sign(likeliest - 0.5)
    disagreed = side[:, 0] != -side[:, 1]
    return np.where(disagreed, 0.5, (values[:, 0] + (1 - values[:, 1])) / 2), disagreed


def log_odds(verdicts: np.ndarray) -> np.ndarray:
    """Returns how much stronger one response is than another: the difference of two by `bradley_terry`."""
    return np.log(verdicts + PRIOR) - np.log(1 - verdicts + PRIOR)


def bradley_terry(pairs: np.ndarray, verdicts: np.ndarray, num_players: int) -> np.ndarray:
    """Returns the players' log-strengths, float64 `[num_players]`, centred at 0.

    `verdicts`, `[C]` from 0 to 1, are how much the first of each of the `pairs`, int `[C,2]`, has won. Maximises the
    likelihood of Bradley and Terry (1952), in which i beats j with the probability sigmoid(s_i - s_j), by Newton's
    method with halved steps. PRIOR is added to what each side of a comparison has won: then the maximum exists and is
    unique if the pairs connect all players (Assumption 1 in Hunter, MM algorithms for generalized Bradley-Terry models,
    Annals of Statistics 32, 2004).
    """
    won = (verdicts + PRIOR) / (1 + 2 * PRIOR)
    first, second = pairs.T
    centring = np.full((num_players, num_players), 1 / num_players)  # adding a constant to all changes nothing else

    def likelihood(strengths: np.ndarray) -> float:
        gaps = strengths[first] - strengths[second]
        return float((won * gaps - np.logaddexp(0, gaps)).sum())

    strengths = np.zeros(num_players)
    best = likelihood(strengths)
    for _ in range(_MAX_STEPS):
        expected = 1 / (1 + np.exp(strengths[second] - strengths[first]))
        gradient, curvature = np.zeros(num_players), centring.copy()
        np.add.at(gradient, first, won - expected)
        np.add.at(gradient, second, expected - won)
        for rows, columns, sign in ((first, first, 1), (second, second, 1), (first, second, -1), (second, first, -1)):
            np.add.at(curvature, (rows, columns), sign * expected * (1 - expected))
        step = np.linalg.solve(curvature, gradient)
        reached = best
        for _ in range(_MAX_HALVINGS):
            if (reached := likelihood(strengths + step)) >= best - _SLACK * abs(best):
                break
            step /= 2
        strengths, best = strengths + step, reached
        if np.abs(step).max() <= _SMALLEST_STEP:
            break
    return strengths - strengths.mean()


@dataclass(frozen=True, slots=True)
class _Group:
    """Samples that are compared with each other: indices of the samples and of their comparisons."""

    members: list[int]
    own: range


class PlanOfPairs:
    """Asks which of two responses is better, in both orders.

    With the schedule `reference` each sample is compared with its reference. Otherwise samples with the same prompt,
    reference and group id are a group, of which the schedule chooses the pairs, and scores are relative to the group.
    Attributes are the criteria's scores, OTHER_MASS and DISAGREED.

    A comparison fails if one of its questions failed, or if a criterion leaves too much to other tokens. Then the
    samples of the group with the most failed comparisons fail, until no failed comparison is left; the others' scores
    are made of the comparisons among them.
    """

    def __init__(
        self, rubric: Rubric, samples: list[Sample | InvalidRequest], groups: np.ndarray | None, name: str
    ) -> None:
        """`groups` are the samples' group ids, `name` the judge's; raises InvalidRequest if it asks too much."""
        assert rubric.compare is not None
        self._rubric, self._compare, self._name = rubric, rubric.compare, name
        self._samples = samples
        self._read = {i: sample for i, sample in enumerate(samples) if isinstance(sample, Sample)}
        self._groups: list[_Group] = []
        self._pairs: list[tuple[int, int]] = []
        groups_of = self._make_groups(groups)
        num_pairs = sum(count_pairs(self._compare.schedule, len(members)) for members in groups_of)
        what = "comparisons of this request, of large or many groups,"
        check_questions(name, 2 * num_pairs * len(rubric.criteria), 0, what)
        for members in groups_of:
            begin = len(self._pairs)
            if self._compare.schedule == "reference":
                self._pairs += [(i, i) for i in members]
            else:
                pairs = make_pairs(self._compare.schedule, [self._read[i].response for i in members])
                self._pairs += [(members[i], members[j]) for i, j in pairs]
            self._groups.append(_Group(members, range(begin, len(self._pairs))))
        self._asked: list[tuple[int, int]] = []
        """Each subject's comparison and order."""
        for group in self._groups:  # one batch computes a response that is read first only once, if they stand together
            places = [(c, order) for c in group.own for order in (0, 1)]
            self._asked += sorted(places, key=lambda place: self._pairs[place[0]][place[1]])
        self.owners = [self._pairs[c][order] for c, order in self._asked]
        asked: list[Sample | Pair] = []
        for c, order in self._asked:
            first, second = map(self._read.__getitem__, self._pairs[c])
            if self._compare.schedule == "reference":
                second = Sample(first.reference, first.prompt)
            asked.append(Pair(second, first) if order else Pair(first, second))
        check_questions(name, 0, sum(len_with(pair, len(rubric.criteria)) for pair in asked), what)
        self.subjects = asked

    def judge(self, answers: list[np.ndarray | GuerdonError]) -> Judgement:
        """Returns the samples' scores, as `Plan.judge`."""
        failed: dict[int, GuerdonError] = {}
        told = np.full((NUM_READINGS, len(self._pairs), 2, len(self._rubric.criteria)), np.nan)
        for (c, order), answer in zip(self._asked, answers, strict=True):
            if isinstance(answer, GuerdonError):
                failed[c] = answer
            else:
                told[:, c, order] = answer
        verdicts, disagreed = combine_orders(told[VALUE], told[SIDE])
        most = told[[OTHER, ENTROPY]].max((2, 3))
        pairs = np.array(self._pairs, np.int64).reshape(-1, 2)
        results: dict[int, Score | GuerdonError] = {
            i: sample for i, sample in enumerate(self._samples) if isinstance(sample, GuerdonError)
        }
        for group in self._groups:
            errors = self._find_failures(group, failed)
            results |= errors
            kept = [i for i in group.members if i not in errors]
            own = [c for c in group.own if errors.keys().isdisjoint(self._pairs[c])]
            if kept:
                local = np.searchsorted(kept, pairs[own])
                scores = self._score(local, verdicts[own], disagreed[own], most[:, own], len(kept))
                results |= zip(kept, scores, strict=True)
        fine = [c for c in range(len(pairs)) if c not in failed]
        made = Comparisons(pairs[fine], verdicts[fine], disagreed[fine])
        return Judgement([results[i] for i in range(len(self._samples))], made)

    def _make_groups(self, ids: np.ndarray | None) -> list[list[int]]:
        """Returns the samples that can be read, by group, each in ascending order."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, sample in self._read.items():
            is_alone = self._compare.schedule == "reference"
            key = (i,) if is_alone else (sample.prompt, sample.reference, None if ids is None else int(ids[i]))
            groups.setdefault(key, []).append(i)
        return [*groups.values()]

    def _find_failures(self, group: _Group, failed: dict[int, GuerdonError]) -> dict[int, GuerdonError]:
        """Returns the errors of the group's samples that get no score."""
        errors: dict[int, GuerdonError] = {}
        while True:
            left = [c for c in group.own if errors.keys().isdisjoint(self._pairs[c])]
            broken = [c for c in left if c in failed]
            if not broken:
                break
            counts = Counter(i for c in broken for i in {*self._pairs[c]})
            most = max(counts.values())
            for c in broken:
                for i, other in (self._pairs[c], self._pairs[c][::-1]):
                    if counts[i] == most:
                        whom = "its reference" if i == other else f"sample {other}"
                        errors.setdefault(i, named(f"compared with {whom}", failed[c]))
        kept = {*group.members} - errors.keys()
        if kept and not _connects([self._pairs[c] for c in left], kept):
            alone: GuerdonError = InvalidRequest(
                f"{self._name} compares the responses of a group, and this sample is alone: no other that can be read "
                "has its prompt and group id; send all responses to a prompt in one request, or each with the same "
                "`group` and their number as `group_size`"
            )
            if (first := next((failed[c] for c in group.own if c in failed), None)) is not None:
                alone = named("too many comparisons in its group failed, the first of them so", first)
            errors |= dict.fromkeys(kept, alone)
        return errors

    def _score(
        self, pairs: np.ndarray, verdicts: np.ndarray, disagreed: np.ndarray, most: np.ndarray, num_members: int
    ) -> list[Score]:
        """Returns the scores of a group's members, which `pairs` count from 0.

        `most`, `[2,C]`, is each comparison's largest probability of no label, and its largest entropy.
        """
        first, second = pairs.T
        counts = np.bincount(pairs.ravel(), minlength=num_members)
        shares, (masses, entropies) = np.zeros(num_members), np.zeros((2, num_members))
        for side in (first, second):
            np.add.at(shares, side, disagreed.mean(-1))
            np.maximum.at(masses, side, most[0])
            np.maximum.at(entropies, side, most[1])
        if self._compare.schedule == "reference":
            scores = log_odds(verdicts) if self._compare.scores == "bradley_terry" else verdicts
        elif self._compare.scores == "bradley_terry":
            scores = np.stack([bradley_terry(pairs, column, num_members) for column in verdicts.T], -1)
        else:
            scores = np.zeros((num_members, verdicts.shape[-1]))
            np.add.at(scores, first, verdicts)
            np.add.at(scores, second, 1 - verdicts)
            scores /= counts[:, None]
        weights = np.array([one.weight for one in self._rubric.criteria])
        rewards = (scores * weights).sum(-1) / (np.abs(weights).sum() if self._rubric.reduce == "mean" else 1)
        columns = [*scores.T[: len(self._rubric.named)], masses, shares / counts, entropies]
        columns = columns if self._rubric.labels else [*columns[:-3], shares / counts]
        return list(map(Score, rewards.tolist(), np.stack(columns, -1).astype(np.float32)))


def count_pairs(schedule: Schedule, num_members: int) -> int:
    """Returns how many comparisons a group has."""
    if schedule == "round_robin":
        return num_members * (num_members - 1) // 2
    return num_members if schedule == "reference" or num_members > 2 else num_members - 1


def _connects(pairs: list[tuple[int, int]], members: set[int]) -> bool:
    """Whether the pairs, which are among the members, lead from each to every other; False without any."""
    met: dict[int, set[int]] = {}
    for i, j in pairs:
        met.setdefault(i, set()).add(j)
        met.setdefault(j, set()).add(i)
    reached: set[int] = set()
    following = set(pairs[0]) if pairs else set()
    while following:
        reached |= following
        following = set().union(*(met[i] for i in following)) - reached
    return reached == members
