"""The history of rewards and of counters, as the page draws it."""

import numpy as np
import pytest

from guerdon.server.page import history as scored
from guerdon.server.page.drift import total
from guerdon.server.page.history import SAMPLE, PooledRewards, RewardHistory
from guerdon.server.page.traffic import MAX_POINTS, CounterHistory, Ring

NOW = 1_700_000_000.0


def noted(rewards: np.ndarray, *, seconds: float = 0.0, a_request: int = 100) -> RewardHistory:
    """Rewards that come evenly over the last `seconds`; a sample's length is its place."""
    made = RewardHistory()
    requests = np.array_split(np.arange(len(rewards)), max(1, len(rewards) // a_request))
    for i, rows in enumerate(requests):
        made.note("rm", NOW - seconds * (1 - i / len(requests)), rewards[rows].tolist(), rows.tolist())
    made.fold()
    return made


def pool(made: RewardHistory, name: str, start: float, end: float, now: float) -> PooledRewards:
    return PooledRewards.of(made.taken(name, start, now).between(start, end))


def test_few_rewards_are_kept_whole_and_each_stands_for_itself():
    rewards = np.random.default_rng(0).normal(size=200)
    found = pool(noted(rewards), "rm", NOW - 60, NOW + 60, NOW)
    order = np.argsort(found.tokens)
    np.testing.assert_allclose(found.rewards[order], rewards.astype(np.float32))
    assert sorted(found.tokens) == list(range(200))
    assert (found.weights == 1).all()
    assert found.num_drawn == 200


@pytest.mark.parametrize("order", ["alternate", "one after the other"])
def test_both_rewards_of_pairs_are_drawn_however_few_are_wanted(order):
    made, kinds = RewardHistory(), np.array([1.0, -1.0])
    rewards = (np.tile(kinds, 100) if order == "alternate" else np.repeat(kinds, 100)).tolist()
    for second in range(0, 3600, 10):  # as a trainer sends a chosen and a rejected response of each prompt
        made.note("rm", NOW - second, rewards, [10] * 200)
    made.fold()
    parts = made.taken("rm", NOW - 3600, NOW).between(NOW - 3600, NOW + 60)
    for most in (40_000, 20_000, 5_000):
        found = PooledRewards.of(parts, most)
        assert abs(np.average(found.rewards, weights=found.weights)) < 0.1
        assert len(found.rewards) <= most + len(parts)


def test_rewards_that_stand_for_many_count_as_fewer_drawn_ones():
    made = RewardHistory()
    made.note("rm", NOW, np.arange(20_000.0).tolist(), [1] * 20_000)
    made.note("rm", NOW - 60, [1.0, 2.0], [1, 1])
    made.fold()
    found = pool(made, "rm", NOW - 120, NOW + 60, NOW)
    assert found.num_drawn == pytest.approx(SAMPLE, rel=0.01)
    assert not pool(made, "rm", NOW - 7000, NOW - 6000, NOW).num_drawn


def test_folding_a_part_at_a_time_comes_to_the_same():
    made = RewardHistory()
    for i in range(30):
        made.note("rm", NOW, [float(i)] * 100, [1] * 100)
    made.fold(1000)
    assert 1900 <= made.num_pending < 2100
    while made.num_pending:
        made.fold(1000)
    moments = total(part for _, part in pool(made, "rm", NOW - 60, NOW + 60, NOW).parts)
    assert (moments.count, moments.mean) == (3000, pytest.approx(14.5))


def test_changes_of_the_weights_are_kept_and_the_first_is_none():
    made = RewardHistory()
    for i, version in enumerate(["a", "a", "b", "b", "a"]):
        made.served("rm", NOW + i, version)
    assert made.versions("rm") == [(NOW + 2, "b"), (NOW + 4, "a")]
    assert made.versions("never asked") == []
    for i in range(200):
        made.served("rm", NOW + i, str(i))
    assert len(made.versions("rm")) == 50
    assert made.versions("rm")[-1] == (NOW + 199, "199")


def test_more_rewards_all_count_and_an_even_sample_is_kept():
    rewards = np.arange(100_000.0)
    found = pool(noted(rewards, a_request=1000), "rm", NOW - 60, NOW + 60, NOW)
    assert len(found.rewards) == SAMPLE
    assert found.weights.sum() == pytest.approx(100_000)
    moments = total(part for _, part in found.parts)
    assert (moments.count, moments.mean) == (100_000, pytest.approx(49_999.5))
    assert moments.std == pytest.approx(rewards.std())
    # Evenly: the middle of 256 of them is within five of its deviations of the middle of all.
    assert abs(np.mean(found.rewards) - 49_999.5) < 5 * rewards.std() / SAMPLE**0.5
    assert np.histogram(found.rewards, 4, (0, 1e5))[0].min() > SAMPLE / 8
    assert (found.rewards == found.tokens).all()


def test_early_and_late_rewards_are_as_likely_to_be_kept():
    kept = np.zeros(4)
    for seed in range(40):
        made = RewardHistory(seed)
        for start in range(0, 2000, 50):
            made.note("rm", NOW, np.arange(start, start + 50.0).tolist(), [1] * 50)
            made.fold()
        kept += np.histogram(pool(made, "rm", NOW - 60, NOW + 60, NOW).rewards, 4, (0, 2000))[0]
    np.testing.assert_allclose(kept / kept.sum(), 0.25, atol=0.02)


def test_numbers_that_are_not_finite_are_left_out():
    made = RewardHistory()
    made.note("rm", NOW, [1.0, float("nan"), 3.0, float("inf")], [1, 2, 3, 4])
    made.note("other", NOW, [float("nan")], [1])
    made.fold()
    found = pool(made, "rm", NOW - 60, NOW + 60, NOW)
    assert (found.rewards.tolist(), found.tokens.tolist()) == ([1, 3], [1, 3])
    assert not len(pool(made, "other", NOW - 60, NOW + 60, NOW).rewards)
    assert not len(pool(made, "never asked", NOW - 60, NOW + 60, NOW).rewards)


@pytest.mark.slow
def test_a_day_is_kept_in_minutes_and_the_last_hour_in_shorter_stretches():
    made = noted(np.ones(20_000), seconds=100_000, a_request=1)
    hour = pool(made, "rm", NOW - 3600, NOW, NOW)
    assert {time % scored.FINE_S for time, _ in hour.parts} == {0}
    assert len(hour.parts) == pytest.approx(360, abs=1)
    assert total(part for _, part in hour.parts).count == pytest.approx(720, abs=2)
    day = pool(made, "rm", NOW - 86_400, NOW, NOW)
    assert len(day.parts) == pytest.approx(1440, abs=1)
    assert total(part for _, part in day.parts).count == pytest.approx(17_280, abs=12)


def test_the_beginning_is_kept_however_long_ago_and_the_rest_goes():
    made = RewardHistory()
    for hour in range(24 * 30):
        made.note("rm", NOW + 3600 * hour, [float(hour)], [1])
        made.note("rm", NOW + 3600 * hour + 1800, [float(hour)], [1])
        made.fold()
    later = NOW + 3600 * 24 * 30
    assert pool(made, "rm", NOW - 60, NOW + 3600, later).rewards.tolist() == [0, 0]
    assert not len(pool(made, "rm", NOW + 2 * 3600, NOW + 24 * 3600, later).rewards)
    fine, coarse = made._kept["rm"]._kept
    assert len(coarse) < 60 and len(fine) < 5


def test_pending_rewards_are_folded_before_they_grow_large():
    made = RewardHistory()
    for _ in range(200):
        made.note("rm", NOW, [1.0] * 1000, [1] * 1000)
    assert made.num_pending <= scored._MOST_PENDING
    made.fold()
    assert total(part for _, part in pool(made, "rm", NOW - 60, NOW + 60, NOW).parts).count == 200_000


def test_a_pool_has_no_more_than_is_wanted_and_its_weights_make_up_for_it():
    made = noted(np.arange(50_000.0), seconds=3600)
    found = PooledRewards.of(made.taken("rm", NOW - 3600, NOW).between(NOW - 3600, NOW + 60), most=5000)
    assert 2500 <= len(found.rewards) <= 6000
    assert found.weights.sum() == pytest.approx(total(part for _, part in found.parts).count)


def test_a_copy_of_the_buckets_never_changes():
    made = RewardHistory()
    made.note("rm", NOW, np.arange(1000.0).tolist(), [1] * 1000)
    made.fold()
    ((_, bucket),) = made.taken("rm", NOW - 60, NOW).between(NOW - 60, NOW + 60)
    before = bucket.kept.copy()
    made.note("rm", NOW, [-1.0] * 100_000, [1] * 100_000)
    made.fold()
    assert (bucket.moments.count, bucket.moments.least) == (1000, 0)
    assert (bucket.kept == before).all()


START = 1_700_000_000.0


def readings(seconds: float, *, every: float = 2.0, rate: float = 5.0) -> CounterHistory:
    """A counter that grows evenly from 0 on, read so often."""
    recent = CounterHistory(1)
    for time in np.arange(0, seconds + every / 2, every):
        recent.add(START + time, np.array([rate * time]))
    return recent


@pytest.mark.parametrize("window_s", [60, 61.5, 600, 3600, 3601, 86_400])
def test_an_even_growth_is_the_same_rate_in_every_step(window_s):
    window = readings(90_000, every=7.3).window(window_s)
    assert len(window) <= MAX_POINTS
    assert window_s <= len(window) * window.step_s < window_s + window.step_s
    rates = (window.increases() / window.seconds())[:, 0]
    np.testing.assert_allclose(rates, 5.0, rtol=1e-6)


@pytest.mark.parametrize(("ago_s", "step_s"), [(600, 2), (3540, 2), (3600, 60), (20_000, 60)])
def test_a_window_may_end_in_the_past_as_finely_as_is_kept(ago_s, step_s):
    recent = readings(30_000)
    until = recent.last - ago_s
    window, whole = recent.window(60, until=until), recent.whole(60, until=until)
    assert window.step_s == step_s
    assert until <= window.times[-1] < until + step_s
    assert whole.increases().sum() == window.increases().sum() == pytest.approx(300)


def test_a_window_beyond_the_readings_has_nothing():
    recent = readings(600)
    assert np.isnan(recent.window(60, until=START - 5000).seconds()).all()
    assert recent.window(60, until=recent.last + 999).times[-1] == recent.last


def test_what_grew_is_neither_lost_nor_counted_twice():
    recent = readings(500, every=3.1)
    assert recent.window(3600).increases().sum() == pytest.approx(5.0 * (recent.last - START))


def test_nothing_is_told_of_the_time_before_the_first_reading():
    window = readings(20).window(60)
    is_known = np.isfinite(window.seconds()[:, 0])
    assert not is_known[:19].any()
    assert is_known[-9:].all()
    assert (window.increases()[~is_known] == 0).all()
    assert window.start + len(window) * window.step_s >= START + 20


def test_one_reading_alone_tells_of_no_time():
    recent = CounterHistory(2)
    recent.add(START, np.array([3.0, 4.0]))
    assert np.isnan(recent.window(60).seconds()).all()


def test_a_reading_that_is_not_later_is_left_out():
    recent = readings(20)
    recent.add(START + 10, np.array([1e9]))
    recent.add(START + 20, np.array([1e9]))
    assert recent.last == START + 20
    assert recent.window(60).increases().sum() == pytest.approx(100)


def test_a_ring_forgets_the_oldest():
    ring = Ring(4, 1)
    for i in range(10):
        ring.add(float(i), np.array([i * i]))
    assert len(ring) == 4
    assert ring.time() == 9
    times, values = ring.at(np.array([0.0, 6.0, 7.5, 20.0]))
    assert times.tolist() == [6, 6, 7.5, 9]
    assert values[:, 0].tolist() == [36, 36, 56.5, 81]


def test_an_hour_is_kept_even_if_somebody_looks_every_second():
    recent = readings(4000, every=1.0)
    assert np.isfinite(recent.window(3600).seconds()).all()
