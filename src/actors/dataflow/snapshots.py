"""The contents that a subscribe begins with, and what is too large for a response.

Theory of operation. The contents of a shard at one time are read part by part and summed up, on
disk when memory should not hold them; then they are cut into pieces. Large ones of which no part
retracts anything need no sum: they are cut as they are read, and equal rows may come in several
pieces. One piece is the batch's own
rows; more go into blobs, one at a time, and the batch names them: so it is one message, there
whole or not at all, and nothing here, on the way or at the client's side holds more than a piece.

What was written for a batch that never came to be is removed here; what a process that died or a
reader that went away has left is collected after `stash_orphan_ms`, as all of the stash is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa

from actors.arrangement.gathered import Gathered
from actors.dataflow.contents import split_errors
from actors.kernel import Clock
from actors.persist import PersistClient
from actors.persist.stashed import StashedBlobs
from actors.plan.pieces import Piece, pieces
from actors.plan.schema import DIFF, Schema
from actors.plan.updates import advance, between, opening_of, sliced
from actors.progress import Time
from actors.protocol.compute import SourceImport, StashPart
from actors.threshold_probes import GATHERED_BYTES, SUBSCRIBED_BATCH


class Found(msgspec.Struct, frozen=True):
    """Updates as a batch has them: in `arrow`, or in `parts`; neither: there are none."""

    arrow: bytes | None = None
    parts: tuple[StashPart, ...] = ()


class Stashing:
    """Puts rows into blobs, each of at most about `piece_bytes`."""

    def __init__(self, blobs: StashedBlobs, clock: Clock, piece_bytes: int) -> None:
        self._blobs = blobs
        self._clock = clock
        self.piece_bytes = piece_bytes

    async def all_of(
        self, batches: Iterator[pa.RecordBatch], schema: pa.Schema
    ) -> tuple[StashPart, ...]:
        """All rows, in blobs. Raises `StoreFull`, `StorageError`; then none is left."""
        return await self._stash(self._cut(batches, schema), None)

    async def found(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Found:
        """All rows, in blobs unless they are one piece. Raises as `all_of` does."""
        cut = self._cut(batches, schema)
        first = await self._clock.run_blocking(lambda: next(cut))
        if not SUBSCRIBED_BATCH.crossed(not first.last):
            return Found(first.arrow if first.rows else None)
        return Found(None, await self._stash(cut, first))

    def _cut(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[Piece]:
        return pieces(batches, opening_of(schema), self.piece_bytes)

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
                await self.remove(parts)
            raise

    async def remove(self, parts: Sequence[StashPart]) -> None:
        """Blobs that nobody will hear of."""
        await self._blobs.delete([part.key for part in parts])


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
    reader = await persist.open_reader(source.shard, reader_id)
    try:
        parts, _ = await reader.snapshot(as_of)

        async def read() -> AsyncGenerator[pa.Table, None]:
            for part in parts:
                yield await persist.fetch(part, source.schema)
                reader.release([part.key])

        large = GATHERED_BYTES.exceeded_by(sum(part.bytes for part in parts))
        if large and not any(part.retracts for part in parts):
            return await _as_read(read(), clock, source.schema, as_of, stashing)
        return await _summed(read(), clock, source.schema, as_of, place, stashing)
    finally:
        with anyio.CancelScope(shield=True):
            await reader.close()


async def _as_read(
    parts: AsyncGenerator[pa.Table, None],
    clock: Clock,
    schema: Schema,
    as_of: Time,
    stashing: Stashing,
) -> Found:
    """Rows as they are, a part and a piece at a time."""
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
        return Found(None, tuple(written))
    except BaseException:
        with anyio.CancelScope(shield=True):
            await stashing.remove(written)
        raise


def _counting(updates: pa.Table, schema: Schema, as_of: Time) -> list[pa.RecordBatch]:
    """What counts of some updates, as updates at that time."""
    shape = schema.arrow_updates()
    plain, _ = split_errors(between(updates, 0, as_of + 1))
    batches: list[pa.RecordBatch] = (
        advance(plain, as_of).select(shape.names).cast(shape).to_batches()
    )
    return batches


async def _summed(
    parts: AsyncGenerator[pa.Table, None],
    clock: Clock,
    schema: Schema,
    as_of: Time,
    place: Path,
    stashing: Stashing,
) -> Found:
    """Every row once, with its sum."""
    gathered = Gathered(schema, place)
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


def _gather(gathered: Gathered, updates: pa.Table, as_of: Time) -> None:
    for rows in sliced(updates):
        gathered.add(split_errors(between(rows, 0, as_of + 1))[0])


def _timed(
    batches: Iterator[pa.RecordBatch], schema: Schema, as_of: Time
) -> Iterator[pa.RecordBatch]:
    """Rows as updates at that time."""
    shape = schema.arrow_updates()
    for batch in batches:
        times = pa.repeat(pa.scalar(as_of, pa.int64()), batch.num_rows)
        columns = [batch.column(name) for name in schema.names]
        yield pa.RecordBatch.from_arrays([*columns, times, batch.column(DIFF)], schema=shape)
