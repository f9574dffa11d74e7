"""Uses Spark's pushed filters to read less. Pure.

Spark tests every row again, so a check may let rows pass that fail, but never the reverse. A filter
that is not understood in every detail (floating-point numbers with NaN, padded text, a value of
another type) is ignored. A check depends only on the row, so equal rows pass or fail together,
whichever part they are in, and can be checked before they are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.persist.part_filter import Op, PartCondition
from actors.durable.persist.statistics import has_bounds
from actors.engine.spark.spark_releases import pushed_filter
from actors.model.plan.schema import TableSchema

_OPS: Final[dict[type[Any], str]] = {
    pushed_filter("EqualTo"): "=",
    pushed_filter("GreaterThan"): ">",
    pushed_filter("GreaterThanOrEqual"): ">=",
    pushed_filter("LessThan"): "<",
    pushed_filter("LessThanOrEqual"): "<=",
    pushed_filter("In"): "in",
    pushed_filter("IsNull"): "is null",
    pushed_filter("IsNotNull"): "is not null",
}
_EQUAL_OR_NULL: Final = pushed_filter("EqualNullSafe")
_STARTS: Final = pushed_filter("StringStartsWith")
_KERNELS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": pc.equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "<": pc.less,
    "<=": pc.less_equal,
}


class ColumnCheck(msgspec.Struct, frozen=True):
    """A comparison of one column; `values` are scalars of its Arrow type."""

    column: str
    op: str
    values: tuple[Any, ...] = ()


def checks_of(filters: Sequence[Any], schema: TableSchema) -> list[ColumnCheck]:
    """Return the filters that are understood as checks, all of which must hold."""
    kinds = dict(zip(schema.names, schema.arrow().types, strict=True))
    texts = {column.name: column.type.lower() for column in schema.columns}
    names = {name.lower(): name for name in schema.names}
    found = []
    for one in filters:
        path: tuple[str, ...] = getattr(one, "attribute", ())
        column = names.get(path[0].lower()) if len(path) == 1 else None
        # Spark's filter does not distinguish columns whose names differ only in case.
        if column is None or len(names) < len(kinds):
            continue
        check = _check(one, column, kinds[column], texts[column])
        if check is not None:
            found.append(check)
    return found


def _check(one: Any, column: str, kind: pa.DataType, text: str) -> ColumnCheck | None:
    op = _OPS.get(type(one))
    if op in ("is null", "is not null"):
        return ColumnCheck(column, op)
    if isinstance(one, _EQUAL_OR_NULL):
        if one.value is None:
            return ColumnCheck(column, "is null")
        op = "="
    if isinstance(one, _STARTS) and text == "string":
        return ColumnCheck(column, "starts", (pa.scalar(one.value, pa.string()),))
    if op is None:
        return None
    given = [value for value in one.value if value is not None] if op == "in" else [one.value]
    values = [_scalar(value, kind, text) for value in given]
    if any(value is None for value in values):
        return None
    return ColumnCheck(column, op, tuple(values))


def _scalar(value: object, kind: pa.DataType, text: str) -> pa.Scalar | None:
    """Return the value in the type of the column; None if it may not be the same value."""
    match value:
        case bool():
            fits = pa.types.is_boolean(kind)
        case int():
            fits = pa.types.is_integer(kind)
        case str():
            fits = text == "string"
        case datetime():
            zoned = pa.types.is_timestamp(kind) and kind.tz is not None
            fits = pa.types.is_timestamp(kind) and zoned == (value.tzinfo is not None)
        case date():
            fits = pa.types.is_date32(kind)
        case Decimal():
            fits = pa.types.is_decimal128(kind)
        case _:
            fits = False
    if not fits:
        return None
    try:
        return pa.scalar(value, kind)
    except (pa.ArrowException, ValueError, OverflowError):
        return None


def passing(rows: pa.Table, checks: Sequence[ColumnCheck]) -> Any:
    """Return a bool for each row: whether it may pass."""
    mask: Any = pa.repeat(pa.scalar(True), rows.num_rows)
    for check in checks:
        mask = pc.and_(mask, _mask(check, rows[check.column]))
    return mask


def _mask(check: ColumnCheck, values: pa.ChunkedArray) -> Any:
    if check.op == "is null":
        return pc.is_null(values)
    if check.op == "is not null":
        return pc.is_valid(values)
    if check.op == "starts":
        found = pc.starts_with(values, check.values[0].as_py())
    elif check.op == "in":
        found = pc.is_in(values, value_set=pa.array([v.as_py() for v in check.values], values.type))
    else:
        found = _KERNELS[check.op](values, check.values[0])
    # In Spark a comparison with the result NULL also fails.
    return pc.fill_null(found, False)


def conditions_of(checks: Sequence[ColumnCheck], schema: TableSchema) -> list[PartCondition]:
    """Return the checks that statistics of parts can decide, as conditions."""
    found = []
    kinds = {c.name: (c.type, f.type) for c, f in zip(schema.columns, schema.arrow(), strict=True)}
    for check in checks:
        text, kind = kinds[check.column]
        if check.op == "starts" or (check.values and not has_bounds(text, kind)):
            continue
        found.append(PartCondition(check.column, cast("Op", check.op), check.values))
    return found
