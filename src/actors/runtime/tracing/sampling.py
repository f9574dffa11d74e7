"""A sampler whose ratio can be changed at run time.

Only `actors.runtime.tracing.setup` imports this module, because it needs OpenTelemetry's SDK.
"""

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
    """Samples a fraction of the traces by their ids, so all processes with the same ratio sample
    the same traces."""

    def __init__(self, rate: float) -> None:
        self._now = TraceIdRatioBased(rate)
        """Sampler with the current ratio; setting `rate` replaces it."""

    @property
    def rate(self) -> float:
        """Return the ratio, from 0 to 1."""
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
        """Decide by the current ratio."""
        return self._now.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        """Describe the sampler for display."""
        return self._now.get_description()


def sampler_of(ratio: RatioSampler, *, parent_based: bool) -> Sampler:
    """Return a sampler that applies the ratio to traces that start here.

    With `parent_based`, a trace that started elsewhere keeps the decision of its parent.
    """
    return ParentBased(root=ratio) if parent_based else ratio
