"""Triton's own metrics and statistics, derived from guerdon's when they are read.

https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/metrics.html defines them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from guerdon.errors import Cancelled, DeadlineExceeded, NoVerdict, Overloaded, SampleFailed, ServerFault, TrainFailed
from guerdon.server.metrics import UNKNOWN, Metrics
from guerdon.wire.signature import MODEL_VERSION, Duration, ModelStatistics

REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_REASON = {
    Overloaded.__name__: "REJECTED",
    DeadlineExceeded.__name__: "REJECTED",
    Cancelled.__name__: "CANCELED",
    SampleFailed.__name__: "BACKEND",
    NoVerdict.__name__: "BACKEND",
    ServerFault.__name__: "BACKEND",
    TrainFailed.__name__: "BACKEND",
}


@dataclass(frozen=True, slots=True)
class TritonMetric:
    """One of Triton's metrics: its Prometheus type, its help text, and the metric of ours behind it."""

    kind: str
    text: str
    source: str


TABLE: dict[str, TritonMetric] = {
    "nv_inference_request_success": TritonMetric(
        "counter", "Answered requests.", "`guerdon_requests_total` with outcome `ok`"
    ),
    "nv_inference_request_failure": TritonMetric(
        "counter",
        "Failed requests, by reason: REJECTED (queue full or deadline exceeded), CANCELED, BACKEND or OTHER.",
        "`guerdon_requests_total` with the other outcomes",
    ),
    "nv_inference_count": TritonMetric("counter", "Sequences computed.", "sum of `guerdon_batch_sequences`"),
    "nv_inference_exec_count": TritonMetric("counter", "Batches computed.", "count of `guerdon_batch_sequences`"),
    "nv_inference_request_duration_us": TritonMetric(
        "counter",
        "Microseconds from a request's headers to its answer, summed over answered requests.",
        "`guerdon_e2e_request_latency_seconds` of requests with outcome `ok`",
    ),
    "nv_inference_queue_duration_us": TritonMetric(
        "counter",
        "Microseconds in the queue, including tokenization, summed over answered requests.",
        "sum of `guerdon_request_queue_time_seconds`",
    ),
    "nv_inference_compute_infer_duration_us": TritonMetric(
        "counter",
        "Microseconds of the batches that contained parts of a request, summed over answered requests.",
        "sum of `guerdon_request_inference_time_seconds`",
    ),
    "nv_inference_pending_request_count": TritonMetric(
        "gauge", "Requests of which nothing has been computed yet.", "`guerdon_num_requests_waiting`"
    ),
}

_Values = dict[tuple[str, ...], float]


class Family:
    """Triton's metrics of all `names`; `requests` returns the numbers of running and waiting requests by model."""

    def __init__(
        self, metrics: Metrics, names: Iterable[str], requests: Callable[[], dict[str, tuple[int, int]]]
    ) -> None:
        self._metrics = metrics
        self._names = sorted(names)
        self._requests = requests

    def text(self) -> str:
        """Returns the metrics in Prometheus' text format; as in Triton, counters do not end in `_total`."""
        lines = []
        for metric, values in self._values().items():
            lines.append(f"# HELP {metric} {TABLE[metric].text}\n# TYPE {metric} {TABLE[metric].kind}\n")
            for (name, *reason), value in values.items():
                labels = "".join(f',reason="{text}"' for text in reason)
                lines.append(f'{metric}{{model="{_escaped(name)}"{labels},version="{MODEL_VERSION}"}} {value:.0f}\n')
        return "".join(lines)

    def statistics(self, names: Iterable[str]) -> list[ModelStatistics]:
        """Returns the `model_stats` of Triton's statistics extension.

        Decoding and encoding are not measured separately: `compute_input` and `compute_output` are 0 ns.
        """
        values, total_s = self._values(), self._metrics.totals("guerdon_e2e_request_latency_seconds", "_sum")
        now, now_ms = time.monotonic(), time.time() * 1e3
        found: list[ModelStatistics] = []
        for name in names:

            def of(metric: str, name: str = name) -> float:
                return values[f"nv_inference_{metric}"].get((name,), 0.0)

            answered = of("request_success")
            failed = sum(values["nv_inference_request_failure"][name, reason] for reason in REASONS)
            answered_us = of("request_duration_us")
            last = self._metrics.last_request.get(name)
            found.append(
                {
                    "name": name,
                    "version": MODEL_VERSION,
                    "last_inference": 0 if last is None else round(now_ms - (now - last) * 1e3),
                    "inference_count": int(of("count")),
                    "execution_count": int(of("exec_count")),
                    "inference_stats": {
                        "success": _duration(answered, answered_us),
                        "fail": _duration(failed, max(0.0, total_s.get((name,), 0.0) * 1e6 - answered_us)),
                        "queue": _duration(answered, of("queue_duration_us")),
                        "compute_input": _duration(answered, 0),
                        "compute_infer": _duration(answered, of("compute_infer_duration_us")),
                        "compute_output": _duration(answered, 0),
                        "cache_hit": _duration(0, 0),
                        "cache_miss": _duration(0, 0),
                    },
                    "batch_stats": [],
                }
            )
        return found

    def _values(self) -> dict[str, _Values]:
        names, totals = self._names, self._metrics.totals
        answered: _Values = {}
        failed: _Values = {(name, reason): 0.0 for name in names for reason in REASONS}
        for (name, outcome), count in totals("guerdon_requests", "_total").items():
            if outcome == "ok":
                answered[name,] = count
            elif name != UNKNOWN:
                failed[name, _REASON.get(outcome, "OTHER")] += count

        def of(values: _Values, scale: float = 1.0) -> _Values:
            return {(name,): values.get((name,), 0.0) * scale for name in names}

        return {
            "nv_inference_request_success": of(answered),
            "nv_inference_request_failure": failed,
            "nv_inference_count": of(totals("guerdon_batch_sequences", "_sum")),
            "nv_inference_exec_count": of(totals("guerdon_batch_sequences", "_count")),
            "nv_inference_request_duration_us": of({(k,): v for k, v in self._metrics.answered_s.items()}, 1e6),
            "nv_inference_queue_duration_us": of(totals("guerdon_request_queue_time_seconds", "_sum"), 1e6),
            "nv_inference_compute_infer_duration_us": of(totals("guerdon_request_inference_time_seconds", "_sum"), 1e6),
            "nv_inference_pending_request_count": {(name,): num for name, (_, num) in self._requests().items()},
        }


def _duration(count: float, total_us: float) -> Duration:
    return {"count": int(count), "ns": round(total_us * 1e3)}


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
