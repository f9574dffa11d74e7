"""One SQL session, which executes statements one at a time.

PostgreSQL connections and Spark Connect use it. `actors.engine.sql` parses the statements, and
`STATEMENTS` maps them to their handlers. Errors are those of `actors.runtime.errors`. After an
error in an explicit transaction only ROLLBACK, ROLLBACK TO and COMMIT are accepted, as PostgreSQL
clients expect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from actors.doors.client.client import Client
from actors.doors.sql_session import catalog_statements as catalog
from actors.doors.sql_session import merge_statements, write_statements
from actors.doors.sql_session.context import ActiveTransaction, SessionContext
from actors.doors.sql_session.cursors import SessionCursors, SpawnTask
from actors.doors.sql_session.ddl_statements import (
    TOKEN_COLUMNS,
    change,
    create_table_as,
    create_token,
)
from actors.doors.sql_session.error_positions import (
    drop_positions,
    rows_without_positions,
)
from actors.doors.sql_session.query_statements import read_query
from actors.doors.sql_session.results import StatementResult
from actors.doors.sql_session.row_values import SqlParameter
from actors.doors.sql_session.session_settings import (
    AUTHORIZATION,
    ISOLATION,
    READ_ONLY,
    setting_named,
)
from actors.doors.sql_session.session_variables import SessionVariables
from actors.doors.sql_session.show_create import show_create
from actors.doors.sql_session.subscribe_statements import subscribe, subscribe_shape
from actors.doors.sql_session.transaction import OpenTransaction
from actors.engine.sql import statements as sql
from actors.engine.sql.grammar import ParsedStatement, parse_span, parse_statements
from actors.engine.sql.object_names import SCHEMAS
from actors.engine.sql.tokens import SqlDialect
from actors.model.pgwire.quoting import quote_identifier
from actors.model.pgwire.sqlstate import (
    NO_TRANSACTION,
    RefusedStatement,
    statement_exists,
    unknown_statement,
)
from actors.runtime.errors import (
    AbsentRow,
    DefinitionChanged,
    InvalidUsage,
    TransactionAborted,
    WriteConflict,
)
from actors.runtime.settings import Settings

Parameters: TypeAlias = Sequence[SqlParameter]
StatementHandler: TypeAlias = Callable[["SqlSession", Any, Parameters], Awaitable[StatementResult]]
PREPARED_MAX: Final = 1_000
"""Maximum number of statements that one session may PREPARE."""


class PreparedText(NamedTuple):
    """A statement of PREPARE, with the types of its parameters and the zone of its times."""

    statement: sql.SqlStatement
    types: tuple[str, ...]
    zone: str


class SqlSession:
    """The session of one client. `close` it to end its cursors and discard uncommitted changes."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        dialect: SqlDialect = SqlDialect.SPARK,
        user: str = "penstock",
        *,
        spawn: SpawnTask | None = None,
        roles_change: bool = False,
    ) -> None:
        """Start a session.

        Args:
            client: The session's client of the service.
            settings: The service's settings.
            dialect: The dialect of the statements.
            user: The name that the user gave.
            spawn: Starts tasks that read ahead for cursors of subscribes; None: such cursors are
                refused.
            roles_change: True if the session may act as other roles (SET ROLE).
        """
        self.variables = SessionVariables(user, client.session if roles_change else None)
        self.context = SessionContext(client, settings, dialect, self.variables)
        self.cursors = SessionCursors(spawn)
        self.failed = False
        """True in a transaction after an error, until it ends or is rolled back to a savepoint."""
        self.prepared: dict[str, PreparedText] = {}
        """Statements of PREPARE by name; emptied by DEALLOCATE and DISCARD."""

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open."""
        return self.context.transaction is not None

    def split(self, text: str) -> list[ParsedStatement]:
        """Parse a text into its statements. Raises `SqlSyntaxError`."""
        return parse_statements(text, self.context.dialect)

    async def execute(
        self, statement: sql.SqlStatement, parameters: Parameters = ()
    ) -> StatementResult:
        """Execute a statement and return its result.

        The result's generator holds resources until it is exhausted or closed. Raises
        `TransactionAborted` in a failed transaction, and the statement's own errors.
        """
        try:
            self.begin_statement(statement)
            handler = STATEMENTS.get(type(statement))
            if handler is None:
                raise InvalidUsage(f"{_shown(statement)} is not supported here")
            async with self.context.typed(statement):
                return await handler(self, statement, parameters)
        except BaseException:
            self.failed = self.in_transaction
            raise

    def begin_statement(self, statement: sql.SqlStatement) -> None:
        """Check that a statement is allowed in the current transaction. Raises `TransactionAborted`
        and `ReadOnlyTransaction`."""
        if self.failed and not isinstance(statement, _ENDING):
            raise TransactionAborted(
                "the transaction has failed: statements are refused until ROLLBACK"
            )
        self.context.begin_statement(statement)

    async def close(self) -> None:
        """Close all cursors and discard uncommitted changes."""
        self.context.transaction = None
        await self.cursors.close(None)

    async def describe(
        self, statement: sql.SqlStatement, parameters: Parameters
    ) -> pa.Schema | None:
        """Return the columns of a statement's result without executing it; None if it has no rows.

        The values of the parameters do not matter. Raises as `execute` does.
        """
        async with self.context.typed(statement):
            return await self._described(statement, parameters)

    async def _described(
        self, statement: sql.SqlStatement, parameters: Parameters
    ) -> pa.Schema | None:
        match statement:
            case sql.QueryStatement():
                text = await self.context.spark_off_loop(statement.query, parameters)
                return (await self.context.describe(text)).result_arrow()
            case sql.SubscribeStatement():
                return await subscribe_shape(self.context, statement, parameters)
            case sql.ExecutePreparedStatement():
                kept = self.prepared.get(statement.name)
                if kept is None:
                    raise unknown_statement(statement.name)
                given = self._arguments(statement, kept.types, parameters)
                with drop_positions(), self.context.written_in(kept.zone):
                    return await self.describe(kept.statement, given)
            case sql.FetchCursorStatement():
                return None if statement.move else self.cursors.shape(statement.name)
            case sql.CreateTokenStatement():
                return TOKEN_COLUMNS
            case sql.InsertStatement() | sql.UpdateStatement() | sql.DeleteStatement():
                return await write_statements.returned_shape(self.context, statement, parameters)
        # Execute only statements that change nothing. An EXECUTE may be of any statement.
        if not isinstance(statement, sql.ShowingStatement):
            return None
        result = await self.execute(statement, parameters)
        if result.batches is not None:
            await result.batches.aclose()
        return result.schema

    # -- transactions ------------------------------------------------------------------------------

    def begin_implicit(self) -> None:
        """Open a transaction around several statements that the client sent without BEGIN."""
        self.context.transaction = OpenTransaction(self.variables.state())
        # Fix the transaction's modes: later changes of the defaults affect later transactions.
        for name in (ISOLATION, READ_ONLY):
            self.variables.set(name, self.variables.get(name), local=True)

    async def begin(self, statement: sql.BeginStatement, _: Parameters) -> StatementResult:
        """Open a transaction, or return a notice if one is open."""
        notices: tuple[str, ...] = ()
        # PostgreSQL only warns, and connection pools rely on that.
        if self.in_transaction:
            notices = ("there is already a transaction in progress",)
        else:
            self.begin_implicit()
        try:
            self.set_modes(statement.modes)
        except InvalidUsage:
            # Without the requested modes there is no new transaction.
            transaction = self.context.transaction
            if not notices and transaction is not None:
                self.variables.restore(transaction.first_state)
                self.context.transaction = None
            raise
        return StatementResult("BEGIN", notices=notices)

    def set_modes(self, modes: sql.TransactionModes, prefix: str = "") -> bool:
        """Set the modes of the open transaction or, with the prefix ``default_``, of later ones.

        Return False if that has no effect. Raises as `SessionContext.set_variable` does.
        """
        given = {
            ISOLATION: modes.isolation,
            READ_ONLY: {None: None, True: "on", False: "off"}[modes.read_only],
        }
        done = [
            self.context.set_variable(prefix + name, value)
            for name, value in given.items()
            if value is not None
        ]
        return all(done)

    async def set_transaction(
        self, statement: sql.SetTransactionStatement, _: Parameters
    ) -> StatementResult:
        """Set the modes of the open transaction, or of later transactions of the session."""
        if self.set_modes(statement.modes, "default_" if statement.session else ""):
            return StatementResult("SET")
        notice = "SET TRANSACTION can only be used in transaction blocks"
        return StatementResult("SET", notices=(notice,))

    async def commit(self, _: sql.CommitStatement, __: Parameters) -> StatementResult:
        """Write all changes atomically, or roll back a failed transaction.

        Raises:
            WriteConflict: Another session changed a row that this transaction changes.
            DefinitionChanged: Another session changed a default that this transaction used.
        """
        transaction = self.context.transaction
        if transaction is None:
            notice = "there is no transaction in progress"
            return StatementResult("COMMIT", notices=(notice,))
        failed, self.failed = self.failed, False
        if failed:
            self.variables.restore(transaction.first_state)
        else:
            self.variables.keep()
        # End the transaction before the write: it is over whether the write succeeds or fails.
        self.context.transaction = None
        await self.cursors.end_transaction()
        if failed:
            return StatementResult("ROLLBACK")
        changes = transaction.write()
        if changes:
            try:
                await self.context.write(changes)
            except AbsentRow as error:
                raise WriteConflict(
                    f"could not serialize access due to concurrent update: {error}"
                ) from None
            except DefinitionChanged:
                # The client will repeat the transaction, which must see the new definitions.
                self.context.catalog.forget()
                raise
        return StatementResult("COMMIT")

    async def roll_back(self, _: sql.RollbackStatement, __: Parameters) -> StatementResult:
        """Discard all changes of the transaction, or return a notice if none is open."""
        transaction = self.context.transaction
        notices = () if transaction is not None else ("there is no transaction in progress",)
        if transaction is not None:
            self.variables.restore(transaction.first_state)
        self.context.transaction, self.failed = None, False
        await self.cursors.end_transaction()
        return StatementResult("ROLLBACK", notices=notices)

    def _open(self, what: str) -> OpenTransaction:
        transaction = self.context.transaction
        if transaction is None:
            raise RefusedStatement(f"{what} can only be used in transaction blocks", NO_TRANSACTION)
        return transaction

    async def save(self, statement: sql.SavepointStatement, _: Parameters) -> StatementResult:
        """Set a savepoint."""
        self._open("SAVEPOINT").save(statement.name, self.variables.state())
        return StatementResult("SAVEPOINT")

    async def release(
        self, statement: sql.ReleaseSavepointStatement, _: Parameters
    ) -> StatementResult:
        """Release a savepoint and keep its changes."""
        self._open("RELEASE SAVEPOINT").release(statement.name)
        return StatementResult("RELEASE")

    async def roll_back_to(
        self, statement: sql.RollbackToStatement, _: Parameters
    ) -> StatementResult:
        """Undo the changes since a savepoint."""
        state = self._open("ROLLBACK TO SAVEPOINT").roll_back_to(statement.name)
        self.variables.restore(state)
        self.failed = False
        return StatementResult("ROLLBACK")

    # -- variables ---------------------------------------------------------------------------------

    async def set_variable(
        self, statement: sql.SetVariableStatement, _: Parameters
    ) -> StatementResult:
        """Set a variable for the session or, with LOCAL, for the transaction."""
        setting = setting_named(statement.name)
        value: str | None
        if not statement.values:
            value = None
        elif setting is not None and setting.quoted:
            value = ", ".join(map(quote_identifier, statement.values))
        elif len(statement.values) > 1 and statement.name.lower() != "datestyle":
            raise InvalidUsage(f"SET {statement.name} takes only one argument")
        else:
            value = ", ".join(statement.values)
        if self.context.set_variable(statement.name, value, local=statement.local):
            return StatementResult("SET")
        notice = f"SET {'LOCAL' if statement.local else statement.name}"
        return StatementResult("SET", notices=(f"{notice} can only be used in transaction blocks",))

    async def reset_variable(
        self, statement: sql.ResetVariableStatement, _: Parameters
    ) -> StatementResult:
        """Reset one variable or all to the values at the start of the session."""
        if statement.name is None:
            self.variables.reset_all()
        else:
            self.context.set_variable(statement.name, None)
        return StatementResult("RESET")

    async def show_setting(
        self, statement: sql.ShowSettingStatement, _: Parameters
    ) -> StatementResult:
        """Return the value of one variable, or the names and values of all."""
        if statement.name.lower() == "all":
            rows: list[tuple[Any, ...]] = [
                (name, value, "") for name, value in self.variables.all()
            ]
            result = catalog.text_result(["name", "setting", "description"], rows)
        else:
            value = self.variables.get(statement.name)
            result = catalog.text_result([statement.name.lower()], [(value,)])
        result.tag = "SHOW"
        return result

    async def use_schema(self, statement: sql.UseSchemaStatement, _: Parameters) -> StatementResult:
        """Accept USE of the only schema, public."""
        if statement.name[-1].lower() not in SCHEMAS:
            name = ".".join(statement.name)
            raise InvalidUsage(f"schema {name} does not exist (available: public)")
        return StatementResult("SET")

    async def discard(self, _: sql.DiscardAllStatement, __: Parameters) -> StatementResult:
        """Discard cursors, prepared statements and settings. Raises `ActiveTransaction` within a
        transaction."""
        if self.in_transaction:
            raise ActiveTransaction("DISCARD ALL cannot run inside a transaction block")
        await self.cursors.close(None)
        self.prepared.clear()
        self.variables.reset(AUTHORIZATION)
        self.variables.reset_all()
        return StatementResult("DISCARD ALL")

    # -- cursors and prepared statements -----------------------------------------------------------

    async def declare(
        self, statement: sql.DeclareCursorStatement, parameters: Parameters
    ) -> StatementResult:
        """Open a cursor. Without WITH HOLD a transaction must be open."""
        if not statement.hold:
            self._open("DECLARE CURSOR")
        source = statement.source
        result = await self.execute(source, parameters)
        await self.cursors.declare(statement.name, result, hold=statement.hold)
        return StatementResult("DECLARE CURSOR")

    async def fetch(self, statement: sql.FetchCursorStatement, _: Parameters) -> StatementResult:
        """Return the next rows of a cursor; for MOVE, skip and count them."""
        # The text of the query came with DECLARE.
        with drop_positions():
            result = await self.cursors.fetch(statement.name, statement.count)
        if not statement.move:
            return result
        assert result.batches is not None
        count = sum([batch.num_rows async for batch in result.batches])
        return StatementResult(f"MOVE {count}")

    async def close_cursor(
        self, statement: sql.CloseCursorStatement, _: Parameters
    ) -> StatementResult:
        """Close one cursor, or all."""
        await self.cursors.close(statement.name)
        return StatementResult("CLOSE CURSOR" if statement.name else "CLOSE CURSOR ALL")

    async def prepare(self, statement: sql.PrepareTextStatement, _: Parameters) -> StatementResult:
        """Parse a statement and keep it under a name."""
        if statement.name in self.prepared:
            raise statement_exists(statement.name)
        if len(self.prepared) >= PREPARED_MAX:
            raise InvalidUsage(
                f"too many prepared statements (limit {PREPARED_MAX}): DEALLOCATE one first"
            )
        inner = parse_span(statement.statement)
        self.prepared[statement.name] = PreparedText(
            inner, statement.types, self.context.times.zone
        )
        if self.context.transaction is not None:
            self.context.transaction.queried = True
        return StatementResult("PREPARE")

    async def execute_prepared(
        self, statement: sql.ExecutePreparedStatement, parameters: Parameters
    ) -> StatementResult:
        """Execute a statement of PREPARE with these arguments."""
        kept = self.prepared.get(statement.name)
        if kept is None:
            raise unknown_statement(statement.name)
        given = self._arguments(statement, kept.types, parameters)
        # The text of the statement came with PREPARE.
        with drop_positions(), self.context.written_in(kept.zone):
            result = await self.execute(kept.statement, given)
        if result.batches is not None:
            result.batches = rows_without_positions(result.batches)
        return result

    def _arguments(
        self,
        statement: sql.ExecutePreparedStatement,
        types: Sequence[str],
        parameters: Parameters,
    ) -> list[SqlParameter]:
        """Return the arguments of EXECUTE as expressions, cast to the declared types."""
        given = []
        for number, span in enumerate(statement.arguments):
            text = self.context.spark(span, parameters).text
            if number < len(types):
                text = f"CAST({text} AS {types[number]})"
            given.append(SqlParameter(None, f"({text})", computed=True))
        return given

    async def deallocate(
        self, statement: sql.DeallocateStatement, _: Parameters
    ) -> StatementResult:
        """Discard one statement of PREPARE, or all."""
        if statement.name is None:
            self.prepared.clear()
            return StatementResult("DEALLOCATE ALL")
        if self.prepared.pop(statement.name, None) is None:
            raise unknown_statement(statement.name)
        return StatementResult("DEALLOCATE")

    async def do_nothing(
        self, statement: sql.NoOperationStatement, _: Parameters
    ) -> StatementResult:
        """Accept a statement that has no effect here."""
        return StatementResult(statement.tag)


_ENDING: Final = (sql.RollbackStatement, sql.CommitStatement, sql.RollbackToStatement)


def _shown(statement: sql.SqlStatement) -> str:
    return type(statement).__name__.removesuffix("Statement")


def _with_parameters(
    function: Callable[[SessionContext, Any, Parameters], Awaitable[StatementResult]],
) -> StatementHandler:
    """Make a handler from a function that takes the session's context and the parameters."""

    async def handle(
        session: SqlSession, statement: Any, parameters: Parameters
    ) -> StatementResult:
        return await function(session.context, statement, parameters)

    return handle


def _without_parameters(
    function: Callable[[SessionContext, Any], Awaitable[StatementResult]],
) -> StatementHandler:
    """Make a handler from a function that takes only the session's context."""

    async def handle(session: SqlSession, statement: Any, _: Parameters) -> StatementResult:
        return await function(session.context, statement)

    return handle


STATEMENTS: Final[dict[type[sql.SqlStatement], StatementHandler]] = {
    sql.QueryStatement: _with_parameters(read_query),
    sql.SubscribeStatement: _with_parameters(subscribe),
    sql.InsertStatement: _with_parameters(write_statements.insert),
    sql.UpdateStatement: _with_parameters(write_statements.update),
    sql.DeleteStatement: _with_parameters(write_statements.delete),
    sql.MergeStatement: _with_parameters(merge_statements.merge),
    sql.ChangeStatement: _with_parameters(change),
    sql.CreateTableAsStatement: _with_parameters(create_table_as),
    sql.RefreshViewStatement: _without_parameters(catalog.refresh_view),
    sql.MaintainStatement: _without_parameters(catalog.maintain),
    sql.ShowObjectsStatement: _without_parameters(catalog.show_objects),
    sql.ShowColumnsStatement: _without_parameters(catalog.show_columns),
    sql.ShowCreateStatement: _without_parameters(show_create),
    sql.DescribeStatement: _with_parameters(catalog.describe),
    sql.ExplainStatement: _with_parameters(catalog.explain),
    sql.BeginStatement: SqlSession.begin,
    sql.SetTransactionStatement: SqlSession.set_transaction,
    sql.CommitStatement: SqlSession.commit,
    sql.RollbackStatement: SqlSession.roll_back,
    sql.SavepointStatement: SqlSession.save,
    sql.ReleaseSavepointStatement: SqlSession.release,
    sql.RollbackToStatement: SqlSession.roll_back_to,
    sql.SetVariableStatement: SqlSession.set_variable,
    sql.ResetVariableStatement: SqlSession.reset_variable,
    sql.ShowSettingStatement: SqlSession.show_setting,
    sql.UseSchemaStatement: SqlSession.use_schema,
    sql.DiscardAllStatement: SqlSession.discard,
    sql.DeclareCursorStatement: SqlSession.declare,
    sql.FetchCursorStatement: SqlSession.fetch,
    sql.CloseCursorStatement: SqlSession.close_cursor,
    sql.PrepareTextStatement: SqlSession.prepare,
    sql.ExecutePreparedStatement: SqlSession.execute_prepared,
    sql.CreateTokenStatement: _without_parameters(create_token),
    sql.ShowRolesStatement: _without_parameters(catalog.show_roles),
    sql.ShowGrantsStatement: _without_parameters(catalog.show_grants),
    sql.DeallocateStatement: SqlSession.deallocate,
    sql.NoOperationStatement: SqlSession.do_nothing,
}
"""Maps statements to their handlers. COPY is missing: PostgreSQL's protocol implements it, because
its data are messages of that protocol."""
