"""Drives one sink, from its object's shard to the external system.

Theory of operation. Once writes are allowed, the task opens the sink, which returns the external
system's durable upper. It sets the shard's hold ``sink/ID`` there and reads from there on: first
the contents, then changes. A batch reaches up to a sealed time (`sink_batches`). Its parts are read
one by one, consolidated (on disk beyond a memory limit), written piece by piece, and committed;
then the hold advances. All of this is one effect, step after step.

Pace. Changes are committed at most every `sink_commit_ms`, or as soon as there are `sink_bytes_max`
of them. Without changes only the upper is committed, every `sink_frontier_ms`.

Errors. While the object is in error, the sink stalls before the first time in error. Changes made
meanwhile are written at the first time that has contents again. Any other error ends the task: it
sends `stalled`, closes the sink, and sends `SinkEnded`. Its owner starts another task, which
resumes at the durable upper.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, assert_never

import anyio
import anyio.lowlevel
import msgspec
import pyarrow as pa

from actors.connectors.ingest.meters import OF_SINK, TaskMeters
from actors.connectors.sinks.kinds import SinkConfig, make_sink
from actors.connectors.sinks.messages import (
    SinkEnded,
    SinkProgress,
    SinkStatus,
    SinkWork,
    StopSink,
    hold_of,
)
from actors.connectors.sinks.sink import SinkConnector
from actors.connectors.sinks.sink_batches import (
    ErrorInterval,
    ListedBatch,
    SinkBatchChoice,
    choose_batch,
    error_intervals,
    move_out_of_intervals,
)
from actors.connectors.sources.source import hint_of
from actors.durable.arrangement.gathered_updates import GatheredUpdates, check_positive
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from actors.model.plan.updates import advance, between, iter_slices, split_errors
from actors.model.protocol.internal import WritesAllowed
from actors.runtime.errors import ERROR_TEXT_BYTES_MAX, InvalidUsage, PenstockError
from actors.runtime.kernel import Actor, ActorAddress, ActorClock, RunningEffect
from actors.runtime.progress import EMPTY, TIME_MAX, Frontier, ObjectId, Time, format_frontier
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import SINK_COMMIT

if TYPE_CHECKING:
    from actors.durable.persist import LeasedReader, PersistClient

R = TypeVar("R")

log = logging.getLogger("penstock.sinks")

MakeSink: TypeAlias = Callable[
    [SinkConfig, ObjectId, Settings, ActorClock, Random, Path], SinkConnector
]
SendMessage: TypeAlias = Callable[[Any], object]


class _DriverEnded(msgspec.Struct, frozen=True, gc=False):
    """The driver has ended; `error` is None if the sink is done."""

    error: PenstockError | None = None


class _Closed(msgspec.Struct, frozen=True, gc=False):
    """The effect has closed the sink and the reader."""


_Message: TypeAlias = WritesAllowed | StopSink | _DriverEnded | _Closed


class SinkTask(Actor[_Message]):
    """Receives `WritesAllowed` and `StopSink`. Sends `SinkProgress`, `SinkStatus` and finally
    `SinkEnded` to `consumer`, each with the `number` of this rendering."""

    def __init__(
        self,
        work: SinkWork,
        number: int,
        persist: PersistClient,
        settings: Settings,
        consumer: ActorAddress[Any],
        scratch: Path,
        *,
        writable: bool = False,
        make: MakeSink = make_sink,
    ) -> None:
        """Make a task. `scratch` is a folder for this task alone, which it creates and removes.
        `make` makes the sink; tests replace it."""
        self._work = work
        self._number = number
        self._persist = persist
        self._settings = settings
        self._consumer = consumer
        self._scratch = scratch
        self._writable = writable
        self._make = make
        self._running: RunningEffect | None = None
        """The effect that runs the driver; None before writes are allowed."""
        self._stopping = False
        """True once the owner asked to stop."""
        self._driver: _Driver | None = None
        """The driver that the effect runs; made with it."""

    async def on_start(self) -> None:
        """Start if writes are already allowed."""
        self._send(SinkStatus(self._work.id, self._number, "starting"))
        if self._writable:
            self._begin()

    async def receive(self, message: _Message) -> None:
        """Handle a message of the owner, or the end of the effect."""
        match message:
            case WritesAllowed():
                self._begin()
            case StopSink():
                self._stopping = True
                if self._running is None:
                    self._end(None)
                else:
                    # In two steps: the effect waits for blocking calls and closes the sink
                    # (`_Closed`). Only then does `SinkEnded` promise that nothing more is written.
                    self._running.cancel()
            case _Closed():
                if self._stopping:
                    self._end(None)
            case _DriverEnded(error=error):
                if not self._stopping:
                    self._end(error)
            case _:
                assert_never(message)

    def _begin(self) -> None:
        if self._running is not None or self._stopping:
            return
        ctx = self.ctx
        driver = _Driver(
            self._work,
            self._number,
            self._persist,
            self._settings,
            self._scratch,
            ctx.clock,
            ctx.random,
            self._make,
            self._send,
        )
        self._driver = driver

        async def run() -> None:
            try:
                await driver.run()
            finally:
                with anyio.CancelScope(shield=True):
                    await driver.close()
                ctx.self.reply(_Closed())

        self._running = ctx.effect(run, done=lambda _: _DriverEnded(), failed=_failed)

    def _end(self, error: PenstockError | None) -> None:
        if error is not None:
            text = str(error).encode()[:ERROR_TEXT_BYTES_MAX]
            self._send(
                SinkStatus(
                    self._work.id,
                    self._number,
                    "stalled",
                    f"{type(error).__name__}: {text.decode(errors='ignore')}",
                    hint_of(error) or None,
                )
            )
        self._send(SinkEnded(self._work.id, self._number, error))
        self.ctx.stop()

    def _send(self, message: SinkProgress | SinkStatus | SinkEnded) -> None:
        self._consumer.reply(message)

    def describe(self) -> str:
        """Return what the task is doing or waiting for."""
        if self._driver is None:
            return "waiting until writes are allowed"
        return self._driver.doing


def _failed(error: Exception) -> _DriverEnded:
    """Return the message that ends the task. Re-raise unexpected errors, which crashes the
    actor."""
    if isinstance(error, PenstockError):
        return _DriverEnded(error)
    raise error


# -- the driver ----------------------------------------------------------------------------------


class _ListedParts(msgspec.Struct, frozen=True, gc=False):
    """Parts of the shard from a frontier on. They are complete below `known`."""

    parts: tuple[Any, ...]
    listed: tuple[ListedBatch, ...]
    known: Frontier


class _Driver:
    """Runs a sink from open to close, as one effect."""

    def __init__(
        self,
        work: SinkWork,
        number: int,
        persist: PersistClient,
        settings: Settings,
        scratch: Path,
        clock: ActorClock,
        random: Random,
        make: MakeSink,
        send: SendMessage,
    ) -> None:
        self._work = work
        self._number = number
        self._persist = persist
        self._settings = settings
        self._scratch = scratch
        self._clock = clock
        self._random = random
        self._make = make
        self._send = send
        self._sink: SinkConnector
        self._reader: LeasedReader
        self._opened: list[Callable[[], Awaitable[None]]] = []
        """Functions that close what is open, in the order of opening."""
        self._lower: Frontier = work.as_of
        """Upper that is durable in the external system."""
        self._known: Frontier = 0
        """Upper of the object's shard, as last seen."""
        self._meters = TaskMeters(clock.monotonic_ms, OF_SINK, work.id)
        persist.ledger.add(self._meters.memory)
        self._first = True
        """True until the first batch is committed."""
        self._committed_ms: float | None = None
        """Monotonic time of the last commit; None before the first."""
        self._stalled: str | None = None
        """Error of the object for which the sink is stalled; None if it is not."""
        self.doing = "opens its sink"
        """Current activity, for `SinkTask.describe`."""

    async def run(self) -> None:
        """Run until the shard ends. Raises every error that ends the task."""
        work, scratch = self._work, self._scratch
        await self._blocking(partial(shutil.rmtree, scratch, ignore_errors=True))
        self._sink = await self._blocking(
            lambda: self._make(
                work.config, work.id, self._settings, self._clock, self._random, scratch
            )
        )
        self._opened.append(self._sink.close)
        upper = await self._sink.open(work.schema)
        self._first = upper is None
        self._lower = work.as_of if upper is None else upper
        known = self._known = await self._persist.upper(work.shard)
        # The shard was restored from an older state, and continuing would contradict what was
        # written.
        if upper is not None and upper > known:
            raise InvalidUsage(
                f"the sink has everything below {format_frontier(upper)}, but {work.name} is known "
                f"only below {format_frontier(known)}: it was restored to an older state, so what "
                "the sink has written may be wrong. Remove it, and create the sink again"
            )
        if self._lower < EMPTY:
            # Hold before reader: compaction must not pass the sink's frontier. The hold outlives
            # the task.
            await self._persist.set_hold(work.shard, hold_of(work.id), self._lower)
            name = f"sink-{work.id}-{self._random.getrandbits(64):016x}"
            # Shielded, so that a reader that was opened is always among those that `close` closes.
            with anyio.CancelScope(shield=True):
                self._reader = await self._persist.open_reader(work.shard, name)
                self._opened.append(self._reader.close)
            await self._reader.downgrade(self._lower)
            self._send(SinkStatus(work.id, self._number, "running"))
        self._progress()
        while self._lower < EMPTY:
            await self._batch()
        # Only a finished sink drops its hold here; otherwise the hold is dropped with the sink
        # (`hold_of`).
        await self._persist.drop_hold(work.shard, hold_of(work.id))
        self._send(SinkStatus(work.id, self._number, "ceased"))

    async def close(self) -> None:
        """Close the sink and the reader. Errors are logged."""
        for close in reversed(self._opened):
            try:
                await close()
            except PenstockError as error:
                log.warning("sink %s could not be closed properly: %s", self._work.id, error)
        await self._blocking(partial(shutil.rmtree, self._scratch, ignore_errors=True))

    async def _blocking(self, function: Callable[[], R]) -> R:
        """Run a function in a thread, and wait for its end even if cancelled."""
        with anyio.CancelScope(shield=True):
            result = await self._clock.run_blocking(function)
        await anyio.lowlevel.checkpoint_if_cancelled()
        return result

    def _progress(self) -> None:
        counts, known = self._sink.statistics(), max(self._known, self._lower)
        common = self._work.id, self._number, self._lower, counts, known
        self._send(SinkProgress(*common, self._meters.statistics()))

    # -- choosing a batch -------------------------------------------------------------------------

    async def _batch(self) -> None:
        """Wait for one batch, write it and commit it."""
        found, chosen = await self._wait_for_batch()
        upper = chosen.upper
        assert upper is not None, "a batch is due"
        self.doing = f"writing {self._lower} to {upper}"
        await self._write(found, upper, chosen.intervals)
        if self._sink.once:
            upper = EMPTY
        self.doing = f"committing {self._lower} to {upper}"
        began = self._clock.monotonic_ms()
        with self._meters.timed("Commit") as meter:
            await self._sink.commit(self._lower, upper)
        meter.rows = self._sink.statistics().rows_committed
        self._committed_ms = began
        self._lower, self._first = upper, False
        if upper < EMPTY:
            # After the commit: until then, a restarted task must read from the old frontier.
            await self._persist.set_hold(self._work.shard, hold_of(self._work.id), upper)
            await self._reader.downgrade(upper)
        self._progress()
        self._report_error(chosen.error, upper)

    async def _wait_for_batch(self) -> tuple[_ListedParts, SinkBatchChoice]:
        """Return the next batch once it is time to commit it."""
        self.doing = f"waiting for changes from {self._lower} on"
        as_of = self._lower
        while True:
            found = await self._list_parts(as_of)
            if found.known > self._known:
                self._known = found.known
                self._progress()  # shows the sink's lag
            intervals = error_intervals(await self._errors(found), found.known)
            chosen = choose_batch(
                self._lower, found.known, found.listed, intervals, self._settings.sink_bytes_max
            )
            now = self._clock.monotonic_ms()
            if chosen.upper is None:
                self._report_error(chosen.error, self._lower)
                due = now + self._settings.sink_commit_ms
            else:
                due = self._due_ms(found, chosen.upper)
            if chosen.upper is not None and (
                SINK_COMMIT.crossed(chosen.upper < found.known) or now >= due
            ):
                return found, chosen
            # Compaction may delete these parts while we wait; they are listed again afterwards.
            self._reader.release([part.key for part in found.parts])
            if chosen.upper is None:
                as_of = (await self._wait_beyond(found.known)) - 1
                await anyio.sleep((due - now) / 1000)
            else:
                with anyio.move_on_after((due - now) / 1000):
                    await self._wait_beyond(found.known)

    def _due_ms(self, found: _ListedParts, upper: Frontier) -> float:
        if self._committed_ms is None or upper >= EMPTY:
            return float("-inf")
        changes = any(part.time_min < upper for part in found.parts)
        limits = self._settings
        return self._committed_ms + (limits.sink_commit_ms if changes else limits.sink_frontier_ms)

    async def _wait_beyond(self, known: Frontier) -> Frontier:
        """Return the shard's upper once it is beyond `known`."""
        if known >= EMPTY:
            await anyio.sleep_forever()  # the shard is complete and ends in error
        return await self._persist.wait_upper(self._work.shard, known)

    async def _list_parts(self, as_of: Time) -> _ListedParts:
        """Return the parts below the upper once there are any. For the first batch, return the
        snapshot at `as_of`."""
        if self._first:
            as_of = min(as_of, TIME_MAX)
            parts, _ = await self._reader.snapshot(as_of)
            size = sum(part.bytes for part in parts)
            return _ListedParts(parts, (ListedBatch(as_of + 1, size),), as_of + 1)
        batches, known = await self._reader.next(self._lower)
        listed = tuple(ListedBatch(each.upper, each.bytes) for each in batches)
        every = (part for batch in batches for part in batch.parts)
        return _ListedParts(tuple(part for part in every if part.time_min < known), listed, known)

    async def _errors(self, found: _ListedParts) -> list[tuple[Time, str, int]]:
        """Return the error updates in these parts: (time, text, diff)."""
        rows: list[tuple[Time, str, int]] = []
        for part in found.parts:
            if part.has_errors:
                updates = await self._persist.fetch(part, self._work.schema)
                _, errors = split_errors(between(updates, self._from, found.known))
                if errors is not None:
                    columns = (errors[name].to_pylist() for name in (TIME, ERROR, DIFF))
                    rows += zip(*columns, strict=True)
        return rows

    @property
    def _from(self) -> Time:
        """Return the earliest time of updates that belong to the batch."""
        return 0 if self._first else self._lower

    def _report_error(self, error: str | None, at: Frontier) -> None:
        """Send the status if the object's own error stalls the sink, or no longer does."""
        if error == self._stalled:
            return
        self._stalled = error
        status = SinkStatus(self._work.id, self._number, "running")
        if error is not None:
            self.doing = f"waiting at {at}: its object is in error"
            status = SinkStatus(
                self._work.id,
                self._number,
                "stalled",
                f"ViewInError: {error}",
                f"{self._work.name} is in error from {at} on; the sink continues when it no "
                "longer is",
            )
        self._send(status)

    # -- writing a batch --------------------------------------------------------------------------

    async def _write(
        self, found: _ListedParts, upper: Frontier, intervals: tuple[ErrorInterval, ...]
    ) -> None:
        """Pass all updates below `upper` to the sink, consolidated."""
        parts = [part for part in found.parts if part.time_min < upper]
        times = self._sink.keeps_times
        collapse = self._first or not times
        # Without retractions nothing cancels out, so rows are written as they come, each copy
        # separately.
        plain = self._first and not times and not any(part.retracts for part in parts)
        schema = self._work.schema
        shape = schema
        if times:
            shape = TableSchema((*schema.columns, TableColumn(_time_column(schema), "bigint")))
        # If the sink keeps times, the time is one of the columns by which rows are summed.
        gathered = None if plain else GatheredUpdates(shape, self._scratch / "gathered")
        try:
            for part in parts:
                with self._meters.timed("Read") as meter:
                    updates = await self._persist.fetch(part, schema)
                meter.rows += updates.num_rows
                for rows in iter_slices(updates):
                    piece = await self._blocking(
                        partial(self._prepare_piece, rows, upper, intervals, collapse)
                    )
                    if gathered is None:
                        await self._write_piece(piece)
                    else:
                        if times:
                            piece = piece.append_column(_time_column(schema), piece[TIME])
                        with self._meters.timed("Gather") as meter:
                            await self._blocking(partial(gathered.add, piece))
                        meter.rows += piece.num_rows
                        meter.bytes_memory, meter.bytes_mapped = gathered.bytes
                self._reader.release([part.key])
            self._reader.release([part.key for part in found.parts])
            if gathered is not None:
                await self._write_consolidated(gathered, upper)
        finally:
            self._meters["Gather"].bytes_memory = self._meters["Gather"].bytes_mapped = 0
            if gathered is not None:
                with anyio.CancelScope(shield=True):
                    await self._clock.run_blocking(gathered.close)

    def _prepare_piece(
        self,
        updates: pa.Table,
        upper: Frontier,
        intervals: tuple[ErrorInterval, ...],
        collapse: bool,
    ) -> pa.Table:
        """Return the batch's updates, without errors, at the times at which they are written."""
        plain, _ = split_errors(between(updates, self._from, upper))
        shape = self._work.schema.arrow_updates()
        plain = plain.select(shape.names).cast(shape)
        return advance(plain, upper - 1) if collapse else move_out_of_intervals(plain, intervals)

    async def _write_piece(self, piece: pa.Table) -> None:
        if piece.num_rows:
            with self._meters.timed("Write") as meter:
                await self._sink.write(piece)
            meter.rows += piece.num_rows

    async def _write_consolidated(self, gathered: GatheredUpdates, upper: Frontier) -> None:
        contents = await self._blocking(gathered.contents)
        batches: Iterator[pa.RecordBatch] = contents.rows()
        while (batch := await self._blocking(partial(next, batches, None))) is not None:
            if self._first:
                check_positive(batch)
            rows = pa.Table.from_batches([batch])
            if self._sink.keeps_times:
                at = _time_column(self._work.schema)
                rows = rows.rename_columns([TIME if n == at else n for n in rows.column_names])
            else:
                times = pa.repeat(pa.scalar(upper - 1, pa.int64()), rows.num_rows)
                rows = rows.append_column(pa.field(TIME, pa.int64()), times)
            await self._write_piece(rows.select(self._work.schema.arrow_updates().names))


def _time_column(schema: TableSchema) -> str:
    """Return a name for a column of times that is not a column of the schema."""
    name = "__at"
    while name in schema.names:
        name += "_"
    return name
