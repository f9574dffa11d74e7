"""The oracle: computes a query's contents with SQLite, without code of the compiler or the delta
rules.

`QueryOracle` accumulates inputs as weighted rows. `contents` runs the view's own text on an
in-memory SQLite database in which each row is repeated by its weight. `differences` compares bags,
floats and decimals within a tolerance.

Rules: sqlglot generates the text for SQLite; our own functions replace those that SQLite lacks
(`oracle_functions`): ``/``, ``div``, ``%`` and CAST as in ANSI Spark, standard deviations and
variances, bool_and and bool_or, counts of several columns. Booleans are 0 and 1, decimals are
floats, dates and timestamps are ISO texts; the answer is cast back to the output's types. Out of
scope: nested types, NaN, other Spark functions that SQLite lacks, exact decimals beyond 15 digits,
overflow of 32-bit integers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias

import apsw
import msgspec
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from actors.model.plan.schema import TableSchema
from actors.runtime.errors import DefiniteError, QueryRejected
from actors.testing.aggregates import with_canonical_names
from actors.testing.expressions import cast_value, type_text
from actors.testing.oracle_functions import register, to_sqlite

Weighted: TypeAlias = Mapping[tuple[Any, ...], int]
"""Row → its multiplicity."""

RELATIVE_TOLERANCE: Final = 1e-9


class RowDifference(msgspec.Struct, frozen=True):
    """A row whose weights differ."""

    row: tuple[Any, ...]
    expected: int
    found: int


class QueryOracle:
    """Accumulates updates of named tables and answers queries at any time."""

    def __init__(self, tables: Mapping[str, TableSchema]) -> None:
        self._tables = dict(tables)
        self._updates: list[tuple[int, str, tuple[Any, ...], int]] = []
        """Updates so far: time, table, row and diff."""

    def add(self, time: int, table: str, row: tuple[Any, ...], diff: int) -> None:
        """Record one update."""
        self._updates.append((time, table, row, diff))

    def contents(self, sql: str, output: TableSchema, time: int) -> Counter[tuple[Any, ...]]:
        """Return the query's rows at a time. Raises `DefiniteError` and `QueryRejected`."""
        tables: dict[str, tuple[TableSchema, Counter[tuple[Any, ...]]]] = {
            name: (schema, Counter()) for name, schema in self._tables.items()
        }
        for at, table, row, diff in self._updates:
            if at <= time:
                tables[table][1][row] += diff
        return run_query(sql, tables, output)


def run_query(
    sql: str, tables: Mapping[str, tuple[TableSchema, Weighted]], output: TableSchema
) -> Counter[tuple[Any, ...]]:
    """Return the query's rows over given contents. Raises `DefiniteError` and `QueryRejected`."""
    return Counter(ordered_rows(sql, tables, output))


def ordered_rows(
    sql: str, tables: Mapping[str, tuple[TableSchema, Weighted]], output: TableSchema
) -> list[tuple[Any, ...]]:
    """Return the query's rows over given contents, including duplicates, in the query's order."""
    text = sqlite_text(sql)
    connection = apsw.Connection(":memory:")
    try:
        _prepare(connection, tables)
        rows = list(connection.execute(text))
    except DefiniteError:
        raise
    except apsw.SQLError as error:
        if "integer overflow" in str(error):
            raise DefiniteError("[ARITHMETIC_OVERFLOW] integer overflow") from None
        raise QueryRejected(f"the oracle cannot run {text!r}: {error}") from None
    finally:
        connection.close()
    kinds = [column.type for column in output.columns]
    return [
        tuple(_back(value, kind) for value, kind in zip(row, kinds, strict=True)) for row in rows
    ]


def sqlite_text(sql: str) -> str:
    """Return the query for SQLite. Raises `QueryRejected`."""
    try:
        tree = sqlglot.parse_one(sql, dialect="spark")
    except SqlglotError as error:
        raise QueryRejected(f"the oracle cannot read {sql!r}: {error}") from None
    for select in tree.find_all(exp.Select):
        _check_joins(select)
    for node in reversed(list(tree.walk())):  # children first: `transform` would skip them
        made = _rewrite(node)
        if made is not node:
            tree = made if node is tree else tree
            node.replace(made)
    return str(tree.sql(dialect="sqlite"))


def _check_joins(select: Any) -> None:
    """Check that no outer join follows a semi join, which becomes a WHERE. Raises
    `QueryRejected`."""
    seen = False
    for join in select.args.get("joins") or []:
        # A RIGHT or FULL JOIN makes additional rows, which the WHERE would drop.
        if seen and join.args.get("side") in ("RIGHT", "FULL"):
            raise QueryRejected("the oracle cannot run a RIGHT or FULL JOIN after a semi join")
        seen = seen or join.args.get("kind") in ("SEMI", "ANTI")


def _rewrite(node: Any) -> Any:
    node = with_canonical_names(node)
    if isinstance(node, exp.Div | exp.IntDiv | exp.Mod):
        name = {"div": "spark_divide", "intdiv": "spark_div", "mod": "spark_mod"}[node.key]
        return exp.Anonymous(this=name, expressions=[node.this, node.expression])
    if isinstance(node, exp.Add | exp.Sub) and _both_literal(node):
        # As floats, 0.06 + 0.01 is not 0.07.
        a, b = (Decimal(str(side.this)) for side in (node.this, node.expression))
        return exp.Literal.number(str(a + b if isinstance(node, exp.Add) else a - b))
    if isinstance(node, exp.Cast):
        kind = exp.Literal.string(type_text(node.args["to"]))
        name = "spark_try_cast" if node.args.get("safe") else "spark_cast"
        return exp.Anonymous(this=name, expressions=[node.this, kind])
    if isinstance(node, exp.CountIf):
        case = exp.Case(ifs=[exp.If(this=node.this, true=exp.Literal.number(1))])
        return exp.Count(this=case)
    if isinstance(node, exp.Count):
        return _count(node)
    if isinstance(node, exp.NullSafeEQ):
        return exp.Is(this=node.this, expression=node.expression)
    if isinstance(node, exp.Greatest | exp.Least):
        trees = [node.this, *node.expressions]
        return exp.Anonymous(this=f"spark_{node.key}", expressions=trees)
    if isinstance(node, exp.ArgMax | exp.ArgMin):
        name = "spark_max_by" if isinstance(node, exp.ArgMax) else "spark_min_by"
        return exp.Anonymous(this=name, expressions=[node.this, node.expression])
    if type(node) in _AGGREGATES:
        return exp.Anonymous(this=_AGGREGATES[type(node)], expressions=[node.this])
    return node


def _both_literal(node: Any) -> bool:
    sides = (node.this, node.expression)
    return all(isinstance(side, exp.Literal) and not side.is_string for side in sides)


def _count(node: Any) -> Any:
    """Return a count of several columns as one of our functions: SQLite counts only one column."""
    distinct = isinstance(node.this, exp.Distinct)
    trees = node.this.expressions if distinct else [node.this, *node.expressions]
    if len(trees) < 2:
        return node
    name = "spark_count_distinct" if distinct else "spark_count_all"
    return exp.Anonymous(this=name, expressions=list(trees))


_AGGREGATES: Final[dict[Any, str]] = {
    exp.Stddev: "spark_stddev_samp",
    exp.StddevSamp: "spark_stddev_samp",
    exp.StddevPop: "spark_stddev_pop",
    exp.Variance: "spark_var_samp",
    exp.VariancePop: "spark_var_pop",
    exp.LogicalAnd: "spark_bool_and",
    exp.LogicalOr: "spark_bool_or",
}


def _prepare(
    connection: apsw.Connection, tables: Mapping[str, tuple[TableSchema, Weighted]]
) -> None:
    register(connection)
    connection.execute("PRAGMA case_sensitive_like = ON")
    for name, (schema, rows) in tables.items():
        columns = ", ".join(f'"{column}"' for column in schema.names)
        connection.execute(f'CREATE TABLE "{name}" ({columns})')
        marks = ", ".join("?" * len(schema.names))
        repeated = [
            tuple(map(to_sqlite, row))
            for row, weight in rows.items()
            for _ in range(max(weight, 0))
        ]
        connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', repeated)


def _back(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind.startswith("decimal") and isinstance(value, float):
        # A double keeps 15 digits.
        return cast_value(Decimal(f"{value:.15g}"), kind)
    return cast_value(value, kind)


def differences(
    expected: Weighted, found: Weighted, *, exact_decimals: bool = False
) -> list[RowDifference]:
    """Return the rows whose weights differ, comparing floats within a tolerance.

    Decimals, too, are compared within it (SQLite computes them as floats), unless `exact_decimals`.
    """
    wrong: list[RowDifference] = []
    inexact = float if exact_decimals else (float, Decimal)
    left = _exact_groups(expected, inexact)
    right = _exact_groups(found, inexact)
    for key in sorted(left.keys() | right.keys(), key=repr):
        wrong += _compare(left.get(key, []), right.get(key, []))
    return wrong


def _exact_groups(
    rows: Weighted, inexact: Any
) -> dict[tuple[Any, ...], list[tuple[tuple[Any, ...], int]]]:
    """Return rows grouped by those of their values that compare exactly."""
    groups: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], int]]] = {}
    for row, weight in rows.items():
        if weight:
            key = tuple(None if isinstance(v, inexact) else (v,) for v in row)
            groups.setdefault(key, []).append((row, weight))
    return groups


def _compare(
    expected: list[tuple[tuple[Any, ...], int]], found: list[tuple[tuple[Any, ...], int]]
) -> list[RowDifference]:
    """Match rows that agree in their exact values, within the tolerance. Return the others."""
    rest = [row for row, _ in found]
    weights = [weight for _, weight in found]
    wrong = []
    for row, weight in expected:
        missing = weight
        for index, other in enumerate(rest):
            if weights[index] and missing and _close(row, other):
                taken = min(missing, weights[index]) if missing > 0 else missing
                missing -= taken
                weights[index] -= taken
        if missing:
            wrong.append(RowDifference(row, weight, weight - missing))
    pairs = zip(rest, weights, strict=True)
    wrong += [RowDifference(row, 0, weight) for row, weight in pairs if weight]
    return wrong


def _close(left: Iterable[Any], right: Iterable[Any]) -> bool:
    return all(close_values(a, b) for a, b in zip(left, right, strict=True))


def close_values(a: Any, b: Any) -> bool:
    """Return whether two values are equal, floats (and decimals) within the tolerance."""
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close_values(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and _close(a, b)
    if isinstance(a, Decimal) and isinstance(b, Decimal):
        last_place = Decimal(1).scaleb(int(a.as_tuple().exponent))
        return abs(a - b) <= max(last_place, abs(a) * Decimal(str(RELATIVE_TOLERANCE)))
    return bool(a == b)
