"""The front of this room: shards, shared by all actors of a process.

A `PersistClient` owns a state directory (or two stores in memory) and keeps one cached state a
shard. Appends are compare-and-sets over all shards they name and, for tables, their shared
upper. Who waits for an upper is woken by the change itself: within a process nothing polls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from random import Random

import anyio
import pyarrow as pa

from actors.errors import Closed, InvalidUsage, StorageError
from actors.kernel import Clock
from actors.memory_ledger import MemoryLedger
from actors.persist.appender import Appender
from actors.persist.appending import with_holds
from actors.persist.blob_memory import MemoryBlob
from actors.persist.change import Documents, Mismatch, Outcome
from actors.persist.consensus_memory import MemoryConsensus
from actors.persist.creating import create_all, drop_all
from actors.persist.critical import CriticalReaders
from actors.persist.directory import StateDirectory
from actors.persist.fence import FencedConsensus
from actors.persist.following import follow
from actors.persist.location import Blob, Cas, Consensus, VersionedData, check_name
from actors.persist.machine import Machine
from actors.persist.opening import open_stores, process_name
from actors.persist.orphans import Orphans
from actors.persist.part_lists import PartLists
from actors.persist.part_store import PartStore
from actors.persist.reader import LeaseBook, Reader, why_missing
from actors.persist.schemas import SchemaRegistry
from actors.persist.shard import (
    TABLES_UPPER,
    Append,
    Appended,
    NewShard,
    Part,
    ShardState,
    UpperMismatch,
    created,
    sealed,
    shard_key,
    without_hold,
)
from actors.persist.stashed import StashedBlobs
from actors.persist.upkeep import Upkeep
from actors.persist.waiting import Waiters
from actors.plan.schema import Schema
from actors.plan.updates import at_time
from actors.progress import EMPTY, Frontier, ShardId, Time, format_frontier
from actors.settings import Settings
from actors.threshold_probes import INLINE_ROOM
from actors.tracing.trail import Trail


class PersistClient:
    """Durable shards. Open it with `open` or `in_memory`; every call may raise `StorageError`."""

    def __init__(
        self,
        blob: Blob,
        consensus: Consensus,
        settings: Settings,
        clock: Clock,
        *,
        exclusive: bool = True,
        random: Random | None = None,
        directory: StateDirectory | None = None,
        process: str | None = None,
        guest: bool = False,
        scratch: Path | None = None,
    ) -> None:
        """`exclusive`: no other process writes to these stores but guests, so leases need no write
        of their own, and one that is not of this process is of a dead one. `process` names us in
        documents, as no other process is named. `guest`: we are one (`guests.py`). `scratch`: for
        what compaction spills, where there is no state directory."""
        self.consensus = consensus
        self._settings = settings
        self._clock = clock
        self.exclusive = exclusive = exclusive and not guest
        self._directory = directory
        self.trail = Trail()
        """Which traces led to which appends."""
        self._waiters = Waiters()
        self._closed, self._calls = False, count(1)
        random = random or Random()
        process = process or process_name(random)
        fenced = consensus if isinstance(consensus, FencedConsensus) else None
        former = "" if fenced is None else fenced.former
        alone = exclusive or (fenced is not None and not guest)  # guests collect nothing
        self._book = LeaseBook(
            clock, settings.reader_lease_ms, process, exclusive=exclusive, dead=former, guest=guest
        )
        self.lists = PartLists(blob, clock)
        """Descriptions of parts that are in no document."""
        self._machine = Machine(
            consensus,
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
        """What columns shards have had."""
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
        """Memory that users of this client hold."""
        self.critical = CriticalReaders(self._machine, self._parts.writer, self._calls)
        """Holds with an owner."""
        self.stashed = StashedBlobs(blob, self._parts.writer)
        """Results on their way to a reader."""
        scratch = scratch if directory is None else directory.scratch
        self.upkeep = Upkeep(
            self._machine, self._parts, self._book, settings, clock, scratch=scratch, guest=guest
        )
        """For those who look after single shards from outside."""
        self._appender = Appender(
            self._machine, self._parts, self.upkeep, settings, clock, self.trail, self._calls
        )
        self._orphans = Orphans(self._machine, self._parts, blob, self._book, settings, clock)

    @classmethod
    async def open(
        cls,
        directory: Path,
        settings: Settings,
        clock: Clock,
        random: Random | None = None,
    ) -> PersistClient:
        """Opens or makes a state directory, alone, and the stores that the settings name instead
        of its own. Raises `StateDirectoryError` when another process has it, when it is of a newer
        format, or when it cannot be used; `BadSettings`, `InvalidUsage`, `Corrupt`,
        `StorageError`."""
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
        cls, settings: Settings, clock: Clock, random: Random | None = None
    ) -> PersistClient:
        """Over fresh stores in memory, for tests."""
        return cls(MemoryBlob(clock), MemoryConsensus(), settings, clock, random=random)

    async def close(self) -> None:
        """Closes readers, wakes who waits (`Closed`), frees the stores; twice is fine."""
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            await self.upkeep.close_readers(written=not self.exclusive)
            self._waiters.wake_all()
            await self.consensus.close()
            if self._directory is not None:
                await self._clock.run_blocking(self._directory.close)

    # -- documents of others ----------------------------------------------------------------------

    async def head(self, key: str) -> VersionedData | None:
        """A consensus document (of the catalog, of the oracle), or None."""
        return await self.consensus.head(key)

    async def compare_and_set(self, ops: Sequence[Cas]) -> bool:
        """Changes documents that are no shards: all or none. An indeterminate failure is the
        caller's to resolve."""
        return await self.consensus.compare_and_set(ops)

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Keys of documents."""
        return await self.consensus.list_keys(prefix)

    async def list_shards(self) -> list[ShardId]:
        """Every shard there is."""
        prefix = shard_key("")
        return [key.removeprefix(prefix) for key in await self.list_keys(prefix)]

    # -- shards -----------------------------------------------------------------------------------

    async def create_shards(self, new: Sequence[NewShard], extra: Sequence[Cas] = ()) -> bool:
        """Creates all, with the `extra` keys, or none: False when a shard exists or an extra
        key was changed. Raises `InvalidUsage`, `StorageError`."""
        if not new:
            return await self.compare_and_set(extra)
        call = next(self._calls)
        states = {
            shard.id: created(shard, self._parts.writer, call)
            for shard in new
            if check_name(shard.id)
        }

        def change(documents: Documents) -> Outcome[bool]:
            return create_all(documents, states, self._parts.writer, call)

        try:
            return await self._machine.change(list(states), change, extra=extra)
        except Mismatch:
            return False

    async def drop_shards(self, ids: Sequence[ShardId], extra: Sequence[Cas] = ()) -> bool:
        """Removes all, with the `extra` keys, or none: False when one does not exist or an
        extra key was changed. Blobs go now, or when their readers are done."""
        gone: dict[ShardId, ShardState] = {}

        def change(documents: Documents) -> Outcome[bool]:
            return drop_all(documents, ids, gone)

        try:
            done = await self._machine.change(list(ids), change, extra=extra)
        except Mismatch:
            return False
        if not done:
            return False
        # The shards are gone, whoever dropped them: so are their blobs, whatever fails below.
        await self.upkeep.dropped(list(gone.values()))
        return await self._applied(extra)

    async def _applied(self, extra: Sequence[Cas]) -> bool:
        for op in extra:
            try:
                head = await self.consensus.head(op.key)
            except StorageError as error:
                # The read did not happen; the drop that it is to tell of may have.
                raise StorageError(str(error), determinate=False) from error
            if (None if head is None else head.data) != op.data:
                return False
        return True

    async def state(self, shard: ShardId) -> ShardState:
        """The state as this process knows it. Raises `UnknownObject`."""
        return await self._machine.state(shard)

    async def upper(self, shard: ShardId) -> Frontier:
        """What is sealed; of a table, by the shared upper too. Raises `UnknownObject`."""
        return (await self._observe(shard))[1]

    async def recent_upper(self, shard: ShardId) -> Frontier:
        """The upper as it is in the store now: at least what anybody, in any process, knew to be
        appended when this was called. Raises `UnknownObject`."""
        if (await self._machine.state(shard)).tables:
            await self._machine.refresh_tables()
        await self._machine.refresh(shard)
        return await self.upper(shard)

    async def tables_upper(self) -> Frontier:
        """The upper that all tables share."""
        return (await self._machine.tables()).upper

    async def _observe(self, shard: ShardId) -> tuple[ShardState, Frontier]:
        # The tables' upper first: what it seals is in any state seen later.
        tables = await self._machine.tables()
        state = await self._machine.state(shard)
        return state, sealed(state, tables.upper)

    async def wait_upper(
        self, shard: ShardId, beyond: Frontier, check: Callable[[], None] = lambda: None
    ) -> Frontier:
        """The upper, once it is beyond a frontier. Raises `UnknownObject` (also when the shard is
        dropped meanwhile), `InvalidUsage` (nothing is beyond the empty one), `Closed`, and what
        `check` raises, which is asked whenever something has changed."""
        if beyond >= EMPTY:
            raise InvalidUsage(f"shard {shard}: no upper lies beyond {format_frontier(beyond)}")
        while True:
            if self._closed:
                raise Closed("the state directory is closed")
            state, upper = await self._observe(shard)
            check()
            if upper > beyond:
                return upper
            keys = [shard_key(shard)] + ([TABLES_UPPER] if state.tables else [])
            await self._waiters.wait(keys)

    async def follow(self) -> None:
        """Keeps up with other processes on the same stores, so that who waits here wakes for what
        they change: by word of the store where it gives any, else by looking every
        `store_poll_ms`. Renews leases, too. Until it is cancelled, or the store is closed. Raises
        `Fenced` once another service owns the stores."""
        await follow(self._machine, self.consensus, self._settings, self.upkeep.renew_leases)

    # -- writing ----------------------------------------------------------------------------------

    async def write_parts(self, shard: ShardId, updates: pa.Table) -> tuple[Part, ...]:
        """Durable parts of these updates, sorted by time, small ones inline; to be appended or
        given to `discard_parts`. Raises `UnknownObject`, `TypeMismatch`, `InvalidUsage`,
        `StoreFull`, `StorageError`."""
        state = await self.state(shard)
        limits = self._settings
        inline = limits.inline_part_bytes_max
        room = limits.inline_bytes_per_shard_max - inline
        # They lie in the document: where all of it fits there is nothing to add up.
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
        has_errors: bool = False,
    ) -> Part:
        """Moves a Parquet file (columns, ``__time``, ``__diff``) in as a part. Raises as
        `write_parts` does."""
        state, times = await self.state(shard), (time_min, time_max)
        return await self._parts.adopt(state, path, rows, times, has_errors)

    async def stage_parts(self, shard: ShardId, rows: pa.Table) -> tuple[Part, ...]:
        """Durable parts of updates without a time, always files, all at 0: to be `placed` when
        their time is known, then appended, or given to `discard_parts`. Nothing keeps them in
        memory, since nobody reads them before. Raises as `write_parts` does."""
        state = await self.state(shard)
        return await self._parts.write(state, at_time(rows, 0), 0, keep=False)

    def offer_parts(self, parts: Sequence[Part]) -> None:
        """Hands parts to whoever claims them within `stash_orphan_ms`; then they are orphans."""
        self._parts.offer(parts, self._settings.stash_orphan_ms)

    async def discard_parts(self, parts: Sequence[Part]) -> None:
        """Deletes parts that will not be appended; those of an append under way are left alone."""
        await self._parts.discard(parts)

    def pending_blobs(self) -> list[str]:
        """Keys of those that this process has written, or claimed, and no state names yet."""
        return self._parts.pending_keys()

    async def claim(self, shard: ShardId, parts: Sequence[Part]) -> bool:
        """Takes over parts that an earlier process wrote and did not append, to be appended or
        discarded. False when one is gone; then none is taken. Raises `StorageError`."""
        return await self._parts.claim(shard, parts)

    async def append(
        self,
        appends: Sequence[Append],
        *,
        tables_upper: tuple[Frontier, Frontier] | None = None,
        extra: Sequence[Cas] = (),
    ) -> Appended | UpperMismatch:
        """Appends to all shards, moves the holds, moves the tables' upper from one value to
        another, changes the `extra` keys: all or none. Done at most once, whatever fails. Waits
        for the upkeep of a shard whose state has grown too large.

        Raises `UnknownObject`, `InvalidUsage` (an interval or a part does not fit),
        `ReadBelowSince` (a new hold), `Fenced` (an extra key was changed by another),
        `StoreFull`, `StorageError` (indeterminate: read the uppers again)."""
        return await self._appender.append(appends, tables_upper, extra)

    # -- holds ------------------------------------------------------------------------------------

    async def set_hold(self, shard: ShardId, holder: str, since: Time) -> None:
        """Takes or moves one durable hold; see `set_holds`."""
        await self.set_holds([(shard, holder, since)])

    async def set_holds(self, holds: Sequence[tuple[ShardId, str, Time]]) -> None:
        """Takes or moves durable holds (shard, holder, since), all in one set. A hold that
        exists never goes below the shard's since: it stops there. Raises `ReadBelowSince` for
        a new one that asks for less, `UnknownObject`."""

        def change(documents: Documents) -> Outcome[None]:
            return Outcome(None, with_holds(documents, {}, holds))

        if holds:
            await self._machine.change([shard for shard, _, _ in holds], change)

    async def drop_hold(self, shard: ShardId, holder: str) -> None:
        """Gives up a hold; no error if there is none, or no shard."""

        def change(documents: Documents) -> Outcome[None]:
            state = documents.shards[shard]
            then = state and without_hold(state, holder)
            return Outcome(None) if then is state else Outcome(None, {shard: then})

        await self._machine.change([shard], change)

    # -- reading ----------------------------------------------------------------------------------

    async def open_reader(self, shard: ShardId, reader_id: str) -> Reader:
        """A reader under a lease at the shard's since. Raises `UnknownObject`."""
        made: list[Reader] = []

        def change(documents: Documents) -> Outcome[None]:
            # Under the shard's lock: no change is under way that does not know this lease.
            since = documents.shard(shard).since
            if not made:
                made.append(
                    Reader(shard, reader_id, since, self.wait_upper, self._book, self._observe)
                )
            made[0].since = since
            # Where others write it is one once it is written, with this very change.
            return Outcome(None, {} if self.exclusive else {shard: documents.shard(shard)})

        try:
            await self._machine.change([shard], change)
        except BaseException:
            for reader in made:
                await reader.close()
            raise
        return made[0]

    async def fetch(self, part: Part, schema: Schema) -> pa.Table:
        """A part's updates, checked to be what was written, as this schema of its shard's. Raises
        `Corrupt` (a byte differs, or a file is gone that should be there), `LeaseLost` (it was
        deleted), `TypeMismatch` (a value fits a newer schema only)."""
        return await self._parts.fetch(part, schema)

    async def save(self, part: Part, path: Path) -> None:
        """Copies a blob into a file of the caller's, checked. Raises as `fetch` does."""
        await self._parts.save(part, path)

    def path(self, part: Part) -> str | None:
        """A file that Spark can read; None for an inline part or in memory."""
        return self._parts.path(part)

    async def heartbeat(self, reader: Reader) -> None:
        """Writes the reader's lease anew. Raises `LeaseLost` when it ran out before, `Closed`,
        `UnknownObject`, `StorageError`."""
        reader.check()
        await self.upkeep.heartbeat(reader.shard)
        reader.check()

    async def _missing(self, shard: ShardId, key: str) -> StorageError:
        state = await self._machine.refresh(shard)
        return why_missing(shard, key, state, self._book.holding(shard, key))

    # -- upkeep -----------------------------------------------------------------------------------

    async def maintain(self, shard: ShardId) -> None:
        """Compacts the shard if it is due, deletes parts that nobody needs, renews leases. Safe
        at any time. Raises `UnknownObject`, `StoreFull`, `Corrupt`, `StorageError`."""
        await self.upkeep.maintain(shard)

    async def collect_orphans(self) -> int:
        """Deletes blobs that were unnamed for the whole grace, as this client has seen: call it
        again and again, or twice the grace apart. How many it deleted."""
        return await self._orphans.collect()
