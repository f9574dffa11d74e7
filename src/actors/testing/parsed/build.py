"""Adds types to an untyped plan, from Spark's schemas of the probes that it requests.

Theory of operation. Sub-trees of the plan are written out as SQL (`render`) and analysed, all in
one message: for each grouping its parts and its results, for each DISTINCT and UNION ALL the
columns. The plan's own text must have the view's types, which proves that the resolved plan is
still the view. An expression with a function that the parser does not know is probed in WHERE,
where Spark accepts only scalars. Branches of a union are cast to the union's types, outputs to the
view's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import msgspec
from sqlglot import exp

from actors.model.plan.relational import (
    AggregateCall,
    AggregateFormula,
    AggregationNode,
    DistinctNode,
    GroupKey,
    NamedExpression,
    OuterJoin,
    Plan,
    ProjectNode,
    SemiJoin,
    UnionAll,
    columns_of,
)
from actors.model.plan.relational_text import render
from actors.model.plan.relational_walk import inputs_of, nodes, with_inputs
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.runtime.errors import InvalidUsage
from actors.testing.parsed.resolve import ResolvedQuery
from actors.testing.parsed.subquery import check_claim
from actors.testing.parsed.trees import UnsupportedConstruct, quote, tree_of

__all__ = ["OUTPUT_PREFIX", "build", "probe_texts", "quote"]

OUTPUT_PREFIX: Final = "o_"
ANSI_PROBE: Final = "COALESCE(1, '1')"
"""A string without ANSI mode, a number with it."""


def probe_texts(resolved: ResolvedQuery, inputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts to analyse. `build` reads the answers in the same order."""
    texts = [render(resolved.root, inputs), f"SELECT {ANSI_PROBE} AS c0 FROM {quote(inputs[0])}"]
    for node in nodes(resolved.root):
        texts += _questions(node, inputs)
    for claim in resolved.claims:
        texts.append(_of([claim.left_value], claim.left, inputs))
        texts.append(_of([claim.right_value], claim.right, inputs))
    for node in nodes(resolved.root):
        doubtful = [each for each in _expressions(node) if _unknown_function(each)]
        if doubtful:
            tests = " OR ".join(f"({each}) IS NULL" for each in doubtful)
            texts.append(_of([], inputs_of(node)[0], inputs) + f" WHERE {tests}")
    return tuple(dict.fromkeys(texts))


def build(
    resolved: ResolvedQuery,
    inputs: tuple[str, ...],
    output: TableSchema,
    answers: dict[str, TableSchema],
) -> ProjectNode:
    """Return the plan with types, from Spark's schema of each probe. Raises
    `UnsupportedConstruct`."""
    _check_outputs(resolved, output, answers[render(resolved.root, inputs)])
    ansi = answers[f"SELECT {ANSI_PROBE} AS c0 FROM {quote(inputs[0])}"].columns[0].type
    for claim in resolved.claims:
        left = answers[_of([claim.left_value], claim.left, inputs)].columns[0]
        right = answers[_of([claim.right_value], claim.right, inputs)].columns[0]
        check_claim(claim, (left.type, left.nullable), (right.type, right.nullable))
    typer = _Typer(inputs, answers, ansi=ansi != "string")
    columns = tuple(
        NamedExpression(wanted.name, _cast(made.expression, wanted.type))
        for made, wanted in zip(resolved.root.columns, output.columns, strict=True)
    )
    return ProjectNode(typer.typed(resolved.root.input), columns)


class _Typer:
    def __init__(
        self, inputs: tuple[str, ...], answers: dict[str, TableSchema], *, ansi: bool
    ) -> None:
        self._inputs = inputs
        self._answers = answers
        self._ansi = ansi

    def typed(self, plan: Plan) -> Plan:
        """Return the plan with all types filled in. Probes are those of the untyped plan."""
        inputs = tuple(self.typed(each) for each in inputs_of(plan))
        found = [self._answers[text].columns for text in _questions(plan, self._inputs)]
        match plan:
            case AggregationNode():
                made: Plan = _typed_aggregate(plan, found, ansi=self._ansi)
            case DistinctNode():
                columns = zip(plan.columns, found[0], strict=True)
                keys = tuple(_typed_key(key, column, "DISTINCT") for key, column in columns)
                made = DistinctNode(plan.input, keys)
            case OuterJoin() | SemiJoin():
                made = msgspec.structs.replace(plan, types=_types_of(plan, found))
            case UnionAll():
                branches = zip(inputs, found[1:], strict=True)
                inputs = _flat(tuple(_widened(each, found[0], kinds) for each, kinds in branches))
                made = plan
            case _:
                made = plan
        return with_inputs(made, inputs)


def _types_of(
    plan: OuterJoin | SemiJoin, found: list[tuple[TableColumn, ...]]
) -> tuple[tuple[str, str], ...]:
    sides = zip((plan.left, plan.right), found, strict=True)
    return tuple(
        (name, column.type)
        for side, columns in sides
        for name, column in zip(columns_of(side), columns, strict=False)
    )


def _questions(plan: Plan, inputs: tuple[str, ...]) -> list[str]:
    """Return the texts whose types a node needs."""
    match plan:
        case AggregationNode():
            parts = [key.expression for key in plan.keys]
            parts += [call.argument for call in plan.calls if call.argument is not None]
            asked = [_of(parts, plan.input, inputs)] if parts else []
            return [*asked, *([render(plan, inputs)] if plan.calls else [])]
        case DistinctNode():
            return [render(plan, inputs)]
        case OuterJoin() | SemiJoin():
            return [render(plan.left, inputs), render(plan.right, inputs)]
        case UnionAll():
            return [render(each, inputs) for each in (plan, *plan.inputs)]
        case _:
            return []


def _typed_aggregate(
    plan: AggregationNode, found: list[tuple[TableColumn, ...]], *, ansi: bool
) -> AggregationNode:
    has_parts = bool(plan.keys) or any(call.argument is not None for call in plan.calls)
    parts: Iterator[TableColumn] = iter(found[0] if has_parts else ())
    keys = tuple(_typed_key(key, next(parts), "GROUP BY") for key in plan.keys)
    results = iter(found[-1][len(plan.keys) :] if plan.calls else ())
    calls = []
    for call in plan.calls:
        kind = next(results).type
        argument = None if call.argument is None else next(parts)
        typed = _typed_call(call, kind, argument)
        calls.append(typed if plan.keys else _recomputed(typed))
    return msgspec.structs.replace(plan, keys=keys, calls=tuple(calls), ansi=ansi)


def _typed_call(call: AggregateCall, kind: str, argument: TableColumn | None) -> AggregateCall:
    replaced = msgspec.structs.replace
    if argument is None or (
        call.function == "count" and not call.distinct and not argument.nullable
    ):
        return replaced(call, argument=None, type=kind, argument_nullable=False)
    if call.distinct:
        _check_groupable(argument, f"{call.function}(DISTINCT …)")
    return replaced(
        call, type=kind, argument_type=argument.type, argument_nullable=argument.nullable
    )


def _recomputed(call: AggregateCall) -> AggregateCall:
    """Return a call over all rows as a recomputed one: the in-memory engine keeps no first rows."""
    if call.function not in ("min", "max") or call.argument is None:
        return call
    text = f"{call.function}({{0}})"
    formula = AggregateFormula(text, text, (call.argument,))
    return msgspec.structs.replace(call, formula=formula)


def _typed_key(key: GroupKey, column: TableColumn, what: str) -> GroupKey:
    _check_groupable(column, what)
    return msgspec.structs.replace(key, type=column.type, nullable=column.nullable)


def _check_groupable(column: TableColumn, what: str) -> None:
    if "map<" in column.type:
        raise UnsupportedConstruct(f"{what} over {column.type}")
    try:
        arrow_type(column.type)
    except InvalidUsage:
        raise UnsupportedConstruct(f"{what} over {column.type}, which cannot be stored") from None


def _widened(plan: Plan, wanted: tuple[TableColumn, ...], found: tuple[TableColumn, ...]) -> Plan:
    assert isinstance(plan, ProjectNode)
    columns = []
    for column, kind, own in zip(plan.columns, wanted, found, strict=False):
        same = kind.type == own.type
        cast = column.expression if same else f"CAST({column.expression} AS {kind.type})"
        columns.append(NamedExpression(column.name, cast))
    return ProjectNode(plan.input, tuple(columns))


def _flat(inputs: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """Return a union of unions as one, if the inner one's types are the outer's."""
    found: list[Plan] = []
    for each in inputs:
        assert isinstance(each, ProjectNode)
        inner = each.input
        if not isinstance(inner, UnionAll) or any(
            column.expression not in columns_of(inner) for column in each.columns
        ):
            found.append(each)
            continue
        for branch in inner.inputs:
            assert isinstance(branch, ProjectNode)
            made = {column.name: column.expression for column in branch.columns}
            renamed = tuple(NamedExpression(c.name, made[c.expression]) for c in each.columns)
            found.append(ProjectNode(branch.input, renamed))
    return tuple(found)


def _of(expressions: list[str], plan: Plan, inputs: tuple[str, ...]) -> str:
    columns = ", ".join(f"{each} AS c{n}" for n, each in enumerate(expressions)) or "1 AS c0"
    return f"SELECT {columns} FROM ({render(plan, inputs)}) q"


def _cast(expression: str, kind: str) -> str:
    tree = tree_of(expression)
    # A column needs no cast: `_check_outputs` has compared its type with the view's.
    if isinstance(tree, exp.Column) and not tree.table:
        return expression
    return f"CAST({expression} AS {kind})"


def _expressions(plan: Plan) -> list[str]:
    match plan:
        case ProjectNode():
            return [c.expression for c in plan.columns if c.name != c.expression]
        case AggregationNode():
            written = [key.expression for key in plan.keys]
            return written + [call.argument for call in plan.calls if call.argument is not None]
        case _:
            return []


@lru_cache(maxsize=8192)
def _unknown_function(expression: str) -> bool:
    return tree_of(expression).find(exp.Anonymous) is not None


def _check_outputs(resolved: ResolvedQuery, wanted: TableSchema, got: TableSchema) -> None:
    """Raise `UnsupportedConstruct` if the resolved query differs from the view in names or
    types."""
    if len(resolved.names) != len(wanted.columns):
        raise UnsupportedConstruct(
            f"a select list of {len(resolved.names)} for {len(wanted.columns)} columns"
        )
    for name, column, again in zip(resolved.names, wanted.columns, got.columns, strict=True):
        if name and name != column.name.lower():
            raise UnsupportedConstruct(f"column {column.name}, which is named {name} as resolved")
        if column.type != again.type:
            raise UnsupportedConstruct(
                f"column {column.name}, which Spark types {column.type} in the view "
                f"and {again.type} as resolved"
            )
