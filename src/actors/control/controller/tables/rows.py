"""Fits the rows that clients send to a table's columns, or refuses them with an error that names
the value.

A column is cast where no value can change: integers and decimals into wider ones, integers into
floats, floats into floats, NULL into anything, naive timestamps into UTC. A CHAR(n) value is padded
with blanks; blanks beyond n are cut off. Anything else raises `TypeMismatch`, which names the
table, the column and the row number (from 0).

`identities` gives each row a hashable value that equals another's exactly if all bits are equal
(NULL equals NULL, -0.0 differs from 0.0, a NaN equals itself): the same rule by which stored
updates consolidate. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from actors.model.plan.column_defaults import DefaultValues
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.model.plan.text_limits import children_of, fit_texts, with_children
from actors.model.protocol.relations import fold
from actors.runtime.errors import (
    InvalidUsage,
    NullNotAllowed,
    TypeMismatch,
    ValueOutOfRange,
    ValueTooLong,
)

_KINDS: Final[tuple[tuple[str, Callable[[pa.DataType], bool]], ...]] = (
    ("null", pa.types.is_null),
    ("boolean", pa.types.is_boolean),
    ("integer", pa.types.is_integer),
    ("float", pa.types.is_floating),
    ("decimal", pa.types.is_decimal),
    ("string", lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind)),
    ("binary", lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind)),
    ("date", pa.types.is_date),
    ("timestamp", pa.types.is_timestamp),
    ("list", lambda kind: pa.types.is_list(kind) or pa.types.is_large_list(kind)),
    ("map", pa.types.is_map),
    ("struct", pa.types.is_struct),
)
_NULL: Final = pa.scalar(None, pa.null())
_WIDENING: Final = frozenset({("integer", "float"), ("integer", "decimal"), ("decimal", "decimal")})
KEY_KINDS: Final = frozenset(
    {"boolean", "integer", "decimal", "string", "binary", "date", "timestamp"}
)


def kind_of(type_: pa.DataType) -> str:
    """Return the family of an Arrow type."""
    if pa.types.is_dictionary(type_):
        return kind_of(type_.value_type)
    return next((name for name, test in _KINDS if test(type_)), str(type_))


def check_key_columns(what: str, schema: TableSchema) -> None:
    """Raise `InvalidUsage` if the type of a PRIMARY KEY column has no exact equality."""
    for column in schema.columns:
        if column.name in schema.key and kind_of(arrow_type(column.type)) not in KEY_KINDS:
            raise InvalidUsage(f"{what}: type {column.type} cannot be part of a PRIMARY KEY")


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    source, target = kind_of(given), kind_of(wanted)
    if source == "null" or (source, target) in _WIDENING:
        return True
    if source != target:
        return False
    if source == "list":
        return _fits(given.value_type, wanted.value_type)
    if source == "map":
        return _fits(given.key_type, wanted.key_type) and _fits(given.item_type, wanted.item_type)
    if source == "struct":
        names = {given.field(i).name: given.field(i).type for i in range(given.num_fields)}
        fields = [wanted.field(i) for i in range(wanted.num_fields)]
        return set(names) <= {field.name for field in fields} and all(
            field.name not in names or _fits(names[field.name], field.type) for field in fields
        )
    return True


def _cast(values: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    if values.type == wanted:
        return values
    return pa.chunked_array([_cast_array(chunk, wanted) for chunk in values.chunks], wanted)


def _cast_array(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Cast an array. Nested values keep their shape, and each inner array is cast by the same
    rules."""
    given = values.type
    if given == wanted:
        return values
    if pa.types.is_null(given):
        return pa.nulls(len(values), wanted)
    if pa.types.is_dictionary(given):
        return _cast_array(values.dictionary_decode(), wanted)
    if pa.types.is_nested(wanted):
        children = children_of(values)
        if pa.types.is_struct(wanted):
            found = {given.field(i).name: each for i, each in enumerate(children)}
            # a missing field is NULL
            children = [
                found.get(field.name, pa.nulls(len(values), field.type)) for field in wanted
            ]
        kinds = [wanted.field(i).type for i in range(wanted.num_fields)]
        if pa.types.is_map(wanted):
            kinds = [wanted.key_type, wanted.item_type]
        cast = [_cast_array(each, kind) for each, kind in zip(children, kinds, strict=True)]
        return with_children(values, cast, wanted)
    if pa.types.is_timestamp(wanted) and wanted.tz is not None and given.tz is None:
        # Naive timestamps count as UTC: the integers stay.
        values = values.cast(pa.timestamp(wanted.unit)).cast(pa.int64())
    if pa.types.is_decimal(wanted) and pa.types.is_integer(given):
        # Arrow casts integers only to a decimal that could hold every integer of their type.
        values = values.cast(pa.decimal128(38, wanted.scale))
    return values.cast(wanted)


def _first_bad(values: pa.ChunkedArray, cast: Callable[[pa.ChunkedArray], Any]) -> tuple[int, str]:
    """Find, by bisection, the first row whose value the cast refuses. Return its number and the
    reason."""
    low, high, why = 0, len(values), ""
    while high - low > 1:
        middle = (low + high) // 2
        try:
            cast(values.slice(low, middle - low))
            low = middle
        except pa.ArrowException:
            high = middle
    try:
        cast(values.slice(low, 1))
    except pa.ArrowException as error:
        why = str(error).splitlines()[0]
    return low, why


def _fit_column(
    table: str, column: TableColumn, values: pa.ChunkedArray, *, stored: bool
) -> pa.ChunkedArray:
    wanted = arrow_type(column.type)
    if not _fits(values.type, wanted):
        # NULL fits every type, so the first other value is the one that does not fit.
        row = pc.index(pc.is_valid(values), True).as_py()
        raise TypeMismatch(
            f"table {table}, column {column.name}, row {max(row, 0)}: {values.type} does not fit "
            f"{column.type}"
        )

    def fitted(part: pa.ChunkedArray) -> pa.ChunkedArray:
        # VARCHAR(n) is compared unchanged: blanks are cut off only where a value is stored
        as_is = not stored and column.type.startswith("varchar")
        return fit_texts(_cast(part, wanted), "string" if as_is else column.type)

    try:
        cast = fitted(values)
    except pa.ArrowException:
        row, why = _first_bad(values, fitted)
        misfit = ValueTooLong if pa.types.is_string(wanted) else ValueOutOfRange
        raise misfit(
            f"table {table}, column {column.name}, row {row}: {values[row].as_py()!r} does not "
            f"fit {column.type}: {why}"
        ) from None
    if not column.nullable and cast.null_count:
        row = pc.index(pc.is_null(cast), True).as_py()
        raise NullNotAllowed(
            f"table {table}, column {column.name}, row {row}: NULL in a NOT NULL column"
        )
    return cast


def fit(
    table: str,
    schema: TableSchema,
    rows: pa.Table,
    columns: Sequence[str] | None = None,
    *,
    stored: bool = True,
    defaults: DefaultValues | None = None,
) -> pa.Table:
    """Return `rows` with exactly the table's columns (or the named ones), cast, in order.

    A missing column gets its value from `defaults`, else NULL. With `stored`, values of CHAR(n) and
    VARCHAR(n) are as Spark stores them; without, as Spark compares other values with such columns.
    Raises `TypeMismatch`.
    """
    given: dict[str, pa.ChunkedArray] = {}
    for name, values in zip(rows.column_names, rows.columns, strict=True):
        if fold(name) in given:
            raise TypeMismatch(f"table {table}, column {name}: duplicate column")
        given[fold(name)] = values
    wanted = schema.columns
    if columns is not None:
        folded = {fold(name) for name in columns}
        wanted = tuple(column for column in schema.columns if fold(column.name) in folded)
    strangers = set(given) - {fold(column.name) for column in wanted}
    if strangers:
        raise TypeMismatch(
            f"table {table} has no column {min(strangers)} (available: "
            f"{', '.join(column.name for column in wanted)})"
        )
    filling = defaults or {}
    arrays = []
    for column in wanted:
        values = given.get(fold(column.name))
        if values is None:
            value = filling.get(column.name, _NULL)
            values = pa.chunked_array([pa.repeat(value, rows.num_rows)])
        arrays.append(_fit_column(table, column, values, stored=stored))
    fields = [pa.field(column.name, arrow_type(column.type)) for column in wanted]
    return pa.table(arrays, schema=pa.schema(fields))


def _hashable(column: pa.ChunkedArray) -> list[Hashable]:
    kind = column.type
    if pa.types.is_floating(kind):
        # By bits, so that a NaN equals itself and -0.0 differs from 0.0.
        bits = pa.int64() if pa.types.is_float64(kind) else pa.int32()
        column = pa.chunked_array([chunk.view(bits) for chunk in column.chunks], bits)
    elif pa.types.is_timestamp(kind):
        column = column.cast(pa.int64())
    elif pa.types.is_date(kind):
        column = column.cast(pa.int32())
    elif pa.types.is_nested(kind):
        return [repr(value) for value in column.to_pylist()]
    values: list[Hashable] = column.to_pylist()
    return values


def identities(rows: pa.Table, columns: Sequence[str]) -> list[Hashable]:
    """Return one hashable value per row; two are equal exactly if the columns are equal bit by
    bit."""
    lists = [_hashable(rows[name]) for name in columns]
    if len(lists) == 1:
        return lists[0]
    return list(zip(*lists, strict=True))


def describe_key(columns: Sequence[str], rows: pa.Table, row: int) -> str:
    """Describe the key of one row for an error, for example ``id = 7, day = 2013-01-01``."""
    return ", ".join(f"{name} = {rows[name][row].as_py()!r}" for name in columns)
