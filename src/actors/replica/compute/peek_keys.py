"""Casts, looks up and compares the keys of a peek.

Keys compare null-safe; all NaNs are equal, and -0.0 equals 0.0. The order of the named columns
does not matter.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.arrangement.hashing import Hashes, hash_columns, hash_values, is_exact_kind
from actors.model.plan.one_row import RowForm, form_of
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import from_ipc
from actors.model.protocol.compute import Peek
from actors.model.protocol.row_filter import R
from actors.runtime.errors import InvalidUsage, PenstockError
from actors.runtime.threshold_probes import POINT_KEYS

_FORMS: Final[dict[tuple[tuple[str, ...], int], RowForm]] = {}
"""Forms of integer keys read before, by the names of their columns and their length."""
_FORMS_MAX: Final = 256


def given_keys(data: bytes) -> pa.Table:
    """Return the keys sent. Raise `InvalidUsage` unless they are an Arrow IPC stream."""
    try:
        return from_ipc(data)
    except PenstockError as error:
        raise InvalidUsage(f"the keys of a read: {error}") from None


def wanted_keys(schema: TableSchema, peek: Peek) -> pa.Table | None:
    """Return the peek's keys as columns with the schema's names and types; None if it has none.

    Raise `InvalidUsage` for an unknown column, or a value that does not fit it.
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


def lookup_hashes(key: tuple[str, ...], keys: pa.Table | None) -> Hashes | None:
    """Return the hashes under which an index on `key` has the rows of these keys.

    They are ascending and distinct; None means any hash.
    """
    if keys is None or not key or not set(key) <= set(keys.column_names):
        return None
    return np.unique(hash_columns([keys[name] for name in key], keys.num_rows))


class OneKey(msgspec.Struct, frozen=True, gc=False):
    """A single key of integers, booleans and text: column types, values and hash."""

    types: tuple[pa.DataType, ...]
    values: tuple[Any, ...]
    hash: int


@functools.lru_cache(maxsize=256)
def _one_key(names: tuple[str, ...], data: bytes) -> OneKey | None:
    """Return the key of a stream with a single row of these types."""
    # Cached, and read by form, since all workers decode the same key.
    form = _FORMS.get((names, len(data)))
    if form is not None and (integers := form.read(data)) is not None:
        found = hash_values(integers)
        assert found is not None, "integers have a hash"
        return OneKey(form.types, integers, found)
    form = form_of(data)
    if form is not None and len(_FORMS) < _FORMS_MAX:
        _FORMS[names, len(data)] = form
    try:
        with pa.ipc.open_stream(data) as stream:
            batch = stream.read_next_batch()
            if batch.num_rows != 1 or not all(map(is_exact_kind, batch.schema.types)):
                return None
            for _ in stream:
                return None
    except (pa.ArrowException, StopIteration, OSError, ValueError):
        return None
    values = tuple(column[0].as_py() for column in batch.columns)
    hash_ = hash_values(values)
    return None if hash_ is None else OneKey(tuple(batch.schema.types), values, hash_)


def one_key(key: tuple[str, ...], types: tuple[pa.DataType, ...], peek: Peek) -> OneKey | None:
    """Return the peek's key if it is a single one on exactly the index's columns and types.

    The types must be those that `OneKey` supports.
    """
    data = peek.keys
    if data is None or peek.key_columns != key or POINT_KEYS.exceeded_by(len(data)):
        return None
    found = _one_key(peek.key_columns, data)
    return found if found is not None and found.types == types else None


def is_exact_integer_key(
    names: tuple[str, ...], types: tuple[pa.DataType, ...], data: bytes
) -> bool:
    """Return whether a stream of keys is one row of integers of exactly these types.

    Such keys need no cast. False means unknown.
    """
    if POINT_KEYS.exceeded_by(len(data)) or not all(map(pa.types.is_integer, types)):
        return False
    found = _one_key(names, data)
    return found is not None and found.types == types and None not in found.values


def select_keys(rows: R, keys: pa.Table) -> R:
    """Return the rows whose key columns equal a row of `keys`."""
    mask: Any = None
    for name in keys.column_names:
        found = _is_in(rows.column(name), keys[name])
        mask = found if mask is None else pc.and_(mask, found)
    rows = rows.filter(mask)
    if keys.num_columns > 1 and keys.num_rows > 1 and rows.num_rows:
        # Each column alone matches some key; all columns must match the same one.
        wanted = set(_tuples(keys))
        found = [row in wanted for row in _tuples(rows.select(keys.column_names))]
        rows = rows.filter(pa.array(found, pa.bool_()))
    return rows


def _plain(column: Any) -> Any:
    """Return floats with a single zero and a single NaN."""
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
