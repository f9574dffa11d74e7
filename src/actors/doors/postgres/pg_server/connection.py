"""One connection of a PostgreSQL client: startup, then one statement after another.

Messages are handled strictly in order. A simple query of several statements, or a pipeline of the
extended protocol up to its Sync, is one transaction unless it opens its own. A statement directly
followed by Sync runs alone, so it can be retried after a conflict with another session. After an
error in a pipeline, all messages up to its Sync are skipped.

A cancel request arrives on another connection, and cancels the running statement.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import (
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from typing import Final

import anyio
import anyio.lowlevel

from actors.control.access.access_rules import UNPROVEN, RoleLogin
from actors.control.access.open_sessions import OpenSession, OpenSessions, ReadObjects
from actors.control.controller.reads.memory_reads import MemoryReads
from actors.doors.postgres.pg_server.connection_catalog import ConnectionCatalog, SharedCatalog
from actors.doors.postgres.pg_server.copy_protocol import copy_from_client, copy_to_client
from actors.doors.postgres.pg_server.disconnect_watch import end_on_disconnect
from actors.doors.postgres.pg_server.login import TokenProof, prove_role
from actors.doors.postgres.pg_server.point_answers import answer_point
from actors.doors.postgres.pg_server.row_sending import send_portal, send_result
from actors.doors.postgres.pg_server.statement_preparation import prepare_statement
from actors.doors.postgres.pg_server.statement_scope import StatementScope, receive_in_time
from actors.doors.postgres.pg_server.statements import (
    SETTING_STATEMENTS,
    TRANSACTION_STATEMENTS,
    WRITES,
    OpenPortal,
    PreparedStatement,
    describe_fields,
    may_have_rows,
)
from actors.doors.postgres.pg_server.wire import PgWire
from actors.doors.sql_session.audit import StatementAudit
from actors.doors.sql_session.context import schemas_of
from actors.doors.sql_session.offloading import run_or_offload
from actors.doors.sql_session.results import StatementResult
from actors.doors.sql_session.row_values import SqlParameter
from actors.doors.sql_session.session import SqlSession
from actors.doors.sql_session.session_settings import MESSAGE_LEVELS
from actors.engine.sql import statements as sql
from actors.engine.sql.grammar import ParsedStatement, parse_statements
from actors.engine.sql.tokens import SqlDialect
from actors.model.pgwire import messages as pg
from actors.model.pgwire import sqlstate
from actors.model.pgwire.decoder import startup_variables
from actors.model.pgwire.parameters import parse_parameters, spark_literal
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import (
    AccessDenied,
    AuthenticationFailed,
    ConnectionBroken,
    InvalidUsage,
    PenstockError,
    ProtocolError,
    RemoteProtocolError,
    ResourceBusy,
    SessionEnded,
    SqlSyntaxError,
    TransactionAborted,
)
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.pg")

GOODBYE_SECONDS: Final = 0.5
"""How long an ending session waits for the client to read the last answer and the final error."""
KEPT_STATEMENTS_MAX: Final = 10_000
PORTALS_MAX: Final = 1_000
NOT_ENCRYPTED: Final = "28000"
"""SQLSTATE with which PostgreSQL refuses an unencrypted client that must use TLS."""
MakeSession = Callable[[str, OpenSession], Awaitable[SqlSession]]
"""Creates the SQL session of a user."""
FindRole = Callable[[str], Awaitable[RoleLogin]]
"""Returns how a user of this name must authenticate."""


class PgConnection:
    """The connection of one client. `serve` runs until it ends."""

    def __init__(
        self,
        wire: PgWire,
        settings: Settings,
        make_session: MakeSession,
        *,
        sessions: OpenSessions,
        tls: ssl.SSLContext | None,
        tokens: TokenProof | None,
        find_role: FindRole,
        process_id: int,
        secret_key: bytes,
        cancel_other: Callable[[int, bytes], None],
        shared: SharedCatalog,
        memory_reads: MemoryReads,
        admit: Callable[[], None],
    ) -> None:
        """Set up the connection.

        Args:
            wire: The connection's messages.
            settings: The service's settings.
            make_session: Creates the SQL session of a user.
            sessions: The sessions of all protocols.
            tls: The TLS context; None: requests for TLS are declined.
            tokens: Checks tokens, which serve as passwords while roles are not required; None: no
                authentication is required then.
            find_role: Returns how a user must authenticate.
            process_id: Number by which other connections cancel a statement of this one.
            secret_key: Key that authorizes them to do so.
            cancel_other: Cancels the statement of another connection.
            shared: The catalog rows that all connections share.
            memory_reads: Reads rows by key from memory.
            admit: Counts this client among the authenticated ones. Raises `ResourceBusy` if there
                are too many.
        """
        self.wire = wire
        self.process_id = process_id
        self.secret_key = secret_key
        self._settings = settings
        self._make_session = make_session
        self._sessions = sessions
        self._opened: OpenSession | None = None
        self._life = anyio.CancelScope()
        """Canceled when the session is ended by anyone but its client."""
        self._tls = tls
        self._tokens = tokens
        self._find_role = find_role
        self._audit = StatementAudit(settings, "", wire.peer, SqlDialect.POSTGRES)
        self._cancel_other = cancel_other
        self._shared = shared
        self._memory_reads = memory_reads
        self._admit = admit
        self._session: SqlSession | None = None
        self._catalog: ConnectionCatalog | None = None
        # By name; "" is the unnamed one.
        self._statements: dict[str, PreparedStatement] = {}
        self._portals: dict[str, OpenPortal] = {}
        self._skipping = False
        """True after an error in a pipeline, until its Sync."""
        self._implicit = False
        """True in a transaction that was opened without BEGIN."""
        self._reported: Mapping[str, str] = {}
        """The settings that the client was last sent."""
        self._statement = StatementScope()

    @property
    def opened(self) -> OpenSession:
        """Return the session's entry among those of all protocols. It exists after login."""
        assert self._opened is not None
        return self._opened

    @property
    def session(self) -> SqlSession:
        """Return the SQL session. It exists after login."""
        assert self._session is not None
        return self._session

    @property
    def catalog(self) -> ConnectionCatalog:
        """Return the connection's catalog. It exists after login."""
        assert self._catalog is not None
        return self._catalog

    def cancel(self, secret_key: bytes) -> None:
        """Cancel the running statement if the key is correct."""
        if secret_key == self.secret_key:
            self._statement.cancel()

    def _end(self, _: SessionEnded) -> None:
        """End the connection, immediately unless its own statement is the cause."""
        if not self.opened.answer_first:
            self._life.cancel()

    # -- lifecycle ---------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve the client until it disconnects. After a protocol violation, send an error and
        close the connection."""
        try:
            if await self._start():
                with self._life:
                    await self._serve()
                if self.opened.ended is not None:
                    await self._say_goodbye(self.opened.ended)
        except SessionEnded as error:
            await self._say_goodbye(error)
        # These errors refuse the client.
        except (ProtocolError, ResourceBusy, InvalidUsage, AccessDenied) as error:
            await self._say_goodbye(error)
        except ConnectionBroken as error:
            log.info("%s disconnected: %s", self.wire.peer, error)
        finally:
            with anyio.CancelScope(shield=True):
                for portal in self._portals.values():
                    await portal.close()
                if self._opened is not None:
                    self._opened.close()
                if self._session is not None:
                    await self._session.close()
                    await self._session.context.client.aclose()
                await self.wire.close()

    async def _say_goodbye(self, error: PenstockError) -> None:
        try:
            # A client that does not read must not delay the end of its session.
            with anyio.move_on_after(GOODBYE_SECONDS):
                await self.wire.send(
                    pg.encode_error(sqlstate.error_report(error, severity="FATAL"))
                )
                await self.wire.flush()
        except ConnectionBroken:
            pass  # the client disconnected first

    async def _start(self) -> bool:
        """Handle the startup messages. Return False if the connection ends without a session."""
        wire = self.wire
        with anyio.move_on_after(self._settings.connect_timeout_ms / 1000) as limit:
            while True:
                message = await wire.receive()
                match message:
                    case None:
                        return False
                    case pg.EncryptionRequest():
                        await wire.encrypt(None if message.gss else self._tls)
                    case pg.CancelRequest() | pg.StartupPacket() if self._must_encrypt():
                        await self._refuse_plaintext()
                        return False
                    case pg.CancelRequest():
                        self._cancel_other(message.process_id, message.secret_key)
                        return False
                    case pg.StartupPacket():
                        await self._let_in(message)
                        return True
                    case _:
                        raise RemoteProtocolError("expected a startup packet first")
        if limit.cancelled_caught:
            raise RemoteProtocolError("timed out waiting for the startup packet or the password")
        return False

    def _must_encrypt(self) -> bool:
        """Return whether the client does not use TLS although it must."""
        if self._tls is None or self.wire.encrypted:
            return False
        return not (self._settings.pg_plaintext_on_loopback and self.wire.is_local)

    async def _refuse_plaintext(self) -> None:
        log.warning("refused %s: it did not request TLS", self.wire.peer)
        text = f"connection from {self.wire.peer} is not encrypted: use sslmode=require or stronger"
        await self.wire.send(pg.encode_error(pg.ErrorReport(NOT_ENCRYPTED, text, "FATAL")))

    async def _let_in(self, packet: pg.StartupPacket) -> None:
        minor, answer = pg.negotiate_protocol(packet)
        await self.wire.send(answer)
        user = packet.parameters.get("user", "")
        if not user:
            raise AuthenticationFailed("the startup packet does not name a user")
        settings, peer = self._settings, self.wire.peer
        try:
            role = await self._prove(user)
        except AuthenticationFailed:
            StatementAudit(settings, "", peer, SqlDialect.POSTGRES, user).event("Login", "refused")
            raise
        # Only after authentication, so that others do not learn that the service is full.
        self._admit()
        self._audit = StatementAudit(settings, role, peer, SqlDialect.POSTGRES, user)
        self._audit.event("Login")
        self.wire.admit()
        # Before the client learns that it is authenticated: its role may be gone by now.
        opened = self._opened = self._sessions.open(
            "postgresql", role, peer, number=self.process_id, proven=True
        )
        opened.on_end = self._end
        opened.on_cancel = self._statement.cancel
        # After a disconnect nobody reads the rows, so cancel the statement, also in Spark.
        self.wire.on_leave(self._statement.cancel)
        await self.wire.send(pg.AUTHENTICATION_OK)
        self._session = session = await self._make_session(role or user, opened)
        self._catalog = ConnectionCatalog(self._shared, session.context, opened, self._sessions)
        # Apply or refuse every setting: the client must know the session's state.
        for name, value in startup_variables(packet.parameters):
            if not session.context.set_variable(name, value):
                raise InvalidUsage(f'parameter "{name}" can only be set within a transaction')
        session.variables.mark_start()
        session.context.committing = self._statement.committing
        await self._report_settings()
        # Clients of protocol 3.0 keep exactly four bytes of the key.
        self.secret_key = self.secret_key[: pg.CANCEL_KEY_BYTES[minor]]
        await self.wire.send(pg.encode_backend_key(self.process_id, self.secret_key))
        await self._ready()

    async def _prove(self, user: str) -> str:
        """Authenticate the client, and return its role."""
        login = await self._find_role(user)
        # Decided for each connection, since roles may become required while the service runs.
        if login.wanted:
            await prove_role(self.wire, self._settings, user, login)
            return login.role
        if self._tokens is not None:
            await self._tokens.prove(self.wire, user)
        return UNPROVEN

    async def _serve(self) -> None:
        while True:
            message = await receive_in_time(self.wire, self.session)
            if message is None or isinstance(message, pg.TerminateSession):
                return
            if isinstance(message, pg.SyncPipeline):
                await self._sync()
            elif isinstance(message, pg.SimpleQuery):
                # A simple query starts a new pipeline, so an earlier error does not skip it.
                self._skipping = False
                await self._guarded(lambda m=message: self._simple(m.text))  # type: ignore[misc]
                await self._end_implicit()
                await self._ready()
            elif isinstance(message, pg.BindPortal) and await self._answer_point(message):
                pass
            elif not self._skipping:
                self._skipping = await self._guarded(
                    lambda m=message: self._in_statement(m)  # type: ignore[misc]
                )
            # Messages of a COPY that failed are skipped.
            answered = isinstance(message, pg.SimpleQuery | pg.SyncPipeline)
            if answered and self.opened.ended is not None:
                # Wait a moment: drivers that see the end together with the answer lose the answer.
                with anyio.move_on_after(GOODBYE_SECONDS):
                    await self.wire.peek()
                return

    async def _ready(self) -> None:
        await self._report_settings()
        await self.wire.send(pg.encode_ready(self._status()))
        await self.wire.flush()

    async def _report_settings(self) -> None:
        """Send the client the reported settings that have changed."""
        reported = self.session.variables.reported()
        for name, value in reported.items():
            if self._reported.get(name) != value:
                await self.wire.send(pg.encode_parameter_status(name, value))
        self._reported = reported

    def _status(self) -> bytes:
        if not self.session.in_transaction:
            return b"I"
        return b"E" if self.session.failed else b"T"

    # -- errors and cancellation -------------------------------------------------------------------

    async def _guarded(self, run: Callable[[], Awaitable[None]]) -> bool:
        """Run one step of the protocol, and send its error, if any. Return whether it failed."""
        error: BaseException
        try:
            await self._statement.run(run)
            return False
        except (ProtocolError, ConnectionBroken):
            raise  # the connection ends
        except PenstockError as known:
            error = known
        except Exception as fault:
            log.error("a statement failed with an internal error", exc_info=fault)
            error = PenstockError(f"internal error: {type(fault).__name__}: {fault}")
        self.session.failed = self.session.in_transaction
        await self.wire.send(pg.encode_error(sqlstate.error_report(error)))
        return True

    def _begin_timeout(self) -> None:
        self._statement.begin_timeout(self.session.context.deadline_ms)

    async def _notice(self, text: str, severity: str = "NOTICE", state: str = "00000") -> None:
        least = self.session.variables.get("client_min_messages")
        if MESSAGE_LEVELS.index(severity.lower()) < MESSAGE_LEVELS.index(least):
            return
        report = pg.ErrorReport(state, text, severity)
        await self.wire.send(pg.encode_notice(report))

    async def _end_implicit(self) -> None:
        """Commit the implicit transaction of a pipeline or a simple query, or roll it back if it
        failed."""
        if not self._implicit:
            return
        self._implicit = False
        session = self.session
        if not session.in_transaction:
            return
        # If one statement of a pipeline failed, none of its changes may stay.
        if session.failed:
            await session.roll_back(sql.RollbackStatement(position=0), ())
            return
        await self._guarded(self._commit)

    async def _commit(self) -> None:
        await self.session.commit(sql.CommitStatement(position=0), ())

    # -- the simple protocol -----------------------------------------------------------------------

    async def _simple(self, text: str) -> None:
        found = await run_or_offload(len(text), lambda: parse_statements(text, SqlDialect.POSTGRES))
        if not found:
            await self.wire.send(pg.EMPTY_QUERY_RESPONSE)
            return
        # PostgreSQL drops the unnamed statement here, and drivers rely on it.
        await self._forget_unnamed()
        for number, each in enumerate(found):
            with self.opened.running(each.text):
                await self._simple_one(each, begins=len(found) > 1 and number == 0)

    async def _simple_one(self, parsed: ParsedStatement, *, begins: bool) -> None:
        """Execute one statement of a simple query. `begins`: it is the first of several."""
        self._begin_timeout()
        text = parsed.text
        if begins and await self.catalog.answers(text):
            self._begin_implicit(None)
        if await self._answer_catalog(text, ()):
            return
        statement = parsed.statement()
        if begins:
            self._begin_implicit(statement)
        if isinstance(statement, sql.CopyStatement):
            await self._copy(statement, text)
            return
        with self._audit.statement(statement, text, await self._audited_names()):
            result = await self._execute(statement, ())
        await self._send_result(result)

    def _begin_implicit(self, statement: sql.SqlStatement | None) -> None:
        """Open an implicit transaction unless one is open, or the statement begins or ends one."""
        if self.session.in_transaction or isinstance(statement, TRANSACTION_STATEMENTS):
            return
        self.session.begin_implicit()
        self._implicit = True

    async def _execute(
        self, statement: sql.SqlStatement, parameters: Sequence[SqlParameter]
    ) -> StatementResult:
        # The statements of a script or a pipeline may never wait for anything. Yield before each of
        # them, so that other connections get a turn.
        await anyio.lowlevel.checkpoint()
        if self._implicit and isinstance(statement, TRANSACTION_STATEMENTS):
            # BEGIN turns the implicit transaction into an explicit one; COMMIT and ROLLBACK end it.
            self._implicit = False
            if isinstance(statement, sql.BeginStatement):
                self.session.set_modes(statement.modes)
                return StatementResult("BEGIN")
        result = self._deallocated(statement) or await self._declared(statement, parameters)
        if result is None:
            result = await self.session.execute(statement, parameters)
        result = end_on_disconnect(self.wire, result)
        for notice in result.notices:
            state = sqlstate.NOTICE_STATES.get(notice)
            await self._notice(notice, "NOTICE" if state is None else "WARNING", state or "00000")
        return result

    def _deallocated(self, statement: sql.SqlStatement) -> StatementResult | None:
        """Discard prepared statements of the protocol, which psqlODBC does with DEALLOCATE. Return
        None if the session must execute the statement as well."""
        match statement:
            case sql.DeallocateStatement(name=None) | sql.DiscardAllStatement():
                self._statements.clear()
            case sql.DeallocateStatement(name=str(name)) if name not in self.session.prepared:
                if self._statements.pop(name, None) is not None:
                    return StatementResult("DEALLOCATE")
        return None

    async def _declared(
        self, statement: sql.SqlStatement, parameters: Sequence[SqlParameter]
    ) -> StatementResult | None:
        """Open a cursor of a catalog query, which pandas uses to look for a table. Return None for
        any other statement."""
        if not isinstance(statement, sql.DeclareCursorStatement) or self.session.failed:
            return None
        source = statement.source
        if not isinstance(source, sql.QueryStatement):
            return None
        # The SQL session cannot answer catalog queries; the connection does.
        text = source.query.text
        if not await self.catalog.answers(text):
            return None
        result = await self.catalog.answer(text, [each.value for each in parameters])
        await self.session.cursors.declare(statement.name, result, hold=statement.hold)
        return StatementResult("DECLARE CURSOR")

    async def _send_result(self, result: StatementResult) -> None:
        await send_result(self.wire, result, self._time_zone())

    async def _audited_names(self) -> dict[str, TableSchema]:
        """Return the objects that a query may name, for the audit log; none if it is off."""
        return schemas_of(await self.session.context.catalog.known()) if self._audit.is_on else {}

    async def _copy(self, statement: sql.CopyStatement, text: str) -> None:
        session = self.session
        with self._audit.statement(statement, text, await self._audited_names()):
            if statement.direction == "from":
                count = await copy_from_client(self.wire, session, statement)
            else:
                count = await copy_to_client(self.wire, session, statement, self._time_zone())
        await self.wire.send(pg.encode_command_complete(f"COPY {count}"))

    def _time_zone(self) -> str:
        return self.session.context.zone

    # -- the extended protocol ---------------------------------------------------------------------

    async def _in_statement(self, message: pg.FrontendMessage) -> None:
        """Handle a message of the extended protocol, on behalf of the statement that it names."""
        kept: PreparedStatement | None = None
        match message:
            case pg.DescribePrepared():
                kept = self._statements.get(message.name)
            case pg.ExecutePortal(portal=name) | pg.DescribePortal(name=name):
                portal = self._portals.get(name)
                kept = None if portal is None else portal.prepared
        shown = "" if kept is None else kept.text
        zone = self._time_zone() if kept is None else kept.zone
        counts = isinstance(message, pg.ExecutePortal)
        with self.opened.running(shown, counts=counts), self.session.context.written_in(zone):
            await self._extended(message)

    async def _extended(self, message: pg.FrontendMessage) -> None:
        self._begin_timeout()
        match message:
            case pg.ParseStatement():
                await self._parse(message)
            case pg.BindPortal():
                await self._bind(message)
            case pg.DescribePrepared():
                await self._describe_statement(self._statement_named(message.name))
            case pg.DescribePortal() if self._is_cursor(message.name):
                await self._send_fields(describe_fields(self.session.cursors.shape(message.name)))
            case pg.DescribePortal():
                await self._describe_portal(self._portal_named(message.name))
            case pg.ExecutePortal():
                await self._run_portal(self._portal_named(message.portal), message.rows_max)
            case pg.CloseStatement():
                self._statements.pop(message.name, None)
                await self.wire.send(pg.CLOSE_COMPLETE)
            case pg.ClosePortal():
                await self._close_portal(message.name)
                await self.wire.send(pg.CLOSE_COMPLETE)
            case pg.FlushOutput():
                await self.wire.flush()
            case pg.FastpathCall():
                raise InvalidUsage("fast-path function calls are not supported: use SELECT")
            case pg.CopyInData() | pg.CopyInDone() | pg.CopyInFailure():
                pass  # the rest of a COPY that failed
            case _:
                raise RemoteProtocolError(f"unexpected message {type(message).__name__}")

    async def _sync(self) -> None:
        self._skipping = False
        await self._end_implicit()
        # Portals end with their transaction, which is over here unless BEGIN opened it.
        if not self.session.in_transaction:
            await self._close_portals()
        await self._ready()

    async def _parse(self, message: pg.ParseStatement) -> None:
        if message.name and message.name in self._statements:
            raise sqlstate.statement_exists(message.name)
        if len(self._statements) >= KEPT_STATEMENTS_MAX:
            raise InvalidUsage(
                f"too many prepared statements (limit {KEPT_STATEMENTS_MAX}): close some"
            )
        query = message.query
        found = await run_or_offload(
            len(query), lambda: parse_statements(query, SqlDialect.POSTGRES)
        )
        if len(found) > 1:
            raise SqlSyntaxError("cannot insert multiple commands into a prepared statement")
        kept = PreparedStatement("", None, ())
        if found:
            kept = await self._prepared(found[0], message.parameter_oids)
        kept.zone = self._time_zone()
        self._statements[message.name] = kept
        await self.wire.send(pg.PARSE_COMPLETE)

    async def _prepared(self, parsed: ParsedStatement, given: tuple[int, ...]) -> PreparedStatement:
        """Prepare a statement. `given` are the parameter types that the client specified."""
        text = parsed.text
        if await self.catalog.answers(text):
            return PreparedStatement(text, None, self.catalog.parameter_oids(text, given))
        return await prepare_statement(self.session, parsed, given)

    async def _bind(self, message: pg.BindPortal) -> None:
        kept = self._statement_named(message.statement)
        if len(message.parameters) != len(kept.parameter_oids):
            raise RemoteProtocolError(
                f"bind message supplies {len(message.parameters)} parameters, but prepared "
                f'statement "{message.statement}" requires {len(kept.parameter_oids)}'
            )
        if message.portal and message.portal in self._portals:
            raise sqlstate.cursor_exists(message.portal)
        await self._close_portal(message.portal)
        if len(self._portals) >= PORTALS_MAX:
            raise InvalidUsage(f"too many open portals (limit {PORTALS_MAX}): close some")
        zone = self._time_zone()
        values = await run_or_offload(
            len(kept.text), lambda: parse_parameters(message, kept.parameter_oids, zone)
        )
        self._portals[message.portal] = OpenPortal(kept, message, values=values)
        await self.wire.send(pg.BIND_COMPLETE)

    def _statement_named(self, name: str) -> PreparedStatement:
        kept = self._statements.get(name)
        if kept is None:
            raise sqlstate.unknown_statement(name)
        return kept

    def _is_cursor(self, name: str) -> bool:
        """Return whether a name is that of a cursor of DECLARE and not of a portal. In PostgreSQL
        cursors are portals, and psycopg describes its cursors as such."""
        return name not in self._portals and self.session.cursors.has(name)

    def _portal_named(self, name: str) -> OpenPortal:
        portal = self._portals.get(name)
        if portal is None:
            raise sqlstate.unknown_cursor(name, "portal")
        return portal

    async def _describe_statement(self, kept: PreparedStatement) -> None:
        await self.wire.send(pg.encode_parameter_description(kept.parameter_oids))
        if not kept.described:
            kept.fields = await self._fields_of(kept)
            kept.described = True
        await self._send_fields(kept.fields)

    async def _send_fields(self, fields: tuple[pg.FieldDescription, ...] | None) -> None:
        await self.wire.send(pg.NO_DATA if fields is None else pg.encode_row_description(fields))

    async def _fields_of(self, kept: PreparedStatement) -> tuple[pg.FieldDescription, ...] | None:
        """Return the columns of a statement's result before its parameters are known."""
        if not kept.text:
            return None
        if kept.statement is None:
            return await self.catalog.describe(kept.text, kept.parameter_oids)
        if not may_have_rows(kept.statement):
            return None
        # The columns do not depend on the values of the parameters, so use NULLs.
        examples = [
            SqlParameter(None, spark_literal(None, oid), computed=True)
            for oid in kept.parameter_oids
        ]
        # A client whose Describe fails never executes the statement, so log the failure here.
        with self._audit.statement(
            kept.statement, kept.text, await self._audited_names(), failures_only=True
        ):
            shape = await self.session.describe(kept.statement, examples)
        return None if shape is None else describe_fields(shape)

    async def _describe_portal(self, portal: OpenPortal) -> None:
        statement, shape = portal.prepared.statement, portal.shape
        # Leave writes to Execute, which knows whether more messages follow.
        if isinstance(statement, (*WRITES, sql.ExecutePreparedStatement)) and not portal.started:
            if may_have_rows(statement):
                shape = await self.session.describe(statement, self._parameters(portal))
        elif portal.prepared.text and (statement is None or may_have_rows(statement)):
            await self._begin_portal(portal)
            shape = portal.shape
        await self._send_fields(
            None
            if shape is None
            else describe_fields(shape, portal.bound.result_formats, portal.oids)
        )

    async def _begin_portal(self, portal: OpenPortal) -> None:
        """Execute the statement of a portal, up to its first rows."""
        # Describe may already have executed it: some statements only then know their columns.
        if portal.started:
            return
        portal.started = True
        kept, values = portal.prepared, portal.values
        if kept.point is not None and self._reads_latest():
            role = self.opened.role
            rows = self._memory_reads.find(kept.point.selection, kept.point.key(values), role)
            if rows is not None:
                portal.rights = self.session.context.read_rights()
                portal.rights.note(await self._reads_of(kept.point.selection.name))
                portal.tag, portal.found = "SELECT", rows.rename_columns(list(kept.point.names))
                portal.shape = portal.found.schema
                return
        if kept.statement is None:
            with self._audit.statement(None, kept.text, kind="Catalog"):
                result = await self.catalog.answer(kept.text, values, kept.parameter_oids)
            for warning in result.notices:
                await self._notice(warning, "WARNING")
        else:
            parameters = await run_or_offload(len(kept.text), lambda: self._parameters(portal))
            with self._audit.statement(kept.statement, kept.text, await self._audited_names()):
                result = await self._execute(kept.statement, parameters)
        portal.tag, portal.shape, portal.batches = result.tag, result.schema, result.batches
        portal.oids, portal.rights = result.oids, result.rights

    async def _reads_of(self, name: str) -> ReadObjects:
        return await self.session.context.catalog.reads_of(name)

    def _parameters(self, portal: OpenPortal) -> list[SqlParameter]:
        """Return the parameters with which to execute a portal's statement."""
        return [
            SqlParameter(value, spark_literal(value, oid), untyped=isinstance(value, str))
            for value, oid in zip(portal.values, portal.prepared.parameter_oids, strict=True)
        ]

    def _reads_latest(self) -> bool:
        # Point reads return the latest rows and are not audited. A transaction reads at its own
        # timestamp, and `penstock.as_of` may set another.
        session = self.session
        if session.in_transaction or self._audit.is_on:
            return False
        return not session.variables.get("penstock.as_of")

    async def _answer_point(self, bound: pg.BindPortal) -> bool:
        """Answer a Bind of a point query together with the messages that follow it. Return False,
        without having answered, if the query must be executed in the usual way."""
        kept = self._statements.get(bound.statement)
        if kept is None or kept.point is None or self._skipping or not self._reads_latest():
            return False
        # A named portal may be read later, and does not replace the unnamed one.
        if bound.portal:
            return False
        # Like any Bind, this one replaces the unnamed portal.
        await self._close_portal("")
        began_ms = self.opened.clock_ms()
        answered = await answer_point(
            self.wire, self._memory_reads, kept, bound, self.opened.role, self._time_zone()
        )
        if answered:
            self.opened.answered(began_ms)
        return answered

    async def _run_portal(self, portal: OpenPortal, rows_max: int) -> None:
        statement = portal.prepared.statement
        if not portal.prepared.text:
            await self.wire.send(pg.EMPTY_QUERY_RESPONSE)
            return
        if isinstance(statement, sql.CopyStatement):
            await self._copy(statement, portal.prepared.text)
            return
        # Peeking cannot deadlock: a client that waits for an answer must send Sync or Flush.
        last = isinstance(await self.wire.peek(), pg.SyncPipeline)
        # These statements must be undone if the pipeline fails later.
        if isinstance(statement, (*WRITES, *SETTING_STATEMENTS)) and not last:
            self._begin_implicit(statement)
        await self._begin_portal(portal)
        if last and self._implicit:
            # Commit before the answer: it reports whether the entire pipeline was written.
            self._implicit = False
            await self._commit()
        if portal.shape is not None and not await send_portal(
            self.wire, portal, rows_max, self._time_zone()
        ):
            await self.wire.send(pg.PORTAL_SUSPENDED)
            return
        counted = portal.tag in ("SELECT", "FETCH")
        tag = f"{portal.tag} {portal.count}" if counted else portal.tag
        await self.wire.send(pg.encode_command_complete(tag))

    async def _close_portal(self, name: str) -> None:
        portal = self._portals.pop(name, None)
        if portal is not None:
            await portal.close()

    async def _close_portals(self) -> None:
        for name in list(self._portals):
            await self._close_portal(name)

    async def _forget_unnamed(self) -> None:
        self._statements.pop("", None)
        await self._close_portal("")

    # -- the catalog -------------------------------------------------------------------------------

    async def _answer_catalog(self, text: str, values: Sequence[object]) -> bool:
        """Answer a simple query of the catalog. Return False if it is not one."""
        if not await self.catalog.answers(text):
            return False
        if self.session.failed:
            raise TransactionAborted(
                "the transaction has failed: statements are refused until ROLLBACK"
            )
        with self._audit.statement(None, text, kind="Catalog"):
            result = await self.catalog.answer(text, values)
        for warning in result.notices:
            await self._notice(warning, "WARNING")
        await self._send_result(result)
        return True
