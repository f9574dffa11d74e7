"""PostgreSQL as a source: tables by logical replication, from their first contents on.

Theory of operation. A replication slot keeps the server's log from the position that is durable
here; a publication says which tables' changes it gives. Tables that were not filled yet are
copied at a snapshot that a slot exported (the source's own when it is made, else a temporary
one): it holds exactly what was committed before that slot's position, and from there on changes
count. Several tables are copied at one snapshot, and no mark comes before the stream has passed
its position, so that every mark is one instant of the whole database.

A position names the server, the database, a place in the log, and of each table its identity and
the place that its first contents stand for. `open` goes on there; the server sends a transaction
again unless `taken` has named a later place, and never one that lies before what `open` asks for.

Three connections: one for replication, one that looks at the slot and the tables from time to
time (`poll_ms`), one for first contents while they are copied. Losing any of them is
`Unreachable`: the source is opened again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from actors.errors import InvalidUsage, ProtocolError
from actors.kernel.clock import Clock, SystemClock
from actors.sources import postgres_catalog as catalog
from actors.sources import postgres_setup as setup
from actors.sources.postgres_catalog import Health, Table, lsn_of, lsn_text
from actors.sources.postgres_changes import ANEW, Changes, Filled, type_changed
from actors.sources.postgres_config import PostgresConfig
from actors.sources.postgres_errors import Refused
from actors.sources.postgres_snapshot import Contents, Snapshot
from actors.sources.postgres_stream import Stream
from actors.sources.postgres_types import TypeFacts, column_type
from actors.sources.postgres_wire import Wire, identifier, literal
from actors.sources.source import (
    POSITION_BYTES_MAX,
    Export,
    ExportFailed,
    Given,
    Idle,
    Lag,
    Mark,
    Unreachable,
)

_IDLE_WAIT_S: Final = 1.0
_IN_USE: Final = "55006"
_NO_SUCH_OBJECT: Final = "42704"


class _Filled(msgspec.Struct, frozen=True, array_like=True):
    """See `Filled`."""

    oid: int
    lsn: str
    columns: list[int]
    number_max: int


class _Position(msgspec.Struct, frozen=True):
    system: str
    database: str
    lsn: str
    filled: dict[str, _Filled]


class PostgresSource:
    """See `sources.source.Source`. `id` names slot and publication unless the configuration
    does; it must be unique among all that use the server."""

    def __init__(self, config: PostgresConfig, id: str, clock: Clock | None = None) -> None:
        config.check()
        self._config = config
        self._clock = clock or SystemClock()
        self._slot = config.slot_name(id)
        self._publication = config.publication_name(id)
        self._looker: Wire | None = None
        """Looks at the slot and the tables."""
        self._snapshot: Snapshot | None = None
        self._stream: Stream | None = None
        self._ready: deque[Given] = deque()
        self._changes: Changes | None = None
        self._filled: dict[str, Filled] = {}
        self._exports: dict[str, Export] = {}
        self._system = ""
        self._looked_ms = 0.0
        self._health: Health | None = None
        self._rows_known: int | None = None
        self._rows_staged = 0
        self._notes: dict[str, str] = {}
        self._idle = False

    async def describe(self, wanted: Mapping[str, Sequence[str]] | None) -> tuple[Export, ...]:
        """See `Source.describe`. Names are ``schema.table``, or a table of ``public``."""
        # By the connection that only users who may replicate get.
        wire = await self._connect(replication=True)
        try:
            return await setup.describe(wire, self._config, self._publication, wanted)
        except Refused as error:
            raise Unreachable(f"PostgreSQL: {error}", error.server_hint) from None
        finally:
            wire.close()

    # -- begin -------------------------------------------------------------------------------

    async def open(self, exports: Sequence[Export], position: str | None) -> None:
        """See `Source.open`."""
        try:
            await self._open(exports, position)
        except Refused as error:
            raise Unreachable(f"PostgreSQL: {error}", error.server_hint) from None

    async def _open(self, exports: Sequence[Export], position: str | None) -> None:
        config = self._config
        self._exports = {export.name: export for export in exports}
        self._looker = looker = await self._connect(replication=False)
        maker = await self._connect(replication=True)
        try:
            await setup.check_server(maker)
            identity = await maker.query("IDENTIFY_SYSTEM")
            self._system = identity[0][0] or ""
            was = self._read_position(position)
            found = await catalog.tables(looker, list(self._exports))
            types = await setup.types_of(looker, found.values())
            present = [found[name] for name in self._exports if name in found]
            await setup.publish(looker, config, self._publication, present)
            filled = {
                name: Filled(each.oid, lsn_of(each.lsn), tuple(each.columns), each.number_max)
                for name, each in (was.filled if was else {}).items()
                if name in self._exports and not self._exports[name].is_new
            }
            new = [name for name in self._exports if name not in filled and name in found]
            gone = [name for name in self._exports if name not in filled and name not in found]
            lsn = lsn_of(was.lsn) if was else 0
            health = await catalog.health(looker, self._slot)
            setup.check_slot(health, self._slot, config, lsn)
            snapshot = ""
            if health.slot is None or new:
                at, snapshot = await self._export_snapshot(maker, health, resumed=was is not None)
                lsn = lsn or at
                filled |= {name: _filled(found[name], self._exports[name], at) for name in new}
            elif not was:
                lsn = health.slot.confirmed_lsn
            self._filled = filled
            self._changes = Changes(
                exports, filled, types, config.numeric, lsn, self._position_text, new
            )
            for name in gone:
                self._ready += self._changes.fail(name, "there is no such table any more", ANEW)
            if len(self._position_text(lsn)) > POSITION_BYTES_MAX:
                raise InvalidUsage(f"{len(exports)} tables are too many: make several sources")
            if new:
                await self._begin_snapshot([found[name] for name in new], types, snapshot)
            elif was is None:
                self._ready.append(Mark(self._position_text(lsn)))
            self._judge(found, types)
        except BaseException:
            await self.close()
            raise
        finally:
            maker.close()
        self._health = health
        self._looked_ms = self._clock.monotonic_ms()

    def _read_position(self, position: str | None) -> _Position | None:
        if position is None:
            return None
        was = msgspec.json.decode(position, type=_Position)
        if was.system != self._system or was.database != self._config.database:
            raise InvalidUsage(
                f"this is server {self._system}, database {self._config.database}; what is here"
                f" came from server {was.system}, database {was.database}: name that one, or drop"
                " the source and create it again"
            )
        return was

    async def _export_snapshot(
        self, maker: Wire, health: Health, *, resumed: bool
    ) -> tuple[int, str]:
        """(position, snapshot of everything committed before it). It lives as `maker` does."""
        if health.slot is None and not resumed:
            slot, kind = self._slot, ""
        else:
            slot, kind = f"{self._slot[:52]}_fill", "TEMPORARY "
        try:
            rows = await maker.query(
                f"CREATE_REPLICATION_SLOT {identifier(slot)} {kind}LOGICAL pgoutput EXPORT_SNAPSHOT"
            )
        except Refused as error:
            raise Unreachable(
                f"PostgreSQL: slot {slot} cannot be made: {error}", error.server_hint
            ) from None
        return lsn_of(rows[0][1]), rows[0][2] or ""

    async def _begin_snapshot(
        self, tables: list[Table], types: Mapping[int, TypeFacts], snapshot: str
    ) -> None:
        contents = []
        for table in tables:
            export = self._exports[table.name]
            by_name = {column.name: column for column in table.columns}
            kinds = []
            for column in export.schema.columns:
                told = by_name.get(column.name)
                kind = (
                    column_type(told.type_oid, told.modifier, types, self._config.numeric)
                    if told
                    else None
                )
                if kind is None or kind.spark != column.type:
                    now = f"is {kind.spark} now" if kind else "is gone"
                    self._ready += self._changes_().fail(
                        table.name, f"column {column.name} {now}; it was {column.type}", ANEW
                    )
                    break
                kinds.append(kind)
            else:
                contents.append(Contents(export, table.relation, tuple(kinds)))
        wire = await self._connect(replication=False)
        self._snapshot = Snapshot(wire, contents)
        known = [table.rows for table in tables]
        self._rows_known = sum(known) if min(known) >= 0 else None
        await self._snapshot.begin(snapshot)

    # -- one thing after another ------------------------------------------------------------

    async def next(self) -> Given:
        """See `Source.next`."""
        try:
            return await self._next()
        except Refused as error:
            raise self._refused(error) from None
        except ProtocolError as error:
            raise Unreachable(
                f"PostgreSQL: {error}", "it is read again from the last mark"
            ) from None

    async def _next(self) -> Given:
        while not self._ready:
            if self._snapshot is not None:
                await self._next_of_snapshot()
                continue
            if self._stream is None:
                await self._begin_stream()
            stream = self._stream
            assert stream is not None, "begun"
            now = self._clock.monotonic_ms()
            due = self._looked_ms + self._config.poll_ms
            if now >= due:
                await self._look()
                continue
            # What is there at once is handed on; else the driver hears that there is nothing.
            wait_s = min(_IDLE_WAIT_S, (due - now) / 1000) if self._idle else 0.0
            self._ready += await stream.next(wait_s)
            if not self._ready:
                if self._changes_().holding:
                    stream.ask()
                if not self._idle:
                    self._idle = True
                    return Idle()
        self._idle = False
        return self._ready.popleft()

    async def _next_of_snapshot(self) -> None:
        snapshot, changes = self._snapshot, self._changes_()
        assert snapshot is not None, "asked for"
        piece = await snapshot.next()
        self._rows_staged = snapshot.rows
        if isinstance(piece, ExportFailed):
            self._ready += changes.fail(piece.export, piece.error, piece.hint)
        elif piece is not None:
            self._ready.append(piece)
        else:
            snapshot.close()
            self._snapshot = None
            self._ready += changes.contents_given()

    async def _begin_stream(self) -> None:
        wire = await self._connect(replication=True)
        stream = None
        try:
            timeout_ms = await catalog.sender_timeout_ms(wire)
            # Three times within it, whatever was configured: 0 means that there is none.
            feedback_ms = min(self._config.feedback_ms, timeout_ms // 3 or 3_600_000)
            stream = Stream(wire, self._changes_(), self._clock, feedback_ms)
            await stream.begin(self._slot, self._publication)
        except BaseException:
            (stream or wire).close()
            raise
        self._stream = stream

    def _refused(self, error: Refused) -> Unreachable:
        hint = error.server_hint
        if error.sqlstate == _IN_USE:
            hint = (
                "another reader has the slot; the one that this source had ends by itself after"
                " wal_sender_timeout"
            )
        elif "publication" in str(error) and "does not exist" in str(error):
            hint = (
                f"publication {self._publication} was dropped: changes since then are not in the"
                " stream; drop the source and create it again"
            )
        return Unreachable(f"PostgreSQL: {error}", hint)

    async def _look(self) -> None:
        """Looks at the slot and the tables."""
        looker = self._looker
        assert looker is not None, "open"
        self._health = health = await catalog.health(looker, self._slot)
        if health.slot is None or health.slot.wal_status == "lost":
            state = "was dropped" if health.slot is None else "has lost log (wal_status lost)"
            raise Unreachable(
                f"PostgreSQL: slot {self._slot} {state}",
                setup.AGAIN,
            )
        if health.slot.wal_status == "unreserved":
            self._notes["slot"] = (
                f"slot {self._slot} is about to lose log (wal_status unreserved): raise"
                " max_slot_wal_keep_size, or see why this source lags"
            )
        else:
            self._notes.pop("slot", None)
        found = await catalog.tables(looker, list(self._exports))
        published = await catalog.publication(looker, self._publication)
        self._judge(found, await setup.types_of(looker, found.values()))
        for name in self._exports:
            if published is None or name not in published.tables:
                self._ready += self._changes_().fail(
                    name,
                    f"publication {self._publication} gives the table no more",
                    f"changes since then are not in the stream: add it again there, then {ANEW}",
                )
        self._looked_ms = self._clock.monotonic_ms()

    def _judge(self, found: Mapping[str, Table], types: Mapping[int, TypeFacts]) -> None:
        """What became of the tables."""
        changes = self._changes_()
        for name, filled in self._filled.items():
            table = found.get(name)
            if table is None or table.oid != filled.oid:
                error = "the table was dropped or renamed" if table is None else "it was made anew"
                self._ready += changes.fail(name, error, ANEW)
                continue
            columns = {column.number: column for column in table.columns}
            for number, column in zip(
                filled.columns, self._exports[name].schema.columns, strict=True
            ):
                told = columns.get(number)
                if told is None or told.name != column.name:
                    error = f"column {column.name} was dropped or renamed"
                    self._ready += changes.fail(name, error, ANEW)
                    break
                numeric = self._config.numeric
                now = column_type(told.type_oid, told.modifier, types, numeric).spark
                if now != column.type:
                    error = type_changed(column.name, column.type, now)
                    self._ready += changes.fail(name, error, ANEW)
                    break
            added = [each.name for each in table.columns if each.number > filled.number_max]
            self._notes.pop(name, None)
            if added:
                listed = ", ".join(added)
                self._notes[name] = f"{name}: not taken are the new {listed}; to take them, {ANEW}"

    # -- the rest ----------------------------------------------------------------------------

    async def taken(self, position: str) -> None:
        """See `Source.taken`."""
        if self._stream is not None:
            self._stream.taken(lsn_of(msgspec.json.decode(position, type=_Position).lsn))

    def lag(self) -> Lag:
        """See `Source.lag`."""
        known = self._health.wal_lsn if self._health else 0
        changes = self._changes
        if changes is None:
            return Lag()
        reached = self._stream.reached if self._stream else changes.lsn
        behind = max(0, known - reached)
        since = changes.commit_ms
        ms = 0 if not behind else None if since is None else self._clock.now_ms() - since
        return Lag(
            known=lsn_text(max(known, reached)),
            bytes_behind=behind,
            snapshot_rows_known=self._rows_known,
            snapshot_rows_staged=self._rows_staged,
            ms_behind=ms,
            notes=tuple(self._notes.values()),
        )

    async def close(self) -> None:
        """See `Source.close`."""
        stream, self._stream = self._stream, None
        snapshot, self._snapshot = self._snapshot, None
        looker, self._looker = self._looker, None
        for each in (stream, snapshot, looker):
            if each is not None:
                each.close()

    async def forget(self) -> None:
        """See `Source.forget`. What the configuration says we do not make, we do not remove."""
        await self.close()
        if not self._config.create:
            return
        wire = await self._connect(replication=False)
        try:
            health = await catalog.health(wire, self._slot)
            if health.slot is not None and health.slot.plugin == "pgoutput":
                if health.slot.active_pid:
                    await wire.query(f"SELECT pg_terminate_backend({health.slot.active_pid}, 5000)")
                await self._drop_slot(wire)
            if not self._config.publication:
                await wire.query(f"DROP PUBLICATION IF EXISTS {identifier(self._publication)}")
        except Refused as error:
            raise Unreachable(f"PostgreSQL: {error}", error.server_hint) from None
        finally:
            wire.close()

    async def _drop_slot(self, wire: Wire) -> None:
        try:
            await wire.query(f"SELECT pg_drop_replication_slot({literal(self._slot)})")
        except Refused as error:
            if error.sqlstate != _NO_SUCH_OBJECT:  # then somebody else has dropped it
                raise

    def _changes_(self) -> Changes:
        assert self._changes is not None, "open"
        return self._changes

    async def _connect(self, *, replication: bool) -> Wire:
        parameters = await self._clock.run_blocking(
            lambda: self._config.connection(replication=replication)
        )
        wire = await Wire.connect(parameters, self._clock)
        if wire.server_version >= 140_000:
            await wire.query("SET idle_session_timeout = 0")
        return wire

    def _position_text(self, lsn: int) -> str:
        filled = {
            name: _Filled(each.oid, lsn_text(each.lsn), list(each.columns), each.number_max)
            for name, each in self._filled.items()
        }
        position = _Position(self._system, self._config.database, lsn_text(lsn), filled)
        return msgspec.json.encode(position).decode()


def _filled(table: Table, export: Export, lsn: int) -> Filled:
    numbers = {column.name: column.number for column in table.columns}
    return Filled(
        table.oid,
        lsn,
        tuple(numbers.get(name, 0) for name in export.schema.names),
        max(numbers.values()),
    )
