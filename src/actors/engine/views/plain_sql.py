"""Parses plain conditions: tests of columns joined by AND.

Spark parses views and queries. This module is for two uses that do without it: answering a plain
read of one object (`plain_read`), and deriving from a condition in a view's plan which parts of an
input need not be fetched (`input_uses`). A text that Spark might read differently raises
`NotPlain`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from actors.engine.sql.expressions import ExpressionNode, UnknownExpression, read_expression
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.tokens import SqlDialect, lex_sql, lex_text
from actors.runtime.errors import QueryRejected, SqlSyntaxError

Op: TypeAlias = Literal["=", "<>", "<", "<=", ">", ">=", "is null", "is not null", "in"]

_PLAIN_TEXT: Final = re.compile(r"'[^'\\]*'|\"[^\"\\]*\"")
_WHOLE: Final = re.compile(r"(\d+)[LSY]?", re.IGNORECASE)
_DECIMAL: Final = re.compile(r"(\d+(?:\.\d+)?)(BD)?", re.IGNORECASE)
_DOUBLE: Final = re.compile(r"(\d+(?:\.\d+)?(?:E[+-]?\d+)?)(D)?", re.IGNORECASE)
_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_INTEGER_BITS: Final[Mapping[str, int]] = {
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
_OPS: Final[Mapping[str, Op]] = {
    **{"=": "=", "<>": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="},
    **{"IS NULL": "is null", "IS NOT NULL": "is not null", "IN": "in", "BETWEEN": ">="},
}
"""Tests of a column, by the kinds of their nodes."""
_EXCHANGED: Final[Mapping[str, Op]] = {
    **{"=": "=", "<>": "<>", "<": ">", "<=": ">=", ">": "<", ">=": "<="},
}
"""Each comparison with its sides swapped."""
_NEGATED: Final[Mapping[str, Op]] = {"is null": "is not null", "is not null": "is null"}


class NotPlain(Exception):
    """The text is not plain: only Spark can read it."""


class LiteralValue(NamedTuple):
    """A literal as written: `kind` is number, text, boolean or date."""

    kind: str
    text: str


class ColumnTest(NamedTuple):
    """A column (its qualifier, or "", and its name) compared with literals."""

    column: tuple[str, str]
    op: Op
    values: tuple[LiteralValue, ...] = ()


def query_text(sql: str) -> str:
    """Return a query up to its last word, without the semicolons and comments after it.

    Raises `QueryRejected` for several statements.

    >>> query_text("SELECT ';' AS a -- the first\\n; -- and no more")
    "SELECT ';' AS a"
    >>> query_text("SELECT 1; SELECT 2")
    Traceback (most recent call last):
    actors.runtime.errors.QueryRejected: expected a single query: line 1 has another statement\
 after a semicolon
    """
    # Do not split a long text in search of what it cannot contain.
    if not any(sign in sql for sign in (";", "--", "/*")):
        return sql.strip()
    try:
        found = lex_sql(sql)
    # Left to Spark, which reports the error.
    except SqlSyntaxError:
        return sql.strip().rstrip(";").strip()
    end = next((each.end for each in reversed(found) if each.text != ";"), 0)
    inner = [each.end for each in found if each.text == ";" and each.end < end]
    if inner:
        line = sql.count("\n", 0, inner[0]) + 1
        raise QueryRejected(
            f"expected a single query: line {line} has another statement after a semicolon"
        )
    return sql[:end].strip()


def plain_reader(sql: str) -> StatementReader:
    """Return a reader of a text in Spark's dialect. Raises `NotPlain` for an unclosed quote or
    bracket, and for a hint."""
    try:
        lexed = lex_text(sql, SqlDialect.SPARK)
    except SqlSyntaxError as error:
        raise NotPlain(error.problem) from None
    if any(each.kind == "hint" for each in lexed.tokens):
        raise NotPlain("a hint")
    return StatementReader(lexed)


def read_conditions(reader: StatementReader) -> list[ColumnTest]:
    """Read tests joined by AND, with or without brackets around them. Raises `NotPlain`."""
    try:
        return _tests(read_expression(reader))
    except UnknownExpression as error:
        raise NotPlain(str(error)) from None


def _tests(node: ExpressionNode) -> list[ColumnTest]:
    kind, operands = node.kind, node.operands
    if kind == "AND":
        return [test for operand in operands for test in _tests(operand)]
    if kind == "NOT":
        (test, *more) = _tests(operands[0])
        if more or test.op not in _NEGATED:
            raise NotPlain("NOT before something other than a test for NULL")
        return [ColumnTest(test.column, _NEGATED[test.op])]
    if kind in _EXCHANGED and operands[0].kind != "column":
        return [ColumnTest(_column(operands[1]), _EXCHANGED[kind], (_literal(operands[0]),))]
    if kind not in _OPS:
        raise NotPlain("not a test of a column")
    column, values = _column(operands[0]), tuple(map(_literal, operands[1:]))
    if kind == "BETWEEN":
        return [ColumnTest(column, ">=", values[:1]), ColumnTest(column, "<=", values[1:])]
    return [ColumnTest(column, _OPS[kind], values)]


def _column(node: ExpressionNode) -> tuple[str, str]:
    if node.kind != "column":
        raise NotPlain("no column")
    return qualified(node.names)


def qualified(names: tuple[str, ...]) -> tuple[str, str]:
    """Return the qualifier of a name ("" if it has none) and the name."""
    return ("", names[0]) if len(names) == 1 else (names[0], names[1])


def _literal(node: ExpressionNode) -> LiteralValue:
    match node.kind:
        case "number":
            return LiteralValue("number", node.text)
        case "boolean":
            return LiteralValue("boolean", node.text.lower())
        # Settings decide how backslashes and doubled quotes are read.
        case "text" if _PLAIN_TEXT.fullmatch(node.text):
            return LiteralValue("text", node.text[1:-1])
        case "cast":
            return _cast(_literal(node.operands[0]), node.text)
        case "-" if len(node.operands) == 1:
            value = _literal(node.operands[0])
            if value.kind == "number" and not value.text.startswith("-"):
                return LiteralValue("number", "-" + value.text)
    raise NotPlain("no literal")


def _cast(value: LiteralValue, wanted: str) -> LiteralValue:
    """Return a literal that is cast to another kind without loss. Raises `NotPlain` for any other
    cast."""
    if wanted == "date" and value.kind == "text" and _DAY.fullmatch(value.text):
        return LiteralValue("date", value.text)
    whole = value.kind == "number" and _WHOLE.fullmatch(value.text.removeprefix("-"))
    if whole and wanted in ("bigint", "double"):  # `value_of` checks that it fits the column.
        return value
    raise NotPlain(f"a cast to {wanted}")


def value_of(value: LiteralValue, kind: str) -> Any:
    """Return the value of a literal in the type of a column, such that comparisons with it have
    Spark's results.

    Raises `NotPlain`, and `ValueError` for a date that does not exist.
    """
    if value.kind == "number":
        return _number(value.text, kind)
    if value.kind == "text" and kind == "string":
        return value.text
    if value.kind == "boolean" and kind == "boolean":
        return value.text == "true"
    if value.kind == "date" and kind == "date":
        return datetime.date.fromisoformat(value.text)
    raise NotPlain(f"a {value.kind} compared with a column of type {kind}")


def _number(text: str, kind: str) -> Any:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    if (whole := _WHOLE.fullmatch(digits)) is not None:
        number = sign * int(whole[1])
        bits = _INTEGER_BITS.get(kind)
        # Within the range of the column, Spark's comparison has no cast that could lose anything.
        if bits is not None and -(1 << (bits - 1)) <= number < 1 << (bits - 1):
            return number
        # Beyond 2^53, doubles round integers.
        if kind == "double" and abs(number) <= _WHOLE_DOUBLES_MAX:
            return float(number)
    if kind.startswith("decimal") and (exact := _DECIMAL.fullmatch(digits)) is not None:
        # Python's multiplication would round to 28 digits.
        return Decimal(exact[1]).copy_sign(sign)
    is_double = (found := _DOUBLE.fullmatch(digits)) and (found[2] or "." in digits)
    if kind == "double" and found is not None and is_double:
        return sign * float(found[1])
    raise NotPlain(f"the number {text} compared with a column of type {kind}")
