"""Measures of a service by OpenTelemetry's SDK, on a page that Prometheus reads.

Steps, appends and lags are given by who knows them (`actors.spans.measure`); mailboxes and
sessions are looked at when the page is read. The page is made in the event loop, by the loop's
own thread: nothing is looked at while it changes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Protocol

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest

from actors import spans
from actors.errors import AddressInUse, BadSettings
from actors.telemetry import (
    APPEND_SECONDS,
    LAG_MS,
    REASON,
    RECONCILED_REPLACED,
    RECONCILED_REUSED,
    STEP_ROWS_IN,
    STEP_ROWS_OUT,
    STEP_SECONDS,
    STEPS,
    SYSTEM,
    WAL_BACKUP_LAG,
    WAL_BYTES,
    WAL_FLUSH_SECONDS,
    WAL_MESSAGES,
    WAL_OFFLOAD_FAILURES,
    WAL_OFFLOADED,
    WAL_OUTCOME,
    WAL_QUEUE_BYTES,
    WAL_QUEUE_DEPTH,
    WAL_QUEUED,
    WAL_RECEIVERS,
    WAL_RECOVERED_BYTES,
    WAL_WRITE_SECONDS,
)

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
KEYS: Final = {RECONCILED_REPLACED: REASON, WAL_MESSAGES: WAL_OUTCOME}
"""What the key of a measure is, where it is no dataflow."""
REQUEST_BYTES_MAX: Final = 8192
REQUEST_SECONDS_MAX: Final = 5.0
SESSION_PREFIX: Final = "/sessions/"


class Seen(Protocol):
    """What is looked at of an actor."""

    @property
    def path(self) -> str:
        """Its place in the tree."""
        ...

    @property
    def depth(self) -> int:
        """Messages that wait."""
        ...

    @property
    def depth_max(self) -> int:
        """As many have waited."""
        ...

    @property
    def received(self) -> int:
        """Messages so far."""
        ...

    @property
    def busy_ms(self) -> float:
        """In handlers."""
        ...


class Metrics:
    """The instruments; made by `start`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=self._registry)
        buckets = ExplicitBucketHistogramAggregation(SECONDS)
        views = [
            View(instrument_name=name, aggregation=buckets)
            for name in (STEP_SECONDS, APPEND_SECONDS, WAL_WRITE_SECONDS, WAL_FLUSH_SECONDS)
        ]
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or SYSTEM}
        self._provider = MeterProvider(
            [reader], resource=Resource.create(named), views=views, shutdown_on_exit=False
        )
        meter = self._provider.get_meter("penstock")
        self._look: Callable[[], Sequence[Seen]] = list
        self._adders: dict[str, Any] = {
            STEPS: meter.create_counter(STEPS, "1", "Steps of maintained views"),
            STEP_ROWS_IN: meter.create_counter(STEP_ROWS_IN, "1", "Changes that steps took in"),
            STEP_ROWS_OUT: meter.create_counter(STEP_ROWS_OUT, "1", "Changes that steps made"),
            RECONCILED_REUSED: meter.create_counter(
                RECONCILED_REUSED, "1", "Dataflows that a new client found running and kept"
            ),
            RECONCILED_REPLACED: meter.create_counter(
                RECONCILED_REPLACED, "1", "Reasons for which a running dataflow was not kept"
            ),
            WAL_MESSAGES: meter.create_counter(WAL_MESSAGES, "1", "Of proposers, by outcome"),
            WAL_BYTES: meter.create_counter(WAL_BYTES, "By", "Of log"),
            WAL_RECEIVERS: meter.create_up_down_counter(WAL_RECEIVERS, "1", "Proposers"),
            WAL_QUEUED: meter.create_up_down_counter(WAL_QUEUED, "1", "Messages not yet taken"),
            WAL_QUEUE_BYTES: meter.create_up_down_counter(WAL_QUEUE_BYTES, "By", "Their log"),
            WAL_RECOVERED_BYTES: meter.create_counter(WAL_RECOVERED_BYTES, "By", "From peers"),
            WAL_OFFLOADED: meter.create_counter(WAL_OFFLOADED, "1", "Segments kept elsewhere"),
            WAL_OFFLOAD_FAILURES: meter.create_counter(
                WAL_OFFLOAD_FAILURES, "1", "Tries to keep one that failed"
            ),
        }
        self._recorders: dict[str, Any] = {
            STEP_SECONDS: meter.create_histogram(STEP_SECONDS, "s", "From cut to commit"),
            APPEND_SECONDS: meter.create_histogram(APPEND_SECONDS, "s", "Compare-and-appends"),
            WAL_WRITE_SECONDS: meter.create_histogram(WAL_WRITE_SECONDS, "s", "Of one append"),
            WAL_FLUSH_SECONDS: meter.create_histogram(WAL_FLUSH_SECONDS, "s", "Of a group"),
            WAL_QUEUE_DEPTH: meter.create_histogram(WAL_QUEUE_DEPTH, "1", "Of one proposer"),
        }
        self._setters: dict[str, Any] = {
            LAG_MS: meter.create_gauge(LAG_MS, "ms", "How far an object is behind the tables"),
            WAL_BACKUP_LAG: meter.create_gauge(
                WAL_BACKUP_LAG, "By", "Log that is committed and kept nowhere else"
            ),
        }
        for name, unit, text, of in (
            ("penstock.mailbox.depth", "1", "Messages that wait", lambda a: a.depth),
            ("penstock.mailbox.depth_max", "1", "High-water mark", lambda a: a.depth_max),
        ):
            meter.create_observable_gauge(name, [self._observer(of)], unit, text)
        for name, unit, text, of in (
            ("penstock.mailbox.received", "1", "Messages so far", lambda a: a.received),
            ("penstock.actor.busy", "s", "In handlers", lambda a: a.busy_ms / 1000),
        ):
            meter.create_observable_counter(name, [self._observer(of)], unit, text)
        meter.create_observable_gauge(
            "penstock.sessions", [self._sessions], "1", "Client connections"
        )

    def watch(self, look: Callable[[], Sequence[Seen]]) -> None:
        """Where to look for live actors when the page is read."""
        self._look = look

    def measure(self, name: str, value: float, key: str) -> None:
        """See `actors.spans.Instruments`."""
        kind = KEYS.get(name, "penstock.dataflow")
        attributes = {kind: key} if key else {}
        if name in self._adders:
            self._adders[name].add(value, attributes)
        elif name in self._recorders:
            self._recorders[name].record(value, attributes)
        else:
            self._setters[name].set(value, {"penstock.object": key})

    def _observer(self, of: Callable[[Any], float]) -> Callable[[CallbackOptions], Any]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(of(seen), {"actor": seen.path}) for seen in self._look()]

        return observe

    def _sessions(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(sum(seen.path.startswith(SESSION_PREFIX) for seen in self._look()))]

    def page(self) -> bytes:
        """All measures at this moment, in Prometheus' text format."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Ends."""
        self._provider.shutdown()

    @asynccontextmanager
    async def serve(self, address: str) -> AsyncIterator[str]:
        """Serves ``GET /metrics`` on host:port (an empty host is loopback, port 0 a free one); the
        page's URL. Raises `BadSettings`, `AddressInUse`."""
        host, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise BadSettings(f"metrics_listen = {address!r}: give host:port")
        try:
            server = await asyncio.start_server(
                self._answer, host or "127.0.0.1", int(port), limit=REQUEST_BYTES_MAX
            )
        except OSError as error:
            raise AddressInUse(f"cannot serve measures on {address}: {error.strerror}") from None
        name = server.sockets[0].getsockname()
        try:
            yield f"http://{name[0]}:{name[1]}/metrics"
        finally:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection; what is no request for the page is told so."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                head = await reader.readuntil(b"\r\n\r\n")
                line = head.partition(b"\r\n")[0].split(b" ")
                known = len(line) == 3 and line[1].partition(b"?")[0] == b"/metrics"
                if known and line[0] == b"GET":
                    writer.write(_response("200 OK", self.page()))
                else:
                    writer.write(_response("404 Not Found", b"the page is GET /metrics\n"))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()


def _response(status: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def start() -> Iterator[Metrics]:
    """Measures while the block runs."""
    metrics = Metrics()
    spans.measure_by(metrics)
    try:
        yield metrics
    finally:
        spans.measure_by(None)
        metrics.close()
