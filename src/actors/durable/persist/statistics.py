"""Statistics of a part's columns for partition pruning: bounds and NULL counts, in few bytes. Pure.

A reader may skip a part whose statistics exclude all its rows (`part_filter.py`). So they must be
*sound*, not exact: for every value ``v`` of a column that is neither NULL nor NaN, ``low <= v <=
high`` in Spark's order. A bound of None says nothing. `nulls` is the exact number of NULLs, or
None.

Rules
- Values are in their stored form: a date as days, a timestamp as microseconds, a decimal as its
  unscaled number. All of these compare like integers. Text is UTF-8 and compares byte by byte, like
  binary.
- NaN is greater than every number and equal to itself, so a column that contains one has no `high`.
  -0.0 equals 0.0.
- Long text is truncated. A truncated lower bound is sound as it is; for an upper bound, the last
  byte is incremented, or the bound dropped if no byte can be incremented.
- There are no statistics for nested columns, for types whose comparison pads (``char``), and for
  inline parts and parts with error updates, which are always read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.plan.schema import TableSchema
from actors.runtime.threshold_probes import PART_STATISTICS

BOUND_BYTES_MAX: Final = 32
"""Maximum length of a text or binary bound."""
_INT64: Final = range(-(1 << 63), 1 << 63)

Value: TypeAlias = bool | int | float | bytes
"""A value in its stored form, as defined by the module's rules."""


class ColumnStatistics(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of one column of a part."""

    column: str
    nulls: int | None
    low: Value | None = None
    high: Value | None = None


_encoder = msgspec.msgpack.Encoder()


def trimmed(columns: Iterable[ColumnStatistics], bytes_max: int) -> tuple[ColumnStatistics, ...]:
    """Return as many columns as fit into `bytes_max`, in their order; the longest are left out
    first."""
    kept = [(column, len(_encoder.encode(column))) for column in columns]
    total = sum(size for _, size in kept)
    PART_STATISTICS.crossed(total > bytes_max)
    while total > bytes_max:
        longest = max(range(len(kept)), key=lambda at: kept[at][1])
        total -= kept.pop(longest)[1]
    return tuple(column for column, _ in kept)


def of_footer(
    footer: Any, kinds: pa.Schema, schema: TableSchema, bytes_max: int
) -> tuple[ColumnStatistics, ...]:
    """Return statistics from a Parquet file's footer (`pyarrow.parquet.FileMetaData`), by any
    writer.

    `kinds` are the file's columns. Columns whose types differ from the schema's have no statistics.
    """
    if bytes_max <= 0:
        return ()
    # The writer has computed these bounds anyway. Floats have no `high`, because a footer does not
    # say whether there are NaNs.
    wanted = {
        name: kind
        for name, kind in _plain(schema)
        if name in kinds.names and kinds.field(name).type == kind
    }
    found: dict[str, list[_Chunk]] = {name: [] for name in wanted}
    for group in range(footer.num_row_groups):
        chunks = footer.row_group(group)
        for at in range(chunks.num_columns):
            name = chunks.column(at).path_in_schema
            if name in wanted:
                found[name].append(_of_chunk(wanted[name], chunks.column(at)))
    together = (_together(name, wanted[name], chunks) for name, chunks in found.items() if chunks)
    return trimmed((column for column in together if column is not None), bytes_max)


def of_written(
    footer: Any, table: pa.Table, schema: TableSchema, bytes_max: int
) -> tuple[ColumnStatistics, ...]:
    """Return statistics of a table that was just written with this footer. For floats, they are
    computed from the table."""
    exact = {
        name: _of_floats(name, table[name])
        for name, kind in _plain(schema)
        if pa.types.is_floating(kind) and bytes_max > 0
    }
    columns = of_footer(footer, table.schema, schema, bytes_max)
    return trimmed((exact.get(column.column, column) for column in columns), bytes_max)


def _plain(schema: TableSchema) -> list[tuple[str, pa.DataType]]:
    """Return the columns whose order is the same in Parquet and Spark."""
    return [
        (column.name, field.type)
        for column, field in zip(schema.columns, schema.arrow(), strict=True)
        if has_bounds(column.type, field.type)
    ]


def has_bounds(text: str, kind: pa.DataType) -> bool:
    """Return whether a column of this type (as Spark's text, and Arrow's) has statistics."""
    nested = pa.types.is_nested(kind) or pa.types.is_null(kind)
    return not nested and not text.strip().lower().startswith("char")


class _Chunk(msgspec.Struct, frozen=True):
    """A column of a row group, with bounds as stored, not truncated."""

    values: int
    """Number of values, including NULLs."""
    nulls: int | None
    low: Value | None = None
    high: Value | None = None


def _of_chunk(kind: pa.DataType, chunk: Any) -> _Chunk:
    found = chunk.statistics
    if found is None:
        return _Chunk(chunk.num_values, None)
    nulls = found.null_count if found.has_null_count else None
    # Bounds of INT96 timestamps are not reliable in Parquet.
    if not found.has_min_max or chunk.physical_type == "INT96":
        return _Chunk(chunk.num_values, nulls)
    low, high = _stored(kind, found.min_raw), _stored(kind, found.max_raw)
    return _Chunk(chunk.num_values, nulls, low, high)


def _together(name: str, kind: pa.DataType, chunks: Sequence[_Chunk]) -> ColumnStatistics | None:
    """Merge the statistics of all row groups; None if nothing is known."""
    counts = [chunk.nulls for chunk in chunks if chunk.nulls is not None]
    nulls = sum(counts) if len(counts) == len(chunks) else None
    valued = [chunk for chunk in chunks if chunk.nulls != chunk.values]
    lows: list[Any] = [chunk.low for chunk in valued]
    highs: list[Any] = [chunk.high for chunk in valued]
    # One unknown bound makes the merged bound unknown.
    low = min(lows) if lows and None not in lows else None
    high = max(highs) if highs and None not in highs else None
    if nulls is None and low is None and high is None:
        return None
    return ColumnStatistics(name, nulls, lower_bound(low), upper_bound(high, kind))


def _stored(kind: pa.DataType, raw: Any) -> Value | None:
    """Convert a footer's value to the stored form; None for NaN."""
    if pa.types.is_decimal(kind) and isinstance(raw, bytes):
        raw = int.from_bytes(raw, "big", signed=True)
    elif isinstance(raw, str):
        raw = raw.encode()
    if isinstance(raw, float) and raw != raw:
        return None
    value: Value = raw
    return value


def _of_floats(name: str, values: pa.ChunkedArray) -> ColumnStatistics:
    bounds = pc.min_max(values)  # bounds of the numbers; NaN if there are none
    low, high = bounds["min"].as_py(), bounds["max"].as_py()
    if low is None or low != low:
        return ColumnStatistics(name, values.null_count)
    nan = pc.any(pc.is_nan(values)).as_py()
    return ColumnStatistics(name, values.null_count, low, None if nan else high)


def lower_bound(value: Value | None) -> Value | None:
    """Return a short value that is not greater; None if there is none."""
    if isinstance(value, bytes):
        return value[:BOUND_BYTES_MAX]
    # msgpack has no integers beyond 64 bits, but a decimal may be larger.
    return value if not isinstance(value, int) or value in _INT64 else None


def upper_bound(value: Value | None, kind: pa.DataType) -> Value | None:
    """Return a short value that is not less; None if there is none."""
    if pa.types.is_floating(kind):
        return None  # there may be NaNs, which are greater
    if isinstance(value, bytes) and len(value) > BOUND_BYTES_MAX:
        kept = value[:BOUND_BYTES_MAX].rstrip(b"\xff")
        return kept[:-1] + bytes((kept[-1] + 1,)) if kept else None
    return lower_bound(value)


def column_of(columns: Sequence[ColumnStatistics], name: str) -> ColumnStatistics | None:
    """Return the statistics of a column; None if there are none."""
    return next((column for column in columns if column.column == name), None)
