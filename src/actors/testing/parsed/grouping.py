"""One grouping: keys, aggregates, and expressions over them.

Group expressions are matched by their text in the select list and in HAVING, with commutative
operands in any order; everything else there must be constants and aggregates. ``FILTER`` and
``count_if`` become aggregates of an equivalent CASE. Equal aggregates are computed once.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from sqlglot import exp

from actors.model.plan.relational import SAME_DISTINCT, AggregateCall, GroupKey
from actors.testing.parsed.joins import FreshColumnIds
from actors.testing.parsed.parse import Tree
from actors.testing.parsed.scope import Listing, NameReplacement
from actors.testing.parsed.trees import (
    UnsupportedConstruct,
    bare,
    canonical_text,
    check_args,
    check_scalar,
    factored,
    operand,
    present,
    text,
    transform,
)

_FUNCTIONS: Final[dict[Any, str]] = {
    exp.Count: "count",
    exp.CountIf: "count",
    exp.Sum: "sum",
    exp.Avg: "avg",
    exp.Min: "min",
    exp.Max: "max",
    exp.Stddev: "stddev_samp",
    exp.StddevSamp: "stddev_samp",
    exp.StddevPop: "stddev_pop",
    exp.Variance: "var_samp",
    exp.VariancePop: "var_pop",
    exp.LogicalAnd: "bool_and",
    exp.LogicalOr: "bool_or",
}
_OTHER_NAMES: Final[dict[str, Any]] = {
    "mean": exp.Avg,
    "std": exp.Stddev,
    "every": exp.LogicalAnd,
    "some": exp.LogicalOr,
    "any": exp.LogicalOr,
}
_DISTINCT: Final = frozenset({"count", "sum", "avg"})


class SelectGrouping(msgspec.Struct):
    """The grouping of a SELECT."""

    keys: list[tuple[GroupKey, Tree]]
    """Group keys, each with its expression."""
    calls: list[tuple[AggregateCall, Tree | None]]
    """Calls with the trees of their arguments. Types are empty here: only Spark knows them."""
    outputs: Listing
    """Select list over key names and call names."""
    having: list[Tree]
    """Conjuncts of HAVING over key names and call names."""


def normalize_aggregates(tree: Tree) -> Tree:
    """Return a copy in which aggregates that the parser does not know have canonical names.

    To the parser, typed literals are casts: the sign moves inside, since the least value of a type
    (``-128Y``) would otherwise not fit before it is negated.
    """

    def named(node: Tree) -> Tree:
        if isinstance(node, exp.Anonymous) and len(node.expressions) == 1:
            kind = _OTHER_NAMES.get(str(node.this).lower())
            return node if kind is None else kind(this=node.expressions[0])
        if isinstance(node, exp.Any) and isinstance(node.this, exp.Paren):
            # To the right of an operator (``LIKE ANY (…)``) it is a quantifier.
            quantifier = isinstance(node.parent, exp.Binary) and node.arg_key == "expression"
            return node if quantifier else exp.LogicalOr(this=node.this.this)
        if isinstance(node, exp.Neg) and isinstance(node.this, exp.Cast):
            literal = node.this.this
            if isinstance(literal, exp.Literal) and not literal.is_string:
                return exp.Cast(this=exp.Neg(this=literal), to=node.this.to)
        return node

    return tree.copy().transform(named)


def is_aggregate(select: Tree) -> bool:
    """Return whether a SELECT groups: by a clause, or by an aggregate in its list or HAVING."""
    if select.args.get("group"):
        return True
    having = select.args.get("having")
    return any(
        aggregate.find_ancestor(exp.Select, exp.Window) is select
        for part in [*select.expressions, *([having] if having else [])]
        for aggregate in part.find_all(exp.AggFunc)
    )


def group(
    select: Tree, outputs: Listing, names: NameReplacement, fresh: FreshColumnIds
) -> SelectGrouping:
    """Return the grouping of a SELECT with resolved outputs. Raises `UnsupportedConstruct`."""
    keys = _keys(select, outputs, names, fresh)
    grouping = SelectGrouping(keys, [], [], [])
    over = _Over(grouping, fresh)
    grouping.outputs = [(name, over.replaced(tree)) for name, tree in outputs]
    clause = select.args.get("having")
    if clause is not None:
        names.check_having(clause)
        having = over.replaced(names.resolve(clause.this))
        grouping.having = factored(having)
    if not keys and not grouping.calls:
        raise UnsupportedConstruct("GROUP BY without a key")
    return grouping


def _keys(
    select: Tree, outputs: Listing, names: NameReplacement, fresh: FreshColumnIds
) -> list[tuple[GroupKey, Tree]]:
    clause = select.args.get("group")
    if clause is None:
        return []
    for key in present(clause):
        if key not in ("expressions", "all"):
            raise UnsupportedConstruct(f"GROUP BY with {key.replace('_', ' ').upper()}")
    found: list[Tree] = []
    if clause.args.get("all"):
        found = [tree for _, tree in outputs if not tree.find(exp.AggFunc)]
    for item in clause.expressions:
        if isinstance(item, exp.Rollup | exp.Cube | exp.GroupingSets):
            raise UnsupportedConstruct(f"GROUP BY {text(item).split('(')[0].strip()}")
        if isinstance(item, exp.Literal) and item.is_int:
            found.append(outputs[int(item.name) - 1][1].copy())
        else:
            found.append(names.resolve(item))
    keys: list[tuple[GroupKey, Tree]] = []
    for tree in found:
        if tree.find(exp.AggFunc):
            raise UnsupportedConstruct("GROUP BY an aggregate")
        check_scalar(tree)
        if all(bare(tree) != bare(other) for _, other in keys):
            keys.append((GroupKey(fresh.name("k"), text(tree), ""), tree))
    return keys


class _Over:
    """Replaces keys and calls in expressions by their names, and records the calls."""

    def __init__(self, grouping: SelectGrouping, fresh: FreshColumnIds) -> None:
        self._grouping = grouping
        self._fresh = fresh
        self._keys = {canonical_text(tree): key.name for key, tree in reversed(grouping.keys)}
        """Names of the keys by their canonical text."""
        self._written: dict[str, str] = {}
        """Names of the calls so far, by their text."""

    def replaced(self, tree: Tree) -> Tree:
        """Return the expression over keys and calls. Raises `UnsupportedConstruct`."""
        done = transform(tree, self._replace)
        check_scalar(done)
        return done

    def _replace(self, node: Tree) -> Tree | None:
        key = self._keys.get(canonical_text(node)) if self._keys else None
        if key is not None:
            return exp.column(key)
        if isinstance(node, exp.Filter | exp.AggFunc):
            written = text(node)
            if written not in self._written:
                self._written[written] = self._call(node)
            return exp.column(self._written[written])
        if isinstance(node, exp.Window):
            raise UnsupportedConstruct("a window function")
        if isinstance(node, exp.Column):
            raise UnsupportedConstruct(f"{text(node)}, which is neither grouped nor aggregated")
        return None

    def _call(self, node: Tree) -> str:
        condition = None
        if isinstance(node, exp.Filter):
            node, condition = node.this, node.expression.this
        function = _FUNCTIONS.get(type(node))
        if function is None:
            raise UnsupportedConstruct(f"the aggregate {text(node).split('(')[0]}")
        check_args(node, {"this", "expressions", "big_int"}, f"the aggregate {function}")
        arguments = [node.this, *node.expressions]
        distinct = isinstance(node.this, exp.Distinct)
        if distinct:
            check_args(node.this, {"expressions"}, "DISTINCT")
            arguments = list(node.this.expressions)
            if function not in _DISTINCT | SAME_DISTINCT or isinstance(node, exp.CountIf):
                raise UnsupportedConstruct(f"{type(node).__name__.upper()}(DISTINCT …)")
        distinct = distinct and function in _DISTINCT
        argument = _argument(node, function, arguments, distinct)
        if condition is not None:
            argument = _when(condition, exp.Literal.number(1) if argument is None else argument)
        if argument is not None:
            check_scalar(argument)
        written = None if argument is None else text(argument)
        call = AggregateCall(self._fresh.name("a"), function, written, "", distinct=distinct)
        self._grouping.calls.append((call, argument))
        return call.name


def _argument(node: Tree, function: str, arguments: list[Tree], distinct: bool) -> Tree | None:
    if len(arguments) > 1 and function != "count":
        raise UnsupportedConstruct(f"{text(node)}: an aggregate of several arguments")
    if isinstance(node, exp.CountIf):
        return _when(node.this, exp.Literal.number(1))
    if len(arguments) > 1:
        return _all_present(arguments, distinct)
    argument = arguments[0]
    constant = isinstance(argument, exp.Literal | exp.Boolean)
    if function == "count" and not distinct and (isinstance(argument, exp.Star) or constant):
        return None
    return argument


def _all_present(arguments: list[Tree], distinct: bool) -> Tree:
    """Return the argument for ``count`` of several expressions: not NULL in rows in which none of
    them is NULL."""
    tests = [exp.Not(this=exp.Is(this=operand(a), expression=exp.Null())) for a in arguments]
    value: Tree = exp.Literal.number(1)
    if distinct:
        fields: list[Tree] = []
        for index, each in enumerate(arguments):
            fields += [exp.Literal.string(f"c{index}"), each.copy()]
        value = exp.Anonymous(this="named_struct", expressions=fields)
    return _when(exp.and_(*tests), value)


def _when(condition: Tree, value: Tree) -> Tree:
    return exp.Case(ifs=[exp.If(this=condition.copy(), true=value.copy())])
