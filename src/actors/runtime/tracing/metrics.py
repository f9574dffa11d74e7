"""Measures of a service, on a page that Prometheus reads.

Steps, appends and lags are given by the code that does them (`actors.runtime.spans.measure`);
mailboxes and sessions are looked at when the page is read. A measure has a series for each key that
is given and not taken back: code that measures an object takes its series back when the object goes
(`actors.runtime.spans.forget_measures`). Of actors only the live ones have series.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final, Literal, Protocol

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from actors.runtime import spans
from actors.runtime.telemetry import (
    APPEND_SECONDS,
    LAG_MS,
    LOOP_DELAY_SECONDS,
    REASON,
    RECONCILED_REPLACED,
    RECONCILED_REUSED,
    STALLED_MS,
    STEP_ROWS_IN,
    STEP_ROWS_OUT,
    STEP_SECONDS,
    STEPS,
    STEPS_IN_ERROR,
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
MESSAGES: Final = (0, 5, 10, 25, 50, 75, 100, 250, 500, 750, 1000, 2500, 5000, 7500, 10000)
SESSION_PREFIX: Final = "/sessions/"
_ACTOR: Final = ("actor",)


FAMILIES: Final[dict[str, Callable[..., Metric]]] = {
    "counter": CounterMetricFamily,
    "level": GaugeMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class MetricDefinition(msgspec.Struct, frozen=True):
    """A metric on the page: whether values are added up (a counter never falls, a level may), set,
    or counted by size; its text and unit; the label of its key."""

    kind: Literal["counter", "level", "gauge", "histogram"]
    text: str
    unit: str = ""
    label: str = "penstock.dataflow"
    bounds: tuple[float, ...] = SECONDS


MEASURES: Final = {
    STEPS: MetricDefinition("counter", "Steps of maintained views"),
    STEP_ROWS_IN: MetricDefinition("counter", "Changes that steps took in"),
    STEP_ROWS_OUT: MetricDefinition("counter", "Changes that steps made"),
    LOOP_DELAY_SECONDS: MetricDefinition(
        "histogram", "Turns of the event loop that came late, by how much", "seconds"
    ),
    STEPS_IN_ERROR: MetricDefinition(
        "counter", "Failures that came so often in the same way that they are the view's error"
    ),
    STEP_SECONDS: MetricDefinition("histogram", "From cut to commit", "seconds"),
    APPEND_SECONDS: MetricDefinition("histogram", "Compare-and-appends", "seconds"),
    LAG_MS: MetricDefinition(
        "gauge", "Age of what a reader of an object sees", "milliseconds", "penstock.object"
    ),
    STALLED_MS: MetricDefinition(
        "gauge",
        "How long an object has been stalled or in error; 0: it is neither",
        "milliseconds",
        "penstock.object",
    ),
    RECONCILED_REUSED: MetricDefinition(
        "counter", "Dataflows that a new client found running and kept"
    ),
    RECONCILED_REPLACED: MetricDefinition(
        "counter", "Reasons for which a running dataflow was not kept", label=REASON
    ),
    WAL_MESSAGES: MetricDefinition("counter", "Of proposers, by outcome", label=WAL_OUTCOME),
    WAL_BYTES: MetricDefinition("counter", "Of log", "bytes"),
    WAL_RECEIVERS: MetricDefinition("level", "Proposers"),
    WAL_QUEUED: MetricDefinition("level", "Messages not yet taken"),
    WAL_QUEUE_BYTES: MetricDefinition("level", "Their log", "bytes"),
    WAL_QUEUE_DEPTH: MetricDefinition("histogram", "Of one proposer", bounds=MESSAGES),
    WAL_WRITE_SECONDS: MetricDefinition("histogram", "Of one append", "seconds"),
    WAL_FLUSH_SECONDS: MetricDefinition("histogram", "Of a group", "seconds"),
    WAL_RECOVERED_BYTES: MetricDefinition("counter", "From peers", "bytes"),
    WAL_OFFLOADED: MetricDefinition("counter", "Segments kept elsewhere"),
    WAL_OFFLOAD_FAILURES: MetricDefinition("counter", "Tries to keep one that failed"),
    WAL_BACKUP_LAG: MetricDefinition(
        "gauge", "Log that is committed and kept nowhere else", "bytes", "penstock.object"
    ),
}


class ObservedActor(Protocol):
    """The measured properties of an actor."""

    @property
    def path(self) -> str:
        """Return its place in the tree of actors."""
        ...

    @property
    def depth(self) -> int:
        """Return the number of messages that wait."""
        ...

    @property
    def depth_max(self) -> int:
        """Return the most messages that have waited at a time."""
        ...

    @property
    def received(self) -> int:
        """Return the number of messages so far."""
        ...

    @property
    def busy_ms(self) -> float:
        """Return the time spent in handlers."""
        ...


class _Histogram:
    """A histogram of one key: values by the first bound that is not below them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def note(self, value: float) -> None:
        """Count one value more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return how many values there are up to each bound, and the sum of all."""
        named = [*(str(bound) for bound in self._bounds), "+Inf"]
        return list(zip(named, accumulate(self._counts), strict=True)), self._sum


class MetricCollector(Collector):
    """The values of all measures; begun by `start`."""

    def __init__(self) -> None:
        self._look: Callable[[], Sequence[ObservedActor]] = list
        self._values: dict[str, dict[str, Any]] = {name: {} for name in MEASURES}
        named = os.environ.get("OTEL_SERVICE_NAME") or SYSTEM
        self._registry = CollectorRegistry(target_info={"service_name": named})
        self._registry.register(self)

    def watch(self, look: Callable[[], Sequence[ObservedActor]]) -> None:
        """Set the function that returns the live actors when the page is read."""
        self._look = look

    def measure(self, name: str, value: float, key: str) -> None:
        """See `actors.runtime.spans.MeasureInstruments`."""
        measure, values = MEASURES[name], self._values[name]
        if measure.kind == "gauge":
            values[key] = value
        elif measure.kind != "histogram":
            values[key] = values.get(key, 0.0) + value
        else:
            if key not in values:
                values[key] = _Histogram(measure.bounds)
            values[key].note(value)

    def forget(self, key: str, names: Iterable[str]) -> None:
        """See `actors.runtime.spans.MeasureInstruments`."""
        for name in names:
            self._values[name].pop(key, None)

    def collect(self) -> Iterator[Metric]:
        """Yield all series, as Prometheus' client asks for them."""
        for name, measure in MEASURES.items():
            if self._values[name]:
                yield self._family(name, measure)
        yield from self._actors()

    def _family(self, name: str, measure: MetricDefinition) -> Metric:
        values, unit = self._values[name], measure.unit
        title = name.replace(".", "_") + (f"_{unit}" if unit else "")
        # Without any key the measure is of the whole service, and has no label.
        labels = [measure.label.replace(".", "_")] if any(values) else []
        family: Any = FAMILIES[measure.kind](title, measure.text, labels=labels)
        for key, value in values.items():
            shown = value.buckets() if measure.kind == "histogram" else (value,)
            family.add_metric([key] if labels else [], *shown)
        found: Metric = family
        return found

    def _actors(self) -> Iterator[Metric]:
        live = self._look()
        depth = GaugeMetricFamily("penstock_mailbox_depth", "Messages that wait", labels=_ACTOR)
        highest = GaugeMetricFamily("penstock_mailbox_depth_max", "High-water mark", labels=_ACTOR)
        received = CounterMetricFamily(
            "penstock_mailbox_received", "Messages so far", labels=_ACTOR
        )
        busy = CounterMetricFamily("penstock_actor_busy_seconds", "In handlers", labels=_ACTOR)
        for seen in live:
            depth.add_metric([seen.path], seen.depth)
            highest.add_metric([seen.path], seen.depth_max)
            received.add_metric([seen.path], seen.received)
            busy.add_metric([seen.path], seen.busy_ms / 1000)
        sessions = sum(seen.path.startswith(SESSION_PREFIX) for seen in live)
        yield from (depth, highest, received, busy)
        yield GaugeMetricFamily("penstock_sessions", "Client connections", value=sessions)

    def page(self) -> bytes:
        """Return all measures at this moment, in Prometheus' text format."""
        return generate_latest(self._registry)


@contextmanager
def start() -> Iterator[MetricCollector]:
    """Measure while the block runs."""
    metrics = MetricCollector()
    spans.measure_by(metrics)
    try:
        yield metrics
    finally:
        spans.measure_by(None)
