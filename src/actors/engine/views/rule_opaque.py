"""Opaque views: no rule knows the query, so it is recomputed at each time.

There are no strata: the dataflow sends the view's own text as a `Difference` and emits only what
changed. That is exact, at the cost of the whole query; EXPLAIN shows the reason.
"""

from __future__ import annotations

from actors.model.plan.delta import DeltaPlan
from actors.model.plan.relational import OpaqueNode
from actors.model.plan.schema import TableSchema


def derive(
    plan: OpaqueNode,
    inputs: tuple[str, ...],
    schemas: tuple[TableSchema, ...],
    output: TableSchema,
    conf: tuple[tuple[str, str], ...],
) -> DeltaPlan:
    """Return the plan of a view that is recomputed whole."""
    return DeltaPlan(
        inputs=inputs,
        input_schemas=schemas,
        output=output,
        sql=plan.sql,
        mode="opaque",
        reason=plan.reason,
        conf=conf,
    )
