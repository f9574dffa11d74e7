"""Queries that are plain reads of one object: columns, simple comparisons, order and limit.

Such a query means the same to a peek as to Spark, and is answered from an index or a shard
without it. What is not surely the same is not simple: a literal must have the very type of the
column it is compared with, or be one that casts to it without loss; a name must have one meaning
only. Everything else is Spark's. Pure.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from actors.plan.schema import Schema, arrow_type
from actors.plan.updates import to_ipc
from actors.protocol.compute import Comparison, Finishing, OrderBy
from actors.views.parse import DIALECT

Op: TypeAlias = Literal["=", "<>", "<", "<=", ">", ">=", "is null", "is not null"]

_PARTS: Final = frozenset({"expressions", "from", "from_", "where", "order", "limit", "offset"})
_OPS: Final[Mapping[Any, tuple[Op, Op]]] = {
    exp.EQ: ("=", "="),
    exp.NEQ: ("<>", "<>"),
    exp.LT: ("<", ">"),
    exp.LTE: ("<=", ">="),
    exp.GT: (">", "<"),
    exp.GTE: (">=", "<="),
}
"""Each comparison, and what it is with its sides exchanged."""
_INTEGERS: Final[Mapping[str, int]] = {
    "tinyint": 8,
    "byte": 8,
    "smallint": 16,
    "short": 16,
    "int": 32,
    "integer": 32,
    "bigint": 64,
    "long": 64,
}
_WHOLE_DOUBLES_MAX: Final = 1 << 53


class SimpleRead(msgspec.Struct, frozen=True):
    """A query as a read. `names` are the answer's columns, one for each of `project`."""

    name: str
    project: tuple[str, ...]
    names: tuple[str, ...]
    filter: tuple[Comparison, ...] = ()
    finishing: Finishing | None = None


class NotSimple(Exception):
    """What was looked at is for Spark."""


def simple_read(sql: str, tables: Mapping[str, Schema]) -> SimpleRead | None:
    """The read that answers the query; None: it is not simple. `tables`: what may be named, with
    a relation of the service under its full name."""
    try:
        statements = [tree for tree in sqlglot.parse(sql, dialect=DIALECT) if tree is not None]
        if len(statements) != 1 or not isinstance(statements[0], exp.Select):
            return None
        return _read(statements[0], {name.lower(): name for name in tables}, tables)
    except (NotSimple, SqlglotError, RecursionError, ValueError):
        return None


def _read(tree: Any, catalog: Mapping[str, str], tables: Mapping[str, Schema]) -> SimpleRead:
    parts = {name for name, part in tree.args.items() if part}
    source = tree.args.get("from") or tree.args.get("from_")
    if not parts <= _PARTS or source is None:
        raise NotSimple
    table = source.this
    if not isinstance(table, exp.Table) or not isinstance(table.this, exp.Identifier):
        raise NotSimple
    if {name for name, part in table.args.items() if part} - {"this", "db", "alias"}:
        raise NotSimple
    full = f"{table.db}.{table.name}" if table.args.get("db") else table.name
    name = catalog.get(full.lower())
    if name is None or (table.args.get("alias") and table.args["alias"].args.get("columns")):
        raise NotSimple
    scope = _Scope(tables[name], table.alias_or_name)
    project, names = _columns(tree, scope)
    where = tree.args.get("where")
    tests = () if where is None else tuple(_test(each, scope) for each in conjuncts(where.this))
    finishing = _finishing(tree, scope, dict(zip(names, project, strict=True)))
    return SimpleRead(name, project, names, tests, finishing)


class _Scope:
    """The one object's columns."""

    def __init__(self, schema: Schema, qualifier: str) -> None:
        self.types = {column.name: column.type.lower() for column in schema.columns}
        self._own = {name.lower(): name for name in schema.names}
        if len(self._own) < len(schema.names):
            raise NotSimple
        self._qualifier = qualifier.lower()

    def column(self, node: Any) -> str:
        """The column that a node is."""
        if not isinstance(node, exp.Column) or not isinstance(node.this, exp.Identifier):
            raise NotSimple
        if node.args.get("db") or (node.table and node.table.lower() != self._qualifier):
            raise NotSimple
        found = self._own.get(node.name.lower())
        if found is None:
            raise NotSimple
        return found


def _columns(tree: Any, scope: _Scope) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if len(tree.expressions) == 1 and type(tree.expressions[0]) is exp.Star:
        if any(tree.expressions[0].args.values()):
            raise NotSimple
        return tuple(scope.types), tuple(scope.types)
    project, names = [], []
    for each in tree.expressions:
        inner = each.this if isinstance(each, exp.Alias) else each
        project.append(scope.column(inner))
        # Spark names a column as it is written.
        names.append(each.alias if isinstance(each, exp.Alias) else inner.name)
    folded = [name.lower() for name in names]
    if len(set(project)) < len(project) or len(set(folded)) < len(folded):
        raise NotSimple
    return tuple(project), tuple(names)


def conjuncts(node: Any) -> list[Any]:
    """What AND holds together, without parentheses, in order."""
    if isinstance(node, exp.Paren):
        return conjuncts(node.this)
    if isinstance(node, exp.And):
        return [*conjuncts(node.this), *conjuncts(node.expression)]
    return [node]


def _test(node: Any, scope: _Scope) -> Comparison:
    negated = isinstance(node, exp.Not)
    inner = node.this if negated else node
    if isinstance(inner, exp.Is) and isinstance(inner.expression, exp.Null):
        return Comparison(scope.column(inner.this), "is not null" if negated else "is null")
    if negated or type(node) not in _OPS:
        raise NotSimple
    op, exchanged = _OPS[type(node)]
    left, right = node.this, node.expression
    if not isinstance(left, exp.Column):
        left, right, op = right, left, exchanged
    column = scope.column(left)
    kind = scope.types[column]
    value = pa.array([literal(right, kind)], arrow_type(kind))
    return Comparison(column, op, to_ipc(pa.table({column: value})))


def literal(node: Any, kind: str) -> Any:
    """The value of a literal that compares with a column of that type as its equal in it."""
    if isinstance(node, exp.Cast) and type(node) is exp.Cast and kind == "date":
        text = node.this
        if node.to.is_type("date") and isinstance(text, exp.Literal) and text.is_string:
            return datetime.date.fromisoformat(text.this)
    if isinstance(node, exp.Boolean) and kind == "boolean":
        return bool(node.this)
    if isinstance(node, exp.Literal) and node.is_string and kind == "string":
        return str(node.this)
    sign = 1
    if isinstance(node, exp.Neg):
        sign, node = -1, node.this
    if not isinstance(node, exp.Literal) or node.is_string or not str(node.this).isdigit():
        raise NotSimple
    number = sign * int(node.this)
    bits = _INTEGERS.get(kind)
    if bits is not None and -(1 << (bits - 1)) <= number < 1 << (bits - 1):
        return number
    if kind == "double" and abs(number) <= _WHOLE_DOUBLES_MAX:
        return float(number)
    raise NotSimple


def _finishing(tree: Any, scope: _Scope, named: Mapping[str, str]) -> Finishing | None:
    order, limit, offset = (tree.args.get(part) for part in ("order", "limit", "offset"))
    if order is None and limit is None and offset is None:
        return None
    by = []
    for each in () if order is None else order.expressions:
        column = scope.column(each.this)
        # A name in ORDER BY is the answer's column first: it must be the same one.
        for alias, own in named.items():
            if alias.lower() == each.this.name.lower() and own != column:
                raise NotSimple
        if not _ordered(scope.types[column]):
            raise NotSimple
        descending = bool(each.args.get("desc"))
        by.append(OrderBy(column, descending, bool(each.args.get("nulls_first"))))
    if len({each.column for each in by}) < len(by):
        raise NotSimple
    return Finishing(tuple(by), _count(limit), _count(offset) or 0)


def _ordered(kind: str) -> bool:
    found = arrow_type(kind)
    return not (pa.types.is_nested(found) or pa.types.is_null(found))


def _count(part: Any) -> int | None:
    if part is None:
        return None
    number = part.expression
    if not isinstance(number, exp.Literal) or number.is_string or not str(number.this).isdigit():
        raise NotSimple
    return int(number.this)
