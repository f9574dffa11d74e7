"""Derives the strata of a delta plan from a relational plan. Operators derive their own delta, with
one rule per file.

`derive` builds the operators of a plan bottom up, asks the root for its delta, and packs the
result: the delta of the view and those of its hidden states leave Spark as a single table (see
`plan.delta.DeltaPlan`).

The mode is that of the weakest node: *keyed* if groups are recomputed, *opaque* if a state is read
in full because no equality leads to it. Such an opaque view still runs in steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from actors.engine.views.common_subplans import CommonSubplans, SharedOperator
from actors.engine.views.eager_choice import NEVER_EAGER, EagerChoice
from actors.engine.views.measures import not_additive
from actors.engine.views.operators import DerivationContext, UnsupportedConstruct, ViewOperator
from actors.engine.views.rule_constants import ConstantsOperator
from actors.engine.views.rule_distinct import aggregate_distinct_values
from actors.engine.views.rule_eager import joined_rows, sum_below_join
from actors.engine.views.rule_expansion import ExpansionOperator, GenerationOperator
from actors.engine.views.rule_extreme import derive_extremes, is_extreme
from actors.engine.views.rule_group import aggregate, distinct, join_groups
from actors.engine.views.rule_linear import (
    FilterOperator,
    ProjectOperator,
    ScanOperator,
    UnionOperator,
)
from actors.engine.views.rule_outer import OuterOperator, SemiOperator
from actors.engine.views.rule_range_lookup import drop_unread_columns
from actors.engine.views.rule_recompute import RecomputeOperator
from actors.engine.views.rule_single_rows import inner_join
from actors.engine.views.rule_stored_rows import StoredRowsOperator, unstorable_reason
from actors.engine.views.rule_temporal import TemporalOperator
from actors.engine.views.rule_top import TopOperator, first_ranks, limit
from actors.engine.views.rule_window import (
    WindowOperator,
    near_changes,
    near_sessions,
    ranks_wanted,
    window_chain,
)
from actors.model.plan.delta import (
    OUTPUT_PREFIX,
    TO,
    AccumulateTotals,
    EagerSums,
    FilterRows,
    HiddenState,
    Node,
    PlanStratum,
    SelectColumns,
    TopCandidates,
    UnionRows,
    hidden_prefix,
)
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.nearby import CoveredChanges, NearbyRows
from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    DistinctNode,
    ExpandNode,
    FilterNode,
    GenerateNode,
    JoinNode,
    LimitNode,
    NamedExpression,
    OpaqueNode,
    OuterJoin,
    Plan,
    ProjectNode,
    ScanNode,
    SemiJoin,
    TemporalFilter,
    UnionAll,
    ValuesNode,
    ViewPlan,
    WindowFunctions,
)
from actors.model.plan.relational_text import words_of
from actors.model.plan.relational_walk import inputs_of
from actors.model.plan.schema import TableSchema, quote

HIDDEN_STATES_MAX: Final = 29
"""Maximum number of hidden states. The bits of an int show which of them a row belongs to: the
first bit is the view's, and the bit above the last state marks rows of strata that rarely produce
any."""
SINGLE_ROW_READ: Final = "is read when the single row joined with it changes"
"""Part of the reason given for a view that is incremental except for this read."""


class DerivedPlan(msgspec.Struct, frozen=True):
    """The result of `derive` for a view."""

    strata: tuple[PlanStratum, ...]
    hidden: tuple[HiddenState, ...]
    nearby: tuple[NearbyRows, ...]
    covered: tuple[CoveredChanges, ...]
    eager: tuple[EagerSums, ...]
    eager_open: bool
    mode: str
    reason: str


def derive(
    view: ViewPlan, schemas: tuple[TableSchema, ...], choice: EagerChoice = NEVER_EAGER
) -> DerivedPlan:
    """Return the plan that maintains a view, with the sums below joins that `choice` selects.
    Raises `UnsupportedConstruct`."""
    common = CommonSubplans(drop_unread_columns(view.root))
    context = DerivationContext(schemas, common.shared, choice)
    node = _operator(context, common.root).delta()
    if len(context.hidden) > HIDDEN_STATES_MAX:
        raise UnsupportedConstruct(
            f"{len(context.hidden)} hidden states, more than the limit of {HIDDEN_STATES_MAX}"
        )
    if context.hidden:
        node = _packed(context, node, view.output)
    strata = context.strata(node)
    hidden = tuple(state for state, _ in context.hidden)
    mode, reason = _mode(context, strata, hidden, view.inputs)
    nearby, covered = tuple(context.nearby), tuple(context.covered)
    eager = tuple(context.eager), context.eager_open
    return DerivedPlan(strata, hidden, nearby, covered, *eager, mode, reason)


def _mode(
    context: DerivationContext,
    strata: tuple[PlanStratum, ...],
    hidden: tuple[HiddenState, ...],
    inputs: tuple[str, ...],
) -> tuple[str, str]:
    """Return the mode and its reason. For an incremental view, the reason names what is read in
    full."""
    beside: list[str] = []
    for lookup in (lookup for stratum in strata for lookup in stratum.lookups):
        origins = [name for name, _ in lookup.origins if name not in context.seldom]
        # Reading a few rows in full does not count, nor does a read on behalf of a run that rarely
        # produces rows.
        if lookup.key or lookup.target in context.bounded or (lookup.origins and not origins):
            continue
        kind, number = InputName.parse(lookup.target)
        of_groups = kind is InputKind.HIDDEN
        # A state without keys has a single row.
        if of_groups and not hidden[number].keys:
            continue
        what = "all of the groups below" if of_groups else f"all of {inputs[number]}"
        if lookup.number in context.lookups.ranges:
            what = f"a range of {inputs[number]}"
        # Still incremental: the changed row has to be joined with all of the other side anyway.
        if origins and context.one_row.issuperset(origins):
            beside.append(f"{what} {SINGLE_ROW_READ}")
            continue
        when = " when the other side of the join changes" if lookup.origins else ""
        if of_groups:
            return (
                "opaque",
                f"the groups below cannot be looked up by key: all of them are read{when}",
            )
        return "opaque", f"{inputs[number]} cannot be looked up by key: all of it is read{when}"
    if context.keyed:
        return "keyed", "; ".join(dict.fromkeys([*context.keyed, *beside]))
    return "incremental", "; ".join(dict.fromkeys(beside))


def _operator(context: DerivationContext, plan: Plan) -> ViewOperator:
    """Return the operator of a plan; all occurrences of a shared part get the same operator."""
    if id(plan) not in context.shared:
        return _made(context, plan)
    known = context.operators.get(id(plan))
    if known is None:
        known = context.operators[id(plan)] = SharedOperator(context, _made(context, plan))
    return known


def _made(context: DerivationContext, plan: Plan) -> ViewOperator:
    match plan:
        case ScanNode():
            return ScanOperator(context, plan)
        case ValuesNode():
            return ConstantsOperator(context, plan)
        case FilterNode():
            below = plan.input
            if isinstance(below, WindowFunctions):
                return _ranked(context, plan, below)
            return FilterOperator(context, plan, _operator(context, below))
        case TemporalFilter():
            return TemporalOperator(context, plan, _operator(context, plan.input))
        case ProjectNode():
            below = plan.input
            # Handled together with its join: if columns are not read above it, range lookups are
            # possible.
            if isinstance(below, JoinNode) and id(below) not in context.shared:
                return _projected(context, plan.columns, below, _sides(context, below))
            return ProjectOperator(context, plan.columns, _operator(context, below))
        case JoinNode():
            return inner_join(context, plan, _sides(context, plan))
        case OuterJoin():
            return OuterOperator(context, plan, *_sides(context, plan))
        case SemiJoin():
            return SemiOperator(context, plan, *_sides(context, plan))
        case AggregationNode():
            return _grouped(context, plan)
        case DistinctNode():
            return distinct(context, plan, _operator(context, plan.input))
        case UnionAll():
            return UnionOperator(context, tuple(_operator(context, p) for p in plan.inputs))
        case ExpandNode():
            return ExpansionOperator(context, plan, _operator(context, plan.input))
        case GenerateNode():
            return GenerationOperator(context, plan, _operator(context, plan.input))
        case WindowFunctions():
            return _window(context, plan)
        case LimitNode():
            return limit(context, plan, _operator(context, plan.input))
        case OpaqueNode():
            raise UnsupportedConstruct(plan.reason)


def _ranked(context: DerivationContext, plan: FilterNode, windows: WindowFunctions) -> ViewOperator:
    """Return the rows of window functions that a filter keeps. If it keeps the first rows of each
    partition, they are stored with a reserve."""
    ranks = ranks_wanted(plan.predicate, windows.calls)
    if not ranks:
        return FilterOperator(context, plan, _window(context, windows))
    if kept := first_ranks(plan.predicate, windows):
        below = _operator(context, windows.input)
        return TopOperator(context, _keys_once(windows), plan.predicate, below, kept)
    return FilterOperator(context, plan, _window(context, windows, ranks))


def _window(context: DerivationContext, plan: WindowFunctions, ranks: int = 0) -> ViewOperator:
    """Return the window functions. `ranks`: only ranks up to this one are read above; 0 for all."""
    lowest, *above = window_chain(plan)
    lowest = _keys_once(lowest)
    below = _operator(context, lowest.input)
    near = near_sessions(lowest, above, below) if above else near_changes(lowest, below, ranks)
    what = "touched partitions" if near is None else "rows near changes"
    context.keyed.append(f"window functions: {what} are recomputed")
    return WindowOperator(context, lowest, below, near, above)


def _keys_once(plan: WindowFunctions) -> WindowFunctions:
    """Return the window without repeated keys."""
    # Two names in a query may denote the same column.
    return msgspec.structs.replace(plan, keys=tuple(dict.fromkeys(plan.keys)))


def _sides(
    context: DerivationContext, plan: JoinNode | OuterJoin | SemiJoin
) -> tuple[ViewOperator, ...]:
    """Return the inputs of a join. An input that cannot be looked up by the join's keys gets a
    state of its rows."""
    inputs = tuple(_operator(context, each) for each in inputs_of(plan))
    types = dict(plan.types)
    owner = {id_: place for place, each in enumerate(inputs) for id_ in each.columns}
    by: dict[int, dict[int, set[str]]] = {}
    for each in plan.equal:
        for own, other in ((each.left, each.right), (each.right, each.left)):
            by.setdefault(owner[own], {}).setdefault(owner[other], set()).add(own)
    made: list[ViewOperator] = []
    for place, side in enumerate(inputs):
        keys = by.get(place, {}).values()
        lost = any(not any(side.seekable((id_,)) for id_ in key) for key in keys)
        small = side.is_one_row() or side.is_constant()
        kept = lost and not small and not unstorable_reason(types, side.columns, ())
        made.append(StoredRowsOperator(context, side, types) if kept else side)
    return tuple(made)


def _projected(
    context: DerivationContext,
    columns: tuple[NamedExpression, ...],
    plan: JoinNode,
    sides: Sequence[ViewOperator],
) -> ViewOperator:
    """Return a projection of an inner join whose inputs are `sides`."""
    read = {word for each in columns for word in words_of(each.expression)}
    return ProjectOperator(context, columns, inner_join(context, plan, sides, read))


# -- groupings ------------------------------------------------------------------------------------


def _grouped(context: DerivationContext, plan: AggregationNode) -> ViewOperator:
    """Return a grouping; over a join, one side is summed first if that saves work."""
    rows = joined_rows(plan, context.shared)
    if rows is None:
        return _aggregate(context, plan, _operator(context, plan.input))
    join, between = rows
    sides = _sides(context, join)
    made = sum_below_join(context, plan, rows, sides)
    if made is not None:
        return made
    if between is None:
        return _aggregate(context, plan, inner_join(context, join, sides))
    return _aggregate(context, plan, _projected(context, between, join, sides))


def _aggregate(
    context: DerivationContext, plan: AggregationNode, below: ViewOperator
) -> ViewOperator:
    """Return a grouping. If its aggregates are maintained in different ways (sums, sums over
    distinct values, first values, recomputed ones), it consists of parts that are joined by the
    keys."""
    sums: list[AggregateCall] = []
    distinct_calls: dict[str, list[AggregateCall]] = {}
    afresh: list[AggregateCall] = []
    firsts: list[AggregateCall] = []
    for call in plan.calls:
        why = not_additive(call, ansi=plan.ansi)
        single = msgspec.structs.replace(call, distinct=False)
        if not why:
            sums.append(call)
        elif call.distinct and call.argument and not not_additive(single, ansi=plan.ansi):
            distinct_calls.setdefault(call.argument, []).append(single)
        elif is_extreme(plan, call):
            firsts.append(call)
        else:
            context.keyed.append(f"{why}: touched groups are recomputed")
            afresh.append(call)
    parts: list[ViewOperator] = []
    if distinct_calls:
        parts.append(aggregate_distinct_values(context, plan, below, distinct_calls, sums))
    # Without any calls there is still one part, for the keys.
    elif sums or not (afresh or firsts):
        part = msgspec.structs.replace(plan, calls=tuple(sums))
        parts.append(aggregate(context, part, below))
    if afresh:
        part = msgspec.structs.replace(plan, calls=tuple(afresh))
        parts.append(RecomputeOperator(context, part, below))
    if firsts:
        parts.append(derive_extremes(context, plan, firsts, below))
    return join_groups(context, plan.keys, [call.name for call in plan.calls], parts)


# -- the result -----------------------------------------------------------------------------------


def _packed(context: DerivationContext, node: Node, output: TableSchema) -> Node:
    """Return the deltas of the view and of all hidden states as a single table."""
    merged = _merged(context, node)
    branches = [merged[1]] if merged is not None else [_view_branch(context, node, output)]
    branches += _hidden_branches(context, output, None if merged is None else merged[0])
    branches += _seldom_branches(context, output)
    return branches[0] if len(branches) == 1 else UnionRows(tuple(branches))


def _merged(context: DerivationContext, node: Node) -> tuple[int, Node] | None:
    """If the view is a projection of one grouping's totals, return the number of its hidden state
    and the branch that makes both; else None."""
    inner: Node = node
    selects: list[SelectColumns] = []
    predicates: list[str] = []
    while not isinstance(inner, AccumulateTotals):
        if isinstance(inner, SelectColumns) and not predicates:
            selects.append(inner)
        elif isinstance(inner, FilterRows) and len(selects) == 1 and not predicates:
            predicates.append(inner.predicate)
        elif isinstance(inner, SelectColumns) and len(selects) == 1:
            selects.append(inner)
        else:
            return None
        inner = inner.input
    if inner.flips or len(selects) != 2:
        return None
    # One node makes the view's rows and the hidden ones, so that they are computed once.
    number = next(k for k, (_, made) in enumerate(context.hidden) if made == inner)
    hidden, _ = context.hidden[number]
    view, finished = selects
    passed = [NamedExpression(name, name) for name in hidden.schema.names]
    own = {column.name for column in passed}
    made = [column for column in finished.columns if column.name not in own]
    below = SelectColumns(inner, (*passed, *made))
    kept = predicates[0] if predicates else None
    columns = [
        NamedExpression(
            OUTPUT_PREFIX + column.name,
            # Rows that HAVING drops are not computed: Spark does not compute them either, and they
            # might raise an error.
            column.expression if kept is None else f"CASE WHEN {kept} THEN {column.expression} END",
        )
        for column in view.columns
    ]
    columns += _hidden_columns(context, number)
    bit = 2 << number
    both = str(bit + 1) if kept is None else f"CASE WHEN {kept} THEN {bit + 1} ELSE {bit} END"
    return number, SelectColumns(below, (*columns, NamedExpression(TO, both)))


def _hidden_columns(context: DerivationContext, *filled: int) -> list[NamedExpression]:
    """Return the columns of all hidden states: those of `filled` by name, all others NULL."""
    return [
        NamedExpression(
            f"{hidden_prefix(k)}{column.name}",
            column.name if k in filled else f"CAST(NULL AS {column.type})",
        )
        for k, (hidden, _) in enumerate(context.hidden)
        for column in hidden.schema.columns
    ]


def _view_branch(context: DerivationContext, node: Node, output: TableSchema) -> Node:
    columns = [NamedExpression(OUTPUT_PREFIX + name, quote(name)) for name in output.names]
    return SelectColumns(node, (*columns, *_hidden_columns(context), NamedExpression(TO, "1")))


def _hidden_branches(
    context: DerivationContext, output: TableSchema, done: int | None
) -> list[Node]:
    """Return the rows of all hidden states except the one that is `done`."""
    branches = []
    for number, (_, made) in enumerate(context.hidden):
        if number == done or made is None:
            continue
        filled: tuple[int, ...] = (number,)
        to = str(2 << number)
        if isinstance(made, TopCandidates):
            # The node of the candidates also makes the edges, which are the next hidden state.
            filled, to = (number, number + 1), f"IF({made.mark}, {4 << number}, {2 << number})"
        branches.append(_no_view_branch(context, made, filled, to, output))
    return branches


def _seldom_branches(context: DerivationContext, output: TableSchema) -> list[Node]:
    """Return the rows of strata that rarely produce rows."""
    to = str(2 << len(context.hidden))
    return [_no_view_branch(context, node, (), to, output) for node in context.seldom.values()]


def _no_view_branch(
    context: DerivationContext, made: Node, filled: tuple[int, ...], to: str, output: TableSchema
) -> Node:
    columns = [
        NamedExpression(OUTPUT_PREFIX + c.name, f"CAST(NULL AS {c.type})") for c in output.columns
    ]
    return SelectColumns(
        made, (*columns, *_hidden_columns(context, *filled), NamedExpression(TO, to))
    )
