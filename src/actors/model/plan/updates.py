"""Updates as Arrow tables: consolidation, time, and their IPC form.

An updates table has the user columns, then `TIME` and `DIFF` (int64), and `ERROR` only if it has
error updates. Rows compare bit by bit and null-safe, so a row is retracted by the same bits that
were inserted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from actors.model.plan import arrow_compute as pc
from actors.model.plan.ipc_bounds import (
    check_bounds,
    check_stream,
    check_values,
    message_bounds,
    repeats,
)
from actors.model.plan.schema import DIFF, ERROR, TIME, TableSchema
from actors.runtime.errors import MalformedFrame

SLICE_ROWS = 65_536
"""Number of rows of a large table to process at a time."""
FEW_ROWS = 256
"""Up to this many rows, Python sums equal rows faster than Arrow: 4.7 × for one row, 2.3 × for 256,
0.5 × for 5,000 (November 2026, four columns, medians of alternating runs)."""
SAMPLE_ROWS = 8_192
_OPENING_BYTES_MAX: Final = 16 * 1024


def to_ipc(table: pa.Table) -> bytes:
    """Encode a table as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


_END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""End of an Arrow IPC stream."""


def encode_stream_header(schema: pa.Schema) -> bytes:
    """Return the bytes with which an Arrow IPC stream of a schema starts."""
    return bytes(schema.serialize().to_pybytes())


def assemble_stream(header: bytes, batches: Iterable[pa.RecordBatch]) -> bytes:
    """Encode batches as one Arrow IPC stream, given the header for their schema. Cheaper than
    `to_ipc`, for few rows as well as for many."""
    return b"".join((header, *(batch.serialize() for batch in batches), _END))


_CONTINUES: Final = b"\xff\xff\xff\xff"
"""Start of every message of a stream."""


def from_ipc(data: bytes) -> pa.Table:
    """Decode the table in an IPC stream.

    Raises `MalformedFrame` if it is invalid or decodes to much more than its bytes.
    """
    # Most streams have one batch; decoding it directly costs a fraction of opening a stream.
    if isinstance(data, bytes) and (single := _single_batch(data)) is not None:
        return single
    try:
        check_stream(data)
        table = pa.ipc.open_stream(data).read_all()
        return check_values(table) if any(map(repeats, table.schema.types)) else table
    except (pa.ArrowException, EOFError, OSError, ValueError) as error:
        raise MalformedFrame(f"not an Arrow IPC stream: {error}") from None


def _single_batch(data: bytes) -> pa.Table | None:
    """Decode the table in a stream of one batch; None for any other bytes."""
    header = 8 + int.from_bytes(data[4:8], "little")
    if data[:4] != _CONTINUES or data[-8:] != _END or header > len(data):
        return None
    if header > _OPENING_BYTES_MAX:  # too large for the cache of schemas
        return None
    schema = _schema_of(data[:header])
    if schema is None:
        return None
    rest = pa.py_buffer(data).slice(header)
    try:
        message = pa.ipc.read_message(rest)
        if message.type != "record batch" or message.body is None:
            return None
        end = 8 + int.from_bytes(data[header + 4 : header + 8], "little") + message.body.size
        if end + len(_END) != rest.size:
            return None
        check_bounds(*message_bounds(message), len(data))
        return pa.Table.from_batches([pa.ipc.read_record_batch(message, schema)], schema)
    except (pa.ArrowException, EOFError, OSError, ValueError):
        return None


@functools.lru_cache(maxsize=256)
def _schema_of(header: bytes) -> pa.Schema | None:
    """Decode the schema at the start of a stream; None if it is invalid or takes several
    messages."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(header))
    except (pa.ArrowException, EOFError, OSError, ValueError):
        return None
    # Dictionaries have separate messages.
    return None if any(map(repeats, schema.types)) else schema


def empty_updates(schema: TableSchema) -> pa.Table:
    """Return an empty table of updates for a schema."""
    return schema.arrow_updates().empty_table()


def with_time(rows: pa.Table, time: int, diff: int) -> pa.Table:
    """Return rows as updates, all with the same time and diff."""
    count = rows.num_rows
    return rows.append_column(
        pa.field(TIME, pa.int64()), pa.repeat(pa.scalar(time, pa.int64()), count)
    ).append_column(pa.field(DIFF, pa.int64()), pa.repeat(pa.scalar(diff, pa.int64()), count))


def at_time(updates: pa.Table, time: int) -> pa.Table:
    """Assign the same time to all updates, which have none yet."""
    times = pa.repeat(pa.scalar(time, pa.int64()), updates.num_rows)
    return updates.append_column(pa.field(TIME, pa.int64()), times)


def error_update(schema: TableSchema, text: str, time: int, diff: int) -> pa.Table:
    """Return an error update: NULL columns, the text, a time and a diff."""
    shape = schema.arrow_updates().append(pa.field(ERROR, pa.string()))
    row = dict.fromkeys(schema.names) | {TIME: time, DIFF: diff, ERROR: text}
    return pa.Table.from_pylist([row], schema=shape)


def set_column(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the table with the values of one column replaced."""
    return table.set_column(table.schema.get_field_index(name), name, values)


def advance(updates: pa.Table, to: int) -> pa.Table:
    """Return the updates with times below `to` advanced to it."""
    return set_column(updates, TIME, pc.max_element_wise(updates[TIME], pa.scalar(to, pa.int64())))


def between(updates: pa.Table, lower: int, upper: int) -> pa.Table:
    """Return the updates with ``lower <= time < upper``."""
    times = updates[TIME]
    return updates.filter(
        pc.and_(
            pc.greater_equal(times, pa.scalar(lower, pa.int64())),
            pc.less(times, pa.scalar(upper, pa.int64())),
        )
    )


def negate(updates: pa.Table) -> pa.Table:
    """Return the updates with the sign of each diff reversed."""
    return set_column(updates, DIFF, pc.negate(updates[DIFF]))


def split_errors(updates: pa.Table) -> tuple[pa.Table, pa.Table | None]:
    """Return the ordinary updates (without the error column), and the error updates if there are
    any."""
    if ERROR not in updates.column_names:
        return updates, None
    held = pc.is_valid(updates[ERROR])
    errors = updates.filter(held)
    plain = updates.filter(pc.invert(held)).drop_columns([ERROR])
    return plain, errors if errors.num_rows else None


def concat(tables: Iterable[pa.Table], schema: pa.Schema) -> pa.Table:
    """Concatenate tables with the same columns, in any order, into a table with `schema`."""
    parts = [
        table if table.schema.equals(schema) else table.select(schema.names).cast(schema)
        for table in tables
    ]
    return pa.concat_tables(parts) if parts else schema.empty_table()


def iter_slices(updates: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows in slices to process at a time; nothing if there are no rows."""
    for start in range(0, updates.num_rows, SLICE_ROWS):
        yield updates.slice(start, SLICE_ROWS)


def _groupable(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_null(kind))


def consolidate(updates: pa.Table) -> pa.Table:
    """Sum the diffs of equal rows (at equal times if there is `TIME`) and drop zeros. Works for
    every column type; nested columns are processed row by row and are slower."""
    if updates.num_rows == 0:
        return updates
    names = [name for name in updates.column_names if name != DIFF]
    few = bool(names) and updates.num_rows <= FEW_ROWS
    if few and all(_plain(updates.schema.field(name).type) for name in names):
        return _sum_few(updates, names)
    if all(_groupable(updates.schema.field(name).type) for name in names):
        summed = _sum_groups(updates, names)
    else:
        summed = _sum_nested(updates, names)
    kept = summed.filter(pc.not_equal(summed[DIFF], pa.scalar(0, pa.int64())))
    return kept.select(updates.column_names).cast(updates.schema)


def consolidate_keyed(updates: pa.Table, key: Sequence[str]) -> pa.Table:
    """Consolidate updates of one time in which each value of the primary key has at most one row.
    Rows whose key has no retraction are passed through."""
    columns = set(updates.column_names)
    if len(key) != 1 or key[0] not in columns or updates.num_rows <= FEW_ROWS:
        return consolidate(updates)
    if not _found_by_value(updates.schema.field(key[0]).type):
        return consolidate(updates)
    # Most rows of a table never changed, and finding that out by one column costs a fraction of
    # summing whole rows.
    back = pc.less_equal(updates[DIFF], pa.scalar(0, pa.int64()))
    gone = updates[key[0]].filter(back).combine_chunks()
    moved = pc.is_in(updates[key[0]], value_set=gone)
    return pa.concat_tables([updates.filter(pc.invert(moved)), consolidate(updates.filter(moved))])


def _found_by_value(kind: pa.DataType) -> bool:
    """Return whether values of a type are equal exactly if their bits are, and Arrow finds them."""
    tests = (pa.types.is_integer, pa.types.is_string, pa.types.is_date, pa.types.is_timestamp)
    return any(test(kind) for test in tests)


def consolidate_if_smaller(updates: pa.Table) -> pa.Table:
    """Return the same updates, consolidated; many updates only if that makes them far fewer."""
    names = [name for name in updates.column_names if name != DIFF]
    rows = updates.num_rows
    plain = all(_groupable(updates.schema.field(n).type) for n in names)
    if rows <= FEW_ROWS or (plain and rows < SAMPLE_ROWS):
        return consolidate(updates)
    if not plain:
        return updates
    # Consolidating 100,000 distinct rows takes 16 × as long as the sample (November 2026).
    updates, size = updates.combine_chunks(), SAMPLE_ROWS
    # Dropping columns can make rows equal, so insertions and retractions of the same row cancel
    # out. Rows with the same time are adjacent, so a stretch of many rows is representative.
    sample = consolidate(updates.slice((rows - size) // 2, size))
    return consolidate(updates) if sample.num_rows * 2 <= size else updates


def comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column as values that are equal exactly if its bits are, and cheap to create in
    Python: floats as their bits, so that -0.0, 0.0 and every NaN differ and equal themselves; dates
    and timestamps as numbers; decimals as their bytes."""
    kind = _bits_type(column.type)
    if kind is None:
        return column
    return pa.chunked_array([chunk.view(kind) for chunk in column.chunks], kind)


def _bits_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type whose values are the bits of a type, also inside nested types; None if it is
    the same. Python has no times after year 9999, but Spark does."""
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        found = pa.struct([each.with_type(_bits_type(each.type) or each.type) for each in fields])
        return None if found == kind else found
    if pa.types.is_map(kind):
        key, item = _bits_type(kind.key_type), _bits_type(kind.item_type)
        return pa.map_(key or kind.key_type, item or kind.item_type) if key or item else None
    if pa.types.is_list(kind):
        inner = _bits_type(kind.value_type)
        return None if inner is None else pa.list_(kind.value_field.with_type(inner))
    if pa.types.is_float64(kind) or pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_float32(kind) or pa.types.is_date32(kind):
        return pa.int32()
    return pa.binary(16) if pa.types.is_decimal128(kind) else None


def _plain(kind: pa.DataType) -> bool:
    """Return whether Python values of a type, with floats as bits, are equal exactly if the bits
    are."""
    return any(test(kind) for test in _PLAIN)


_PLAIN: Final = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_boolean,
    pa.types.is_string,
    pa.types.is_date32,
    pa.types.is_timestamp,
    pa.types.is_decimal128,
)


def _values(column: pa.ChunkedArray) -> list[Any]:
    column = comparable(column)
    if column.null_count or not pa.types.is_integer(column.type):
        return list(column.to_pylist())
    return list(column.to_numpy().tolist())


def _sum_few(updates: pa.Table, names: Sequence[str]) -> pa.Table:
    """Sum the diffs of equal rows like `_sum_groups`, in a fraction of the time that Arrow's
    grouping needs to start."""
    diffs: list[int] = _values(updates[DIFF])
    sums: dict[tuple[Any, ...], int] = {}
    first: list[int] = []
    for index, key in enumerate(zip(*(_values(updates[name]) for name in names), strict=True)):
        if key in sums:
            sums[key] += diffs[index]
        else:
            sums[key] = diffs[index]
            first.append(index)
    if len(first) == updates.num_rows and all(diffs):
        return updates
    kept = [(index, diff) for index, diff in zip(first, sums.values(), strict=True) if diff]
    rows = updates.take(pa.array([index for index, _ in kept], pa.int64()))
    return set_column(rows, DIFF, pa.array([diff for _, diff in kept], pa.int64()))


def _sum_groups(updates: pa.Table, names: Sequence[str]) -> pa.Table:
    columns = {name: comparable(updates[name]) for name in names}
    keyed = pa.table([*columns.values(), updates[DIFF]], names=[*names, DIFF])
    grouped = keyed.group_by(list(names), use_threads=False).aggregate([(DIFF, "sum")])
    arrays = []
    for name in names:
        column = grouped[name]
        kind = updates.schema.field(name).type
        if _bits_type(kind) is not None:
            column = pa.chunked_array([chunk.view(kind) for chunk in column.chunks], kind)
        arrays.append(column)
    return pa.table([*arrays, grouped[f"{DIFF}_sum"]], names=[*names, DIFF])


def _sum_nested(updates: pa.Table, names: Sequence[str]) -> pa.Table:
    first: dict[str, int] = {}
    sums: dict[str, int] = {}
    rows = zip(*(comparable(updates[name]).to_pylist() for name in names), strict=True)
    for index, (row, diff) in enumerate(zip(rows, updates[DIFF].to_pylist(), strict=True)):
        key = repr(row)
        first.setdefault(key, index)
        sums[key] = sums.get(key, 0) + diff
    kept = updates.select(list(names)).take(pa.array(list(first.values()), pa.int64()))
    return kept.append_column(pa.field(DIFF, pa.int64()), pa.array(list(sums.values()), pa.int64()))


# -- results in pieces -----------------------------------------------------------------------------


class ResultPiece(msgspec.Struct, frozen=True, gc=False):
    """Rows of a result as an Arrow IPC stream. If `last`, nothing follows."""

    arrow: bytes
    rows: int
    last: bool


def pieces(
    batches: Iterator[pa.RecordBatch], header: bytes, bytes_max: int
) -> Iterator[ResultPiece]:
    """Yield a result in pieces, at least one, which may have no rows. A piece has at most
    `bytes_max` bytes, unless it is a single larger row."""
    gathered: list[pa.RecordBatch] = []
    size = rows = 0
    room = max(1, bytes_max - len(header) - _OVERHEAD)
    for batch in batches:
        for part in _cut(batch, room):
            bytes_ = part.nbytes + _OVERHEAD
            if gathered and size + bytes_ > room:
                yield ResultPiece(assemble_stream(header, gathered), rows, last=False)
                gathered, size, rows = [], 0, 0
            gathered.append(part)
            size += bytes_
            rows += part.num_rows
    yield ResultPiece(assemble_stream(header, gathered), rows, last=True)


_OVERHEAD = 1_024
"""Bytes of one batch in a stream in addition to its data."""


def _cut(batch: pa.RecordBatch, room: int) -> Iterator[pa.RecordBatch]:
    size = batch.nbytes + _OVERHEAD
    if size <= room or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _cut(batch.slice(0, half), room)
    yield from _cut(batch.slice(half), room)
