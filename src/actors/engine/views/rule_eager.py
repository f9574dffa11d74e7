"""Eager aggregation: sums that are computed below a join.

Suppose that many rows of a table A match one row of B, and that a grouping sums values of A by
columns of B. A change of that row of B touches all its rows of A, although only their sums matter.
So A is summed first, by the key of the join, in a hidden state of which the change reads a single
row:

    SELECT b.name, count(*), sum(a.x) FROM A a JOIN B b ON a.k = b.k GROUP BY b.name

    =   SELECT b.name, sum(q.n), sum(q.x)
        FROM (SELECT k, count(*) AS n, sum(x) AS x FROM A GROUP BY k) q JOIN B b ON q.k = b.k
        GROUP BY b.name

Source: W. P. Yan and P.-A. Larson, Eager Aggregation and Lazy Aggregation, VLDB 1995.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Final, NamedTuple

import msgspec

from actors.engine.views.measures import ROWS, FinishedMeasures, derive_sums, digits, not_additive
from actors.engine.views.operators import DerivationContext, Ids, ViewOperator
from actors.engine.views.rule_extreme import derive_extremes, is_extreme
from actors.engine.views.rule_group import GroupOperator, join_groups
from actors.engine.views.rule_join import JoinOperator
from actors.engine.views.rule_linear import ProjectOperator
from actors.engine.views.rule_window import PLAIN_TYPES
from actors.model.plan.delta import AdditiveMeasure, EagerSums
from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    GroupKey,
    JoinNode,
    NamedExpression,
    ProjectNode,
)
from actors.model.plan.relational_text import words_of

DIGITS_MAX: Final = 26
"""Maximum number of digits of decimals that are summed: a sum has twelve more, and a state at most
38."""
_ROWS_BELOW: Final = "n_below"


class JoinedRows(NamedTuple):
    """The inner join below a grouping, and the columns of a projection between them, if there is
    one."""

    join: JoinNode
    between: tuple[NamedExpression, ...] | None


def joined_rows(plan: AggregationNode, shared: Set[int]) -> JoinedRows | None:
    """Return the join below a grouping whose aggregates may be computed below it. Return None if
    there is none, or if other parts also use the join (`shared`: the identities of such parts)."""
    between, below = None, plan.input
    if isinstance(below, ProjectNode) and id(below) not in shared:
        between, below = below.columns, below.input
    if not isinstance(below, JoinNode) or id(below) in shared:
        return None
    if not all(_is_sum(plan, call) or is_extreme(plan, call) for call in plan.calls):
        return None
    return JoinedRows(below, between)


def _is_sum(plan: AggregationNode, call: AggregateCall) -> bool:
    """Return whether a call is a function of sums that cannot overflow on rows without a match."""
    kind = call.argument_type.lower()
    wide = kind.startswith("decimal") and digits(kind)[0] > DIGITS_MAX
    return not wide and not not_additive(call, ansi=plan.ansi)


class _Summed(NamedTuple):
    """The input that is summed first: its position, the key of the join, and the arguments of the
    calls."""

    place: int
    key: Ids
    arguments: dict[str, str]
    """The column of the join for each argument."""
    sums: EagerSums


def sum_below_join(
    context: DerivationContext,
    plan: AggregationNode,
    rows: JoinedRows,
    sides: Sequence[ViewOperator],
) -> ViewOperator | None:
    """Return the grouping over aggregates of one of `sides`, the inputs of the join. Return None if
    that is unsound or does not pay."""
    found = _summed(context, plan, rows, sides)
    if found is None:
        return None
    context.eager.append(found.sums)
    prefix = context.prefix()
    calls = [
        msgspec.structs.replace(call, argument=found.arguments.get(call.argument or ""))
        for call in plan.calls
    ]
    sums = tuple(call for call in calls if _is_sum(plan, call))
    firsts = [call for call in calls if not _is_sum(plan, call)]
    side, below, above = sides[found.place], list[ViewOperator](), list[ViewOperator]()
    keys = tuple(GroupKey(id_, id_, side.kind(id_) or "") for id_ in found.key)
    made: list[str] = []
    if sums:
        measures = derive_sums(msgspec.structs.replace(plan, calls=sums)).measures
        totals = {f"{prefix}{name}": name for name in (ROWS, *(each.name for each in measures))}
        columns = tuple(NamedExpression(*each) for each in totals.items())
        below.append(GroupOperator(context, side, keys, FinishedMeasures(measures, columns)))
        made += totals
    if firsts:
        own = [msgspec.structs.replace(call, name=f"{prefix}{call.name}") for call in firsts]
        over = AggregationNode(rows.join, keys, tuple(own), plan.ansi)
        below.append(derive_extremes(context, over, own, side))
        made += [call.name for call in own]
    inputs = list(sides)
    inputs[found.place] = join_groups(context, keys, made, below)
    joined = _joined(context, plan, rows, inputs, made)
    if sums:
        finished = derive_sums(msgspec.structs.replace(plan, calls=sums), rows=_ROWS_BELOW)
        # The hidden sums are wide and never NULL, so summing them again gives the same bits.
        summed = [
            AdditiveMeasure(m.name, "sum", f"{prefix}{m.name}", m.type) for m in finished.measures
        ]
        # The number of rows of a group is the sum of the counts below.
        summed.append(AdditiveMeasure(_ROWS_BELOW, "sum", f"{prefix}{ROWS}", "bigint"))
        whole = FinishedMeasures(tuple(summed), finished.columns)
        above.append(GroupOperator(context, joined, plan.keys, whole))
    if firsts:
        calls = [_of_extremes(call, f"{prefix}{call.name}") for call in firsts]
        over = msgspec.structs.replace(plan, calls=tuple(calls))
        above.append(derive_extremes(context, over, calls, joined))
    return join_groups(context, plan.keys, [call.name for call in plan.calls], above)


def _of_extremes(call: AggregateCall, column: str) -> AggregateCall:
    """Return the same function over the results that it has below the join."""
    return msgspec.structs.replace(
        call, argument=column, argument_type=call.type, argument_nullable=True
    )


def _joined(
    context: DerivationContext,
    plan: AggregationNode,
    rows: JoinedRows,
    inputs: Sequence[ViewOperator],
    made: Sequence[str],
) -> ViewOperator:
    """Return the join of the inputs, with the columns that the grouping above reads."""
    joined = JoinOperator(context, tuple(inputs), rows.join.equal, rows.join.residual)
    grouped = _words(key.expression for key in plan.keys)
    passed = [NamedExpression(name, name) for name in made]
    if rows.between is None:
        passed += [NamedExpression(id_, id_) for id_ in joined.columns if id_ in grouped]
    else:
        passed += [column for column in rows.between if column.name in grouped]
    return ProjectOperator(context, tuple(passed), joined)


def _summed(
    context: DerivationContext,
    plan: AggregationNode,
    rows: JoinedRows,
    sides: Sequence[ViewOperator],
) -> _Summed | None:
    if any(side.is_one_row() for side in sides):
        return None
    arguments = _arguments(plan, rows)
    read = _read_above(plan, rows)
    for place, side in enumerate(sides):
        columns = {*side.columns}
        # Only plain columns: an expression could raise an error on rows without a match.
        if not columns.issuperset(arguments.values()):
            continue
        key = tuple(sorted(columns & read))
        sums = _gain(context, rows.join, sides, place, key)
        if sums is not None:
            return _Summed(place, key, arguments, sums)
    return None


def _arguments(plan: AggregationNode, rows: JoinedRows) -> dict[str, str]:
    """Return the column of the join for each argument. A computed argument maps to itself, and is
    not a column."""
    made = {column.name: column.expression for column in rows.between or ()}
    found = {}
    for call in plan.calls:
        if call.argument is not None:
            found[call.argument] = made.get(call.argument, call.argument)
    return found


def _read_above(plan: AggregationNode, rows: JoinedRows) -> frozenset[str]:
    """Return the columns of the join that are read other than as an aggregate's argument."""
    grouped = _words(key.expression for key in plan.keys)
    if rows.between is not None:
        grouped = _words(c.expression for c in rows.between if c.name in grouped)
    tied = {id_ for each in rows.join.equal for id_ in (each.left, each.right)}
    return grouped | tied | _words(rows.join.residual)


def _gain(
    context: DerivationContext, join: JoinNode, sides: Sequence[ViewOperator], place: int, key: Ids
) -> EagerSums | None:
    """Return the sums to compute first, if the input at `place` is joined by all of `key` with an
    input that has far fewer rows and for which the key is unique; else None."""
    kinds = [sides[place].kind(id_) or "" for id_ in key]
    # Only types whose equal values have the same bytes can be a key of the state.
    if not key or not all(map(PLAIN_TYPES.fullmatch, kinds)):
        return None
    ties = [(each.left, each.right) for each in join.equal]
    ties += [(right, left) for left, right in ties]
    for side in sides:
        pairs = {own: theirs for own, theirs in ties if own in key and theirs in side.columns}
        # With a unique key, the joined state has at most as many rows as the other side.
        unique = any(ids <= {*pairs.values()} for ids in side.unique_ids())
        # All columns that are read above must be in the key of the join, since sums have no others.
        if {*pairs} != {*key} or not unique:
            continue
        summed = sides[place].table_columns(key, some=True)
        few = side.table_columns(tuple(pairs[id_] for id_ in key), some=True)
        reads_more = bool({*side.columns} - {*pairs.values()})
        # Summing first pays when the other side changes, which must therefore have columns other
        # than the key.
        if summed is None or few is None or not reads_more:
            continue
        # It pays only if the other side has very many matches per row, since each change of A
        # updates an additional state.
        context.eager_open |= context.choice.is_open(summed[0], few[0])
        return context.choice.choose(summed[0], summed[1], few[0])
    return None


def _words(expressions: Iterable[str]) -> frozenset[str]:
    return frozenset().union(*map(words_of, expressions))
