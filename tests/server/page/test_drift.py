import math

import numpy as np
import pytest

from guerdon.server.page import drift
from guerdon.server.page.drift import Moments


def ones(values: np.ndarray) -> np.ndarray:
    return np.ones(len(values))


def test_moments_of_parts_add_up_to_those_of_the_whole():
    values = np.random.default_rng(0).normal(1e6, 2.0, 1000)
    whole = drift.total(drift.moments(part) for part in np.split(values, [1, 10, 700]))
    assert whole.count == 1000
    assert whole.mean == pytest.approx(values.mean(), rel=1e-14)
    assert whole.std == pytest.approx(values.std(), rel=1e-9)
    assert (whole.least, whole.most) == (values.min(), values.max())
    assert drift.total([]) == Moments()
    assert math.isnan(Moments().std)


def test_quantiles_count_a_weight_as_repetitions():
    values = np.array([3.0, 1.0, 2.0, 4.0])
    np.testing.assert_allclose(drift.quantiles(values, ones(values), [0, 0.5, 1]), [1, 2.5, 4])
    often = drift.quantiles(np.array([1.0, 10.0]), np.array([99.0, 1.0]), [0.5])
    assert 1 <= often[0] < 1.1
    assert np.isnan(drift.quantiles(np.empty(0), np.empty(0), [0.5])).all()


def test_ks_is_the_largest_difference_of_the_distributions():
    a, b = np.array([1.0, 2.0, 3.0]), np.array([2.0, 3.0, 4.0])
    assert drift.ks(a, ones(a), b, ones(b)) == pytest.approx(1 / 3)
    assert drift.ks(a, ones(a), a[::-1], ones(a)) == pytest.approx(0)
    assert drift.ks(a, ones(a), b + 10, ones(b)) == pytest.approx(1)
    # 1 for three quarters of the first, for a quarter of the second.
    two = np.array([1.0, 2.0])
    assert drift.ks(two, np.array([3.0, 1.0]), two, np.array([1.0, 3.0])) == pytest.approx(0.5)
    assert math.isnan(drift.ks(a, ones(a), np.empty(0), np.empty(0)))


def test_shift_is_in_the_references_standard_deviations():
    window, reference = drift.moments(np.array([4.0, 6.0])), drift.moments(np.array([1.0, 5.0]))
    assert drift.shift(window, reference) == pytest.approx(1.0)  # (5 - 3) / 2
    assert drift.shift(reference, window) == pytest.approx(-2.0)
    assert math.isnan(drift.shift(window, Moments()))
    assert math.isnan(drift.shift(window, drift.moments(np.array([3.0, 3.0]))))


def test_bins_hold_every_number_whatever_lies_far_off():
    values = np.concatenate([np.linspace(-1, 1, 5000), [1e9, -1e9]])
    edges = drift.edges((values, ones(values)))
    assert len(edges) == drift.NUM_BINS + 1
    assert -1.1 < edges[0] < -0.9
    assert 0.9 < edges[-1] < 1.1
    counts = drift.histogram(values, ones(values), edges)
    assert counts.sum() == len(values)
    assert counts[0] >= counts[5]


def test_bins_reach_over_both_sides_however_few_one_has():
    random = np.random.default_rng(0)
    many, few = random.normal(size=100_000), random.normal(10, 1, 200)
    edges = drift.edges((many, ones(many)), (few, ones(few)))
    counts = drift.histogram(few, ones(few), edges)
    assert (counts > 0).sum() > 8
    assert counts.max() < 60
    assert edges[0] < -2.5
    assert 11.5 < edges[-1] < 14


@pytest.mark.parametrize("values", [[0.0] * 5, [-3e7] * 2, []], ids=["zero", "large", "none"])
def test_bins_have_a_width_even_if_nothing_varies(values):
    edges = drift.edges((np.array(values), np.ones(len(values))))
    assert (np.diff(edges) > 0).all()


def test_correlations_against_those_worked_by_hand():
    x, y = np.array([1.0, 2.0, 2.0, 4.0]), np.array([1.0, 30.0, 2.0, 400.0])
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: 4.5 / sqrt(4.5 * 5).
    assert drift.spearman(x, y, ones(x)) == pytest.approx(4.5 / math.sqrt(22.5))
    assert drift.pearson(x, 3 * x - 5, ones(x)) == pytest.approx(1)
    assert drift.pearson(x, -x, ones(x)) == pytest.approx(-1)
    assert math.isnan(drift.pearson(x, ones(x), ones(x)))
    assert math.isnan(drift.spearman(x[:1], y[:1], ones(x[:1])))


def test_correlations_count_a_weight_as_repetitions():
    random = np.random.default_rng(1)
    x, y, weights = random.integers(0, 9, 50) * 1.0, random.normal(size=50), random.integers(1, 5, 50)
    many_x, many_y = np.repeat(x, weights), np.repeat(y, weights)
    for measure in (drift.pearson, drift.spearman):
        assert measure(x, y, weights * 1.0) == pytest.approx(measure(many_x, many_y, ones(many_x)))


def test_pairs_that_come_again_and_again_are_few():
    x, y = np.array([3.0, 8.0]), np.array([0.2, 0.6])
    noise = np.random.default_rng(0).normal(scale=1e-6, size=200)
    assert drift.num_distinct(x, y, np.array([700.0, 700.0])) == pytest.approx(2)
    assert drift.num_distinct(np.tile(x, 100), np.tile(y, 100) + noise, np.ones(200)) == pytest.approx(2)
    # 30 others beside them weigh little.
    many = np.concatenate([np.tile(x, 100), np.arange(30.0) + 20]), np.concatenate([np.tile(y, 100), np.arange(30.0)])
    assert 2 < drift.num_distinct(*many, np.ones(230)) < 3
    assert drift.num_distinct(np.arange(50.0), np.zeros(50), np.ones(50)) == pytest.approx(50)
    assert drift.num_distinct(np.empty(0), np.empty(0), np.empty(0)) == 0


def test_binned_means_hold_all_of_the_weight():
    x = np.arange(100.0)
    bins = drift.binned(x, 2 * x, ones(x), 4)
    assert [count for _, _, count in bins] == [25, 25, 25, 25]
    assert [at for at, _, _ in bins] == [12, 37, 62, 87]
    assert [mean for _, mean, _ in bins] == [24, 74, 124, 174]
    assert drift.binned(ones(x), x, ones(x), 4) == [(1.0, 49.5, 100.0)]
    assert drift.binned(np.empty(0), np.empty(0), np.empty(0), 4) == []
