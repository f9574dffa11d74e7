"""Answering peeks: rows at one time from an arrangement or a shard, as Arrow IPC.

The rows of a collection at `t` are its updates with ``time <= t``, summed. An error update
present at `t` is the answer instead (`ViewInError`: error or correct, never wrong), and so is a
negative sum (`Corrupt`: invalid data). Keys compare null-safe, all NaNs equal, -0.0 equal 0.0;
they are brought to the column's type first, and one that does not fit is the caller's error.

Everything here is a function of its arguments; `index_rows` and `finish` block and run in a
thread.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import anyio
import pyarrow as pa
import pyarrow.compute as pc

from actors.arrangement.arrangement import Arrangement
from actors.errors import Corrupt, InvalidUsage, ViewInError, to_wire
from actors.plan.schema import DIFF, ERROR, Schema
from actors.plan.updates import between, consolidate, from_ipc, to_ipc
from actors.progress import Time
from actors.protocol.compute import Peek, PeekError, PeekRows, SourceImport

if TYPE_CHECKING:
    from actors.kernel import Clock
    from actors.persist import PersistClient


def chosen_worker(name: str, count: int) -> int:
    """The worker that does what only one must do; the same in every process."""
    return zlib.crc32(name.encode()) % count


def error_of(error: Exception) -> PeekError:
    """A failure as the answer to a peek."""
    code, text, _ = to_wire(error)
    return PeekError(code, text)


def no_rows(schema: Schema) -> PeekRows:
    """The answer of a worker that has no part in the peek."""
    return PeekRows(to_ipc(schema.arrow().append(pa.field(DIFF, pa.int64())).empty_table()))


def index_rows(arrangement: Arrangement, peek: Peek, bytes_max: int) -> PeekRows:
    """Rows of one worker's partition at the peek's time. Blocking.

    Raises `ViewInError`, `Corrupt`, `InvalidUsage`, `ReadBelowSince` and `Closed` (the
    arrangement was replaced meanwhile).
    """
    schema = arrangement.schema
    keys = wanted_keys(schema, peek)
    if keys is not None and peek.key_columns == arrangement.key:
        updates = arrangement.lookup(keys, peek.time + 1)
    else:
        updates = arrangement.scan(peek.time + 1)
    return finish([updates], schema, keys, bytes_max)


async def shard_rows(
    persist: PersistClient,
    clock: Clock,
    source: SourceImport,
    peek: Peek,
    bytes_max: int,
    reader_id: str,
) -> PeekRows:
    """Rows of a shard at the peek's time; waits until that time is sealed.

    `reader_id` names the lease and must be fresh. Raises as `index_rows` does, and what persist
    raises.
    """
    keys = wanted_keys(source.schema, peek)
    reader = await persist.open_reader(source.shard, reader_id)
    try:
        parts, _ = await reader.snapshot(peek.time)
        tables: list[pa.Table] = []
        for part in parts:
            if part.time_min > peek.time:
                continue
            updates = await persist.fetch(part, source.schema)
            tables.append(_below(updates, peek.time, keys))
    finally:
        with anyio.CancelScope(shield=True):
            await reader.close()
    return await clock.run_blocking(lambda: finish(tables, source.schema, keys, bytes_max))


def _below(updates: pa.Table, time: Time, keys: pa.Table | None) -> pa.Table:
    """What of a part can matter, so that a large part is not kept whole."""
    updates = between(updates, 0, time + 1)
    if keys is None:
        return updates
    wanted = select_keys(updates, keys)
    if ERROR not in updates.column_names:
        return wanted
    return pa.concat_tables([wanted.filter(pc.is_null(wanted[ERROR])), _errors(updates)])


def _errors(updates: pa.Table) -> pa.Table:
    return updates.filter(pc.is_valid(updates[ERROR]))


def finish(
    tables: list[pa.Table], schema: Schema, keys: pa.Table | None, bytes_max: int
) -> PeekRows:
    """Sums updates (all at times that count) to rows and packs them. Blocking."""
    columns = [*schema.names, DIFF]
    errors = [
        _errors(table).select([ERROR, DIFF]) for table in tables if ERROR in table.column_names
    ]
    if errors:
        _raise_error(pa.concat_tables(errors))
    healthy = [
        table.filter(pc.is_null(table[ERROR])) if ERROR in table.column_names else table
        for table in tables
    ]
    kind = schema.arrow().append(pa.field(DIFF, pa.int64()))
    parts = [table.select(columns).cast(kind) for table in healthy]
    rows = pa.concat_tables(parts) if parts else kind.empty_table()
    if keys is not None:
        rows = select_keys(rows, keys)
    rows = consolidate(rows)
    _check_positive(rows)
    arrow = to_ipc(rows)
    if len(arrow) > bytes_max:
        raise InvalidUsage(
            f"the result takes {len(arrow)} bytes, more than result_bytes_max ({bytes_max}); "
            "read by key, or subscribe"
        )
    return PeekRows(arrow)


def _raise_error(errors: pa.Table) -> None:
    if errors.num_rows == 0:
        return
    summed = consolidate(errors)
    for text, diff in zip(summed[ERROR].to_pylist(), summed[DIFF].to_pylist(), strict=True):
        if diff < 0:
            raise Corrupt(f"invalid data: the error {text!r} sums to {diff}", determinate=True)
        raise ViewInError(text)


def _check_positive(rows: pa.Table) -> None:
    if rows.num_rows and pc.min(rows[DIFF]).as_py() < 0:
        bad = rows.filter(pc.less(rows[DIFF], pa.scalar(0, pa.int64()))).slice(0, 1)
        raise Corrupt(
            f"invalid data: a row sums to less than 0: {bad.to_pylist()[0]}", determinate=True
        )


# -- keys --------------------------------------------------------------------------------------


def wanted_keys(schema: Schema, peek: Peek) -> pa.Table | None:
    """The peek's keys as columns of the schema's own names and types; None: no keys.

    Raises `InvalidUsage` when a column is unknown, or a value does not fit it.
    """
    if peek.keys is None:
        return None
    given = from_ipc(peek.keys)
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


def select_keys(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """Rows whose key columns equal a row of `keys`."""
    mask: Any = None
    for name in keys.column_names:
        found = _is_in(rows[name], keys[name])
        mask = found if mask is None else pc.and_(mask, found)
    rows = rows.filter(mask)
    if keys.num_columns > 1 and keys.num_rows > 1:
        # Each column alone matched some key; now all columns must match the same one.
        wanted = set(_tuples(keys))
        names = keys.column_names
        rows = rows.filter(
            pa.array([row in wanted for row in _tuples(rows.select(names))], pa.bool_())
        )
    return rows


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Floats with one zero and one NaN."""
    if not pa.types.is_floating(column.type):
        return column
    column = pc.add(column, pa.scalar(0.0, column.type))
    return pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), column)


def _is_in(values: pa.ChunkedArray, wanted: pa.ChunkedArray) -> Any:
    if pa.types.is_nested(values.type) or pa.types.is_null(values.type):
        texts = {repr(value) for value in wanted.to_pylist()}
        return pa.array([repr(value) in texts for value in values.to_pylist()], pa.bool_())
    return pc.is_in(_plain(values), value_set=_plain(wanted).combine_chunks())


def _tuples(table: pa.Table) -> list[str]:
    columns = [_plain(column).to_pylist() for column in table.columns]
    return [repr(row) for row in zip(*columns, strict=True)]
