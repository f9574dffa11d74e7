"""Passes on the updates of one import: the stages of an index or a subscribe.

An index's updates are split among the workers by key hash; errors travel in an ``__error`` column.
A subscribe's updates go to worker 0, one batch at a time. Nothing is durable: a new incarnation of
an index replaces its contents with a snapshot, and a new incarnation of a subscribe resumes at the
upper of its last batch.

A subscribe reads its own snapshot (`snapshot`), which need not fit in memory. A step is held in
memory; if it is too large for a response its rows go into blobs, so a batch is always one message.
Blobs of a batch that is not sent are removed here. Blobs left by a crash, or by a client that
disappeared, are collected after `stash_orphan_ms`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa

from actors.durable.arrangement import partition
from actors.durable.arrangement.gathered_updates import GatheredUpdates
from actors.durable.persist import PersistClient
from actors.durable.persist.stashed_blobs import StashedBlobs
from actors.model.plan.schema import DIFF, ERROR, TIME, TableSchema
from actors.model.plan.updates import (
    ResultPiece,
    advance,
    between,
    concat,
    consolidate,
    encode_stream_header,
    iter_slices,
    pieces,
    to_ipc,
)
from actors.model.protocol.compute import (
    CopyToExport,
    DataflowDescription,
    IndexExport,
    ShardImport,
    StashPart,
    SubscribeBatch,
    SubscribeExport,
    ViewExport,
)
from actors.model.protocol.internal import InstallUpdates
from actors.replica.dataflow.contents import error_sums, errors_held, split_errors
from actors.replica.dataflow.events import DataflowStep, StateRestored
from actors.replica.dataflow.hydrate import errors_of
from actors.runtime.errors import InvalidUsage, PenstockError, ReadBelowSince, ViewInError
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import ObjectId, Time
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import SUBSCRIBED_BATCH

SUMMED_BYTES_MAX = 8 << 20
"""Contents up to this size in bytes are summed even without retractions, so that no row is
repeated."""

# -- snapshots -------------------------------------------------------------------------------------


class SnapshotUpdates(msgspec.Struct, frozen=True):
    """Updates of a batch, in `arrow` or in `parts`. If neither is set there are none."""

    arrow: bytes | None = None
    parts: tuple[StashPart, ...] = ()


class RowStash:
    """Writes rows into blobs of about `piece_bytes` each."""

    def __init__(self, blobs: StashedBlobs, clock: ActorClock, piece_bytes: int) -> None:
        self._blobs = blobs
        self._clock = clock
        self.piece_bytes = piece_bytes

    async def all_of(
        self, batches: Iterator[pa.RecordBatch], schema: pa.Schema
    ) -> tuple[StashPart, ...]:
        """Write all rows into blobs. Raise `StoreFull` or `StorageError`; no blob is left then."""
        return await self._stash(self._cut(batches, schema), None)

    async def found(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> SnapshotUpdates:
        """Return all rows, in blobs unless they fit into one piece. Raise what `all_of` raises."""
        cut = self._cut(batches, schema)
        first = await self._clock.run_blocking(lambda: next(cut))
        if not SUBSCRIBED_BATCH.crossed(not first.last):
            return SnapshotUpdates(first.arrow if first.rows else None)
        return SnapshotUpdates(None, await self._stash(cut, first))

    def _cut(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[ResultPiece]:
        return pieces(batches, encode_stream_header(schema), self.piece_bytes)

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
                # List the blob before it is written, because a failed write may leave it.
                parts.append(StashPart(key, piece.rows, len(piece.arrow)))
                await self._blobs.set(key, piece.arrow)
                if piece.last:
                    return tuple(parts)
                piece = None
        except BaseException:
            # Shield this: otherwise a cancelled subscribe would leave its blobs until they are
            # orphans.
            with anyio.CancelScope(shield=True):
                await self.remove(parts)
            raise

    async def remove(self, parts: Sequence[StashPart]) -> None:
        """Delete blobs that no batch names."""
        await self._blobs.delete([part.key for part in parts])


async def snapshot(
    persist: PersistClient,
    clock: ActorClock,
    imported: ShardImport,
    as_of: Time,
    reader_id: str,
    place: Path,
    stashing: RowStash,
) -> SnapshotUpdates:
    """Return the contents at `as_of`, which must be sealed, as updates at that time. Errors are
    ignored.

    The contents are read part by part, summed (on disk if they are large), and cut into pieces. A
    single piece is sent in the batch itself. Several pieces go into blobs, one at a time, and the
    batch names them. So the snapshot is always one message, and no process holds more than one
    piece.

    `place` is a folder that may be created. Raise `ReadBelowSince`, `StoreFull` or `StorageError`.
    """
    reader = await persist.open_reader(imported.shard, reader_id)
    try:
        parts, _ = await reader.snapshot(as_of)

        async def read() -> AsyncGenerator[pa.Table, None]:
            for part in parts:
                yield await persist.fetch(part, imported.schema)
                reader.release([part.key])

        large = sum(part.bytes for part in parts) > SUMMED_BYTES_MAX
        # Without retractions nothing must be summed. Equal rows may then appear in several pieces.
        if large and not any(part.retracts for part in parts):
            return await _stash_as_read(read(), clock, imported.schema, as_of, stashing)
        return await _summed(read(), clock, imported.schema, as_of, place, stashing)
    finally:
        with anyio.CancelScope(shield=True):
            await reader.close()


async def _stash_as_read(
    parts: AsyncGenerator[pa.Table, None],
    clock: ActorClock,
    schema: TableSchema,
    as_of: Time,
    stashing: RowStash,
) -> SnapshotUpdates:
    """Write rows as they are read, one part and one piece at a time."""
    shape = schema.arrow_updates()
    written: list[StashPart] = []
    held: list[pa.RecordBatch] = []
    try:
        async with aclosing(parts) as found:
            async for updates in found:
                for rows in iter_slices(updates):
                    held += await clock.run_blocking(partial(_plain_at, rows, schema, as_of))
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


def _plain_at(updates: pa.Table, schema: TableSchema, as_of: Time) -> list[pa.RecordBatch]:
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
        rows = _as_updates(contents.rows(), schema, as_of)
        return await stashing.found(rows, schema.arrow_updates())
    finally:
        with anyio.CancelScope(shield=True):
            await clock.run_blocking(gathered.close)


def _gather(gathered: GatheredUpdates, updates: pa.Table, as_of: Time) -> None:
    for rows in iter_slices(updates):
        gathered.add(split_errors(between(rows, 0, as_of + 1))[0])


def _as_updates(
    batches: Iterator[pa.RecordBatch], schema: TableSchema, as_of: Time
) -> Iterator[pa.RecordBatch]:
    """Yield the rows as updates at `as_of`."""
    shape = schema.arrow_updates()
    for batch in batches:
        times = pa.repeat(pa.scalar(as_of, pa.int64()), batch.num_rows)
        columns = [batch.column(name) for name in schema.names]
        yield pa.RecordBatch.from_arrays([*columns, times, batch.column(DIFF)], schema=shape)


# -- steps -----------------------------------------------------------------------------------------


class PassthroughStep(msgspec.Struct, frozen=True):
    """A computed step: updates to install on the workers, or a batch for the subscriber."""

    number: int
    rows: int
    installs: tuple[InstallUpdates, ...] = ()
    batch: SubscribeBatch | None = None
    large: pa.Table | None = None
    """Updates of the batch, if they are too large for its message."""


class SubscribeOpening(msgspec.Struct, frozen=True):
    """First batch of a subscribe, and the state to resume from once it has been delivered.

    `restored` is None if the batch ends the subscribe with an error.
    """

    restored: StateRestored | None
    batch: SubscribeBatch


class PassThrough:
    """Runs the stages of an index or a subscribe. Raises `InvalidUsage` unless it has exactly one
    import."""

    def __init__(
        self,
        description: DataflowDescription,
        workers: int,
        persist: PersistClient,
        clock: ActorClock,
        settings: Settings,
        scratch: Path,
    ) -> None:
        if len(description.imports) != 1 or isinstance(
            description.export, ViewExport | CopyToExport
        ):
            raise InvalidUsage(
                f"{description.id}: an index or subscribe must have exactly one import:"
                f" got {len(description.imports)}"
            )
        self._description = description
        self._export: IndexExport | SubscribeExport = description.export
        self._workers = workers
        self._persist = persist
        self._clock = clock
        self._batch_bytes_max = settings.result_bytes_max
        self._stashing = RowStash(persist.stashed, clock, settings.piece_bytes_max)
        self._scratch = scratch

    async def restore(self, incarnation: int, lo: Time) -> StateRestored | SubscribeOpening:
        """Return the state with which the incarnation starts and, for a subscribe, its first batch.

        Raise `StoreFull`, `StorageError` or `ReadBelowSince`.
        """
        imported = self._description.imports[0]
        since = (await self._persist.state(imported.shard)).since
        first = self._description.as_of
        if isinstance(self._export, IndexExport):
            as_of = max(first, lo - 1, since)
            return StateRestored(incarnation, 0, as_of, (True,))
        as_of = first if lo == 0 else lo - 1
        if since > as_of:
            text = f"cannot subscribe at {as_of}: history is kept only from {since} on"
            # Later reads may raise this too. The machine then restarts, and the retry ends the
            # subscribe here.
            return self._ended(lo, ReadBelowSince(text))
        name = f"{self._description.id}/{incarnation}"
        await self._persist.wait_upper(imported.shard, as_of)
        held = await errors_of(self._persist, imported.shard, imported.schema, as_of, name)
        if held:
            return self._ended(lo, ViewInError(held[0]))
        restored = StateRestored(incarnation, as_of + 1, as_of, (False,))
        if lo == 0 and self._export.snapshot:
            place = self._scratch / f"snapshot-{incarnation}"
            found = await snapshot(
                self._persist, self._clock, imported, as_of, name, place, self._stashing
            )
            return SubscribeOpening(
                restored, SubscribeBatch(0, as_of + 1, found.arrow, parts=found.parts)
            )
        return restored

    def _ended(self, lo: Time, error: PenstockError) -> SubscribeOpening:
        upper = max(lo, self._description.as_of) + 1
        why = (type(error).__name__, str(error))
        return SubscribeOpening(None, SubscribeBatch(lo, upper, None, why))

    async def compute(self, step: DataflowStep) -> PassthroughStep:
        """Compute the step off the event loop. Raise `StoreFull` or `StorageError`."""
        made = await self._clock.run_blocking(lambda: self.make(step))
        if made.large is None or made.batch is None:
            return made
        rows = made.large
        parts = await self._stashing.all_of(iter(rows.to_batches()), rows.schema)
        batch = msgspec.structs.replace(made.batch, parts=parts)
        return msgspec.structs.replace(made, batch=batch, large=None)

    def make(self, step: DataflowStep) -> PassthroughStep:
        """Compute the step without writing blobs. Blocks if the updates are large."""
        tables = [table for tables in step.deltas for table in tables]
        if isinstance(self._export, SubscribeExport):
            made, large = batch(step, tables, self._export.schema, self._batch_bytes_max)
            SUBSCRIBED_BATCH.crossed(large is not None)
            count = sum(table.num_rows for table in tables)
            return PassthroughStep(step.number, count, batch=made, large=large)
        parts = installs(self._description.id, step, tables, self._export, self._workers)
        return PassthroughStep(step.number, sum(part.updates.num_rows for part in parts), parts)


def _consolidated(
    tables: Sequence[pa.Table], schema: TableSchema
) -> tuple[pa.Table, list[pa.Table]]:
    """Return the consolidated plain updates, and the error updates."""
    plain: list[pa.Table] = []
    errors: list[pa.Table] = []
    for table in tables:
        kept, held = split_errors(table)
        plain.append(kept)
        if held is not None:
            errors.append(held)
    return consolidate(concat(plain, schema.arrow_updates())), errors


def installs(
    dataflow: ObjectId,
    step: DataflowStep,
    tables: Sequence[pa.Table],
    export: IndexExport,
    workers: int,
) -> tuple[InstallUpdates, ...]:
    """Return one `InstallUpdates` for each worker."""
    updates, errors = _consolidated(tables, export.schema)
    if errors:
        shape = export.schema.arrow_updates().append(pa.field(ERROR, pa.string()))
        held = consolidate(concat(errors, shape))
        updates = pa.concat_tables([updates, held], promote_options="default")
    return tuple(
        InstallUpdates(dataflow, step.incarnation, step.lo, step.hi, part, step.snapshot)
        for part in partition(updates, export.key, workers)
    )


def batch(
    step: DataflowStep, tables: Sequence[pa.Table], schema: TableSchema, bytes_max: int
) -> tuple[SubscribeBatch, pa.Table | None]:
    """Return the step's batch, ordered by time, and its updates if they exceed `bytes_max`.

    If the import gets an error, the error ends the subscribe.
    """
    updates, errors = _consolidated(tables, schema)
    held = errors_held(error_sums(errors))
    if held:
        return SubscribeBatch(step.lo, step.hi, None, (ViewInError.__name__, held[0])), None
    if not updates.num_rows:
        return SubscribeBatch(step.lo, step.hi), None
    ordered = updates.sort_by(TIME).select([*schema.names, TIME, DIFF])
    if ordered.nbytes <= bytes_max:
        arrow = to_ipc(ordered)
        if len(arrow) <= bytes_max:
            return SubscribeBatch(step.lo, step.hi, arrow), None
    return SubscribeBatch(step.lo, step.hi), ordered
