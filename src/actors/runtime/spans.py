"""Opens spans and carries their contexts from message to message.

`TRACEPARENT` holds the W3C context of the message being handled, or None. A mailbox puts it into
the envelopes of the messages sent while that message is handled, so within a process a context
is passed on automatically. On a wire it is a field of the message, which `accept_context` checks.
`span` opens a span below the current one; messages sent inside the span become its children. An
effect starts without a context, because most effects outlive their cause (a read loop, a timer). An
effect that continues the work of a message is given its parent explicitly (`span_below`).

- Only sampled contexts travel. An unsampled message has none, and `span` then costs one lookup of a
  context variable. If no exporter was started (`actors.runtime.tracing`), nothing is opened,
  accepted or passed on.
- The sampling decision is made once, where a trace starts (`root_span`): in the client, otherwise
  in the session. A client that decided not to sample says so (`UNSAMPLED`).
- A span has one parent. Other contexts that it serves are links, at most `LINKS_MAX`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from opentelemetry import trace
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
)

from actors.runtime.telemetry import (
    CANCELED,
    HOPS,
    SYSTEM,
    TRACEPARENT,
    UNSAMPLED,
    SpanDefinition,
    activate_context,
    deactivate_context,
)

if TYPE_CHECKING:
    from actors.runtime.measurement import MetricDefinition

Value: TypeAlias = str | int | float | bool

LINKS_MAX: Final = 32
"""Maximum number of links of a span."""


class MeasureInstruments(Protocol):
    """Receives measured values (`actors.runtime.tracing.metrics`)."""

    def measure(self, metric: MetricDefinition, value: float, labels: tuple[str, ...], /) -> None:
        """Add, record or set a value, as the metric's kind requires."""
        ...

    def forget(self, metrics: Iterable[MetricDefinition], labels: tuple[str, ...], /) -> None:
        """Remove the series of those metrics that have these labels."""
        ...


# -- exporters and instruments ---------------------------------------------------------------------


class TraceExport(Protocol):
    """The tracing of a process, implemented by `actors.runtime.tracing.setup`."""

    tracer: Tracer

    @property
    def can_start_traces(self) -> bool:
        """Return whether a new trace could be sampled."""
        ...

    def engine(self, pid: int, /) -> Tracer:
        """Return the tracer for spans of the engine process `pid`."""
        ...


_trace_export: TraceExport | None = None
"""The tracing of this process; set by `export_by`, None while tracing is off."""
_instruments: MeasureInstruments | None = None
"""The metrics of this process; set by `measure_by`, None while nothing is measured."""


def export_by(exporting: TraceExport | None) -> None:
    """Set the tracing of this process; None turns it off."""
    global _trace_export
    _trace_export = exporting


def measure_by(instruments: MeasureInstruments | None) -> None:
    """Set the metrics of this process; None turns them off."""
    global _instruments
    _instruments = instruments


def current_export() -> TraceExport | None:
    """Return the tracing of this process; None while tracing is off."""
    return _trace_export


def measure(metric: MetricDefinition, value: float, *labels: str) -> None:
    """Record a value of a metric, if this process measures: for events that are rare. A part that
    counts often reports its own numbers (`actors.runtime.measurement`)."""
    if _instruments is not None:
        _instruments.measure(metric, value, labels)


def forget_measures(key: str, *metrics: MetricDefinition) -> None:
    """Remove the series with this label: its dataflow or object is gone."""
    if _instruments is not None:
        _instruments.forget(metrics, (key,))


def is_measuring() -> bool:
    """Return whether `measure` does anything."""
    return _instruments is not None


# -- contexts --------------------------------------------------------------------------------------

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def _parse(traceparent: str) -> SpanContext | None:
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    numbers = [int(part, 16) for part in found.groups()]
    context = SpanContext(numbers[0], numbers[1], True, TraceFlags(numbers[2]))
    return context if context.is_valid else None


def traceparent_of(context: SpanContext) -> str:
    """Return the W3C text of a span context."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def accept_context(traceparent: str | None) -> str | None:
    """Return a context received over a wire if it is valid and sampled and tracing is on; otherwise
    None."""
    if traceparent is None or _trace_export is None:
        return None
    context = _parse(traceparent)
    return traceparent if context is not None and context.trace_flags.sampled else None


def split_traceparent(traceparent: str) -> tuple[str, str]:
    """Return the trace id and the span id of a context, in hexadecimal."""
    return traceparent[3:35], traceparent[36:52]


# -- spans -----------------------------------------------------------------------------------------


class OpenSpan:
    """An open span of a sampled trace. It is exported when `end` is called."""

    __slots__ = ("_ended", "_hop", "_span", "traceparent")

    def __init__(self, hop: SpanDefinition, span: Span) -> None:
        self._hop = hop
        self._span = span
        self._ended = False
        """True once `end` was called."""
        self.traceparent = traceparent_of(span.get_span_context())
        """Context for the messages sent inside the span."""

    def describe(self, *values: Value) -> None:
        """Set all attributes of the span's definition, in order.

        Use it where computing the values is too expensive for spans that are not sampled.
        """
        self._span.set_attributes(dict(zip(self._hop.attributes, values, strict=True)))

    def note(self, name: str, value: Value) -> None:
        """Set one additional attribute; `name` is a constant of `actors.runtime.telemetry`."""
        self._span.set_attribute(name, value)

    def fail(self, text: str) -> None:
        """Mark the span as failed, with the reason."""
        self._span.set_status(Status(StatusCode.ERROR, text))

    def end(self, error: BaseException | None = None) -> None:
        """End the span, as failed if `error` is given. Further calls do nothing.

        A cancellation is recorded as an attribute, not as a failure.
        """
        if self._ended:
            return
        self._ended = True
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.note(CANCELED, True)
        elif error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        self._span.end()


Spanning: TypeAlias = AbstractContextManager[OpenSpan | None]


class _SpanBlock:
    """Opens a span around a block. The block gets None if its trace is not sampled."""

    __slots__ = ("_hop", "_links", "_opened", "_parent", "_token", "_values")

    def __init__(
        self, hop: SpanDefinition, values: Sequence[Value], parent: str | None, links: Iterable[str]
    ) -> None:
        self._hop = hop
        self._values = values
        self._parent = parent
        self._links = links
        self._opened: OpenSpan | None = None
        """The span while the block runs; None if the trace is not sampled."""
        self._token: Token[str | None] | None = None
        """Restores the previous context at the end of the block."""

    def __enter__(self) -> OpenSpan | None:
        self._opened = opened = _open(self._hop, self._values, self._parent, self._links)
        if opened is not None:
            self._token = activate_context(opened.traceparent)
        return opened

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._opened is not None and self._token is not None:
            deactivate_context(self._token)
            self._opened.end(error)


class _ContextBlock:
    """Sets the trace context of a block."""

    __slots__ = ("_token", "_traceparent")

    def __init__(self, traceparent: str | None) -> None:
        self._traceparent = traceparent

    def __enter__(self) -> None:
        self._token = activate_context(self._traceparent)

    def __exit__(self, *_: object) -> None:
        deactivate_context(self._token)


_NOTHING: Final[nullcontext[None]] = nullcontext()


def span(hop: SpanDefinition, *values: Value, links: Iterable[str] = ()) -> Spanning:
    """Return a span below the current context; it does nothing if there is no context.

    `values` are the attributes of the span's definition, in order; without any, the block sets them
    (`OpenSpan.describe`).
    """
    parent = TRACEPARENT.get()
    if parent is None or _trace_export is None:
        return _NOTHING
    return _SpanBlock(hop, values, parent, links)


def span_below(
    parent: str | None, hop: SpanDefinition, *values: Value, links: Iterable[str] = ()
) -> Spanning:
    """Return a span below a context that was kept.

    With `parent` None, no span is opened and messages sent in the block carry no context.
    """
    if parent is None or _trace_export is None:
        # Messages of the block must not become children of the current span.
        return _NOTHING if TRACEPARENT.get() is None else _ContextBlock(None)
    return _SpanBlock(hop, values, parent, links)


def root_span(hop: SpanDefinition, *values: Value) -> Spanning:
    """Return a span at a place where a trace may start; the sampler decides.

    The span is below the current context if there is one, otherwise below the program's own
    current span.
    """
    if _trace_export is None or not _trace_export.can_start_traces:
        return _NOTHING
    return _SpanBlock(hop, values, TRACEPARENT.get(), ())


def begin_root(hop: SpanDefinition, *values: Value) -> OpenSpan | None:
    """Start a span like `root_span` that no single block can contain; the caller must end it."""
    if _trace_export is None or not _trace_export.can_start_traces:
        return None
    return _open(hop, values, TRACEPARENT.get(), ())


def begin(
    hop: SpanDefinition, *values: Value, parent: str | None, links: Iterable[str] = ()
) -> OpenSpan | None:
    """Start a span like `span_below` that no single block can contain; the caller must end it."""
    return None if parent is None or _trace_export is None else _open(hop, values, parent, links)


def begin_request(hop: SpanDefinition, *values: Value, traceparent: str | None) -> OpenSpan | None:
    """Start the span of a received request, below the request's context or else as a root."""
    if _trace_export is None:
        return None
    if traceparent is None:
        return _open(hop, values, None, ()) if _trace_export.can_start_traces else None
    return begin(hop, *values, parent=accept_context(traceparent))


def use_context(traceparent: str | None) -> AbstractContextManager[None]:
    """Return a block in which messages are sent with this trace context (None: without)."""
    if traceparent is None and TRACEPARENT.get() is None:
        return _NOTHING
    return _ContextBlock(traceparent)


def make_request_context(opened: OpenSpan | None) -> str | None:
    """Return the context for a request to the service: of its span, or `UNSAMPLED` without one.

    Returns None if tracing is off.
    """
    if opened is not None:
        return opened.traceparent
    return None if _trace_export is None else UNSAMPLED


def _open(
    hop: SpanDefinition, values: Sequence[Value], parent: str | None, links: Iterable[str]
) -> OpenSpan | None:
    assert _trace_export is not None, "callers check this"
    context = None
    if parent is not None:
        found = _parse(parent)
        if found is None:
            return None
        context = trace.set_span_in_context(NonRecordingSpan(found))
    made = _trace_export.tracer.start_span(
        hop.name,
        context=context,
        kind=hop.kind,
        attributes=attributes_of(hop, values),
        links=_links(links, parent),
        record_exception=False,
    )
    return OpenSpan(hop, made) if made.is_recording() else None


def attributes_of(hop: SpanDefinition, values: Sequence[Value]) -> dict[str, Value]:
    """Return the attributes of a span: those of the conventions, and its own if `values` are
    given."""
    own = dict(zip(hop.attributes, values, strict=True)) if values else {}
    return {**own, **_conventions(hop)}


def _conventions(hop: SpanDefinition) -> dict[str, Value]:
    if not hop.type:
        return {}
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": hop.operation,
        "messaging.operation.type": hop.type,
        "messaging.destination.name": hop.destination,
    }


def _links(traceparents: Iterable[str], parent: str | None) -> list[Link]:
    """Return the links to contexts other than the parent, without duplicates, at most
    `LINKS_MAX`."""
    wanted = [each for each in dict.fromkeys(traceparents) if each != parent]
    contexts = [_parse(each) for each in wanted[:LINKS_MAX]]
    return [Link(context) for context in contexts if context is not None]


# -- spans of another process ----------------------------------------------------------------------


def export_engine_span(
    name: str,
    interval_ns: tuple[int, int],
    attributes: Mapping[str, Value],
    pid: int,
    parent: str | None,
) -> str | None:
    """Export a span that the engine process `pid` has reported, and return its context.

    The interval is in ns of the wall clock. Returns None if tracing is off or `parent` is not a
    valid context. Raises `KeyError` if no span definition has this name.
    """
    context = None if parent is None else _parse(parent)
    if _trace_export is None or context is None:
        return None
    hop = HOPS[name]
    made = _trace_export.engine(pid).start_span(
        hop.name,
        context=trace.set_span_in_context(NonRecordingSpan(context)),
        kind=hop.kind,
        attributes={**attributes, **_conventions(hop)},
        start_time=interval_ns[0],
    )
    made.end(interval_ns[1])
    return traceparent_of(made.get_span_context())
