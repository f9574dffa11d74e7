"""A sampler whose ratio can be changed while it is used."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import (
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes


class RatioSampler(Sampler):
    """Samples a share of traces, by their ids: every process with the same ratio takes the same
    ones."""

    def __init__(self, rate: float) -> None:
        self._now = TraceIdRatioBased(rate)

    @property
    def rate(self) -> float:
        """Return the share, from 0 to 1."""
        return self._now.rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._now = TraceIdRatioBased(rate)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Sample by the ratio of this moment."""
        return self._now.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        """Return a description for people."""
        return self._now.get_description()


def sampler_of(ratio: RatioSampler, *, parent_based: bool) -> Sampler:
    """Return a sampler: the ratio for traces that begin here; otherwise, if wanted, the decision of
    the parent."""
    return ParentBased(root=ratio) if parent_based else ratio
