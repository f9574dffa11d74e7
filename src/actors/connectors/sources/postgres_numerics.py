"""Chooses decimal types for ``numeric`` columns without a precision, by the values in the table.

PostgreSQL's ``numeric`` can have up to 131072 digits, more than any decimal. The type of a local
column is fixed when its table is added, so one query scans all rows at that time
(`with_fitting_decimals`). A later value that does not fit is an error, like every value that cannot
be represented.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from actors.connectors.sources.postgres_catalog import PostgresTable, bound_columns, number_of
from actors.connectors.sources.postgres_types import UNBOUNDED
from actors.connectors.sources.postgres_wire import PostgresConnection
from actors.connectors.sources.source import SourceExport
from actors.model.pgwire.quoting import quote_name
from actors.model.pgwire.type_map import DECIMAL_DIGITS_MAX
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import InvalidUsage

_SCALE: Final = 18
"""Default scale, the same as for tables that PostgreSQL clients create here."""
_SPARE_DIGITS_MIN: Final = 2
_TEXT_MAX: Final = 64


class SeenNumbers(NamedTuple):
    """Extremes of the values in a ``numeric`` column."""

    least: str = ""
    """Text of the smallest value, truncated; "" if the column has no values."""
    greatest: str = ""
    """Text of the largest value, truncated."""
    whole: int = 0
    """Maximum number of digits before the decimal point."""
    after: int = 0
    """Maximum number of digits after the decimal point, without trailing zeros."""


def fitting_decimal(seen: SeenNumbers) -> str | None:
    """Return a decimal type that holds these values, with digits to spare; None if no decimal does.

    >>> fitting_decimal(SeenNumbers("1", "9.95", whole=1, after=2))
    'decimal(38,18)'
    >>> fitting_decimal(SeenNumbers("0", "100", whole=3, after=20))
    'decimal(38,27)'
    """
    spare = DECIMAL_DIGITS_MAX - seen.whole - seen.after
    # In PostgreSQL's order the infinities are at both ends, and NaN is above everything.
    if spare < 0 or seen.greatest in ("NaN", "Infinity") or seen.least == "-Infinity":
        return None
    # Use a scale other than the default only if the values need it.
    scale = _SCALE
    whole = DECIMAL_DIGITS_MAX - scale
    if seen.after + _SPARE_DIGITS_MIN > scale or seen.whole + _SPARE_DIGITS_MIN > whole:
        scale = seen.after + spare // 2
    return f"decimal({DECIMAL_DIGITS_MAX},{scale})"


async def with_fitting_decimals(
    wire: PostgresConnection, table: PostgresTable, export: SourceExport
) -> SourceExport:
    """Choose decimal types for the export's columns of type `UNBOUNDED`, by the table's current
    values.

    Raises `InvalidUsage` if no decimal holds a column's values.
    """
    bound = zip(export.schema.columns, bound_columns(table, export), strict=True)
    there = {
        column.name: (quote_name(found.name), arrayed)
        for column, found in bound
        if found is not None
        if (arrayed := column.type == f"array<{UNBOUNDED}>") or column.type == UNBOUNDED
    }
    if not there:
        return export
    # One scan of the table for all columns.
    parts = [_numbers_sql(name, arrayed) for name, arrayed in there.values()]
    (row,) = await wire.query(f"SELECT {', '.join(parts)} FROM {table.relation}")
    decimals = {}
    for place, name in enumerate(there):
        least, greatest, whole, after = row[4 * place : 4 * place + 4]
        seen = SeenNumbers(least or "", greatest or "", number_of(whole), number_of(after))
        decimal = fitting_decimal(seen)
        if decimal is None:
            raise InvalidUsage(
                f"no decimal type holds the values of column {name} of {table.name} (from "
                f"{seen.least} to {seen.greatest}, with {seen.after} digits after the decimal "
                "point): set numeric to string, leave the column out, or change the values"
            )
        decimals[name] = decimal
    columns = (
        msgspec.structs.replace(
            each, type=each.type.replace(UNBOUNDED, decimals.get(each.name, UNBOUNDED))
        )
        for each in export.schema.columns
    )
    return msgspec.structs.replace(export, schema=TableSchema(tuple(columns), export.schema.key))


def _numbers_sql(column: str, arrayed: bool) -> str:
    """Return the SQL expressions that compute a column's `SeenNumbers`."""

    def of_all(aggregate: str, value: str) -> str:
        if arrayed:
            value = f"(SELECT {aggregate}({value}) FROM unnest({column}) AS v)"
        return f"{aggregate}({value})"

    each = "v" if arrayed else column
    least, greatest = of_all("min", each), of_all("max", each)
    # A decimal needs no digit for a leading zero.
    whole = f"ltrim(split_part(greatest(abs({least}), abs({greatest}))::text, '.', 1), '0')"
    return (
        f"left({least}::text, {_TEXT_MAX}), left({greatest}::text, {_TEXT_MAX}), length({whole}),"
        f" {of_all('max', f'min_scale({each})')}"
    )
