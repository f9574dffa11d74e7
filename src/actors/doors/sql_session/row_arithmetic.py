"""Computes the arithmetic of assignments locally, where the result is certain to equal Spark's.

``UPDATE accounts SET balance = balance - 5 WHERE id = 1`` reads one row by its key; a Spark job for
one subtraction would take a hundred times as long. Arrow computes sums and differences of integers
and decimals, and products of integers, exactly, and doubles by IEEE 754, as Java does. All other
expressions are left to Spark, and so are values that overflow, which Spark reports in its own
words. Pure.

Result types follow Spark's ANSI mode (`DecimalType`, "Decimal type coercion").
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
"""Maximum precision of a decimal."""
_ANY_INTEGER: Final = pa.decimal128(20, 0)
"""Decimal type that holds every integer: Spark's decimal type for bigint."""
_INTEGERS: Final[Mapping[str, pa.DataType]] = {"Y": pa.int8(), "S": pa.int16(), "L": pa.int64()}
"""Maps the suffixes of integer literals to their types."""


def computed_array(
    node: ExpressionNode, rows: pa.Table, schema: TableSchema, qualifier: str, column: TableColumn
) -> pa.ChunkedArray:
    """Compute an expression for each of the rows, in the type of a column.

    Args:
        node: The expression.
        rows: Rows of the table, with all its columns.
        schema: The table's columns.
        qualifier: The name by which the expression may refer to the table.
        column: The column that the values are assigned to.

    Raises:
        NotLocal: Spark must compute the expression.

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
    # Unquoted, DEFAULT is not a column name.
    names = {fold(name): name for name in schema.names if fold(name) != "default"}
    columns: dict[tuple[str, ...], pa.ChunkedArray] = {}
    for folded, name in names.items():
        columns[(folded,)] = columns[(fold(qualifier), folded)] = rows[name]
    try:
        return _fitted(_computed(node, columns), arrow_type(column.type), rows.num_rows)
    except pa.ArrowException:
        raise NotLocal from None


def arithmetic_of(span: TextSpan, parameters: Sequence[SqlParameter]) -> ExpressionNode:
    """Parse an expression of the statement into a tree. Raises `NotLocal` for an expression beyond
    plain arithmetic."""
    try:
        literals = [each.text for each in parameters]
        return read_whole_expression(StatementReader.of(span), literals)
    except UnknownExpression:
        raise NotLocal from None


def _computed(node: ExpressionNode, columns: Mapping[tuple[str, ...], pa.ChunkedArray]) -> Any:
    """Compute an expression. The value is an array, or a scalar if no column occurs."""
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
    # A product of decimals may need rounding.
    if sign == "*":
        raise NotLocal
    return _decimal(_FUNCTIONS[sign][0], left, right)


_FUNCTIONS: Final[Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "+": (pc.add, pc.add_checked),
    "-": (pc.subtract, pc.subtract_checked),
    "*": (pc.multiply, pc.multiply_checked),
}
"""Maps each operator to Arrow's function and to its variant that raises on integer overflow."""


def _literal(text: str, *, negative: bool) -> pa.Scalar:
    sign = -1 if negative else 1
    if text.isdigit() or (text[:-1].isdigit() and text[-1] in _INTEGERS):
        number = int(text.rstrip("YSL"))
        # At the limits of a type, Spark's choice also depends on the sign.
        if number in (1 << 7, 1 << 15, 1 << 31):
            raise NotLocal
        # A number without a suffix is an int if it fits, else a bigint.
        bare = pa.int32() if number < 1 << 31 else pa.int64()
        if number >= 1 << 63:
            raise NotLocal
        return pa.scalar(sign * number, _INTEGERS.get(text[-1], bare))
    digits = text.removesuffix("BD")
    whole, _, places = digits.partition(".")
    count = len(whole + places)
    if not (whole + places).isdigit() or count > DIGITS_MAX:
        raise NotLocal  # exponents and floating-point literals
    # Put the sign into the text: Python's unary minus would round to 28 digits.
    exact = Decimal(f"-{digits}" if negative else digits)
    return pa.scalar(exact, pa.decimal128(count, len(places)))


def _whole(apply: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply an operation to integers in the wider of their types. Raises `ArrowInvalid` on
    overflow."""
    wider = max(left.type, right.type, key=lambda kind: kind.bit_width)
    return apply(left.cast(wider), right.cast(wider))


def _decimal(apply: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Add or subtract decimals; Arrow's result type is the same as Spark's. Raises `NotLocal` if
    the result type would exceed the maximum precision."""
    # Cast integers to the widest decimal of an integer, which changes no value.
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
    """Apply an operation to operands cast to double. Raises `NotLocal` or `ArrowInvalid` for an
    operand that the cast might change."""
    return apply(_as_double(left), _as_double(right))


def _as_double(side: Any) -> Any:
    if not pa.types.is_decimal(side.type):
        return side.cast(pa.float64())
    # Python and Java round to the nearest double. Arrow multiplies, which may miss it, so arrays
    # are left to Spark.
    if not isinstance(side, pa.Scalar):
        raise NotLocal
    return pa.scalar(float(side.as_py()))


def _fitted(found: Any, kind: pa.DataType, count: int) -> pa.ChunkedArray:
    """Cast values to a column's type, as an array of `count` rows. Raises `NotLocal` if Spark's
    cast might round, and `ArrowInvalid` for a value that does not fit."""
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
