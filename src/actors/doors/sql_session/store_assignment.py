"""Converts the rows of a query to the types of the columns that they are inserted into.

The rules are those of Spark's ANSI store assignment (`Cast.canANSIStoreAssign`). Lossless casts are
left to the service. Decimals are rounded to the column's scale here. Casts in which Spark and Arrow
differ (doubles to decimals, numbers to strings, dates to timestamps) are done by Spark, in a second
run of the query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from actors.doors.sql_session.mapped_sql import MappedSql, concat_sql, join_sql
from actors.engine.sql.tokens import quote_text
from actors.model.pgwire.sqlstate import INEXACT, UNFIT
from actors.model.plan.schema import UNBOUNDED_NUMERIC, TableColumn, arrow_type
from actors.runtime.errors import InvalidUsage, TypeMismatch, ValueOutOfRange

ANSI: Final = "spark.sql.ansi.enabled"
_SCALE: Final = arrow_type(UNBOUNDED_NUMERIC).scale
_NUMBERS: Final = ("integer", "decimal", "float")
_MOMENTS: Final = frozenset({"date", "timestamp"})
_CAST_BY_SPARK: Final = frozenset(
    {
        ("float", "decimal"),
        ("float", "integer"),
        ("decimal", "integer"),
        ("decimal", "float"),
        ("date", "timestamp"),
        ("timestamp", "date"),
        *((kind, "string") for kind in (*_NUMBERS, "boolean", "date", "timestamp", "interval")),
    }
)


def needs_cast(rows: pa.Schema, columns: Sequence[TableColumn]) -> bool:
    """Return whether Spark has to cast rows of these types to those of the columns.

    >>> needs_cast(pa.schema([("a", pa.float64())]), [TableColumn("a", "decimal(9,2)")])
    True
    >>> needs_cast(pa.schema([("a", pa.int32())]), [TableColumn("a", "decimal(9,2)")])
    False
    """
    for given, column in zip(rows.types, columns, strict=True):
        inner, wanted = _elements(given, arrow_type(column.type))
        if inner is not given:
            # `fitted_numbers` does not convert elements of arrays.
            if inner != wanted:
                return True
        elif (_kind(inner), _kind(wanted)) in _CAST_BY_SPARK:
            return True
    return False


def _elements(given: pa.DataType, wanted: pa.DataType) -> tuple[pa.DataType, pa.DataType]:
    """Return the types of the innermost elements if both are arrays, else the types themselves."""
    while pa.types.is_list(given) and pa.types.is_list(wanted):
        given, wanted = given.value_type, wanted.value_type
    return given, wanted


def check_assignable(table: str, rows: pa.Schema, columns: Sequence[TableColumn]) -> None:
    """Raise `TypeMismatch` if Spark would not assign values of these types to the columns.

    For example, a string is not assigned to a number, nor a Boolean to a date. All types but nested
    ones are assigned to strings.

    >>> check_assignable("t", pa.schema([("a", pa.int32())]), [TableColumn("a", "string")])
    >>> check_assignable("t", pa.schema([("a", pa.string())]), [TableColumn("a", "int")])
    Traceback (most recent call last):
        ...
    actors.runtime.errors.TypeMismatch: table t, column a: cannot assign string to int: cast it
    """
    for given, column in zip(rows.types, columns, strict=True):
        kind, wanted = map(_kind, _elements(given, arrow_type(column.type)))
        known = kind and wanted  # the fields of structs and maps are checked when they are stored
        if known and kind != wanted and wanted != "string" and not _are_alike(kind, wanted):
            raise TypeMismatch(
                f"table {table}, column {column.name}: cannot assign {_shown(kind, given)} to "
                f"{column.type}: cast it"
            )


def _are_alike(kind: str, wanted: str) -> bool:
    return {kind, wanted} <= _MOMENTS or {kind, wanted} <= set(_NUMBERS)


def _shown(kind: str, given: pa.DataType) -> str:
    return "an interval" if kind == "interval" else str(given)


def fails_by_cast(conf: Mapping[str, str]) -> bool:
    """Return whether, under these Spark settings, CAST fails for a value that does not fit."""
    return conf.get(ANSI, "true").lower() == "true"


def assigned_cast(value: MappedSql, column: TableColumn, conf: Mapping[str, str]) -> MappedSql:
    """Return a cast of a value to the type of its column, which fails if the value does not fit.

    Args:
        value: An expression.
        column: The column that the value is for.
        conf: The Spark settings under which the query runs.

    Raises:
        InvalidUsage: Under these settings CAST does not fail, and for this column or value there is
            no other check.

    >>> assigned_cast(concat_sql("a + 1"), TableColumn("a", "int"), {}).text
    'CAST(a + 1 AS int)'
    """
    type_ = column.type
    # A cast to string always succeeds.
    if fails_by_cast(conf) or type_ == "string":
        return concat_sql("CAST(", _closed(value, f" AS {type_})"))
    # Without ANSI mode, CAST turns a value that does not fit into NULL or another number. An
    # assignment must still fail: `spark.sql.storeAssignmentPolicy` is a separate setting.
    what = f"of type {type_}" if pa.types.is_nested(arrow_type(type_)) else ""
    if value.span is not None and any(each.word == "SELECT" for each in value.span.tokens):
        what = "with a subquery"  # Spark does not support one within `transform`
    if what:
        raise InvalidUsage(
            f"column {column.name}: cannot check a value {what} while {ANSI} is false: reset the "
            f"setting"
        )
    cast = f"try_cast(assigned AS {type_})"
    text = quote_text(f" that does not fit column {column.name} of type {type_}")
    error = f"raise_error(concat('a value of type ', typeof(assigned), {text}))"
    # Compute the value only once: a nondeterministic one would differ the second time.
    checked = (
        f"), assigned -> CASE WHEN assigned IS NULL OR {cast} IS NOT NULL THEN {cast} "
        f"ELSE {error} END), 1)"
    )
    return concat_sql("element_at(transform(array(", _closed(value, checked))


def _closed(value: MappedSql, text: str) -> MappedSql:
    """Append generated text to an expression; it maps to the end of the expression if there is
    one."""
    return concat_sql(value, text) if value.span is None else value.before(text)


def cast_query(
    query: MappedSql,
    columns: Sequence[TableColumn],
    conf: Mapping[str, str],
    *,
    exact: bool = False,
) -> MappedSql:
    """Return the query with each of its columns cast to the type of its target column.

    The casts are those of `assigned_cast`; with `exact`, those of `exact_cast` where it has one.

    >>> print(cast_query(concat_sql("select 1.5e0"), [TableColumn("a", "decimal(9,2)")], {}).text)
    SELECT CAST(c0 AS decimal(9,2)) AS c0 FROM (
    select 1.5e0
    ) AS q (c0)
    """
    names = [f"c{number}" for number in range(len(columns))]
    casts = join_sql(
        ", ",
        (
            concat_sql(cast_column(name, column, conf, exact=exact), f" AS {name}")
            for name, column in zip(names, columns, strict=True)
        ),
    )
    # On separate lines, because the query may end with a comment.
    return concat_sql("SELECT ", casts, " FROM (\n", query, f"\n) AS q ({', '.join(names)})")


def cast_column(
    name: str, column: TableColumn, conf: Mapping[str, str], *, exact: bool
) -> MappedSql:
    """Return a query's column cast to the type of its target column, as `cast_query` does."""
    digits = exact_cast(name, column.type) if exact else ""
    return concat_sql(digits) if digits else assigned_cast(concat_sql(name), column, conf)


def exact_cast(text: str, kind: str) -> str:
    """Return a cast of a Spark expression to a decimal, or an array of decimals, without silent
    loss; "" for other types.

    NaN and infinities are errors and, for `UNBOUNDED_NUMERIC`, so are numbers that would be
    rounded.
    """
    digits = number_text(text, kind)
    cast = number_of_text(digits, kind) if digits else ""
    # Only floating-point values need the exact cast: Spark turns NaN and infinities into NULL.
    if cast and UNBOUNDED_NUMERIC not in kind:
        floating = "'double', 'float', 'array<double>', 'array<float>'"
        return f"IF(typeof({text}) IN ({floating}), {cast}, CAST({text} AS {kind}))"
    return cast


def number_text(text: str, kind: str) -> str:
    """Return a Spark expression for the digits of a number, or of an array of numbers, as strings.

    Return "" if the target type `kind` is not a decimal or an array of decimals. The expression
    itself never fails.
    """
    if kind.startswith("array<decimal("):
        # Spark does not evaluate lambdas in VALUES, so doubles within an array keep all their
        # digits.
        return f"CAST({text} AS array<string>)"
    if not kind.startswith("decimal("):
        return ""
    if kind != UNBOUNDED_NUMERIC:
        return f"CAST({text} AS STRING)"
    size = f"abs(CAST({text} AS DOUBLE))"
    # The number of digits that PostgreSQL uses when it casts a float or a double.
    form = f"IF(typeof({text}) = 'float', '%.5e', '%.14e')"
    digits = f"format_string({form}, CAST({text} AS DOUBLE))"
    # `typeof` is resolved during analysis, so at run time only one branch is computed.
    return (
        f"CASE WHEN typeof({text}) NOT IN ('double', 'float') THEN CAST({text} AS STRING)"
        f" WHEN {size} >= 1e-{_SCALE}D AND {size} < 0.5D"
        f" THEN CAST(CAST({digits} AS DECIMAL(38,38)) AS STRING)"
        f" WHEN {size} >= 0.5D AND {size} < 1e22D"
        f" THEN CAST(CAST({digits} AS DECIMAL(38,15)) AS STRING)"
        f" ELSE CAST({text} AS STRING) END"
    )


def number_of_text(text: str, kind: str) -> str:
    """Return a Spark expression that casts the digits of `number_text` to their target type."""
    if kind.startswith("array<"):
        return f"transform({text}, x -> {number_of_text('x', kind[len('array<') : -1])})"
    # Spark's error shows the text that it cannot cast, so put the message into the text.
    inexact, problem = "NaN|Inf", f"{UNFIT}{kind}"
    if kind == UNBOUNDED_NUMERIC:
        inexact, problem = f"[.][0-9]{{{_SCALE}}}0*[1-9]|[eE]-|{inexact}", INEXACT
    problem = f"numeric value $0{problem}"
    shown = f"regexp_replace({text}, '^.*({inexact}).*$', '{problem}')"
    return f"CAST({shown} AS {kind})"


def _is_exact(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_decimal(kind))


def fitted_numbers(
    table: str, rows: pa.Table, columns: Sequence[TableColumn], *, exact: bool = False
) -> pa.Table:
    """Cast integers and decimals to the columns' types, rounding half away from zero.

    Raises `ValueOutOfRange` for a number that does not fit and, with `exact`, for one that
    `UNBOUNDED_NUMERIC` would round.
    """
    for place, column in enumerate(columns):
        wanted, values = arrow_type(column.type), rows.column(place)
        given, numbers = values.type, values
        if given == wanted or not (_is_exact(wanted) and _is_exact(given)):
            continue
        if pa.types.is_integer(given) and pa.types.is_decimal(wanted):
            # Arrow casts an integer only to a decimal that can hold all integers of its type.
            values = values.cast(pa.int64()).cast(pa.decimal128(19, 0))
        elif pa.types.is_decimal(given) and wanted.scale < given.scale:
            # Rounding may add a digit: 9.995 becomes 10.00.
            values = values.cast(pa.decimal256(given.precision + 1, given.scale))
            values = pc.round(values, wanted.scale, round_mode="half_towards_infinity")
        try:
            fitted = values.cast(wanted)
        except pa.ArrowInvalid:
            raise ValueOutOfRange(
                f"table {table}, column {column.name}: a value of {given} does not fit "
                f"{column.type}"
            ) from None
        if exact and column.type == UNBOUNDED_NUMERIC and given.scale > wanted.scale:
            lost = pc.not_equal(fitted.cast(values.type), numbers.cast(values.type))
            if pc.any(lost).as_py():
                number = numbers.filter(lost)[0].as_py()
                raise ValueOutOfRange(
                    f"table {table}, column {column.name}: numeric value {number}{INEXACT}"
                )
        rows = rows.set_column(place, column.name, fitted)
    return rows


def _kind(type_: pa.DataType) -> str:
    tests = {
        "integer": pa.types.is_integer,
        "decimal": pa.types.is_decimal,
        "float": pa.types.is_floating,
        "boolean": pa.types.is_boolean,
        "date": pa.types.is_date,
        "timestamp": pa.types.is_timestamp,
        "string": pa.types.is_string,
        "binary": pa.types.is_binary,
        "interval": lambda kind: pa.types.is_duration(kind) or pa.types.is_interval(kind),
    }
    return next((kind for kind, test in tests.items() if test(type_)), "")
