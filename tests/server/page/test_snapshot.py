"""What the page is told: the snapshot, a judge's calls, errors, and the window that its query names."""

import json
import math
import time
from typing import Any

import numpy as np
import pytest

from guerdon.core import Score
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.server.metrics import Metrics
from guerdon.server.page import snapshot, traffic
from guerdon.server.page.snapshot import parse_query
from guerdon.server.page.traffic import RecentErrors
from guerdon.settings.config import ServerConfig
from server.echo_service import EchoService

NOW = 1_700_000_005.0  # amid a stretch of 10 s
WINDOW = np.arange(1.0, 101.0)
BEFORE = np.arange(201.0, 251.0)
NAME = "reward_model"


@pytest.fixture
def service() -> EchoService:
    """Of a minute rewards 1 to 100, of the minute before 201 to 250; lengths are ten times as large."""
    service = EchoService(ServerConfig())
    recorder = service.recorder
    recorder.epoch = NOW - time.monotonic()
    recorder.started = NOW - 600
    for i, rewards in enumerate(np.split(WINDOW, 5)):
        note(service, NOW - 10 * (5 - i), rewards)
    note(service, NOW - 90, BEFORE)
    note(service, NOW - 595, np.array([-7.0, -5.0]))
    return service


def note(service: EchoService, at: float, rewards: np.ndarray) -> None:
    service.recorder.rewards.note(NAME, at, rewards.tolist(), (10 * rewards).astype(int).tolist())


def told(service: EchoService, **query: str) -> dict[str, Any]:
    what = parse_query({"window": "60", **query}, "window", "reference", "model", "beside", "until")
    gathered = snapshot.gather(service.recorder, service.catalog, None, what, {}, service.recorder.samples())
    return snapshot.make(gathered)


def rewards_of(service: EchoService, **query: str) -> dict[str, Any]:
    return told(service, **query)["rewards"][NAME]


def test_window_and_the_time_before_in_numbers(service):
    drift = rewards_of(service)["drift"]
    window, reference = drift["window"], drift["reference"]
    assert (window["count"], window["num_drawn"], window["mean"]) == (100, 100, pytest.approx(50.5))
    assert window["std"] == pytest.approx(WINDOW.std())
    assert (window["from"], window["to"]) == (NOW - 55, NOW + 5)
    assert (reference["count"], reference["num_drawn"], reference["mean"]) == (50, 50, pytest.approx(225.5))
    assert (reference["from"], reference["to"]) == (NOW - 115, NOW - 55)
    assert drift["ks"] == pytest.approx(1)
    assert drift["shift"] == pytest.approx((50.5 - 225.5) / BEFORE.std())


def test_the_start_and_any_time_may_be_compared_with(service):
    start = rewards_of(service, reference="start")["drift"]["reference"]
    assert (start["count"], start["mean"]) == (2, -6)
    given = rewards_of(service, reference=f"{NOW - 95:.0f}-{NOW - 45:.0f}")["drift"]["reference"]
    assert given["count"] == 50 + 20
    assert given["mean"] == pytest.approx((BEFORE.sum() + WINDOW[:20].sum()) / 70)
    assert rewards_of(service, reference="5-60")["drift"]["reference"] is None


def test_quantiles_means_and_heat_over_time(service):
    one = rewards_of(service)
    assert (one["from"], one["step_s"]) == (NOW - 55, 10)
    assert one["count"].tolist() == [20, 20, 20, 20, 20, 0]
    np.testing.assert_allclose(one["mean"], [10.5, 30.5, 50.5, 70.5, 90.5, np.nan])
    np.testing.assert_allclose(one["p05"], [1.5, 21.5, 41.5, 61.5, 81.5, np.nan])
    np.testing.assert_allclose(one["p25"], [5.5, 25.5, 45.5, 65.5, 85.5, np.nan])
    np.testing.assert_allclose(one["p50"], [10.5, 30.5, 50.5, 70.5, 90.5, np.nan])
    np.testing.assert_allclose(one["p75"], [15.5, 35.5, 55.5, 75.5, 95.5, np.nan])
    np.testing.assert_allclose(one["p95"], [19.5, 39.5, 59.5, 79.5, 99.5, np.nan])
    edges, heat = one["heat"]["edges"], one["heat"]["counts"]
    assert heat.shape == (6, len(edges) - 1)
    assert (edges[0], edges[-1]) == (pytest.approx(1, abs=0.2), pytest.approx(250, abs=0.2))
    for i, part in enumerate(np.split(WINDOW, 5)):
        np.testing.assert_array_equal(heat[i], np.histogram(np.clip(part, edges[0], edges[-1]), edges)[0])
    assert not heat[5].any()


def test_histograms_of_both_have_the_same_bins(service):
    histogram = rewards_of(service)["histogram"]
    edges = histogram["edges"]
    for which, rewards in (("window", WINDOW), ("reference", BEFORE)):
        counts = np.histogram(np.clip(rewards, edges[0], edges[-1]), edges)[0]
        np.testing.assert_array_equal(histogram[which], counts)


def test_length_against_reward(service):
    length = rewards_of(service)["length"]
    assert (length["count"], length["spearman"], length["pearson"]) == (100, pytest.approx(1), pytest.approx(1))
    assert length["num_distinct"] == pytest.approx(100)
    assert sorted(length["points"].tolist()) == [[10 * reward, reward] for reward in WINDOW]
    assert sum(one["count"] for one in length["bins"]) == 100
    assert [one["tokens"] for one in length["bins"]] == pytest.approx([10 * one["mean"] for one in length["bins"]])
    means = [one["mean"] for one in length["bins"]]
    assert means == sorted(means)
    assert len(means) == 12


def test_a_reference_of_minutes_ends_where_the_window_begins(service):
    for second in range(0, 8000, 10):
        note(service, NOW - second, np.array([1.0]))
    drift = rewards_of(service, window="3600")["drift"]
    assert drift["reference"]["to"] <= drift["window"]["from"]
    assert drift["reference"]["to"] % 60 == 0
    start = drift["window"]["from"]
    assert drift["window"]["count"] == len([s for s in range(0, 8000, 10) if NOW - s >= start]) + 152


def test_saved_tokens_are_never_below_nothing(service):
    metrics = service.metrics
    assert np.isnan(told(service)["totals"][NAME]["saved_share"])
    metrics.add("guerdon_received_tokens", 100, NAME)
    metrics.add("guerdon_computed_tokens", 75, NAME)
    totals = told(service)["totals"][NAME]
    assert (totals["saved_share"], totals["padded_share"]) == (0.25, 0)
    metrics.add("guerdon_computed_tokens", 33, NAME)
    totals = told(service)["totals"][NAME]
    assert (totals["saved_share"], totals["padded_share"]) == (0, pytest.approx(0.08))


def test_weights_that_became_others_are_told(service):
    for at, version in ((NOW - 50, "a"), (NOW - 40, "a"), (NOW - 30, "b")):
        service.recorder.rewards.served(NAME, at, version)
    assert rewards_of(service)["versions"] == [{"time": NOW - 30, "version": "b"}]


def test_a_window_may_end_in_the_past(service):
    drift = rewards_of(service, until=f"{NOW - 60:.0f}")["drift"]
    assert (drift["window"]["count"], drift["window"]["mean"]) == (50, pytest.approx(225.5))
    assert drift["window"]["to"] == pytest.approx(NOW - 55)
    zoomed = told(service, until=f"{NOW + 1000:.0f}")
    assert zoomed["rewards"][NAME]["drift"]["window"]["count"] == 100, "it ends now at the latest"
    assert zoomed["series"]["from"] + zoomed["series"]["step_s"] * zoomed["series"]["length"] <= NOW + 5


def test_an_old_window_is_told_by_the_minute(service):
    note(service, NOW - 7000, np.full(30, 3.0))
    one = rewards_of(service, window="180", until=f"{NOW - 6900:.0f}")
    assert one["step_s"] == 60
    assert one["count"].sum() == 30


def test_one_model_may_be_shown_beside_another(service):
    other = next(name for name in service.recorder.names if name != NAME)
    both = told(service, model=NAME, beside=other)
    assert [*both["series"]["models"]] == [NAME, other]
    assert [*told(service, model=NAME)["series"]["models"]] == [NAME]
    assert [*told(service, model=NAME, beside=NAME)["series"]["models"]] == [NAME]


def test_calls_are_summed_up_by_judge():
    metrics = Metrics()
    for outcome, name in [("answered", "a"), ("answered", "a"), ("timeout", "a"), ("answered", "b")]:
        metrics.add("guerdon_judge_calls", 1, name, outcome)
        metrics.observe("guerdon_judge_call_seconds", 0.5 if outcome == "answered" else 2.0, name)
    metrics.add("guerdon_judge_kept_answers", 3, "a")
    metrics.add("guerdon_judge_parse_failures", 1, "a")
    metrics.add("guerdon_judge_prompt_tokens", 200, "a")
    metrics.add("guerdon_judge_completion_tokens", 20, "a")
    metrics.add("guerdon_judge_cost", 0.25, "a")
    metrics.set("guerdon_judge_budget_used", 0.125, "a")
    told = traffic.judge_calls(metrics.sample(*traffic.METRICS), ["a", "c"])
    assert told["a"] == {
        "outcomes": {"answered": 2, "timeout": 1},
        "in_progress": 0,
        "kept_answers": 3,
        "unreadable_answers": 1,
        "prompt_tokens": 200,
        "completion_tokens": 20,
        "cost": 0.25,
        "budget_used": 0.125,
        "mean_s": pytest.approx(1.0),
    }
    assert [*told] == ["a", "c"]
    assert told["c"]["outcomes"] == {} and told["c"]["kept_answers"] == 0
    assert all(math.isnan(told["c"][name]) for name in ("cost", "budget_used", "mean_s"))


ERRORS_NOW = 1_700_000_000.0


def errors_told(errors: RecentErrors, *names: str, now: float = ERRORS_NOW) -> list[dict]:
    return [one for taken in errors.taken(names, now - 60, now) for one in taken.tell(now - 50, 10.0, 6)]


def test_failed_requests_are_those_since_the_last_reading():
    errors, metrics = RecentErrors(), Metrics()

    def read(at: float) -> None:
        errors.read(at, metrics.sample(*traffic.METRICS))

    metrics.add("guerdon_requests", 3, "rm", "InvalidRequest")
    read(ERRORS_NOW - 500)
    metrics.add("guerdon_requests", 2, "rm", "InvalidRequest")
    metrics.add("guerdon_requests", 7, "rm", "ok")
    metrics.add("guerdon_requests", 7, "rm", "Cancelled")
    metrics.add("guerdon_requests", 4, "rm", "Overloaded")
    metrics.add("guerdon_requests", 1, "other", "ServerFault")
    read(ERRORS_NOW - 20)
    metrics.add("guerdon_requests", 3, "rm", "InvalidRequest")
    read(ERRORS_NOW)
    read(ERRORS_NOW + 1)
    first, second = errors_told(errors, "rm")
    assert (first["kind"], first["of"], first["http"], first["count"]) == ("InvalidRequest", "request", 400, 5)
    assert first["counts"] == [0, 0, 0, 2, 0, 3]
    assert first["last"] == ERRORS_NOW
    assert first["what"] == "The request is wrong, and would be again."
    assert (second["kind"], second["http"], second["count"], second["last"]) == ("Overloaded", 503, 4, ERRORS_NOW - 20)
    assert [one["kind"] for one in errors_told(errors, "rm", "other")] == [
        "InvalidRequest",
        "Overloaded",
        "ServerFault",
    ]


def test_samples_without_a_score_are_counted_by_kind_and_not_by_text():
    errors = RecentErrors()
    errors.note(
        "rm", ERRORS_NOW, [Score(1.0), SampleFailed("a secret"), SampleFailed("another secret"), InvalidRequest("x")]
    )
    first, second = errors_told(errors, "rm")
    assert (first["kind"], first["of"], first["count"]) == ("SampleFailed", "sample", 2)
    assert (second["kind"], second["of"], second["count"]) == ("InvalidRequest", "sample", 1)
    assert "secret" not in json.dumps([first, second])


def test_errors_before_the_window_are_not_told():
    errors = RecentErrors()
    errors.note("rm", ERRORS_NOW - 3000, [SampleFailed("x")])
    assert errors_told(errors, "rm") == []
    assert errors_told(errors, "unknown") == []


KNOWN = ("window", "reference", "model", "beside", "until")


def test_what_is_left_out_is_ten_minutes_beside_those_before():
    what = parse_query({}, *KNOWN)
    assert what.window_s == 600
    assert what.compared(5000, 100) == (4400, 5000)


def test_a_reference_may_be_the_start_or_any_time():
    what = parse_query({"window": "60", "reference": "start"}, *KNOWN)
    assert what.compared(5000, 100) == (40, 160)
    assert what.compared(130, 100) == (40, 130)  # never the window itself
    what = parse_query({"reference": "1767225600.5-1767229200"}, *KNOWN)
    assert what.compared(5000, 100) == (1767225610, 1767229200)


def test_there_are_not_many_different_questions():
    assert {parse_query({"window": f"{3000 + i / 1000}"}, *KNOWN).window_s for i in range(1, 1000)} == {3010}
    assert {parse_query({"window": f"{86_000 + i / 1000}"}, *KNOWN).window_s for i in range(1, 1000)} == {86_040}
    assert parse_query({"model": "rm"}, *KNOWN).model == "rm"
    assert parse_query({"until": "1767225600.5"}, *KNOWN).until == 1767225610


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"window": "59"}, "window=59; give seconds from 60 to 86400"),
        ({"window": "86401"}, "window=86401"),
        ({"window": "nan"}, "window=nan"),
        ({"window": "an hour"}, "window=an hour"),
        ({"reference": "yesterday"}, "reference=yesterday; give previous, start, or FROM-TO"),
        ({"reference": "9-8"}, "reference=9-8"),
        ({"reference": "5-inf"}, "reference=5-inf"),
        ({"reference": "-5"}, "reference=-5"),
        ({"until": "-1"}, "until=-1; give seconds since 1970"),
        ({"until": "now"}, "until=now"),
        ({"widnow": "60"}, "unknown key 'widnow'; this path takes window, reference, model"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_is_named(query, told):
    with pytest.raises(InvalidRequest) as raised:
        parse_query(query, *KNOWN)
    assert told in str(raised.value)
