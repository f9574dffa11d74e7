"""A resolved query and Spark's types → `ViewPlan`; and the probes that ask for those types.

Theory of operation. Predicates that read one leaf go down to it. An equality between two leaves
becomes an edge of the join; a side that is an expression is computed at its leaf as a column of
its own. What is left is the join's residual. Above come the grouping, HAVING and the outputs,
each cast to exactly the type that Spark's analysis gave the view.

Probes are the resolved query written out again as SQL: their analysis yields the types of group
expressions, aggregates and their arguments, and proves that what was resolved still is the view
(same output types), and that every expression is scalar (Spark takes it in WHERE).
"""

from __future__ import annotations

from typing import Final

import msgspec
from sqlglot import exp

from actors.plan.relational import (
    Aggregate,
    AggregateCall,
    Filter,
    Join,
    Named,
    Plan,
    Project,
    Scan,
    ViewPlan,
)
from actors.plan.schema import Schema
from actors.views.grouping import Call, Grouping
from actors.views.parse import Tree
from actors.views.resolve import Leaf, Resolved, Unsupported, ids, text

OUTPUT_PREFIX: Final = "o_"
ANSI_PROBE: Final = "COALESCE(1, '1')"
"""A string without ANSI mode, a number with it."""


class Query(msgspec.Struct):
    """A resolved query with its grouping."""

    resolved: Resolved
    grouping: Grouping | None


class Types(msgspec.Struct, frozen=True):
    """What Spark said of a grouping's parts: name → (type, nullable)."""

    keys: dict[str, tuple[str, bool]]
    arguments: dict[str, tuple[str, bool]]
    results: dict[str, str]
    ansi: bool = True
    """Whether overflow is an error (ANSI mode), not NULL."""


def quote(name: str) -> str:
    """A column name as Spark SQL text."""
    return "`" + name.replace("`", "``") + "`"


def probe_texts(query: Query, sources: tuple[str, ...]) -> tuple[str, ...]:
    """Texts to analyse: the view again, its expressions in WHERE, and a grouping's parts."""
    resolved, grouping = query.resolved, query.grouping
    body = _from_where(resolved, sources)
    if grouping is None:
        again = _select([text(tree) for tree in resolved.outputs], body)
        return again, _scalar_probe(resolved.outputs, body)
    keys = [text(tree) for _, tree in grouping.keys]
    arguments = [text(call.argument) for call in grouping.calls if call.argument is not None]
    scalars = [tree for _, tree in grouping.keys]
    scalars += [call.argument for call in grouping.calls if call.argument is not None]
    by = f" GROUP BY {', '.join(f'({key})' for key in keys)}" if keys else ""
    again = _select([_spelled(tree, grouping) for tree in grouping.outputs], body + by)
    if grouping.having is not None:
        again += f" HAVING {_spelled(grouping.having, grouping)}"
    parts = _select([*keys, *arguments, ANSI_PROBE], body)
    results = _select([*(call.text for call in grouping.calls), "count(*)"], body + by)
    return again, _scalar_probe(scalars, body), parts, results


def read_types(query: Query, schemas: tuple[Schema, ...]) -> Types:
    """The types in the answers to `probe_texts` (of a query with a grouping)."""
    grouping = query.grouping
    assert grouping is not None
    columns = iter(schemas[2].columns)
    keys = {}
    for name, _ in grouping.keys:
        column = next(columns)
        keys[name] = (column.type, column.nullable)
    arguments = {}
    for call in grouping.calls:
        if call.argument is not None:
            column = next(columns)
            arguments[call.name] = (column.type, column.nullable)
    results = {
        call.name: column.type
        for call, column in zip(grouping.calls, schemas[3].columns, strict=False)
    }
    return Types(keys, arguments, results, ansi=schemas[2].columns[-1].type != "string")


def build(query: Query, sources: tuple[str, ...], output: Schema, types: Types | None) -> ViewPlan:
    """The relational plan. Raises `Unsupported`."""
    plan = _block(query)
    outputs = query.resolved.outputs
    grouping = query.grouping
    if grouping is not None:
        assert types is not None
        plan = Aggregate(
            plan,
            tuple(Named(name, text(tree)) for name, tree in grouping.keys),
            tuple(_call(call, types) for call in grouping.calls),
        )
        if grouping.having is not None:
            plan = Filter(plan, text(grouping.having))
        outputs = grouping.outputs
    known = {} if types is None else {name: kind for name, (kind, _) in types.keys.items()}
    known |= {} if types is None else types.results
    columns = tuple(
        Named(column.name, _cast(tree, column.type, known.get(tree.name)))
        for tree, column in zip(outputs, output.columns, strict=True)
    )
    return ViewPlan(sources, Project(plan, columns), output)


def _cast(tree: Tree, kind: str, known: str | None) -> str:
    if isinstance(tree, exp.Column) and known == kind:
        return text(tree)
    return f"CAST({text(tree)} AS {kind})"


def _call(call: Call, types: Types) -> AggregateCall:
    kind, nullable = types.arguments.get(call.name, ("bigint", False))
    argument = None if call.argument is None else text(call.argument)
    if call.function == "count" and not nullable:
        argument = None
    return AggregateCall(call.name, call.function, argument, types.results[call.name], kind)


def _block(query: Query) -> Plan:
    """The product of the leaves with its predicates."""
    resolved = query.resolved
    owner = {column: index for index, leaf in enumerate(resolved.leaves) for column in leaf.used}
    filters: list[list[Tree]] = [[] for _ in resolved.leaves]
    computed: list[dict[str, str]] = [{} for _ in resolved.leaves]
    equal: list[tuple[str, str]] = []
    residual: list[Tree] = []
    for tree in resolved.conjuncts:
        leaves = {owner[column] for column in ids(tree)}
        if len(leaves) == 1 or (not leaves and len(resolved.leaves) == 1):
            filters[min(leaves, default=0)].append(tree)
            continue
        edge = _edge(tree, owner)
        if edge is None:
            residual.append(tree)
            continue
        names = []
        for index, side in edge:
            if isinstance(side, exp.Column):
                names.append(side.name)
            else:
                leaf = resolved.leaves[index]
                name = f"{leaf.prefix}_key{len(computed[index])}"
                while name in leaf.used:
                    name += "_"
                names.append(computed[index].setdefault(text(side), name))
        equal.append((names[0], names[1]))
    inputs = tuple(
        _leaf(leaf, filters[index], computed[index], first=leaf.prefix == f"i{leaf.source}")
        for index, leaf in enumerate(resolved.leaves)
    )
    if len(inputs) == 1:
        return inputs[0]
    rest = " AND ".join(f"({text(tree)})" for tree in residual) or None
    return Join(inputs, tuple(dict.fromkeys(equal)), rest)


def _edge(tree: Tree, owner: dict[str, int]) -> list[tuple[int, Tree]] | None:
    """The two sides of an equality between two leaves, each with its leaf."""
    if not isinstance(tree, exp.EQ):
        return None
    sides = []
    for side in (tree.left.unnest(), tree.right.unnest()):
        leaves = {owner[column] for column in ids(side)}
        if len(leaves) != 1:
            return None
        sides.append((leaves.pop(), side))
    return sides


def _leaf(leaf: Leaf, filters: list[Tree], computed: dict[str, str], *, first: bool) -> Plan:
    plan: Plan = Scan(leaf.source, tuple(leaf.used.values()))
    if not first:
        # A second occurrence of a table: the scan's ids are taken.
        plan = Project(
            plan,
            tuple(
                Named(name, f"i{leaf.source}{name.removeprefix(leaf.prefix)}") for name in leaf.used
            ),
        )
    if filters:
        plan = Filter(plan, " AND ".join(f"({text(tree)})" for tree in filters))
    if computed:
        kept = [Named(name, name) for name in leaf.used]
        made = [Named(name, expression) for expression, name in computed.items()]
        plan = Project(plan, (*kept, *made))
    return plan


def _spelled(tree: Tree, grouping: Grouping) -> str:
    """An expression over keys and calls, with both written out again."""
    written = {name: text(key) for name, key in grouping.keys}
    written |= {call.name: call.text for call in grouping.calls}

    def spell(node: Tree) -> Tree:
        if isinstance(node, exp.Column) and node.name in written:
            return exp.Paren(this=exp.maybe_parse(written[node.name], dialect="spark"))
        return node

    return text(tree.copy().transform(spell))


def _from_where(resolved: Resolved, sources: tuple[str, ...]) -> str:
    scans = []
    for leaf in resolved.leaves:
        columns = ", ".join(f"{quote(own)} AS {name}" for name, own in leaf.used.items()) or "1"
        scans.append(f"(SELECT {columns} FROM {quote(sources[leaf.source])}) {leaf.prefix}")
    where = " AND ".join(f"({text(tree)})" for tree in resolved.conjuncts)
    return f" FROM {' CROSS JOIN '.join(scans)}" + (f" WHERE {where}" if where else "")


def _select(columns: list[str], body: str) -> str:
    return "SELECT " + ", ".join(f"{c} AS c{i}" for i, c in enumerate(columns)) + body


def _scalar_probe(trees: list[Tree], body: str) -> str:
    tests = " OR ".join(f"({text(tree)}) IS NULL" for tree in trees) or "true"
    glue = " AND " if " WHERE " in body else " WHERE "
    return f"SELECT 1 AS c0{body}{glue}({tests})"


def check_types(wanted: Schema, got: Schema) -> None:
    """Raises `Unsupported` when the query as resolved has other types than the view."""
    for column, again in zip(wanted.columns, got.columns, strict=True):
        if column.type != again.type:
            raise Unsupported(
                f"column {column.name}, which Spark types {column.type} in the view "
                f"and {again.type} as resolved"
            )
