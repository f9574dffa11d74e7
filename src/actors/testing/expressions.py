"""Spark SQL expressions in pure Python: typed first, then evaluated, with ANSI errors.

Theory of operation. `compile_expression` turns a sqlglot tree into (Spark type, function of a row).
Types follow Spark's rules for the subset that tests use: integers widen to the wider side, decimals
take Spark's result precision and scale, ``/`` gives double unless an operand is decimal. Logic is
three-valued, None is NULL. Overflow, division by zero and malformed casts raise `DefiniteError`, as
in ANSI Spark; anything outside the subset raises `QueryRejected`. Values are int, float, `Decimal`,
str, bool, `date`, `datetime`, bytes.

It shares no code with `actors.engine.spark`, and knows neither tables nor aggregates.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, Final, TypeAlias

import sqlglot
from sqlglot import exp

from actors.runtime.errors import DefiniteError, QueryRejected

Row: TypeAlias = Sequence[Any]
Function: TypeAlias = Callable[[Row], Any]
Columns: TypeAlias = Mapping[str, tuple[int, str]]
"""Lower-cased column name → (position, Spark type)."""
Compiled: TypeAlias = tuple[str, Function]

INTEGERS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_INTEGER_DIGITS: Final = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}
WIDE: Final = Context(prec=100, rounding=ROUND_HALF_UP)
"""Enough digits for every intermediate result; Python's default of 28 would round."""


@lru_cache(maxsize=4096)
def parse(text: str) -> Any:
    """Return the tree of an expression's text. It is cached, so do not change it."""
    return sqlglot.parse_one(text, dialect="spark")


def compile_text(text: str, columns: Columns) -> Compiled:
    """Return (type, function) of an expression's text. Raises `QueryRejected`."""
    return compile_expression(parse(text), columns)


def decimal_digits(kind: str) -> tuple[int, int]:
    """Return (precision, scale) of a numeric type as a decimal."""
    if kind in _INTEGER_DIGITS:
        return _INTEGER_DIGITS[kind], 0
    if "(" not in kind:
        return 10, 0
    found = [int(part) for part in kind[kind.index("(") + 1 : -1].split(",")]
    return found[0], found[1] if len(found) > 1 else 0


def decimal_type(precision: int, scale: int) -> str:
    """Return a decimal type, with the scale cut as Spark does where the precision exceeds 38."""
    if precision > 38:
        scale = max(38 - (precision - scale), min(scale, 6))
        precision = 38
    return f"decimal({precision},{scale})"


def is_numeric(kind: str) -> bool:
    """Return whether a type is numeric."""
    return kind in INTEGERS or kind in ("float", "double") or kind.startswith("decimal")


def common_type(left: str, right: str) -> str:
    """Return the type to which both sides of a comparison, CASE or set operation are cast."""
    if left == right or right == "void":
        return left
    if left == "void":
        return right
    if is_numeric(left) and is_numeric(right):
        return _common_number(left, right)
    pair = {left, right}
    if pair == {"date", "timestamp"}:
        return "timestamp"
    if "string" in pair:
        return (pair - {"string"}).pop()
    raise QueryRejected(f"[DATATYPE_MISMATCH] {left} and {right} have no common type")


def _common_number(left: str, right: str) -> str:
    if "double" in (left, right) or "float" in (left, right):
        return "double" if left != right else left
    if left in INTEGERS and right in INTEGERS:
        return left if INTEGERS[left] >= INTEGERS[right] else right
    (p1, s1), (p2, s2) = decimal_digits(left), decimal_digits(right)
    scale = max(s1, s2)
    return decimal_type(max(p1 - s1, p2 - s2) + scale, scale)


def cast_value(value: Any, kind: str) -> Any:
    """Return the value cast to a type by ANSI rules. Raises `DefiniteError`."""
    if value is None or kind == "void":
        return None
    try:
        return _cast(value, kind)
    except (ValueError, InvalidOperation, OverflowError):
        raise DefiniteError(
            f"[CAST_INVALID_INPUT] {value!r} cannot be cast to {kind.upper()}"
        ) from None


def _cast(value: Any, kind: str) -> Any:
    if kind in INTEGERS:
        return _integer(_whole(value), kind)
    if kind in ("float", "double"):
        # A float keeps 24 bits, so 0.1 becomes another number.
        return ctypes.c_float(float(value)).value if kind == "float" else float(value)
    if kind.startswith("decimal"):
        exact = Decimal(str(value)) if isinstance(value, float | str) else Decimal(value)
        return fit_decimal(exact, *decimal_digits(kind))
    if kind == "string" or kind.startswith(("varchar", "char")):
        return _string(value)
    if kind == "boolean":
        return _boolean(value)
    if kind == "date":
        if isinstance(value, datetime):
            return value.date()
        return value if isinstance(value, date) else date.fromisoformat(str(value).strip()[:10])
    if kind.startswith("timestamp"):
        return _timestamp(value, with_zone=kind != "timestamp_ntz")
    if kind == "binary":
        return value if isinstance(value, bytes) else str(value).encode()
    raise QueryRejected(f"the in-memory engine has no cast to {kind}")


def _whole(value: Any) -> int:
    if isinstance(value, str):
        return int(value.strip())
    if isinstance(value, datetime):
        return math.floor(value.timestamp())
    return int(value)


def _integer(value: int, kind: str) -> int:
    bound = 1 << (INTEGERS[kind] - 1)
    if not -bound <= value < bound:
        raise DefiniteError(f"[ARITHMETIC_OVERFLOW] {value} does not fit {kind.upper()}")
    return value


def fit_decimal(value: Decimal, precision: int, scale: int) -> Decimal:
    """Round half up to the scale. Raises `DefiniteError` if the digits do not fit."""
    rounded = value.quantize(Decimal(1).scaleb(-scale), context=WIDE)
    if rounded.copy_abs() >= Decimal(10) ** (precision - scale):
        raise DefiniteError(
            f"[NUMERIC_VALUE_OUT_OF_RANGE] {value} does not fit DECIMAL({precision},{scale})"
        )
    return rounded


def _string(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(sep=" ")
    return str(value)


def _boolean(value: Any) -> bool:
    if isinstance(value, str):
        low = value.strip().lower()
        if low in ("t", "true", "y", "yes", "1"):
            return True
        if low in ("f", "false", "n", "no", "0"):
            return False
        raise ValueError(value)
    return bool(value)


def _timestamp(value: Any, *, with_zone: bool) -> datetime:
    if isinstance(value, datetime):
        found = value
    elif isinstance(value, date):
        found = datetime(value.year, value.month, value.day, tzinfo=UTC)
    else:
        found = datetime.fromisoformat(str(value).strip())
    zone = UTC if with_zone else None
    return found.replace(tzinfo=zone) if found.tzinfo is None or zone is None else found


def compile_expression(tree: Any, columns: Columns) -> Compiled:
    """Return (type, function of a row) of an expression. Raises `QueryRejected`."""
    for kinds, compiler in _COMPILERS:
        if isinstance(tree, kinds):
            return compiler(tree, columns)
    from actors.testing.functions import compile_function

    return compile_function(tree, columns)


def _literal(tree: Any, _: Columns) -> Compiled:
    if isinstance(tree, exp.Null):
        return "void", lambda row: None
    if isinstance(tree, exp.Boolean):
        truth = bool(tree.this)
        return "boolean", lambda row: truth
    text = str(tree.this)
    value: Any
    if tree.is_string:
        return "string", lambda row: text
    if "e" in text.lower():
        value, kind = float(text), "double"
    elif "." in text:
        value = Decimal(text)
        exponent = -int(value.as_tuple().exponent)
        kind = f"decimal({max(len(value.as_tuple().digits), exponent)},{exponent})"
    else:
        value = int(text)
        wide = "bigint" if abs(value) < 1 << 63 else f"decimal({len(text)},0)"
        kind = "int" if abs(value) < 1 << 31 else wide
    return kind, lambda row: value


def _column(tree: Any, columns: Columns) -> Compiled:
    name = tree.name.lower()
    qualified = f"{tree.table.lower()}.{name}"
    found = columns.get(qualified if tree.table else name)
    if found is None:
        raise QueryRejected(f"[UNRESOLVED_COLUMN] a column {tree.sql()} cannot be resolved")
    index, kind = found
    return kind, lambda row: row[index]


def _paren(tree: Any, columns: Columns) -> Compiled:
    return compile_expression(tree.this, columns)


def _logic(tree: Any, columns: Columns) -> Compiled:
    left, right = _boolean_of(tree.left, columns), _boolean_of(tree.right, columns)
    decides = isinstance(tree, exp.Or)

    def value(row: Row) -> Any:
        first = left(row)
        if first is decides:
            return decides
        second = right(row)
        if second is decides:
            return decides
        return None if first is None or second is None else not decides

    return "boolean", value


def _boolean_of(tree: Any, columns: Columns) -> Function:
    kind, function = compile_expression(tree, columns)
    if kind not in ("boolean", "void"):
        raise QueryRejected(f"[DATATYPE_MISMATCH] {tree.sql()} is {kind}, not boolean")
    return function


def _not(tree: Any, columns: Columns) -> Compiled:
    inner = _boolean_of(tree.this, columns)

    def value(row: Row) -> Any:
        found = inner(row)
        return None if found is None else not found

    return "boolean", value


def _is(tree: Any, columns: Columns) -> Compiled:
    wanted = tree.expression
    _, inner = compile_expression(tree.this, columns)
    if isinstance(wanted, exp.Null):
        return "boolean", lambda row: inner(row) is None
    if isinstance(wanted, exp.Boolean):
        truth = bool(wanted.this)
        return "boolean", lambda row: inner(row) is truth
    raise QueryRejected(f"the in-memory engine does not know {tree.sql()}")


_COMPARE: Final[dict[type[Any], Callable[[int], bool]]] = {
    exp.EQ: lambda sign: sign == 0,
    exp.NEQ: lambda sign: sign != 0,
    exp.LT: lambda sign: sign < 0,
    exp.LTE: lambda sign: sign <= 0,
    exp.GT: lambda sign: sign > 0,
    exp.GTE: lambda sign: sign >= 0,
}


def compare_values(left: Any, right: Any) -> int:
    """Return -1, 0 or 1; NaN equals itself and is greatest, as in Spark."""
    for nan, other, sign in ((left, right, 1), (right, left, -1)):
        if isinstance(nan, float) and math.isnan(nan):
            return 0 if isinstance(other, float) and math.isnan(other) else sign
    return int(left > right) - int(left < right)


def cast_to_common_type(left: Compiled, right: Compiled) -> tuple[Function, Function]:
    """Return both sides, cast to their common type."""
    kind = common_type(left[0], right[0])
    return cast_to_type(left, kind), cast_to_type(right, kind)


def cast_to_type(compiled: Compiled, kind: str) -> Function:
    """Return the function with an implicit cast to `kind`."""
    function = compiled[1]
    if compiled[0] == kind or (compiled[0] in INTEGERS and kind in INTEGERS):
        return function
    return lambda row: cast_value(function(row), kind)


def _comparison(tree: Any, columns: Columns) -> Compiled:
    left, right = cast_to_common_type(
        compile_expression(tree.left, columns), compile_expression(tree.right, columns)
    )
    test = _COMPARE[type(tree)]

    def value(row: Row) -> Any:
        a, b = left(row), right(row)
        return None if a is None or b is None else test(compare_values(a, b))

    return "boolean", value


def _null_safe(tree: Any, columns: Columns) -> Compiled:
    left, right = cast_to_common_type(
        compile_expression(tree.left, columns), compile_expression(tree.right, columns)
    )
    wanted = isinstance(tree, exp.NullSafeEQ)

    def value(row: Row) -> bool:
        a, b = left(row), right(row)
        equal = (a is None) == (b is None) and (a is None or compare_values(a, b) == 0)
        return equal is wanted

    return "boolean", value


def _cast_tree(tree: Any, columns: Columns) -> Compiled:
    source, function = compile_expression(tree.this, columns)
    kind = type_text(tree.args["to"])
    if source == kind:
        return kind, function
    if not tree.args.get("safe"):
        return kind, lambda row: cast_value(function(row), kind)

    def tried(row: Row) -> Any:
        try:
            return cast_value(function(row), kind)
        except DefiniteError:
            return None

    return kind, tried


def type_text(tree: Any) -> str:
    """Return Spark's DDL text of a sqlglot data type."""
    text = str(tree.sql(dialect="spark")).lower().replace(" ", "")
    if text in ("decimal", "dec", "numeric"):
        return "decimal(10,0)"
    if text.startswith(("varchar(", "char(")):
        return "string"
    names = {"integer": "int", "long": "bigint", "timestamp_ltz": "timestamp", "real": "float"}
    return names.get(text, text)


_COMPILERS: Final[tuple[tuple[Any, Callable[[Any, Columns], Compiled]], ...]] = (
    ((exp.Literal, exp.Null, exp.Boolean), _literal),
    (exp.Column, _column),
    (exp.Paren, _paren),
    ((exp.And, exp.Or), _logic),
    (exp.Not, _not),
    (exp.Is, _is),
    (tuple(_COMPARE), _comparison),
    ((exp.NullSafeEQ, exp.NullSafeNEQ), _null_safe),
    (exp.Cast, _cast_tree),
)
