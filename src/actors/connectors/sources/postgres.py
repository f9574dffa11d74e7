"""PostgreSQL as a source: ingests tables by logical replication, starting from a snapshot.

Theory of operation. A replication slot makes the server retain its log from the durable position
on; a publication names the tables. New tables are copied at a snapshot exported by a slot (the
source's own slot when it is created, otherwise a temporary one). The snapshot contains exactly what
was committed before that slot's position; from there on, changes are read from the stream. The
source emits no mark before the stream has passed the positions of all snapshots, so every mark is
one instant of the whole database.

A position contains the server, the database, an LSN, and the identity and snapshot LSN of each
table. The server sends the transactions after the LSN that `open` requests.

Columns that are added to an export are filled from a snapshot, too. The stream is read up to it
with the former columns; then the rows with a value in an added column are copied (`ColumnsDue`);
from there on, rows have all columns. The next mark binds the added columns.

The stream reports only rows. Whatever else happens to a table is in the catalog, which is checked
before every mark (`_confirm`, `postgres_drift`). If a table's ingested rows may differ from the
upstream rows, it must be refilled: the source ends with `SourceUnreachable`, and copies the table
again when it is reopened.

The source uses three connections: for replication, for catalog queries, and for snapshots. Losing
one of them is `SourceUnreachable`, and the source is reopened.
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
"""Time within which the server must answer a query about its catalog, log or slot."""
_LOOK_MS: Final = 1_000
"""Time that the checks made every `poll_ms` may take before the server counts as silent."""
_CANNOT_SELECT: Final = "check that the user has the SELECT privilege on all columns of the table"

AnswerT = TypeVar("AnswerT")


class PostgresSource:
    """Ingests tables of one database; implements `connectors.sources.source.SourceConnector`.

    `id` names the slot and the publication unless the configuration names them. It must be unique
    among all sources that use the server.
    """

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
        """Connection for catalog queries. None while the source is closed."""
        # Copies tables at the moment; None if nothing is being copied.
        self._snapshot: TableSnapshots | None = None
        # The replication stream; None until the first copies are complete.
        self._stream: ReplicationStream | None = None
        self._parked: TableSnapshots | None = None
        """Open snapshot from which added columns are copied once the stream reaches it."""
        self._due: dict[str, SnapshotTable] = {}
        """Tables whose added columns are copied then, by export."""
        self._behind: list[Decoded] | None = None
        """Output of the stream after `ColumnsDue`, held back while those columns are copied."""
        # Output of `next`, in order; may be released.
        self._ready: deque[Given] = deque()
        self._unsure: list[Given] = []
        """Rows and marks that are held back until the catalog has been checked (`_confirm`)."""
        # Decoder of the stream; None until the source is opened.
        self._changes: DecodedChanges | None = None
        # Exports that are filled or being filled, with their bindings; updated by every check of
        # the catalog.
        self._filled: dict[str, FilledTable] = {}
        self._exports: dict[str, SourceExport] = {}
        # Identifier of the server's cluster; set by `open`.
        self._system = ""
        # Monotonic time of the last check of the slot (`_look`), and what it found.
        self._looked_ms = 0.0
        self._health: ServerHealth | None = None
        self._surveyed = ""
        """Digest of the catalog when the tables were last checked."""
        self._types: tuple[int, ...] = ()
        """Oids of the types of the tables' columns, and of their component types."""
        # Estimated number of rows to copy (None: unknown), and the number copied so far.
        self._rows_known: int | None = None
        self._rows_staged = 0
        # Warnings for the user, by export; the key ``slot`` holds the one about the slot.
        self._notes: dict[str, str] = {}
        # True after `SourceIdle` until the next output.
        self._idle = False

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """Check the server and return the requested tables as exports.

        Names are ``schema.table``, or ``table`` in schema ``public``. Raises `InvalidUsage` and
        `SourceUnreachable`.
        """
        # A replication connection, so that a user without the right to replicate is refused now.
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
        """Return columns to add to an export, with their types. Raises `InvalidUsage` and
        `SourceUnreachable`."""
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
        """Connect, check the server, and start after a position; None starts from a snapshot of all
        tables.

        Creates the publication and the slot if they are missing. Raises `InvalidUsage` and
        `SourceUnreachable`.
        """
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
            # Before the slot is created: pgoutput fails on changes older than the publication.
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
        """Check the tables that were filled before, and start copying the others."""
        looker = self._looker
        assert looker is not None, "open"
        began, at = lsn > 0, lsn
        survey = await survey_now(looker, [each.oid for each in filled.values()], self._publication)
        verdicts = await self._judge(survey, filled)
        refill = {name for name, each in verdicts.items() if isinstance(each, TableNeedsRefill)}
        new = [found[name] for name in self._exports if name in found]
        new = [table for table in new if table.name not in filled or table.name in refill]
        wider = self._wider(filled, verdicts)
        copied = [*new, *(found[name] for name in wider)]
        growing: dict[str, FilledTable] = {}
        refused: dict[str, str] = {}
        if health.slot is None or copied:
            at, name = await self._export_snapshot(maker, health, resumed=began)
            # If no table keeps its rows, the stream may start at the snapshot.
            lsn = lsn if any(isinstance(each, TableContinues) for each in verdicts.values()) else at
            assert at >= lsn, "a new slot starts at the end of the log"
            if copied:
                then, refused = await self._begin_snapshot(new, copied, name)
                for table in copied:
                    into = growing if table.name in wider else filled
                    into[table.name] = self._bind(then, table, at, wider.get(table.name, ()))
        elif not began:
            assert health.slot is not None, "otherwise it is created above"
            lsn = health.slot.confirmed_lsn
        self._filled = filled
        survey = await survey_now(looker, [each.oid for each in filled.values()], self._publication)
        for table in copied:
            fresh = growing.get(table.name) or filled[table.name]
            same = self._bind(survey, table, at, wider.get(table.name, ())) == fresh
            if not same and table.name not in refused:
                raise self._was_altered(table.name)
        verdicts = await self._judge(survey, filled)
        # A table whose added columns no longer exist fails now; it would fail later anyway.
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
                self._ready += changes.fail(name, "the table no longer exists", RECREATE_HINT)
            elif name in refused:
                error = f"cannot read the table: {refused[name]}"
                self._ready += changes.fail(name, error, _CANNOT_SELECT)
        if len(self._position_text(lsn)) > POSITION_BYTES_MAX:
            raise InvalidUsage(f"too many tables ({len(self._exports)}): use several sources")
        if copied:
            self._ready += [ExportTruncated(name) for name in sorted(refill) if name not in refused]
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
        """Queue the copies of new tables, and keep those of added columns until they are due."""
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
        assert self._snapshot is not None, "started"
        self._snapshot.copy(copies.values())

    def _wider(
        self, filled: Mapping[str, FilledTable], verdicts: Mapping[str, Verdict]
    ) -> dict[str, tuple[int, ...]]:
        """Return the bound column numbers of each table whose export has additional columns.

        Raises `SourceUnreachable` for an export that has fewer columns than are bound.
        """
        found = {}
        for name, verdict in verdicts.items():
            bound, wanted = filled[name].columns, self._exports[name].schema.names
            if len(bound) > len(wanted):
                raise SourceUnreachable(
                    f"PostgreSQL: columns were added to {name}: {len(bound)} are read at this "
                    f"position, but only {len(wanted)} are known here",
                    "another service owns this state now: stop this one",
                )
            if len(bound) < len(wanted) and isinstance(verdict, TableContinues):
                found[name] = bound
        return found

    @staticmethod
    def _was_altered(name: str) -> SourceUnreachable:
        # Retried: the next attempt copies the table at a newer snapshot.
        return SourceUnreachable(
            f"PostgreSQL: {name} was altered while its copy was prepared", "tried again"
        )

    def _bind(
        self, then: CatalogSurvey, table: PostgresTable, lsn: int, bound: tuple[int, ...] = ()
    ) -> FilledTable:
        """Bind a table to its columns at the snapshot, of which the first ones are already `bound`.

        Raises `SourceUnreachable` if the table was altered.
        """
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
        """Create a slot that exports a snapshot; return its LSN and the snapshot's name.

        The snapshot contains everything committed before that LSN. It is valid as long as `maker`
        is connected.
        """
        if health.slot is None and not resumed:
            slot, kind = self._slot, ""
        else:
            # A slot exports a snapshot only when it is created, so the source's own slot cannot do
            # it again. The temporary slot is named after its connection, because the slot of a
            # previous attempt lives until the server notices that its client is gone.
            slot, kind = f"{self._slot[:44]}_fill_{maker.server_pid}", "TEMPORARY "
        try:
            rows = await maker.query(
                f"CREATE_REPLICATION_SLOT {quote_name(slot)} {kind}LOGICAL pgoutput EXPORT_SNAPSHOT"
            )
        except ServerRefused as error:
            raise SourceUnreachable(
                f"PostgreSQL: cannot create slot {slot}: {error}", error.server_hint
            ) from None
        return parse_lsn(str(rows[0][1])), rows[0][2] or ""

    async def _begin_snapshot(
        self, new: Sequence[PostgresTable], tables: Sequence[PostgresTable], name: str
    ) -> tuple[CatalogSurvey, dict[str, str]]:
        """Connect and import the snapshot, as `TableSnapshots.begin` does."""
        self._snapshot = TableSnapshots(await self._connect(replication=False))
        known = [table.rows for table in new]
        self._rows_known = sum(known) if min(known, default=0) >= 0 else None
        return await self._snapshot.begin(name, tables, self._publication)

    # -- read -------------------------------------------------------------------------------

    async def next(self) -> Given:
        """Return the next rows or event. Raises `SourceUnreachable`."""
        try:
            return await self._next()
        except ServerRefused as error:
            raise self._refused(error) from None
        except ProtocolError as error:
            raise SourceUnreachable(f"PostgreSQL: {error}", f"PostgreSQL: {error}") from None

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
            assert stream is not None, "started"
            now = self._clock.monotonic_ms()
            due = self._looked_ms + self._config.poll_ms
            if now >= due:
                await self._in_time(self._look())
                continue
            # Wait only after `SourceIdle`, so that the ingest task learns immediately that nothing
            # is pending.
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
        """Copy added columns next, and hold back what the stream returned after them (`behind`)."""
        # Before the next mark, check the tables again, now with all their columns.
        self._surveyed = ""
        if self._parked is None:  # all these tables have failed already
            self._give(behind)
            return
        self._snapshot, self._parked = self._parked, None
        self._snapshot.copy(self._due[name] for name in due.exports)
        self._due, self._behind = {}, list(behind)

    async def _next_of_snapshot(self) -> None:
        snapshot, changes = self._snapshot, self._changes_()
        assert snapshot is not None, "the caller checks"
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
        """Check at every `poll_ms` that the server responds, while a copy waits.

        The first rows of a large table may take long, so waiting for them has no time limit of its
        own. Raises `SourceUnreachable`.
        """
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
            # At least three times per timeout, whatever is configured. 0 means that the server has
            # no timeout.
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
                "another reader uses the slot; a previous reader of this source ends on its own "
                "after wal_sender_timeout"
            )
        elif "publication" in str(error) and "does not exist" in str(error):
            hint = (
                f"publication {self._publication} was dropped, so the stream lacks the changes "
                "since then: drop the source and create it again"
            )
        return SourceUnreachable(f"PostgreSQL: {error}", hint)

    async def _in_time(self, answer: Awaitable[AnswerT]) -> AnswerT:
        """Return the server's answer. Raises `SourceUnreachable` if it does not arrive in time."""
        try:
            # A server that stops responding, or disappears, leaves the connection open.
            with anyio.fail_after(_ANSWER_S):
                return await answer
        except TimeoutError:
            raise SourceUnreachable(
                f"PostgreSQL: no answer within {_ANSWER_S} s",
                "check that the server is running and that the network reaches it",
            ) from None

    async def _look(self) -> None:
        """Check the slot and the tables. Raises `SourceUnreachable`."""
        looker = self._looker
        assert looker is not None, "open"
        self._health = health = await catalog.health(looker, self._slot)
        if health.slot is None or health.slot.wal_status == "lost":
            state = (
                "was dropped" if health.slot is None else "lost log that it needs (wal_status lost)"
            )
            raise SourceUnreachable(f"PostgreSQL: slot {self._slot} {state}", setup.AGAIN)
        if health.slot.wal_status == "unreserved":
            self._notes["slot"] = (
                f"slot {self._slot} is about to lose log (wal_status unreserved): raise "
                "max_slot_wal_keep_size, or find out why this source lags"
            )
        else:
            self._notes.pop("slot", None)
        await self._survey()
        self._looked_ms = self._clock.monotonic_ms()

    async def _confirm(self) -> None:
        """Check the catalog, and then release the rows and marks in `_unsure`.

        The check sees the effects of all their transactions. Failures of tables are put before the
        mark.
        """
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
            # A transaction appears in the log slightly before its effects become visible to others.
            await anyio.sleep(_VISIBLE_WAIT_S)
        if seen.digest != self._surveyed:
            await self._in_time(self._survey())
        failed = changes.confirm()
        place = next(at for at, each in enumerate(self._unsure) if isinstance(each, PositionMark))
        self._ready += [*self._unsure[:place], *failed, *self._unsure[place:]]
        self._unsure = []

    async def _survey(self) -> None:
        """Check all tables against the catalog. Raises `SourceUnreachable` if one must be
        refilled."""
        looker = self._looker
        assert looker is not None, "open"
        oids = [each.oid for each in self._filled.values()]
        survey = await survey_now(looker, oids, self._publication)
        self._settle(survey, await self._judge(survey, self._filled))

    async def _judge(
        self, found: CatalogSurvey, filled: Mapping[str, FilledTable]
    ) -> dict[str, Verdict]:
        """Return the verdicts on the tables that have not failed."""
        assert self._looker is not None, "open"
        changes = self._changes
        live = {n: f for n, f in filled.items() if changes is None or not changes.is_failed(n)}
        return await judge_all(self._looker, found, live, self._exports, self._publication)

    def _settle(self, survey: CatalogSurvey, verdicts: Mapping[str, Verdict]) -> None:
        """Apply the verdicts on the tables. Raises `SourceUnreachable` if one must be refilled."""
        changes = self._changes_()
        self._surveyed, self._types = survey.seen.digest, tuple(sorted(survey.types))
        changes.learn(survey.types)
        for name, verdict in verdicts.items():
            match verdict:
                case TableContinues():
                    self._filled[name] = msgspec.structs.replace(
                        self._filled[name], fingerprint=verdict.fingerprint, names=verdict.names
                    )
                    changes.keep_export(name, verdict)
                    self._notes.pop(name, None)
                    if verdict.note:
                        self._notes[name] = verdict.note
                case TableFails(error, hint):
                    self._ready += changes.fail(name, error, hint)
                case TableNeedsRefill(reason):
                    raise SourceUnreachable(
                        f"PostgreSQL: {name}: {reason}", "the table is refilled"
                    )

    # -- acknowledge, close ------------------------------------------------------------------

    async def taken(self, position: str) -> None:
        """Acknowledge a durable position to the server, which may then remove the log before it."""
        if self._stream is not None:
            self._stream.taken(position_lsn(position))

    def lag(self) -> SourceLag:
        """Return the last known lag. Never waits."""
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
            # A silent server may have changes that are not known here.
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
        """Return the milliseconds since the server last responded."""
        heard_ms = self._looked_ms
        if self._stream is not None:
            heard_ms = max(heard_ms, self._stream.heard_ms)
        return int(self._clock.monotonic_ms() - heard_ms)

    async def close(self) -> None:
        """Close all connections. The slot stays."""
        stream, self._stream = self._stream, None
        snapshot, self._snapshot = self._snapshot, None
        parked, self._parked = self._parked, None
        looker, self._looker = self._looker, None
        for each in (stream, snapshot, parked, looker):
            if each is not None:
                each.close()

    async def forget(self) -> None:
        """Remove the slot and the publication of a dropped source, unless `create` is off."""
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
                # The setting exists since PostgreSQL 14. It would close the connection for catalog
                # queries, which is often idle.
                await wire.query("SET idle_session_timeout = 0")
        except BaseException:
            wire.close()
            raise
        return wire

    def _position_text(self, lsn: int) -> str:
        return write_position(self._system, self._config.database, lsn, self._filled)
