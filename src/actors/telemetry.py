"""Trace context for messages, and every span name, in one place.

An envelope carries a W3C ``traceparent`` (or None) and nothing more: a span is opened only when
the trace is sampled, so an unsampled message pays one context-variable read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

TRACEPARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The context of the message being handled: envelopes made meanwhile inherit it."""

SPAN_STEP: Final = "dataflow.step"
SPAN_COMMIT: Final = "dataflow.commit"
SPAN_SPARK_JOB: Final = "spark.job"
SPAN_APPEND: Final = "persist.append"
SPAN_PEEK: Final = "peek"
SPAN_WRITE: Final = "write"

_tracer = trace.get_tracer("penstock")


def _parse(traceparent: str) -> SpanContext | None:
    parts = traceparent.split("-")
    if len(parts) != 4 or len(parts[1]) != 32 or len(parts[2]) != 16:
        return None
    try:
        return SpanContext(
            int(parts[1], 16), int(parts[2], 16), True, TraceFlags(int(parts[3], 16))
        )
    except ValueError:
        return None


def traceparent_of(context: SpanContext) -> str:
    """The W3C text of a span context."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


@contextmanager
def span(name: str, **attributes: str | int | float | bool) -> Iterator[None]:
    """A span below the current message's context; messages sent inside become its children."""
    parent_text = TRACEPARENT.get()
    parent = _parse(parent_text) if parent_text else None
    context = trace.set_span_in_context(NonRecordingSpan(parent)) if parent else None
    with _tracer.start_as_current_span(name, context=context, attributes=attributes) as current:
        made = current.get_span_context()
        token = TRACEPARENT.set(traceparent_of(made) if made.is_valid else parent_text)
        try:
            yield
        finally:
            TRACEPARENT.reset(token)
