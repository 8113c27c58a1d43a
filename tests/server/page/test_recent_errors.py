"""Which errors the page tells of, when, and that it has none of their texts."""

import json

from guerdon.core import Score
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.server.metrics import Metrics
from guerdon.server.page import traffic
from guerdon.server.page.recent_errors import RecentErrors

NOW = 1_700_000_000.0


def told(errors: RecentErrors, *names: str, now: float = NOW) -> list[dict]:
    return [one for taken in errors.taken(names, now - 60, now) for one in taken.tell(now - 50, 10.0, 6)]


def test_failed_requests_are_those_since_the_last_reading():
    errors, metrics = RecentErrors(), Metrics()

    def read(at: float) -> None:
        errors.read(at, metrics.sample(*traffic.METRICS))

    metrics.add("guerdon_requests", 3, "rm", "InvalidRequest")
    read(NOW - 500)
    metrics.add("guerdon_requests", 2, "rm", "InvalidRequest")
    metrics.add("guerdon_requests", 7, "rm", "ok")
    metrics.add("guerdon_requests", 7, "rm", "Cancelled")
    metrics.add("guerdon_requests", 4, "rm", "Overloaded")
    metrics.add("guerdon_requests", 1, "other", "ServerFault")
    read(NOW - 20)
    metrics.add("guerdon_requests", 3, "rm", "InvalidRequest")
    read(NOW)
    read(NOW + 1)
    first, second = told(errors, "rm")
    assert (first["kind"], first["of"], first["http"], first["count"]) == ("InvalidRequest", "request", 400, 5)
    assert first["counts"] == [0, 0, 0, 2, 0, 3]
    assert first["last"] == NOW
    assert first["what"] == "The request is wrong, and would be again."
    assert (second["kind"], second["http"], second["count"], second["last"]) == ("Overloaded", 503, 4, NOW - 20)
    assert [one["kind"] for one in told(errors, "rm", "other")] == ["InvalidRequest", "Overloaded", "ServerFault"]


def test_samples_without_a_score_are_counted_by_kind_and_not_by_text():
    errors = RecentErrors()
    errors.note("rm", NOW, [Score(1.0), SampleFailed("a secret"), SampleFailed("another secret"), InvalidRequest("x")])
    first, second = told(errors, "rm")
    assert (first["kind"], first["of"], first["count"]) == ("SampleFailed", "sample", 2)
    assert (second["kind"], second["of"], second["count"]) == ("InvalidRequest", "sample", 1)
    assert "secret" not in json.dumps([first, second])


def test_errors_before_the_window_are_not_told():
    errors = RecentErrors()
    errors.note("rm", NOW - 3000, [SampleFailed("x")])
    assert told(errors, "rm") == []
    assert told(errors, "unknown") == []
