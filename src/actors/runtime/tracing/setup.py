"""Starts the tracing of a process: sampler, exporters, resource.

`read_options` reads flags and OpenTelemetry's standard environment variables without importing the
SDK; `start` imports and configures it. Spans go into a bounded queue. A separate thread exports
them to an OTLP receiver (HTTP with protobuf), to a file of OTLP JSON lines, or to both. If the
queue is full, spans are dropped, so tracing never delays the service.

Variables: OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT (either turns tracing
on), the exporter's others (headers, certificate, compression, timeout), OTEL_TRACES_EXPORTER
(``otlp`` or ``none``), OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG, OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_*, OTEL_SDK_DISABLED.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from actors.runtime import spans
from actors.runtime.errors import BadSettings, InvalidUsage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

SERVICE_NAME: Final = "penstock"
"""Default name of a process in traces."""
ENGINE_NAME: Final = "penstock-engine"
"""Name of the engine's process in traces."""
TRACES_PATH: Final = "/v1/traces"
"""Path of the receiver, below its base URL."""
FLUSH_MS_MAX: Final = 5_000
"""Timeout for exporting the remaining spans."""
ENGINES_MAX: Final = 8
"""Number of engine processes whose tracers are kept."""


class TraceOptions(msgspec.Struct, frozen=True):
    """The tracing options of a process."""

    endpoint: str | None = None
    """Base URL of the receiver; None leaves it to the exporter's own variables."""
    send: bool = False
    """True if traces are sent to a receiver."""
    file: Path | None = None
    """File to which traces are appended; None for none."""
    ratio: float = 1.0
    """Fraction of new traces that are sampled."""
    parent_based: bool = True
    """True if a trace that started elsewhere keeps the sampling decision made there."""
    service: str = SERVICE_NAME
    """Name of this process in traces."""

    @property
    def wanted(self) -> bool:
        """Return whether traces are exported at all."""
        return self.send or self.file is not None


def read_options(
    *,
    otlp: str = "",
    file: str = "",
    service: str = SERVICE_NAME,
    environment: Mapping[str, str] | None = None,
) -> TraceOptions:
    """Return the options given by flags and the environment. Flags take precedence.

    Raises `BadSettings` for values that are not supported.
    """
    given = os.environ if environment is None else environment

    def variable(name: str) -> str:
        return given.get(name, "").strip()

    exporter = variable("OTEL_TRACES_EXPORTER").lower()
    if exporter not in ("", "otlp", "none"):
        raise BadSettings(f"OTEL_TRACES_EXPORTER={exporter}: must be otlp or none")
    protocol = variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or variable(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    named = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or variable(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    off = variable("OTEL_SDK_DISABLED").lower() == "true" or exporter == "none"
    send = bool(otlp) or (not off and bool(named or exporter))
    if send and protocol not in ("", "http/protobuf"):
        raise BadSettings(
            f"OTLP over {protocol} is not supported: use http/protobuf (port 4318 of Jaeger)"
        )
    if otlp and not otlp.startswith(("http://", "https://")):
        raise BadSettings(f"--otlp {otlp}: expected a URL such as http://127.0.0.1:4318")
    parent_based, ratio = _sampler(
        variable("OTEL_TRACES_SAMPLER"), variable("OTEL_TRACES_SAMPLER_ARG")
    )
    return TraceOptions(
        endpoint=otlp or None,
        send=send,
        file=Path(file) if file else None,
        ratio=ratio,
        parent_based=parent_based,
        service=variable("OTEL_SERVICE_NAME") or service,
    )


def _sampler(name: str, argument: str) -> tuple[bool, float]:
    """Return (parent based, ratio) for the name of an OpenTelemetry sampler.

    Raises `BadSettings` for an unknown name or an invalid ratio.
    """
    plain = name.removeprefix("parentbased_")
    # OpenTelemetry's default is parentbased_always_on.
    parent_based = name.startswith("parentbased_") or not name
    match plain:
        case "" | "always_on":
            return parent_based, 1.0
        case "always_off":
            return parent_based, 0.0
        case "traceidratio":
            try:
                return parent_based, checked_ratio(float(argument or "1"))
            except (ValueError, InvalidUsage):
                text = f"OTEL_TRACES_SAMPLER_ARG={argument}: must be a number from 0 to 1"
                raise BadSettings(text) from None
    raise BadSettings(
        f"OTEL_TRACES_SAMPLER={name}: must be always_on, always_off or traceidratio, or one of "
        "these with the prefix parentbased_"
    )


def checked_ratio(ratio: float) -> float:
    """Return the ratio. Raises `InvalidUsage` if it is not between 0 and 1."""
    if not 0 <= ratio <= 1:
        raise InvalidUsage(f"invalid sampling ratio {ratio}: must be from 0 to 1")
    return ratio


class TracingSetup:
    """The running tracing of this process, created by `start`."""

    def __init__(self, options: TraceOptions) -> None:
        from actors.runtime.tracing.sampling import RatioSampler, sampler_of

        self.options = options
        self._ratio = RatioSampler(options.ratio)
        self._processors = _processors(options)
        sampler = sampler_of(self._ratio, parent_based=options.parent_based)
        self._provider = self._provide(options.service, os.getpid(), sampler)
        self.tracer: Tracer = self._provider.get_tracer(SERVICE_NAME)
        self._engines: dict[int, tuple[TracerProvider, Tracer]] = {}
        """Tracers of the last engine processes, by pid."""

    @property
    def ratio(self) -> float:
        """Return the fraction of new traces that are sampled."""
        return self._ratio.rate

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        """Set the fraction for future traces. Raises `InvalidUsage`."""
        self._ratio.rate = checked_ratio(ratio)

    @property
    def can_start_traces(self) -> bool:
        """Return whether a new trace could be sampled."""
        return self._ratio.rate > 0

    def engine(self, pid: int) -> Tracer:
        """Return the tracer for spans that the engine process `pid` has reported."""
        found = self._engines.get(pid)
        if found is None:
            while len(self._engines) >= ENGINES_MAX:
                del self._engines[next(iter(self._engines))]
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON

            name = ENGINE_NAME
            if self.options.service != SERVICE_NAME:
                name = f"{self.options.service}-engine"
            # The engine traces only sampled jobs, so the decision was made before.
            provider = self._provide(name, pid, ALWAYS_ON)
            found = self._engines[pid] = provider, provider.get_tracer(SERVICE_NAME)
        return found[1]

    def _provide(self, service: str, pid: int, sampler: Any) -> TracerProvider:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider

        resource = Resource.create({"service.name": service, "process.pid": pid})
        limits = SpanLimits(max_links=spans.LINKS_MAX)
        made = TracerProvider(
            sampler=sampler, resource=resource, shutdown_on_exit=False, span_limits=limits
        )
        for processor in self._processors:
            made.add_span_processor(processor)
        return made

    def flush(self) -> bool:
        """Block until ended spans are exported. Return False after `FLUSH_MS_MAX`."""
        return self._provider.force_flush(FLUSH_MS_MAX)

    def close(self) -> None:
        """Export the remaining spans and stop. May block for some seconds."""
        self.flush()
        self._provider.shutdown()


def _processors(options: TraceOptions) -> list[Any]:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    made: list[Any] = []
    if options.send:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        url = options.endpoint
        if url is not None and not url.endswith(TRACES_PATH):
            url = url.rstrip("/") + TRACES_PATH
        made.append(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    if options.file is not None:
        from actors.runtime.tracing.otlp_file import FileExporter

        made.append(BatchSpanProcessor(FileExporter(options.file)))
    return made


@contextmanager
def start(options: TraceOptions | None = None) -> Iterator[TracingSetup | None]:
    """Trace while the block runs, with `options` (default: from the environment).

    At the end the remaining spans are exported, which may block for some seconds. Yields None if
    the options turn tracing off. Raises `BadSettings`, and `InvalidUsage` if tracing is already
    enabled in this process.
    """
    options = read_options() if options is None else options
    if not options.wanted:
        yield None
        return
    if spans.current_export() is not None:
        raise InvalidUsage("tracing is already enabled in this process")
    tracing = TracingSetup(options)
    spans.export_by(tracing)
    try:
        yield tracing
    finally:
        # First, so that no span starts while the rest is exported.
        spans.export_by(None)
        tracing.close()


def current_tracing() -> TracingSetup | None:
    """Return the tracing that `start` has enabled in this process; None if there is none."""
    found = spans.current_export()
    return found if isinstance(found, TracingSetup) else None
