"""Peeks of a shard: its parts read one after another, in bounded memory.

Parts whose statistics say that they hold no row that passes the filter are not read. A part may
retract what another holds, so all others are read before a row is told, unless none of them
retracts anything: then a limit without an order ends the reading. Only updates that the peek wants
are kept. They are gathered in memory, and beyond `GATHERED_BYTES` in a throw-away
arrangement on disk, whose rows then stream like those of an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pyarrow as pa
import pyarrow.compute as pc

from actors.arrangement.gathered import Contents, Gathered
from actors.compute.keys import select_keys
from actors.compute.peeks import Wish
from actors.compute.stash import Stash
from actors.kernel import Clock
from actors.persist import Part, PartFilter, PersistClient
from actors.plan.schema import DIFF, ERROR, Schema
from actors.plan.updates import between, sliced
from actors.progress import Time
from actors.protocol.compute import Peek, PeekError, PeekRows, PeekStashed, SourceImport


class Wanted:
    """Updates of a shard that a peek wants, at the one time that it reads. Blocking."""

    def __init__(self, schema: Schema, time: Time, wish: Wish, place: Path) -> None:
        self._time = time
        self._wish = wish
        self._gathered = Gathered(schema, place)
        self.weight = 0
        """Of the rows that were kept."""

    def add(self, updates: pa.Table) -> None:
        """Takes what is wanted of a part. Raises `StoreFull`, `StorageError`."""
        for piece in sliced(updates):
            kept = self._wanted(piece)
            if kept.num_rows:
                self.weight += pc.sum(kept[DIFF]).as_py()
                self._gathered.add(kept)

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

    def contents(self) -> Contents:
        """All that was added, summed."""
        return self._gathered.contents()

    def close(self) -> None:
        """Removes what was spilled. What is being read stays good."""
        self._gathered.close()


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
    gathered = Wanted(source.schema, peek.time, wish, place)
    bytes_max, piece_bytes = limits
    try:
        reader = await persist.open_reader(source.shard, reader_id)
        try:
            await reader.downgrade(peek.time)  # first: the snapshot may wait long
            parts, _ = await reader.snapshot(
                peek.time, PartFilter.of(source.schema, peek.filter, wish.keys)
            )
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
