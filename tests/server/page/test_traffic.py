import math

import numpy as np
import pytest

from guerdon.server.metrics import SECONDS, Metrics
from guerdon.server.page import traffic
from guerdon.server.page.traffic import CounterHistory

START = 1_700_000_000.0
NAMES = ["sum", "rm"]


class Server:
    """Real metrics of two models, read whenever the test says so."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.queue: dict[str, tuple[int, int]] = {"rm": (0, 0)}
        self.recent = CounterHistory(len(NAMES) * traffic.WIDTH)
        self._reading = traffic.CounterReader(NAMES)
        self.read(0)

    def read(self, after_s: float) -> None:
        samples = self.metrics.sample(*traffic.METRICS)
        self.recent.add(START + after_s, self._reading.read(START + after_s, samples, self.queue))

    def told(self, name: str = "rm") -> dict[str, float]:
        """The series over all that was read, as one number each."""
        window = self.recent.window(60)
        told = traffic.series(window, NAMES.index(name), name != "sum")
        known = {what: values[np.isfinite(values)] for what, values in told.items()}
        return {what: float(values.mean()) if len(values) else math.nan for what, values in known.items()}


def test_rates_are_what_was_counted_a_second():
    server = Server()
    server.metrics.add("guerdon_requests", 30, "rm", "ok")
    server.metrics.add("guerdon_requests", 6, "rm", "Overloaded")
    server.metrics.add("guerdon_requests", 4, "rm", "InvalidRequest")
    server.metrics.add("guerdon_requests", 1000, "another", "ok")
    server.metrics.add("guerdon_sequences", 250, "rm", "ok")
    server.metrics.add("guerdon_sequences", 50, "rm", "failed")
    server.metrics.add("guerdon_received_tokens", 5000, "rm")
    server.metrics.set("guerdon_batch_budget_tokens", 400, "rm")
    for _ in range(10):
        server.metrics.batch("rm", 30, 200, 0.1)
    server.read(10)
    told = server.told()
    assert told["requests_per_s"] == pytest.approx(4)
    assert told["errors_per_s"] == pytest.approx(1)
    assert told["sequences_per_s"] == pytest.approx(30)
    assert told["received_tokens_per_s"] == pytest.approx(500)
    assert told["computed_tokens_per_s"] == pytest.approx(200)
    assert told["batch_sequences"] == pytest.approx(30)
    assert told["batch_fill"] == pytest.approx(200 / 400)


def test_a_queue_is_told_by_its_mean_over_time():
    server = Server()
    for second, waiting in ((2, 10), (4, 30), (6, 0), (8, 0)):
        server.queue["rm"] = (waiting, waiting * 100)
        server.read(second)
    assert server.told()["queue_sequences"] == pytest.approx(10)
    assert server.told()["queue_tokens"] == pytest.approx(1000)


def test_of_a_sum_only_what_is_counted_of_it_is_told():
    server = Server()
    server.metrics.add("guerdon_requests", 20, "sum", "ok")
    server.metrics.add("guerdon_sequences", 40, "sum", "ok")
    server.read(10)
    told = server.told("sum")
    assert told["requests_per_s"] == pytest.approx(2)
    assert told["sequences_per_s"] == pytest.approx(4)
    assert all(math.isnan(told[name]) for name in ("received_tokens_per_s", "queue_tokens", "batch_fill"))


def test_percentiles_are_those_of_the_requests_in_the_window():
    server = Server()
    for _ in range(99):
        server.metrics.observe("guerdon_e2e_request_latency_seconds", 0.03, "rm")
    server.metrics.observe("guerdon_e2e_request_latency_seconds", 20, "rm")
    server.read(10)
    over = traffic.over(server.recent.whole(60), NAMES.index("rm"), True)["latency_s"]
    assert 0.025 < over["p50"] < 0.05
    assert over["p50"] == pytest.approx(0.025 + 0.025 * 50 / 99)
    assert over["p99"] == pytest.approx(0.05)
    server.read(200)
    assert math.isnan(traffic.over(server.recent.whole(60), NAMES.index("rm"), True)["latency_s"]["p50"])


def test_waiting_and_computing_are_told_as_means_of_the_answered():
    server = Server()
    for waited, computed in ((20, 1), (30, 2)):
        server.metrics.observe("guerdon_request_queue_time_seconds", waited, "sum")
        server.metrics.observe("guerdon_request_inference_time_seconds", computed, "sum")
    server.read(10)
    over = traffic.over(server.recent.whole(60), NAMES.index("sum"), False)["latency_s"]
    assert (over["wait"], over["compute"]) == (pytest.approx(25), pytest.approx(1.5))
    nothing = traffic.over(server.recent.whole(60), NAMES.index("rm"), True)["latency_s"]
    assert math.isnan(nothing["wait"])
    assert math.isnan(nothing["compute"])


def test_what_failed_is_told_of_the_window_alone():
    server = Server()
    for second in (10, 200):
        server.metrics.add("guerdon_sequences", 90, "rm", "ok")
        server.metrics.add("guerdon_sequences", 10, "rm", "failed")
        server.metrics.add("guerdon_out_of_memory", 2, "rm")
        server.metrics.add("guerdon_recheck_sequences", 5, "rm", "same")
        server.metrics.add("guerdon_recheck_sequences", 3, "rm", "differs")
        server.read(second)
    told = {"sequences": 100, "failed_sequences": 10, "out_of_memory": 2, "rechecked_differs": 3}
    assert traffic.over(server.recent.whole(300), NAMES.index("rm"), True)["window"] == {
        name: 2 * count for name, count in told.items()
    }
    server.read(400)
    quiet = traffic.over(server.recent.whole(60), NAMES.index("rm"), True)["window"]
    assert quiet == dict.fromkeys(told, 0)


def test_a_client_that_leaves_is_no_error():
    server = Server()
    server.metrics.add("guerdon_requests", 10, "rm", "ok")
    server.metrics.add("guerdon_requests", 30, "rm", "Cancelled")
    server.metrics.add("guerdon_requests", 20, "rm", "Overloaded")
    server.read(10)
    assert server.told()["requests_per_s"] == pytest.approx(6)
    assert server.told()["errors_per_s"] == pytest.approx(2)


def test_percentiles_beyond_the_last_bound_and_of_nothing():
    counts = np.zeros((2, len(SECONDS) + 1))
    counts[1, -1] = 4
    found = traffic.percentile(counts, 0.5)
    assert math.isnan(found[0])
    assert found[1] == SECONDS[-1]


def test_totals_are_those_since_the_start():
    server = Server()
    server.metrics.add("guerdon_requests", 3, "rm", "ok")
    server.metrics.add("guerdon_requests", 2, "rm", "Overloaded")
    server.metrics.add("guerdon_sequences", 7, "rm", "ok")
    server.metrics.add("guerdon_received_tokens", 70, "rm")
    server.metrics.add("guerdon_out_of_memory", 1, "rm")
    server.metrics.add("guerdon_recheck_sequences", 5, "rm", "same")
    assert traffic.totals(server.metrics.sample(*traffic.METRICS))["rm"] == {
        "requests": {"ok": 3, "Overloaded": 2},
        "sequences": {"ok": 7},
        "received_tokens": 70,
        "computed_tokens": 0,
        "out_of_memory": 1,
        "rechecked": {"same": 5},
    }
