"""A server's spans by OpenTelemetry, whose libraries are imported only where traces are turned on."""

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
"""Spans that wait to be sent: of a burst of requests that come at once, more than the library's own 2,048."""
_LAST_SPANS_S = 2.0
"""How long the last spans may take at the server's end, whose collector may be away."""


def check_installed(endpoint: str | None) -> None:
    """Raises StartError where traces shall be sent to `endpoint`, and OpenTelemetry is not installed."""
    if endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401 - both are asked for
    except ImportError as e:
        raise StartError("traces is set, and OpenTelemetry is not installed", _INSTALL) from e


def turned_on(endpoint: str | None) -> Traces | None:
    """The traces of a server that sends them to `endpoint`, or where OpenTelemetry's environment says; else None.

    Raises StartError where `endpoint` is given and OpenTelemetry is not installed, or its environment is malformed.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if endpoint is None and not _is_environments():
        return None
    check_installed(endpoint)
    try:
        return Traces(endpoint)
    except ImportError:
        log.warning("no traces: %s is set, and OpenTelemetry is not installed; %s", _set_of(_ENDPOINTS), _INSTALL)
        return None
    except ValueError as e:
        raise StartError(f"OpenTelemetry's environment: {e}", "correct the variables that begin with OTEL_") from e


def tell(**facts: Any) -> None:
    """Says of the request that is handled here what its span is to have, as guerdon.NAME."""
    if (traced := _REQUEST.get()) is not None:
        traced.tell(**facts)


def failed(error: BaseException) -> None:
    """Says of the request that is handled here how it ended; only the class is kept, as texts may be a sample's."""
    if (traced := _REQUEST.get()) is not None:
        traced.failed(error)


def step(name: str, model: str) -> contextlib.AbstractContextManager[None]:
    """A context in which something is done for a model's part of the request that is handled here."""
    traced = _REQUEST.get()
    return _UNTRACED if traced is None else traced.step(name, model)


def part(model: str = "") -> Part | None:
    """What the request that is handled here waits for from now on, where it is traced: of a model, or of an order."""
    traced = _REQUEST.get()
    return None if traced is None else Part(traced, model)


class Traces:
    """Makes one server's spans and sends them; thread-safe.

    Requests are sampled as OTEL_TRACES_SAMPLER says: by default those whose client samples, or that have no parent.
    A batch has a span where one of its requests has.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        """`endpoint` None takes the environment's."""
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
        # Apart from them: its links say what is sampled, and there are as many as a batch has requests.
        limits = SpanLimits(max_links=SpanLimits.UNSET)
        batches = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, span_limits=limits)
        for provider in (requests, batches):
            provider.add_span_processor(self._processor)
        self._requests, self._batches = requests.get_tracer("guerdon"), batches.get_tracer("guerdon")
        self._propagator = TraceContextTextMapPropagator()
        log.info("traces go to %s", endpoint or f"the collector of {_set_of(_ENDPOINTS)}")

    @contextlib.contextmanager
    def request(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]
    ) -> Iterator[TracedRequest | None]:
        """A context in which a request is handled, whose span goes on with the trace that its `headers` name.

        What it gives is None where the request is not sampled.
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
        """A context in which a batch is computed, with the sequences in it of each traced request; some have one."""
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
            _fail(span, e)
            raise
        finally:
            traced.end()
            for p, count in parts.items():
                p.batches.append((traced, count))

    def close(self) -> None:
        """Sends what is left, within a moment."""
        sending = threading.Thread(target=self._processor.shutdown, name="guerdon-traces", daemon=True)
        sending.start()
        sending.join(_LAST_SPANS_S)


class TracedRequest:
    """One request's span, and the spans of what is done for it. Its own methods are one asyncio task's."""

    def __init__(self, tracer: Any, span: Any, context: Any) -> None:
        self.span = span
        self._tracer = tracer
        self._context = context
        self._num_tokens = 0
        self._has_failed = False

    def tell(self, **facts: Any) -> None:
        """Attributes of the span, as guerdon.NAME."""
        self.span.set_attributes(_named(**facts))

    def accepted(self, num_tokens: int) -> None:
        """Counts tokens of sequences that a model has taken on."""
        self._num_tokens += num_tokens
        self.tell(received_tokens=self._num_tokens)

    def failed(self, error: BaseException) -> None:
        """The class of the error in which it ended: of the first that is told of."""
        if not self._has_failed:
            self._has_failed = True
            self.span.set_attribute("error.type", _kind(error))

    def answered(self, key: str, status: int, *, is_fault: bool) -> None:
        """The status of the answer, as the attribute `key`, and whether it says that the server is at fault."""
        self.span.set_attribute(key, status)
        if is_fault:
            _blame(self.span)

    def child(self, name: str, began_ns: int, ended_ns: int, batch: TracedBatch | None = None, **facts: Any) -> None:
        """A span of something that was done for the request, at nanoseconds of the time of day."""
        from opentelemetry.trace import Link

        links = [] if batch is None else [Link(batch.span.get_span_context())]
        span = self._tracer.start_span(
            name, self._context, attributes=_named(**facts), links=links, start_time=began_ns
        )
        span.end(ended_ns)

    @contextlib.contextmanager
    def step(self, name: str, model: str) -> Iterator[None]:
        """A context that has a span of that name."""
        began_ns = time.time_ns()
        try:
            yield
        finally:
            self.child(name, began_ns, time.time_ns(), model=model)


class TracedBatch:
    """One batch's span."""

    def __init__(self, span: Any, began_ns: int) -> None:
        self.span = span
        self.began_ns = began_ns
        self.ended_ns = 0

    def tell(self, **facts: Any) -> None:
        """Attributes of the span, as guerdon.NAME."""
        self.span.set_attributes(_named(**facts))

    def end(self) -> None:
        """It is computed."""
        self.ended_ns = time.time_ns()
        self.span.end(self.ended_ns)


class Part:
    """What one model does for a traced request: the wait for it, and the batches that the request has a part in."""

    def __init__(self, request: TracedRequest, model: str) -> None:
        self.request = request
        self.batches: list[tuple[TracedBatch, int]] = []
        """With the number of the request's sequences in each; the loop's thread adds them."""
        self._model: dict[str, Any] = {"model": model} if model else {}
        self._queued_ns = time.time_ns()

    def end(self, taken: float, num_sequences: int, num_tokens: int) -> None:
        """Nobody waits for it any more; `taken` is when its last sequence was taken up, 0.0 where that never was."""
        self.request.accepted(num_tokens)
        waited_ns = max(_wall_ns(taken) if taken else time.time_ns(), self._queued_ns)
        self.request.child("queue", self._queued_ns, waited_ns, sequences=num_sequences, **self._model)
        for batch, count in tuple(self.batches):
            self.request.child("compute", batch.began_ns, batch.ended_ns, batch, sequences=count, **self._model)

    @contextlib.contextmanager
    def order(self, num_sequences: int, num_tokens: int) -> Iterator[None]:
        """A context in which what is no batch is done, such as a train request, of so many sequences and tokens."""
        began_ns = time.time_ns()
        self.request.child("queue", self._queued_ns, began_ns)
        facts: dict[str, Any] = {"sequences": num_sequences, "tokens": num_tokens} if num_sequences else {}
        try:
            yield
        finally:
            self.request.child("compute", began_ns, time.time_ns(), **facts)


_REQUEST: ContextVar[TracedRequest | None] = ContextVar("guerdon_request", default=None)
_UNTRACED = contextlib.nullcontext()


def _is_environments() -> bool:
    """Whether OpenTelemetry's environment turns traces on, and has them sent as they are sent here."""
    where = _set_of(_ENDPOINTS)
    if not where or os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "none":
        return False
    if (how := _set_of(_PROTOCOLS)) and os.environ[how] != _OURS:
        log.warning("no traces: %s is set, and %s is not %s; give --traces http://HOST:4318", where, how, _OURS)
        return False
    return True


def _set_of(names: tuple[str, ...]) -> str:
    """The first of these variables that is set, or nothing."""
    return next((name for name in names if os.environ.get(name)), "")


def _named(**facts: Any) -> dict[str, Any]:
    return {f"guerdon.{name}": value for name, value in facts.items()}


def _kind(error: BaseException) -> str:
    if isinstance(error, GuerdonError):
        return type(error).__name__
    return (Cancelled if isinstance(error, asyncio.CancelledError) else ServerFault).__name__


def _fail(span: Any, error: BaseException) -> None:
    span.set_attribute("error.type", _kind(error))
    _blame(span)


def _blame(span: Any) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR))


def _wall_ns(moment: float) -> int:
    """A moment of the monotonic clock as the time of day."""
    return time.time_ns() - int((time.monotonic() - moment) * 1e9)
