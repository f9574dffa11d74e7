"""Measurements: how a metric is defined, and what a part of the service reports for it.

A part that counts keeps the number where it happens, in an attribute of its own, and reports it
when the page is read: an actor by `Actor.measures`, others through their owner. The metrics
themselves are in `actors.runtime.metric_table`.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Bounds of the buckets of a duration."""

MetricKind: TypeAlias = Literal["counter", "level", "gauge", "histogram"]
"""A counter never falls. A level is a number that is raised and lowered, a gauge one that is set. A
histogram counts values by size."""


class MetricDefinition(msgspec.Struct, frozen=True):
    """One metric of the page."""

    group: str
    """Section of the docs and row of the dashboard."""
    name: str
    """Name with dots, without unit."""
    kind: MetricKind
    text: str
    """One sentence: what the value is."""
    action: str
    """Advice for when the value is high."""
    unit: str = ""
    labels: tuple[str, ...] = ()
    """Names of the labels, with dots."""
    bounds: tuple[float, ...] = SECONDS
    """Upper bounds of a histogram's buckets."""

    @property
    def family(self) -> str:
        """Return the name on the page, without a suffix of its kind."""
        return self.name.replace(".", "_") + (f"_{self.unit}" if self.unit else "")

    @property
    def series(self) -> str:
        """Return the name by which a query finds the values.

        >>> MetricDefinition("", "penstock.steps", "counter", "", "").series
        'penstock_steps_total'
        """
        suffixes = {"counter": "_total", "histogram": "_bucket"}
        return self.family + suffixes.get(self.kind, "")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the names of the labels on the page."""
        return tuple(label.replace(".", "_") for label in self.labels)


class ValueHistogram:
    """Values of one series of a histogram, counted by the first bound that is not below them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def note(self, value: float) -> None:
        """Count one value more."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def __add__(self, other: ValueHistogram) -> ValueHistogram:
        """Return a histogram of the values of both, which have the same bounds."""
        both = ValueHistogram(self.bounds)
        both.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        both.total = self.total + other.total
        return both

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return how many values there are up to each bound, and the sum of all."""
        named = [*(str(bound) for bound in self.bounds), "+Inf"]
        return list(zip(named, accumulate(self.counts), strict=True)), self.total


class Measurement(NamedTuple):
    """The value of one series at this moment. Equal series of several parts are added up."""

    metric: MetricDefinition
    value: float | ValueHistogram
    labels: tuple[str, ...] = ()
    """Values of the metric's labels, in their order."""
