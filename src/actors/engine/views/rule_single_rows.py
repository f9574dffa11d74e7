"""Inner joins: several inputs of one row each become a single input of one row.

A query with scalar subqueries joins as many single rows, and a join of n inputs has n terms with n
inputs each. So the rows are combined by UNION ALL instead, each padded with NULLs, and stored as a
state (`rule_stored_rows`). A grouping without keys takes each column from the row that has it.

    {(a)} × {(b)}   =   max(a), max(b) over {(a, NULL), (NULL, b)}   where both rows exist
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from actors.engine.views.operators import DerivationContext, ViewOperator
from actors.engine.views.rule_join import JoinOperator
from actors.engine.views.rule_linear import FilterOperator, ProjectOperator, UnionOperator
from actors.engine.views.rule_range_lookup import range_lookups
from actors.engine.views.rule_recompute import RecomputeOperator
from actors.engine.views.rule_stored_rows import StoredRowsOperator, unstorable_reason
from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    FilterNode,
    JoinNode,
    NamedExpression,
)

PACKED_MIN: Final = 3
"""Minimum number of single rows that are packed: a join of two has no more terms than the packed
plan."""


def inner_join(
    context: DerivationContext,
    plan: JoinNode,
    sides: Sequence[ViewOperator],
    read: Iterable[str] | None = None,
) -> ViewOperator:
    """Return the join of `sides`, the inputs of `plan`, with its single rows packed into one input.

    `read`: the columns that a projection above reads; None for all.
    """
    types = dict(plan.types)
    rows = [side for side in sides if side.is_one_row() and not side.is_constant()]
    columns = tuple(id_ for row in rows for id_ in row.columns)
    if len(rows) < PACKED_MIN or unstorable_reason(types, columns, ()):
        if read is None:
            return JoinOperator(context, tuple(sides), plan.equal, plan.residual)
        inputs, compared = range_lookups(context, plan, sides, read)
        return JoinOperator(context, inputs, plan.equal, plan.residual, compared)
    packed = _packed(context, plan, rows, types)
    within = [each for each in plan.equal if {each.left, each.right} <= {*columns}]
    tests = [f"{each.left} {'<=>' if each.null_safe else '='} {each.right}" for each in within]
    others = [side for side in sides if side not in rows]
    if not others:
        # There is no join left to test the residual.
        tests += plan.residual
    if tests:
        predicate = " AND ".join(f"({test})" for test in tests)
        packed = FilterOperator(context, FilterNode(plan, predicate), packed)
    whole = packed
    if others:
        equal = tuple(each for each in plan.equal if each not in within)
        whole = JoinOperator(context, (packed, *others), equal, plan.residual)
    ordered = tuple(NamedExpression(id_, id_) for side in sides for id_ in side.columns)
    return ProjectOperator(context, ordered, whole)


def _packed(
    context: DerivationContext,
    plan: JoinNode,
    rows: Sequence[ViewOperator],
    types: Mapping[str, str],
) -> ViewOperator:
    """Return a single row with the columns of all `rows`; no row if one of them does not exist."""
    padded = tuple(
        ProjectOperator(
            context,
            tuple(
                NamedExpression(id_, id_ if id_ in row.columns else f"CAST(NULL AS {types[id_]})")
                for other in rows
                for id_ in other.columns
            ),
            row,
        )
        for row in rows
    )
    kept = StoredRowsOperator(context, UnionOperator(context, padded), types, bounded=True)
    count = f"{context.prefix()}rows"
    calls = [AggregateCall(id_, "max", id_, types[id_], types[id_]) for id_ in kept.columns]
    # The count tells whether all rows exist: by its values, a row of NULLs looks like a missing
    # row.
    calls.append(AggregateCall(count, "count", None, "bigint"))
    found = RecomputeOperator(context, AggregationNode(plan, (), tuple(calls)), kept)
    return FilterOperator(context, FilterNode(plan, f"{count} = {len(rows)}"), found)
