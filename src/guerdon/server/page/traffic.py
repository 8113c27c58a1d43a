"""Keeps the counters of all models over a day: rates, percentiles and fills made of them, and errors by kind.

Pure: no clock.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from guerdon import errors
from guerdon.server.metrics import SECONDS
from guerdon.server.page.history import TakenBuckets, TimedBuckets

MAX_POINTS = 300
"""Maximum of points per series."""

FINE_S, FINE_COUNT = 2.0, 3700
"""Interval of readings; they may come twice as often while a page is open, so they cover an hour at least."""
COARSE_S, COARSE_COUNT = 60.0, 1500
FINE_WINDOW_S = 3600.0


@dataclass(frozen=True, eq=False)
class Window:
    """N steps of `step_s` seconds from `start`; `values` are the counters at their bounds, float64 `[N+1, W]`.

    `times` are the bounds, float64 `[N+1]`, as far as there are readings: a step without any has no length.
    """

    start: float
    step_s: float
    times: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.times) - 1

    def increases(self) -> np.ndarray:
        """Returns the growth of each counter in each step, float64 `[N, W]`."""
        return np.diff(self.values, axis=0)

    def seconds(self) -> np.ndarray:
        """Returns the seconds of each step that readings cover, float64 `[N, 1]`; NaN without readings."""
        seconds = np.diff(self.times)[:, None]
        return np.where(seconds > 0, seconds, np.nan)


class Ring:
    """The last `count` readings of `width` counters."""

    def __init__(self, count: int, width: int) -> None:
        self._times = np.zeros(count)
        self._values = np.zeros((count, width))
        self._num_added = 0

    def __len__(self) -> int:
        return min(self._num_added, len(self._times))

    def add(self, time: float, values: np.ndarray, *, replaces_last: bool = False) -> None:
        """Adds a reading, later than all others; evicts the oldest if full."""
        self._num_added -= replaces_last
        i = self._num_added % len(self._times)
        self._times[i], self._values[i] = time, values
        self._num_added += 1

    def time(self, back: int = 1) -> float:
        """Returns the time of the last reading, or of the one so many back; 0 without one."""
        return float(self._times[(self._num_added - back) % len(self._times)]) if self._num_added >= back else 0.0

    def at(self, bounds: np.ndarray, columns: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Clips the times to the readings; returns them and the counters, interpolated between readings.

        There must be one; the counters are those of the `columns`.
        """
        order = np.arange(self._num_added - len(self), self._num_added) % len(self._times)
        times = self._times[order]
        bounds = np.clip(bounds, times[0], times[-1])
        if len(times) == 1:
            return bounds, np.repeat(self._values[order, columns], len(bounds), axis=0)
        after = np.clip(np.searchsorted(times, bounds, "right"), 1, len(times) - 1)
        share = ((bounds - times[after - 1]) / (times[after] - times[after - 1]))[:, None]
        before_values, after_values = self._values[order[after - 1], columns], self._values[order[after], columns]
        return bounds, before_values + share * (after_values - before_values)


class CounterHistory:
    """Readings of `width` counters over a day."""

    def __init__(self, width: int) -> None:
        self._fine = Ring(FINE_COUNT, width)
        self._coarse = Ring(COARSE_COUNT, width)

    @property
    def last(self) -> float:
        """Returns the time of the last reading, 0 without one."""
        return self._fine.time()

    def add(self, time: float, values: np.ndarray) -> None:
        """Adds a reading, float64 `[W]`, if it is later than the last."""
        if len(self._fine) and time <= self._fine.time():
            return
        self._fine.add(time, values)
        replaces = time - self._coarse.time(2) < COARSE_S  # so that the last one is always there
        self._coarse.add(time, values, replaces_last=replaces)

    def window(self, window_s: float, columns: slice = slice(None), until: float | None = None) -> Window:
        """Returns the last seconds, `until` then, in at most MAX_POINTS steps; the last step may be incomplete.

        There must be a reading; the counters are those of the `columns`.
        """
        ring, step_s, bounds = self._steps(window_s, until)
        return Window(float(bounds[0]), step_s, *ring.at(bounds, columns))

    def whole(self, window_s: float, until: float | None = None) -> Window:
        """Returns `window` as one step."""
        ring, _, bounds = self._steps(window_s, until)
        ends = bounds[[0, -1]]
        return Window(float(ends[0]), float(ends[1] - ends[0]), *ring.at(ends))

    def _steps(self, window_s: float, until: float | None) -> tuple[Ring, float, np.ndarray]:
        until = self._fine.time() if until is None else min(until, self._fine.time())
        is_fine = window_s + self._fine.time() - until <= FINE_WINDOW_S
        ring, unit_s = (self._fine, FINE_S) if is_fine else (self._coarse, COARSE_S)
        step_s = unit_s * max(1, int(np.ceil(window_s / MAX_POINTS / unit_s)))
        count = max(1, int(np.ceil(window_s / step_s)))
        end = np.ceil(until / step_s) * step_s
        return ring, step_s, end - step_s * np.arange(count, -1, -1)


Sample = tuple[str, Mapping[str, str], float]
"""Name, labels and value of a Prometheus sample."""

_FAILINGS = ("failed_sequences", "out_of_memory", "rechecked_differs")
_COUNTERS = (
    *("requests", "errors", "sequences", "received_tokens", "computed_tokens", "batches", "batch_sequences"),
    *("answered", "waited_s", "computed_s"),
    *_FAILINGS,
)
_LEVELS = ("queue_sequences", "queue_tokens", "budget_tokens")
"""Levels are kept as integrals over time, so that any window has its own mean."""

_COLUMNS = {name: i for i, name in enumerate((*_COUNTERS, *_LEVELS))}
_BOUNDS = np.array([0.0, *SECONDS])
_LATENCY = len(_COLUMNS)
WIDTH = _LATENCY + len(SECONDS) + 1
"""Columns per model: the named ones, and one per latency bucket."""

_OF_SAMPLES = {
    "guerdon_sequences_total": "sequences",
    "guerdon_received_tokens_total": "received_tokens",
    "guerdon_computed_tokens_total": "computed_tokens",
    "guerdon_batch_sequences_count": "batches",
    "guerdon_batch_sequences_sum": "batch_sequences",
    "guerdon_out_of_memory_total": "out_of_memory",
    "guerdon_request_queue_time_seconds_count": "answered",
    "guerdon_request_queue_time_seconds_sum": "waited_s",
    "guerdon_request_inference_time_seconds_sum": "computed_s",
}
_OF_JUDGES = {
    "guerdon_judge_calls_in_progress": "in_progress",
    "guerdon_judge_kept_answers_total": "kept_answers",
    "guerdon_judge_parse_failures_total": "unreadable_answers",
    "guerdon_judge_prompt_tokens_total": "prompt_tokens",
    "guerdon_judge_completion_tokens_total": "completion_tokens",
    "guerdon_judge_cost_total": "cost",
    "guerdon_judge_budget_used": "budget_used",
    "guerdon_judge_call_seconds_sum": "seconds",
    "guerdon_judge_call_seconds_count": "timed",
}
_UNKNOWN = ("cost", "budget_used")
"""Without prices there is no cost, and without a budget no share of it."""

METRICS = (
    *dict.fromkeys(re.sub("_(total|sum|count)$", "", sample) for sample in (*_OF_SAMPLES, *_OF_JUDGES)),
    *("guerdon_requests", "guerdon_batch_budget_tokens", "guerdon_e2e_request_latency_seconds"),
    *("guerdon_recheck_sequences", "guerdon_judge_calls"),
)
"""The metrics that the page reads."""

FINE = ("ok", "Cancelled")
"""Outcomes that do not count as errors, such as a disconnect."""

_QUANTILES = {"latency_p50_s": 0.5, "latency_p90_s": 0.9, "latency_p99_s": 0.99}


class CounterReader:
    """Turns samples of the registry into one row of counters, `[models x WIDTH]`, for the named models."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._rows = {name: i for i, name in enumerate(names)}
        self._levels = np.zeros((len(self.names), len(_LEVELS)))
        self._time: float | None = None

    def read(self, time: float, samples: Iterable[Sample], queue: Mapping[str, tuple[int, int]]) -> np.ndarray:
        """Returns the current counters; `queue` has waiting sequences and tokens by model."""
        counters, budgets = np.zeros((len(self.names), WIDTH)), np.zeros(len(self.names))
        for name, labels, value in samples:
            row = self._rows.get(labels.get("model", ""))
            if row is None:
                continue
            if name in _OF_SAMPLES:
                counters[row, _COLUMNS[_OF_SAMPLES[name]]] += value
                if name == "guerdon_sequences_total":
                    counters[row, _COLUMNS["failed_sequences"]] += value * (labels["outcome"] != "ok")
            elif name == "guerdon_requests_total":
                counters[row, _COLUMNS["requests"]] += value
                counters[row, _COLUMNS["errors"]] += value * (labels["outcome"] not in FINE)
            elif name == "guerdon_recheck_sequences_total":
                counters[row, _COLUMNS["rechecked_differs"]] += value * (labels["outcome"] == "differs")
            elif name == "guerdon_batch_budget_tokens":
                budgets[row] = value
            elif name == "guerdon_e2e_request_latency_seconds_bucket":
                counters[row, _LATENCY + int(np.searchsorted(SECONDS, float(labels["le"])))] += value
        seconds = 0.0 if self._time is None else time - self._time
        waiting = np.array([queue.get(name, (0, 0)) for name in self.names], np.float64).reshape(-1, 2)
        self._levels += seconds * np.column_stack([waiting, budgets])
        self._time = time
        counters[:, len(_COUNTERS) : _LATENCY] = self._levels
        return counters.reshape(-1)


def series(window: Window, row: int, is_computed: bool) -> dict[str, np.ndarray]:
    """Returns the series of the model in `row`, float64 `[N]` each; NaN if unknown.

    A sum is not computed itself: tokens, queue and batches are unknown, its components have them.
    """
    grown, seconds = window.increases()[:, row * WIDTH : (row + 1) * WIDTH], window.seconds()

    def of(name: str) -> np.ndarray:
        return grown[:, _COLUMNS[name]] if is_computed or name in ("requests", "errors", "sequences") else nothing

    nothing = np.full(len(window), np.nan)
    rates = {
        "requests_per_s": "requests",
        "errors_per_s": "errors",
        "sequences_per_s": "sequences",
        "received_tokens_per_s": "received_tokens",
        "computed_tokens_per_s": "computed_tokens",
        "queue_sequences": "queue_sequences",
        "queue_tokens": "queue_tokens",
    }
    told = {name: of(column) / seconds[:, 0] for name, column in rates.items()}
    told |= {name: percentile(grown[:, _LATENCY:], share) for name, share in _QUANTILES.items()}
    told["batch_sequences"] = _ratio(of("batch_sequences"), of("batches"))
    tokens = _ratio(of("computed_tokens"), of("batches"))
    told["batch_fill"] = _ratio(tokens, of("budget_tokens") / seconds[:, 0])
    return told


def over(window: Window, row: int, is_computed: bool) -> dict[str, Any]:
    """Returns latencies, batch fill and failures over a window of one step; NaN if unknown.

    `wait` and `compute` are the means of the answered requests, in seconds.
    """
    told = series(window, row, is_computed)
    latency = {name.split("_")[1]: told[name][0] for name in _QUANTILES}
    grown = window.increases()[0, row * WIDTH : (row + 1) * WIDTH]
    for name, column in {"wait": "waited_s", "compute": "computed_s"}.items():
        latency[name] = float(_ratio(grown[_COLUMNS[column]], grown[_COLUMNS["answered"]]))
    failings = {name: round(grown[_COLUMNS[name]]) for name in ("sequences", *_FAILINGS)}
    return {"latency_s": latency, "batch_fill": told["batch_fill"][0], "window": failings}


def empty() -> dict[str, Any]:
    """Returns the totals of a model without requests."""
    counts = {"received_tokens": 0, "computed_tokens": 0, "out_of_memory": 0}
    return {"requests": {}, "sequences": {}, **counts, "rechecked": {}}


def totals(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """Returns the totals since the start, by model."""
    found: dict[str, dict[str, Any]] = {}
    for name, labels, value in samples:
        if "model" not in labels or not name.endswith("_total"):
            continue
        told = found.setdefault(labels["model"], empty())
        what = name.removeprefix("guerdon_").removesuffix("_total")
        what = "rechecked" if what == "recheck_sequences" else what
        if what not in told:
            continue
        if isinstance(told[what], dict):
            told[what][labels["outcome"]] = told[what].get(labels["outcome"], 0) + int(value)
        else:
            told[what] += int(value)
    return found


def judge_calls(samples: Iterable[Sample], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the calls of these judges in words by outcome since the start, with their time, cost and answers."""
    nothing = dict.fromkeys(_OF_JUDGES.values(), 0.0) | dict.fromkeys(_UNKNOWN, np.nan)
    found: dict[str, dict[str, Any]] = {name: {"outcomes": {}} | nothing for name in names}
    for metric, labels, value in samples:
        told = found.get(labels.get("model", ""))
        if told is None:
            continue
        if metric == "guerdon_judge_calls_total":
            told["outcomes"][labels["outcome"]] = int(value)
        elif metric in _OF_JUDGES:
            told[_OF_JUDGES[metric]] = value
    for told in found.values():
        seconds, timed = told.pop("seconds"), told.pop("timed")
        told["mean_s"] = seconds / timed if timed else np.nan
    return found


def percentile(counts: np.ndarray, share: float) -> np.ndarray:
    """Returns a percentile of latencies from bucket counts, float64 `[N]`; NaN without requests.

    `counts` are cumulative, float64 `[N, bounds + 1]`. Interpolates linearly within a bucket, as Prometheus'
    histogram_quantile does.
    """
    rank = share * counts[:, -1]
    at = (counts >= rank[:, None]).argmax(axis=1)
    rows = np.arange(len(counts))
    below = np.where(at > 0, counts[rows, np.maximum(at - 1, 0)], 0.0)
    inside = counts[rows, at] - below
    low, high = _BOUNDS[np.minimum(at, len(SECONDS))], _BOUNDS[np.minimum(at + 1, len(SECONDS))]
    with np.errstate(invalid="ignore", divide="ignore"):
        found = low + (high - low) * np.where(inside > 0, (rank - below) / inside, 1.0)
    return np.where(counts[:, -1] > 1e-9, found, np.nan)


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(b > 1e-9, a / b, np.nan)


# --- errors --------------------------------------------------------------------------------------------------------

Kind = tuple[str, str]
"""The failed unit, `request` or `sample`, and the error's class."""


class RecentErrors:
    """The errors of every model over the last day, without texts: failed requests, and samples without a score."""

    def __init__(self) -> None:
        self._kept: dict[str, TimedBuckets[Counter[Kind]]] = {}
        self._latest: dict[str, dict[Kind, float]] = {}
        self._counted: dict[tuple[str, str], float] = {}

    def read(self, time: float, samples: Iterable[Sample]) -> None:
        """Adds the failed requests since the last reading; `samples` are the registry's."""
        for name, labels, value in samples:
            if name != "guerdon_requests_total" or labels["outcome"] in FINE:
                continue
            model, outcome = labels["model"], labels["outcome"]
            if grown := round(value - self._counted.get((model, outcome), 0.0)):
                self._counted[model, outcome] = value
                self._add(model, time, ("request", outcome), grown)

    def note(self, model: str, time: float, results: Iterable[object]) -> None:
        """Adds the samples of an answered request that have an error instead of a score."""
        kinds = Counter(type(one).__name__ for one in results if isinstance(one, errors.GuerdonError))
        for kind, count in kinds.items():
            self._add(model, time, ("sample", kind), count)

    def _add(self, model: str, time: float, kind: Kind, count: int) -> None:
        self._kept.setdefault(model, TimedBuckets()).add(time, Counter({kind: count}))
        self._latest.setdefault(model, {})[kind] = time

    def taken(self, names: Iterable[str], start: float, now: float) -> list[TakenErrors]:
        """Returns the errors of these models since then."""
        return [
            TakenErrors(self._kept[name].taken(start, now), self._latest[name].copy())
            for name in names
            if name in self._kept
        ]


class TakenErrors:
    """A copy of one model's errors, readable on any thread."""

    def __init__(self, sums: TakenBuckets[Counter[Kind]], latest: dict[Kind, float]) -> None:
        self._sums, self._latest = sums, latest

    def tell(self, start: float, step_s: float, count: int) -> list[dict[str, Any]]:
        """Returns each kind's number in each of `count` periods, and when it came last; the most frequent first."""
        columns = self._sums.columns(start, step_s, count)
        told = []
        for kind in {kind for column in columns if column for kind in column}:
            counts = [column[kind] if column else 0 for column in columns]
            of, name = kind
            cls: type[errors.GuerdonError] = getattr(errors, name)
            told.append(
                {
                    "of": of,
                    "kind": name,
                    "what": (cls.__doc__ or "").partition("\n")[0],
                    "http": cls.http,
                    "count": sum(counts),
                    "counts": counts,
                    "last": self._latest[kind],
                }
            )
        return sorted(told, key=lambda one: (-one["count"], one["of"], one["kind"]))
