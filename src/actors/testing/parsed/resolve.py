"""A view's syntax tree → its relational plan, untyped.

Theory of operation. A query becomes a *relation*: a block (inputs and a conjunction, see
`joins`) and, for each column of its list, a name and an expression over the block's column ids.
A derived table or common table expression that only projects, filters and joins inwardly is
thereby inlined: its columns stay expressions, evaluated where they are used. Groupings, DISTINCT,
unions, outer and semi joins close the block below them into a plan of its own, which is the
single input of the next block. A table expression used twice is resolved twice: every
occurrence of a table has ids of its own (``i0_carrier``, the second time ``i0b_carrier``).

Only the parser's tree is used: the rewrites of its optimiser are not sound for Spark.

The plan is untyped: `Key`, `AggregateCall` and `Distinct` have empty types, and the inputs of a
`UnionAll` no casts; `build` asks Spark and fills them in. `Unsupported` names the construct that
no rule knows: the view is then opaque.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from sqlglot import exp

from actors.plan.relational import (
    Aggregate,
    Distinct,
    Key,
    Named,
    Plan,
    Project,
    Scan,
    UnionAll,
    columns_of,
)
from actors.plan.relational_walk import pruned
from actors.plan.schema import Schema
from actors.testing.parsed.clauses import (
    ORDER,
    Cte,
    aliased,
    check_clauses,
    kind_of,
    renamed,
    using_of,
    visible_ctes,
)
from actors.testing.parsed.grouping import group, is_aggregate, normalize_aggregates
from actors.testing.parsed.joins import (
    Block,
    Fresh,
    check_reads,
    close,
    merged,
    outer_join,
    seal_expressions,
    semi_join,
)
from actors.testing.parsed.parse import Tree, lower_columns
from actors.testing.parsed.scope import Listing, Names, Scope, joined
from actors.testing.parsed.subquery import Claim, Matching, matching, never_null
from actors.testing.parsed.trees import (
    Unsupported,
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

__all__ = ["Resolved", "Unsupported", "column_id", "conjuncts_of", "ids", "resolve", "text"]

OCCURRENCES_MAX: Final = 64
"""Most occurrences of tables in one query: a table expression used twice is resolved twice, and so
on."""


class Resolved(msgspec.Struct):
    """A query as a plan without types."""

    root: Project
    """Projection whose columns ``c0``, ``c1`` … are the outputs."""
    names: tuple[str, ...]
    """Lower-cased names of the outputs; "" for a name that only Spark knows."""
    claims: tuple[Claim, ...]


class _Relation(msgspec.Struct):
    block: Block
    columns: Listing


def resolve(tree: Tree, sources: tuple[str, ...], tables: Mapping[str, Schema]) -> Resolved:
    """Return the query as a plan. Raises `Unsupported`."""
    resolver = _Resolver(sources, tables)
    relation = resolver.query(normalize_aggregates(tree), {}, "the view")
    outputs = [tree for _, tree in relation.columns]
    plan = close(relation.block, resolver.fresh)
    for output in outputs:
        check_reads(output, set(columns_of(plan)))
    root = Project(plan, tuple(Named(f"c{n}", text(tree)) for n, tree in enumerate(outputs)))
    read = frozenset(name for output in outputs for name in ids(output))
    root = Project(pruned(plan, read), root.columns)
    return Resolved(root, tuple(name for name, _ in relation.columns), tuple(resolver.claims))


class _Resolver:
    def __init__(self, sources: tuple[str, ...], tables: Mapping[str, Schema]) -> None:
        self._sources = {name.lower(): index for index, name in enumerate(sources)}
        self._tables = [tables[name] for name in sources]
        self._seen: dict[int, int] = {}
        self.fresh = Fresh()
        self.claims: list[Claim] = []

    # Queries

    def query(
        self,
        tree: Tree,
        ctes: Mapping[str, Cte],
        what: str,
        outer: Names | None = None,
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
            raise Unsupported(f"{tree.key.upper()} in {what}")
        if not isinstance(tree, exp.Select):
            raise Unsupported(f"{type(tree).__name__.upper()} in {what}")
        return self._select(tree, ctes, what, outer, as_set)

    def _select(
        self,
        select: Tree,
        ctes: Mapping[str, Cte],
        what: str,
        outer: Names | None,
        as_set: bool,
    ) -> _Relation:
        check_clauses(select, what)
        block, scope = self._from(select, ctes, outer)
        names = Names(scope, outer)
        block = self._where(select, block, names, ctes)
        outputs = names.outputs(select)
        if is_aggregate(select):
            block, outputs = self._grouped(select, block, outputs, names)
        elif select.args.get("having"):
            raise Unsupported("HAVING without GROUP BY")
        for _, tree in outputs:
            check_scalar(tree)
        relation = _Relation(block, outputs)
        if select.args.get("distinct") and not as_set:
            check_args(select.args["distinct"], set(), "DISTINCT")
            return self._distinct(relation)
        return relation

    def _grouped(
        self, select: Tree, block: Block, outputs: Listing, names: Names
    ) -> tuple[Block, Listing]:
        plan = close(block, self.fresh)
        grouping = group(select, outputs, names, self.fresh)
        known = set(columns_of(plan))
        for _, tree in grouping.keys:
            check_reads(tree, known)
        for _, argument in grouping.calls:
            if argument is not None:
                check_reads(argument, known)
        plan = Aggregate(
            plan,
            tuple(key for key, _ in grouping.keys),
            tuple(call for call, _ in grouping.calls),
        )
        return Block([plan], grouping.having), grouping.outputs

    def _projected(self, relation: _Relation, columns: tuple[str, ...]) -> Project:
        plan = close(relation.block, self.fresh)
        for _, tree in relation.columns:
            check_reads(tree, set(columns_of(plan)))
        pairs = zip(columns, relation.columns, strict=True)
        return Project(plan, tuple(Named(name, text(tree)) for name, (_, tree) in pairs))

    def _distinct(self, relation: _Relation) -> _Relation:
        columns = tuple(self.fresh.name("d") for _ in relation.columns)
        plan = self._projected(relation, columns)
        return self._distinct_plan(plan, [name for name, _ in relation.columns])

    def _distinct_plan(self, plan: Plan, names: list[str]) -> _Relation:
        columns = columns_of(plan)
        made = Distinct(plan, tuple(Key(column, column, "") for column in columns))
        return _Relation(Block([made], []), _listing(names, columns))

    def _union(
        self,
        tree: Tree,
        ctes: Mapping[str, Cte],
        what: str,
        outer: Names | None,
        as_set: bool,
    ) -> _Relation:
        check_args(tree, {"this", "expression", "distinct", "with_", *ORDER}, f"UNION in {what}")
        distinct = bool(tree.args.get("distinct"))
        sides = [
            self.query(side, ctes, f"a UNION of {what}", outer, as_set=distinct or as_set)
            for side in (tree.this, tree.expression)
        ]
        if len(sides[0].columns) != len(sides[1].columns):
            raise Unsupported("a UNION of different widths")
        columns = tuple(self.fresh.name("u") for _ in sides[0].columns)
        plan = UnionAll(tuple(self._projected(side, columns) for side in sides))
        names = [name for name, _ in sides[0].columns]
        if distinct and not as_set:
            return self._distinct_plan(plan, names)
        return _Relation(Block([plan], []), _listing(names, columns))

    # FROM

    def _from(
        self, select: Tree, ctes: Mapping[str, Cte], outer: Names | None
    ) -> tuple[Block, Scope]:
        source = select.args.get("from_")
        if source is None:
            raise Unsupported("SELECT without FROM")
        return self._joined(source.this, select.args.get("joins") or [], ctes, outer)

    def _joined(
        self, first: Tree, joins: list[Tree], ctes: Mapping[str, Cte], outer: Names | None
    ) -> tuple[Block, Scope]:
        block, scope = self._item(first, ctes)
        product = False
        for join in joins:
            how = kind_of(join)
            by_name = join.args.get("using") or join.args.get("method")
            if product and (how in ("right", "full") or by_name):
                # The parser does not tell a comma, which binds weaker, from CROSS JOIN.
                raise Unsupported(f"a product before a {how.upper()} JOIN or USING")
            product = product or join.args.get("kind") == "CROSS"
            right, offered = self._item(join.this, ctes)
            block, scope = self._join(join, how, (block, scope), (right, offered), outer)
        return block, scope

    def _join(
        self,
        join: Tree,
        how: str,
        left: tuple[Block, Scope],
        right: tuple[Block, Scope],
        outer: Names | None,
    ) -> tuple[Block, Scope]:
        (block, scope), (other, offered) = left, right
        if how in ("right", "full"):
            plan, scope = seal_expressions(block, scope, self.fresh)
            block = Block([plan], [])
        if how in ("left", "full"):
            plan, offered = seal_expressions(other, offered, self.fresh)
            other = Block([plan], [])
        using, conjuncts = using_of(join, how, scope, offered)
        both = joined(scope, offered, using)
        on = join.args.get("on")
        if on is not None:
            # Resolved over both sides' own columns, not over the columns that USING merged.
            names = Names(both, outer)
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
            return Block([made], []), scope
        if how == "right":
            mine, theirs = theirs, mine
        kind = "full" if how == "full" else "left"
        return Block([outer_join(mine, theirs, kind, conjuncts, self.fresh)], []), both

    def _item(self, tree: Tree, ctes: Mapping[str, Cte]) -> tuple[Block, Scope]:
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
            raise Unsupported(f"{type(tree).__name__.upper()} in FROM")
        columns = renamed(relation.columns, tree)
        return relation.block, Scope(columns, {alias: columns} if alias else {})

    def _parenthesised(self, tree: Tree, ctes: Mapping[str, Cte]) -> tuple[Block, Scope]:
        """Return ``(a JOIN b …)``: names of a and b stay, unless the whole has an alias."""
        check_args(tree, {"this", "alias", "with_"}, "a derived table")
        inner = tree.this.copy()
        joins = inner.args.get("joins") or []
        inner.set("joins", None)
        block, scope = self._joined(inner, joins, visible_ctes(tree, ctes), None)
        return block, aliased(scope, tree)

    def _table(self, table: Tree) -> _Relation:
        index = self._sources[table.name.lower()]
        seen = self._seen.get(index, 0)
        self._seen[index] = seen + 1
        if sum(self._seen.values()) > OCCURRENCES_MAX:
            raise Unsupported(f"more than {OCCURRENCES_MAX} occurrences of tables")
        suffix = "" if seen == 0 else chr(ord("a") + seen) if seen < 26 else f"_{seen}"
        own = self._tables[index].names
        pairs = [(column_id(f"i{index}{suffix}", name, own), name) for name in own]
        lowered = lower_columns(self._tables[index])
        names = {name: low for low, name in lowered.items()}
        columns = [(names.get(name, name.lower()), exp.column(made)) for made, name in pairs]
        return _Relation(Block([Scan(index, tuple(pairs))], []), columns)

    # WHERE

    def _where(self, select: Tree, block: Block, names: Names, ctes: Mapping[str, Cte]) -> Block:
        where = select.args.get("where")
        tests: list[Matching] = []
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
        block = Block(block.inputs, conjuncts)
        present = never_null(conjuncts)
        for test in tests:
            block = self._matched(block, test, names, ctes, present)
        return block

    def _matched(
        self,
        block: Block,
        test: Matching,
        names: Names,
        ctes: Mapping[str, Cte],
        present: set[str],
    ) -> Block:
        """Return the block's rows that pass a subquery test. `present`: expressions that are not
        NULL in them."""
        what = "a subquery"
        inner = self.query(test.query, ctes, what, names, as_set=True)
        mine = {name for each in inner.block.inputs for name in columns_of(each)}
        own = [tree for tree in inner.block.conjuncts if ids(tree) <= mine]
        on = [tree for tree in inner.block.conjuncts if not ids(tree) <= mine]
        right = close(Block(inner.block.inputs, own), self.fresh)
        theirs = {name for each in block.inputs for name in columns_of(each)}
        left = close(
            Block(block.inputs, [tree for tree in block.conjuncts if ids(tree) <= theirs]),
            self.fresh,
        )
        # This query may be a subquery itself: its own correlation is for its outer query.
        outward = [tree for tree in block.conjuncts if not ids(tree) <= theirs]
        values = [names.resolve(value) for value in test.values]
        if values and len(values) != len(inner.columns):
            raise Unsupported("IN of different widths")
        for value, (_, found) in zip(values, inner.columns, strict=False):
            check_scalar(value)
            check_reads(value, theirs)
            check_reads(found, mine)
            never = (bare(value) in present, bare(found) in never_null(own))
            self.claims.append(Claim(left, text(value), right, text(found), test.anti, never))
            on.append(exp.EQ(this=operand(value), expression=operand(found)))
        return Block([semi_join(left, right, test.anti, on, self.fresh)], outward)


def _listing(names: list[str], columns: tuple[str, ...]) -> Listing:
    return [(name, exp.column(made)) for name, made in zip(names, columns, strict=True)]
