"""Peeks of a shard: its parts read one after another, in bounded memory.

A part may retract what another holds, so all of them are read before a row is told, unless none
of them retracts anything: then a limit without an order ends the reading. Only updates that the
peek wants are kept. They are gathered in memory, and beyond `HELD_BYTES_MAX` in a throw-away
arrangement on disk, whose rows then stream like those of an index.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import anyio
import pyarrow as pa
import pyarrow.compute as pc

from actors.arrangement import Arrangement
from actors.arrangement.hashing import Hashes, check_key_type
from actors.arrangement.reading import ROWS_AT_ONCE
from actors.compute.keys import select_keys
from actors.compute.peeks import Contents, Wish
from actors.compute.stash import Stash
from actors.errors import InvalidUsage
from actors.kernel import Clock
from actors.persist import Part, PersistClient
from actors.plan.schema import DIFF, ERROR, TIME, Schema
from actors.plan.updates import between, consolidate, set_column
from actors.progress import Time
from actors.protocol.compute import Peek, PeekError, PeekRows, PeekStashed, SourceImport

HELD_BYTES_MAX: Final = 8 << 20
"""Of one peek's updates in memory."""


class Gathered:
    """Updates of a shard that a peek wants, at the one time that it reads. Blocking."""

    def __init__(self, schema: Schema, time: Time, wish: Wish, place: Path) -> None:
        self._schema = schema
        self._time = time
        self._wish = wish
        self._place = place
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._spilled: Arrangement | None = None
        self.weight = 0
        """Of the rows that were kept."""

    def add(self, updates: pa.Table) -> None:
        """Takes what is wanted of a part. Raises `StoreFull`, `StorageError`."""
        for start in range(0, updates.num_rows, ROWS_AT_ONCE):
            kept = self._wanted(updates.slice(start, ROWS_AT_ONCE))
            if kept.num_rows:
                self._held.append(kept)
                self.weight += pc.sum(kept[DIFF]).as_py()
                self._held_bytes += kept.nbytes
            if self._held_bytes > HELD_BYTES_MAX:
                self._spill()

    def _wanted(self, updates: pa.Table) -> pa.Table:
        updates = between(updates, 0, self._time + 1)
        errors: pa.Table | None = None
        if ERROR in updates.column_names:
            errors = updates.filter(pc.is_valid(updates[ERROR]))
            updates = updates.filter(pc.is_null(updates[ERROR])).drop_columns([ERROR])
        if self._wish.keys is not None:
            updates = select_keys(updates, self._wish.keys)
        updates = self._wish.filter.passing(updates)
        if errors is not None and errors.num_rows:
            updates = pa.concat_tables([updates, errors], promote_options="default")
        return updates

    def _spill(self) -> None:
        if self._spilled is None:
            self._spilled = Arrangement(self._place, self._schema, _hashable(self._schema))
        held = pa.concat_tables(self._held, promote_options="default")
        times = pa.repeat(pa.scalar(0, pa.int64()), held.num_rows)
        self._spilled.fill(set_column(held, TIME, times))
        self._held, self._held_bytes = [], 0

    def contents(self) -> Contents:
        """All that was added, summed."""
        if self._spilled is None:
            return _Held(self._held, self._schema)
        if self._held:
            self._spill()
        self._spilled.insert(self._schema.arrow_updates().empty_table(), 1)
        return self._spilled.view(1)

    def close(self) -> None:
        """Removes what was spilled. What is being read stays good."""
        if self._spilled is not None:
            self._spilled.close(remove=True)
            shutil.rmtree(self._place, ignore_errors=True)


class _Held:
    """Updates in memory as `Contents`."""

    def __init__(self, tables: list[pa.Table], schema: Schema) -> None:
        self._tables = tables
        shape = schema.arrow_updates()
        self._rows = shape.remove(shape.get_field_index(TIME))

    def errors(self) -> pa.Table:
        shape = pa.schema([pa.field(ERROR, pa.string()), pa.field(DIFF, pa.int64())])
        found = [
            table.filter(pc.is_valid(table[ERROR])).select([ERROR, DIFF])
            for table in self._tables
            if ERROR in table.column_names
        ]
        return consolidate(pa.concat_tables(found)) if found else shape.empty_table()

    def rows(self, wanted: Hashes | None = None) -> Iterator[pa.RecordBatch]:
        found = [
            table.filter(pc.is_null(table[ERROR])) if ERROR in table.column_names else table
            for table in self._tables
        ]
        if found:
            names = self._rows.names
            rows = pa.concat_tables([table.select(names).cast(self._rows) for table in found])
            yield from consolidate(rows).to_batches(max_chunksize=ROWS_AT_ONCE)


def _hashable(schema: Schema) -> tuple[str, ...]:
    """Columns to spread the rows by."""
    names = []
    for field in schema.arrow():
        try:
            check_key_type(field.name, field.type)
        except InvalidUsage:
            continue
        names.append(field.name)
    return tuple(names)


def _enough(peek: Peek, parts: Sequence[Part]) -> int | None:
    """So many rows are all that is needed; None: all of them are."""
    wanted = peek.finishing
    if wanted is None or wanted.limit is None or wanted.order_by:
        return None
    if any(part.retracts or part.has_errors for part in parts):
        return None
    return wanted.limit + wanted.offset


async def shard_answer(
    persist: PersistClient,
    clock: Clock,
    stash: Stash,
    source: SourceImport,
    peek: Peek,
    limits: tuple[int, int],
    reader_id: str,
    place: Path,
) -> PeekRows | PeekStashed | PeekError:
    """Rows of a shard at the peek's time; waits until that time is sealed.

    `reader_id` names the lease and must be fresh, `place` a folder that may be made. `limits`:
    bytes of a response, and of what goes into it before the stash is used. Raises as
    `peeks.index_answer` does, and what persist raises.
    """
    wish = Wish(source.schema, peek)
    gathered = Gathered(source.schema, peek.time, wish, place)
    bytes_max, piece_bytes = limits
    try:
        reader = await persist.open_reader(source.shard, reader_id)
        try:
            parts, _ = await reader.snapshot(peek.time)
            enough = _enough(peek, parts)
            for part in parts:
                if enough is not None and gathered.weight >= enough:
                    break
                updates = await persist.fetch(part, source.schema)
                await clock.run_blocking(lambda: gathered.add(updates))  # noqa: B023
                reader.release([part.key])
        finally:
            with anyio.CancelScope(shield=True):
                await reader.close()
        contents = await clock.run_blocking(gathered.contents)
        return await stash.answer(wish.answer(contents, None, piece_bytes), bytes_max)
    finally:
        with anyio.CancelScope(shield=True):
            await clock.run_blocking(gathered.close)
