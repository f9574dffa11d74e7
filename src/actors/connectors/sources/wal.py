"""Ingests a log of framed change records, which `penstock wal push` writes and acceptors store.

Theory of operation. `wal.following` reads committed records from any acceptor that has them. They
are decoded into changes, with a position after the last complete record. The position becomes
durable together with the rows, so each record is in its table exactly once, no matter when the
service crashes. Afterwards the position is reported to the acceptors, which may then remove the log
before it.

A log has no snapshot. A table that is added later is filled by reading the log from its start
again, up to the position, for the new tables alone. The others wait meanwhile.

Bytes arrive in order, in pieces of any size; each complete record is one change of one table. The
rows of a piece are returned by table, followed by a mark at the end of the last record. Positions
of marks never decrease.

Errors:
- A row that does not fit its table fails that table (`ExportFailed`). The others continue.
- At a record that is not a change, a record of an undeclared table (unless these are skipped), or a
  log that is corrupt or not ours, the source *stops*. All changes before it are returned, with a
  mark; then `stopped` has the reason.
- Permanent errors are retried like all others. They are: all acceptors have removed the log at the
  position, or a table is to be filled from a part of the log that was removed (then that table
  fails).

Declared tables that are not ingested are skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

import anyio
import msgspec

from actors.connectors.sources.generators import select_exports
from actors.connectors.sources.json_rows import RowMisfit, RowsOfTable
from actors.connectors.sources.source import (
    POSITION_BYTES_MAX,
    ConnectorContext,
    ExportFailed,
    Given,
    PositionMark,
    SourceExport,
    SourceIdle,
    SourceLag,
    SourceRows,
    SourceUnreachable,
)
from actors.connectors.sources.wal_config import WalConfig, check_json
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import ConnectionBroken, CorruptData, InvalidUsage
from actors.wal.dialling import AcceptorAddress, AcceptorConnection, dial
from actors.wal.following import AllRemoved, WalFollower
from actors.wal.framing import FramedPayload, RecordDecoder
from actors.wal.lsn import lsn_text, parse_lsn

RECREATE_HINT: Final = (
    "the log cannot be changed: create another source whose `tables` fit the records, or drop "
    "this table here"
)
_SHOWN: Final = 200


class _Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload of a record; `wal.pushing` describes the format."""

    table: str
    row: msgspec.Raw
    diff: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 1


class WalPosition(msgspec.Struct, frozen=True):
    """A position: everything before `lsn` has been ingested into these tables."""

    lsn: str
    timeline: str
    tables: tuple[str, ...]

    @property
    def at(self) -> int:
        """Return the LSN as a number."""
        return parse_lsn(self.lsn)

    def text(self) -> str:
        """Return the position as text, for `read_position`."""
        return msgspec.json.encode(self).decode()


def read_position(text: str, config: WalConfig) -> WalPosition:
    """Parse the text of a position. Raises `InvalidUsage` for an invalid one, or one of another
    log."""
    try:
        found = msgspec.json.decode(text, type=WalPosition)
        parse_lsn(found.lsn)
    except (msgspec.DecodeError, InvalidUsage) as error:
        raise InvalidUsage(
            f"invalid position {text[:100]!r} of a source of kind wal: {error}"
        ) from None
    if found.timeline != config.timeline:
        raise InvalidUsage(
            f"this is timeline {config.timeline}, but the ingested data comes from timeline "
            f"{found.timeline}: use that one, or drop the source and create it again"
        )
    return found


def _with_further(declared: TableSchema, schema: TableSchema) -> TableSchema:
    """Return the columns that records may have: the declared ones, and those added to the table
    since."""
    further = tuple(each for each in schema.columns if each.name not in declared.names)
    return TableSchema((*declared.columns, *further))


_CHANGES: Final = msgspec.json.Decoder(_Change)


class WalChanges:
    """Decodes a log from `lsn` on.

    The mark at `until_lsn` fills the tables in `fills`, and is the first mark. An `until_lsn` of 0
    means no limit.
    """

    def __init__(
        self,
        config: WalConfig,
        exports: Sequence[SourceExport],
        lsn: int,
        *,
        tables: Sequence[str],
        fills: Sequence[str] = (),
        until_lsn: int = 0,
    ) -> None:
        """Make a decoder. `tables` are the tables that positions name. Raises `InvalidUsage` if
        they are too many."""
        self._timeline = config.timeline
        skips = config.undeclared == "skip"
        self._skips = skips
        declared = config.schemas()
        self._declared = frozenset(declared)
        # Rows of each table since the last call of `take`; a failed table is removed.
        self._rows = {
            export.name: RowsOfTable(
                _with_further(declared[export.name], export.schema), export.schema, skips=skips
            )
            for export in exports
        }
        self._decoder = RecordDecoder(lsn)
        self._tables = tuple(tables)
        self._fills = tuple(fills)
        self._until_lsn = until_lsn
        # Failures that `take` has not returned yet.
        self._failed: list[ExportFailed] = []
        # End of the last complete record.
        self.lsn = lsn
        self.stopped: SourceUnreachable | None = None
        """Reason why decoding has stopped; None while it continues."""
        self.records = 0
        """Records decoded since the last mark."""
        if len(self.mark().position) > POSITION_BYTES_MAX:
            raise InvalidUsage(
                f"too many tables in one source: the names of {len(self._tables)} tables make a "
                f"position of more than {POSITION_BYTES_MAX} bytes; split them over several "
                "sources"
            )

    @property
    def is_filling(self) -> bool:
        """Return whether this decoder fills added tables, up to the position of the others."""
        return self._until_lsn > 0

    @property
    def is_filled(self) -> bool:
        """Return whether it has reached that position."""
        return 0 < self._until_lsn <= self.lsn

    def mark(self, filled: Sequence[str] = ()) -> PositionMark:
        """Return a mark at the current position, which fills `filled`."""
        position = WalPosition(lsn_text(self.lsn), self._timeline, self._tables)
        names = (*self._fills, *filled)
        return PositionMark(position.text(), messages=self.records, filled=names)

    def take(self, wal: bytes) -> list[Given]:
        """Decode the next bytes of the log, and return the changes that are now complete."""
        begin_lsn = self.lsn
        try:
            self._take(self._decoder.payloads(wal))
        except CorruptData as error:
            self._stop(str(error), "check that this timeline was written by penstock wal push")
        given: list[Given] = []
        for name, rows in list(self._rows.items()):
            if len(rows):
                try:
                    given.append(SourceRows(name, rows.updates(), snapshot=self.is_filling))
                except RowMisfit as error:
                    where = f"records from {lsn_text(begin_lsn)} on"
                    self._fail(name, where, error)
                rows.clear()
        given += self._failed
        self._failed = []
        # While tables are being filled, the only mark is the one at the end.
        if self.lsn > begin_lsn and self.is_filling == self.is_filled:
            given.append(self.mark())
            self.records = 0
        return given

    def give_up(self, error: str, hint: str) -> list[Given]:
        """Return failures of the tables that are being filled, and the mark that ends the
        filling."""
        # The other tables continue from the position.
        self.lsn = self._until_lsn
        failed = [ExportFailed(name, error, hint) for name in self._fills]
        return [*failed, self.mark()]

    def _take(self, payloads: Iterable[FramedPayload]) -> None:
        for framed in payloads:
            if self.stopped is not None or self.is_filled or not self._change(framed):
                return
            self.lsn = framed.end_lsn
            self.records += 1

    def _change(self, framed: FramedPayload) -> bool:
        """Decode a record. Return False to stop before it."""
        try:
            change = _CHANGES.decode(framed.payload)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = framed.payload[:_SHOWN].decode(errors="replace")
            return self._stop(
                f"the record at {lsn_text(self.lsn)} is not a change: {error}: {shown}",
                "expected records written by penstock wal push; to continue after this one, "
                f"create the source again with start_lsn={lsn_text(framed.end_lsn)}",
            )
        rows = self._rows.get(change.table)
        if rows is None:
            if self._skips or change.table in self._declared:
                return True
            return self._stop(
                f"the record at {lsn_text(self.lsn)} belongs to table {change.table[:_SHOWN]!r}, "
                f"which is not declared (declared: {', '.join(sorted(self._declared))})",
                "create the source again, with that table in `tables` or with undeclared=skip",
            )
        if not change.diff:
            return self._stop(
                f"the record at {lsn_text(self.lsn)} is not a change: its diff is 0",
                "expected records written by penstock wal push",
            )
        try:
            rows.add(change.row, change.diff)
        except RowMisfit as error:
            self._fail(change.table, f"the record at {lsn_text(self.lsn)}", error)
        return True

    def _stop(self, error: str, hint: str) -> bool:
        self.stopped = SourceUnreachable(error, hint)
        return False

    def _fail(self, name: str, where: str, error: RowMisfit) -> None:
        """Mark a table as failed, and skip its records from here on."""
        self._failed.append(
            ExportFailed(name, f"{where} does not fit the table: {error}", RECREATE_HINT)
        )
        del self._rows[name]


_SAMPLE_MS: Final = 1_000
_SAMPLES_MAX: Final = 600
_REACH: Final = (
    "check that the acceptors are running and reachable from the service (penstock wal status "
    "--connect HOST:PORT); the service will retry"
)
_REMOVED: Final = (
    "the records committed there are lost unless an acceptor that has them comes back; the tables "
    "stay correct up to the position. To continue without those records, drop the source and "
    "create it again with start_lsn at an LSN that is retained"
)
_CANNOT_FILL: Final = (
    "a table is filled from the start of the log, which was removed: declare it in a source of "
    "its own with start_lsn at an LSN that is retained, or drop it here"
)


class WalSource:
    """Ingests one timeline; implements `connectors.sources.source.SourceConnector`."""

    def __init__(self, config: WalConfig, around: ConnectorContext) -> None:
        self._config = config
        self._around = around
        self._clock = around.clock
        # Reads the log; None while closed.
        self._follower: WalFollower | None = None
        self._changes: WalChanges
        self._exports: tuple[SourceExport, ...] = ()
        self._begun = False
        """True once any mark has been returned, possibly by an earlier run of the source."""
        # Output of `next`, in order.
        self._ready: deque[Given] = deque()
        # True after `SourceIdle` until the next output.
        self._idle = False
        # Durable position, and the event that signals its next advance.
        self._taken_lsn = 0
        self._taken = anyio.Event()
        self._samples: deque[tuple[int, float]] = deque()
        """Pairs of (known commit LSN, time), oldest first, from which `lag` computes the lag in
        time."""

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """Return the declared tables as exports; at least one acceptor must answer.

        Raises `InvalidUsage` and `SourceUnreachable`.
        """
        declared = self._config.schemas()
        exports = select_exports(
            [SourceExport(name, schema) for name, schema in declared.items()], wanted
        )
        follower = await self._following(self._config.begin_lsn())
        await follower.look()
        seen = follower.seen.values()
        if all(each.error for each in seen):
            reasons = "; ".join(each.error for each in seen)
            if all(each.is_absent for each in seen):
                raise InvalidUsage(
                    f"no acceptor has timeline {self._config.timeline} of tenant "
                    f"{self._config.tenant}: {reasons}; check both, or push something first, which "
                    "creates the timeline"
                )
            raise SourceUnreachable(f"no acceptor responds: {reasons}", _REACH)
        return exports

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """Return the columns to add, as declared: no ingested record can have had values in them.

        Raises `InvalidUsage`.
        """
        declared = self._config.schemas()[export.name]
        left_out = [each.name for each in columns if each.name in declared.names]
        if left_out:
            raise InvalidUsage(
                f"the source declares {', '.join(left_out)}, but this table leaves them out: drop "
                "the table and add it to the source again, which reads the log from its start"
            )
        if self._config.undeclared == "skip":
            raise InvalidUsage(
                "the source skips undeclared columns, so ingested records may have had values in "
                f"{', '.join(each.name for each in columns)}: create another source that declares "
                "these columns in `tables`, which reads the log from its start"
            )
        check_json(columns)
        return tuple(columns)

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """Start reading after a position; None starts at the configured LSN. Raises `InvalidUsage`
        and `SourceUnreachable`."""
        config = self._config
        was = None if position is None else read_position(position, config)
        unknown = [export.name for export in exports if export.name not in config.tables]
        if unknown:
            raise InvalidUsage(f"the source does not declare table {', '.join(unknown)}")
        self._exports = tuple(exports)
        self._begun = was is not None
        new = [
            export
            for export in exports
            if was is not None and (export.is_new or export.name not in was.tables)
        ]
        begin_lsn = config.begin_lsn()
        lsn = begin_lsn if was is None else was.at
        self._taken_lsn = lsn
        # At the start of the log, there is nothing before the position to fill new tables from.
        if not new or lsn <= begin_lsn:
            await self._go_on(lsn)
            # Also after tables were dropped: the next position must no longer name them.
            if was is not None and (new or len(was.tables) > len(exports)):
                self._ready.append(self._changes.mark([each.name for each in new]))
            return
        names = [export.name for export in exports]
        self._changes = WalChanges(
            config,
            new,
            begin_lsn,
            tables=names,
            fills=[export.name for export in new],
            until_lsn=lsn,
        )
        self._follower = await self._following(begin_lsn)

    async def _go_on(self, lsn: int) -> None:
        """Read the changes of all tables from this LSN on."""
        names = [export.name for export in self._exports]
        self._changes = WalChanges(self._config, self._exports, lsn, tables=names)
        self._follower = await self._following(lsn)
        self._consume()

    async def _following(self, lsn: int) -> WalFollower:
        config, settings = self._config, self._around.settings
        token = await self._clock.run_blocking(config.token)
        tls = await self._clock.run_blocking(config.tls)

        async def connect(address: AcceptorAddress) -> AcceptorConnection:
            return await dial(
                address,
                config.tenant,
                config.timeline,
                timeout_ms=settings.connect_timeout_ms,
                token=token,
                tls=tls,
            )

        await self.close()
        return WalFollower(
            config.addresses(),
            lsn,
            connect,
            self._clock,
            silence_ms=config.silence_ms,
            look_ms=config.look_ms,
        )

    # -- read ------------------------------------------------------------------------------------

    async def next(self) -> Given:
        """Return the next rows or event. Raises `SourceUnreachable`."""
        while not self._ready:
            changes = self._changes
            if changes.stopped is not None:
                # Raising ends the source, which drops rows that are staged but not yet durable.
                await self._all_taken(changes.lsn)
                raise changes.stopped
            if changes.is_filled:
                await self._go_on(changes.lsn)
                continue
            wal = await self._read(changes)
            if wal:
                self._ready += await self._clock.run_blocking(lambda: changes.take(wal))  # noqa: B023 (awaited here)
            elif not self._begun:
                self._begun = True
                return changes.mark()
            elif not self._idle and not self._ready:
                self._idle = True
                return SourceIdle()
        self._idle = False
        self._begun = True
        return self._ready.popleft()

    async def _read(self, changes: WalChanges) -> bytes:
        """Return more of the log; empty if there is nothing new at the moment."""
        follower = self._follower
        assert follower is not None, "open"
        try:
            wal = await follower.next()
        except AllRemoved as error:
            if changes.is_filling:
                self._ready += changes.give_up(str(error), _CANNOT_FILL)
                return b""
            raise SourceUnreachable(str(error), _REMOVED) from None
        except ConnectionBroken as error:
            raise SourceUnreachable(str(error), _REACH) from None
        self._sample(follower)
        return wal

    async def _all_taken(self, lsn: int) -> None:
        """Wait until all returned rows up to `lsn` are durable."""
        while self._taken_lsn < lsn:
            self._taken = anyio.Event()
            await self._taken.wait()

    async def taken(self, position: str) -> None:
        """Record a durable position, and report it to the acceptors if `feedback` is on."""
        self._taken_lsn = read_position(position, self._config).at
        self._taken.set()
        self._consume()

    def _consume(self) -> None:
        if self._config.feedback and self._follower is not None:
            self._follower.report_consumed(self._taken_lsn)

    # -- lag, close ------------------------------------------------------------------------------

    def _sample(self, follower: WalFollower) -> None:
        now, samples = self._clock.monotonic_ms(), self._samples
        while samples and samples[0][0] <= self._changes.lsn:
            samples.popleft()
        if len(samples) >= _SAMPLES_MAX or follower.known_lsn <= self._changes.lsn:
            return
        if not samples or now >= samples[-1][1] + _SAMPLE_MS:
            samples.append((follower.known_lsn, now))

    def lag(self) -> SourceLag:
        """Return the last known lag. In time, it is the age of the oldest known commit that was not
        returned yet."""
        follower = self._follower
        if follower is None:
            return SourceLag()
        lsn = self._changes.lsn
        behind = max(0, follower.known_lsn - lsn)
        waits = [seen_ms for known, seen_ms in self._samples if known > lsn]
        since = min(waits, default=None)
        ms = 0 if not behind else 0 if since is None else self._clock.monotonic_ms() - since
        return SourceLag(
            known=lsn_text(max(follower.known_lsn, lsn)),
            bytes_behind=behind,
            ms_behind=int(ms),
            notes=self._notes(follower),
        )

    def _notes(self, follower: WalFollower) -> tuple[str, ...]:
        notes = []
        errors = [seen.error for seen in follower.seen.values() if seen.error]
        if errors:
            count = len(self._config.addresses())
            notes.append(f"{len(errors)} of {count} acceptors fail: {'; '.join(errors)}")
        commits = [seen.commit_lsn for seen in follower.seen.values() if not seen.error]
        if commits and max(commits) < follower.next_lsn:
            notes.append(
                f"the acceptors know commits only up to {lsn_text(max(commits))}, but everything "
                f"before {lsn_text(follower.next_lsn)} was read: they were restarted, and learn "
                "the rest from the next writer"
            )
        return tuple(notes)

    async def close(self) -> None:
        """Close the connections to the acceptors."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    async def forget(self) -> None:
        """Do nothing: there are no external resources."""
