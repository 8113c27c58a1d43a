"""What the page calls drift, length and health, and how it writes numbers: its own functions, with literals."""

from collections.abc import Iterator
from typing import Any

import pytest

import served
from browser.page_servers import settings


@pytest.fixture(scope="module")
def page(chromium: Any) -> Iterator[Any]:
    with served.running(config=settings(None)) as server:
        opened = chromium.new_page()
        opened.goto(server.http_url)
        yield opened


def call(page: Any, module: str, function: str, *args: Any) -> Any:
    return page.evaluate(
        "async ([module, name, args]) => (await import(`/dashboard/${module}.js`))[name](...args)",
        [module, function, list(args)],
    )


def drift(
    ks: float, shift: float, now: tuple[int, float], before: tuple[int, float] | None, num_drawn: int | None = None
) -> dict[str, Any]:
    def side(part: tuple[int, float] | None) -> dict[str, Any] | None:
        if part is None:
            return None
        drawn = part[0] if num_drawn is None else num_drawn
        return {"count": part[0], "mean": 0.0, "std": part[1], "from": 0, "to": 1, "num_drawn": drawn}

    return {"ks": ks, "shift": shift, "window": side(now), "reference": side(before)}


@pytest.mark.parametrize(
    ("told", "level", "text"),
    [
        (drift(0.31, 0.8, (5000, 1), (5000, 1)), "apart", "Shifted by +0.8 standard deviations, KS 0.31"),
        (drift(0.31, -0.8, (5000, 1), (5000, 1)), "apart", "Shifted by −0.8 standard deviations, KS 0.31"),
        (drift(0.03, 0.05, (5000, 1), (5000, 1)), "same", "Same as the reference: +0.1 standard deviations, KS 0.03"),
        (drift(0.2, 0.0, (5000, 1), (5000, 1)), "apart", "Different shape: +0.0 standard deviations, KS 0.20"),
        (
            drift(0.14, 0.0, (20_000, 1), (20_000, 1), num_drawn=256),
            "same",
            "Same as the reference: +0.0 standard deviations, KS 0.14",
        ),
        (
            drift(0.14, 0.0, (20_000, 1), (20_000, 1), num_drawn=2560),
            "apart",
            "Different shape: +0.0 standard deviations, KS 0.14",
        ),
        (drift(0.2, 0.2, (60, 1), (60, 1)), "same", "Same as the reference: +0.2 standard deviations, KS 0.20"),
        (
            drift(0.4, 0.1, (900, 0.1), (900, 1)),
            "apart",
            "Nearly constant: their spread is 10% of the reference's (KS 0.40)",
        ),
        (drift(0.9, 3.0, (49, 1), (900, 1)), "none", "Too few rewards to compare (49 of 50)"),
        (drift(0.9, 3.0, (900, 1), None), "none", "Nothing to compare with yet"),
    ],
    ids=["up", "down", "same", "shape", "few drawn", "many drawn", "by chance", "constant", "few", "alone"],
)
def test_drift_in_words(told: dict[str, Any], level: str, text: str, page: Any) -> None:
    assert call(page, "health", "driftOf", told) == {"level": level, "text": text}


DAY = 86_400


@pytest.mark.parametrize(
    ("reference", "window_s", "started", "text"),
    [
        ("previous", 900, 10 * DAY - 60, "Nothing to compare with yet"),
        ("previous", 900, 0, "Nothing to compare with yet"),
        ("previous", DAY, 0, "The reference is gone: rewards are kept for a day"),
        ("start", 900, 0, "Nothing to compare with yet"),
        (f"0-{9 * DAY - 1}", 900, 0, "The reference is gone: rewards are kept for a day"),
        (f"0-{10 * DAY - 600}", 900, 10 * DAY - 60, "The reference is gone: it is from before the server's start"),
        (f"0-{10 * DAY - 600}", 900, 10 * DAY - 6000, "No rewards came in the reference"),
    ],
)
def test_why_there_is_nothing_to_compare_with(
    reference: str, window_s: int, started: int, text: str, page: Any
) -> None:
    told = call(page, "health", "absence", reference, window_s, {"now": 10 * DAY, "started": started})
    assert told == text


@pytest.mark.parametrize(
    ("spearman", "count", "num_distinct", "level", "begins"),
    [
        (0.62, 500, 500, "high", "Longer sequences score higher: Spearman +0.62"),
        (-0.62, 500, 500, "high", "Shorter sequences score higher: Spearman −0.62"),
        (0.62, 20, 20, "none", "Too few rewards for a correlation (20 of 50)"),
        (1.0, 5000, 2.0, "none", "Too few different sequences for a correlation (2 of 20)"),
        (1.0, 5000, 19.9, "none", "Too few different sequences for a correlation (19 of 20)"),
        (0.62, 5000, 20, "high", "Longer sequences score higher: Spearman +0.62"),
        (0.55, 5000, 20, "fine", "Spearman +0.55"),
        (0.1, 500, 500, "fine", "Spearman +0.10"),
        (None, 500, 500, "none", "No correlation: all lengths or all rewards are the same"),
        (None, 0, 0, "none", "No correlation yet"),
    ],
    ids=["longer", "shorter", "few", "two", "nearly", "enough", "chance", "little", "constant", "none"],
)
def test_length_in_words(
    spearman: float | None, count: int, num_distinct: float, level: str, begins: str, page: Any
) -> None:
    length = {"spearman": spearman, "pearson": spearman, "count": count, "num_distinct": num_distinct}
    told = call(page, "health", "lengthOf", length)
    assert told["level"] == level
    assert told["text"].startswith(begins)


def snapshot(**changes: Any) -> dict[str, Any]:
    lines = {"requests_per_s": [1.0] * 10, "errors_per_s": [0.0] * 10, "sequences_per_s": [8.0] * 10}
    whole: dict[str, Any] = {
        "server": {"is_ready": True, "why": "", "request_timeout_s": 600},
        "models": [{"name": "m", "is_loaded": True}],
        "series": {"from": 0, "step_s": 10, "length": 10, "models": {"m": lines | changes.pop("lines", {})}},
        "totals": {"m": {"sequences": {"ok": 9e6, "failed": 1}, "rechecked": {"differs": 1}, "out_of_memory": 1}},
        "rewards": {},
        "critic": None,
    }
    # What is from before the window stands in no verdict.
    sequences = sum(lines["sequences_per_s"]) * 10
    whole["totals"]["m"]["window"] = {
        "sequences": sequences,
        "failed_sequences": 0,
        "out_of_memory": 0,
        "rechecked_differs": 0,
    }
    whole["totals"]["m"]["window"] |= changes.pop("window", {})
    whole["totals"]["m"]["latency_s"] = {"p50": 0.1, "p90": 0.2, "p99": 0.3, "wait": 0.05, "compute": 0.04}
    whole["totals"]["m"]["latency_s"] |= changes.pop("latency", {})
    return whole | changes


CRITIC = {"fault": None, "is_durable": True, "num_unsaved": 0, "step": 1, "reports": {"explained_variance": []}}


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"server": {"is_ready": False, "why": "a rank was lost"}}, "bad", "Not ready"),
        ({"models": [{"name": "m", "is_loaded": False}]}, "warn", "m is unloaded"),
        ({"lines": {"errors_per_s": [0.05] * 10}}, "warn", "5.0% of requests fail"),
        ({"lines": {"errors_per_s": [0.2] * 10}}, "bad", "20% of requests fail"),
        ({"lines": {"queue_sequences": [800.0] * 10}}, "warn", "The queue is long"),
        ({"window": {"failed_sequences": 3}}, "warn", "3 samples without a score"),
        ({"window": {"failed_sequences": 100}}, "bad", "100 samples without a score"),
        ({"window": {"failed_sequences": 800}}, "bad", "No sample gets a score"),
        ({"window": {"rechecked_differs": 2}}, "bad", "Scores differ from the plain forward"),
        ({"window": {"out_of_memory": 1}}, "warn", "Out of memory"),
        ({"critic": CRITIC | {"fault": "the disk is full"}}, "bad", "The critic has a fault"),
        ({"critic": CRITIC | {"is_durable": False, "num_unsaved": 1}}, "warn", "The critic is not saved"),
        ({"critic": CRITIC | {"reports": {"explained_variance": [-0.5] * 20}}}, "warn", "The critic explains nothing"),
    ],
)
def test_what_is_to_be_looked_at(changes: dict[str, Any], level: str, text: str, page: Any) -> None:
    found = call(page, "health", "findings", snapshot(**changes), "m")
    assert [(one["level"], one["text"]) for one in found] == [(level, text)]


@pytest.mark.parametrize(
    ("latency", "text"),
    [
        ({"p50": 29.5, "wait": 27, "compute": 1}, "Requests wait long"),
        ({"p50": 29.5, "wait": 0.1, "compute": 29}, "Requests are slow"),
        ({"p50": 29.5, "wait": None, "compute": None}, "Requests are slow"),
        ({"p50": 2.5, "wait": 2.4, "compute": 0.1}, "Requests wait long"),
        ({"p50": 2.5, "wait": 1.5, "compute": 1}, None),
        ({"p50": 1.9, "wait": 1.9, "compute": 0.001}, None),
        ({"p50": None, "p99": None, "wait": None, "compute": None}, None),
        ({"p99": 300}, "Requests are close to their timeout"),
    ],
)
def test_how_long_requests_may_take(latency: dict[str, Any], text: str | None, page: Any) -> None:
    found = call(page, "health", "findings", snapshot(latency=latency), "m")
    assert [one["text"] for one in found] == ([] if text is None else [text])


def test_a_slow_request_is_told_in_figures(page: Any) -> None:
    latency = {"p50": 29.5, "p99": 40, "wait": 27, "compute": 1}
    server = {"is_ready": True, "why": "", "request_timeout_s": 60}
    slow, near = call(page, "health", "findings", snapshot(latency=latency, server=server), "m")
    assert slow["detail"] == "half take over 29.5\u00a0s, with a mean wait of 27\u00a0s"
    assert near["detail"] == "1% take over 40\u00a0s; the timeout is 60\u00a0s"
    critic = snapshot(latency={"p99": 40}, server=server, models=[{"name": "m", "is_loaded": True, "is_critic": True}])
    assert call(page, "health", "findings", critic, "m") == [], "a critic's have no time-out"


def test_a_queue_that_stands_still_is_told(page: Any) -> None:
    lines = {"queue_sequences": [0.0] * 5 + [8.0] * 5, "sequences_per_s": [8.0] * 6 + [0.0] * 4}
    (found,) = call(page, "health", "findings", snapshot(lines=lines), "m")
    assert (found["text"], found["detail"]) == (
        "The queue is stuck",
        "8 sequences waiting, and nothing answered for 40\u00a0s",
    )
    lines["sequences_per_s"][-1] = 1.0
    assert call(page, "health", "findings", snapshot(lines=lines), "m") == []


def test_there_are_no_findings_if_all_is_well(page: Any) -> None:
    assert call(page, "health", "findings", snapshot(), "m") == []


def test_one_of_very_many_is_not_told(page: Any) -> None:
    whole = snapshot(window={"sequences": 1e6, "failed_sequences": 1})
    assert call(page, "health", "findings", whole, "m") == []


def test_the_worst_comes_first(page: Any) -> None:
    whole = snapshot(server={"is_ready": False, "why": ""}, window={"out_of_memory": 1})
    assert [one["level"] for one in call(page, "health", "findings", whole, "m")] == ["bad", "warn"]


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        ("number", 0, "0"),
        ("number", 0.123, "0.12"),
        ("number", 12.34, "12.3"),
        ("number", 120, "120"),
        ("number", 999.9, "1k"),
        ("number", 45_200, "45.2k"),
        ("number", -1.5e6, "−1.5M"),
        ("number", 3e-4, "3e−4"),
        ("number", None, "–"),
        ("count", 1458488, "1\u202f458\u202f488"),
        ("reward", -0.456, "−0.46"),
        ("difference", 0.84, "+0.8"),
        ("difference", -0.04, "+0.0"),
        ("difference", -0.05001, "−0.1"),
        ("reward", -0.004, "0.00"),
        ("percent", 0.661, "66%"),
        ("percent", 0.0004, "< 0.1%"),
        ("percent", 0.0512, "5.1%"),
        ("latency", 0.0195, "19.5\u00a0ms"),
        ("latency", 0.00042, "420\u00a0µs"),
        ("latency", 2.5, "2.5\u00a0s"),
        ("span", 0, "0\u00a0s"),
        ("span", 59.6, "1\u00a0min"),
        ("span", 18_222, "5\u00a0h 3\u00a0min"),
        ("windowName", 3600, "hour"),
        ("windowName", 900, "15 minutes"),
    ],
)
def test_numbers_are_written_for_people(function: str, value: float | None, text: str, page: Any) -> None:
    assert call(page, "format", function, value) == text


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [(0, 10, [0, 5, 10]), (-2, 4, [-2, 0, 2, 4]), (0, 0.03, [0, 0.01, 0.02, 0.03]), (5, 5, [5])],
)
def test_axes_have_round_numbers(low: float, high: float, want: list[float], page: Any) -> None:
    assert call(page, "scale", "ticks", low, high, 4) == pytest.approx(want)


def test_an_axis_of_small_shares_has_different_numbers(page: Any) -> None:
    assert [call(page, "format", "percent", share, 4) for share in (0, 2e-4, 4e-4)] == ["0%", "0.02%", "0.04%"]


@pytest.mark.parametrize(("low", "high"), [(-0.28, 0.22), (0, 0.52), (0.401, 0.447), (0, 6), (-100, -1)])
def test_an_axis_has_a_number_at_both_ends(low: float, high: float, page: Any) -> None:
    ends = call(page, "scale", "rounded", low, high, 3)
    assert ends[0] <= low < high <= ends[1]
    found = call(page, "scale", "ticks", *ends, 4)
    assert [found[0], found[-1]] == pytest.approx(ends) and 3 <= len(found) <= 6
    assert ends[1] - ends[0] <= 2 * (high - low), "little of the height is empty"


def test_a_line_that_only_rounding_moves_is_flat(page: Any) -> None:
    height = page.evaluate(
        """async () => {
          const { Lines } = await import("/dashboard/lines.js");
          const host = document.createElement("div");
          document.querySelector("main").append(host);
          const chart = new Lines(host, { label: "a constant", fromZero: false });
          const series = [{ kind: "accent", name: "a", values: [0.5, 0.5 + 1e-8] }];
          chart.update({ x: [0, 1], from: 0, to: 1, series });
          const { height } = host.querySelector("path.line").getBBox();
          host.remove();
          return height;
        }"""
    )
    assert height < 1


@pytest.mark.parametrize("low", [0, 30, 59, 119])
@pytest.mark.parametrize("length", [60, 205, 300, 900, 3600, 86_400])
def test_an_axis_of_time_has_two_moments_at_least(low: float, length: float, page: Any) -> None:
    start = 1_700_000_000 + low
    found = call(page, "scale", "timeTicks", start, start + length, 2)["at"]
    assert 2 <= len(found) <= 5 and found[0] >= start and found[-1] <= start + length


def test_the_numbers_of_an_axis_are_told_apart(page: Any) -> None:
    assert [call(page, "scale", "decimals", marks) for marks in ([0.5, 0.505], [0, 0.2], [0, 5], [3])] == [3, 1, 0, 0]


def test_a_step_stands_behind_its_last_token(page: Any) -> None:
    result = {
        "tokens": [{"text": text, "value": None, "in_prompt": False} for text in ("one", "\n", "two", "\n")],
        "steps": [{"index": 1, "reward": 0.9}, {"index": 3, "reward": 0.1}],
    }
    shown = page.evaluate(
        """async (result) => {
          const { heatText, rangeOf } = await import("/dashboard/tokens.js");
          const text = heatText(result, rangeOf([result]), "a response");
          const nodes = [...text.querySelectorAll("span")].map((node) => [node.textContent, node.className]);
          return [...nodes, text.querySelector(".told").textContent];
        }""",
        result,
    )
    assert shown == [
        ["one", "token"],
        ["\n", "token"],
        ["0.90", "step high"],
        ["two", "token"],
        ["\n", "token"],
        ["0.10", "step low"],
        "4 tokens in 2 steps; each step's reward follows it.",
    ]
