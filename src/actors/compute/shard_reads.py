"""Peeks of a shard: reads its parts one after another, in bounded memory.

Parts whose statistics exclude rows that pass the filter are not read. Only updates that the peek
selects are kept: in memory, and beyond `GATHERED_BYTES` in a temporary arrangement on disk, whose
rows are then streamed like those of an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pyarrow as pa
import pyarrow.compute as pc

from actors.arrangement.gathered import CollectionContents, GatheredUpdates
from actors.compute.keys import select_keys
from actors.compute.peeks import PeekSpec
from actors.compute.stash import PeekStash
from actors.kernel import ActorClock
from actors.persist import BatchPart, PartFilter, PersistClient
from actors.plan.schema import DIFF, ERROR, TableSchema
from actors.plan.updates import between, sliced
from actors.progress import Time
from actors.protocol.compute import Peek, PeekError, PeekRows, PeekStashed, SourceImport


class ShardPeekRead:
    """Selected updates of a shard, at the peek's time. All methods block."""

    def __init__(self, schema: TableSchema, time: Time, wish: PeekSpec, place: Path) -> None:
        self._time = time
        self._wish = wish
        self._gathered = GatheredUpdates(schema, place)
        self.weight = 0
        """Sum of the weights of the kept rows."""

    def add(self, updates: pa.Table) -> None:
        """Add the selected updates of a part. Raise `StoreFull`, `StorageError`."""
        for piece in sliced(updates):
            kept = self._wanted(piece)
            if kept.num_rows:
                self.weight += pc.sum(kept[DIFF]).as_py()
                self._gathered.add(kept)

    def _wanted(self, updates: pa.Table) -> pa.Table:
        updates = between(updates, 0, self._time + 1)
        errors: pa.Table | None = None
        if ERROR in updates.column_names:
            # Error updates pass any filter, since an error is the answer.
            errors = updates.filter(pc.is_valid(updates[ERROR]))
            updates = updates.filter(pc.is_null(updates[ERROR])).drop_columns([ERROR])
        if self._wish.keys is not None:
            updates = select_keys(updates, self._wish.keys)
        updates = self._wish.filter.passing(updates)
        if errors is not None and errors.num_rows:
            updates = pa.concat_tables([updates, errors], promote_options="default")
        return updates

    def contents(self) -> CollectionContents:
        """Return all added updates, summed."""
        return self._gathered.contents()

    def close(self) -> None:
        """Remove spilled files. Contents that are being read stay valid."""
        self._gathered.close()


def _enough(peek: Peek, parts: Sequence[BatchPart]) -> int | None:
    """Return how many rows complete the answer; None if all are needed."""
    wanted = peek.finishing
    if wanted is None or wanted.limit is None or wanted.order_by:
        return None
    # A later part may retract a row of an earlier one.
    if any(part.retracts or part.has_errors for part in parts):
        return None
    return wanted.limit + wanted.offset


async def shard_answer(
    persist: PersistClient,
    clock: ActorClock,
    stash: PeekStash,
    source: SourceImport,
    peek: Peek,
    limits: tuple[int, int],
    reader_id: str,
    place: Path,
) -> PeekRows | PeekStashed | PeekError:
    """Return the rows of a shard at the peek's time; wait until that time is sealed.

    Args:
        limits: Bytes of a response, and of its inline rows before the stash is used.
        reader_id: Name of the lease; must be fresh.
        place: Folder that may be created.

    Raise as `peeks.index_answer` does, and persist's errors.
    """
    wish = PeekSpec(source.schema, peek)
    gathered = ShardPeekRead(source.schema, peek.time, wish, place)
    bytes_max, piece_bytes = limits
    try:
        reader = await persist.open_reader(source.shard, reader_id)
        try:
            # Before the snapshot, which may wait long: until then the lease blocks compaction.
            await reader.downgrade(peek.time)
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
