"""The keys of a peek: brought to the columns' types, looked up, compared.

Keys compare null-safe, all NaNs equal, -0.0 equal 0.0. A value that does not fit its column is
the caller's error. The order in which columns are named does not matter.
"""

from __future__ import annotations

import functools
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.arrangement.hashing import Hashes, hash_columns
from actors.errors import InvalidUsage, PenstockError
from actors.plan.schema import Schema
from actors.plan.updates import from_ipc
from actors.protocol.compute import Peek

_FEW_BYTES_MAX: Final = 4096

R = TypeVar("R", pa.Table, pa.RecordBatch)


def given_keys(data: bytes) -> pa.Table:
    """Keys as they were sent. Raises `InvalidUsage` unless they are an Arrow IPC stream."""
    try:
        return from_ipc(data)
    except PenstockError as error:
        raise InvalidUsage(f"the keys of a read: {error}") from None


def wanted_keys(schema: Schema, peek: Peek) -> pa.Table | None:
    """The peek's keys as columns of the schema's own names and types; None: no keys.

    Raises `InvalidUsage` when a column is unknown, or a value does not fit it.
    """
    if peek.keys is None:
        return None
    given = given_keys(peek.keys)
    if given.num_columns != len(peek.key_columns):
        raise InvalidUsage(
            f"{given.num_columns} key columns were sent for {len(peek.key_columns)} named ones"
        )
    if not peek.key_columns:
        raise InvalidUsage("a read by key names at least one column")
    held = schema.arrow()
    columns: list[Any] = []
    for name, values in zip(peek.key_columns, given.columns, strict=True):
        if name not in schema.names:
            raise InvalidUsage(f"key column {name} is not one of {', '.join(schema.names)}")
        kind = held.field(name).type
        try:
            columns.append(values.cast(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise InvalidUsage(
                f"a key value does not fit column {name} ({kind}): {error}"
            ) from None
    return pa.table(columns, names=list(peek.key_columns))


def narrowed(key: tuple[str, ...], keys: pa.Table | None) -> Hashes | None:
    """Hashes of an index on `key` under which the rows of these keys stand, ascending and
    distinct; None: under any."""
    if keys is None or not key or not set(key) <= set(keys.column_names):
        return None
    return np.unique(hash_columns([keys[name] for name in key], keys.num_rows))


@functools.lru_cache(maxsize=256)
def _first_row(data: bytes) -> tuple[tuple[pa.DataType, ...], tuple[Any, ...]] | None:
    """Types and values, if there is just one row; the same for every worker."""
    try:
        with pa.ipc.open_stream(data) as stream:
            batch = stream.read_next_batch()
            if batch.num_rows != 1 or stream.schema.metadata:
                return None
            for _ in stream:
                return None
    except (pa.ArrowException, StopIteration, OSError, ValueError):
        return None
    return tuple(batch.schema.types), tuple(column[0].as_py() for column in batch.columns)


def few_values(schema: Schema, key: tuple[str, ...], peek: Peek) -> list[Any] | None:
    """The values of `key` if the peek asks for one, on just these columns, of integers, booleans
    and text; else None."""
    data = peek.keys
    if data is None or len(data) > _FEW_BYTES_MAX or len(peek.key_columns) != len(key):
        return None
    row = _first_row(data)
    if row is None or len(row[0]) != len(key):
        return None
    kinds = dict(zip(peek.key_columns, row[0], strict=True))
    values = dict(zip(peek.key_columns, row[1], strict=True))
    held = _kinds(schema)
    if any(name not in kinds or held.get(name) != kinds[name] for name in key):
        return None
    return [values[name] for name in key]


@functools.lru_cache(maxsize=256)
def _kinds(schema: Schema) -> dict[str, pa.DataType]:
    """Columns of types whose Python values are equal just when the column's are."""
    return {
        field.name: field.type
        for field in schema.arrow()
        if pa.types.is_integer(field.type)
        or pa.types.is_boolean(field.type)
        or pa.types.is_string(field.type)
    }


def select_keys(rows: R, keys: pa.Table) -> R:
    """Rows whose key columns equal a row of `keys`."""
    mask: Any = None
    for name in keys.column_names:
        found = _is_in(rows.column(name), keys[name])
        mask = found if mask is None else pc.and_(mask, found)
    rows = rows.filter(mask)
    if keys.num_columns > 1 and keys.num_rows > 1 and rows.num_rows:
        # Each column alone matched some key; now all columns must match the same one.
        wanted = set(_tuples(keys))
        found = [row in wanted for row in _tuples(rows.select(keys.column_names))]
        rows = rows.filter(pa.array(found, pa.bool_()))
    return rows


def _plain(column: Any) -> Any:
    """Floats with one zero and one NaN."""
    if not pa.types.is_floating(column.type):
        return column
    column = pc.add(column, pa.scalar(0.0, column.type))
    return pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), column)


def _is_in(values: Any, wanted: pa.ChunkedArray) -> Any:
    if pa.types.is_nested(values.type) or pa.types.is_null(values.type):
        texts = {repr(value) for value in wanted.to_pylist()}
        return pa.array([repr(value) in texts for value in values.to_pylist()], pa.bool_())
    return pc.is_in(_plain(values), value_set=_plain(wanted).combine_chunks())


def _tuples(table: Any) -> list[str]:
    columns = [_plain(column).to_pylist() for column in table.columns]
    return [repr(row) for row in zip(*columns, strict=True)]
