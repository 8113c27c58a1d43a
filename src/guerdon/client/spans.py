"""The client's part of a trace, where the caller's program has one; nothing of OpenTelemetry is imported for it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

Headers = tuple[tuple[str, str], ...]
"""By which a server goes on with the trace."""

_NO_SPAN: AbstractContextManager[Headers] = contextlib.nullcontext(())


def carried(task: Callable[[], T]) -> Callable[[], T]:
    """`task` for another thread, within the span that is active here and now."""
    if not _is_active():
        return task
    from opentelemetry import context

    return functools.partial(_within, context.get_current(), task)


def exchange(model: str, url: str) -> AbstractContextManager[Headers]:
    """A context in which the model is asked something at `url`, with what to send beside it.

    Where a span of the caller's program is active, that is a span below it.
    """
    return _exchange(model, url) if _is_active() else _NO_SPAN


def _is_active() -> bool:
    """Whether there is a span here, which only a program can have that has imported OpenTelemetry."""
    current = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    return current is not None and current().get_span_context().is_valid


def _within(context: Any, task: Callable[[], T]) -> T:
    from opentelemetry.context import attach, detach

    token = attach(context)
    try:
        return task()
    finally:
        detach(token)


@contextlib.contextmanager
def _exchange(model: str, url: str) -> Iterator[Headers]:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    server = urlsplit(url)
    facts: dict[str, str | int] = {
        "guerdon.model": model,
        "server.address": server.hostname or "",
        "url.scheme": server.scheme,
    }
    if server.port is not None:
        facts["server.port"] = server.port
    span = trace.get_tracer("guerdon").start_span(f"infer {model}", kind=trace.SpanKind.CLIENT, attributes=facts)
    sent: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(sent, trace.set_span_in_context(span))
    try:
        yield tuple(sent.items())
    except BaseException as e:  # of which only the class is told: its text may be a sample's
        span.set_attribute("error.type", type(e).__name__)
        span.set_status(trace.Status(trace.StatusCode.ERROR))
        raise
    finally:
        span.end()
