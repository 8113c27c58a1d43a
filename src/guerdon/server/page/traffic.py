"""Computes the page's rates, percentiles and fills from the counters of all models. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from guerdon.server.metrics import SECONDS
from guerdon.server.page.recent import Window

Sample = tuple[str, Mapping[str, str], float]
"""Name, labels and value of a Prometheus sample."""

METRICS = (
    "guerdon_requests",
    "guerdon_sequences",
    "guerdon_received_tokens",
    "guerdon_computed_tokens",
    "guerdon_batch_sequences",
    "guerdon_batch_budget_tokens",
    "guerdon_e2e_request_latency_seconds",
    "guerdon_request_queue_time_seconds",
    "guerdon_request_inference_time_seconds",
    "guerdon_out_of_memory",
    "guerdon_recheck_sequences",
)
"""The metrics that the page reads."""

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
_FINE = ("ok", "Cancelled")
"""Outcomes that do not count as errors, such as a disconnect."""

_QUANTILES = {"latency_p50_s": 0.5, "latency_p90_s": 0.9, "latency_p99_s": 0.99}


class Reading:
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
                counters[row, _COLUMNS["errors"]] += value * (labels["outcome"] not in _FINE)
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
    told["batch_fill"] = _fill(of("computed_tokens"), of("batches"), of("budget_tokens") / seconds[:, 0])
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


def _fill(tokens: np.ndarray, batches: np.ndarray, budget: np.ndarray) -> np.ndarray:
    return _ratio(_ratio(tokens, batches), budget)


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(b > 1e-9, a / b, np.nan)
