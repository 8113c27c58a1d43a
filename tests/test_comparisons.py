"""Pairs, verdicts and strengths of a group, without a model."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from guerdon import judge_core
from guerdon.core import Score
from guerdon.errors import GuerdonError, InvalidRequest
from guerdon.judge_core import Comparing, Criterion, GroupScores, Judgement, Pair, Rubric, Sample, Schedule, Verdict
from guerdon.kinds import compare as comparisons
from guerdon.kinds.compare import PRIOR, PlanOfPairs, bradley_terry, combine_orders, count_pairs, log_odds, make_pairs

CRITERIA = (Criterion("one", "1?", 2.0), Criterion("two", "2?", -0.5))
STRENGTHS = {"a": 1.5, "b": 0.2, "c": -0.4, "d": -2.0, "e": 0.7}


def sigmoid(x: Any) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def shrunk_log_odds(verdicts: Any) -> np.ndarray:
    won = (np.asarray(verdicts) + PRIOR) / (1 + 2 * PRIOR)
    return np.log(won / (1 - won))


def rubric(schedule: Schedule = "round_robin", scores: GroupScores = "bradley_terry") -> Rubric:
    template = "{prompt}{response_a}{response_b}{criterion}"
    return Rubric(template, ("A", "B"), (1.0, 0.0), CRITERIA, compare=Comparing(schedule, scores))


def plan(responses: str, made: Rubric | None = None, prompts: str = "", groups: list[int] | None = None) -> PlanOfPairs:
    samples: list[Any] = [
        InvalidRequest("unreadable") if text == "?" else Sample(text, prompts[i : i + 1], "r")
        for i, text in enumerate(responses)
    ]
    return PlanOfPairs(made or rubric(), samples, None if groups is None else np.array(groups), "judge")


def ask(
    made: PlanOfPairs,
    *,
    fails: Callable[[set[str]], bool] = lambda met: False,
    bias: float = 0.3,
    mass: float = 0.0,
    verdict: Verdict = "expected",
    bound: float = 0.5,
) -> Judgement:
    """Answers by the responses' STRENGTHS and a bias for the first place; `fails` gets the two responses."""
    answers: list[np.ndarray | GuerdonError] = []
    for pair in made.subjects:
        assert isinstance(pair, Pair)
        gap = STRENGTHS.get(pair.a.response, 0) - STRENGTHS.get(pair.b.response, 0)
        first = sigmoid([gap + bias, -gap + bias])
        is_bad = fails({pair.a.response, pair.b.response})
        answer = np.log((1 - mass) * np.stack([first, 1 - first], -1))
        answers += [InvalidRequest("too long") if is_bad else row for row in answer]
    told, _ = made._rubric.read_answers(made.subjects, answers, verdict, bound, lambda number: f"question {number}")
    return made.judge(told)


def rewards(judged: Judgement) -> list[float]:
    return [result.reward if isinstance(result, Score) else np.nan for result in judged.results]


def attributes(judged: Judgement) -> np.ndarray:
    return np.stack([r.attributes for r in judged.results if isinstance(r, Score) and r.attributes is not None])


# --- strengths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [0.0, 0.1, 0.5, 0.73, 1.0])
def test_of_two_players_the_gap_is_the_log_odds(verdict: float) -> None:
    made = bradley_terry(np.array([[0, 1]]), np.array([verdict]), 2)
    want = shrunk_log_odds(verdict)
    np.testing.assert_allclose(made, [want / 2, -want / 2], atol=1e-9)
    np.testing.assert_allclose(log_odds(np.array([verdict])), [want], atol=1e-12)


def test_strengths_that_explain_all_verdicts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons, "PRIOR", 0.0)
    rng = np.random.default_rng(0)
    strengths = rng.normal(size=12)
    pairs = np.array([*combinations(range(12), 2)])
    made = bradley_terry(pairs, sigmoid(strengths[pairs[:, 0]] - strengths[pairs[:, 1]]), 12)
    np.testing.assert_allclose(made, strengths - strengths.mean(), atol=1e-9)


@pytest.mark.parametrize("schedule", ["round_robin", "circular"])
@pytest.mark.parametrize("is_extreme", [False, True])
def test_strengths_are_those_of_hunters_iteration(schedule: Schedule, is_extreme: bool) -> None:
    """Each strength is set to the player's wins by the sum of 1 / (own + other strength), until nothing changes."""
    rng = np.random.default_rng(1)
    pairs = np.array(make_pairs(schedule, [*"abcdefg"]))
    verdicts = rng.uniform(size=len(pairs))
    verdicts = verdicts.round() if is_extreme else verdicts
    wins = np.zeros((7, 7))
    wins[pairs[:, 0], pairs[:, 1]] = verdicts + PRIOR
    wins[pairs[:, 1], pairs[:, 0]] = 1 - verdicts + PRIOR
    strengths = np.ones(7)
    for _ in range(20_000):
        strengths = wins.sum(1) / ((wins + wins.T) / np.add.outer(strengths, strengths)).sum(1)
        strengths /= np.exp(np.log(strengths).mean())
    np.testing.assert_allclose(bradley_terry(pairs, verdicts, 7), np.log(strengths), atol=1e-7)


def test_who_wins_all_is_strongest_and_finite() -> None:
    pairs = np.array([*combinations(range(64), 2)])
    made = bradley_terry(pairs, np.ones(len(pairs)), 64)
    assert np.isfinite(made).all() and (np.diff(made) < 0).all()
    np.testing.assert_allclose(made, -made[::-1], atol=1e-8)


# --- pairs and verdicts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["round_robin", "circular"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_each_pair_meets_once_whatever_the_order(schedule: Schedule, size: int) -> None:
    texts = [*"abcdefghi"[:size]]
    met = [frozenset((texts[i], texts[j])) for i, j in make_pairs(schedule, texts)]
    again = [frozenset((texts[-1 - i], texts[-1 - j])) for i, j in make_pairs(schedule, texts[::-1])]
    assert len(met) == len({*met}) == count_pairs(schedule, size) and {*met} == {*again}
    if size > 2:
        assert all(sum(text in pair for pair in met) == (2 if schedule == "circular" else size - 1) for text in texts)


def test_orders_that_disagree_make_a_tie() -> None:
    expected = np.array([[[0.9], [0.3]], [[0.9], [0.8]], [[0.4], [0.2]], [[0.6], [0.5]]])
    likeliest = np.array([[[1.0], [0.0]], [[1.0], [1.0]], [[0.0], [0.0]], [[0.5], [0.5]]])
    verdicts, disagreed = combine_orders(expected, likeliest)
    np.testing.assert_allclose(verdicts[:, 0], [0.8, 0.5, 0.5, 0.55])
    np.testing.assert_array_equal(disagreed[:, 0], [False, True, True, False])
    swapped, _ = combine_orders(expected[:, ::-1], likeliest[:, ::-1])
    np.testing.assert_allclose(swapped, 1 - verdicts, atol=1e-15)


# --- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["round_robin", "circular"])
@pytest.mark.parametrize("scores", ["bradley_terry", "wins"])
@pytest.mark.parametrize("verdict", ["expected", "likeliest"])
def test_a_permuted_group_gets_permuted_rewards(schedule: Schedule, scores: GroupScores, verdict: Verdict) -> None:
    made = rubric(schedule, scores)
    straight = dict(zip("abcde", rewards(ask(plan("abcde", made), verdict=verdict)), strict=True))
    mixed = dict(zip("dbeac", rewards(ask(plan("dbeac", made), verdict=verdict)), strict=True))
    assert mixed == pytest.approx(straight, abs=1e-9)
    assert len({*np.round([*straight.values()], 6)}) > 2


def test_scores_are_the_criterias_and_the_reward_their_weighted_sum() -> None:
    judged = ask(plan("abcde", rubric("round_robin", "wins")), bias=0.0, mass=0.25)
    made = attributes(judged)
    gaps = np.subtract.outer([*STRENGTHS.values()], [*STRENGTHS.values()])
    wins = (sigmoid(gaps).sum(1) - 0.5) / 4
    np.testing.assert_allclose(made[:, :4], np.stack([wins, 1 - wins, np.full(5, 0.25), np.zeros(5)], -1), atol=1e-6)
    doubts = sigmoid(gaps)
    np.fill_diagonal(doubts, 1)
    entropies = -doubts * np.log(doubts) - (1 - doubts) * np.log(np.maximum(1 - doubts, 1e-300))
    np.testing.assert_allclose(made[:, 4], entropies.max(1), atol=1e-6)
    np.testing.assert_allclose(rewards(judged), 2 * wins - 0.5 * (1 - wins), atol=1e-12)
    assert judged.comparisons is not None and len(judged.comparisons.pairs) == 10
    assert rubric().attribute_names == ("one", "two", "other_mass", "disagreed", "label_entropy")


def test_a_bias_for_the_first_place_makes_ties_and_is_told() -> None:
    judged = ask(plan("abcde"), bias=9.0)
    np.testing.assert_array_equal(attributes(judged)[:, 3], 1.0)
    np.testing.assert_allclose(rewards(judged), 0.0, atol=1e-9)
    # Only c and d lie further apart than this bias reaches.
    partly = attributes(ask(plan("bcd"), bias=1.7))[:, 3]
    np.testing.assert_allclose(partly, [0.5, 1.0, 0.5])


def test_prompts_and_ids_make_groups() -> None:
    made = plan("abab", prompts="xxyy")
    assert {(pair.a.prompt, pair.b.prompt) for pair in made.subjects if isinstance(pair, Pair)} == {
        ("x", "x"),
        ("y", "y"),
    }
    assert len(plan("abab", prompts="xxxx").subjects) == 12
    apart = plan("abab", prompts="xxxx", groups=[7, 7, -1, -1])
    assert len(apart.subjects) == 4 and sorted(apart.owners) == [0, 1, 2, 3]
    np.testing.assert_allclose(rewards(ask(apart))[:2], rewards(ask(apart))[2:], atol=1e-12)


def test_against_the_reference_each_sample_stands_alone() -> None:
    for scores in ("bradley_terry", "wins"):
        made = plan("abd", rubric("reference", scores))  # type: ignore[arg-type]
        assert made.owners == [0, 0, 1, 1, 2, 2]
        assert [(p.a.response, p.b.response) for p in made.subjects[:2] if isinstance(p, Pair)] == [
            ("a", "r"),
            ("r", "a"),
        ]
        wins = sigmoid([STRENGTHS[name] for name in "abd"])
        want = shrunk_log_odds(wins) if scores == "bradley_terry" else wins
        np.testing.assert_allclose(attributes(ask(made, bias=0.0))[:, 0], want, atol=1e-6)
    judged = ask(made, fails=lambda met: "b" in met)
    assert "compared with its reference: too long" in str(judged.results[1])
    assert np.isfinite(rewards(judged))[[0, 2]].all()


def test_a_sample_alone_cannot_be_compared() -> None:
    judged = ask(plan("abc", prompts="xxy"))
    assert "this sample is alone: no other that can be read has its prompt" in str(judged.results[2])
    assert np.isfinite(rewards(judged)[:2]).all()
    judged = ask(plan("a?"))
    assert "this sample is alone" in str(judged.results[0]) and "unreadable" in str(judged.results[1])


def test_a_sample_whose_comparisons_fail_leaves_the_others_theirs() -> None:
    for schedule in ("round_robin", "circular"):
        made = plan("abdce", rubric(schedule))  # type: ignore[arg-type]
        judged = ask(made, fails=lambda met: "d" in met)
        assert np.isnan(rewards(judged)).tolist() == [False, False, True, False, False]
        assert "compared with sample" in str(judged.results[2]) and "too long" in str(judged.results[2])
        if schedule == "round_robin":
            kept = [rewards(judged)[i] for i in (0, 1, 3, 4)]
            np.testing.assert_allclose(kept, rewards(ask(plan("abce"))), atol=1e-9)


def test_a_failed_comparison_fails_both_its_samples() -> None:
    judged = ask(plan("abcde"), fails=lambda met: met == {*"bd"})
    assert np.isnan(rewards(judged)).tolist() == [False, True, False, True, False]
    assert str(judged.results[1]) == "compared with sample 3: too long"
    np.testing.assert_allclose(np.array(rewards(judged))[[0, 2, 4]], rewards(ask(plan("ace"))), atol=1e-9)
    assert judged.comparisons is not None and len(judged.comparisons.pairs) == 9
    nobody = ask(plan("abc"), fails=lambda met: met == {*"ab"})
    assert np.isnan(rewards(nobody)).all()
    assert "too many comparisons in its group failed, the first of them so: too long" in str(nobody.results[2])


def test_a_circle_in_pieces_fails() -> None:
    """The four samples of two failed comparisons fail, and the others are two pairs that never met."""
    circle = make_pairs("circular", [*"abcdefgh"])
    broken = [{"abcdefgh"[i], "abcdefgh"[j]} for i, j in (circle[0], circle[4])]
    judged = ask(plan("abcdefgh", rubric("circular")), fails=lambda met: met in broken)
    assert np.isnan(rewards(judged)).all()
    assert sum("too many comparisons in its group failed" in str(result) for result in judged.results) == 4


def test_much_mass_on_no_label_fails_both_samples() -> None:
    judged = ask(plan("ab"), mass=0.6)
    for result in judged.results:
        assert "compared with sample" in str(result) and "0.6 of the probability is on tokens" in str(result)
    assert np.isfinite(rewards(ask(plan("ab"), mass=0.6, bound=0.7))).all()


@pytest.mark.parametrize(("bound", "message"), [("MAX_QUESTIONS", "40 questions"), ("MAX_CHARACTERS", "characters")])
def test_too_much_to_ask_is_refused(bound: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_core, bound, 39)
    with pytest.raises(InvalidRequest, match=message):
        plan("abcde")
