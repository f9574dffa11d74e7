"""A receiver of traces as Jaeger is one: OTLP over HTTP, real protobufs, and OTLP's rules."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received(msgspec.Struct, frozen=True):
    """A span as it came, with its resource."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    resource: dict[str, Any]

    @property
    def service(self) -> str:
        """The process that it is of."""
        return str(self.resource["service.name"])


class Receiver:
    """What came so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.rejected: list[str] = []
        self._spans: list[Received] = []
        self._changed = threading.Condition()

    def take(self, path: str, kind: str | None, body: bytes) -> int:
        """One request; the HTTP status."""
        if path != "/v1/traces" or kind != "application/x-protobuf":
            self.rejected.append(f"{path} as {kind}")
            return 404
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        with self._changed:
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                if not resource.get("service.name"):
                    self.rejected.append(f"a resource without service.name: {resource}")
                for scope in group.scope_spans:
                    if not scope.scope.name:
                        self.rejected.append("a scope without name")
                    for span in scope.spans:
                        self.rejected += [f"{span.name}: {why}" for why in _wrong(span)]
                        self._spans.append(_received(span, resource))
            self._changed.notify_all()
        return 200

    def spans(self) -> list[Received]:
        """All of them, by their starts."""
        with self._changed:
            return sorted(self._spans, key=lambda span: span.start_ns)

    def wait(self, *names: str, trace_id: str = "", seconds: float = 30.0) -> list[Received]:
        """The spans (of one trace) once spans of all these names are there."""

        def complete() -> bool:
            mine = [s for s in self._spans if not trace_id or s.trace_id == trace_id]
            return set(names) <= {span.name for span in mine}

        with self._changed:
            done = self._changed.wait_for(complete, seconds)
        found = [span for span in self.spans() if not trace_id or span.trace_id == trace_id]
        missing = set(names) - {span.name for span in found}
        assert done, f"missing {missing}; there are {[span.name for span in found]}"
        return found


def _wrong(span: Any) -> Iterator[str]:
    """What OTLP's rules refuse of a span."""
    if len(span.trace_id) != 16 or not any(span.trace_id):
        yield f"trace id {span.trace_id!r}"
    if len(span.span_id) != 8 or not any(span.span_id):
        yield f"span id {span.span_id!r}"
    if span.parent_span_id and (len(span.parent_span_id) != 8 or not any(span.parent_span_id)):
        yield f"parent's id {span.parent_span_id!r}"
    if not span.name:
        yield "no name"
    if span.kind not in (1, 2, 3, 4, 5):
        yield f"kind {span.kind}"
    if span.status.code not in (0, 1, 2) or (span.status.message and span.status.code != 2):
        yield f"status {span.status}"
    if not 0 < span.start_time_unix_nano <= span.end_time_unix_nano:
        yield f"times {span.start_time_unix_nano} to {span.end_time_unix_nano}"
    keys = [pair.key for pair in span.attributes]
    if "" in keys or len(set(keys)) < len(keys):
        yield f"attributes {keys}"
    for link in span.links:
        if len(link.trace_id) != 16 or len(link.span_id) != 8:
            yield f"a link to {link.trace_id!r} {link.span_id!r}"


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=span.status.code,
        attributes=_attributes(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        resource=resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            status = receiver.take(self.path, self.headers.get("Content-Type"), body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
