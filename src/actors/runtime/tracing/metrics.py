"""The metrics of a process, on a page that Prometheus reads.

Values come in two ways. Parts that count report their numbers when the page is read
(`MetricCollector.watch`, `actors.runtime.measurement`). Rare events are recorded when they happen
(`actors.runtime.spans.measure`); such a series stays until it is forgotten
(`actors.runtime.spans.forget_measures`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from actors.runtime import spans
from actors.runtime.measurement import Measurement, MetricDefinition, ValueHistogram
from actors.runtime.metric_table import METRICS
from actors.runtime.telemetry import SYSTEM

FAMILIES: Final[dict[str, Callable[..., Metric]]] = {
    "counter": CounterMetricFamily,
    "level": GaugeMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_Series: TypeAlias = dict[tuple[str, ...], Any]
"""Values of one metric, by the values of its labels."""


class MetricCollector(Collector):
    """Collects the values of all metrics; created by `start`."""

    def __init__(self) -> None:
        self._look: Callable[[], Iterable[Measurement]] = tuple
        self._recorded: dict[str, _Series] = {metric.name: {} for metric in METRICS}
        named = os.environ.get("OTEL_SERVICE_NAME") or SYSTEM
        self._registry = CollectorRegistry(target_info={"service_name": named})
        self._registry.register(self)

    def watch(self, look: Callable[[], Iterable[Measurement]]) -> None:
        """Set the function that reports measurements when the page is read."""
        self._look = look

    def measure(self, metric: MetricDefinition, value: float, labels: tuple[str, ...]) -> None:
        """See `actors.runtime.spans.MeasureInstruments`."""
        series = self._recorded[metric.name]
        if metric.kind == "gauge":
            series[labels] = value
        elif metric.kind != "histogram":
            series[labels] = series.get(labels, 0.0) + value
        else:
            if labels not in series:
                series[labels] = ValueHistogram(metric.bounds)
            series[labels].note(value)

    def forget(self, metrics: Iterable[MetricDefinition], labels: tuple[str, ...]) -> None:
        """See `actors.runtime.spans.MeasureInstruments`."""
        for metric in metrics:
            self._recorded[metric.name].pop(labels, None)

    def collect(self) -> Iterator[Metric]:
        """Yield all series, as Prometheus' client asks for them."""
        found: dict[str, _Series] = {metric.name: {} for metric in METRICS}
        for metric, value, labels in self.measurements():
            series = found[metric.name]
            # Parts of one kind, such as workers, report equal series: their sum is shown.
            series[labels] = series[labels] + value if labels in series else value
        for metric in METRICS:
            if found[metric.name]:
                yield _family(metric, found[metric.name])

    def measurements(self) -> Iterator[Measurement]:
        """Yield what was recorded, and what is reported at this moment."""
        for metric in METRICS:
            for labels, value in self._recorded[metric.name].items():
                yield Measurement(metric, value, labels)
        yield from self._look()

    def page(self) -> bytes:
        """Return all metrics at this moment, in Prometheus' text format."""
        return generate_latest(self._registry)


def _family(metric: MetricDefinition, series: _Series) -> Metric:
    # The table gives a sentence, and the page a line of help.
    family: Any = FAMILIES[metric.kind](
        metric.family, metric.text.rstrip("."), labels=metric.label_names
    )
    for labels, value in series.items():
        shown = value.buckets() if isinstance(value, ValueHistogram) else (value,)
        family.add_metric(labels, *shown)
    found: Metric = family
    return found


@contextmanager
def start() -> Iterator[MetricCollector]:
    """Collect metrics while the block runs."""
    metrics = MetricCollector()
    spans.measure_by(metrics)
    try:
        yield metrics
    finally:
        spans.measure_by(None)
