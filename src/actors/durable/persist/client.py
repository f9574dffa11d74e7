"""The interface of this package: shards, shared by all actors of a process.

A `PersistClient` owns a state directory (or two in-memory stores) and caches one state per shard.
An append is one compare-and-set on all shards that it names and, for tables, on their shared upper.
A change wakes all waiters for an upper, so nothing polls within a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from random import Random

import anyio
import pyarrow as pa

from actors.durable.persist.appender import ShardAppender
from actors.durable.persist.change import (
    ChangeOutcome,
    SeqnoMismatch,
    ShardDocuments,
    create_all,
    drop_all,
    with_holds,
)
from actors.durable.persist.directory import StateDirectory
from actors.durable.persist.document_locks import DocumentWaiters
from actors.durable.persist.fence import EPOCH_KEY, FencedConsensus
from actors.durable.persist.follow_changes import follow
from actors.durable.persist.location import (
    BlobStore,
    CompareAndSet,
    ConsensusStore,
    VersionedData,
    check_name,
)
from actors.durable.persist.machine import ShardMachine
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.durable.persist.orphans import OrphanCollector
from actors.durable.persist.ownership import hand_over
from actors.durable.persist.part_lists import PartLists
from actors.durable.persist.part_store import PartStore, WrittenBlob
from actors.durable.persist.reader import LeaseBook, LeasedReader, why_missing
from actors.durable.persist.replica_fence import ReplicaFence
from actors.durable.persist.schemas import SchemaRegistry
from actors.durable.persist.shard import (
    TABLES_UPPER,
    AppendCommitted,
    BatchPart,
    NewShard,
    ShardAppend,
    ShardState,
    UpperMismatch,
    created,
    sealed,
    shard_key,
    without_hold,
)
from actors.durable.persist.standby import announce_stop
from actors.durable.persist.stashed_blobs import StashedBlobs
from actors.durable.persist.store_meters import MeteredBlob, MeteredConsensus
from actors.durable.persist.store_urls import open_stores, process_name
from actors.durable.persist.upkeep import ShardUpkeep
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import at_time
from actors.runtime.errors import InvalidUsage, ResourceClosed, StorageError
from actors.runtime.kernel import ActorClock
from actors.runtime.measurement import Measurement
from actors.runtime.memory_ledger import MemoryLedger
from actors.runtime.metric_table import MEMORY_BYTES, MEMORY_MAPPED_BYTES, STORE_RETRIES
from actors.runtime.progress import EMPTY, Frontier, ShardId, Time, format_frontier
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import INLINE_ROOM
from actors.runtime.tracing.append_traces import AppendTraceIndex


class PersistClient:
    """Durable shards. Open it with `open` or `in_memory`. Every call may raise `StorageError`."""

    def __init__(
        self,
        blob: BlobStore,
        consensus: ConsensusStore,
        settings: Settings,
        clock: ActorClock,
        *,
        exclusive: bool = True,
        random: Random | None = None,
        directory: StateDirectory | None = None,
        process: str | None = None,
        guest: bool = False,
        scratch: Path | None = None,
    ) -> None:
        """Make a client over open stores.

        `exclusive` means that no other process except guests writes to these stores. `process` is
        this process's unique name in documents. `guest` means that this process is a guest
        (`split_leases.py`). `scratch` is a folder to which compaction may spill if there is no
        state directory.
        """
        self.consensus, self._documents = consensus, MeteredConsensus(consensus, clock)
        self._blob = blob = MeteredBlob(blob, clock)
        self._settings, self._clock = settings, clock
        self.exclusive = exclusive = exclusive and not guest
        self._directory, self.trail = directory, AppendTraceIndex()
        """Maps appends to their traces."""
        self._waiters = DocumentWaiters()
        self._closed, self._calls = False, count(1)
        random = random or Random()
        self.process = process = process or process_name(random)
        """Unique name of this process in documents."""
        fenced = consensus if isinstance(consensus, FencedConsensus) else None
        former = "" if fenced is None else fenced.former
        alone = exclusive or (fenced is not None and not guest)  # guests never collect blobs
        self._book = LeaseBook(
            clock, settings.reader_lease_ms, process, exclusive=exclusive, dead=former, guest=guest
        )
        self.lists = PartLists(blob, clock)
        """Reads part lists."""
        self._machine = ShardMachine(
            self._documents,
            self.lists,
            settings,
            random,
            exclusive=exclusive,
            renew=self._book.renew,
            changed=self._waiters.wake,
            written=self._book.written,
            reread=self._book.reread,
        )
        self.schemas = SchemaRegistry(self._machine)
        """Schemas of all shards, including old ones."""
        self._parts = PartStore(
            blob,
            clock,
            process,
            settings,
            self._missing,
            self.schemas,
            None if alone else settings.blob_orphan_grace_ms // 2,
        )
        self.ledger = MemoryLedger(self._parts.memory)
        """Accounts for the memory used through this client."""
        self.stashed = StashedBlobs(blob, self._parts.writer)
        """Results on their way to a reader."""
        spill = scratch if directory is None else directory.scratch
        self.upkeep = ShardUpkeep(
            self._machine, self._parts, self._book, settings, clock, scratch=spill, guest=guest
        )
        """Compaction and collection, for callers that maintain individual shards."""
        self._appender = ShardAppender(
            self._machine, self._parts, self.upkeep, settings, clock, self.trail, self._calls
        )
        self._orphans = OrphanCollector(
            self._machine, self._parts, blob, self._book, settings, clock
        )

    @classmethod
    async def open(
        cls,
        directory: Path,
        settings: Settings,
        clock: ActorClock,
        random: Random | None = None,
    ) -> PersistClient:
        """Open or create a state directory, lock it, and open the stores that the settings name.

        Raises `StateDirectoryError` if another process uses it, it has a newer format or cannot be
        used; `BadSettings`, `InvalidUsage`, `CorruptData` and `StorageError`.
        """
        random = random or Random()
        stores = await open_stores(directory, settings, clock, random)
        return cls(
            stores.blob,
            stores.consensus,
            settings,
            clock,
            exclusive=stores.exclusive,
            random=random,
            directory=stores.directory,
            process=stores.process,
        )

    @classmethod
    async def in_memory(
        cls, settings: Settings, clock: ActorClock, random: Random | None = None
    ) -> PersistClient:
        """Return a client over new in-memory stores, for tests."""
        return cls(MemoryBlob(clock), MemoryConsensus(), settings, clock, random=random)

    async def close(self) -> None:
        """Close readers, wake waiters (with `ResourceClosed`), and release the stores. May be
        called twice."""
        if self._closed:
            return
        self._closed = True
        if self.commanded is not None:
            self.commanded.leave()
        with anyio.CancelScope(shield=True):
            # The leases of a single owner need no write, because its successor ignores them. Other
            # processes would have to wait until they expire.
            await self.upkeep.close_readers(written=not self.exclusive)
            self._waiters.wake_all()
            if isinstance(self.consensus, FencedConsensus):
                await announce_stop(self.consensus)
            await self.consensus.close()
            if self._directory is not None:
                await self._clock.run_blocking(self._directory.close)

    @property
    def commanded(self) -> ReplicaFence | None:
        """Return the fence of a replica in a separate process; None in any other process."""
        return self.consensus if isinstance(self.consensus, ReplicaFence) else None

    @property
    def owner(self) -> str:
        """Return the name of this process if it owns stores that others may use, else ""."""
        fenced = self.consensus
        return fenced.own.process if isinstance(fenced, FencedConsensus) else ""

    @property
    def took_over(self) -> bool:
        """Return whether this process stood by until the owner of the stores was found dead."""
        return isinstance(self.consensus, FencedConsensus) and self.consensus.took_over

    # -- other documents --------------------------------------------------------------------------

    async def head(self, key: str) -> VersionedData | None:
        """Return a document (such as the catalog's or the oracle's); None if it does not exist."""
        return await self._documents.head(key)

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change documents other than shards, all or none. The caller resolves an indeterminate
        failure."""
        return await self._documents.compare_and_set(ops)

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys of documents that start with `prefix`."""
        return await self._documents.list_keys(prefix)

    async def list_shards(self) -> list[ShardId]:
        """Return all shards."""
        prefix = shard_key("")
        return [key.removeprefix(prefix) for key in await self.list_keys(prefix)]

    # -- health -----------------------------------------------------------------------------------

    async def probe_documents(self) -> None:
        """Read one document from the store. Raises `StorageError`, and `WriterFenced` if another
        service owns the stores."""
        if isinstance(self.consensus, FencedConsensus):
            await self.consensus.look()
        else:
            await self.consensus.head(EPOCH_KEY)

    async def probe_blobs(self) -> None:
        """List a folder that does not exist in the blob store. Raises `StorageError`."""
        # Reading a single key would not do: if the whole store is missing, the key is simply
        # absent.
        await self._blob.list_keys("readiness/")

    def measures(self) -> Iterator[Measurement]:
        """Yield the metrics of the stores, and of the memory of all holders."""
        yield from self._blob.meter.measures()
        yield from self._documents.meter.measures()
        yield Measurement(STORE_RETRIES, self._machine.conflicts, ("conflict",))
        yield Measurement(STORE_RETRIES, self._machine.failures, ("failure",))
        for use in self.ledger.uses():
            yield Measurement(MEMORY_BYTES, use.bytes_memory, (use.kind,))
            yield Measurement(MEMORY_MAPPED_BYTES, use.bytes_mapped, (use.kind,))

    # -- shards -----------------------------------------------------------------------------------

    async def create_shards(
        self, new: Sequence[NewShard], extra: Sequence[CompareAndSet] = ()
    ) -> bool:
        """Create all shards and change the `extra` keys, or nothing.

        Return False if a shard exists or an extra key was changed. Raises `InvalidUsage` and
        `StorageError`.
        """
        if not new:
            return await self.compare_and_set(extra)
        call = next(self._calls)
        states = {
            shard.id: created(shard, self._parts.writer, call)
            for shard in new
            if check_name(shard.id)
        }

        def change(documents: ShardDocuments) -> ChangeOutcome[bool]:
            return create_all(documents, states, self._parts.writer, call)

        try:
            return await self._machine.change(list(states), change, extra=extra)
        except SeqnoMismatch:
            return False

    async def drop_shards(
        self, ids: Sequence[ShardId], extra: Sequence[CompareAndSet] = ()
    ) -> bool:
        """Delete all shards and change the `extra` keys, or nothing.

        Return False if a shard does not exist or an extra key was changed. Blobs are deleted now;
        those in use become orphans.
        """
        gone: dict[ShardId, ShardState] = {}

        def change(documents: ShardDocuments) -> ChangeOutcome[bool]:
            return drop_all(documents, ids, gone)

        try:
            done = await self._machine.change(list(ids), change, extra=extra)
        except SeqnoMismatch:
            return False
        if not done:
            return False
        # The shards were deleted, by this process or another. Delete their blobs first: no state
        # names them any more, and the check below may fail.
        await self.upkeep.dropped(list(gone.values()))
        return await self._applied(extra)

    async def _applied(self, extra: Sequence[CompareAndSet]) -> bool:
        for op in extra:
            try:
                head = await self._documents.head(op.key)
            except StorageError as error:
                # The read failed, but the drop may have succeeded.
                raise StorageError(str(error), determinate=False) from error
            if (None if head is None else head.data) != op.data:
                return False
        return True

    async def hand_over(
        self,
        owner: tuple[str, str],
        former: Sequence[str],
        expected: Mapping[ShardId, Frontier],
        *,
        new: Sequence[NewShard] = (),
        schemas: Mapping[ShardId, TableSchema] | None = None,
        extra: Sequence[CompareAndSet] = (),
    ) -> bool:
        """Make a dataflow the owner of shards at the expected uppers, create others, and change the
        `extra` keys, all or nothing (`ownership.hand_over`).

        Return False if an upper differs, a new shard exists, or an extra key was changed. Raises
        `UnknownObject`, `IncompatibleSchema` and `StorageError`.
        """
        call = next(self._calls)
        states = {shard.id: created(shard, self._parts.writer, call) for shard in new}
        grown = schemas or {}

        def change(documents: ShardDocuments) -> ChangeOutcome[bool]:
            return hand_over(documents, owner, former, expected, states, grown)

        try:
            done = await self._machine.change([*expected, *states], change, extra=extra)
        except SeqnoMismatch:
            return False
        # After an unknown outcome, `hand_over` may have found that an earlier attempt succeeded.
        return done and await self._applied(extra)

    async def state(self, shard: ShardId) -> ShardState:
        """Return the cached state, or read it. Raises `UnknownObject`."""
        return await self._machine.state(shard)

    async def upper(self, shard: ShardId) -> Frontier:
        """Return the sealed upper, including the shared upper for a table. Raises
        `UnknownObject`."""
        return (await self._observe(shard))[1]

    async def recent_upper(self, shard: ShardId) -> Frontier:
        """Return the upper in the store now (linearizable): it includes every append that any
        process had acknowledged before this call. Raises `UnknownObject`."""
        # The tables' upper first, as in `_observe`.
        if (await self._machine.state(shard)).tables:
            await self._machine.refresh_tables()
        await self._machine.refresh(shard)
        return await self.upper(shard)

    async def tables_upper(self) -> Frontier:
        """Return the upper that all tables share."""
        return (await self._machine.tables()).upper

    async def _observe(self, shard: ShardId) -> tuple[ShardState, Frontier]:
        # The tables' upper first: whatever it seals is in any state that is read later.
        tables = await self._machine.tables()
        state = await self._machine.state(shard)
        return state, sealed(state, tables.upper)

    async def wait_upper(
        self, shard: ShardId, beyond: Frontier, check: Callable[[], None] = lambda: None
    ) -> Frontier:
        """Wait until the upper is beyond a frontier, and return it.

        `check` is called after each change and may raise. Raises `UnknownObject` (also if the shard
        is dropped meanwhile), `InvalidUsage` (`beyond` is the empty frontier) and `ResourceClosed`.
        """
        if beyond >= EMPTY:
            raise InvalidUsage(
                f"shard {shard}: cannot wait for an upper beyond {format_frontier(beyond)}"
            )
        while True:
            if self._closed:
                raise ResourceClosed("the state directory is closed")
            state, upper = await self._observe(shard)
            check()
            if upper > beyond:
                return upper
            # No await between the check and the wait; otherwise a change in between would be
            # missed.
            keys = [shard_key(shard)] + ([TABLES_UPPER] if state.tables else [])
            await self._waiters.wait(keys)

    async def follow(self) -> None:
        """Follow the changes of other processes to the same stores, and renew leases, until
        cancelled or the store is closed.

        Raises `WriterFenced` when another service owns the stores.
        """
        await follow(self._machine, self.consensus, self._settings, self.upkeep.renew_leases)

    # -- writing ----------------------------------------------------------------------------------

    async def write_parts(self, shard: ShardId, updates: pa.Table) -> tuple[BatchPart, ...]:
        """Write the updates as durable parts, sorted by time, small ones inline.

        The caller appends them or passes them to `discard_parts`. Raises `UnknownObject`,
        `TypeMismatch`, `InvalidUsage`, `StoreFull` and `StorageError`.
        """
        state = await self.state(shard)
        limits = self._settings
        inline = limits.inline_part_bytes_max
        room = limits.inline_bytes_per_shard_max - inline
        # Inline parts are part of the document. If the whole document fits, no sum is needed.
        fits = 0 < self._machine.document_bytes(shard) <= room or state.inline_bytes <= room
        if INLINE_ROOM.crossed(not fits):
            inline = 0
        return await self._parts.write(state, updates, inline)

    async def adopt_file(
        self,
        shard: ShardId,
        path: Path,
        rows: int,
        time_min: Time,
        time_max: Time,
    ) -> BatchPart:
        """Move a Parquet file (columns, ``__time``, ``__diff``) into the store as a part. Raises
        the same errors as `write_parts`."""
        state, times = await self.state(shard), (time_min, time_max)
        return await self._parts.adopt(state, path, rows, times)

    def reserve_folder(self, shard: ShardId) -> tuple[str, str, str] | None:
        """Reserve a prefix under which Spark may write blobs.

        Return the reservation (for `release_folder`), the bucket's URL and the prefix of keys; None
        if the blobs are not in a bucket.
        """
        prefix = self._parts.reserve(shard)
        place = self._parts.place_of(prefix)
        if place is None:
            self._parts.release(prefix)
            return None
        return prefix, *place

    def release_folder(self, reserved: str) -> None:
        """End a reservation. Blobs that were written under it and not adopted become orphans."""
        self._parts.release(reserved)

    async def adopt_written(
        self, shard: ShardId, reserved: str, written: Sequence[WrittenBlob]
    ) -> list[BatchPart]:
        """Take over blobs that Spark wrote under a reservation, as parts to append or discard.
        Raises `InvalidUsage` if their columns differ, and `StorageError`."""
        return await self._parts.adopt_written(await self.state(shard), reserved, written)

    async def stage_parts(self, shard: ShardId, rows: pa.Table) -> tuple[BatchPart, ...]:
        """Write updates without a time as durable parts, always as files, all at time 0.

        When their time is known, the caller converts the parts with `placed` and appends them, or
        passes them to `discard_parts`. Raises the same errors as `write_parts`.
        """
        state = await self.state(shard)
        # Not cached in decoded form: nobody reads them before they are placed.
        return await self._parts.write(state, at_time(rows, 0), 0, keep=False)

    def offer_parts(self, parts: Sequence[BatchPart]) -> None:
        """Offer parts to any claimant for `stash_orphan_ms`. Unclaimed parts become orphans."""
        self._parts.offer(parts, self._settings.stash_orphan_ms)

    async def discard_parts(self, parts: Sequence[BatchPart]) -> None:
        """Delete parts that will not be appended. Parts of an append in progress are left alone."""
        await self._parts.discard(parts)

    def pending_blobs(self) -> list[str]:
        """Return the keys of blobs that this process wrote or claimed and that no state names
        yet."""
        return self._parts.pending_keys()

    async def claim(self, shard: ShardId, parts: Sequence[BatchPart]) -> bool:
        """Take over parts that another process wrote and did not append. Return False, and take
        none, if one is missing. Raises `StorageError`."""
        return await self._parts.claim(shard, parts)

    async def append(
        self,
        appends: Sequence[ShardAppend],
        *,
        tables_upper: tuple[Frontier, Frontier] | None = None,
        extra: Sequence[CompareAndSet] = (),
    ) -> AppendCommitted | UpperMismatch:
        """Append to all shards, move the holds and the tables' upper, and change the `extra` keys:
        all or nothing, and at most once despite any failure.

        Waits (backpressure) while a shard's state has grown too large. Raises `UnknownObject`,
        `InvalidUsage` (an interval or a part does not fit), `ReadBelowSince` (a new hold),
        `WriterFenced` (an extra key was changed by another process), `StoreFull`, and
        `StorageError` (if indeterminate, read the uppers again).
        """
        return await self._appender.append(appends, tables_upper, extra)

    # -- holds ------------------------------------------------------------------------------------

    async def set_hold(self, shard: ShardId, holder: str, since: Time) -> None:
        """Take or move one durable hold, as `set_holds` does."""
        await self.set_holds([(shard, holder, since)])

    async def set_holds(self, holds: Sequence[tuple[ShardId, str, Time]]) -> None:
        """Take or move durable holds (shard, holder, since), all in one set.

        An existing hold stops at the shard's since if it would go below. Raises `ReadBelowSince`
        for a new hold below the since, and `UnknownObject`.
        """

        def change(documents: ShardDocuments) -> ChangeOutcome[None]:
            return ChangeOutcome(None, with_holds(documents, {}, holds))

        if holds:
            await self._machine.change([shard for shard, _, _ in holds], change)

    async def drop_hold(self, shard: ShardId, holder: str) -> None:
        """Drop a hold. Does nothing if the hold or the shard does not exist."""

        def change(documents: ShardDocuments) -> ChangeOutcome[None]:
            state = documents.shards[shard]
            then = state and without_hold(state, holder)
            return ChangeOutcome(None) if then is state else ChangeOutcome(None, {shard: then})

        await self._machine.change([shard], change)

    # -- reading ----------------------------------------------------------------------------------

    async def open_reader(self, shard: ShardId, reader_id: str) -> LeasedReader:
        """Open a reader with a lease at the shard's since. Raises `UnknownObject`."""
        made: list[LeasedReader] = []

        def change(documents: ShardDocuments) -> ChangeOutcome[None]:
            # Under the shard's lock, so no change is in progress that does not know this lease.
            since = documents.shard(shard).since
            if not made:
                made.append(
                    LeasedReader(
                        shard, reader_id, since, self.wait_upper, self._book, self._observe
                    )
                )
            made[0].since = since
            # If other processes write to the store, a lease counts only once it is durable; this
            # change writes it.
            return ChangeOutcome(None, {} if self.exclusive else {shard: documents.shard(shard)})

        try:
            await self._machine.change([shard], change)
        except BaseException:
            for reader in made:
                await reader.close()
            raise
        return made[0]

    async def fetch(self, part: BatchPart, schema: TableSchema) -> pa.Table:
        """Return a part's updates, verified, with this schema of its shard.

        Raises `CorruptData` (a byte differs, or a file that a state names is missing), `LeaseLost`
        (the part was deleted) and `TypeMismatch` (a value only fits a newer schema).
        """
        return await self._parts.fetch(part, schema)

    async def save(self, part: BatchPart, path: Path) -> None:
        """Copy a part's blob to `path`, verified. Raises the same errors as `fetch`."""
        await self._parts.save(part, path)

    def path(self, part: BatchPart) -> str | None:
        """Return the path of a part's file, for Spark to read; None for an inline part or in
        memory."""
        return self._parts.path(part)

    def place(self, part: BatchPart) -> tuple[str, str] | None:
        """Return the URL of a part's bucket (``s3://bucket``) and its key there, for Spark to read;
        None if it is not in a bucket."""
        return self._parts.place(part)

    async def _missing(self, shard: ShardId, key: str) -> StorageError:
        state = await self._machine.refresh(shard)
        return why_missing(shard, key, state, self._book.holding(shard, key))

    # -- upkeep -----------------------------------------------------------------------------------

    async def maintain(self, shard: ShardId) -> None:
        """Compact the shard if due, delete unneeded parts and renew leases. Safe at any time.

        Raises `UnknownObject`, `StoreFull`, `CorruptData` and `StorageError`.
        """
        await self.upkeep.maintain(shard)

    async def reclaim(self, shard: ShardId) -> None:
        """Free space that is no longer needed in a shard to which nobody appends, as
        `ShardUpkeep.reclaim` does. Raises the same errors as `maintain`."""
        await self.upkeep.reclaim(shard)

    def known_shards(self) -> list[ShardId]:
        """Return the shards that this process has used."""
        return self._machine.known_shards()

    async def collect_orphans(self) -> int:
        """Delete blobs that were unnamed for the whole grace period, and return their number.

        The grace period is measured between listings by this client, so call this repeatedly, or
        twice at least one grace period apart.
        """
        return await self._orphans.collect()
