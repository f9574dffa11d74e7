"""Treats relational plans as trees: their inputs, rebuilding them, and pruning unread columns.

`prune_columns` goes from the output down. A node keeps the columns that are read above it and those
that it reads itself. Columns that decide which rows exist are always kept: group keys, all columns
of a DISTINCT, both sides of equalities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from actors.model.plan.relational import (
    AggregationNode,
    DistinctNode,
    ExpandNode,
    FilterNode,
    GenerateNode,
    JoinNode,
    LimitNode,
    OuterJoin,
    Plan,
    ProjectNode,
    ScanNode,
    SemiJoin,
    TemporalFilter,
    UnionAll,
    WindowFunctions,
    columns_of,
)
from actors.model.plan.relational_text import words_of


def inputs_of(plan: Plan) -> tuple[Plan, ...]:
    """Return the plans that a node reads, from left to right."""
    match plan:
        case FilterNode() | TemporalFilter() | ProjectNode() | AggregationNode() | DistinctNode():
            return (plan.input,)
        case ExpandNode() | GenerateNode() | WindowFunctions() | LimitNode():
            return (plan.input,)
        case JoinNode() | UnionAll():
            return plan.inputs
        case OuterJoin() | SemiJoin():
            return plan.left, plan.right
        case _:
            return ()


def with_inputs(plan: Plan, inputs: tuple[Plan, ...]) -> Plan:
    """Return the node with other inputs."""
    match plan:
        case FilterNode() | TemporalFilter() | ProjectNode() | AggregationNode() | DistinctNode():
            return msgspec.structs.replace(plan, input=inputs[0])
        case ExpandNode() | GenerateNode() | WindowFunctions() | LimitNode():
            return msgspec.structs.replace(plan, input=inputs[0])
        case JoinNode() | UnionAll():
            return msgspec.structs.replace(plan, inputs=inputs)
        case OuterJoin() | SemiJoin():
            return msgspec.structs.replace(plan, left=inputs[0], right=inputs[1])
        case _:
            return plan


def nodes(plan: Plan) -> Iterator[Plan]:
    """Yield all nodes, inputs first."""
    for each in inputs_of(plan):
        yield from nodes(each)
    yield plan


def prune_columns(plan: Plan, needed: frozenset[str]) -> Plan:
    """Return the plan without columns that neither `needed` contains nor the plan itself reads."""
    match plan:
        case ScanNode():
            return ScanNode(
                plan.input_index, tuple(each for each in plan.columns if each[0] in needed)
            )
        case FilterNode():
            return FilterNode(
                prune_columns(plan.input, needed | words_of(plan.predicate)), plan.predicate
            )
        case TemporalFilter():
            read = _union(bound.test for bound in plan.bounds)
            return with_inputs(plan, (prune_columns(plan.input, needed | read),))
        case ProjectNode():
            columns = tuple(column for column in plan.columns if column.name in needed)
            read = _union(column.expression for column in columns)
            inner = prune_columns(plan.input, read)
            if all(c.name == c.expression for c in columns) and set(columns_of(inner)) == read:
                return inner
            return ProjectNode(inner, columns)
        case AggregationNode():
            return _pruned_aggregate(plan, needed)
        case DistinctNode():
            # All columns decide which rows are equal.
            return DistinctNode(
                prune_columns(plan.input, frozenset(columns_of(plan))), plan.columns
            )
        case UnionAll():
            kept = tuple(name for name in columns_of(plan) if name in needed)
            return UnionAll(tuple(_exactly(each, kept) for each in plan.inputs))
        case JoinNode():
            read = needed | _union(plan.residual) | {e.left for e in plan.equal}
            read |= {e.right for e in plan.equal}
            inputs = tuple(prune_columns(each, read) for each in plan.inputs)
            return msgspec.structs.replace(plan, inputs=inputs)
        case OuterJoin() | SemiJoin():
            read = needed | _union(plan.residual) | {e.left for e in plan.equal}
            read |= {e.right for e in plan.equal}
            return with_inputs(
                plan, (prune_columns(plan.left, read), prune_columns(plan.right, read))
            )
        case ExpandNode():
            read = _union(expression for row in plan.rows for expression in row)
            return with_inputs(plan, (prune_columns(plan.input, read),))
        case GenerateNode():
            return with_inputs(
                plan, (prune_columns(plan.input, needed | words_of(plan.generator)),)
            )
        case WindowFunctions() | LimitNode():
            # All columns decide the order of rows that are equal otherwise.
            return with_inputs(
                plan, (prune_columns(plan.input, frozenset(columns_of(plan.input))),)
            )
        case _:
            return plan


def _pruned_aggregate(plan: AggregationNode, needed: frozenset[str]) -> AggregationNode:
    calls = tuple(call for call in plan.calls if call.name in needed)
    # A global aggregate keeps one call, because it makes a row in any case.
    if not calls and not plan.keys:
        calls = plan.calls[:1]
    read = _union(key.expression for key in plan.keys) | _union(call.argument for call in calls)
    return msgspec.structs.replace(plan, input=prune_columns(plan.input, read), calls=calls)


def _exactly(plan: Plan, columns: tuple[str, ...]) -> Plan:
    """Return an input of a union as a `ProjectNode` with exactly these columns, in order."""
    assert isinstance(plan, ProjectNode)
    by_name = {column.name: column for column in plan.columns}
    kept = tuple(by_name[name] for name in columns)
    return ProjectNode(
        prune_columns(plan.input, _union(column.expression for column in kept)), kept
    )


def _union(expressions: Iterable[str | None]) -> frozenset[str]:
    return frozenset().union(*(words_of(written) for written in expressions))
