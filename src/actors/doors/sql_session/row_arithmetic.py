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

from actors.doors.sql_session.row_values import NotLocal, SqlParameter
from actors.engine.sql.expressions import (
    ExpressionNode,
    UnknownExpression,
    read_whole_expression,
)
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.statements import TextSpan
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.model.protocol.relations import fold

DIGITS_MAX: Final = 38
"""Digits of the widest decimal."""
_ANY_INTEGER: Final = pa.decimal128(20, 0)
"""Type that holds every integer, as Spark has it for a bigint."""
_INTEGERS: Final[Mapping[str, pa.DataType]] = {"Y": pa.int8(), "S": pa.int16(), "L": pa.int64()}
"""Types of integer literals, by their suffixes."""


def computed_array(
    node: ExpressionNode, rows: pa.Table, schema: TableSchema, qualifier: str, column: TableColumn
) -> pa.ChunkedArray:
    """Return what an expression gives a column in each of the rows.

    Args:
        node: The expression.
        rows: Rows of the table, with all its columns.
        schema: The table's columns.
        qualifier: The name by which the expression may call the table.
        column: The column that the values are for.

    Raises:
        NotLocal: Spark must compute it.

    >>> from actors.engine.sql.statements import generated_span
    >>> from actors.engine.sql.tokens import SqlDialect
    >>> schema = TableSchema((TableColumn("a", "int"), TableColumn("b", "decimal(6,2)")))
    >>> rows = pa.table({"a": [1, None], "b": [Decimal("1.50"), Decimal("2.50")]}, schema.arrow())
    >>> def computed(text, column):
    ...     node = arithmetic_of(generated_span(SqlDialect.SPARK, text), ())
    ...     return computed_array(node, rows, schema, "t", schema.columns[column]).to_pylist()
    >>> computed("t.a * 3 - 1", 0), computed("b + a", 1)
    ([2, None], [Decimal('2.50'), None])
    """
    # Unquoted, the word is no column.
    names = {fold(name): name for name in schema.names if fold(name) != "default"}
    columns: dict[tuple[str, ...], pa.ChunkedArray] = {}
    for folded, name in names.items():
        columns[(folded,)] = columns[(fold(qualifier), folded)] = rows[name]
    try:
        return _fitted(_computed(node, columns), arrow_type(column.type), rows.num_rows)
    except pa.ArrowException:
        raise NotLocal from None


def arithmetic_of(span: TextSpan, parameters: Sequence[SqlParameter]) -> ExpressionNode:
    """Return an expression of the statement as a tree. Raises `NotLocal` for one that is not
    plain."""
    try:
        literals = [each.text for each in parameters]
        return read_whole_expression(StatementReader.of(span), literals)
    except UnknownExpression:
        raise NotLocal from None


def _computed(node: ExpressionNode, columns: Mapping[tuple[str, ...], pa.ChunkedArray]) -> Any:
    """Return the values of an expression: of a column as an array, of a literal as a scalar."""
    match node.kind, node.operands:
        case "number", ():
            return _literal(node.text.upper(), negative=False)
        case "-", (ExpressionNode(kind="number", text=text),):
            return _literal(text.upper(), negative=True)
        case "column", ():
            return _column(columns.get(tuple(map(fold, node.names))))
        case "+" | "-" | "*" as sign, (left, right):
            return _combined(sign, _computed(left, columns), _computed(right, columns))
    raise NotLocal


def _column(values: pa.ChunkedArray | None) -> pa.ChunkedArray:
    tests = (pa.types.is_integer, pa.types.is_decimal, pa.types.is_float64)
    if values is None or not any(test(values.type) for test in tests):
        raise NotLocal
    return values


def _combined(sign: str, left: Any, right: Any) -> Any:
    if pa.types.is_float64(left.type) or pa.types.is_float64(right.type):
        return _double(_FUNCTIONS[sign][0], left, right)
    if pa.types.is_integer(left.type) and pa.types.is_integer(right.type):
        return _whole(_FUNCTIONS[sign][1], left, right)
    # A product of decimals has places to round.
    if sign == "*":
        raise NotLocal
    return _decimal(_FUNCTIONS[sign][0], left, right)


_FUNCTIONS: Final[Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "+": (pc.add, pc.add_checked),
    "-": (pc.subtract, pc.subtract_checked),
    "*": (pc.multiply, pc.multiply_checked),
}
"""Arrow's function of each sign, and the one that raises where integers overflow."""


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
