"""Every counter, gauge and histogram, in one table; as Prometheus text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from guerdon.core import ModelInfo
from guerdon.errors import Cancelled, GuerdonError, ServerFault

UNKNOWN = "unknown"
"""Stands for every model that is not served: clients may ask for any number of names."""

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
DIFFERENCES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

TABLE: dict[str, tuple[Any, str, tuple[str, ...], tuple[float, ...]]] = {
    "guerdon_requests": (Counter, "Requests to score, by outcome: ok or the error's class.", ("model", "outcome"), ()),
    "guerdon_client_requests": (Counter, "Requests of any kind, by the key's holder; only where there are keys.",
                                ("client", "outcome"), ()),
    "guerdon_sequences": (Counter, "Sequences scored, by outcome: ok or failed.", ("model", "outcome"), ()),
    "guerdon_tokens_received": (Counter, "Tokens of accepted sequences.", ("model",), ()),
    "guerdon_tokens_computed": (Counter, "Tokens computed, as the scheduler estimates them.", ("model",), ()),
    "guerdon_request_seconds": (Histogram, "From arrival to answer, in seconds.", ("model",), SECONDS),
    "guerdon_queue_seconds": (Histogram, "From arrival until the last sequence was taken up.", ("model",), SECONDS),
    "guerdon_batch_seconds": (Histogram, "Time of one batch, in seconds.", ("model",), SECONDS),
    "guerdon_batch_sequences": (Histogram, "Sequences in one batch.", ("model",), COUNTS),
    "guerdon_batch_budget_tokens": (Gauge, "Tokens that one batch may cost; less than at the start after one that did "
                                    "not fit the memory.", ("model",), ()),
    "guerdon_out_of_memory": (Counter, "Forwards for which there was not enough memory.", ("model",), ()),
    "guerdon_recheck_sequences": (Counter, "Sequences scored again by the plain forward, by outcome: same, differs or "
                                  "failed.", ("model", "outcome"), ()),
    "guerdon_recheck_difference": (Histogram, "Largest absolute difference of a sequence's scores from the plain ones.",
                                   ("model",), DIFFERENCES),
    "guerdon_ranks": (Gauge, "Of several processes: data-parallel parts, and tensor-parallel ranks of each.",
                      ("kind",), ()),
    "guerdon_broadcast_seconds": (Histogram, "Time until a command had been sent to every rank.",
                                  ("command",), SECONDS),
    "guerdon_gather_seconds": (Histogram, "From rank 0's own end of a command until all ranks had told theirs.",
                               ("command",), SECONDS),
    "guerdon_component_mean": (Gauge, "Of a component's own rewards in a sum, since the start.",
                               ("model", "component"), ()),
    "guerdon_component_std": (Gauge, "Standard deviation of a component's own rewards in a sum, since the start.",
                              ("model", "component"), ()),
    "guerdon_train_requests": (Counter, "Train requests, by outcome: ok, known (answered again) or the error's class.",
                               ("critic", "outcome"), ()),
    "guerdon_train_steps": (Counter, "Optimiser steps, by outcome: done, or skipped as the gradient was not finite.",
                            ("critic", "outcome"), ()),
    "guerdon_train_tokens": (Counter, "Tokens that were learnt from.", ("critic",), ()),
    "guerdon_train_seconds": (Histogram, "Time of one train request on the device.", ("critic",), SECONDS),
    "guerdon_journal_seconds": (Histogram, "Time until a train request was safe on the disk.", ("critic",), SECONDS),
    "guerdon_checkpoint_seconds": (Histogram, "Time of one checkpoint, its verification included.",
                                   ("critic",), SECONDS),
    "guerdon_critic_loss": (Gauge, "Of the last train request.", ("critic",), ()),
    "guerdon_critic_clip_fraction": (Gauge, "Of the last train request.", ("critic",), ()),
    "guerdon_critic_explained_variance": (Gauge, "Of the last train request, before its update.", ("critic",), ()),
    "guerdon_critic_grad_norm": (Gauge, "Of the last optimiser step, before clipping.", ("critic",), ()),
    "guerdon_critic_learning_rate": (Gauge, "Of the last optimiser step.", ("critic",), ()),
    "guerdon_critic_step": (Gauge, "Optimiser steps that were made.", ("critic",), ()),
    "guerdon_critic_unsaved": (Gauge, "Train requests since the newest checkpoint.", ("critic",), ()),
    "guerdon_critic_offloaded": (Gauge, "1 while the weights are off the device.", ("critic",), ()),
    "guerdon_critic_fault": (Gauge, "1 from when the weights are spoilt, until a restart.", ("critic",), ()),
}  # fmt: skip


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for name, (kind, text, labels, buckets) in TABLE.items():
            extra = {"buckets": buckets} if buckets else {}
            self._metrics[name] = kind(name, text, labels, registry=self._registry, **extra)
        self._children: dict[tuple[str, ...], object] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Adds to a counter."""
        self._child(name, labels).inc(amount)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Adds one observation to a histogram."""
        self._child(name, labels).observe(value)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge."""
        self._child(name, labels).set(value)

    def request(self, model: str) -> _Request:
        """A context that counts the request to score that is handled in it, by how it ends, and times it.

        What it gives has the `model` that is counted, which may be set where only the body tells it.
        """
        return _Request(self, model)

    def client(self, name: str) -> _Client:
        """A context that counts the request that is handled in it as one of that key's holder.

        The name is empty where there are no keys; then nothing is counted.
        """
        return _Client(self, name)

    def asked(self, client: str, error: type[BaseException] | None) -> None:
        """Counts one request of a key's holder, by the class of the error in which it ended."""
        self.add("guerdon_client_requests", 1, client, _outcome(error))

    def batch(self, model: str, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Records one executed batch."""
        self.observe("guerdon_batch_seconds", seconds, model)
        self.observe("guerdon_batch_sequences", num_sequences, model)
        self.add("guerdon_tokens_computed", num_tokens, model)

    def watch_queue(self, depth: Callable[[], dict[str, tuple[int, int]]]) -> None:
        """Reads the queue's depth (sequences and tokens by model) whenever the metrics are read."""
        self._registry.register(_QueueDepth(depth))

    def watch_models(self, models: Callable[[], Iterable[ModelInfo]]) -> None:
        """Tells what the models are, of whichever weights, whenever the metrics are read."""
        self._registry.register(_ModelInfos(models))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._metrics[name].labels(*labels)
        return child


class _Request:
    __slots__ = ("_metrics", "_started", "model")

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self.model = model

    def __enter__(self) -> _Request:
        self._started = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._metrics.add("guerdon_requests", 1, self.model, _outcome(kind))
        self._metrics.observe("guerdon_request_seconds", time.monotonic() - self._started, self.model)


class _Client:
    __slots__ = ("_metrics", "_name")

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics, self._name = metrics, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._name:
            self._metrics.asked(self._name, kind)


def _outcome(kind: type[BaseException] | None) -> str:
    """What a request is counted as that ended with an error of this class, or well."""
    if kind is None:
        return "ok"
    if issubclass(kind, GuerdonError):
        return kind.__name__
    return (Cancelled if issubclass(kind, asyncio.CancelledError) else ServerFault).__name__


class _QueueDepth:
    def __init__(self, depth: Callable[[], dict[str, tuple[int, int]]]) -> None:
        self._depth = depth

    def collect(self) -> Iterable[GaugeMetricFamily]:
        sequences = GaugeMetricFamily("guerdon_queue_sequences", "Sequences that wait.", labels=["model"])
        tokens = GaugeMetricFamily("guerdon_queue_tokens", "Tokens that wait.", labels=["model"])
        for model, (num_sequences, num_tokens) in self._depth().items():
            sequences.add_metric([model], num_sequences)
            tokens.add_metric([model], num_tokens)
        return [sequences, tokens]


class _ModelInfos:
    def __init__(self, models: Callable[[], Iterable[ModelInfo]]) -> None:
        self._models = models

    def collect(self) -> Iterable[GaugeMetricFamily]:
        labels = ["model", "kind", "dtype", "device", "path", "weights_version"]
        infos = GaugeMetricFamily(
            "guerdon_model_info", "1 for each served model; what it is stands in the labels.", labels=labels
        )
        for info in self._models():
            infos.add_metric([info.name, info.kind, info.dtype, info.device, info.path, info.weights_version], 1)
        return [infos]
