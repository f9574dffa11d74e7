"""Opaque: what no rule knows is recomputed at each time and the old contents subtracted.

It has no strata: the dataflow sends the view's own text as a `Difference`. Exact, at the cost of
the whole query; the reason is shown by EXPLAIN.
"""

from __future__ import annotations

from actors.plan.delta import DeltaPlan
from actors.plan.relational import Opaque
from actors.plan.schema import Schema


def derive(
    plan: Opaque,
    sources: tuple[str, ...],
    schemas: tuple[Schema, ...],
    output: Schema,
    conf: tuple[tuple[str, str], ...],
) -> DeltaPlan:
    """The plan of a view that is recomputed whole."""
    return DeltaPlan(
        sources=sources,
        source_schemas=schemas,
        output=output,
        sql=plan.sql,
        mode="opaque",
        reason=plan.reason,
        conf=conf,
    )
