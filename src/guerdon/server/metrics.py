"""Every counter, gauge and histogram, in one table; as Prometheus text.

Names and units are as Prometheus has them, and as vLLM's where it has the same; Triton's own are made of these in
`server/triton.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from guerdon.core import ModelInfo, ScoreReply
from guerdon.errors import Cancelled, ChildEnded, GuerdonError, ServerFault

log = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""The label of every model that is not served, because clients may send any number of names."""

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
DIFFERENCES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10)
MASSES = (1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric: its section in docs/metrics.md, kind, help text, labels and buckets."""

    section: str
    kind: type[Counter] | type[Gauge] | type[Histogram]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_VERB = {Counter: "inc", Gauge: "set", Histogram: "observe"}
_M, _C = ("model",), ("critic",)

TABLE: dict[str, Definition] = {
    "guerdon_requests": Definition("traffic", Counter,
        "Scoring and critic requests, by outcome: ok or the error class.", ("model", "outcome")),
    "guerdon_client_requests": Definition("traffic", Counter,
        "All requests by the key's holder (unknown: wrong key); only with keys.", ("client", "outcome")),
    "guerdon_sequences": Definition("traffic", Counter,
        "Answered sequences, by outcome: ok or failed.", ("model", "outcome")),
    "guerdon_received_tokens": Definition("shared prompts", Counter,
        "Tokens of the accepted sequences of answered requests.", _M),
    "guerdon_computed_tokens": Definition("shared prompts", Counter,
        "Computed tokens (estimate): a prefix shared within a batch counts once.", _M),
    "guerdon_e2e_request_latency_seconds": Definition("latency", Histogram,
        "From the complete request head to the answer or error.", _M, SECONDS),
    "guerdon_request_queue_time_seconds": Definition("latency", Histogram,
        "From the decoded request until its last sequence starts; includes tokenising.", _M, SECONDS),
    "guerdon_request_inference_time_seconds": Definition("latency", Histogram,
        "Time of the batches with sequences of one request.", _M, SECONDS),
    "guerdon_batch_seconds": Definition("batches", Histogram, "Time of one batch.", _M, SECONDS),
    "guerdon_batch_sequences": Definition("batches", Histogram, "Sequences in one batch.", _M, COUNTS),
    "guerdon_batch_budget_tokens": Definition("batches", Gauge,
        "Token budget of a batch; lowered temporarily when out of memory.", _M),
    "guerdon_out_of_memory": Definition("errors", Counter, "Forwards that ran out of memory.", _M),
    "guerdon_recheck_sequences": Definition("errors", Counter,
        "Rechecked sequences, by outcome: same, differs or failed.", ("model", "outcome")),
    "guerdon_recheck_difference": Definition("errors", Histogram,
        "Largest absolute difference of a rechecked sequence's scores.", _M, DIFFERENCES),
    "guerdon_component_mean": Definition("sums of rewards", Gauge,
        "Mean of a component's unnormalised rewards since the start.", ("model", "component")),
    "guerdon_component_std": Definition("sums of rewards", Gauge,
        "Population standard deviation of a component's unnormalised rewards.", ("model", "component")),
    "guerdon_judge_other_mass": Definition("judges", Histogram,
        "Probability mass outside the labels, per sample and criterion.", ("model", "criterion"), MASSES),
    "guerdon_judge_comparisons": Definition("judges", Counter,
        "Successful verdicts of judges that compare, each from both orders.", ("model", "criterion")),
    "guerdon_judge_disagreements": Definition("judges", Counter,
        "Verdicts on which the two orders disagreed: ties.", ("model", "criterion")),
    "guerdon_groups": Definition("judges", Counter,
        "Groups of single calls, by outcome: whole, incomplete (judged all the same) or failed.", ("model", "outcome")),
    "guerdon_judge_calls": Definition("judges in words", Counter,
        "Calls by outcome: answered, refused, cut, unusable (incomplete text), timeout, unreachable, malformed, "
        "status_429 and the like, abandoned (shutdown).", ("model", "outcome")),
    "guerdon_judge_call_seconds": Definition("judges in words", Histogram, "Time of one call.", _M, SECONDS),
    "guerdon_judge_calls_in_progress": Definition("judges in words", Gauge, "Calls in progress.", _M),
    "guerdon_judge_kept_answers": Definition("judges in words", Counter, "Cache hits.", _M),
    "guerdon_judge_parse_failures": Definition("judges in words", Counter,
        "Unreadable answers, including refused and cut ones.", _M),
    "guerdon_judge_prompt_tokens": Definition("judges in words", Counter,
        "Prompt tokens reported by the judge's server.", _M),
    "guerdon_judge_completion_tokens": Definition("judges in words", Counter,
        "Answer tokens reported by the judge's server.", _M),
    "guerdon_judge_cost": Definition("judges in words", Counter,
        "Cost of prompt and answer tokens; only with prices.", _M),
    "guerdon_judge_budget_used": Definition("judges in words", Gauge,
        "Used share of the budget (the largest of calls, tokens, cost) over the cache's life; only with a budget.", _M),
    "guerdon_isolated_ends": Definition("isolated functions", Counter,
        "Samples that ended with their child process, by reason.", ("model", "reason")),
    "guerdon_train_requests": Definition("critic", Counter,
        "Train requests, by outcome: ok, known (answered again) or the error class.", ("critic", "outcome")),
    "guerdon_train_steps": Definition("critic", Counter,
        "Optimiser steps, by outcome: done, or skipped (non-finite gradient).", ("critic", "outcome")),
    "guerdon_train_tokens": Definition("critic", Counter, "Trained tokens.", _C),
    "guerdon_train_seconds": Definition("critic", Histogram, "Time of one train request on the device.", _C, SECONDS),
    "guerdon_journal_seconds": Definition("critic", Histogram, "Time to write a train request to disk.", _C, SECONDS),
    "guerdon_checkpoint_seconds": Definition("critic", Histogram,
        "Time of one checkpoint, including verification.", _C, SECONDS),
    "guerdon_critic_loss": Definition("critic", Gauge, "Loss of the last train request.", _C),
    "guerdon_critic_clip_fraction": Definition("critic", Gauge,
        "Share of tokens with a clipped value in the last train request.", _C),
    "guerdon_critic_explained_variance": Definition("critic", Gauge,
        "Share of the returns' variance explained by the values, before the last train request's update.", _C),
    "guerdon_critic_value_mean": Definition("critic", Gauge,
        "Mean value over the last train request's tokens, before its update.", _C),
    "guerdon_critic_return_mean": Definition("critic", Gauge, "Mean return over the last train request's tokens.", _C),
    "guerdon_critic_grad_norm": Definition("critic", Gauge,
        "Gradient norm of the last optimiser step, before clipping.", _C),
    "guerdon_critic_learning_rate": Definition("critic", Gauge, "Learning rate of the last optimiser step.", _C),
    "guerdon_critic_step": Definition("critic", Gauge, "Optimiser steps done.", _C),
    "guerdon_critic_unsaved": Definition("critic", Gauge, "Train requests since the newest checkpoint.", _C),
    "guerdon_critic_offloaded": Definition("critic", Gauge, "1 while offloaded.", _C),
    "guerdon_critic_fault": Definition("critic", Gauge, "1 if the weights are corrupt, until a restart.", _C),
    "guerdon_ranks": Definition("ranks", Gauge, "Data-parallel parts, and tensor-parallel ranks of each.", ("kind",)),
    "guerdon_broadcast_seconds": Definition("ranks", Histogram,
        "Time to send a command to every rank.", ("command",), SECONDS),
    "guerdon_gather_seconds": Definition("ranks", Histogram,
        "Time from rank 0's outcome of a command until all ranks' outcomes arrived.", ("command",), SECONDS),
}  # fmt: skip
"""Metrics that are recorded as events happen; a counter's exposed name ends in `_total`."""

COLLECTED: dict[str, Definition] = {
    "guerdon_num_requests_running": Definition("queue", Gauge,
        "Requests in computation, including a critic's operations.", _M),
    "guerdon_num_requests_waiting": Definition("queue", Gauge, "Requests without a started sequence.", _M),
    "guerdon_queue_sequences": Definition("queue", Gauge, "Waiting sequences.", _M),
    "guerdon_queue_tokens": Definition("queue", Gauge, "Waiting tokens.", _M),
    "guerdon_model_info": Definition("models", Gauge,
        "1 per served model; the labels describe it.", ("model", "kind", "dtype", "device", "path", "weights_version")),
}  # fmt: skip
"""Metrics that are computed when they are read."""


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for name, made in TABLE.items():
            extra: dict[str, Any] = {"buckets": made.buckets} if made.buckets else {}
            self._metrics[name] = made.kind(name, made.text, made.labels, registry=self._registry, **extra)
        ProcessCollector(registry=self._registry)
        self._calls = _Calls(self._metrics)
        self._failures = FailureLog()
        self._others: Callable[[], str] | None = None
        self.answered_s: dict[str, float] = {}
        """Latencies of successful requests, by model."""
        self.last_request: dict[str, float] = {}
        """Monotonic time of the last request's end, by model."""

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Adds to a counter."""
        self._calls[name, labels](amount)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Adds one observation to a histogram."""
        self._calls[name, labels](value)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge."""
        self._calls[name, labels](value)

    def request_done(self, model: str, seconds: float, error: type[BaseException] | None) -> None:
        """Counts and times a request, by the class of its error."""
        self.last_request[model] = time.monotonic()
        self.observe("guerdon_e2e_request_latency_seconds", seconds, model)
        self.add("guerdon_requests", 1, model, _outcome(error))
        if error is None:
            self.answered_s[model] = self.answered_s.get(model, 0.0) + seconds

    def client_request_done(self, client: str, error: type[BaseException] | None) -> None:
        """Counts a request of a key's holder, by the class of its error; no-op without a name."""
        if client:
            self.add("guerdon_client_requests", 1, client, _outcome(error))

    def reply(self, model: str, reply: ScoreReply) -> int:
        """Counts one request's samples and times, and logs failed samples; returns how many of them failed."""
        num_failed = sum(isinstance(result, GuerdonError) for result in reply.results)
        self.add("guerdon_sequences", len(reply.results) - num_failed, model, "ok")
        if num_failed:
            self.add("guerdon_sequences", num_failed, model, "failed")
        self._failures.note(model, reply.results)
        for result in reply.results:
            if isinstance(result, ChildEnded):
                self.add("guerdon_isolated_ends", 1, model, result.reason)
        self.observe("guerdon_request_queue_time_seconds", reply.queue_s, model)
        self.observe("guerdon_request_inference_time_seconds", reply.compute_s, model)
        return num_failed

    def components(self, name: str, statistics: Iterable[tuple[str, float, float]]) -> None:
        """Sets the mean and standard deviation of each component of a sum."""
        for component, mean, std in statistics:
            self.set("guerdon_component_mean", mean, name, component)
            self.set("guerdon_component_std", std, name, component)

    def batch(self, model: str, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Records one executed batch."""
        self.observe("guerdon_batch_seconds", seconds, model)
        self.observe("guerdon_batch_sequences", num_sequences, model)
        self.add("guerdon_computed_tokens", num_tokens, model)

    def watch(
        self,
        depth: Callable[[], dict[str, tuple[int, int]]],
        requests: Callable[[], dict[str, tuple[int, int]]],
        models: Callable[[], Iterable[ModelInfo]],
        text: Callable[[], str] | None = None,
    ) -> None:
        """Reads these whenever the metrics are read, by model: sequences and tokens that wait, requests that run and
        that wait, what the models are, and more lines of Prometheus' text.
        """
        self._registry.register(_Pairs(depth, "guerdon_queue_sequences", "guerdon_queue_tokens"))
        self._registry.register(_Pairs(requests, "guerdon_num_requests_running", "guerdon_num_requests_waiting"))
        self._registry.register(_ModelInfos(models))
        self._others = text

    def totals(self, name: str, suffix: str) -> dict[tuple[str, ...], float]:
        """One metric's numbers by its labels, those of samples that end like this: `_total`, `_sum`, `_count`."""
        labels = TABLE[name].labels
        return {
            tuple(given[label] for label in labels): value
            for sample, given, value in self.sample(name)
            if sample == name + suffix
        }

    def sample(self, *names: str) -> Iterator[tuple[str, dict[str, str], float]]:
        """Name, labels and value of every sample of these metrics, as Prometheus' text has them."""
        for name in names:
            for family in self._metrics[name].collect():
                yield from ((sample.name, sample.labels, sample.value) for sample in family.samples)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        others = b"" if self._others is None else self._others().encode()
        return generate_latest(_WithoutCreated(self._registry)) + others


class FailureLog:
    """Logs samples without a score: at most one line a minute for each model, with counts and kinds and never a text.

    Belongs to one thread.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Counts[str]] = {}
        self._num_samples: Counts[str] = Counts()
        self._logged: dict[str, float] = {}

    def note(self, model: str, results: Sequence[object]) -> None:
        """Counts an answered request's samples; logs if some failed and the model's last line is a minute old."""
        self._num_samples[model] += len(results)
        kinds = self._kinds.setdefault(model, Counts())
        kinds.update(type(one).__name__ for one in results if isinstance(one, GuerdonError))
        now = time.monotonic()
        if not kinds or now - self._logged.get(model, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return
        counts = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
        log.warning(
            "%s: %s of %s samples have no score (%s); the error of each, which its client gets, says why",
            model, f"{kinds.total():,}", f"{self._num_samples[model]:,}", counts,
        )  # fmt: skip
        self._logged[model] = now
        self._num_samples[model] = 0
        kinds.clear()


class _Calls(dict[tuple[str, tuple[str, ...]], Callable[[float], None]]):
    """Cached recorders by a metric's name and labels: a lookup would take as long as the recording."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = metrics

    def __missing__(self, key: tuple[str, tuple[str, ...]]) -> Callable[[float], None]:
        name, labels = key
        call: Callable[[float], None] = getattr(self._metrics[name].labels(*labels), _VERB[TABLE[name].kind])
        return self.setdefault(key, call)


def _outcome(kind: type[BaseException] | None) -> str:
    """Returns the outcome label of a request that ended with this error class, or None."""
    if kind is None:
        return "ok"
    if issubclass(kind, GuerdonError):
        return kind.__name__
    return (Cancelled if issubclass(kind, asyncio.CancelledError) else ServerFault).__name__


class _WithoutCreated:
    """A registry without the `_created` series, which would double the output."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class _Pairs:
    """Two gauges of each model that are asked for together."""

    def __init__(self, ask: Callable[[], dict[str, tuple[int, int]]], *names: str) -> None:
        self._ask = ask
        self._names = names

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = [_family(name) for name in self._names]
        for model, values in self._ask().items():
            for family, value in zip(families, values, strict=True):
                family.add_metric([model], value)
        return families


class _ModelInfos:
    def __init__(self, models: Callable[[], Iterable[ModelInfo]]) -> None:
        self._models = models

    def collect(self) -> Iterable[GaugeMetricFamily]:
        infos = _family("guerdon_model_info")
        for info in self._models():
            infos.add_metric([info.name, info.kind, info.dtype, info.device, info.path, info.weights_version], 1)
        return [infos]


def _family(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, COLLECTED[name].text, labels=COLLECTED[name].labels)
