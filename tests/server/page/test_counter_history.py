import numpy as np
import pytest

from guerdon.server.page.traffic import MAX_POINTS, CounterHistory, Ring

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
    assert ring.last == 9
    times, values = ring.at(np.array([0.0, 6.0, 7.5, 20.0]))
    assert times.tolist() == [6, 6, 7.5, 9]
    assert values[:, 0].tolist() == [36, 36, 56.5, 81]


def test_an_hour_is_kept_even_if_somebody_looks_every_second():
    recent = readings(4000, every=1.0)
    assert np.isfinite(recent.window(3600).seconds()).all()
