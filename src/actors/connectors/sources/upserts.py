"""Converts upserts into updates, for callers of `sources.source.Source`. Pure.

Theory of operation. The changes of one mark are concatenated in order; of each key only the first
and the last row count. The first tells whether the key had a row before (`keys_to_find`: the caller
looks these rows up); the last tells the row now. So the updates are: every row found, retracted;
every last row that is none of `UpsertOp.DELETED`, inserted. All of it is columns at a time.

Invariants: `resolve` gives no key twice with the same sign; applied to contents in which every key
has at most one row, it leaves every key with at most one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.connectors.sources.source import KEPT, OP, UpsertOp
from actors.errors import RemoteProtocolError
from actors.plan.schema import DIFF, TableSchema

_PLACE: Final = "__place"
_KEPT_TYPE: Final = pa.list_(pa.int16())


def joined(schema: TableSchema, pieces: Iterable[pa.Table]) -> pa.Table:
    """Concatenate pieces of changes, in order."""
    shape = pa.schema([*schema.arrow(), pa.field(OP, pa.int8()), pa.field(KEPT, _KEPT_TYPE)])
    tables = []
    for piece in pieces:
        if KEPT not in piece.column_names:
            piece = piece.append_column(KEPT, pa.nulls(piece.num_rows, _KEPT_TYPE))
        tables.append(piece.select(shape.names).cast(shape))
    return pa.concat_tables(tables) if tables else shape.empty_table()


def keys_to_find(schema: TableSchema, changes: pa.Table) -> pa.Table:
    """Return the distinct keys whose rows must be looked up in the contents before the changes; all
    others have no row there."""
    first, _ = _first_and_last(schema, changes)
    ops = changes[OP].combine_chunks().take(pa.array(first))
    known = pc.is_in(ops, pa.array([UpsertOp.INSERTED, UpsertOp.MOVED], pa.int8()))
    rows = changes.select(schema.key).take(pa.array(first))
    return rows.filter(pc.invert(known))


def resolve(schema: TableSchema, changes: pa.Table, found: pa.Table) -> pa.Table:
    """Return the updates (the schema's columns, then `DIFF`) of the changes (`joined`). `found`:
    the rows of `keys_to_find`, before the changes. Raises `RemoteProtocolError` when a value is to
    be kept of a row that is not there."""
    found = found.select(schema.names).cast(schema.arrow())
    _, last = _first_and_last(schema, changes)
    kept = changes[KEPT].is_valid().to_numpy()
    if kept.any():
        added = _with_kept(schema, changes, found, last)
    else:
        ops = changes[OP].to_numpy()
        added = changes.select(schema.names).take(pa.array(last[ops[last] != UpsertOp.DELETED]))
    return pa.concat_tables([_signed(found, -1), _signed(added, 1)])


def _first_and_last(schema: TableSchema, changes: pa.Table) -> tuple[Any, Any]:
    """Return the places of each key's first and last row."""
    table = changes.select(schema.key).append_column(_PLACE, pa.array(np.arange(len(changes))))
    groups = table.group_by(list(schema.key), use_threads=False).aggregate(
        [(_PLACE, "min"), (_PLACE, "max")]
    )
    return groups[f"{_PLACE}_min"].to_numpy(), groups[f"{_PLACE}_max"].to_numpy()


def _signed(rows: pa.Table, diff: int) -> pa.Table:
    return rows.append_column(DIFF, pa.array(np.full(rows.num_rows, diff, np.int64)))


def _with_kept(schema: TableSchema, changes: pa.Table, found: pa.Table, last: Any) -> pa.Table:
    """Return the rows at the end, where values are kept."""
    width, count = len(schema.columns), changes.num_rows
    keys = _keys(schema, changes)
    # Each row as the places of its columns' values: in the changes, or after them in `found`. Only
    # keys and places are Python objects; values stay in Arrow.
    rows: dict[tuple[Any, ...], list[int]] = {
        key: [count + place] * width for place, key in enumerate(_keys(schema, found))
    }
    ops, kept = changes[OP].to_pylist(), changes[KEPT].to_pylist()
    gone: list[int] | None = None
    for place, (key, op) in enumerate(zip(keys, ops, strict=True)):
        if op == UpsertOp.DELETED:
            gone = rows.pop(key, None)
            continue
        row = [place] * width
        if kept[place]:
            old = gone if op == UpsertOp.MOVED else rows.get(key)
            if old is None:
                raise RemoteProtocolError(
                    f"a change keeps values of the row {key}, which is not there"
                )
            for column in kept[place]:
                row[column] = old[column]
        rows[key] = row
    ended = [keys[place] for place in last.tolist()]
    stand = [rows[key] for key in ended if key in rows]
    places = np.array(stand, np.int64).reshape(-1, width)
    both = pa.concat_tables([changes.select(schema.names), found])
    columns = [both[name].take(pa.array(places[:, at])) for at, name in enumerate(schema.names)]
    return pa.table(columns, schema=schema.arrow())


def _keys(schema: TableSchema, rows: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(rows[name].to_pylist() for name in schema.key), strict=True))
