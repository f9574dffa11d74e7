"""Filters rows by comparing columns with values, by the rules of Spark SQL. Pure.

A filter is a conjunction. Unknown (NULL on either side) does not pass. NaN equals itself and is
greater than every number, -0.0 equals 0.0, and text and binary compare byte by byte. A value is
first cast to the type of its column. Nested types cannot be compared, but the two tests of NULL
work for every type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import from_ipc
from actors.model.protocol.message_parts import ColumnComparison
from actors.runtime.errors import InvalidUsage, PenstockError

_KERNELS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
R = TypeVar("R", pa.Table, pa.RecordBatch)
_NULL_TESTS: Final = ("is null", "is not null")


class PreparedComparison(msgspec.Struct, frozen=True, gc=False):
    """A comparison whose value was cast: `value` is a scalar of the column's type, None for a test
    of NULL."""

    column: str
    op: str
    value: Any = None

    def mask(self, values: Any) -> Any:
        """Return a Boolean array that says which values pass; NULL for unknown."""
        if self.op in _NULL_TESTS:
            found = pc.is_null(values)
            return found if self.op == "is null" else pc.invert(found)
        if pa.types.is_floating(self.value.type) and self.value.is_valid:
            return self._floats(values)
        return _KERNELS[self.op](values, self.value)

    def _floats(self, values: Any) -> Any:
        """Return the mask for floats. NaN equals itself and is greater than every number."""
        # Arrow compares by IEEE 754, where NaN equals nothing.
        nan = pc.is_nan(values)
        if math.isnan(self.value.as_py()):
            if self.op in ("=", ">="):
                return nan
            if self.op in ("<>", "<"):
                return pc.invert(nan)
            passes = pa.scalar(self.op == "<=", pa.bool_())
            return pc.if_else(pc.is_valid(values), passes, pa.scalar(None, pa.bool_()))
        found = _KERNELS[self.op](values, self.value)
        return pc.or_(found, nan) if self.op in (">", ">=") else found


def prepare_comparison(schema: TableSchema, comparison: ColumnComparison) -> PreparedComparison:
    """Cast the value of a comparison to the type of its column.

    Raises `InvalidUsage` for an unknown column or a value of the wrong type.
    """
    name, op = comparison.column, comparison.op
    check_column("filter", schema, name)
    if op in _NULL_TESTS:
        return PreparedComparison(name, op)
    check_comparable("filter", schema, name)
    kind = schema.arrow().field(name).type
    try:
        given = from_ipc(comparison.value)
    except PenstockError as error:
        raise InvalidUsage(f"filter: invalid value for column {name}: {error}") from None
    # A message may contain any table.
    if given.num_rows != 1 or given.num_columns != 1:
        raise InvalidUsage(
            f"filter: {name} {op} needs a single value, "
            f"got {given.num_rows} rows of {given.num_columns} columns"
        )
    try:
        return PreparedComparison(name, op, given.column(0).cast(kind)[0])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise InvalidUsage(
            f"filter: the value does not fit column {name} ({kind}): {error}"
        ) from None


def passing_rows(tests: Sequence[PreparedComparison], rows: R) -> R:
    """Return the rows that pass all tests, with all columns."""
    mask: Any = None
    for test in tests:
        # NULL from one test and false from another both mean that the row does not pass.
        found = test.mask(rows.column(test.column))
        mask = found if mask is None else pc.and_(mask, found)
    return rows if mask is None else rows.filter(mask)


def check_column(what: str, schema: TableSchema, name: str) -> None:
    """Raise `InvalidUsage` if the column does not exist; `what` starts the message."""
    if name not in schema.names:
        raise InvalidUsage(
            f"{what}: unknown column {name} (the columns are {', '.join(schema.names)})"
        )


def check_comparable(what: str, schema: TableSchema, name: str) -> None:
    """Raise `InvalidUsage` if the column does not exist or its type cannot be compared."""
    check_column(what, schema, name)
    kind = schema.arrow().field(name).type
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        raise InvalidUsage(f"{what}: column {name} has type {kind}, which cannot be compared")
