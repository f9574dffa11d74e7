"""Fits texts to CHAR(n) and VARCHAR(n), also inside nested Arrow arrays. Pure.

In Spark, CHAR(n) and VARCHAR(n) are texts whose length is part of the type. `fit_texts` does what
Spark does when a row is written: blanks beyond n are cut off, anything else beyond n is refused,
and a CHAR is padded with blanks. So 'ab' and 'ab  ' are the same CHAR(4).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from actors.model.plan import arrow_compute as pc
from actors.model.plan.schema import TableSchema, inner_types, text_limit


class TextTooLong(pa.ArrowInvalid):  # type: ignore[misc]
    """A text is longer than its CHAR(n) or VARCHAR(n)."""


def children_of(values: pa.Array) -> list[pa.Array]:
    """Return the arrays inside a list (elements), a map (keys, items) or a struct (fields)."""
    if pa.types.is_struct(values.type):
        return list(values.flatten())
    offsets = values.offsets
    first, last = (offsets[0].as_py(), offsets[-1].as_py()) if len(values) else (0, 0)
    inside = [values.keys, values.items] if pa.types.is_map(values.type) else [values.values]
    # The arrays inside a slice still have all values; the offsets say which belong to the slice.
    return [each.slice(first, last - first) for each in inside]


def with_children(values: pa.Array, children: Sequence[pa.Array], type_: pa.DataType) -> pa.Array:
    """Return a nested array with the NULLs and lengths of `values` and with other arrays inside."""
    mask = values.is_null() if values.null_count else None
    if pa.types.is_struct(type_):
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=mask)
    offsets = pa.array([0], pa.int32())
    if len(values):
        # The offsets of a slice do not start at 0.
        offsets = pc.subtract(values.offsets, values.offsets[0]).cast(pa.int32())
    if pa.types.is_map(type_):
        return pa.MapArray.from_arrays(offsets, *children, type=type_, mask=mask)
    return pa.ListArray.from_arrays(offsets, *children, type=type_, mask=mask)


def fit_texts(values: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """Return values of the Spark type `kind` as Spark would store them: every CHAR(n) is padded
    with blanks, and blanks beyond n are cut off. Raises `TextTooLong`."""
    if "char(" not in kind.lower():
        return values
    chunks = [_fit_array(chunk, kind) for chunk in values.chunks]
    return pa.chunked_array(chunks, values.type)


def fit_texts_of(rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Apply `fit_texts` to rows whose columns have the names of the schema. Raises `TextTooLong`,
    which names the column."""
    for column in schema.columns:
        try:
            fitted = fit_texts(rows[column.name], column.type)
        except TextTooLong as error:
            raise TextTooLong(f"column {column.name}: {error}") from None
        if fitted is not rows[column.name]:
            place = rows.column_names.index(column.name)
            rows = rows.set_column(place, rows.schema.field(place), fitted)
    return rows


def _fit_array(values: pa.Array, kind: str) -> pa.Array:
    limit = text_limit(kind)
    if limit is not None:
        return _fit_text(values, kind, *limit)
    inner = inner_types(kind)
    if not inner:
        return values
    pairs = zip(children_of(values), inner, strict=True)
    return with_children(values, [_fit_array(*pair) for pair in pairs], values.type)


def _fit_text(values: pa.Array, kind: str, limit: int, padded: bool) -> pa.Array:
    long = pc.greater(pc.utf8_length(values), limit)
    if pc.any(long).as_py():
        rest = pc.utf8_rtrim(pc.utf8_slice_codeunits(values, limit), " ")
        if pc.any(pc.not_equal(rest, "")).as_py():
            raise TextTooLong(f"longer than {kind}")
        values = pc.if_else(long, pc.utf8_slice_codeunits(values, 0, limit), values)
    return pc.utf8_rpad(values, limit, " ") if padded else values
