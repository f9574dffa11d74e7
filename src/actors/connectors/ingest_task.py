"""Runs one source and appends what it returns to durable shards.

Theory of operation. The task opens the source at the position in its remap shard, then calls `next`
repeatedly, each call as an effect, so that a stop takes effect immediately. Rows are staged
(`ingest.staging`, pure). At marks they become one append to all shards of the source
(`ingest.shards`), one at a time, while the next rows are read.

Rules. At most one read, one append and one spill are under way. Any error ends the task: its last
message is `IngestEnded` with the reason, and the owner starts another task, with backoff. Nothing
is lost or ingested twice, because the next task opens the source at the durable position.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, assert_never

import anyio
import msgspec

from actors.connectors.ingest.contents import KeyedContents
from actors.connectors.ingest.intake import IntakeDone, SourceIntake, Work
from actors.connectors.ingest.meters import OF_SOURCE, TaskMeters
from actors.connectors.ingest.shards import IngestShards
from actors.connectors.ingest.staging import IngestBatch, IngestStaging
from actors.connectors.sources.source import (
    ExportFailed,
    Given,
    SourceConnector,
    SourceExport,
    SourceLag,
    SourceRows,
    SourceUpserts,
    hint_of,
)
from actors.durable.arrangement import ArrangementStatistics
from actors.durable.persist import BatchPart
from actors.model.protocol.message_parts import OperatorStatistics
from actors.runtime.errors import PenstockError, UnknownObject
from actors.runtime.kernel import Actor, ActorAddress
from actors.runtime.memory_ledger import MemoryUse
from actors.runtime.progress import Frontier, ObjectId
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.ingest")


class IngestCounts(msgspec.Struct, frozen=True, gc=False):
    """Counters of one task since it started."""

    messages: int = 0
    rows_inserted: int = 0
    rows_deleted: int = 0
    bytes: int = 0
    snapshot_rows: int = 0
    commits: int = 0


class IngestProgressed(msgspec.Struct, frozen=True, gc=False):
    """Task → owner: the source is sealed below `upper`, and each export up to its upper in
    `sealed`."""

    id: ObjectId
    number: int
    upper: Frontier
    sealed: tuple[tuple[str, Frontier], ...]
    position: str
    counts: IngestCounts
    lag: SourceLag
    failed: tuple[ExportFailed, ...] = ()
    """Exports that failed with this append."""
    rows_staged: int = 0
    """Rows that were read and are not durable yet."""
    outside_ms: int | None = None
    """Commit time of the batch's newest transaction in the external system (Unix ms)."""
    held: tuple[tuple[str, ArrangementStatistics], ...] = ()
    """Sizes of the indexes in which old rows of exports are looked up."""
    operators: tuple[OperatorStatistics, ...] = ()


class IngestRunning(msgspec.Struct, frozen=True, gc=False):
    """Task → owner: the source is open. `failed` are the exports that failed earlier, with their
    errors."""

    id: ObjectId
    number: int
    upper: Frontier
    sealed: tuple[tuple[str, Frontier], ...]
    failed: tuple[tuple[str, str], ...]


class IngestEnded(msgspec.Struct, frozen=True, gc=False):
    """Task → owner, the last message: the task has failed, with the reason."""

    id: ObjectId
    number: int
    error: str
    hint: str
    is_dropped: bool = False
    """True if one of its shards no longer exists, because the source or one of its tables is being
    dropped."""


class _Opened(msgspec.Struct, frozen=True, gc=False):
    """The source is open at the durable position."""


class _Returned(msgspec.Struct, frozen=True, gc=False):
    """The source has returned something."""

    given: Given


class _Committed(msgspec.Struct, frozen=True, gc=False):
    """An append was committed; `batch` is None if it only advanced the upper."""

    upper: Frontier
    batch: IngestBatch | None


class _Spilled(msgspec.Struct, frozen=True, gc=False):
    """Spilled rows were written as parts."""

    parts: dict[str, tuple[BatchPart, ...]]


class _Worked(msgspec.Struct, frozen=True, gc=False):
    """An effect of the intake has ended."""

    done: IntakeDone


class _Gathered(msgspec.Struct, frozen=True, gc=False):
    """Complete rows have waited for more as long as they may."""


class _Failed(msgspec.Struct, frozen=True, gc=False):
    """An effect has failed."""

    error: Exception


class _Tick(msgspec.Struct, frozen=True, gc=False):
    """Timer to seal the shards of an idle source."""


class ReconfigureIngest(msgspec.Struct, frozen=True, gc=False):
    """Owner → task: use these settings from now on."""

    settings: Settings


_Message: TypeAlias = (
    ReconfigureIngest
    | _Opened
    | _Returned
    | _Worked
    | _Committed
    | _Spilled
    | _Gathered
    | _Failed
    | _Tick
)


class IngestTask(Actor[_Message]):
    """Sends `IngestRunning`, `IngestProgressed` and `IngestEnded` to `owner`, each with
    `number`."""

    def __init__(
        self,
        id: ObjectId,
        number: int,
        exports: Sequence[SourceExport],
        shards: IngestShards,
        source: Callable[[], SourceConnector],
        owner: ActorAddress[Any],
        settings: Settings,
        scratch: Path,
    ) -> None:
        """Make a task. `scratch` is a folder for this task alone, created when needed and removed
        at the end."""
        self._scratch = scratch
        self._kept = 0
        """Number of keyed contents made so far; names their folders."""
        self._id = id
        self._number = number
        self._exports = tuple(exports)
        self._shards = shards
        self._make = source
        self._owner = owner
        self._settings = settings
        # None until the source is open.
        self._staging: IngestStaging | None = None
        self._intake: SourceIntake | None = None
        # What is under way: a read of the source, an effect of the intake.
        self._asking = self._working = False
        # What is under way: an append, a spill, a wait for more rows; and whether the task has
        # ended.
        self._committing = self._spilling = self._ended = self._gathering = False
        self._counts = IngestCounts()
        """Counters for the owner."""
        self._doing = "opening"
        """Current activity, for `describe`."""

    async def on_start(self) -> None:
        """Open the shards, then the source."""
        self._source = self._make()
        self._meters = TaskMeters(self.ctx.monotonic_ms, OF_SOURCE, self._id)
        self._shards.ledger.add(self.memory)

        async def open_all() -> _Opened:
            await self._shards.open()
            shards = self._shards
            live = [
                msgspec.structs.replace(each, is_new=shards.is_empty(each.name))
                for each in self._exports
                if each.name not in shards.failed
            ]
            await self._source.open(live, shards.position)
            return _Opened()

        self.ctx.effect(open_all, done=lambda opened: opened, failed=_Failed)

    def memory(self) -> Iterator[MemoryUse]:
        """Return the memory of staged rows and of each export's index, for a `MemoryLedger`."""
        stage, intake = self._staging, self._intake
        if stage is not None and intake is not None:
            yield MemoryUse("staged", self._id, stage.rows_staged, stage.bytes + intake.bytes)
            for name, held in intake.held().items():
                sizes = held.rows, held.bytes_memory, held.bytes_mapped
                yield MemoryUse("upserts", f"{self._id}/{name}", *sizes)

    async def on_stop(self) -> None:
        """Close the source, and delete parts that were spilled and not appended."""
        with anyio.CancelScope(shield=True):
            await self._source.close()
            if self._staging is not None:
                await self._shards.discard(self._staging.parts())
            if self._intake is not None:
                await self._intake.close()
            await self.ctx.clock.run_blocking(
                lambda: shutil.rmtree(self._scratch, ignore_errors=True)
            )

    async def receive(self, message: _Message) -> None:
        """Handle the result of an effect, or a message of the owner."""
        if self._ended:
            return
        try:
            await self._receive(message)
        except PenstockError as error:
            self._end(error)

    async def _receive(self, message: _Message) -> None:
        match message:
            case _Opened():
                self._opened()
            case _Returned(given):
                self._asking = False
                if isinstance(given, SourceRows | SourceUpserts):
                    self._count(given)
                self._opened_intake.give(given)
            case _Worked(done):
                self._working = False
                self._opened_intake.done(done)
            case _Committed(upper, batch):
                self._committing = False
                self._committed(upper, batch)
            case _Spilled(parts):
                self._spilling = False
                for export, held in parts.items():
                    self._opened_staging.wrote(export, held)
                self._opened_staging.spill_ended()
            case _Gathered():
                self._gathering = False
            case _Failed(error):
                self._end(error)
                return
            case ReconfigureIngest(settings):
                self._settings = settings
                if self._staging is not None:
                    self._staging.bytes_max = settings.source_inflight_bytes_max
            case _Tick():
                self.ctx.after(self._settings.source_tick_ms, _Tick())
                self._tick()
            case _:
                assert_never(message)
        self._start_work()

    @property
    def _opened_staging(self) -> IngestStaging:
        assert self._staging is not None, "the source is open"
        return self._staging

    @property
    def _opened_intake(self) -> SourceIntake:
        assert self._intake is not None, "the source is open"
        return self._intake

    def _opened(self) -> None:
        shards = self._shards
        bytes_max = self._settings.source_inflight_bytes_max
        self._staging = IngestStaging(shards.exports, shards.failed, bytes_max)
        self._intake = SourceIntake(self._staging, shards, self._contents_of, bytes_max // 4)
        self._doing = "reading"
        failed = tuple(sorted(shards.failed.items()))
        self._owner.reply(
            IngestRunning(self._id, self._number, shards.upper, shards.sealed, failed)
        )
        self.ctx.after(0, _Tick())

    # -- pipeline --------------------------------------------------------------------------------

    def _contents_of(self, export: str) -> KeyedContents:
        self._kept += 1
        folder = self._scratch / f"{self._kept}"
        return KeyedContents(export, self._shards.exports[export].schema, folder, self.ctx.clock)

    def _count(self, given: SourceRows | SourceUpserts) -> None:
        table = given.updates if isinstance(given, SourceRows) else given.changes
        self._meters["Read"].rows += table.num_rows
        snapshot = isinstance(given, SourceRows) and given.snapshot
        counts = self._counts
        self._counts = msgspec.structs.replace(
            counts,
            bytes=counts.bytes + table.nbytes,
            snapshot_rows=counts.snapshot_rows + table.num_rows * snapshot,
        )

    def _start_work(self) -> None:
        """Start the next append, spill and read, unless they are under way or must wait."""
        stage = self._staging
        if stage is None or self._ended:
            return
        self._process_queue(stage)
        # Commit before spilling: rows may be spilled only if no complete rows are staged.
        if not self._committing and stage.complete and not self._gather(stage):
            self._commit(stage.take(self.ctx.now_ms(), self._shards.upper))
            self._process_queue(stage)
        at_rest = not self._spilling and not self._working
        if not self._committing and at_rest and stage.must_spill:
            self._spill()
        # Backpressure: do not read the source while staged rows fill the buffer, or others wait.
        if not self._asking and not self._working and stage.has_room and self._opened_intake.empty:
            self._asking = True
            self.ctx.effect(self._next, done=_Returned, failed=_Failed)

    async def _next(self) -> Given:
        with self._meters.timed("Read"):
            return await self._source.next()

    def _process_queue(self, stage: IngestStaging) -> None:
        """Stage queued rows up to the first item that needs an effect, and start that effect."""
        if self._spilling:
            self._opened_intake.take_rows()
        if self._working or self._spilling:
            return
        work = self._opened_intake.take(
            settled=not self._committing and not stage.complete,
            time=lambda: stage.fix_time(self.ctx.now_ms(), self._shards.upper),
        )
        if work is not None:
            self._working = True
            self.ctx.effect(lambda: self._do(work), done=_Worked, failed=_Failed)

    async def _do(self, work: Work) -> IntakeDone:
        with self._meters.timed("Resolve") as meter:
            done = await self._opened_intake.do(work)
            meter.rows += 0 if done.rows is None else done.rows.updates.num_rows
            return done

    def _gather(self, stage: IngestStaging) -> bool:
        """Return whether complete rows should wait for more before they are committed."""
        wait_ms = stage.gathers_ms(self.ctx.now_ms())
        if wait_ms and not self._gathering:
            self._gathering = True
            self.ctx.after(wait_ms, _Gathered())
        return wait_ms > 0

    def _commit(self, batch: IngestBatch) -> None:
        self._committing = True

        async def commit() -> _Committed:
            with self._meters.timed("Append") as meter:
                upper = await self._shards.commit(batch)
                meter.rows += batch.rows
            # Acknowledged only after the append, because the external system may then delete what
            # comes before.
            await self._source.taken(batch.position)
            return _Committed(upper, batch)

        self.ctx.effect(commit, done=lambda done: done, failed=_Failed)

    def _spill(self) -> None:
        self._spilling = True
        tables = self._opened_staging.spill(self.ctx.now_ms(), self._shards.upper)

        async def spill() -> _Spilled:
            with self._meters.timed("Spill") as meter:
                meter.rows += sum(table.num_rows for table in tables.values())
                return _Spilled(await self._shards.write_all(tables))

        self.ctx.effect(spill, done=lambda done: done, failed=_Failed)

    def _tick(self) -> None:
        """Seal the shards up to now, so that readers of an idle source do not wait."""
        stage, now = self._opened_staging, self.ctx.now_ms()
        busy = self._committing or self._spilling or self._working
        # Spilled parts have a fixed time, which must stay above the upper. Rows in memory have none
        # yet.
        if busy or stage.complete or stage.spilled:
            return
        if not self._shards.begun or now + 1 <= self._shards.upper:
            return
        self._committing = True

        async def tick() -> _Committed:
            with self._meters.timed("Append"):
                return _Committed(await self._shards.tick(now + 1), None)

        self.ctx.effect(tick, done=lambda done: done, failed=_Failed)

    def _committed(self, upper: Frontier, batch: IngestBatch | None) -> None:
        failed: tuple[ExportFailed, ...] = ()
        outside_ms = None
        if batch is not None:
            counts = self._counts
            self._counts = msgspec.structs.replace(
                counts,
                messages=counts.messages + batch.messages,
                rows_inserted=counts.rows_inserted + batch.rows_inserted,
                rows_deleted=counts.rows_deleted + batch.rows - batch.rows_inserted,
                commits=counts.commits + 1,
            )
            failed, outside_ms = batch.failed, batch.outside_ms
        held, meters, stage = self._opened_intake.held(), self._meters, self._opened_staging
        meters["Resolve"].bytes_memory = sum(each.bytes_memory for each in held.values())
        meters["Resolve"].bytes_mapped = sum(each.bytes_mapped for each in held.values())
        meters["Stage"].bytes_memory = stage.bytes + self._opened_intake.bytes
        meters["Stage"].rows = meters["Append"].rows + stage.rows_staged
        self._owner.reply(
            IngestProgressed(
                self._id,
                self._number,
                upper,
                self._shards.sealed,
                self._shards.position or "",
                self._counts,
                self._source.lag(),
                failed,
                stage.rows_staged,
                outside_ms,
                tuple(held.items()),
                meters.statistics(),
            )
        )

    # -- the end -------------------------------------------------------------------------------

    def _end(self, error: Exception) -> None:
        if self._ended:
            return
        self._ended = True
        named = isinstance(error, PenstockError)
        if not named:
            log.error("source %s failed with an unexpected error", self._id, exc_info=error)
        self._doing = f"ended: {error}"
        text, is_dropped = f"{type(error).__name__}: {error}", isinstance(error, UnknownObject)
        # The owner starts another task, which opens the source at the durable position, so a retry
        # is safe.
        self._owner.reply(IngestEnded(self._id, self._number, text, hint_of(error), is_dropped))
        self.ctx.stop()

    def describe(self) -> str:
        """Return the task's state and what is under way, for display."""
        stage = self._staging
        if stage is None:
            return self._doing
        under_way = [
            name
            for name, busy in (
                ("reading", self._asking),
                ("resolving", self._working),
                ("committing", self._committing),
                ("spilling", self._spilling),
            )
            if busy
        ]
        return f"{self._doing}; {stage.bytes} bytes staged; {', '.join(under_way) or 'waiting'}"
