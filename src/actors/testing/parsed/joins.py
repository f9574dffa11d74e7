"""Blocks, and the joins that combine them; decides the place of each predicate.

A *block* is a FROM clause with its WHERE: inputs, and a conjunction over their columns. Inner joins
only merge blocks. `close` makes a plan of a block: a predicate over one input is pushed down to it;
an equality between two inputs becomes a `ColumnEquality` (a side that is an expression is computed
at its input as an additional column); everything else is the join's residual.

Pushdown is sound through an inner join, into the preserved side of an outer join and into the rows
of a semi join, below a DISTINCT, and below a grouping for predicates over its keys; never into a
null-padded side. In the ON clause of a left join, a predicate on the right side alone selects among
the right rows, so it becomes a filter there. A predicate on the left side alone decides whether a
row is padded, so it stays in the residual.

Expressions of a null-padded side must be computed below the join, or their padding would not be
NULL: `seal_expressions` makes columns of all of them.
"""

from __future__ import annotations

import msgspec
from sqlglot import exp

from actors.model.plan.relational import (
    AggregationNode,
    ColumnEquality,
    DistinctNode,
    FilterNode,
    JoinNode,
    NamedExpression,
    OuterJoin,
    Plan,
    ProjectNode,
    SemiJoin,
    columns_of,
)
from actors.testing.parsed.parse import Tree
from actors.testing.parsed.scope import FromScope
from actors.testing.parsed.trees import UnsupportedConstruct, all_of, ids, substituted, text


class FreshColumnIds:
    """Column ids that are new in the whole plan: ``k0``, ``k1`` …, for each prefix."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        """Next number for each prefix."""

    def name(self, prefix: str) -> str:
        """Return the next id with a prefix."""
        number = self._next.get(prefix, 0)
        self._next[prefix] = number + 1
        return f"{prefix}{number}"


class JoinBlock(msgspec.Struct):
    """Inputs, and a conjunction that restricts their product."""

    inputs: list[Plan]
    """Inputs of the FROM clause."""
    conjuncts: list[Tree]
    """Conjuncts over the columns of the inputs."""
    on: list[Tree] = []
    """Conjuncts of ON clauses, tested last: in Spark, too, WHERE guards them."""


class JoinSplit(msgspec.Struct):
    """The predicates of a join between a left and a right side."""

    equal: list[tuple[Tree, Tree, bool]]
    """(expression of the left, of the right, null-safe)."""
    left: list[Tree]
    """Predicates over the left side alone."""
    right: list[Tree]
    """Predicates over the right side alone."""
    rest: list[Tree]
    """All other predicates."""


def merged(left: JoinBlock, right: JoinBlock, conjuncts: list[Tree]) -> JoinBlock:
    """Return an inner join by an ON clause."""
    return JoinBlock(
        [*left.inputs, *right.inputs],
        [*left.conjuncts, *right.conjuncts],
        [*left.on, *right.on, *conjuncts],
    )


def close(block: JoinBlock, fresh: FreshColumnIds) -> Plan:
    """Return the block as a plan. Raises `UnsupportedConstruct` for names of an outer query."""
    inputs = list(block.inputs)
    owner = {name: index for index, each in enumerate(inputs) for name in columns_of(each)}
    edges: list[tuple[int, Tree, int, Tree, bool]] = []
    residual: list[Tree] = []
    for tree in [*block.conjuncts, *block.on]:
        check_reads(tree, owner)
        places = {owner[name] for name in ids(tree)}
        if len(places) <= 1:
            place = min(places, default=0)
            inputs[place] = filtered(inputs[place], tree)
            continue
        sides = _sides(tree)
        homes = [{owner[name] for name in ids(side)} for side in sides]
        if sides and all(len(home) == 1 for home in homes):
            safe = isinstance(tree, exp.NullSafeEQ)
            edges.append((homes[0].pop(), sides[0], homes[1].pop(), sides[1], safe))
        else:
            residual.append(tree)
    if len(inputs) == 1:
        return inputs[0]
    wanted: list[list[Tree]] = [[] for _ in inputs]
    for left, left_tree, right, right_tree, _ in edges:
        wanted[left].append(left_tree)
        wanted[right].append(right_tree)
    named: list[dict[str, str]] = []
    for index, trees in enumerate(wanted):
        inputs[index], names = add_key_columns(inputs[index], trees, fresh)
        named.append(names)
    equal = [
        ColumnEquality(named[left][text(left_tree)], named[right][text(right_tree)], safe)
        for left, left_tree, right, right_tree, safe in edges
    ]
    return JoinNode(tuple(inputs), tuple(dict.fromkeys(equal)), all_of(residual))


def check_reads(tree: Tree, known: dict[str, int] | set[str]) -> None:
    """Raise `UnsupportedConstruct` for an expression that reads an outer query."""
    if any(name not in known for name in ids(tree)):
        raise UnsupportedConstruct(
            "a correlated subquery whose correlation is not a conjunct of its WHERE"
        )


def _sides(tree: Tree) -> list[Tree]:
    if not isinstance(tree, exp.EQ | exp.NullSafeEQ):
        return []
    return [tree.left.unnest(), tree.right.unnest()]


def filtered(plan: Plan, tree: Tree) -> Plan:
    """Return the plan's rows for which the predicate is true, tested as far down as is sound."""
    read = ids(tree)
    match plan:
        case FilterNode():
            return FilterNode(plan.input, f"{plan.predicate} AND ({text(tree)})")
        case OuterJoin(kind="left") | SemiJoin() if read and read <= set(columns_of(plan.left)):
            return msgspec.structs.replace(plan, left=filtered(plan.left, tree))
        case ProjectNode() if read and read <= {
            c.name for c in plan.columns if c.name == c.expression
        }:
            return ProjectNode(filtered(plan.input, tree), plan.columns)
        case JoinNode():
            return _restricted(plan, tree, read)
        case DistinctNode():
            return DistinctNode(filtered(plan.input, tree), plan.columns)
        case AggregationNode() if read and read <= {key.name for key in plan.keys}:
            keys = {key.name: key.expression for key in plan.keys}
            return msgspec.structs.replace(
                plan, input=filtered(plan.input, substituted(tree, keys))
            )
        case _:
            return FilterNode(plan, f"({text(tree)})")


def _restricted(plan: JoinNode, tree: Tree, read: set[str]) -> Plan:
    inputs = list(plan.inputs)
    for index, each in enumerate(inputs):
        if read <= set(columns_of(each)):
            inputs[index] = filtered(each, tree)
            return msgspec.structs.replace(plan, inputs=tuple(inputs))
    sides = _sides(tree)
    if sides and all(isinstance(side, exp.Column) for side in sides):
        # The columns are from two inputs: a predicate over one was pushed down above.
        equal = ColumnEquality(sides[0].name, sides[1].name, isinstance(tree, exp.NullSafeEQ))
        return msgspec.structs.replace(plan, equal=(*plan.equal, equal))
    return msgspec.structs.replace(plan, residual=(*plan.residual, text(tree)))


def add_key_columns(
    plan: Plan, trees: list[Tree], fresh: FreshColumnIds
) -> tuple[Plan, dict[str, str]]:
    """Return the plan with a column for each expression, and the columns' ids by the texts."""
    names: dict[str, str] = {}
    made: list[NamedExpression] = []
    for tree in trees:
        written = text(tree)
        if written in names:
            continue
        if isinstance(tree, exp.Column) and not tree.table:
            names[written] = tree.name
        else:
            names[written] = fresh.name("c")
            made.append(NamedExpression(names[written], written))
    if made:
        passed = tuple(NamedExpression(name, name) for name in columns_of(plan))
        plan = ProjectNode(plan, (*passed, *made))
    return plan, names


def seal_expressions(
    block: JoinBlock, scope: FromScope, fresh: FreshColumnIds
) -> tuple[Plan, FromScope]:
    """Return the block as a plan that computes all expressions of its names."""
    plan, names = add_key_columns(close(block, fresh), scope.expressions(), fresh)
    return plan, scope.mapped({written: exp.column(name) for written, name in names.items()})


def split(conjuncts: list[Tree], left: Plan, right: Plan) -> JoinSplit:
    """Sort the predicates between two sides. Raises `UnsupportedConstruct` for other names."""
    mine, theirs = set(columns_of(left)), set(columns_of(right))
    found = JoinSplit([], [], [], [])
    for tree in conjuncts:
        read = ids(tree)
        check_reads(tree, mine | theirs)
        sides = _sides(tree)
        safe = isinstance(tree, exp.NullSafeEQ)
        if read and read <= mine:
            found.left.append(tree)
        elif read and read <= theirs:
            found.right.append(tree)
        elif sides and _between(sides[0], sides[1], mine, theirs):
            found.equal.append((sides[0], sides[1], safe))
        elif sides and _between(sides[1], sides[0], mine, theirs):
            found.equal.append((sides[1], sides[0], safe))
        else:
            found.rest.append(tree)
    return found


def _between(left: Tree, right: Tree, mine: set[str], theirs: set[str]) -> bool:
    return bool(ids(left) and ids(right) and ids(left) <= mine and ids(right) <= theirs)


def _tied(
    left: Plan, right: Plan, found: JoinSplit, fresh: FreshColumnIds
) -> tuple[Plan, Plan, tuple[ColumnEquality, ...]]:
    left, mine = add_key_columns(left, [tree for tree, _, _ in found.equal], fresh)
    right, theirs = add_key_columns(right, [tree for _, tree, _ in found.equal], fresh)
    equal = [ColumnEquality(mine[text(a)], theirs[text(b)], safe) for a, b, safe in found.equal]
    return left, right, tuple(dict.fromkeys(equal))


def outer_join(left: Plan, right: Plan, kind: str, on: list[Tree], fresh: FreshColumnIds) -> Plan:
    """Return a ``left`` or ``full`` outer join with an ON clause."""
    found = split(on, left, right)
    rest = [*found.left, *found.rest]
    if kind == "left":
        for tree in found.right:
            right = filtered(right, tree)
    else:
        rest += found.right
    left, right, equal = _tied(left, right, found, fresh)
    return OuterJoin(left, right, kind, equal, all_of(rest))


def semi_join(left: Plan, right: Plan, anti: bool, on: list[Tree], fresh: FreshColumnIds) -> Plan:
    """Return the rows of `left` with (or without) a match. Columns computed for the join stay in
    the output."""
    found = split(on, left, right)
    rest = found.rest
    for tree in found.right:
        right = filtered(right, tree)
    if anti:
        rest = [*found.left, *rest]
    else:
        for tree in found.left:
            left = filtered(left, tree)
    left, right, equal = _tied(left, right, found, fresh)
    return SemiJoin(left, right, anti, equal, all_of(rest))
