"""Renders plans as text: a delta plan with its strata and lookups, and a relational tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from actors.engine.views.measures import not_additive
from actors.engine.views.rule_extreme import is_extreme
from actors.engine.views.rule_top import first_ranks
from actors.model.plan.delta import (
    AccumulateTotals,
    ConsolidateRows,
    DeltaPlan,
    ExpandRows,
    FilterRows,
    GenerateRows,
    MatchState,
    NamedInput,
    Node,
    PairRows,
    RecomputeGroups,
    RecomputeRows,
    ReduceGroups,
    RowLifetimes,
    SelectColumns,
    StateLookup,
    TopCandidates,
    TopCovered,
    TopGate,
    TopShortage,
    UnionRows,
    WeighRows,
    tops,
)
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    ColumnEquality,
    DistinctNode,
    ExpandNode,
    FilterNode,
    GenerateNode,
    GroupKey,
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
from actors.model.plan.relational_text import call_text, window_text
from actors.model.plan.relational_walk import inputs_of

_RECOMPUTED: Final = " [keyed: touched partitions are recomputed]"
_RANKED: Final = " [keyed: all rows are ranked when one changes]"
_RESERVE: Final = " [incremental, with a reserve]"


def explain(plan: DeltaPlan) -> str:
    """Return a delta plan as indented lines."""
    reason = f" ({plan.reason})" if plan.reason else ""
    lines = [f"mode: {plan.mode}{reason}", f"refresh policy: {plan.policy}"]
    lines += [f"  {line}" for line in plan.tree.splitlines()]
    for index, (name, schema) in enumerate(zip(plan.inputs, plan.input_schemas, strict=True)):
        lines.append(f"input {index}: {name}({schema.ddl()})")
    lines.append(f"output: {plan.output.ddl()}")
    for index, hidden in enumerate(plan.hidden):
        keys = ", ".join(hidden.keys) or "none (one row)"
        lines.append(f"hidden {index}: {hidden.schema.ddl()}; keys: {keys}")
    for index, near in enumerate(plan.nearby):
        name = InputKind.NEARBY.text(index)
        lines.append(f"{name}: of {plan.inputs[near.input_index]} {near.text()}")
    for index, covered in enumerate(plan.covered):
        changed = plan.inputs[covered.input_index]
        name = InputKind.COVERED.text(index)
        lines.append(f"{name}: of the changes of {changed} those {covered.text()}")
    for sums in plan.eager:
        about = f": about {sums.rows_for_each} rows for each" if sums.rows_for_each else ""
        key = ", ".join(sums.columns)
        name = plan.inputs[sums.input_index]
        lines.append(f"summed before it is joined: {name} by ({key}){about}")
    lines += [f"conf: {key} = {value}" for key, value in plan.conf]
    # An opaque view without strata has no delta plan at all; one with strata recomputes only a
    # part.
    if plan.mode == "opaque" and not plan.strata:
        lines.append("recomputed in full at each time; only the difference is emitted")
    for index, stratum in enumerate(plan.strata):
        lines.append(f"stratum {index}: reads {', '.join(stratum.inputs)}")
        ranges = {each.lookup: each.text() for each in stratum.ranges}
        for lookup in stratum.lookups:
            lines.append(f"  lookup {_lookup(lookup, plan, ranges.get(lookup.number, ''))}")
        lines += [f"  {line}" for line in _delta_lines(stratum.node, plan.mode)]
    return "\n".join(lines)


def explain_tree(plan: ViewPlan) -> str:
    """Return the relational tree of a view: one node per line with its own mode, and its inputs
    indented below it."""
    return "\n".join(_lines(plan.root, plan))


def _lookup(lookup: StateLookup, plan: DeltaPlan, within: str) -> str:
    target = lookup.target
    kind, number = InputName.parse(target)
    if kind is InputKind.STATE:
        target += f" of {plan.inputs[number]}"
    if not lookup.key:
        return f"{target}: {within or 'whole state'}"
    origins = " and ".join(f"{name}({', '.join(columns)})" for name, columns in lookup.origins)
    return f"{target} by ({', '.join(lookup.key)}) from {origins}"


def _delta_lines(node: Node, mode: str) -> Iterator[str]:
    title, children = _describe(node)
    # In an incremental view it does not read a group or partition, which would make the view keyed.
    few = mode == "incremental" and isinstance(node, RecomputeGroups | RecomputeRows)
    yield f"{title} [incremental: over a few stored rows]" if few else title
    for child in children:
        yield from (f"  {line}" for line in _delta_lines(child, mode))


def _describe(node: Node) -> tuple[str, tuple[Node, ...]]:
    match node:
        case NamedInput():
            return f"Input {node.name}({', '.join(node.columns)})", ()
        case FilterRows():
            return f"Where {node.predicate}", (node.input,)
        case RowLifetimes():
            title = f"RowLifetimes from {node.begins or 'unbounded'} to {node.ends or 'unbounded'}"
            return title, (node.input, node.interval)
        case SelectColumns():
            return f"Select {_named(node.columns)}", (node.input,)
        case WeighRows():
            return f"Weigh by {node.factor}", (node.input,)
        case ExpandRows():
            return f"Expand {node.tag} below {node.count}", (node.input,)
        case GenerateRows():
            outer = "outer " if node.outer else ""
            return f"Generate {outer}{node.generator}", (node.input,)
        case PairRows():
            return f"Pair {_pairs(node)}", (node.left, node.right)
        case MatchState():
            return f"Match {node.kind} {_pairs(node)}", (node.left, node.right)
        case UnionRows():
            return "Union", node.inputs
        case ReduceGroups():
            measures = [f"{m.name} = {m.kind}({m.argument}): {m.type}" for m in node.measures]
            return f"Reduce by ({_named(node.keys)}) {', '.join(measures)}".rstrip(), (node.input,)
        case AccumulateTotals():
            flips = ": flips" if node.flips else ""
            title = f"Accumulate by ({', '.join(node.keys)}){flips}"
            return title, (node.contributions, node.hidden)
        case RecomputeGroups():
            calls = ", ".join(f"{call.name} = {call.text}: {call.type}" for call in node.calls)
            title = f"Recompute by ({', '.join(node.keys)}) {calls}".rstrip()
            return title, (node.old, node.changes)
        case RecomputeRows():
            layers = [(node.keys, node.calls), *((each.keys, each.calls) for each in node.above)]
            texts = [
                f"by ({', '.join(keys)}) {', '.join(f'{c.name} = {c.function}' for c in calls)}"
                for keys, calls in layers
            ]
            return f"RecomputeRows {'; then '.join(texts)}", (node.old, node.changes)
        case TopGate():
            how = "closed" if node.closes else "opened"
            return f"TopGate{_groups(node.keys)} {how} by a row", tops(node)
        case TopCovered():
            return f"TopCovered{_groups(node.keys)} by {', '.join(node.order)}", tops(node)
        case TopShortage():
            return f"TopShortage{_groups(node.keys)} below {node.count}", tops(node)
        case TopCandidates():
            what = f"TopCandidates{_groups(node.keys)}"
            return f"{what}: {node.kept} once there are more than {node.most}", tops(node)
        case ConsolidateRows():
            return "Consolidate", (node.input,)


def _groups(keys: tuple[str, ...]) -> str:
    return f" of ({', '.join(keys)})" if keys else ""


def _pairs(node: PairRows | MatchState) -> str:
    tests = [f"{left} = {right}" for left, right in node.equal]
    tests += [f"{left} <=> {right}" for left, right in node.same]
    residual = f" where {node.residual}" if node.residual else ""
    return f"{' and '.join(tests) or 'all pairs'}{residual}"


def _lines(plan: Plan, view: ViewPlan, above: Plan | None = None) -> Iterator[str]:
    own = _mode(plan) if isinstance(plan, AggregationNode) else ""
    if isinstance(plan, WindowFunctions):
        first = isinstance(above, FilterNode) and first_ranks(above.predicate, plan)
        own = _RESERVE if first else _RECOMPUTED
    if isinstance(plan, LimitNode):
        own = _RANKED if plan.count is None else _RESERVE
    yield _title(plan, view.inputs) + own
    for each in inputs_of(plan):
        yield from (f"  {line}" for line in _lines(each, view, plan))


def _title(plan: Plan, inputs: tuple[str, ...]) -> str:
    match plan:
        case ScanNode():
            columns = ", ".join(f"{made} = {own}" for made, own in plan.columns)
            return f"Scan {inputs[plan.input_index]}({columns})"
        case ValuesNode():
            return f"Constants {plan.table or 'one row'} ({_typed(plan.columns)})"
        case FilterNode():
            return f"Filter {plan.predicate}"
        case TemporalFilter():
            tests = " AND ".join(bound.test for bound in plan.bounds)
            return f"TemporalFilter {tests} [incremental: rows enter and leave as time passes]"
        case ProjectNode():
            return f"Project {_named(plan.columns)}"
        case JoinNode():
            return f"Join {_tests(plan.equal, plan.residual)}"
        case OuterJoin():
            return f"OuterJoin {plan.kind} {_tests(plan.equal, plan.residual)}"
        case SemiJoin():
            kind = "anti" if plan.anti else "semi"
            return f"SemiJoin {kind} {_tests(plan.equal, plan.residual)}"
        case AggregationNode():
            calls = ", ".join(f"{c.name} = {call_text(c)}: {c.type}" for c in plan.calls)
            return f"Aggregate by ({_typed(plan.keys)}) {calls}".rstrip()
        case DistinctNode():
            return f"Distinct {_typed(plan.columns)}"
        case UnionAll():
            return "UnionAll"
        case ExpandNode():
            return f"Expansion {len(plan.rows)} times ({_typed(plan.columns)}) [incremental]"
        case GenerateNode():
            outer = "outer " if plan.outer else ""
            return f"Generation {outer}{plan.generator} ({_typed(plan.columns)}) [incremental]"
        case WindowFunctions():
            calls = ", ".join(f"{call.name} = {window_text(plan, call)}" for call in plan.calls)
            return f"WindowFunctions {calls}"
        case LimitNode():
            order = f" by {', '.join(plan.order)}" if plan.order else ""
            count = "all" if plan.count is None else plan.count
            return f"Limit {count} offset {plan.offset}{order}"
        case OpaqueNode():
            return f"Opaque ({plan.reason})"


def _mode(plan: AggregationNode) -> str:
    """Return the mode of a grouping in brackets, with its reason."""
    why = [not_additive(call, ansi=plan.ansi) for call in plan.calls]
    afresh = [
        reason
        for call, reason in zip(plan.calls, why, strict=True)
        # A call is recomputed only if it is neither a sum over distinct values nor kept with a
        # reserve.
        if reason
        and not (call.distinct and not not_additive(_plain(call), ansi=plan.ansi))
        and not is_extreme(plan, call)
    ]
    if afresh:
        return f" [keyed: {'; '.join(dict.fromkeys(afresh))}]"
    if any(is_extreme(plan, call) for call in plan.calls):
        return _RESERVE
    return " [incremental, over distinct values]" if any(why) else " [incremental]"


def _plain(call: AggregateCall) -> AggregateCall:
    return msgspec.structs.replace(call, distinct=False)


def _tests(equal: tuple[ColumnEquality, ...], residual: tuple[str, ...]) -> str:
    tests = [f"{e.left} {'<=>' if e.null_safe else '='} {e.right}" for e in equal]
    others = (each if each.startswith("(") else f"({each})" for each in residual)
    rest = f" where {' AND '.join(others)}" if residual else ""
    return f"{' and '.join(tests) or 'all pairs'}{rest}"


def _typed(keys: tuple[GroupKey, ...]) -> str:
    return ", ".join(f"{_shown(key)}: {key.type}" for key in keys)


def _named(columns: tuple[NamedExpression, ...]) -> str:
    return ", ".join(_shown(column) for column in columns)


def _shown(column: NamedExpression | GroupKey) -> str:
    if column.name == column.expression:
        return column.name
    return f"{column.name} = {column.expression}"
