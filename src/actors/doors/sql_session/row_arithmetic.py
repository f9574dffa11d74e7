"""Computes an assignment's arithmetic over rows that are here, where Spark surely says the same.

``UPDATE accounts SET balance = balance - 5 WHERE id = 1`` reads one row by its key; a Spark job for
one subtraction would take a hundred times as long. Integers and decimals are computed exactly, by
Arrow: sums, differences and, of integers, products; doubles as IEEE 754 has it, which Java keeps,
too. Whatever else is written, and every value that does not fit the type that Spark gives it, is
left to Spark, which says so in its own words. Pure.

The types of results are those of Spark's ANSI mode (`DecimalType`, "Decimal type coercion").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from actors.doors.sql_session.row_values import NotLocal
from actors.engine.sql.tokens import SqlToken, lex_sql
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.model.protocol.relations import fold
from actors.runtime.errors import SqlSyntaxError

DIGITS_MAX: Final = 38
"""Digits of the widest decimal."""
_ANY_INTEGER: Final = pa.decimal128(20, 0)
"""Type that holds every integer, as Spark has it for a bigint."""
_INTEGERS: Final[Mapping[str, pa.DataType]] = {"Y": pa.int8(), "S": pa.int16(), "L": pa.int64()}
"""Types of integer literals, by their suffixes."""
_KEYWORDS: Final = frozenset({"NULL", "TRUE", "FALSE", "DEFAULT"})


def computed_array(
    text: str, rows: pa.Table, schema: TableSchema, qualifier: str, column: TableColumn
) -> pa.ChunkedArray:
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
        # Without a tree: each value is computed as soon as its operands are read.
        found = reader.sum()
        if not reader.at_end():
            raise NotLocal
        return _fitted(found, arrow_type(column.type), rows.num_rows)
    except (SqlSyntaxError, pa.ArrowException):
        raise NotLocal from None


class _ArithmeticReader:
    """Reads an expression and computes it on the way: columns as arrays, literals as scalars."""

    def __init__(
        self, tokens: Sequence[SqlToken], rows: pa.Table, schema: TableSchema, qualifier: str
    ) -> None:
        self._tokens = tokens
        self._at = 0
        self._rows = rows
        self._names = {fold(name): name for name in schema.names}
        self._qualifier = fold(qualifier)

    def at_end(self) -> bool:
        """Return whether all was read."""
        return self._at == len(self._tokens)

    def sum(self) -> Any:
        """Read sums and differences."""
        found = self._product()
        while (sign := self._takes("+", "-")) is not None:
            other = self._product()
            if pa.types.is_float64(found.type) or pa.types.is_float64(other.type):
                found = _double(pc.add if sign == "+" else pc.subtract, found, other)
            elif pa.types.is_integer(found.type) and pa.types.is_integer(other.type):
                found = _whole(pc.add_checked if sign == "+" else pc.subtract_checked, found, other)
            else:
                found = _decimal(pc.add if sign == "+" else pc.subtract, found, other)
        return found

    def _product(self) -> Any:
        found = self._operand()
        while self._takes("*") is not None:
            other = self._operand()
            if pa.types.is_float64(found.type) or pa.types.is_float64(other.type):
                found = _double(pc.multiply, found, other)
                continue
            # A product of decimals has places to round.
            if not (pa.types.is_integer(found.type) and pa.types.is_integer(other.type)):
                raise NotLocal
            found = _whole(pc.multiply_checked, found, other)
        return found

    def _operand(self) -> Any:
        if self._takes("(") is not None:
            found = self.sum()
            if self._takes(")") is None:
                raise NotLocal
            return found
        negative = self._takes("-") is not None
        token = self._next()
        if token.kind == "number":
            return _literal(token.text.upper(), negative=negative)
        if negative or token.kind not in ("word", "name") or token.word in _KEYWORDS:
            raise NotLocal
        if self._takes(".") is None:
            return self._column(token)
        if fold(_bare(token)) != self._qualifier:
            raise NotLocal
        return self._column(self._next())

    def _column(self, token: SqlToken) -> pa.ChunkedArray:
        name = self._names.get(fold(_bare(token))) if token.kind in ("word", "name") else None
        if name is None:
            raise NotLocal
        values = self._rows[name]
        kind = values.type
        if not (
            pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_float64(kind)
        ):
            raise NotLocal
        return values

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


def _literal(text: str, *, negative: bool) -> pa.Scalar:
    sign = -1 if negative else 1
    if text.isdigit() or (text[:-1].isdigit() and text[-1] in _INTEGERS):
        number = int(text.rstrip("YSL"))
        # At the edge of a type Spark looks at the sign, too.
        if number in (1 << 7, 1 << 15, 1 << 31):
            raise NotLocal
        # A bare number is an int, or a bigint where it must be.
        bare = pa.int32() if number < 1 << 31 else pa.int64()
        if number >= 1 << 63:
            raise NotLocal
        return pa.scalar(sign * number, _INTEGERS.get(text[-1], bare))
    digits = text.removesuffix("BD")
    whole, _, places = digits.partition(".")
    count = len(whole + places)
    if not (whole + places).isdigit() or count > DIGITS_MAX:
        raise NotLocal  # exponents, and floating numbers
    # A product of Python's would round to 28 digits.
    exact = Decimal(f"-{digits}" if negative else digits)
    return pa.scalar(exact, pa.decimal128(count, len(places)))


def _whole(apply: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply an operation to integers, in the wider type. Raises `ArrowInvalid` where it
    overflows."""
    wider = max(left.type, right.type, key=lambda kind: kind.bit_width)
    return apply(left.cast(wider), right.cast(wider))


def _decimal(apply: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply a sum or a difference to decimals: Arrow's type of it is Spark's. Raises
    `NotLocal` for one of more digits than any decimal has."""
    # An integer counts as the widest one: that changes no value.
    sides = [
        side.cast(_ANY_INTEGER) if pa.types.is_integer(side.type) else side
        for side in (left, right)
    ]
    scale = max(side.type.scale for side in sides)
    digits = max(side.type.precision - side.type.scale for side in sides) + scale + 1
    if digits > DIGITS_MAX:
        raise NotLocal
    return apply(*sides)


def _double(apply: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply an operation to doubles. Raises `NotLocal` and `ArrowInvalid` for an operand that may
    not be the same number as a double."""
    return apply(_as_double(left), _as_double(right))


def _as_double(side: Any) -> Any:
    if not pa.types.is_decimal(side.type):
        return side.cast(pa.float64())
    # Python and Java both take the nearest double; Arrow multiplies, which may miss it.
    if not isinstance(side, pa.Scalar):
        raise NotLocal
    return pa.scalar(float(side.as_py()))


def _fitted(found: Any, kind: pa.DataType, count: int) -> pa.ChunkedArray:
    """Return values in a column's type. Raises `NotLocal` where Spark's cast might round, and
    `ArrowInvalid` for a value that does not fit."""
    if pa.types.is_float64(kind):
        if not pa.types.is_float64(found.type):
            raise NotLocal
    elif pa.types.is_decimal(kind):
        if pa.types.is_float64(found.type):
            raise NotLocal
        if pa.types.is_integer(found.type):
            found = found.cast(_ANY_INTEGER)
        if found.type.scale > kind.scale:
            raise NotLocal
    elif not (pa.types.is_integer(kind) and pa.types.is_integer(found.type)):
        raise NotLocal
    values = found.cast(kind)
    if isinstance(values, pa.Scalar):
        return pa.chunked_array([pa.repeat(values, count)])
    return values


def _bare(token: SqlToken) -> str:
    return token.text[1:-1].replace("``", "`") if token.kind == "name" else token.text
