"""The contents that a subscribe begins with, and what is too large for a response.

Theory of operation. The contents of a shard at one time are read part by part and summed up, on
disk when memory should not hold them; then they are cut into pieces. One piece is the batch's own
rows; more go into blobs, one at a time, and the batch names them: so it is one message, there
whole or not at all, and nothing here, on the way or at the client's side holds more than a piece.

What was written for a batch that never came to be is removed here; what a process that died or a
reader that went away has left is collected after `stash_orphan_ms`, as all of the stash is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa

from actors.arrangement.gathered import Gathered
from actors.arrangement.reading import ROWS_AT_ONCE
from actors.dataflow.contents import split_errors
from actors.kernel import Clock
from actors.persist import PersistClient
from actors.persist.stashed import StashedBlobs
from actors.plan.pieces import Piece, pieces
from actors.plan.schema import DIFF, Schema
from actors.plan.updates import between, opening_of
from actors.progress import Time
from actors.protocol.compute import SourceImport, StashPart


class Found(msgspec.Struct, frozen=True):
    """Updates as a batch has them: in `arrow`, or in `parts`; neither: there are none."""

    arrow: bytes | None = None
    parts: tuple[StashPart, ...] = ()


class Stashing:
    """Puts rows into blobs, each of at most about `piece_bytes`."""

    def __init__(self, blobs: StashedBlobs, clock: Clock, piece_bytes: int) -> None:
        self._blobs = blobs
        self._clock = clock
        self._piece_bytes = piece_bytes

    async def all_of(
        self, batches: Iterator[pa.RecordBatch], schema: pa.Schema
    ) -> tuple[StashPart, ...]:
        """All rows, in blobs. Raises `StoreFull`, `StorageError`; then none is left."""
        return await self._stash(self._cut(batches, schema), None)

    async def found(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Found:
        """All rows, in blobs unless they are one piece. Raises as `all_of` does."""
        cut = self._cut(batches, schema)
        first = await self._clock.run_blocking(lambda: next(cut))
        if first.last:
            return Found(first.arrow if first.rows else None)
        return Found(None, await self._stash(cut, first))

    def _cut(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[Piece]:
        return pieces(batches, opening_of(schema), self._piece_bytes)

    async def _stash(self, cut: Iterator[Piece], first: Piece | None) -> tuple[StashPart, ...]:
        parts: list[StashPart] = []
        piece = first
        try:
            while True:
                if piece is None:
                    piece = await self._clock.run_blocking(lambda: next(cut))
                key = self._blobs.fresh()
                parts.append(StashPart(key, piece.rows, len(piece.arrow)))
                await self._blobs.set(key, piece.arrow)
                if piece.last:
                    return tuple(parts)
                piece = None
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._blobs.delete([part.key for part in parts])
            raise


async def snapshot(
    persist: PersistClient,
    clock: Clock,
    source: SourceImport,
    as_of: Time,
    reader_id: str,
    place: Path,
    stashing: Stashing,
) -> Found:
    """The contents at `as_of`, which is sealed, as updates at that time; `place`: a folder that
    may be made. Errors are not looked at. Raises `ReadBelowSince`, `StoreFull`, `StorageError`."""
    gathered = Gathered(source.schema, place)
    try:
        reader = await persist.open_reader(source.shard, reader_id)
        try:
            parts, _ = await reader.snapshot(as_of)
            for part in parts:
                updates = await persist.fetch(part, source.schema)
                await clock.run_blocking(lambda: _gather(gathered, updates, as_of))  # noqa: B023
                reader.release([part.key])
        finally:
            with anyio.CancelScope(shield=True):
                await reader.close()
        contents = await clock.run_blocking(gathered.contents)
        shape = source.schema.arrow_updates()
        return await stashing.found(_timed(contents.rows(), source.schema, as_of), shape)
    finally:
        with anyio.CancelScope(shield=True):
            await clock.run_blocking(gathered.close)


def _gather(gathered: Gathered, updates: pa.Table, as_of: Time) -> None:
    for start in range(0, updates.num_rows, ROWS_AT_ONCE):
        counting = between(updates.slice(start, ROWS_AT_ONCE), 0, as_of + 1)
        gathered.add(split_errors(counting)[0])


def _timed(
    batches: Iterator[pa.RecordBatch], schema: Schema, as_of: Time
) -> Iterator[pa.RecordBatch]:
    """Rows as updates at that time."""
    shape = schema.arrow_updates()
    for batch in batches:
        times = pa.repeat(pa.scalar(as_of, pa.int64()), batch.num_rows)
        columns = [batch.column(name) for name in schema.names]
        yield pa.RecordBatch.from_arrays([*columns, times, batch.column(DIFF)], schema=shape)
