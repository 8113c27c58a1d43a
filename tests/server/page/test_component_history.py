"""Means, spreads and shares of components that are known, and how long they are kept."""

import numpy as np
import pytest

from guerdon.kinds.teachers import LOGPROB
from guerdon.server.page.history import MOST_COMPONENTS, CoMoments, ComponentHistory

NOW = 1_700_000_000.0
NAMES = ("helpful", "brief")
WEIGHTS = np.array([2.0, -0.5])


def samples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Components, float32 `[N,2]`, and their weighted sum."""
    random = np.random.default_rng(seed)
    rows = random.normal([3.0, -1.0], [1.0, 2.0], (count, 2)).astype(np.float32)
    return rows, rows @ WEIGHTS


def noted(
    rows: np.ndarray, rewards: np.ndarray, *, at: float = NOW, names: tuple[str, ...] = NAMES
) -> ComponentHistory:
    made = ComponentHistory()
    made.note("sum", at, names, list(rows), rewards.tolist())
    made.fold()
    return made


def told(made: ComponentHistory, name: str = "sum", *, window_s: float = 60.0, now: float = NOW) -> dict:
    taken = made.taken(name, now - window_s, now)
    assert taken is not None
    return taken.tell(now - window_s + 10, 10.0, int(window_s // 10))


def test_means_and_spreads_are_those_of_all_samples_and_of_each_period():
    rows, rewards = samples(200)
    made = ComponentHistory()
    for part, at in zip(np.split(np.arange(200), 4), (-30, -30, -10, 0), strict=True):
        made.note("sum", NOW + at, NAMES, list(rows[part]), rewards[part].tolist())
    made.fold()
    one = told(made)
    assert one["names"] == [*NAMES]
    assert one["count"].tolist() == [0, 0, 100, 0, 50, 50]
    np.testing.assert_allclose(one["window"]["mean"], rows.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(one["window"]["std"], rows.std(axis=0), rtol=1e-6)
    np.testing.assert_allclose(one["mean"][:, 2], rows[:100].mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(one["std"][:, 5], rows[150:].std(axis=0), rtol=1e-6)
    assert np.isnan(one["mean"][:, 0]).all()


def test_shares_of_a_weighted_sum_add_up_to_one():
    rows, rewards = samples(5000)
    shares = told(noted(rows, rewards))["window"]["share"]
    want = [WEIGHTS[i] * np.cov(rows[:, i], rewards, bias=True)[0, 1] / rewards.var() for i in range(2)]
    np.testing.assert_allclose(shares, want, rtol=1e-4)
    assert shares.sum() == pytest.approx(1)


def test_a_component_that_works_against_the_sum_has_a_negative_share():
    helpful = np.random.default_rng(0).normal(size=1000)
    rows = np.column_stack([helpful, helpful + 0.5 * np.random.default_rng(1).normal(size=1000)]).astype(np.float32)
    shares = told(noted(rows, rows @ np.array([3.0, -1.0])))["window"]["share"]
    assert shares[0] > 1 and shares[1] < 0


@pytest.mark.parametrize("which", ["few", "constant reward"])
def test_shares_may_be_unknown(which: str):
    rows, rewards = samples(20 if which == "few" else 100)
    shares = told(noted(rows, rewards if which == "few" else np.ones(100)))["window"]["share"]
    assert np.isnan(shares).all()


def test_a_constant_component_and_equal_ones_have_shares_as_well():
    rows, _ = samples(500)
    rows = np.column_stack([rows[:, 0], rows[:, 0], np.ones(500, np.float32)])
    shares = told(noted(rows, rows.sum(axis=1), names=("a", "b", "c")))["window"]["share"]
    np.testing.assert_allclose(shares, [0.5, 0.5, 0], atol=1e-6)


def test_a_sample_whose_component_is_not_finite_is_left_out():
    rows, rewards = samples(50)
    rows[7, 1] = np.nan
    assert told(noted(rows, rewards))["window"]["count"] == 49


def test_only_the_first_of_many_are_kept():
    names = tuple(f"a{i}" for i in range(MOST_COMPONENTS + 3))
    rows = np.random.default_rng(0).normal(size=(40, len(names))).astype(np.float32)
    one = told(noted(rows, rows.sum(axis=1), names=names))
    assert (one["names"], one["num_left_out"]) == ([*names[:MOST_COMPONENTS]], 3)
    assert one["mean"].shape == (MOST_COMPONENTS, 6)


def test_another_checkpoint_with_other_attributes_starts_anew():
    made = noted(*samples(50))
    made.note("sum", NOW, ("others",), [np.ones(1, np.float32)] * 3, [1.0] * 3)
    made.fold()
    one = told(made)
    assert (one["names"], one["window"]["count"]) == (["others"], 3)


def test_a_teachers_logprobs_are_one_mean_for_each_sample():
    made = ComponentHistory()
    made.note_means("teacher", NOW, LOGPROB, [np.float32([-1, -3]), np.float32([]), np.float32([-8])])
    made.note_means("teacher", NOW, LOGPROB, [np.float32([])])
    made.fold()
    one = told(made, "teacher")
    assert (one["names"], one["window"]["count"], one["window"]["mean"].tolist()) == ([LOGPROB], 2, [-5.0])


def test_memory_is_bounded_over_days():
    made = ComponentHistory()
    for hour in range(26):
        for at in range(0, 3600, 30):
            made.note("sum", NOW + hour * 3600 + at, NAMES, [np.ones(2, np.float32)], [1.0])
        made.fold()
    fine, coarse = made._kept["sum"][1]._kept
    assert len(fine) <= 362 and len(coarse) <= 1442
    assert told(made, window_s=86_400, now=NOW + 26 * 3600)["window"]["count"] == pytest.approx(24 * 120, abs=4)
    assert made.taken("another", 0, NOW) is None


def test_folding_a_part_at_a_time_counts_each_once():
    rows, rewards = samples(90)
    made = ComponentHistory()
    for part in np.split(np.arange(90), 9):
        made.note("sum", NOW, NAMES, list(rows[part]), rewards[part].tolist())
    for _ in range(3):
        made.fold(30)
    made.fold()
    np.testing.assert_allclose(told(made)["window"]["mean"], rows.mean(axis=0), rtol=1e-6)
    assert isinstance(made.taken("sum", NOW - 60, NOW).sums.buckets[int(NOW // 10)], CoMoments)
    assert told(made)["window"]["count"] == 90
