"""The oracle: a query's contents by SQLite, sharing no code with compiler or delta rules.

What: `Oracle` accumulates inputs as weighted rows; `contents` runs the view's own text on an
in-memory SQLite database in which each row is repeated by its weight; `differences` compares
bags, floats and decimals to a tolerance.

Rules: the text is generated for SQLite by sqlglot, with ``/``, ``div``, ``%`` and CAST as
functions that behave as ANSI Spark's (division by zero and malformed input raise
`DefiniteError`). Booleans are 0 and 1, decimals are floats, dates and timestamps ISO text; the
answer is brought back to the output's types. What it does not do: nested types, Spark functions
that SQLite lacks, exact decimals beyond 15 digits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, TypeAlias

import apsw
import msgspec
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from actors.errors import DefiniteError, QueryRejected
from actors.plan.schema import Schema
from actors.testing.expressions import cast_value, type_text

Weighted: TypeAlias = Mapping[tuple[Any, ...], int]
"""Row → how often it is there."""

RELATIVE_TOLERANCE: Final = 1e-9


class Difference(msgspec.Struct, frozen=True):
    """A row whose weights differ."""

    row: tuple[Any, ...]
    expected: int
    found: int


class Oracle:
    """Accumulates updates of named tables and answers queries at any time."""

    def __init__(self, tables: Mapping[str, Schema]) -> None:
        self._tables = dict(tables)
        self._updates: list[tuple[int, str, tuple[Any, ...], int]] = []

    def add(self, time: int, table: str, row: tuple[Any, ...], diff: int) -> None:
        """Notes one update."""
        self._updates.append((time, table, row, diff))

    def contents(self, sql: str, output: Schema, time: int) -> Counter[tuple[Any, ...]]:
        """The query's rows at a time. Raises `DefiniteError` and `QueryRejected`."""
        tables: dict[str, tuple[Schema, Counter[tuple[Any, ...]]]] = {
            name: (schema, Counter()) for name, schema in self._tables.items()
        }
        for at, table, row, diff in self._updates:
            if at <= time:
                tables[table][1][row] += diff
        return run_query(sql, tables, output)


def run_query(
    sql: str, tables: Mapping[str, tuple[Schema, Weighted]], output: Schema
) -> Counter[tuple[Any, ...]]:
    """The query's rows over given contents. Raises `DefiniteError` and `QueryRejected`."""
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
    return Counter(
        tuple(_back(value, kind) for value, kind in zip(row, kinds, strict=True)) for row in rows
    )


def sqlite_text(sql: str) -> str:
    """The query for SQLite. Raises `QueryRejected`."""
    try:
        tree = sqlglot.parse_one(sql, dialect="spark")
    except SqlglotError as error:
        raise QueryRejected(f"the oracle cannot read {sql!r}: {error}") from None
    return str(tree.transform(_rewrite).sql(dialect="sqlite"))


def _rewrite(node: Any) -> Any:
    if isinstance(node, exp.Div | exp.IntDiv | exp.Mod):
        name = {"div": "spark_divide", "intdiv": "spark_div", "mod": "spark_mod"}[node.key]
        return exp.Anonymous(this=name, expressions=[node.this, node.expression])
    if isinstance(node, exp.Cast):
        kind = exp.Literal.string(type_text(node.args["to"]))
        name = "spark_try_cast" if node.args.get("safe") else "spark_cast"
        return exp.Anonymous(this=name, expressions=[node.this, kind])
    if isinstance(node, exp.CountIf):
        case = exp.Case(ifs=[exp.If(this=node.this, true=exp.Literal.number(1))])
        return exp.Count(this=case)
    if isinstance(node, exp.NullSafeEQ):
        return exp.Is(this=node.this, expression=node.expression)
    return node


def _prepare(connection: apsw.Connection, tables: Mapping[str, tuple[Schema, Weighted]]) -> None:
    for name, (count, function) in _FUNCTIONS.items():
        connection.create_scalar_function(name, function, count, deterministic=True)
    connection.execute("PRAGMA case_sensitive_like = ON")
    for name, (schema, rows) in tables.items():
        columns = ", ".join(f'"{column}"' for column in schema.names)
        connection.execute(f'CREATE TABLE "{name}" ({columns})')
        marks = ", ".join("?" * len(schema.names))
        repeated = [
            tuple(map(_into, row)) for row, weight in rows.items() for _ in range(max(weight, 0))
        ]
        connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', repeated)


def _into(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(sep=" ")
    return value.isoformat() if isinstance(value, date) else value


def _back(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind.startswith("decimal") and isinstance(value, float):
        # 15 digits are what a double keeps.
        return cast_value(Decimal(f"{value:.15g}"), kind)
    return cast_value(value, kind)


def _null_or(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        return None if any(value is None for value in values) else function(*values)

    return call


def _nonzero(divisor: Any) -> Any:
    if divisor == 0:
        raise DefiniteError("[DIVIDE_BY_ZERO] Division by zero: use try_divide")
    return divisor


def _div(a: Any, b: Any) -> int:
    return math.trunc(Decimal(str(a)) / Decimal(str(_nonzero(b))))


def _mod(a: Any, b: Any) -> Any:
    return math.fmod(a, _nonzero(b)) if isinstance(a, float) else int(math.fmod(a, _nonzero(b)))


def _cast(value: Any, kind: str) -> Any:
    return None if value is None else _into(cast_value(value, kind))


def _try_cast(value: Any, kind: str) -> Any:
    try:
        return _cast(value, kind)
    except DefiniteError:
        return None


_FUNCTIONS: Final[dict[str, tuple[int, Callable[..., Any]]]] = {
    "spark_divide": (2, _null_or(lambda a, b: a / _nonzero(b))),
    "spark_div": (2, _null_or(_div)),
    "spark_mod": (2, _null_or(_mod)),
    "spark_cast": (2, _cast),
    "spark_try_cast": (2, _try_cast),
    "year": (1, _null_or(lambda text: int(str(text)[:4]))),
    "month": (1, _null_or(lambda text: int(str(text)[5:7]))),
    "day": (1, _null_or(lambda text: int(str(text)[8:10]))),
    "hour": (1, _null_or(lambda text: int(str(text)[11:13]))),
}


def differences(
    expected: Weighted, found: Weighted, *, exact_decimals: bool = False
) -> list[Difference]:
    """Rows whose weights differ, floats compared to a tolerance.

    Decimals too (SQLite computes them as floats), unless `exact_decimals`.
    """
    wrong: list[Difference] = []
    inexact = float if exact_decimals else (float, Decimal)
    left = _exact_groups(expected, inexact)
    right = _exact_groups(found, inexact)
    for key in sorted(left.keys() | right.keys(), key=repr):
        wrong += _compare(left.get(key, []), right.get(key, []))
    return wrong


def _exact_groups(
    rows: Weighted, inexact: Any
) -> dict[tuple[Any, ...], list[tuple[tuple[Any, ...], int]]]:
    """Rows by their values that compare exactly."""
    groups: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], int]]] = {}
    for row, weight in rows.items():
        if weight:
            key = tuple(None if isinstance(v, inexact) else (v,) for v in row)
            groups.setdefault(key, []).append((row, weight))
    return groups


def _compare(
    expected: list[tuple[tuple[Any, ...], int]], found: list[tuple[tuple[Any, ...], int]]
) -> list[Difference]:
    """Rows that agree in their exact values, matched within the tolerance."""
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
            wrong.append(Difference(row, weight, weight - missing))
    pairs = zip(rest, weights, strict=True)
    wrong += [Difference(row, 0, weight) for row, weight in pairs if weight]
    return wrong


def _close(left: Iterable[Any], right: Iterable[Any]) -> bool:
    return all(_close_values(a, b) for a, b in zip(left, right, strict=True))


def _close_values(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12)
    if isinstance(a, Decimal) and isinstance(b, Decimal):
        last_place = Decimal(1).scaleb(int(a.as_tuple().exponent))
        return abs(a - b) <= max(last_place, abs(a) * Decimal(str(RELATIVE_TOLERANCE)))
    return bool(a == b)
