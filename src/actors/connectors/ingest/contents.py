"""Converts upserts of an export to updates, using its contents by key to find the old rows.

Theory of operation. The changes before one mark are concatenated in order. For each key, only the
first and the last row matter. The first says whether the key had a row before (`keys_to_find`; the
caller looks these rows up), and the last is the row now. So the updates are: retract every row
found, and insert every last row whose operation is not `UpsertOp.DELETED`. Everything is computed
on whole columns.

`KeyedContents` holds the old rows. It is an arrangement in scratch that follows the rows
*received*, not the durable ones: it is loaded once with the durable and the staged rows, and fed
every later piece. So an upsert finds its old row even if the batch with that row is not durable
yet. It is a cache for the life of one task; after a failure the next task loads it again.

The arrangement's times are the numbers of the pieces. Blocking work runs in the clock's threads,
one call at a time.

Invariants: `resolve` returns no key twice with the same sign. Applied to contents with at most one
row per key, it leaves at most one row per key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.connectors.sources.source import KEPT, OP, UpsertOp
from actors.durable.arrangement.arrangement import Arrangement, ArrangementStatistics
from actors.model.plan.schema import DIFF, TIME, TableSchema
from actors.model.plan.updates import at_time, consolidate
from actors.runtime.errors import CorruptData, RemoteProtocolError
from actors.runtime.kernel import ActorClock

MAINTAIN_EVERY = 16
"""Number of pieces between two merges of the arrangement's runs."""
_PLACE: Final = "__place"
_KEPT_TYPE: Final = pa.list_(pa.int16())

# -- upserts ---------------------------------------------------------------------------------------


def joined(schema: TableSchema, pieces: Iterable[pa.Table]) -> pa.Table:
    """Concatenate pieces of changes in order, with all columns of changes."""
    shape = pa.schema([*schema.arrow(), pa.field(OP, pa.int8()), pa.field(KEPT, _KEPT_TYPE)])
    tables = []
    for piece in pieces:
        if KEPT not in piece.column_names:
            piece = piece.append_column(KEPT, pa.nulls(piece.num_rows, _KEPT_TYPE))
        tables.append(piece.select(shape.names).cast(shape))
    return pa.concat_tables(tables) if tables else shape.empty_table()


def keys_to_find(schema: TableSchema, changes: pa.Table) -> pa.Table:
    """Return the distinct keys whose old rows must be looked up. All other keys have no row before
    the changes."""
    first, _ = _first_and_last(schema, changes)
    ops = changes[OP].combine_chunks().take(pa.array(first))
    known = pc.is_in(ops, pa.array([UpsertOp.INSERTED, UpsertOp.MOVED], pa.int8()))
    rows = changes.select(schema.key).take(pa.array(first))
    return rows.filter(pc.invert(known))


def resolve(schema: TableSchema, changes: pa.Table, found: pa.Table) -> pa.Table:
    """Return the updates (the schema's columns, then `DIFF`) that these changes, in the form of
    `joined`, amount to.

    `found` are the rows of `keys_to_find` before the changes. Raises `RemoteProtocolError` if a
    change keeps a value of a row that does not exist.
    """
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
    """Return the positions of each key's first and last row."""
    table = changes.select(schema.key).append_column(_PLACE, pa.array(np.arange(len(changes))))
    groups = table.group_by(list(schema.key), use_threads=False).aggregate(
        [(_PLACE, "min"), (_PLACE, "max")]
    )
    return groups[f"{_PLACE}_min"].to_numpy(), groups[f"{_PLACE}_max"].to_numpy()


def _signed(rows: pa.Table, diff: int) -> pa.Table:
    return rows.append_column(DIFF, pa.array(np.full(rows.num_rows, diff, np.int64)))


def _with_kept(schema: TableSchema, changes: pa.Table, found: pa.Table, last: Any) -> pa.Table:
    """Return the final rows, where some changes keep values of old rows."""
    width, count = len(schema.columns), changes.num_rows
    keys = _keys(schema, changes)
    # A row is represented by the positions of its columns' values, in the changes or, after those,
    # in `found`. Only keys and positions become Python objects; values stay in Arrow.
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
                    f"a change keeps values of row {key}, which does not exist"
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


# -- contents by key -------------------------------------------------------------------------------


class KeyedContents:
    """The current rows of one export, by key. Call `load` first."""

    def __init__(
        self, export: str, schema: TableSchema, directory: Path, clock: ActorClock
    ) -> None:
        self._export = export
        self._schema = schema
        self._directory = directory
        self._clock = clock
        self._held: Arrangement | None = None
        """None until loaded, and after `close`."""
        self._pieces = 0
        """Number of pieces so far; the next piece's time in the arrangement."""

    async def load(self, pieces: AsyncIterator[pa.Table]) -> None:
        """Load these updates. Their times are ignored."""
        run = self._clock.run_blocking
        made = await run(lambda: Arrangement(self._directory, self._schema, self._schema.key))
        async for piece in pieces:
            await run(lambda: made.fill(self._timed(piece, 0)))  # noqa: B023 (awaited here)
        await run(lambda: self._begin(made))

    def _begin(self, made: Arrangement) -> None:
        made.insert(self._schema.arrow_updates().empty_table(), 1)
        made.maintain()
        self._pieces = 1
        self._held = made

    async def feed(self, updates: pa.Table) -> None:
        """Add a piece of changes."""
        await self._clock.run_blocking(lambda: self._feed(updates))

    def _feed(self, updates: pa.Table) -> None:
        held = self._held
        assert held is not None, "load it first"
        held.insert(self._timed(updates, self._pieces), self._pieces + 1)
        self._pieces += 1
        # Only the newest contents are ever looked up.
        held.allow_compaction(self._pieces - 1)
        if self._pieces % MAINTAIN_EVERY == 0:
            held.maintain()

    def _timed(self, updates: pa.Table, time: int) -> pa.Table:
        plain = updates.select([*self._schema.names, DIFF])
        return at_time(plain, time).select([*self._schema.names, TIME, DIFF])

    async def changes(self, pieces: Sequence[pa.Table]) -> pa.Table:
        """Convert upserts to updates (the schema's columns and `DIFF`), and add these to the
        contents.

        Raises `CorruptData` if a key has more than one row.
        """
        return await self._clock.run_blocking(lambda: self._changes(pieces))

    def _changes(self, pieces: Sequence[pa.Table]) -> pa.Table:
        changes = joined(self._schema, pieces)
        updates = resolve(self._schema, changes, self._find(keys_to_find(self._schema, changes)))
        updates = consolidate(updates)
        # Added before they are durable, because the next upserts must find these rows.
        self._feed(updates)
        return updates

    def _find(self, keys: pa.Table) -> pa.Table:
        held = self._held
        assert held is not None, "load it first"
        if not keys.num_rows:
            return self._schema.arrow().empty_table()
        rows = consolidate(held.lookup(keys.combine_chunks(), held.upper).drop_columns([TIME]))
        names = list(self._schema.key)
        # Join only keys and row numbers: Arrow's joins do not support lists, even in output
        # columns.
        placed = rows.select(names).append_column(_PLACE, pa.array(np.arange(rows.num_rows)))
        there = rows.take(placed.join(keys, keys=names, join_type="left semi")[_PLACE])
        if there.num_rows and (
            pc.min_max(there[DIFF])["min"].as_py() != 1
            or pc.min_max(there[DIFF])["max"].as_py() != 1
            or there.group_by(names).aggregate([]).num_rows != there.num_rows
        ):
            raise CorruptData(
                f"export {self._export} has several rows with the same key ({', '.join(names)}): "
                "drop its table and add it to the source again",
                determinate=True,
            )
        return there.drop_columns([DIFF])

    def statistics(self) -> ArrangementStatistics | None:
        """Return the arrangement's size; None before it is loaded."""
        return None if self._held is None else self._held.statistics()

    async def clear(self) -> None:
        """Remove all rows."""
        await self.close()
        await self.load(_nothing())

    async def close(self) -> None:
        """Remove the arrangement's files. May be called twice."""
        held, self._held = self._held, None
        if held is not None:
            await self._clock.run_blocking(lambda: held.close(remove=True))


async def _nothing() -> AsyncIterator[pa.Table]:
    pieces: tuple[pa.Table, ...] = ()
    for piece in pieces:
        yield piece
