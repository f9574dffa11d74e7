"""The contents of an export by key, for looking up the old rows of upserts.

Theory of operation. An arrangement in scratch follows the rows *given*, not the durable ones: it is
loaded once, with the durable and the staged rows, and fed with every later piece. So an upsert
finds its old row although the batch that holds it is not durable yet. It is a cache for the life of
one task: after a failure the next task loads it again.

Its times count the pieces. Blocking work runs through the clock's threads; one call at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.arrangement.arrangement import Arrangement, ArrangementStatistics
from actors.connectors.sources.upserts import joined, keys_to_find, resolve
from actors.errors import CorruptData
from actors.kernel import ActorClock
from actors.plan.schema import DIFF, TIME, TableSchema
from actors.plan.updates import at_time, consolidate

MAINTAIN_EVERY = 16
"""Pieces between two merges of the arrangement's runs."""
_PLACE = "__place"


class KeyedContents:
    """Old rows of one export. `load` comes first."""

    def __init__(
        self, export: str, schema: TableSchema, directory: Path, clock: ActorClock
    ) -> None:
        self._export = export
        self._schema = schema
        self._directory = directory
        self._clock = clock
        self._held: Arrangement | None = None
        self._pieces = 0

    @property
    def loaded(self) -> bool:
        """Return whether it holds all rows given."""
        return self._held is not None

    async def load(self, pieces: AsyncIterator[pa.Table]) -> None:
        """Load these updates (their times do not count)."""
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
        assert held is not None, "it was loaded"
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
        """Convert upserts to updates (the columns and `DIFF`), and add these. Raises `CorruptData`
        when a key has more than one row."""
        return await self._clock.run_blocking(lambda: self._changes(pieces))

    def _changes(self, pieces: Sequence[pa.Table]) -> pa.Table:
        changes = joined(self._schema, pieces)
        updates = resolve(self._schema, changes, self._find(keys_to_find(self._schema, changes)))
        updates = consolidate(updates)
        # Added before they are durable: the next upserts must find these rows.
        self._feed(updates)
        return updates

    def _find(self, keys: pa.Table) -> pa.Table:
        held = self._held
        assert held is not None, "it was loaded"
        if not keys.num_rows:
            return self._schema.arrow().empty_table()
        rows = consolidate(held.lookup(keys.combine_chunks(), held.upper).drop_columns([TIME]))
        names = list(self._schema.key)
        # Join keys and row numbers only: Arrow's joins refuse lists, even as columns of the output.
        placed = rows.select(names).append_column(_PLACE, pa.array(np.arange(rows.num_rows)))
        there = rows.take(placed.join(keys, keys=names, join_type="left semi")[_PLACE])
        if there.num_rows and (
            pc.min_max(there[DIFF])["min"].as_py() != 1
            or pc.min_max(there[DIFF])["max"].as_py() != 1
            or there.group_by(names).aggregate([]).num_rows != there.num_rows
        ):
            raise CorruptData(
                f"export {self._export}: a value of its key ({', '.join(names)}) stands there more "
                "than once; drop its table and add it to the source again",
                determinate=True,
            )
        return there.drop_columns([DIFF])

    def statistics(self) -> ArrangementStatistics | None:
        """Return the size; None before it was loaded."""
        return None if self._held is None else self._held.statistics()

    async def clear(self) -> None:
        """Replace the contents by none."""
        await self.close()
        await self.load(_nothing())

    async def close(self) -> None:
        """Remove its files; may be called twice."""
        held, self._held = self._held, None
        if held is not None:
            await self._clock.run_blocking(lambda: held.close(remove=True))


async def _nothing() -> AsyncIterator[pa.Table]:
    pieces: tuple[pa.Table, ...] = ()
    for piece in pieces:
        yield piece
