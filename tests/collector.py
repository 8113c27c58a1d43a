"""A collector of traces, which takes OTLP over HTTP as real ones do, and keeps what it was sent."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1 import trace_pb2

from server.helpers import wait_until
from stand_in import Handler, serving_http

SERVER, CLIENT, INTERNAL = (
    trace_pb2.Span.SPAN_KIND_SERVER,
    trace_pb2.Span.SPAN_KIND_CLIENT,
    trace_pb2.Span.SPAN_KIND_INTERNAL,
)


@dataclass(frozen=True)
class Told:
    """One span as it was sent; times are in nanoseconds."""

    service: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    facts: dict[str, Any]
    links: tuple[tuple[str, str, dict[str, Any]], ...]
    """Of each the trace, the span, and what stands beside them."""
    began: int
    ended: int
    is_error: bool
    message: str


@dataclass
class Collector:
    """What has come so far; `url` is where it is to be sent."""

    url: str = ""
    paths: set[str] = field(default_factory=set)
    bodies: list[bytes] = field(default_factory=list)

    def spans(self, name: str = "") -> list[Told]:
        """All spans, or those whose name begins so, in the order in which they began."""
        found = []
        for body in list(self.bodies):
            for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = _facts(sent.resource.attributes)["service.name"]
                found += [_told(service, span) for scope in sent.scope_spans for span in scope.spans]
        return sorted((span for span in found if span.name.startswith(name)), key=lambda span: span.began)

    def wait(self, name: str, count: int = 1) -> list[Told]:
        """The spans of that name, once there are so many."""
        wait_until(lambda: len(self.spans(name)) >= count)
        return self.spans(name)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of its own."""
    collector = Collector()

    class Receiver(Handler):
        def do_POST(self) -> None:
            body = self.read_body()
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.paths.add(self.path)
            collector.bodies.append(body)
            self.answer(ExportTraceServiceResponse().SerializeToString())

    with serving_http(Receiver) as collector.url:
        yield collector


def _told(service: str, span: trace_pb2.Span) -> Told:
    return Told(
        service,
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _facts(span.attributes),
        tuple((link.trace_id.hex(), link.span_id.hex(), _facts(link.attributes)) for link in span.links),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        span.status.message,
    )


def _facts(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
