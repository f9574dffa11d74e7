"""External columns of a sink: the names and types that files and tables can hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from actors.errors import InvalidUsage
from actors.plan.schema import TableSchema

TIME_OUTSIDE: Final = "_time"
"""bigint: the time of the change, in ms since 1970."""
DIFF_OUTSIDE: Final = "_diff"
"""bigint, not 0: number of copies of the row that were inserted (> 0) or deleted (< 0)."""
_NOT_IN_NAMES: Final = frozenset(" ,;{}()\n\t=")
"""Characters that names in a Delta table without column mapping must not contain, nor names in
Parquet files for some readers."""


def of_changes(schema: TableSchema) -> pa.Schema:
    """Return the columns of changes: the object's own, then `TIME_OUTSIDE` and `DIFF_OUTSIDE`."""
    return pa.schema(
        [
            *schema.arrow(),
            pa.field(TIME_OUTSIDE, pa.int64()),
            pa.field(DIFF_OUTSIDE, pa.int64()),
        ]
    )


def check_columns(schema: TableSchema, what: str, *, changes: bool) -> None:
    """Raise `InvalidUsage` for columns that `what` (``a Delta table``) cannot hold."""
    wrong: list[str] = []
    seen: dict[str, str] = {}
    for column, field in zip(schema.columns, schema.arrow(), strict=True):
        wrong += _wrong_field(field, column.type)
        folded = column.name.lower()
        if folded in seen:
            wrong.append(f"{column.name} and {seen[folded]} differ in case only")
        seen[folded] = column.name
        if changes and folded in (TIME_OUTSIDE, DIFF_OUTSIDE):
            wrong.append(f"{column.name}: the sink adds a column of that name itself")
    if not schema.columns:
        wrong.append("there is no column")
    if wrong:
        raise InvalidUsage(
            f"{what} cannot hold these columns: {'; '.join(wrong)}. Make a view that names or "
            "casts them otherwise, and sink that"
        )


def _wrong_field(field: pa.Field, type_text: str) -> Iterator[str]:
    name = field.name
    if not name or set(name) & _NOT_IN_NAMES:
        yield f"{name!r}: a name must not be empty, nor hold any of ' ,;{{}}()=' and line ends"
    yield from _wrong_type(field.type, f"{name} {type_text}")


def _wrong_type(kind: pa.DataType, place: str) -> Iterator[str]:
    if pa.types.is_null(kind):
        yield f"{place}: a column that is always NULL (void) has no type outside"
    elif pa.types.is_struct(kind):
        if not kind.num_fields:
            yield f"{place}: a struct without fields"
        names = [kind.field(index).name.lower() for index in range(kind.num_fields)]
        if len(set(names)) < len(names):
            yield f"{place}: fields that differ in case only"
        for index in range(kind.num_fields):
            inner = kind.field(index)
            yield from _wrong_field(inner, f"of {place}")
    elif pa.types.is_list(kind):
        yield from _wrong_type(kind.value_type, place)
    elif pa.types.is_map(kind):
        yield from _wrong_type(kind.key_type, place)
        yield from _wrong_type(kind.item_type, place)
