"""PostgreSQL as a source: tables by logical replication, from a snapshot on.

Theory of operation. A replication slot keeps the server's log from the durable position; a
publication names the tables. New tables are copied at a snapshot that a slot exported (the source's
own when it is created, else a temporary one): it holds exactly what was committed before that
slot's position, and from there on changes count. No mark is given before the stream has passed the
position of all snapshots, so that every mark is one instant of the whole database.

A position names the server, the database, a place in the log, and of each table its identity and
the place of its snapshot. The server sends transactions after the place that `open` asks for.

An export that has more columns than the position binds is given them at a snapshot too: the stream
is read up to it with the former ones, then the rows that have a value in a further column are
copied (`ColumnsDue`), and from there on rows have all columns. The next mark binds them.

The stream tells of rows only; whatever else happens to a table is in the catalog, which is checked
before every mark (`_confirm`, `postgres_drift`). A table whose rows here may differ from those
there is refilled: the source ends (`SourceUnreachable`), and copies it anew when it is reopened.

Three connections: for replication, for queries of the catalog, and for snapshots. Losing any of
them is `SourceUnreachable`: the source is reopened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import Final, TypeVar

import anyio
import msgspec
from psycopg import pq

from actors.connectors.sources import postgres_catalog as catalog
from actors.connectors.sources import postgres_survey as setup
from actors.connectors.sources.postgres_catalog import (
    PostgresTable,
    ServerHealth,
)
from actors.connectors.sources.postgres_changes import ColumnsDue, Decoded, DecodedChanges
from actors.connectors.sources.postgres_config import PostgresConfig
from actors.connectors.sources.postgres_drift import (
    RECREATE_HINT,
    FilledTable,
    TableContinues,
    TableFails,
    TableNeedsRefill,
    Verdict,
    bind,
    position_lsn,
    read_position,
    write_position,
)
from actors.connectors.sources.postgres_errors import ServerRefused
from actors.connectors.sources.postgres_names import numbers_of
from actors.connectors.sources.postgres_snapshot import (
    SnapshotTable,
    TableSnapshots,
    copied_contents,
)
from actors.connectors.sources.postgres_stream import ReplicationStream
from actors.connectors.sources.postgres_survey import (
    CatalogSurvey,
    judge_all,
    read_catalog_digest,
    survey_now,
)
from actors.connectors.sources.postgres_wire import PostgresConnection
from actors.connectors.sources.source import (
    POSITION_BYTES_MAX,
    ExportFailed,
    ExportTruncated,
    Given,
    PositionMark,
    SourceExport,
    SourceIdle,
    SourceLag,
    SourceUnreachable,
)
from actors.model.pgwire.quoting import quote_name
from actors.model.plan.schema import TableColumn
from actors.runtime.errors import InvalidUsage, ProtocolError, first_error
from actors.runtime.kernel.clock import ActorClock, SystemClock
from actors.wal.lsn import lsn_text, parse_lsn

_IDLE_WAIT_S: Final = 1.0
_VISIBLE_WAIT_S: Final = 0.002
_IN_USE: Final = "55006"
_ANSWER_S: Final = 20
"""Time in which the server must answer a question about its catalog, log or slot."""
_LOOK_MS: Final = 1_000
"""Time that the checks made every `poll_ms` may take before the server counts as silent."""

AnswerT = TypeVar("AnswerT")


class PostgresSource:
    """Ingests tables of one database. See `connectors.sources.source.SourceConnector`. `id` names
    slot and publication unless the configuration does; it must be unique among all that use the
    server."""

    def __init__(
        self,
        config: PostgresConfig,
        id: str,
        clock: ActorClock | None = None,
        *,
        weak_passwords: bool = False,
    ) -> None:
        config.check()
        self._weak_passwords = weak_passwords
        self._config = config
        self._clock = clock or SystemClock()
        self._slot = config.slot_name(id)
        self._publication = config.publication_name(id)
        self._looker: PostgresConnection | None = None
        """Connection for queries of the catalog."""
        self._snapshot: TableSnapshots | None = None
        self._stream: ReplicationStream | None = None
        self._parked: TableSnapshots | None = None
        """Snapshot whose further columns are due when the stream comes to it."""
        self._due: dict[str, SnapshotTable] = {}
        """Further columns that are to be copied then."""
        self._behind: list[Decoded] | None = None
        """Answers of the stream behind `ColumnsDue`, while they are copied."""
        self._ready: deque[Given] = deque()
        self._unsure: list[Given] = []
        """Rows and a mark that wait for a check of the catalog (`_confirm`)."""
        self._changes: DecodedChanges | None = None
        self._filled: dict[str, FilledTable] = {}
        self._exports: dict[str, SourceExport] = {}
        self._system = ""
        self._looked_ms = 0.0
        self._health: ServerHealth | None = None
        self._surveyed = ""
        """Digest of the catalog when the tables were last judged."""
        self._types: tuple[int, ...] = ()
        """Types of the tables' columns, and of their parts."""
        self._rows_known: int | None = None
        self._rows_staged = 0
        self._notes: dict[str, str] = {}
        self._idle = False

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """See `Source.describe`. Names are ``schema.table``, or ``table`` in schema ``public``."""
        # A replication connection, so that a user who may not replicate is refused now.
        wire = await self._connect(replication=True)
        try:
            return await setup.describe(wire, self._config, self._publication, wanted)
        except ServerRefused as error:
            raise SourceUnreachable(f"PostgreSQL: {error}", error.server_hint) from None
        finally:
            wire.close()

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """See `Source.describe_added`."""
        wire = await self._connect(replication=False)
        try:
            return await setup.describe_added(
                wire, self._config, self._publication, export, columns
            )
        except ServerRefused as error:
            raise SourceUnreachable(f"PostgreSQL: {error}", error.server_hint) from None
        finally:
            wire.close()

    # -- open --------------------------------------------------------------------------------

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """See `Source.open`."""
        try:
            await self._open(exports, position)
        except ServerRefused as error:
            raise SourceUnreachable(f"PostgreSQL: {error}", error.server_hint) from None

    async def _open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        self._exports = {export.name: export for export in exports}
        self._looker = looker = await self._connect(replication=False)
        maker = await self._connect(replication=True)
        try:
            await setup.check_server(maker)
            identity = await maker.query("IDENTIFY_SYSTEM")
            self._system = identity[0][0] or ""
            was = None
            if position is not None:
                was = read_position(position, self._system, self._config.database)
            filled = {
                name: each
                for name, each in (was.filled if was else {}).items()
                if name in self._exports and not self._exports[name].is_new
            }
            found = await catalog.tables(looker, list(self._exports))
            present = [
                table
                for name, table in found.items()
                if name not in filled or filled[name].oid == table.oid
            ]
            # Before the slot is created: pgoutput fails on changes that are older than the
            # publication.
            await setup.publish(looker, self._config, self._publication, present)
            lsn = was.lsn if was else 0
            health = await catalog.health(looker, self._slot)
            setup.check_slot(health, self._slot, self._config, lsn)
            await self._begin(maker, health, found, filled, lsn)
        except BaseException:
            await self.close()
            raise
        finally:
            maker.close()
        self._health = health
        self._looked_ms = self._clock.monotonic_ms()

    async def _begin(
        self,
        maker: PostgresConnection,
        health: ServerHealth,
        found: Mapping[str, PostgresTable],
        filled: dict[str, FilledTable],
        lsn: int,
    ) -> None:
        """Judge the tables that were filled before, and start to copy the others."""
        looker = self._looker
        assert looker is not None, "open"
        began, at = lsn > 0, lsn
        survey = await survey_now(looker, [each.oid for each in filled.values()], self._publication)
        verdicts = await self._judge(survey, filled)
        anew = {name for name, each in verdicts.items() if isinstance(each, TableNeedsRefill)}
        new = [found[name] for name in self._exports if name in found]
        new = [table for table in new if table.name not in filled or table.name in anew]
        wider = self._wider(filled, verdicts)
        copied = [*new, *(found[name] for name in wider)]
        growing: dict[str, FilledTable] = {}
        refused: dict[str, str] = {}
        if health.slot is None or copied:
            at, name = await self._export_snapshot(maker, health, resumed=began)
            # Where no table keeps its rows, the stream may begin at the snapshot.
            lsn = lsn if any(isinstance(each, TableContinues) for each in verdicts.values()) else at
            assert at >= lsn, "a new slot begins at the end of the log"
            if copied:
                then, refused = await self._begin_snapshot(new, copied, name)
                for table in copied:
                    into = growing if table.name in wider else filled
                    into[table.name] = self._bind(then, table, at, wider.get(table.name, ()))
        elif not began:
            assert health.slot is not None, "else it would be made"
            lsn = health.slot.confirmed_lsn
        self._filled = filled
        survey = await survey_now(looker, [each.oid for each in filled.values()], self._publication)
        for table in copied:
            fresh = growing.get(table.name) or filled[table.name]
            same = self._bind(survey, table, at, wider.get(table.name, ())) == fresh
            if not same and table.name not in refused:
                raise self._was_altered(table.name)
        verdicts = await self._judge(survey, filled)
        # One whose further columns are gone ends, as it would end later.
        grown = await self._judge(survey, growing)
        verdicts |= {name: each for name, each in grown.items() if isinstance(each, TableFails)}
        self._changes = changes = DecodedChanges(
            self._exports.values(),
            filled,
            survey.types,
            lsn,
            self._position_text,
            [table.name for table in new],
            growing,
        )
        self._settle(survey, verdicts)
        for name in self._exports:
            if name not in filled:
                self._ready += changes.fail(name, "there is no such table any more", RECREATE_HINT)
            elif name in refused:
                hint = "check that the user may SELECT all columns of the table"
                error = f"the table cannot be read: {refused[name]}"
                self._ready += changes.fail(name, error, hint)
        if len(self._position_text(lsn)) > POSITION_BYTES_MAX:
            raise InvalidUsage(f"{len(self._exports)} tables are too many: make several sources")
        if copied:
            self._ready += [ExportTruncated(name) for name in sorted(anew) if name not in refused]
            live = [table for table in copied if not changes.is_failed(table.name)]
            self._begin_copies(live, filled | growing, wider, survey)
        elif not began:
            self._ready.append(PositionMark(self._position_text(lsn)))

    def _begin_copies(
        self,
        tables: Sequence[PostgresTable],
        filled: Mapping[str, FilledTable],
        wider: Mapping[str, tuple[int, ...]],
        found: CatalogSurvey,
    ) -> None:
        """Have new tables copied next, and further columns when they are due."""
        copies = {
            table.name: copied_contents(
                self._exports[table.name],
                filled[table.name],
                found.tables[table.oid],
                found.types,
                held=len(wider.get(table.name, ())),
            )
            for table in tables
        }
        self._due = {name: copies.pop(name) for name in wider if name in copies}
        assert self._snapshot is not None, "begun"
        self._snapshot.copy(copies.values())

    def _wider(
        self, filled: Mapping[str, FilledTable], verdicts: Mapping[str, Verdict]
    ) -> dict[str, tuple[int, ...]]:
        """Return the tables whose exports have further columns → numbers of those that are bound.
        Raises `SourceUnreachable` for an export that has fewer."""
        found = {}
        for name, verdict in verdicts.items():
            bound, wanted = filled[name].columns, self._exports[name].schema.names
            if len(bound) > len(wanted):
                raise SourceUnreachable(
                    f"PostgreSQL: {name} was given columns: {len(bound)} are read at the position,"
                    f" and {len(wanted)} are known here",
                    "another service owns this state now: stop this one",
                )
            if len(bound) < len(wanted) and isinstance(verdict, TableContinues):
                found[name] = bound
        return found

    @staticmethod
    def _was_altered(name: str) -> SourceUnreachable:
        # Retried: the next attempt copies the table at a newer snapshot.
        return SourceUnreachable(
            f"PostgreSQL: {name} was altered as it was to be copied", "tried again"
        )

    def _bind(
        self, then: CatalogSurvey, table: PostgresTable, lsn: int, bound: tuple[int, ...] = ()
    ) -> FilledTable:
        """Return a table as filled at the snapshot, bound to its columns there; the first ones are
        `bound` already. Raises `SourceUnreachable`."""
        there = then.tables.get(table.oid)
        if there is None or there.name != table.name:
            raise self._was_altered(table.name)
        pairs = [(each.number, each.name) for each in there.columns if each.number not in bound]
        further = self._exports[table.name].schema.names[len(bound) :]
        numbers = (*bound, *numbers_of(further, pairs))
        return bind(there, numbers, lsn, then.types, then.publication)

    async def _export_snapshot(
        self, maker: PostgresConnection, health: ServerHealth, *, resumed: bool
    ) -> tuple[int, str]:
        """Return (position, snapshot of everything committed before it). The snapshot lives as long
        as `maker`."""
        if health.slot is None and not resumed:
            slot, kind = self._slot, ""
        else:
            # A slot exports a snapshot only when it is created, so the source's own cannot do it
            # again. Named after its connection: the slot of the attempt before lives until the
            # server notices that its client is gone.
            slot, kind = f"{self._slot[:44]}_fill_{maker.server_pid}", "TEMPORARY "
        try:
            rows = await maker.query(
                f"CREATE_REPLICATION_SLOT {quote_name(slot)} {kind}LOGICAL pgoutput EXPORT_SNAPSHOT"
            )
        except ServerRefused as error:
            raise SourceUnreachable(
                f"PostgreSQL: slot {slot} cannot be made: {error}", error.server_hint
            ) from None
        return parse_lsn(str(rows[0][1])), rows[0][2] or ""

    async def _begin_snapshot(
        self, new: Sequence[PostgresTable], tables: Sequence[PostgresTable], name: str
    ) -> tuple[CatalogSurvey, dict[str, str]]:
        """Connect, and begin the snapshot. See `TableSnapshots.begin`."""
        self._snapshot = TableSnapshots(await self._connect(replication=False))
        known = [table.rows for table in new]
        self._rows_known = sum(known) if min(known, default=0) >= 0 else None
        return await self._snapshot.begin(name, tables, self._publication)

    # -- read -------------------------------------------------------------------------------

    async def next(self) -> Given:
        """See `Source.next`."""
        try:
            return await self._next()
        except ServerRefused as error:
            raise self._refused(error) from None
        except ProtocolError as error:
            raise SourceUnreachable(
                f"PostgreSQL: {error}", "it is read again from the last mark"
            ) from None

    async def _next(self) -> Given:
        while not self._ready:
            if self._unsure:
                await self._confirm()
                continue
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
                await self._in_time(self._look())
                continue
            # Wait only after `SourceIdle`: the ingest task must learn at once that nothing is left.
            wait_s = min(_IDLE_WAIT_S, (due - now) / 1000) if self._idle else 0.0
            self._give(await stream.next(wait_s))
            if not self._ready and not self._unsure:
                if self._changes_().holding:
                    stream.ask()
                if not self._idle:
                    self._idle = True
                    return SourceIdle()
        self._idle = False
        return self._ready.popleft()

    def _give(self, given: Sequence[Decoded]) -> None:
        plain: list[Given] = []
        for place, each in enumerate(given):
            if isinstance(each, ColumnsDue):
                self._ready += plain
                self._copy_due(each, given[place + 1 :])
                return
            plain.append(each)
        if any(isinstance(each, PositionMark) for each in plain):
            self._unsure += plain
        else:
            self._ready += plain

    def _copy_due(self, due: ColumnsDue, behind: Sequence[Decoded]) -> None:
        """Have further columns copied next, and then go on with what the stream gave behind."""
        # Judged with all of their columns before the next mark.
        self._surveyed = ""
        if self._parked is None:  # all of the tables had ended before
            self._give(behind)
            return
        self._snapshot, self._parked = self._parked, None
        self._snapshot.copy(self._due[name] for name in due.exports)
        self._due, self._behind = {}, list(behind)

    async def _next_of_snapshot(self) -> None:
        snapshot, changes = self._snapshot, self._changes_()
        assert snapshot is not None, "asked for"
        piece = None
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._ask_meanwhile)
                piece = await snapshot.next()
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        self._rows_staged = snapshot.rows
        if isinstance(piece, ExportFailed):
            self._ready += changes.fail(piece.export, piece.error, piece.hint)
        elif piece is not None:
            self._ready.append(piece)
        else:
            self._snapshot = None
            given, self._behind = self._behind, None
            if given is None:
                given = changes.contents_given()
            if self._due:
                self._parked = snapshot
            else:
                snapshot.close()
            self._give(given)

    async def _ask_meanwhile(self) -> None:
        """Ask the server again and again whether it is there: the first rows of a large table may
        take long, so that their wait has no limit. Raises `SourceUnreachable`."""
        assert self._looker is not None, "open"
        while True:
            await anyio.sleep(self._config.poll_ms / 1000)
            self._health = await self._in_time(catalog.health(self._looker, self._slot))
            self._looked_ms = self._clock.monotonic_ms()

    async def _begin_stream(self) -> None:
        wire = await self._connect(replication=True)
        stream = None
        try:
            timeout_ms = await self._in_time(catalog.sender_timeout_ms(wire))
            # At least three times within the timeout, whatever is configured; 0: no timeout.
            feedback_ms = min(self._config.feedback_ms, timeout_ms // 3 or 3_600_000)
            stream = ReplicationStream(wire, self._changes_(), self._clock, feedback_ms)
            await self._in_time(stream.begin(self._slot, self._publication))
        except BaseException:
            (stream or wire).close()
            raise
        self._stream = stream

    def _refused(self, error: ServerRefused) -> SourceUnreachable:
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
        return SourceUnreachable(f"PostgreSQL: {error}", hint)

    async def _in_time(self, answer: Awaitable[AnswerT]) -> AnswerT:
        """Return an answer of the server. Raises `SourceUnreachable` if it does not come."""
        try:
            # A server that is stopped, or gone without a word, leaves the connection open.
            with anyio.fail_after(_ANSWER_S):
                return await answer
        except TimeoutError:
            raise SourceUnreachable(
                f"PostgreSQL: no answer within {_ANSWER_S} s",
                "check that the server runs and that the network reaches it",
            ) from None

    async def _look(self) -> None:
        """Check the slot and the tables."""
        looker = self._looker
        assert looker is not None, "open"
        self._health = health = await catalog.health(looker, self._slot)
        if health.slot is None or health.slot.wal_status == "lost":
            state = "was dropped" if health.slot is None else "has lost log (wal_status lost)"
            raise SourceUnreachable(f"PostgreSQL: slot {self._slot} {state}", setup.AGAIN)
        if health.slot.wal_status == "unreserved":
            self._notes["slot"] = (
                f"slot {self._slot} is about to lose log (wal_status unreserved): raise"
                " max_slot_wal_keep_size, or see why this source lags"
            )
        else:
            self._notes.pop("slot", None)
        await self._survey()
        self._looked_ms = self._clock.monotonic_ms()

    async def _confirm(self) -> None:
        """Release the rows and marks of `_unsure`, once the catalog was checked as of a moment
        after their transactions; failures of tables come before the mark."""
        looker = self._looker
        assert looker is not None, "open"
        changes = self._changes_()
        oids = [each.oid for each in self._filled.values()]
        while True:
            seen = await self._in_time(
                read_catalog_digest(looker, oids, self._types, self._publication)
            )
            if seen.shows(changes.xids):
                break
            # A transaction is in the log a moment before other transactions see its effects.
            await anyio.sleep(_VISIBLE_WAIT_S)
        if seen.digest != self._surveyed:
            await self._in_time(self._survey())
        failed = changes.confirm()
        place = next(at for at, each in enumerate(self._unsure) if isinstance(each, PositionMark))
        self._ready += [*self._unsure[:place], *failed, *self._unsure[place:]]
        self._unsure = []

    async def _survey(self) -> None:
        """Judge all tables. Raises `SourceUnreachable` where one must be refilled."""
        looker = self._looker
        assert looker is not None, "open"
        oids = [each.oid for each in self._filled.values()]
        survey = await survey_now(looker, oids, self._publication)
        self._settle(survey, await self._judge(survey, self._filled))

    async def _judge(
        self, found: CatalogSurvey, filled: Mapping[str, FilledTable]
    ) -> dict[str, Verdict]:
        """Judge the tables that have not failed. See `judge_all`."""
        assert self._looker is not None, "open"
        changes = self._changes
        live = {n: f for n, f in filled.items() if changes is None or not changes.is_failed(n)}
        return await judge_all(self._looker, found, live, self._exports, self._publication)

    def _settle(self, survey: CatalogSurvey, verdicts: Mapping[str, Verdict]) -> None:
        """Apply the verdicts on the tables. Raises `SourceUnreachable`."""
        changes = self._changes_()
        self._surveyed, self._types = survey.seen.digest, tuple(sorted(survey.types))
        changes.learn(survey.types)
        for name, verdict in verdicts.items():
            match verdict:
                case TableContinues():
                    self._filled[name] = msgspec.structs.replace(
                        self._filled[name], fingerprint=verdict.fingerprint, names=verdict.names
                    )
                    changes.stands(name, verdict)
                    self._notes.pop(name, None)
                    if verdict.note:
                        self._notes[name] = verdict.note
                case TableFails(error, hint):
                    self._ready += changes.fail(name, error, hint)
                case TableNeedsRefill(reason):
                    raise SourceUnreachable(
                        f"PostgreSQL: {name}: {reason}", "the table is filled anew"
                    )

    # -- acknowledge, close ------------------------------------------------------------------

    async def taken(self, position: str) -> None:
        """See `Source.taken`."""
        if self._stream is not None:
            self._stream.taken(position_lsn(position))

    def lag(self) -> SourceLag:
        """See `Source.lag`."""
        known = self._health.wal_lsn if self._health else 0
        changes = self._changes
        if changes is None:
            return SourceLag()
        reached = self._stream.reached if self._stream else changes.lsn
        behind = max(0, known - reached)
        since = changes.commit_ms
        ms = 0 if not behind else None if since is None else self._clock.now_ms() - since
        silent_ms = self._silent_ms()
        if silent_ms > self._config.poll_ms + _LOOK_MS:
            # It may have changes of which nothing is known here.
            ms = max(ms or 0, silent_ms)
        return SourceLag(
            known=lsn_text(max(known, reached)),
            bytes_behind=behind,
            snapshot_rows_known=self._rows_known,
            snapshot_rows_staged=self._rows_staged,
            ms_behind=ms,
            notes=tuple(self._notes.values()),
        )

    def _silent_ms(self) -> int:
        """Return the time since the server was last heard of."""
        heard_ms = self._looked_ms
        if self._stream is not None:
            heard_ms = max(heard_ms, self._stream.heard_ms)
        return int(self._clock.monotonic_ms() - heard_ms)

    async def close(self) -> None:
        """See `Source.close`."""
        stream, self._stream = self._stream, None
        snapshot, self._snapshot = self._snapshot, None
        parked, self._parked = self._parked, None
        looker, self._looker = self._looker, None
        for each in (stream, snapshot, parked, looker):
            if each is not None:
                each.close()

    async def forget(self) -> None:
        """See `Source.forget`. Nothing is removed when the configuration says that nothing is
        created."""
        await self.close()
        if not self._config.create:
            return
        wire = await self._connect(replication=False)
        try:
            await setup.remove(wire, self._config, self._slot, self._publication)
        except ServerRefused as error:
            raise SourceUnreachable(f"PostgreSQL: {error}", error.server_hint) from None
        finally:
            wire.close()

    def _changes_(self) -> DecodedChanges:
        assert self._changes is not None, "open"
        return self._changes

    async def _connect(self, *, replication: bool) -> PostgresConnection:
        parameters = await self._clock.run_blocking(
            lambda: self._config.connection(
                replication=replication,
                libpq_version=pq.version(),
                weak_passwords=self._weak_passwords,
            )
        )
        wire = await PostgresConnection.connect(parameters)
        try:
            if wire.server_version >= 140_000:
                # PostgreSQL 14 added the setting; it would end the connection for queries, which
                # is often idle.
                await wire.query("SET idle_session_timeout = 0")
        except BaseException:
            wire.close()
            raise
        return wire

    def _position_text(self, lsn: int) -> str:
        return write_position(self._system, self._config.database, lsn, self._filled)
