"""Metrics of a service, on a page that Prometheus scrapes.

The code that makes steps and appends reports their metrics itself
(`actors.runtime.spans.measure`). Mailboxes and sessions are measured when the page is read. A
metric has one series for each key that was reported. Code that measures an object removes its
series when the object is gone (`actors.runtime.spans.forget_measures`). Only live actors have
series.
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
"""Bounds of the buckets of durations."""
MESSAGES: Final = (0, 5, 10, 25, 50, 75, 100, 250, 500, 750, 1000, 2500, 5000, 7500, 10000)
"""Bounds of the buckets of queue lengths."""
SESSION_PREFIX: Final = "/sessions/"
"""Paths of the actors of client sessions start with it."""
_ACTOR: Final = ("actor",)


FAMILIES: Final[dict[str, Callable[..., Metric]]] = {
    "counter": CounterMetricFamily,
    "level": GaugeMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class MetricDefinition(msgspec.Struct, frozen=True):
    """A metric on the page."""

    kind: Literal["counter", "level", "gauge", "histogram"]
    """Values are added up (``counter``, and ``level``, which can also fall), replace the last one
    (``gauge``), or are counted by size (``histogram``)."""
    text: str
    """The description on the page."""
    unit: str = ""
    """The unit, which the name of the metric ends with."""
    label: str = "penstock.dataflow"
    """Label of the key."""
    bounds: tuple[float, ...] = SECONDS
    """Bounds of a histogram's buckets."""


MEASURES: Final = {
    STEPS: MetricDefinition("counter", "Steps of maintained views"),
    STEP_ROWS_IN: MetricDefinition("counter", "Changes that steps have read"),
    STEP_ROWS_OUT: MetricDefinition("counter", "Changes that steps have produced"),
    LOOP_DELAY_SECONDS: MetricDefinition("histogram", "Delays of the event loop", "seconds"),
    STEPS_IN_ERROR: MetricDefinition(
        "counter", "Repeated step failures that were made an error of the view"
    ),
    STEP_SECONDS: MetricDefinition("histogram", "Duration of steps, from cut to commit", "seconds"),
    APPEND_SECONDS: MetricDefinition("histogram", "Duration of compare-and-appends", "seconds"),
    LAG_MS: MetricDefinition(
        "gauge", "Age of what a reader of an object sees", "milliseconds", "penstock.object"
    ),
    STALLED_MS: MetricDefinition(
        "gauge",
        "Time since an object became stalled or failed; 0 if it works",
        "milliseconds",
        "penstock.object",
    ),
    RECONCILED_REUSED: MetricDefinition(
        "counter", "Running dataflows that were kept for a new client"
    ),
    RECONCILED_REPLACED: MetricDefinition(
        "counter", "Running dataflows that were replaced, by reason", label=REASON
    ),
    WAL_MESSAGES: MetricDefinition("counter", "Proposer messages by outcome", label=WAL_OUTCOME),
    WAL_BYTES: MetricDefinition("counter", "Log written", "bytes"),
    WAL_RECEIVERS: MetricDefinition("level", "Connected proposers"),
    WAL_QUEUED: MetricDefinition("level", "Waiting proposer messages"),
    WAL_QUEUE_BYTES: MetricDefinition("level", "Log in waiting messages", "bytes"),
    WAL_QUEUE_DEPTH: MetricDefinition(
        "histogram", "Waiting messages of one proposer", bounds=MESSAGES
    ),
    WAL_WRITE_SECONDS: MetricDefinition("histogram", "Duration of one append", "seconds"),
    WAL_FLUSH_SECONDS: MetricDefinition("histogram", "Duration of one group flush", "seconds"),
    WAL_RECOVERED_BYTES: MetricDefinition("counter", "Log fetched from peers", "bytes"),
    WAL_OFFLOADED: MetricDefinition("counter", "Segments offloaded"),
    WAL_OFFLOAD_FAILURES: MetricDefinition("counter", "Failed attempts to offload a segment"),
    WAL_BACKUP_LAG: MetricDefinition(
        "gauge", "Committed log that is not offloaded yet", "bytes", "penstock.object"
    ),
}


class ObservedActor(Protocol):
    """The properties of an actor that are measured."""

    @property
    def path(self) -> str:
        """Return the actor's path in the tree of actors."""
        ...

    @property
    def depth(self) -> int:
        """Return the number of messages that wait."""
        ...

    @property
    def depth_max(self) -> int:
        """Return the largest number of messages that have waited."""
        ...

    @property
    def received(self) -> int:
        """Return the number of messages received so far."""
        ...

    @property
    def busy_ms(self) -> float:
        """Return the total time spent handling messages, in ms."""
        ...


class _Histogram:
    """The histogram of one key. A value belongs to the bucket of the first bound not below it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        """Number of values in each bucket; the last one is beyond all bounds."""
        self._sum = 0.0
        """Sum of all values."""

    def note(self, value: float) -> None:
        """Add one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return the number of values up to each bound, and the sum of all values."""
        named = [*(str(bound) for bound in self._bounds), "+Inf"]
        return list(zip(named, accumulate(self._counts), strict=True)), self._sum


class MetricCollector(Collector):
    """Collects the values of all metrics; created by `start`."""

    def __init__(self) -> None:
        self._look: Callable[[], Sequence[ObservedActor]] = list
        """Returns the live actors; set by `watch`."""
        self._values: dict[str, dict[str, Any]] = {name: {} for name in MEASURES}
        """Values by metric and key: a number, or a `_Histogram`."""
        named = os.environ.get("OTEL_SERVICE_NAME") or SYSTEM
        self._registry = CollectorRegistry(target_info={"service_name": named})
        self._registry.register(self)

    def watch(self, look: Callable[[], Sequence[ObservedActor]]) -> None:
        """Set the function that returns the live actors whenever the page is read."""
        self._look = look

    def measure(self, name: str, value: float, key: str) -> None:
        """Add, set or count a value, depending on the kind of the metric `name`."""
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
        """Remove the series of a key from the metrics `names`."""
        for name in names:
            self._values[name].pop(key, None)

    def collect(self) -> Iterator[Metric]:
        """Yield all series, in the form that Prometheus' client library expects."""
        for name, measure in MEASURES.items():
            if self._values[name]:
                yield self._family(name, measure)
        yield from self._actors()

    def _family(self, name: str, measure: MetricDefinition) -> Metric:
        values, unit = self._values[name], measure.unit
        title = name.replace(".", "_") + (f"_{unit}" if unit else "")
        # Without a key the metric is of the whole service and has no label.
        labels = [measure.label.replace(".", "_")] if any(values) else []
        family: Any = FAMILIES[measure.kind](title, measure.text, labels=labels)
        for key, value in values.items():
            shown = value.buckets() if measure.kind == "histogram" else (value,)
            family.add_metric([key] if labels else [], *shown)
        found: Metric = family
        return found

    def _actors(self) -> Iterator[Metric]:
        live = self._look()
        depth = GaugeMetricFamily("penstock_mailbox_depth", "Waiting messages", labels=_ACTOR)
        highest = GaugeMetricFamily(
            "penstock_mailbox_depth_max", "Most messages that have waited", labels=_ACTOR
        )
        received = CounterMetricFamily(
            "penstock_mailbox_received", "Messages received", labels=_ACTOR
        )
        busy = CounterMetricFamily(
            "penstock_actor_busy_seconds", "Time spent handling messages", labels=_ACTOR
        )
        for seen in live:
            depth.add_metric([seen.path], seen.depth)
            highest.add_metric([seen.path], seen.depth_max)
            received.add_metric([seen.path], seen.received)
            busy.add_metric([seen.path], seen.busy_ms / 1000)
        sessions = sum(seen.path.startswith(SESSION_PREFIX) for seen in live)
        yield from (depth, highest, received, busy)
        yield GaugeMetricFamily("penstock_sessions", "Client connections", value=sessions)

    def page(self) -> bytes:
        """Return the current values of all metrics, in Prometheus text format."""
        return generate_latest(self._registry)


@contextmanager
def start() -> Iterator[MetricCollector]:
    """Collect metrics while the block runs."""
    metrics = MetricCollector()
    spans.measure_by(metrics)
    try:
        yield metrics
    finally:
        spans.measure_by(None)
