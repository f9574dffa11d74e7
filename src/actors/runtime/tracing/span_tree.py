"""Draws recorded traces as trees, for a terminal.

`load_traces` reads OTLP JSON lines, `trees` builds the trees (pure), and `draw` makes the lines to
print. A span whose parent is not in the file is drawn at the top of its trace, with a note.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from actors.runtime.errors import InvalidUsage

KINDS: Final = ("", "internal", "server", "client", "producer", "consumer")
"""Names of the kinds of spans, by OTLP's number."""
HIDDEN: Final = ("messaging.",)
"""Prefixes of attributes that are not shown, because the span's name and kind imply them."""
STATUS_ERROR: Final = 2
"""OTLP's status code of a failed span."""


class RecordedSpan(msgspec.Struct, frozen=True):
    """A span from a file. Times are in nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    process: str
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...] = ()
    """(trace id, span id) of each link."""
    error: str | None = None
    """Reason of the failure; None if the span did not fail."""


class SpanNode(msgspec.Struct):
    """A span and its children, in the order of their starts."""

    span: RecordedSpan
    children: list[SpanNode] = []
    orphan: bool = False
    """True if the span has a parent that was not recorded."""


def load_traces(path: Path) -> list[RecordedSpan]:
    """Return all spans of a file. An incomplete last line is ignored.

    Raises `InvalidUsage` if the file cannot be read or a line is not OTLP.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise InvalidUsage(f"cannot read traces from {path}: {error.strerror}") from None
    found: list[RecordedSpan] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found += spans_of(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # A process that was killed may leave its last line incomplete.
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise InvalidUsage(f"{path}, line {number}: not an OTLP trace: {error}") from None
    return found


def spans_of(request: Any) -> list[RecordedSpan]:
    """Return the spans of one OTLP request in JSON form."""
    found = []
    for group in request["resourceSpans"]:
        resource = _attributes(group.get("resource", {}).get("attributes", ()))
        process = str(resource.get("service.name", "?"))
        if "process.pid" in resource:
            process += f"[{resource['process.pid']}]"
        for scope in group.get("scopeSpans", ()):
            found += [_span(span, process) for span in scope.get("spans", ())]
    return found


def _span(span: Any, process: str) -> RecordedSpan:
    status = span.get("status", {})
    return RecordedSpan(
        trace_id=span["traceId"].lower(),
        span_id=span["spanId"].lower(),
        parent_id=span.get("parentSpanId", "").lower(),
        name=span["name"],
        kind=int(span.get("kind", 0)),
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        process=process,
        attributes=_attributes(span.get("attributes", ())),
        links=tuple((link["traceId"], link["spanId"]) for link in span.get("links", ())),
        error=status.get("message", "failed") if status.get("code") == STATUS_ERROR else None,
    )


def _attributes(given: Any) -> dict[str, Any]:
    found = {}
    for pair in given:
        ((kind, value),) = pair["value"].items() or (("", ""),)
        # OTLP's JSON form writes 64-bit integers as strings.
        found[pair["key"]] = int(value) if kind == "intValue" else value
    return found


def trees(spans: Sequence[RecordedSpan]) -> dict[str, list[SpanNode]]:
    """Build the trees of all traces: map each trace id to its top nodes, in order of their
    starts."""
    nodes = {(span.trace_id, span.span_id): SpanNode(span) for span in spans}
    tops: dict[str, list[SpanNode]] = {}
    # Sorted, so that children are appended in the order of their starts.
    for node in sorted(nodes.values(), key=lambda node: node.span.start_ns):
        span = node.span
        above = nodes.get((span.trace_id, span.parent_id)) if span.parent_id else None
        top = tops.setdefault(span.trace_id, [])
        if above is None:
            # The parent is in another process's file, or was not sampled.
            node.orphan = bool(span.parent_id)
            top.append(node)
        else:
            above.children.append(node)
    return tops


def draw(
    spans: Sequence[RecordedSpan], *, trace_id: str = "", search: str = "", last: int = 5
) -> Iterator[str]:
    """Yield the lines that draw the `last` matching traces.

    A trace matches if its id starts with `trace_id` and one of its spans has the attribute `search`
    (NAME=VALUE; "" matches all). Raises `InvalidUsage` if none matches.
    """
    wanted = [
        (found, tops)
        for found, tops in trees(spans).items()
        if found.startswith(trace_id.lower()) and _has(spans, found, search)
    ]
    if not wanted:
        raise InvalidUsage("no matching trace in the file")
    names = {(span.trace_id, span.span_id): span.name for span in spans}
    for number, (found, tops) in enumerate(wanted[-last:]):
        if number:
            yield ""
        yield from _draw_trace(found, tops, names)


def _has(spans: Sequence[RecordedSpan], trace_id: str, search: str) -> bool:
    if not search:
        return True
    name, sign, value = search.partition("=")
    if not sign:
        raise InvalidUsage(f"--search {search}: expected NAME=VALUE")
    return any(
        span.trace_id == trace_id and str(span.attributes.get(name)) == value for span in spans
    )


def _draw_trace(
    trace_id: str, tops: Sequence[SpanNode], names: dict[tuple[str, str], str]
) -> Iterator[str]:
    everything = [node for top in tops for node in _all(top)]
    start = min(node.span.start_ns for node in everything)
    end = max(node.span.end_ns for node in everything)
    when = datetime.fromtimestamp(start / 1e9, UTC).isoformat(timespec="milliseconds")
    yield (f"trace {trace_id}  {when}  {len(everything)} spans, {_ms(end - start)}")
    for position, top in enumerate(tops):
        yield from _draw_node(top, start, names, "", last=position == len(tops) - 1)


def _all(node: SpanNode) -> Iterator[SpanNode]:
    yield node
    for child in node.children:
        yield from _all(child)


def _draw_node(
    node: SpanNode, start: int, names: dict[tuple[str, str], str], indent: str, *, last: bool
) -> Iterator[str]:
    span = node.span
    head = f"{indent}{'└─ ' if last else '├─ '}{span.name}"
    timing = f"+{_ms(span.start_ns - start)} {_ms(span.end_ns - span.start_ns)}"
    kind = KINDS[span.kind] if span.kind < len(KINDS) else ""
    words = [f"{head:<60} {timing:>22}  {span.process} {kind}".rstrip()]
    if node.orphan:
        words.append("(parent not recorded)")
    if span.error is not None:
        words.append(f"ERROR {span.error}")
    words += [
        f"{name.removeprefix('penstock.')}={value}"
        for name, value in span.attributes.items()
        if not name.startswith(HIDDEN)
    ]
    yield "  ".join(words)
    below = indent + ("   " if last else "│  ")
    for trace_id, span_id in span.links:
        where = "" if trace_id == span.trace_id else f" of trace {trace_id}"
        bar = "│  " if node.children else "   "
        yield f"{below}{bar}→ serves {names.get((trace_id, span_id), span_id)}{where}"
    for position, child in enumerate(node.children):
        final = position == len(node.children) - 1
        yield from _draw_node(child, start, names, below, last=final)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms"
