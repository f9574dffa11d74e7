"""The grouping at the top of a query: keys, aggregates, and expressions over them.

Group expressions are matched in the select list and in HAVING by their text; what is left there
must be constants and aggregates. ``FILTER`` and ``count_if`` become aggregates of a CASE, which
is what they mean. Equal aggregates are computed once.
"""

from __future__ import annotations

from typing import Final

import msgspec
from sqlglot import exp

from actors.views.parse import Tree
from actors.views.resolve import (
    Columns,
    Resolved,
    Unsupported,
    bare,
    check_args,
    check_scalar,
    text,
    transform,
)

AGGREGATES: Final = (exp.Count, exp.CountIf, exp.Sum, exp.Avg)


class Call(msgspec.Struct, frozen=True):
    """One aggregate of the select list or HAVING."""

    name: str
    function: str
    argument: Tree | None
    """None: ``count(*)``."""
    text: str
    """As it is written, over column ids."""


class Grouping(msgspec.Struct):
    """The grouping at the top of the query."""

    keys: list[tuple[str, Tree]]
    calls: list[Call]
    outputs: list[Tree]
    """Over key names and call names."""
    having: Tree | None


def group(resolved: Resolved) -> Grouping | None:
    """The grouping of a resolved query; None without one. Raises `Unsupported`."""
    if resolved.select is None or resolved.columns is None:
        return None
    keys = _keys(resolved.select, resolved.outputs, resolved.columns)
    calls: list[Call] = []
    outputs = [_over_groups(tree, keys, calls) for tree in resolved.outputs]
    having = None
    clause = resolved.select.args.get("having")
    if clause is not None:
        resolved.columns.check_having(clause)
        having = _over_groups(resolved.columns.resolve(clause.this), keys, calls)
    return Grouping(keys, calls, outputs, having)


def _keys(select: Tree, outputs: list[Tree], columns: Columns) -> list[tuple[str, Tree]]:
    clause = select.args.get("group")
    keys: list[tuple[str, Tree]] = []
    if clause is None:
        return keys
    check_args(clause, {"expressions"}, "GROUP BY")
    for item in clause.expressions:
        if isinstance(item, exp.Literal) and item.is_int:
            tree = outputs[int(item.name) - 1].copy()
        else:
            tree = columns.resolve(item)
        if tree.find(exp.AggFunc):
            raise Unsupported("GROUP BY an aggregate")
        check_scalar(tree)
        if all(bare(tree) != bare(key) for _, key in keys):
            keys.append((f"k{len(keys)}", tree))
    return keys


def _over_groups(tree: Tree, keys: list[tuple[str, Tree]], calls: list[Call]) -> Tree:
    """The expression with group expressions and aggregates replaced by their names."""

    def replace(node: Tree) -> Tree | None:
        for name, key in keys:
            if bare(node) == bare(key):
                return exp.column(name)
        if isinstance(node, exp.Filter | exp.AggFunc):
            return exp.column(_call(node, calls))
        if isinstance(node, exp.Column):
            raise Unsupported(f"{text(node)}, which is neither grouped nor aggregated")
        return None

    done = transform(tree, replace)
    check_scalar(done)
    return done


def _call(node: Tree, calls: list[Call]) -> str:
    written = text(node)
    for call in calls:
        if call.text == written:
            return call.name
    condition = None
    inner = node
    if isinstance(node, exp.Filter):
        inner, condition = node.this, node.expression.this
    if not isinstance(inner, AGGREGATES):
        raise Unsupported(f"the aggregate {text(inner).split('(')[0]}")
    argument = inner.this
    if isinstance(argument, exp.Distinct):
        raise Unsupported(f"{type(inner).__name__.upper()}(DISTINCT …)")
    if inner.expressions:
        raise Unsupported(f"{text(inner)}: an aggregate of several arguments")
    function = "count" if isinstance(inner, exp.Count | exp.CountIf) else inner.key
    if isinstance(inner, exp.CountIf):
        argument = _when(argument, exp.Literal.number(1))
    elif isinstance(argument, exp.Star) or _is_constant(inner, argument):
        argument = None if condition is None else exp.Literal.number(1)
    if condition is not None:
        argument = _when(condition, argument)
    if argument is not None:
        check_scalar(argument)
    name = f"a{len(calls)}"
    calls.append(Call(name, function, argument, written))
    return name


def _is_constant(inner: Tree, argument: Tree) -> bool:
    return isinstance(inner, exp.Count) and isinstance(argument, exp.Literal | exp.Boolean)


def _when(condition: Tree, value: Tree) -> Tree:
    return exp.Case(ifs=[exp.If(this=condition.copy(), true=value.copy())])
