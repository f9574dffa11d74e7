"""A log of framed change records as a source: `penstock wal push` writes it, acceptors keep it.

Theory of operation. `wal.following` reads committed records from any acceptor that has them, and
here they become changes, with a position after the last whole record. The position becomes durable
together with the rows, so each record is in its table exactly once, whenever the service was
killed. Acceptors are told afterwards, and may remove the log before it.

A log has no first contents: a table that was added later is filled by reading the log from its
begin once more, for the new tables alone, up to the position. Meanwhile the others wait.

Bytes come in order, in pieces of any size; each whole record is one change of one table. The rows
of a piece are given at once, by table, then a mark at the place after the last record. A mark's
position never falls.

Errors:
- a row that its table cannot hold fails that table (`ExportFailed`); the others go on;
- a record that is no change, one of a table that is not declared (unless such are skipped), and
  a log that is broken or not ours have no meaning here, so the source *stops* before them: all
  changes before are given, with a mark; then `stopped` has the reason;
- lasting errors are reported and retried all the same: all acceptors have removed the log at the
  position; a table that was added needs a begin that was removed (that table fails).

Declared tables that are not wanted are skipped.
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
    "the log cannot be changed: create another source whose `tables` can hold it, or drop this "
    "table here"
)
_SHOWN: Final = 200


class _Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record's payload: see `wal.pushing`."""

    table: str
    row: msgspec.Raw
    diff: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 1


class WalPosition(msgspec.Struct, frozen=True):
    """A position: everything before `lsn` was taken, into these tables."""

    lsn: str
    timeline: str
    tables: tuple[str, ...]

    @property
    def at(self) -> int:
        """Return `lsn` as a number."""
        return parse_lsn(self.lsn)

    def text(self) -> str:
        """Return the text that `read_position` parses."""
        return msgspec.json.encode(self).decode()


def read_position(text: str, config: WalConfig) -> WalPosition:
    """Parse a position. Raises `InvalidUsage` for another text, or a position of another log."""
    try:
        found = msgspec.json.decode(text, type=WalPosition)
        parse_lsn(found.lsn)
    except (msgspec.DecodeError, InvalidUsage) as error:
        raise InvalidUsage(f"{text[:100]!r} is no position of a source of a log: {error}") from None
    if found.timeline != config.timeline:
        raise InvalidUsage(
            f"this is timeline {config.timeline}; what is here came from {found.timeline}: name "
            "that one, or drop the source and create it again"
        )
    return found


def _with_further(declared: TableSchema, schema: TableSchema) -> TableSchema:
    """Return the columns that records may have: those declared, and those that the table was given
    since."""
    further = tuple(each for each in schema.columns if each.name not in declared.names)
    return TableSchema((*declared.columns, *further))


_CHANGES: Final = msgspec.json.Decoder(_Change)


class WalChanges:
    """Decodes a log from `lsn` on. `fills`: the tables that the mark at `until_lsn` fills; no other
    mark comes before it. `until_lsn` 0: no end."""

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
        """Make a decoder. `tables`: those that positions name. Raises `InvalidUsage` when they are
        too many."""
        self._timeline = config.timeline
        skips = config.undeclared == "skip"
        self._skips = skips
        declared = config.schemas()
        self._declared = frozenset(declared)
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
        self._failed: list[ExportFailed] = []
        self.lsn = lsn
        self.stopped: SourceUnreachable | None = None
        """Reason why no more can be given."""
        self.records = 0
        """Records taken since the last mark."""
        if len(self.mark().position) > POSITION_BYTES_MAX:
            raise InvalidUsage(
                f"the names of {len(self._tables)} tables make a position of more than "
                f"{POSITION_BYTES_MAX} bytes: make several sources"
            )

    @property
    def is_filling(self) -> bool:
        """Return whether it reads for tables that were added, up to the position of the others."""
        return self._until_lsn > 0

    @property
    def is_filled(self) -> bool:
        """Return whether it has reached that position."""
        return 0 < self._until_lsn <= self.lsn

    def mark(self, filled: Sequence[str] = ()) -> PositionMark:
        """Return a mark at the current place."""
        position = WalPosition(lsn_text(self.lsn), self._timeline, self._tables)
        names = (*self._fills, *filled)
        return PositionMark(position.text(), messages=self.records, filled=names)

    def take(self, wal: bytes) -> list[Given]:
        """Decode the next bytes of the log; return the changes that are whole now."""
        begin_lsn = self.lsn
        try:
            self._take(self._decoder.payloads(wal))
        except CorruptData as error:
            self._stop(str(error), "is this the timeline that penstock wal push writes?")
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
        # The other tables go on from the position.
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
        """Decode a record; return False to stop before it."""
        try:
            change = _CHANGES.decode(framed.payload)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = framed.payload[:_SHOWN].decode(errors="replace")
            return self._stop(
                f"the record at {lsn_text(self.lsn)} is no change: {error}: {shown}",
                "records are written by penstock wal push; to go on behind it, create the source "
                f"again with start_lsn={lsn_text(framed.end_lsn)}",
            )
        rows = self._rows.get(change.table)
        if rows is None:
            if self._skips or change.table in self._declared:
                return True
            return self._stop(
                f"the record at {lsn_text(self.lsn)} is of table {change.table[:_SHOWN]!r}, which "
                f"is not declared: {', '.join(sorted(self._declared))} are",
                "create the source again, with that table in `tables`, or with undeclared=skip",
            )
        if not change.diff:
            return self._stop(
                f"the record at {lsn_text(self.lsn)} is no change: its diff is 0",
                "records are written by penstock wal push",
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
        """Fail a table, and skip its records from here on."""
        self._failed.append(
            ExportFailed(name, f"{where} does not fit the table: {error}", RECREATE_HINT)
        )
        del self._rows[name]


_SAMPLE_MS: Final = 1_000
_SAMPLES_MAX: Final = 600
_REACH: Final = (
    "see that the acceptors run and can be reached from the service: penstock wal status "
    "--connect HOST:PORT; it is tried again"
)
_REMOVED: Final = (
    "what was committed there is gone, unless an acceptor that has it comes back; what is in the "
    "tables stays right up to the position. To go on without the rest, drop the source and create "
    "it again with start_lsn at a place that is kept"
)
_CANNOT_FILL: Final = (
    "a table is filled from the log's begin, which was removed: declare it in a source of its own "
    "with start_lsn at a place that is kept, or drop it here"
)


class WalSource:
    """Ingests one timeline. See `connectors.sources.source.SourceConnector`."""

    def __init__(self, config: WalConfig, around: ConnectorContext) -> None:
        self._config = config
        self._around = around
        self._clock = around.clock
        self._follower: WalFollower | None = None
        self._changes: WalChanges
        self._exports: tuple[SourceExport, ...] = ()
        self._begun = False
        """True if a mark was ever given, also by an earlier source."""
        self._ready: deque[Given] = deque()
        self._idle = False
        self._taken_lsn = 0
        self._taken = anyio.Event()
        self._samples: deque[tuple[int, float]] = deque()
        """(known commit position, time), the oldest first; for the lag in time."""

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """See `Source.describe`: the tables are those declared; an acceptor must answer."""
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
                    f"timeline {self._config.timeline} of tenant {self._config.tenant} is on no "
                    f"acceptor: {reasons}; check both, or push something first: who writes first "
                    "makes it"
                )
            raise SourceUnreachable(f"no acceptor answers: {reasons}", _REACH)
        return exports

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """See `Source.describe_added`: no record that was taken can have had them."""
        declared = self._config.schemas()[export.name]
        left_out = [each.name for each in columns if each.name in declared.names]
        if left_out:
            raise InvalidUsage(
                f"{', '.join(left_out)}: declared by the source, and left out of this table: drop"
                " it and add it to the source again, which reads the log from its begin"
            )
        if self._config.undeclared == "skip":
            raise InvalidUsage(
                "the source skips what records have beside the declared columns, so those taken"
                f" may have had {', '.join(each.name for each in columns)}: create another source"
                " whose `tables` declare them, which reads the log from its begin"
            )
        check_json(columns)
        return tuple(columns)

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """See `Source.open`."""
        config = self._config
        was = None if position is None else read_position(position, config)
        unknown = [export.name for export in exports if export.name not in config.tables]
        if unknown:
            raise InvalidUsage(f"the source declares no table {', '.join(unknown)}")
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
        # A position at the begin has no log before it to fill new tables from.
        if not new or lsn <= begin_lsn:
            await self._go_on(lsn)
            # A mark also when tables were dropped: the position must no longer name them.
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
        """Read for all tables from this place on."""
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
        """See `Source.next`."""
        while not self._ready:
            changes = self._changes
            if changes.stopped is not None:
                # Raising ends the source, and drops rows that are staged and not durable yet.
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
        """Return more of the log; empty: nothing new just now."""
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
        """Wait until the rows given are durable."""
        while self._taken_lsn < lsn:
            self._taken = anyio.Event()
            await self._taken.wait()

    async def taken(self, position: str) -> None:
        """See `Source.taken`."""
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
        """See `Source.lag`. In time: the age of the oldest known commit that was not given."""
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
                f"acceptors know of commits up to {lsn_text(max(commits))} only, and everything "
                f"before {lsn_text(follower.next_lsn)} is here: they were restarted, and learn the "
                "rest from the next writer"
            )
        return tuple(notes)

    async def close(self) -> None:
        """See `Source.close`."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    async def forget(self) -> None:
        """See `Source.forget`: there are no external resources."""
