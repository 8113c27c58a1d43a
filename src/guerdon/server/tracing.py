"""A server's spans by OpenTelemetry; its libraries are imported only if traces are on.

OpenTelemetry's own instrumentation of ASGI and gRPC is not used: it names spans by raw paths, records user agents and
error texts, starts spans before keys are checked, and makes one span per stream instead of one per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from guerdon.errors import Cancelled, GuerdonError, ServerFault, StartError, install_command

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OURS = "http/protobuf"
_PATH = "/v1/traces"
_INSTALL = install_command("otel")

_MOST_WAITING = 16_384
"""Spans that may wait to be sent: the library's default of 2,048 is too few for a burst of requests."""
_LAST_SPANS_S = 2.0
"""Timeout of the last spans at shutdown: the collector may be down."""


def check_installed(endpoint: str | None) -> None:
    """Raises StartError if `endpoint` is given and OpenTelemetry is not installed."""
    if endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as e:
        raise StartError("traces is set, but OpenTelemetry is not installed", _INSTALL) from e


def turned_on(endpoint: str | None) -> Traces | None:
    """Returns the traces for `endpoint`, or for the one in OpenTelemetry's environment; None if there is neither.

    Raises StartError if `endpoint` is given and OpenTelemetry is not installed, or its environment is malformed.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if endpoint is None and not _is_on_by_environment():
        return None
    check_installed(endpoint)
    try:
        return Traces(endpoint)
    except ImportError:
        log.warning("no traces: %s is set, but OpenTelemetry is not installed; %s", _first_set(_ENDPOINTS), _INSTALL)
        return None
    except ValueError as e:
        raise StartError(f"OpenTelemetry's environment: {e}", "correct the variables that begin with OTEL_") from e


def tell(**facts: Any) -> None:
    """Sets attributes guerdon.NAME of the current request's span, if it is traced."""
    if (traced := _REQUEST.get()) is not None:
        traced.tell(**facts)


def failed(error: BaseException) -> None:
    """Sets the error class of the current request's span; never the text, which may quote a sample."""
    if (traced := _REQUEST.get()) is not None:
        traced.failed(error)


def step(name: str, model: str) -> contextlib.AbstractContextManager[None]:
    """Makes a span of the block, below the current request's, if it is traced."""
    traced = _REQUEST.get()
    return _UNTRACED if traced is None else traced.step(name, model)


def part(model: str = "") -> Part | None:
    """Starts the wait of the current request for a model or an order; None if it is not traced."""
    traced = _REQUEST.get()
    return None if traced is None else Part(traced, model)


class Traces:
    """Makes and sends a server's spans; thread-safe.

    OTEL_TRACES_SAMPLER decides which requests are sampled: by default those that the client samples, and those without
    a parent. A batch has a span if one of its requests has.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        """Takes the environment's endpoint if `endpoint` is None."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if endpoint is not None and not (endpoint := endpoint.rstrip("/")).endswith(_PATH):
            endpoint += _PATH
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "guerdon"}))
        room: dict[str, Any] = {} if os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else {"max_queue_size": _MOST_WAITING}
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint), **room)
        requests = TracerProvider(resource=resource, shutdown_on_exit=False)
        # A second provider: a batch is sampled if it has links, and it has a link per request.
        limits = SpanLimits(max_links=SpanLimits.UNSET)
        batches = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, span_limits=limits)
        for provider in (requests, batches):
            provider.add_span_processor(self._processor)
        self._requests, self._batches = requests.get_tracer("guerdon"), batches.get_tracer("guerdon")
        self._propagator = TraceContextTextMapPropagator()
        log.info("traces go to %s", endpoint or f"the collector of {_first_set(_ENDPOINTS)}")

    @contextlib.contextmanager
    def request(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]
    ) -> Iterator[TracedRequest | None]:
        """Makes the span of a request for the block, as a child of the trace in `headers`.

        Yields None if the request is not sampled.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        parent = self._propagator.extract(headers)
        span = self._requests.start_span(name, parent, SpanKind.SERVER, attributes)
        if not span.is_recording():
            yield None
            return
        traced = TracedRequest(self._requests, span, set_span_in_context(span, parent))
        token = _REQUEST.set(traced)
        try:
            yield traced
        except BaseException as e:
            traced.failed(e)
            raise
        finally:
            _REQUEST.reset(token)
            span.end()

    @contextlib.contextmanager
    def batch(
        self, model: str, parts: Mapping[Part, int], num_sequences: int, num_tokens: int
    ) -> Iterator[TracedBatch]:
        """Makes the span of a batch for the block; `parts` has the number of sequences of each traced request."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link

        facts = {"model": model, "requests": len(parts), "sequences": num_sequences, "computed_tokens": num_tokens}
        links = [Link(p.request.span.get_span_context(), _named(sequences=count)) for p, count in parts.items()]
        began_ns = time.time_ns()
        span = self._batches.start_span(
            f"batch {model}", Context(), attributes=_named(**facts), links=links, start_time=began_ns
        )
        traced = TracedBatch(span, began_ns)
        try:
            yield traced
        except BaseException as e:
            span.set_attribute("error.type", _kind(e))
            _blame(span)
            raise
        finally:
            traced.end()
            for p, count in parts.items():
                p.batches.append((traced, count))

    def close(self) -> None:
        """Sends the remaining spans; waits two seconds at most."""
        sending = threading.Thread(target=self._processor.shutdown, name="guerdon-traces", daemon=True)
        sending.start()
        sending.join(_LAST_SPANS_S)


class TracedRequest:
    """The span of a request, with its children. Belongs to one asyncio task."""

    def __init__(self, tracer: Any, span: Any, context: Any) -> None:
        self.span = span
        self._tracer = tracer
        self._context = context
        self._num_tokens = 0
        self._has_failed = False

    def tell(self, **facts: Any) -> None:
        """Sets attributes guerdon.NAME."""
        self.span.set_attributes(_named(**facts))

    def accepted(self, num_tokens: int) -> None:
        """Counts tokens of accepted sequences."""
        self._num_tokens += num_tokens
        self.tell(received_tokens=self._num_tokens)

    def failed(self, error: BaseException) -> None:
        """Records the class of the first error."""
        if not self._has_failed:
            self._has_failed = True
            self.span.set_attribute("error.type", _kind(error))

    def answered(self, key: str, status: int, *, is_fault: bool) -> None:
        """Records the status of the answer as attribute `key`."""
        self.span.set_attribute(key, status)
        if is_fault:
            _blame(self.span)

    def child(self, name: str, began_ns: int, ended_ns: int, batch: TracedBatch | None = None, **facts: Any) -> None:
        """Adds a finished child span, with Unix times in nanoseconds."""
        from opentelemetry.trace import Link

        links = [] if batch is None else [Link(batch.span.get_span_context())]
        span = self._tracer.start_span(
            name, self._context, attributes=_named(**facts), links=links, start_time=began_ns
        )
        span.end(ended_ns)

    @contextlib.contextmanager
    def step(self, name: str, model: str) -> Iterator[None]:
        """Makes a child span of the block."""
        began_ns = time.time_ns()
        try:
            yield
        finally:
            self.child(name, began_ns, time.time_ns(), model=model)


class TracedBatch:
    """The span of a batch."""

    def __init__(self, span: Any, began_ns: int) -> None:
        self.span = span
        self.began_ns = began_ns
        self.ended_ns = 0

    def tell(self, **facts: Any) -> None:
        """Sets attributes guerdon.NAME."""
        self.span.set_attributes(_named(**facts))

    def end(self) -> None:
        """Ends the span."""
        self.ended_ns = time.time_ns()
        self.span.end(self.ended_ns)


class Part:
    """The work of one model for a traced request: the wait, and the batches with its sequences."""

    def __init__(self, request: TracedRequest, model: str) -> None:
        self.request = request
        self.batches: list[tuple[TracedBatch, int]] = []
        """Batches with the number of the request's sequences; the loop's thread appends them."""
        self._model: dict[str, Any] = {"model": model} if model else {}
        self._queued_ns = time.time_ns()

    def end(self, taken: float, num_sequences: int, num_tokens: int) -> None:
        """Ends the wait; `taken` is the monotonic time when its last sequence started, 0.0 if never."""
        self.request.accepted(num_tokens)
        since_ns = int((time.monotonic() - taken) * 1e9) if taken else 0
        waited_ns = max(time.time_ns() - since_ns, self._queued_ns)
        self.request.child("queue", self._queued_ns, waited_ns, sequences=num_sequences, **self._model)
        for batch, count in tuple(self.batches):
            self.request.child("compute", batch.began_ns, batch.ended_ns, batch, sequences=count, **self._model)

    @contextlib.contextmanager
    def order(self, num_sequences: int, num_tokens: int) -> Iterator[None]:
        """Makes the spans of an order without a batch, such as a train request, for the block."""
        began_ns = time.time_ns()
        self.request.child("queue", self._queued_ns, began_ns)
        facts: dict[str, Any] = {"sequences": num_sequences, "tokens": num_tokens} if num_sequences else {}
        try:
            yield
        finally:
            self.request.child("compute", began_ns, time.time_ns(), **facts)


_REQUEST: ContextVar[TracedRequest | None] = ContextVar("guerdon_request", default=None)
_UNTRACED = contextlib.nullcontext()


def _is_on_by_environment() -> bool:
    """Whether the environment turns traces on, with the supported protocol."""
    where = _first_set(_ENDPOINTS)
    if not where or os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "none":
        return False
    if (how := _first_set(_PROTOCOLS)) and os.environ[how] != _OURS:
        log.warning("no traces: %s is set, but %s is not %s; give --traces http://HOST:4318", where, how, _OURS)
        return False
    return True


def _first_set(names: tuple[str, ...]) -> str:
    """Returns the first variable that is set, or an empty string."""
    return next((name for name in names if os.environ.get(name)), "")


def _named(**facts: Any) -> dict[str, Any]:
    return {f"guerdon.{name}": value for name, value in facts.items()}


def _kind(error: BaseException) -> str:
    if isinstance(error, GuerdonError):
        return type(error).__name__
    return (Cancelled if isinstance(error, asyncio.CancelledError) else ServerFault).__name__


def _blame(span: Any) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR))
