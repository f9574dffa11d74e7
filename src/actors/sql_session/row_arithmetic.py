"""Computes an assignment's arithmetic over rows that are here, where Spark surely says the same.

``UPDATE accounts SET balance = balance - 5 WHERE id = 1`` reads one row by its key; a Spark job for
one subtraction would take a hundred times as long. Integers and decimals are computed exactly:
sums, differences and, of integers, products. Whatever else is written, and every value that does
not fit the type that Spark gives it, is left to Spark, which says so in its own words. Pure.

The types of results are those of Spark's ANSI mode (`DecimalType`, "Decimal type coercion").
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, localcontext
from typing import Any, Final

import msgspec
import pyarrow as pa

from actors.errors import SqlSyntaxError
from actors.plan.schema import TableColumn, TableSchema, arrow_type
from actors.protocol.relations import fold
from actors.sql.tokens import SqlToken, lex_sql
from actors.sql_session.row_values import NotLocal

DIGITS_MAX: Final = 38
"""Digits of the widest decimal."""
_WHOLE_DIGITS: Final = 20
"""Digits of a decimal that holds every integer."""
_BITS: Final[Mapping[str, int]] = {"Y": 8, "S": 16, "L": 64}
"""Bits of an integer literal, by its suffix."""
_KEYWORDS: Final = frozenset({"NULL", "TRUE", "FALSE", "DEFAULT"})


class TypedValues(msgspec.Struct, frozen=True):
    """The values of an expression, one for each row, None for NULL; `bits` of its integer type, or
    0 and the digits and scale of its decimal type."""

    values: Sequence[Any]
    bits: int = 0
    digits: int = _WHOLE_DIGITS
    scale: int = 0


def computed_array(
    text: str, rows: pa.Table, schema: TableSchema, qualifier: str, column: TableColumn
) -> pa.Array:
    """Return what an expression of Spark's dialect gives a column in each of the rows.

    Args:
        text: The expression.
        rows: Rows of the table, with all its columns.
        schema: The table's columns.
        qualifier: The name by which the expression may call the table.
        column: The column that the values are for.

    Raises:
        NotLocal: Spark must compute it.

    >>> schema = TableSchema((TableColumn("a", "int"), TableColumn("b", "decimal(6,2)")))
    >>> rows = pa.table({"a": [1, None], "b": [Decimal("1.50"), Decimal("2.50")]}, schema.arrow())
    >>> computed_array("t.a * 3 - 1", rows, schema, "t", schema.columns[0]).to_pylist()
    [2, None]
    >>> computed_array("b + a", rows, schema, "t", schema.columns[1]).to_pylist()
    [Decimal('2.50'), None]
    """
    try:
        reader = _ArithmeticReader(lex_sql(text), rows, schema, qualifier)
    except SqlSyntaxError:
        raise NotLocal from None
    # Without a tree: each value is computed as soon as its operands are read.
    found = reader.sum()
    if not reader.at_end():
        raise NotLocal
    kind = arrow_type(column.type)
    if pa.types.is_decimal(kind):
        # More places would be rounded.
        if found.scale > kind.scale:
            raise NotLocal
        values = [None if value is None else Decimal(value) for value in found.values]
    elif pa.types.is_integer(kind) and found.bits:
        values = list(found.values)
    else:
        raise NotLocal
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError):
        raise NotLocal from None


class _ArithmeticReader:
    """Reads an expression and computes it on the way."""

    def __init__(
        self, tokens: Sequence[SqlToken], rows: pa.Table, schema: TableSchema, qualifier: str
    ) -> None:
        self._tokens = tokens
        self._at = 0
        self._rows = rows
        self._types = {fold(column.name): column for column in schema.columns}
        self._qualifier = fold(qualifier)

    def at_end(self) -> bool:
        """Return whether all was read."""
        return self._at == len(self._tokens)

    def sum(self) -> TypedValues:
        """Read sums and differences."""
        found = self._product()
        while (sign := self._takes("+", "-")) is not None:
            found = _added(found, self._product(), operator.add if sign == "+" else operator.sub)
        return found

    def _product(self) -> TypedValues:
        found = self._operand()
        while self._takes("*") is not None:
            other = self._operand()
            # A product of decimals has places to round.
            if not (found.bits and other.bits):
                raise NotLocal
            found = _whole(found, other, operator.mul)
        return found

    def _operand(self) -> TypedValues:
        if self._takes("(") is not None:
            found = self.sum()
            if self._takes(")") is None:
                raise NotLocal
            return found
        negative = self._takes("-") is not None
        token = self._next()
        if token.kind == "number":
            return self._literal(token.text.upper(), negative=negative)
        if negative or token.kind not in ("word", "name") or token.word in _KEYWORDS:
            raise NotLocal
        if self._takes(".") is None:
            return self._column(token)
        if fold(_bare(token)) != self._qualifier:
            raise NotLocal
        return self._column(self._next())

    def _column(self, token: SqlToken) -> TypedValues:
        column = self._types.get(fold(_bare(token))) if token.kind in ("word", "name") else None
        if column is None:
            raise NotLocal
        kind, values = arrow_type(column.type), self._rows[column.name].to_pylist()
        if pa.types.is_integer(kind):
            return TypedValues(values, kind.bit_width)
        if pa.types.is_decimal(kind):
            return TypedValues(values, 0, kind.precision, kind.scale)
        raise NotLocal

    def _literal(self, text: str, *, negative: bool) -> TypedValues:
        sign = -1 if negative else 1
        if text.isdigit() or (text[:-1].isdigit() and text[-1] in _BITS):
            number = int(text.rstrip("YSL"))
            # A bare number is an int, or a bigint where it must be. At the edge Spark looks at the
            # sign, too.
            if number in (1 << 7, 1 << 15, 1 << 31, 1 << 63):
                raise NotLocal
            bits = _BITS.get(text[-1]) or (32 if number < 1 << 31 else 64)
            return TypedValues(_checked([sign * number], bits) * self._rows.num_rows, bits)
        digits = text.removesuffix("BD")
        whole, _, places = digits.partition(".")
        if not (whole + places).isdigit() or len(whole + places) > DIGITS_MAX:
            raise NotLocal  # exponents, and floating numbers
        value = sign * Decimal(digits)
        return TypedValues([value] * self._rows.num_rows, 0, len(whole + places), len(places))

    def _takes(self, *signs: str) -> str | None:
        if not self.at_end() and self._tokens[self._at].word in signs:
            self._at += 1
            return self._tokens[self._at - 1].word
        return None

    def _next(self) -> SqlToken:
        if self.at_end():
            raise NotLocal
        self._at += 1
        return self._tokens[self._at - 1]


def _added(left: TypedValues, right: TypedValues, apply: Callable[[Any, Any], Any]) -> TypedValues:
    if left.bits and right.bits:
        return _whole(left, right, apply)
    # Integers have no places, and count as the widest: that changes no value.
    scale = max(left.scale, right.scale)
    digits = max(left.digits - left.scale, right.digits - right.scale) + scale + 1
    if digits > DIGITS_MAX:
        raise NotLocal
    with localcontext(prec=2 * DIGITS_MAX):
        return TypedValues(_applied(left, right, apply), 0, digits, scale)


def _whole(left: TypedValues, right: TypedValues, apply: Callable[[Any, Any], Any]) -> TypedValues:
    bits = max(left.bits, right.bits)
    return TypedValues(_checked(_applied(left, right, apply), bits), bits)


def _applied(left: TypedValues, right: TypedValues, apply: Callable[[Any, Any], Any]) -> list[Any]:
    pairs = zip(left.values, right.values, strict=True)
    return [None if a is None or b is None else apply(a, b) for a, b in pairs]


def _checked(values: list[Any], bits: int) -> list[Any]:
    """Return integers that fit so many bits. Raises `NotLocal` for others: Spark says what
    overflows."""
    limit = 1 << (bits - 1)
    if any(value is not None and not -limit <= value < limit for value in values):
        raise NotLocal
    return values


def _bare(token: SqlToken) -> str:
    return token.text[1:-1].replace("``", "`") if token.kind == "name" else token.text
