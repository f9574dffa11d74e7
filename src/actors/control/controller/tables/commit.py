"""Group commit: carries out one group of writes for the table writer, at one time of the oracle.

The order is the same for every group: fit the rows → look up the rows that they touch → apply the
writes in order → take one oracle time → write durable parts → ONE append over all written shards,
which moves the shared upper of all tables from `tables_upper` to ``time + 1`` → feed the
arrangements → answer. A crash before the append leaves nothing of the group; a crash after it
leaves all of it.

The caller commits one group at a time. A copy from files is a separate group; its parts are
already durable, so only the append remains (`commit_copy`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

import anyio
import msgspec
import pyarrow as pa

from actors.control.controller.tables.groups import (
    FittedChange,
    TableTarget,
    WriteGroup,
    fit_change,
    keys_wanted,
    overlay_of,
)
from actors.control.controller.tables.staged import StagedCopy, check_absent, updates_of
from actors.control.controller.tables.table_arrangements import TableArrangements
from actors.durable.persist import (
    BatchPart,
    CompareAndSet,
    CopyCommitted,
    PersistClient,
    ShardAppend,
    UpperMismatch,
    placed,
)
from actors.durable.persist.small_documents import decode_document
from actors.model.protocol.api import TableChange
from actors.runtime.errors import (
    InvalidUsage,
    PenstockError,
    TypeMismatch,
    WriterFenced,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import TIME_MAX, Frontier, ObjectId, ShardId, Time
from actors.runtime.settings import Settings

LOOP_BYTES_MAX = 16 * 1024
"""Maximum size of a group, in bytes, to process on the event loop; larger ones use a thread. With a
thread, committing one row takes 2.6 × as long (November 2026)."""

log = logging.getLogger("penstock.controller")

T = TypeVar("T")

# -- the timestamp oracle --------------------------------------------------------------------------

ORACLE_KEY: Final = "oracle"
FORMAT_VERSION: Final = 1


class OracleReservation(msgspec.Struct, frozen=True):
    """The document under the key `oracle`: no time at or above `reserved` was ever given out."""

    format: int
    reserved: Time


class TimestampOracle:
    """Gives strictly increasing times, and says which reservation each needs first.

    A time is ``max(wall clock, last + 1)``. It is given out only once a reservation beyond it is
    durable under the consensus key `oracle`. Reserving ahead (`oracle_reserve_ms`) lets one durable
    write cover many times.

    Times strictly increase across all restarts. If the wall clock jumps back or stops, times only
    get ahead of it, one millisecond per write. The oracle is pure: its owner supplies the clock and
    carries out the reservations (`DurableOracle` does both). It does not order reads: they name a
    time that was written.
    """

    def __init__(self, reserved: Time, reserve_ms: int) -> None:
        # An earlier process may have given out any time below its reservation.
        self.last: Time = reserved - 1
        self.reserved: Time = reserved
        """Times below this may be given out: the last durable reservation."""
        self._reserve_ms = reserve_ms

    def candidate(self, now_ms: int, at: Time | None = None) -> Time:
        """Return the time that would be given now, or `at` itself when a test sets the time.

        Raises `InvalidUsage` if `at` is not later than every time given before.
        """
        if at is None:
            return max(now_ms, self.last + 1)
        if not self.last < at <= TIME_MAX:
            raise InvalidUsage(f"time {at} is not later than the last one given, {self.last}")
        return at

    def reservation(self, time: Time) -> Time | None:
        """Return the reservation that must be durable before `time` may be given, or None if there
        is one."""
        return None if time < self.reserved else time + self._reserve_ms

    def reserve(self, reserved: Time) -> None:
        """Record that the reservation is durable."""
        self.reserved = max(self.reserved, reserved)

    def give(self, time: Time) -> Time:
        """Record that `time` was given out: later times are greater."""
        assert self.last < time < self.reserved, (self.last, time, self.reserved)
        self.last = time
        return time


def decode_reservation(data: bytes) -> Time:
    """Return the reserved time of a record. Raises `StateDirectoryError` for a newer format,
    `CorruptData`."""
    what = "the oracle's record"
    return decode_document(
        ORACLE_KEY, data, OracleReservation, what=what, format=FORMAT_VERSION
    ).reserved


def encode_reservation(reserved: Time) -> bytes:
    """Return the record to store."""
    return msgspec.msgpack.encode(OracleReservation(FORMAT_VERSION, reserved))


def fenced(expected: int | None) -> WriterFenced:
    """Return the error for a record that another service has changed."""
    return WriterFenced(
        f"the oracle's record is no longer at seqno {expected}: another service uses this state",
        determinate=True,
    )


class DurableOracle:
    """A timestamp oracle that stores its reservation under a consensus key."""

    def __init__(self, persist: PersistClient, clock: ActorClock, settings: Settings) -> None:
        self._persist = persist
        self._clock = clock
        self._reserve_ms = settings.oracle_reserve_ms
        self._oracle: TimestampOracle | None = None
        """The oracle; None until the record was read, and again after a failed reservation."""
        self._seqno: int | None = None
        """Sequence number of the record; None if it does not exist."""

    async def next(self, at: Time | None = None) -> Time:
        """Return the next time, once its reservation is durable. Raises `WriterFenced`,
        `StorageError`."""
        if self._oracle is None:
            head = await self._persist.head(ORACLE_KEY)
            self._seqno = None if head is None else head.seqno
            reserved = 0 if head is None else decode_reservation(head.data)
            self._oracle = TimestampOracle(reserved, self._reserve_ms)
        oracle = self._oracle
        time = oracle.candidate(self._clock.now_ms(), at)
        wanted = oracle.reservation(time)
        if wanted is not None:
            # Until the set has succeeded the record is unknown: after a failure it is read again.
            self._oracle = None
            record = CompareAndSet(ORACLE_KEY, self._seqno, encode_reservation(wanted))
            if not await self._persist.compare_and_set([record]):
                raise fenced(self._seqno)
            head = await self._persist.head(ORACLE_KEY)
            assert head is not None, "the record was just written"
            self._seqno = head.seqno
            oracle.reserve(wanted)
            self._oracle = oracle
        return oracle.give(time)


# -- groups ----------------------------------------------------------------------------------------


class CommitOutcome(msgspec.Struct, frozen=True):
    """The result of a group."""

    outcomes: tuple[int | PenstockError, ...]
    """For each write the number of changed rows, or its error."""
    time: Time
    upper: Frontier
    """Shared upper of the tables after the group."""
    shards: tuple[ShardId, ...] = ()
    """Shards that were appended to."""
    repeated: bool = False
    """True if the copy was already appended earlier, at `time`."""


class PlannedWrite(msgspec.Struct, frozen=True):
    """One write of a group: its changes, each with its resolved table."""

    changes: tuple[tuple[TableTarget, TableChange], ...]


class WriteGroupCommit:
    """Commits groups of writes."""

    def __init__(
        self,
        persist: PersistClient,
        contents: TableArrangements,
        clock: ActorClock,
        settings: Settings,
    ) -> None:
        self._persist = persist
        self._contents = contents
        self._clock = clock
        self._settings = settings
        self._oracle = DurableOracle(persist, clock, settings)
        self._upper: Frontier | None = None
        """Shared upper of the tables; None if it must be read from the store, at first and after a
        failure."""
        self._altered: dict[ObjectId, TableTarget] = {}
        """Tables that got columns: writes queued before are fitted to these."""

    async def commit(self, writes: Sequence[PlannedWrite], at: Time | None = None) -> CommitOutcome:
        """Commit a group. The outcome contains each write's own error. An error that fails the
        whole group (from a store, or fencing) is raised; unless it is indeterminate, no write of
        the group took effect."""
        upper = await self._known_upper()
        small = _bytes_of(writes) <= LOOP_BYTES_MAX
        if self._contents.feeds_many:
            await self._clock.run_blocking(self._contents.feed_written)
        fitted = await self._worked(small, lambda: self._fitted(writes))
        if self._contents.maintenance_due:
            await self._clock.run_blocking(self._contents.maintain)
        targets = _targets(fitted)
        for changes in targets.values():
            if keys_wanted(changes) is not None:
                await self._contents.ensure(changes[0].target, upper)
        group, outcomes = await self._worked(small, lambda: self._apply(fitted, targets))
        # Every write was refused: do not spend a time on the group.
        if writes and all(isinstance(outcome, PenstockError) for outcome in outcomes):
            return CommitOutcome(tuple(outcomes), max(0, upper - 1), upper)
        time = await self._next_time(upper, at)
        # Set again only once the append has succeeded: after a failure the next group reads the
        # upper from the store and rebuilds the arrangements (`_known_upper`).
        self._upper = None
        shards = await self._append(group, targets, time, upper, small=small)
        self._upper = time + 1
        return CommitOutcome(tuple(outcomes), time, time + 1, shards)

    async def _worked(self, small: bool, work: Callable[[], T]) -> T:
        """Run one step of a group, on the event loop if the group is small."""
        # This takes far less than a millisecond: a thread would hold up the loop for longer.
        return work() if small else await self._clock.run_blocking(work)

    def _fitted(
        self, writes: Sequence[PlannedWrite]
    ) -> list[tuple[FittedChange, ...] | PenstockError]:
        """Feed earlier writes to the arrangements if that is due, and fit the rows of this
        group."""
        self._contents.feed_due()
        # One clock reading for all: writes of one group have the same time.
        micros = self._clock.now_ms() * 1000
        return [_fit(write, self._altered, micros) for write in writes]

    async def commit_copy(self, copy: StagedCopy) -> CommitOutcome:
        """Append staged parts at their own time, without reading them: `staged.claim_parts`
        has read their keys. A copy whose uuid was already appended is not appended again. Raises as
        `commit` does, and `DuplicateKey`; the parts are then discarded, unless they may have been
        appended."""
        try:
            return await self._commit_copy(copy)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._persist.discard_parts(copy.parts)
            raise

    async def _commit_copy(self, copy: StagedCopy) -> CommitOutcome:
        target = self._altered.get(copy.target.id, copy.target)
        upper = await self._known_upper()
        await self._clock.run_blocking(self._contents.feed_written)
        state = await self._persist.state(target.shard)
        # Check again: since the request arrived, an earlier attempt with this uuid may have been
        # appended.
        before = state.copied(copy.uuid)
        if before is not None:
            await self._persist.discard_parts(copy.parts)
            return CommitOutcome((before.rows,), before.time, upper, repeated=True)
        keys = copy.keys
        if keys is not None and keys.num_rows:
            await self._contents.ensure(target, upper)
            await self._clock.run_blocking(
                lambda: check_absent(target, keys, self._contents.lookup(target, keys))
            )
        time = await self._next_time(upper)
        self._upper = None
        parts = tuple(placed(part, time) for part in copy.parts)
        done = CopyCommitted(copy.uuid, copy.rows, time)
        # The shard's record remembers the copy in the same set, so that a retry finds it
        # (idempotency).
        append = ShardAppend(target.shard, state.upper, time + 1, parts, copied=done)
        result = await self._persist.append([append], tables_upper=(upper, time + 1))
        if isinstance(result, UpperMismatch):
            raise _other_service(result)
        await self._feed_copy(copy, parts, time + 1)
        self._upper = time + 1
        return CommitOutcome((copy.rows,), time, time + 1, (target.shard,) if parts else ())

    async def _feed_copy(
        self, copy: StagedCopy, parts: tuple[BatchPart, ...], upper: Frontier
    ) -> None:
        """Feed a copy to the table's arrangement, or drop the arrangement if the copy is too
        large."""
        target = self._altered.get(copy.target.id, copy.target)
        written = []
        if parts and self._contents.has(target.id):
            try:
                if copy.rows <= self._settings.copy_keyed_rows_max:
                    written.append((target, await updates_of(self._persist, copy, parts)))
                else:
                    await self.forget(target.id)
            except PenstockError:
                log.warning("dropped the arrangement of table %s", target.name, exc_info=True)
                await self.forget(target.id)
        self._contents.note_written(written, upper)

    async def _known_upper(self) -> Frontier:
        upper = self._upper
        if upper is None:
            # The arrangements may lack a write whose append was reported as failed.
            await self._clock.run_blocking(self._contents.clear)
            upper = self._upper = await self._persist.tables_upper()
        return upper

    async def _next_time(self, upper: Frontier, at: Time | None = None) -> Time:
        time = await self._oracle.next(at)
        # The append must move the shared upper forward, to ``time + 1``.
        while time < upper:
            time = await self._oracle.next()
        return time

    def _apply(
        self,
        fitted: Sequence[tuple[FittedChange, ...] | PenstockError],
        targets: dict[ObjectId, list[FittedChange]],
    ) -> tuple[WriteGroup, list[int | PenstockError]]:
        overlays = {}
        for id_, changes in targets.items():
            overlay = overlays[id_] = overlay_of(changes[0].target)
            wanted = keys_wanted(changes)
            if wanted is not None:
                overlay.load(wanted, self._contents.lookup(changes[0].target, wanted))
        group = WriteGroup(overlays)
        outcomes: list[int | PenstockError] = []
        for write in fitted:
            if isinstance(write, PenstockError):
                outcomes.append(write)
                continue
            try:
                outcomes.append(group.apply(write))
            except PenstockError as error:
                outcomes.append(error)
        return group, outcomes

    async def _append(
        self,
        group: WriteGroup,
        targets: dict[ObjectId, list[FittedChange]],
        time: Time,
        upper: Frontier,
        *,
        small: bool,
    ) -> tuple[ShardId, ...]:
        updates = await self._worked(small, lambda: group.updates(time))
        written: list[tuple[TableTarget, pa.Table]] = [
            (targets[id_][0].target, table) for id_, table in updates.items() if table.num_rows
        ]
        appends: list[ShardAppend] = []
        try:
            for target, table in written:
                # A table's own upper lags behind the shared one while only other tables are
                # written.
                own = (await self._persist.state(target.shard)).upper
                parts = await self._persist.write_parts(target.shard, table)
                appends.append(ShardAppend(target.shard, own, time + 1, parts))
            result = await self._persist.append(appends, tables_upper=(upper, time + 1))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._discard(appends)
            raise
        if isinstance(result, UpperMismatch):
            await self._discard(appends)
            raise _other_service(result)
        # A later group or read feeds the arrangements, so these writers need not wait for it.
        self._contents.note_written(written, time + 1)
        return tuple(target.shard for target, _ in written)

    async def _discard(self, appends: Sequence[ShardAppend]) -> None:
        await self._persist.discard_parts([part for append in appends for part in append.parts])

    async def forget(self, id_: ObjectId) -> None:
        """Drop a table's arrangement."""
        self._altered.pop(id_, None)
        await self._clock.run_blocking(lambda: self._contents.forget(id_))

    async def alter(self, target: TableTarget, work: Callable[[], Awaitable[T]]) -> T:
        """Run the work that changes a table's columns, then use the new columns. Raises what the
        work raises."""
        # Drop the arrangement whether or not the work succeeds: it is rebuilt when needed.
        await self.forget(target.id)
        done = await work()
        self._altered[target.id] = target
        return done

    async def arrange(self, target: TableTarget) -> None:
        """Build a table's arrangement, up to and including the latest write."""
        target = self._altered.get(target.id, target)
        upper = await self._known_upper()
        await self._clock.run_blocking(self._contents.feed_written)
        await self._contents.ensure(target, upper)

    async def close(self) -> None:
        """Remove the scratch folder."""
        await self._clock.run_blocking(self._contents.clear)


def _other_service(found: UpperMismatch) -> WriterFenced:
    return WriterFenced(
        f"another service wrote to these tables: expected upper {found.expected} of "
        f"{found.shard}, found {found.current}; nothing was written, so try again",
        determinate=True,
    )


def _bytes_of(writes: Sequence[PlannedWrite]) -> int:
    """Return the size of all rows of a group, in bytes."""
    changes = (change for write in writes for _, change in write.changes)
    parts = (part for each in changes for part in (each.insert, each.delete, each.update))
    return sum(len(part) for part in parts if part is not None)


def _fit(
    write: PlannedWrite, altered: Mapping[ObjectId, TableTarget], now_micros: int
) -> tuple[FittedChange, ...] | PenstockError:
    try:
        return tuple(
            fit_change(altered.get(target.id, target), change, target.defaults, now_micros)
            for target, change in write.changes
        )
    except PenstockError as error:
        return error
    except (pa.ArrowException, ValueError, OverflowError) as error:
        return TypeMismatch(f"cannot read the rows: {error}")


def _targets(
    fitted: Sequence[tuple[FittedChange, ...] | PenstockError],
) -> dict[ObjectId, list[FittedChange]]:
    found: dict[ObjectId, list[FittedChange]] = {}
    for write in fitted:
        if not isinstance(write, PenstockError):
            for change in write:
                found.setdefault(change.target.id, []).append(change)
    return found
