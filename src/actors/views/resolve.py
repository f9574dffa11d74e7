"""A qualified tree → a resolved query: scans, conjuncts, outputs, groups.

Theory of operation. A query that we maintain is, however it nests, one *block*: a product of
base tables (leaves), a conjunction of predicates, and output expressions; on top possibly one
grouping. Derived tables and common table expressions that are blocks themselves are inlined:
their outputs are expressions over the leaves. Each leaf is one occurrence of a table; its
columns have ids that are unique in the whole query (``i0_carrier``; a table that occurs twice
has ``i0_id`` and ``i0b_id``).

Names: a column of a source wins over an alias of the select list, as in Spark; where HAVING
could mean either, the view is opaque. Functions are on a list of those whose text survives
parsing and generating unchanged; functions that the parser does not know pass verbatim, and
Spark says (`compile.probes`) whether they are scalar.

`Unsupported` names the construct that no rule knows: the view is then opaque. Nothing here knows
types: they are Spark's to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from sqlglot import exp

from actors.plan.schema import Schema
from actors.views.parse import DIALECT, Tree, lower_columns

_SCALAR_WORDS: Final = """
Column Identifier Dot Literal RawString HexString Boolean Null Cast TryCast DataType
DataTypeParam Paren And Or Not EQ NEQ GT GTE LT LTE NullSafeEQ NullSafeNEQ Is In Between
Like ILike RegexpLike Escape Add Sub Mul Div IntDiv Mod Neg BitwiseAnd BitwiseOr BitwiseXor
BitwiseNot Case If Coalesce Nullif Nvl2 Greatest Least Upper Lower Length Concat ConcatWs
DPipe Substring Left Right Trim Pad Replace Repeat Reverse Translate Ascii StartsWith
EndsWith Contains Initcap StrPosition RegexpReplace RegexpExtract RegexpSplit Abs Round Ceil
Floor Sqrt Exp Pow Sign Year Month Day DayOfMonth DayOfWeek DayOfYear WeekOfYear Quarter
Hour Minute Second TsOrDsToDate TimestampTrunc DateTrunc Extract Var Interval TsOrDsAdd
DateDiff AddMonths LastDay TimestampDiff Bracket ArraySize ArrayContains Array MD5 SHA2
Anonymous
"""
SCALAR: Final = frozenset(_SCALAR_WORDS.split())


class Unsupported(Exception):
    """No rule knows this construct; the text names it."""


def column_id(prefix: str, name: str, names: tuple[str, ...]) -> str:
    """The id of column `name` of a table with columns `names`: a plain, unquoted word."""
    plain = re.sub(r"\W", "_", name)
    # Columns whose names differ only in punctuation must not share an id.
    return f"{prefix}_{plain}" + ("" if plain == name else f"_{names.index(name)}")


class Leaf(msgspec.Struct):
    """One occurrence of a source."""

    source: int
    prefix: str
    columns: dict[str, str]
    """Lower-cased name → the table's own name."""
    used: dict[str, str] = msgspec.field(default_factory=dict)
    """Column id → the table's own name, in the order of use."""

    def id(self, lowered: str) -> str:
        """The id of a column, noting its use."""
        own = self.columns[lowered]
        name = column_id(self.prefix, own, tuple(self.columns.values()))
        self.used[name] = own
        return name


class Resolved(msgspec.Struct):
    """A query as one block; with `select` set, what `grouping.group` needs to group it."""

    leaves: list[Leaf]
    conjuncts: list[Tree]
    outputs: list[Tree]
    select: Tree | None = None
    columns: Columns | None = None


class _Block(msgspec.Struct):
    conjuncts: list[Tree]
    outputs: dict[str, Tree]


def text(tree: Tree) -> str:
    """Spark SQL text of an expression."""
    return str(tree.sql(dialect=DIALECT))


def ids(tree: Tree) -> set[str]:
    """Column ids that an expression reads."""
    return {column.name for column in tree.find_all(exp.Column)}


def bare(tree: Tree) -> str:
    """The text by which expressions are compared: no outer parentheses, no case of names."""
    return text(tree.unnest())


def conjuncts_of(tree: Tree) -> list[Tree]:
    """The predicates that AND ties together."""
    tree = tree.unnest()
    if isinstance(tree, exp.And):
        return [*conjuncts_of(tree.left), *conjuncts_of(tree.right)]
    return [tree]


def resolve(tree: Tree, sources: tuple[str, ...], tables: Mapping[str, Schema]) -> Resolved:
    """The query as a block with a grouping. Raises `Unsupported`."""
    return _Resolver(sources, tables).top(tree)


class _Resolver:
    def __init__(self, sources: tuple[str, ...], tables: Mapping[str, Schema]) -> None:
        self._sources = {name.lower(): index for index, name in enumerate(sources)}
        self._columns = [lower_columns(tables[name]) for name in sources]
        self._leaves: list[Leaf] = []

    def top(self, tree: Tree) -> Resolved:
        select = _select_of(tree)
        _check_clauses(select, top=True)
        scope, conjuncts, _ = self._relations(select, {})
        columns = Columns(scope)
        outputs = columns.outputs(select)
        if _is_aggregate(select):
            return Resolved(self._leaves, conjuncts, outputs, select, columns)
        if select.args.get("having"):
            raise Unsupported("HAVING without GROUP BY")
        for tree_ in outputs:
            check_scalar(tree_)
        return Resolved(self._leaves, conjuncts, outputs)

    def _block(self, tree: Tree, ctes: Mapping[str, Tree], what: str) -> _Block:
        select = _select_of(tree, what)
        _check_clauses(select, top=False, what=what)
        if _is_aggregate(select):
            raise Unsupported(f"GROUP BY or an aggregate inside {what}")
        scope, conjuncts, _ = self._relations(select, ctes)
        outputs = Columns(scope).outputs(select)
        named: dict[str, Tree] = {}
        for projection, output in zip(select.expressions, outputs, strict=True):
            check_scalar(output)
            named[projection.alias_or_name.lower()] = output
        return _Block(conjuncts, named)

    def _relations(
        self, select: Tree, outer: Mapping[str, Tree]
    ) -> tuple[dict[str, dict[str, Tree]], list[Tree], dict[str, Tree]]:
        """(alias → column → expression, conjuncts of ON and WHERE, CTEs in scope)."""
        ctes = dict(outer)
        with_ = select.args.get("with_")
        if with_ is not None:
            if with_.args.get("recursive"):
                raise Unsupported("WITH RECURSIVE")
            for cte in with_.expressions:
                ctes[cte.alias_or_name.lower()] = _Cte(cte, dict(ctes))
        source = select.args.get("from_")
        if source is None:
            raise Unsupported("SELECT without FROM")
        scope: dict[str, dict[str, Tree]] = {}
        conjuncts: list[Tree] = []
        self._relation(source.this, ctes, scope, conjuncts)
        for join in select.args.get("joins") or []:
            _check_join(join)
            self._relation(join.this, ctes, scope, conjuncts)
            if join.args.get("on") is not None:
                conjuncts += self._predicates(join.args["on"], scope)
        where = select.args.get("where")
        if where is not None:
            conjuncts += self._predicates(where.this, scope)
        return scope, conjuncts, ctes

    def _predicates(self, tree: Tree, scope: dict[str, dict[str, Tree]]) -> list[Tree]:
        resolved = [Columns(scope).resolve(part) for part in conjuncts_of(tree)]
        for part in resolved:
            check_scalar(part)
        return resolved

    def _relation(
        self,
        tree: Tree,
        ctes: Mapping[str, Tree],
        scope: dict[str, dict[str, Tree]],
        conjuncts: list[Tree],
    ) -> None:
        alias = tree.alias_or_name.lower()
        if isinstance(tree, exp.Subquery):
            check_args(tree, {"this", "alias"}, "a derived table")
            block = self._block(tree.this, ctes, f"the derived table {alias or '?'}")
        elif isinstance(tree, exp.Table) and isinstance(tree.this, exp.Identifier):
            check_args(tree, {"this", "alias"}, f"table {tree.name}")
            if isinstance(ctes.get(tree.name.lower()), _Cte):
                cte = ctes[tree.name.lower()]
                block = self._block(cte.tree.this, cte.scope, f"the table expression {tree.name}")
            else:
                scope[alias] = self._leaf(tree)
                return
        else:
            raise Unsupported(f"{_describe(tree)} in FROM")
        conjuncts += block.conjuncts
        scope[alias] = block.outputs

    def _leaf(self, table: Tree) -> dict[str, Tree]:
        columns = table.args.get("alias") and table.args["alias"].args.get("columns")
        if columns:
            raise Unsupported(f"column aliases on table {table.name}")
        index = self._sources[table.name.lower()]
        seen = sum(leaf.source == index for leaf in self._leaves)
        suffix = "" if seen == 0 else chr(ord("a") + seen) if seen < 26 else f"_{seen}"
        leaf = Leaf(index, f"i{index}{suffix}", self._columns[index])
        self._leaves.append(leaf)
        return {lowered: _LeafColumn(leaf, lowered) for lowered in leaf.columns}


class _Cte(msgspec.Struct):
    tree: Tree
    scope: dict[str, Tree]


class _LeafColumn(msgspec.Struct):
    """A column of a leaf that becomes an id (and counts as used) when somebody reads it."""

    leaf: Leaf
    lowered: str


class Columns:
    """Replaces the columns of expressions by what they stand for."""

    def __init__(self, scope: dict[str, dict[str, Tree]]) -> None:
        self._scope = scope
        self._aliases: dict[str, Tree] = {}

    def check_having(self, tree: Tree) -> None:
        """Raises `Unsupported` where a name could mean a column or another alias."""
        for column in tree.find_all(exp.Column):
            name = column.name.lower()
            alias = self._aliases.get(name)
            found = self._column(name)
            if alias is not None and found is not None and bare(found) != bare(alias):
                raise Unsupported(f"HAVING {name}, which is both a column and an alias")

    def _column(self, name: str) -> Tree | None:
        """The source column of that name, as Spark prefers it to an alias."""
        found = [columns[name] for columns in self._scope.values() if name in columns]
        if len(found) > 1:
            raise Unsupported(f"the name {name}, which several sources have")
        return _stands_for(found[0]) if found else None

    def outputs(self, select: Tree) -> list[Tree]:
        """Resolved expressions of the select list; later names may refer to them."""
        outputs = []
        for projection in select.expressions:
            if isinstance(projection, exp.Star) or projection.is_star:
                raise Unsupported("a star that does not expand")
            tree = self.resolve(projection.unalias())
            outputs.append(tree)
            name = projection.alias_or_name.lower()
            if name:
                self._aliases.setdefault(name, tree)
        return outputs

    def resolve(self, tree: Tree) -> Tree:
        """A copy of the expression over column ids. Raises `Unsupported`."""
        return transform(tree, self._replace)

    def _replace(self, node: Tree) -> Tree | None:
        if isinstance(node, exp.Subquery | exp.Exists | exp.Query):
            raise Unsupported("a subquery expression")
        if not isinstance(node, exp.Column):
            return None
        name, table = node.name.lower(), node.table.lower()
        if node.args.get("db"):
            raise Unsupported(f"the nested name {text(node)}")
        if table:
            found = self._scope.get(table, {}).get(name)
        else:
            found = self._column(name) or self._aliases.get(name)
        if found is None:
            raise Unsupported(f"the name {text(node)}, which does not resolve to a column")
        return _stands_for(found)


def _stands_for(found: Tree) -> Tree:
    if isinstance(found, _LeafColumn):
        return exp.column(found.leaf.id(found.lowered))
    if isinstance(found, exp.Column | exp.Literal | exp.Paren | exp.Cast | exp.Anonymous):
        return found.copy()
    # Parentheses keep the operator precedence of what is put in.
    return exp.Paren(this=found.copy())


def transform(tree: Tree, replace: Callable[[Tree], Tree | None]) -> Tree:
    """Top-down copy; what `replace` answers is put in as it is."""
    done = replace(tree)
    if done is not None:
        return done
    copy = tree.copy()
    for key, value in list(copy.args.items()):
        if isinstance(value, exp.Expression):
            copy.set(key, transform(value, replace))
        elif isinstance(value, list):
            copy.set(
                key,
                [transform(v, replace) if isinstance(v, exp.Expression) else v for v in value],
            )
    return copy


def _is_aggregate(select: Tree) -> bool:
    if select.args.get("group"):
        return True
    having = select.args.get("having")
    return any(
        aggregate.find_ancestor(exp.Select, exp.Window) is select
        for part in [*select.expressions, *([having] if having else [])]
        for aggregate in part.find_all(exp.AggFunc)
    )


def check_scalar(tree: Tree) -> None:
    """Passes an expression that a row alone determines. Raises `Unsupported` naming the rest."""
    for node in tree.walk():
        kind = type(node).__name__
        if isinstance(node, exp.Window):
            raise Unsupported("a window function")
        if isinstance(node, exp.AggFunc):
            raise Unsupported(f"the nested aggregate {text(node)}")
        if kind not in SCALAR:
            raise Unsupported(f"the construct {kind} ({text(node)[:80]})")


def _select_of(tree: Tree, what: str = "the view") -> Tree:
    if isinstance(tree, exp.Subquery) and set(_present(tree)) <= {"this"}:
        return _select_of(tree.this, what)
    if isinstance(tree, exp.SetOperation):
        raise Unsupported(f"{tree.key.upper()} in {what}")
    if not isinstance(tree, exp.Select):
        raise Unsupported(f"{_describe(tree)} in {what}")
    return tree


def _check_clauses(select: Tree, *, top: bool, what: str = "the view") -> None:
    known = {"expressions", "from_", "joins", "where", "group", "having", "with_", "hint"}
    names = {"laterals": "LATERAL VIEW", "order": "ORDER BY", "distinct": "DISTINCT"}
    present = _present(select)
    if any(key in present for key in ("limit", "offset")):
        raise Unsupported(f"LIMIT or OFFSET in {what}")
    # Contents are a bag: an order without a limit changes nothing.
    known |= {"order", "sort", "cluster", "distribute"}
    for key in present:
        if key not in known:
            raise Unsupported(f"{names.get(key, key.upper())} in {what}")
    for projection in select.expressions:
        if projection.find(exp.Window):
            raise Unsupported(f"a window function in {what}")


def _check_join(join: Tree) -> None:
    side, kind = str(join.args.get("side") or ""), str(join.args.get("kind") or "")
    if side or kind not in ("", "INNER", "CROSS"):
        raise Unsupported(f"{' '.join(word for word in (side, kind) if word)} JOIN")
    check_args(join, {"this", "on", "kind"}, "JOIN")


def check_args(tree: Tree, known: set[str], what: str) -> None:
    """Passes a node with no parts beyond `known`. Raises `Unsupported` naming the others."""
    for key in _present(tree):
        if key not in known:
            raise Unsupported(f"{key.rstrip('_').upper()} on {what}")


def _present(tree: Tree) -> list[str]:
    return [key for key, value in tree.args.items() if value]


def _describe(tree: Tree) -> str:
    return f"{type(tree).__name__.upper()}"
