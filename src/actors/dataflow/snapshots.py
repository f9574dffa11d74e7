"""Reads the snapshot that a subscribe begins with, and stashes rows too large for a response.

Theory of operation. A shard's contents at one time are read part by part, summed up (on disk if
they are large), and cut into pieces. A single piece is the batch's own rows. Several pieces go into
blobs, one at a time, and the batch names them: so it is one message, there whole or not at all, and
no process holds more than a piece.

The blobs of a batch that is not sent are removed here. Blobs left by a crash or by a client that
went away are collected after `stash_orphan_ms`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa

from actors.arrangement.gathered import GatheredUpdates
from actors.dataflow.contents import split_errors
from actors.kernel import ActorClock
from actors.persist import PersistClient
from actors.persist.stashed import StashedBlobs
from actors.plan.pieces import ResultPiece, pieces
from actors.plan.schema import DIFF, TableSchema
from actors.plan.updates import advance, between, opening_of, sliced
from actors.progress import Time
from actors.protocol.compute import SourceImport, StashPart
from actors.threshold_probes import GATHERED_BYTES, SUBSCRIBED_BATCH


class SnapshotUpdates(msgspec.Struct, frozen=True):
    """Updates of a batch: in `arrow`, or in `parts`; there are none if neither is set."""

    arrow: bytes | None = None
    parts: tuple[StashPart, ...] = ()


class RowStash:
    """Writes rows into blobs of at most about `piece_bytes` each."""

    def __init__(self, blobs: StashedBlobs, clock: ActorClock, piece_bytes: int) -> None:
        self._blobs = blobs
        self._clock = clock
        self.piece_bytes = piece_bytes

    async def all_of(
        self, batches: Iterator[pa.RecordBatch], schema: pa.Schema
    ) -> tuple[StashPart, ...]:
        """Write all rows into blobs. Raise `StoreFull`, `StorageError`; then no blob is left."""
        return await self._stash(self._cut(batches, schema), None)

    async def found(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> SnapshotUpdates:
        """Return all rows, in blobs unless they fit one piece. Raise as `all_of` does."""
        cut = self._cut(batches, schema)
        first = await self._clock.run_blocking(lambda: next(cut))
        if not SUBSCRIBED_BATCH.crossed(not first.last):
            return SnapshotUpdates(first.arrow if first.rows else None)
        return SnapshotUpdates(None, await self._stash(cut, first))

    def _cut(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[ResultPiece]:
        return pieces(batches, opening_of(schema), self.piece_bytes)

    async def _stash(
        self, cut: Iterator[ResultPiece], first: ResultPiece | None
    ) -> tuple[StashPart, ...]:
        parts: list[StashPart] = []
        piece = first
        try:
            while True:
                if piece is None:
                    piece = await self._clock.run_blocking(lambda: next(cut))
                key = self._blobs.fresh()
                # Listed before the write: a failed write may have left the blob.
                parts.append(StashPart(key, piece.rows, len(piece.arrow)))
                await self._blobs.set(key, piece.arrow)
                if piece.last:
                    return tuple(parts)
                piece = None
        except BaseException:
            # Shielded: else a cancelled subscribe would leave its blobs until they are orphans.
            with anyio.CancelScope(shield=True):
                await self.remove(parts)
            raise

    async def remove(self, parts: Sequence[StashPart]) -> None:
        """Delete blobs that no batch names."""
        await self._blobs.delete([part.key for part in parts])


async def snapshot(
    persist: PersistClient,
    clock: ActorClock,
    source: SourceImport,
    as_of: Time,
    reader_id: str,
    place: Path,
    stashing: RowStash,
) -> SnapshotUpdates:
    """Return the contents at `as_of`, which must be sealed, as updates at that time; errors are
    ignored.

    `place` is a folder that may be created. Raise `ReadBelowSince`, `StoreFull`, `StorageError`.
    """
    reader = await persist.open_reader(source.shard, reader_id)
    try:
        parts, _ = await reader.snapshot(as_of)

        async def read() -> AsyncGenerator[pa.Table, None]:
            for part in parts:
                yield await persist.fetch(part, source.schema)
                reader.release([part.key])

        large = GATHERED_BYTES.exceeded_by(sum(part.bytes for part in parts))
        # Without retractions no sum is needed. Equal rows may then come in several pieces.
        if large and not any(part.retracts for part in parts):
            return await _as_read(read(), clock, source.schema, as_of, stashing)
        return await _summed(read(), clock, source.schema, as_of, place, stashing)
    finally:
        with anyio.CancelScope(shield=True):
            await reader.close()


async def _as_read(
    parts: AsyncGenerator[pa.Table, None],
    clock: ActorClock,
    schema: TableSchema,
    as_of: Time,
    stashing: RowStash,
) -> SnapshotUpdates:
    """Write rows as they are read, a part and a piece at a time."""
    shape = schema.arrow_updates()
    written: list[StashPart] = []
    held: list[pa.RecordBatch] = []
    try:
        async with aclosing(parts) as found:
            async for updates in found:
                for rows in sliced(updates):
                    held += await clock.run_blocking(partial(_counting, rows, schema, as_of))
                    if sum(batch.nbytes for batch in held) > stashing.piece_bytes:
                        written += await stashing.all_of(iter(held), shape)
                        held = []
        if not written:
            return await stashing.found(iter(held), shape)
        if held:
            written += await stashing.all_of(iter(held), shape)
        return SnapshotUpdates(None, tuple(written))
    except BaseException:
        with anyio.CancelScope(shield=True):
            await stashing.remove(written)
        raise


def _counting(updates: pa.Table, schema: TableSchema, as_of: Time) -> list[pa.RecordBatch]:
    """Return the plain updates up to `as_of`, at that time."""
    shape = schema.arrow_updates()
    plain, _ = split_errors(between(updates, 0, as_of + 1))
    batches: list[pa.RecordBatch] = (
        advance(plain, as_of).select(shape.names).cast(shape).to_batches()
    )
    return batches


async def _summed(
    parts: AsyncGenerator[pa.Table, None],
    clock: ActorClock,
    schema: TableSchema,
    as_of: Time,
    place: Path,
    stashing: RowStash,
) -> SnapshotUpdates:
    """Return every row once, with its sum."""
    gathered = GatheredUpdates(schema, place)
    try:
        async with aclosing(parts) as found:
            async for updates in found:
                await clock.run_blocking(lambda: _gather(gathered, updates, as_of))  # noqa: B023
        contents = await clock.run_blocking(gathered.contents)
        rows = _timed(contents.rows(), schema, as_of)
        return await stashing.found(rows, schema.arrow_updates())
    finally:
        with anyio.CancelScope(shield=True):
            await clock.run_blocking(gathered.close)


def _gather(gathered: GatheredUpdates, updates: pa.Table, as_of: Time) -> None:
    for rows in sliced(updates):
        gathered.add(split_errors(between(rows, 0, as_of + 1))[0])


def _timed(
    batches: Iterator[pa.RecordBatch], schema: TableSchema, as_of: Time
) -> Iterator[pa.RecordBatch]:
    """Yield the rows as updates at `as_of`."""
    shape = schema.arrow_updates()
    for batch in batches:
        times = pa.repeat(pa.scalar(as_of, pa.int64()), batch.num_rows)
        columns = [batch.column(name) for name in schema.names]
        yield pa.RecordBatch.from_arrays([*columns, times, batch.column(DIFF)], schema=shape)
