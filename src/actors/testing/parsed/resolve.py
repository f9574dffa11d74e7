"""Turns a view's syntax tree into its relational plan, untyped.

Theory of operation. A query becomes a *relation*: a block (inputs and a conjunction, see `joins`)
and, for each column of its list, a name and an expression over the block's column ids. A derived
table or common table expression that only projects, filters and joins inwardly is thereby inlined:
its columns stay expressions, evaluated where they are used. Groupings, DISTINCT, unions, outer and
semi joins close the block below them into a plan, which is the single input of the next block. A
table expression used twice is resolved twice: every occurrence of a table has its own ids
(``i0_carrier``, the second time ``i0b_carrier``).

Only the parser's tree is used: the rewrites of its optimiser are not sound for Spark.

The plan is untyped: `GroupKey`, `AggregateCall` and `DistinctNode` have empty types, and the inputs
of a `UnionAll` no casts; `build` asks Spark and fills them in. `UnsupportedConstruct` names a
construct without a rule: the view is then opaque.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from sqlglot import exp

from actors.model.plan.relational import (
    AggregationNode,
    DistinctNode,
    GroupKey,
    NamedExpression,
    Plan,
    ProjectNode,
    ScanNode,
    UnionAll,
    columns_of,
)
from actors.model.plan.relational_walk import prune_columns
from actors.model.plan.schema import TableSchema
from actors.testing.parsed.clauses import (
    ORDER,
    TableExpression,
    aliased,
    check_clauses,
    kind_of,
    renamed,
    using_of,
    visible_ctes,
)
from actors.testing.parsed.grouping import group, is_aggregate, normalize_aggregates
from actors.testing.parsed.joins import (
    FreshColumnIds,
    JoinBlock,
    check_reads,
    close,
    merged,
    outer_join,
    seal_expressions,
    semi_join,
)
from actors.testing.parsed.parse import Tree, lower_columns
from actors.testing.parsed.scope import FromScope, Listing, NameReplacement, joined
from actors.testing.parsed.subquery import SubqueryMatch, TypeClaim, matching, never_null
from actors.testing.parsed.trees import (
    UnsupportedConstruct,
    bare,
    check_args,
    check_scalar,
    column_id,
    conjuncts_of,
    factored,
    ids,
    operand,
    text,
)

__all__ = [
    "ResolvedQuery",
    "UnsupportedConstruct",
    "column_id",
    "conjuncts_of",
    "ids",
    "resolve",
    "text",
]

OCCURRENCES_MAX: Final = 64
"""Most occurrences of tables in one query. A table expression used twice is resolved twice, and so
are the tables in it."""


class ResolvedQuery(msgspec.Struct):
    """A query as a plan without types."""

    root: ProjectNode
    """Projection whose columns ``c0``, ``c1`` … are the outputs."""
    names: tuple[str, ...]
    """Lower-cased names of the outputs; "" for a name that only Spark knows."""
    claims: tuple[TypeClaim, ...]
    """Conditions on types under which the plan is correct; `build` checks them."""


class _Relation(msgspec.Struct):
    block: JoinBlock
    """Inputs and conjuncts of the query."""
    columns: Listing
    """Names and expressions of its columns."""


def resolve(
    tree: Tree, inputs: tuple[str, ...], tables: Mapping[str, TableSchema]
) -> ResolvedQuery:
    """Return the query as a plan. Raises `UnsupportedConstruct`."""
    resolver = _Resolver(inputs, tables)
    relation = resolver.query(normalize_aggregates(tree), {}, "the view")
    outputs = [tree for _, tree in relation.columns]
    plan = close(relation.block, resolver.fresh)
    for output in outputs:
        check_reads(output, set(columns_of(plan)))
    root = ProjectNode(
        plan, tuple(NamedExpression(f"c{n}", text(tree)) for n, tree in enumerate(outputs))
    )
    read = frozenset(name for output in outputs for name in ids(output))
    root = ProjectNode(prune_columns(plan, read), root.columns)
    return ResolvedQuery(root, tuple(name for name, _ in relation.columns), tuple(resolver.claims))


class _Resolver:
    def __init__(self, inputs: tuple[str, ...], tables: Mapping[str, TableSchema]) -> None:
        self._inputs = {name.lower(): index for index, name in enumerate(inputs)}
        self._tables = [tables[name] for name in inputs]
        self._seen: dict[int, int] = {}
        """Number of occurrences of each input so far."""
        self.fresh = FreshColumnIds()
        self.claims: list[TypeClaim] = []

    # Queries

    def query(
        self,
        tree: Tree,
        ctes: Mapping[str, TableExpression],
        what: str,
        outer: NameReplacement | None = None,
        *,
        as_set: bool = False,
    ) -> _Relation:
        """Return any query as a relation. `what` names it in reasons.

        With `as_set` only the set of rows matters, not their multiplicity: a DISTINCT at the top
        changes nothing.
        """
        ctes = visible_ctes(tree, ctes)
        if isinstance(tree, exp.Subquery):
            check_args(tree, {"this", "with_", "alias", *ORDER}, what)
            return self.query(tree.this, ctes, what, outer, as_set=as_set)
        if isinstance(tree, exp.Union):
            return self._union(tree, ctes, what, outer, as_set)
        if isinstance(tree, exp.SetOperation):
            raise UnsupportedConstruct(f"{tree.key.upper()} in {what}")
        if not isinstance(tree, exp.Select):
            raise UnsupportedConstruct(f"{type(tree).__name__.upper()} in {what}")
        return self._select(tree, ctes, what, outer, as_set)

    def _select(
        self,
        select: Tree,
        ctes: Mapping[str, TableExpression],
        what: str,
        outer: NameReplacement | None,
        as_set: bool,
    ) -> _Relation:
        check_clauses(select, what)
        block, scope = self._from(select, ctes, outer)
        names = NameReplacement(scope, outer)
        block = self._where(select, block, names, ctes)
        outputs = names.outputs(select)
        if is_aggregate(select):
            block, outputs = self._grouped(select, block, outputs, names)
        elif select.args.get("having"):
            raise UnsupportedConstruct("HAVING without GROUP BY")
        for _, tree in outputs:
            check_scalar(tree)
        relation = _Relation(block, outputs)
        if select.args.get("distinct") and not as_set:
            check_args(select.args["distinct"], set(), "DISTINCT")
            return self._distinct(relation)
        return relation

    def _grouped(
        self, select: Tree, block: JoinBlock, outputs: Listing, names: NameReplacement
    ) -> tuple[JoinBlock, Listing]:
        plan = close(block, self.fresh)
        grouping = group(select, outputs, names, self.fresh)
        known = set(columns_of(plan))
        for _, tree in grouping.keys:
            check_reads(tree, known)
        for _, argument in grouping.calls:
            if argument is not None:
                check_reads(argument, known)
        plan = AggregationNode(
            plan,
            tuple(key for key, _ in grouping.keys),
            tuple(call for call, _ in grouping.calls),
        )
        return JoinBlock([plan], grouping.having), grouping.outputs

    def _projected(self, relation: _Relation, columns: tuple[str, ...]) -> ProjectNode:
        plan = close(relation.block, self.fresh)
        for _, tree in relation.columns:
            check_reads(tree, set(columns_of(plan)))
        pairs = zip(columns, relation.columns, strict=True)
        return ProjectNode(
            plan, tuple(NamedExpression(name, text(tree)) for name, (_, tree) in pairs)
        )

    def _distinct(self, relation: _Relation) -> _Relation:
        columns = tuple(self.fresh.name("d") for _ in relation.columns)
        plan = self._projected(relation, columns)
        return self._distinct_plan(plan, [name for name, _ in relation.columns])

    def _distinct_plan(self, plan: Plan, names: list[str]) -> _Relation:
        columns = columns_of(plan)
        made = DistinctNode(plan, tuple(GroupKey(column, column, "") for column in columns))
        return _Relation(JoinBlock([made], []), _listing(names, columns))

    def _union(
        self,
        tree: Tree,
        ctes: Mapping[str, TableExpression],
        what: str,
        outer: NameReplacement | None,
        as_set: bool,
    ) -> _Relation:
        check_args(tree, {"this", "expression", "distinct", "with_", *ORDER}, f"UNION in {what}")
        distinct = bool(tree.args.get("distinct"))
        sides = [
            self.query(side, ctes, f"a UNION of {what}", outer, as_set=distinct or as_set)
            for side in (tree.this, tree.expression)
        ]
        if len(sides[0].columns) != len(sides[1].columns):
            raise UnsupportedConstruct("a UNION of different widths")
        columns = tuple(self.fresh.name("u") for _ in sides[0].columns)
        plan = UnionAll(tuple(self._projected(side, columns) for side in sides))
        names = [name for name, _ in sides[0].columns]
        if distinct and not as_set:
            return self._distinct_plan(plan, names)
        return _Relation(JoinBlock([plan], []), _listing(names, columns))

    # FROM

    def _from(
        self, select: Tree, ctes: Mapping[str, TableExpression], outer: NameReplacement | None
    ) -> tuple[JoinBlock, FromScope]:
        source = select.args.get("from_")
        if source is None:
            raise UnsupportedConstruct("SELECT without FROM")
        return self._joined(source.this, select.args.get("joins") or [], ctes, outer)

    def _joined(
        self,
        first: Tree,
        joins: list[Tree],
        ctes: Mapping[str, TableExpression],
        outer: NameReplacement | None,
    ) -> tuple[JoinBlock, FromScope]:
        block, scope = self._item(first, ctes)
        product = False
        for join in joins:
            how = kind_of(join)
            by_name = join.args.get("using") or join.args.get("method")
            if product and (how in ("right", "full") or by_name):
                # The parser cannot tell a comma, which binds weaker, from CROSS JOIN.
                raise UnsupportedConstruct(f"a product before a {how.upper()} JOIN or USING")
            product = product or join.args.get("kind") == "CROSS"
            right, offered = self._item(join.this, ctes)
            block, scope = self._join(join, how, (block, scope), (right, offered), outer)
        return block, scope

    def _join(
        self,
        join: Tree,
        how: str,
        left: tuple[JoinBlock, FromScope],
        right: tuple[JoinBlock, FromScope],
        outer: NameReplacement | None,
    ) -> tuple[JoinBlock, FromScope]:
        (block, scope), (other, offered) = left, right
        if how in ("right", "full"):
            plan, scope = seal_expressions(block, scope, self.fresh)
            block = JoinBlock([plan], [])
        if how in ("left", "full"):
            plan, offered = seal_expressions(other, offered, self.fresh)
            other = JoinBlock([plan], [])
        using, conjuncts = using_of(join, how, scope, offered)
        both = joined(scope, offered, using)
        on = join.args.get("on")
        if on is not None:
            # Resolve over both sides' own columns, not over the columns that USING merged.
            names = NameReplacement(both, outer)
            conjuncts = [names.resolve(part) for part in conjuncts_of(on)]
        conjuncts = [part for tree in conjuncts for part in factored(tree)]
        for tree in conjuncts:
            check_scalar(tree)
        conjuncts = [tree for tree in conjuncts if tree != exp.true()]
        if how == "inner":
            return merged(block, other, conjuncts), both
        mine, theirs = close(block, self.fresh), close(other, self.fresh)
        if how in ("semi", "anti"):
            made = semi_join(mine, theirs, how == "anti", conjuncts, self.fresh)
            return JoinBlock([made], []), scope
        if how == "right":
            mine, theirs = theirs, mine
        kind = "full" if how == "full" else "left"
        return JoinBlock([outer_join(mine, theirs, kind, conjuncts, self.fresh)], []), both

    def _item(self, tree: Tree, ctes: Mapping[str, TableExpression]) -> tuple[JoinBlock, FromScope]:
        alias = tree.alias_or_name.lower()
        if isinstance(tree, exp.Subquery) and isinstance(tree.this, exp.Table | exp.Subquery):
            return self._parenthesised(tree, ctes)
        if isinstance(tree, exp.Subquery):
            check_args(tree, {"this", "alias", "with_"}, "a derived table")
            what = f"the derived table {alias or '?'}"
            relation = self.query(tree.this, visible_ctes(tree, ctes), what)
        elif isinstance(tree, exp.Table) and isinstance(tree.this, exp.Identifier):
            check_args(tree, {"this", "alias"}, f"table {tree.name}")
            cte = ctes.get(tree.name.lower())
            if cte is None:
                relation = self._table(tree)
            else:
                what = f"the table expression {tree.name}"
                relation = self.query(cte.tree.this, cte.scope, what)
                relation.columns = renamed(relation.columns, cte.tree)
        else:
            raise UnsupportedConstruct(f"{type(tree).__name__.upper()} in FROM")
        columns = renamed(relation.columns, tree)
        return relation.block, FromScope(columns, {alias: columns} if alias else {})

    def _parenthesised(
        self, tree: Tree, ctes: Mapping[str, TableExpression]
    ) -> tuple[JoinBlock, FromScope]:
        """Return ``(a JOIN b …)``: the names of a and b stay valid, unless the whole has an
        alias."""
        check_args(tree, {"this", "alias", "with_"}, "a derived table")
        inner = tree.this.copy()
        joins = inner.args.get("joins") or []
        inner.set("joins", None)
        block, scope = self._joined(inner, joins, visible_ctes(tree, ctes), None)
        return block, aliased(scope, tree)

    def _table(self, table: Tree) -> _Relation:
        index = self._inputs[table.name.lower()]
        seen = self._seen.get(index, 0)
        self._seen[index] = seen + 1
        if sum(self._seen.values()) > OCCURRENCES_MAX:
            raise UnsupportedConstruct(f"more than {OCCURRENCES_MAX} occurrences of tables")
        suffix = "" if seen == 0 else chr(ord("a") + seen) if seen < 26 else f"_{seen}"
        own = self._tables[index].names
        pairs = [(column_id(f"i{index}{suffix}", name, own), name) for name in own]
        lowered = lower_columns(self._tables[index])
        names = {name: low for low, name in lowered.items()}
        columns = [(names.get(name, name.lower()), exp.column(made)) for made, name in pairs]
        return _Relation(JoinBlock([ScanNode(index, tuple(pairs))], []), columns)

    # WHERE

    def _where(
        self,
        select: Tree,
        block: JoinBlock,
        names: NameReplacement,
        ctes: Mapping[str, TableExpression],
    ) -> JoinBlock:
        where = select.args.get("where")
        tests: list[SubqueryMatch] = []
        conjuncts = list(block.conjuncts)
        for part in [] if where is None else conjuncts_of(where.this):
            test = matching(part)
            if test is not None:
                tests.append(test)
                continue
            for tree in factored(names.resolve(part)):
                check_scalar(tree)
                conjuncts.append(tree)
        conjuncts += block.on
        block = JoinBlock(block.inputs, conjuncts)
        present = never_null(conjuncts)
        for test in tests:
            block = self._matched(block, test, names, ctes, present)
        return block

    def _matched(
        self,
        block: JoinBlock,
        test: SubqueryMatch,
        names: NameReplacement,
        ctes: Mapping[str, TableExpression],
        present: set[str],
    ) -> JoinBlock:
        """Return the block's rows that pass a subquery test. `present` are expressions that are not
        NULL in them."""
        what = "a subquery"
        inner = self.query(test.query, ctes, what, names, as_set=True)
        mine = {name for each in inner.block.inputs for name in columns_of(each)}
        own = [tree for tree in inner.block.conjuncts if ids(tree) <= mine]
        on = [tree for tree in inner.block.conjuncts if not ids(tree) <= mine]
        right = close(JoinBlock(inner.block.inputs, own), self.fresh)
        theirs = {name for each in block.inputs for name in columns_of(each)}
        left = close(
            JoinBlock(block.inputs, [tree for tree in block.conjuncts if ids(tree) <= theirs]),
            self.fresh,
        )
        # This query may itself be a subquery: then its correlation is left for the outer query.
        outward = [tree for tree in block.conjuncts if not ids(tree) <= theirs]
        values = [names.resolve(value) for value in test.values]
        if values and len(values) != len(inner.columns):
            raise UnsupportedConstruct("IN of different widths")
        for value, (_, found) in zip(values, inner.columns, strict=False):
            check_scalar(value)
            check_reads(value, theirs)
            check_reads(found, mine)
            never = (bare(value) in present, bare(found) in never_null(own))
            self.claims.append(TypeClaim(left, text(value), right, text(found), test.anti, never))
            on.append(exp.EQ(this=operand(value), expression=operand(found)))
        return JoinBlock([semi_join(left, right, test.anti, on, self.fresh)], outward)


def _listing(names: list[str], columns: tuple[str, ...]) -> Listing:
    return [(name, exp.column(made)) for name, made in zip(names, columns, strict=True)]
