"""The state that the parts of an SQL session share: client, variables, catalog, transaction."""

from __future__ import annotations

import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from datetime import datetime
from typing import Final

import pyarrow as pa

from actors.control.access.open_sessions import ReadObjects, ReadRights
from actors.doors.client.client import Client, TableWrite
from actors.doors.sql_session.error_positions import map_positions
from actors.doors.sql_session.mapped_sql import MappedSql, concat_sql
from actors.doors.sql_session.offloading import run_or_offload
from actors.doors.sql_session.row_values import NotLocal, SqlParameter, literal_value
from actors.doors.sql_session.session_settings import (
    ISOLATION,
    READ_ONLY,
    REPEATABLE_READ,
    SessionSetting,
    parse_setting,
    setting_named,
)
from actors.doors.sql_session.session_variables import SessionVariables
from actors.doors.sql_session.time_literals import TimeLiterals
from actors.doors.sql_session.transaction import OpenTransaction
from actors.doors.sql_session.typed_literals import typed_literal
from actors.engine.sql.dialects import SparkText, to_spark, without_schema
from actors.engine.sql.object_names import CATALOGS, SCHEMAS, object_name
from actors.engine.sql.statements import (
    ChangeStatement,
    CopyStatement,
    QualifiedName,
    QueryStatement,
    ReadingStatement,
    SqlStatement,
    TextSpan,
)
from actors.engine.sql.tokens import SqlDialect
from actors.engine.sql.type_dependent_places import (
    PlaceFinder,
    PlaceRoles,
    marked_length,
    marked_queries,
)
from actors.engine.sql.type_names import WrittenType
from actors.engine.views.plain_sql import query_text
from actors.engine.views.plain_views import inline_views
from actors.engine.views.read_choice import QueryChoice, choose_query
from actors.model.pgwire.session_zones import parse_session_zone, parse_spark_zone
from actors.model.pgwire.sqlstate import names_place, spark_position
from actors.model.pgwire.time_text import is_utc
from actors.model.plan.column_defaults import ColumnDefaults
from actors.model.plan.schema import TableSchema
from actors.model.protocol.api import TIME_ZONE, ObjectStatus
from actors.model.protocol.relations import fold, is_subscribed_view
from actors.runtime.errors import (
    DefiniteError,
    InvalidUsage,
    PenstockError,
    QueryRejected,
    UnknownObject,
)
from actors.runtime.progress import Time
from actors.runtime.settings import Settings

TABLE_KINDS: Final = frozenset({"table"})
READABLE_KINDS: Final = frozenset({"table", "source table", "view"})
PLAIN_VIEW: Final = "plain view"
QUERIED_KINDS: Final = READABLE_KINDS | {PLAIN_VIEW}


class ActiveTransaction(InvalidUsage):
    """The transaction has already read or written, so its modes can no longer change."""

    sqlstate = "25001"


class ReadOnlyTransaction(InvalidUsage):
    """A statement would change something in a read-only transaction."""

    sqlstate = "25006"


def schemas_of(
    objects: Iterable[ObjectStatus], kinds: Container[str] | None = None
) -> dict[str, TableSchema]:
    """Map the names of objects, of all kinds or only of `kinds`, to their columns."""
    return {
        each.name: each.schema
        for each in objects
        if each.schema is not None and (kinds is None or each.kind in kinds)
    }


def only_reads(statement: SqlStatement) -> bool:
    """Return whether a statement changes nothing."""
    if isinstance(statement, CopyStatement):
        return statement.direction == "to"
    return isinstance(statement, ReadingStatement)


def command_of(statement: SqlStatement) -> str:
    """Return the command of a statement, as error messages name it.

    >>> from actors.engine.sql.grammar import parse_statement
    >>> command_of(parse_statement("DROP TABLE t")), command_of(parse_statement("DELETE FROM t"))
    ('DROP TABLE', 'DELETE')
    """
    match statement:
        case ChangeStatement(command=command):
            return command
        case CopyStatement():
            return "COPY FROM"
    # The classes are named after their commands.
    words = re.findall("[A-Z][a-z]*", type(statement).__name__.removesuffix("Statement"))
    return " ".join(words).upper()


class SessionCatalog:
    """The service's objects, as the session last saw them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, ObjectStatus] | None = None
        """The objects by folded name, from the last status report; None after `forget`."""

    def forget(self) -> None:
        """Discard the cached objects, because one may have changed."""
        self._known = None

    async def all(self) -> list[ObjectStatus]:
        """Fetch and return all objects as they are now."""
        found = (await self._client.status()).objects
        # Hide views that are still being computed to replace another, and the internal views of
        # subscribes.
        objects = [
            each for each in found if not each.replaces and not is_subscribed_view(each.name)
        ]
        self._known = {fold(each.name): each for each in objects}
        return objects

    async def known(self) -> list[ObjectStatus]:
        """Return all objects as last seen, which may be slightly stale."""
        return await self.all() if self._known is None else list(self._known.values())

    async def find(self, name: QualifiedName) -> ObjectStatus:
        """Return an object, as last seen. Raises `UnknownObject` and `InvalidUsage`."""
        wanted = fold(object_name(name))
        # Another session may have created the object since the last report.
        if self._known is None or wanted not in self._known:
            await self.all()
        assert self._known is not None
        found = self._known.get(wanted)
        if found is None:
            raise UnknownObject(f"table, view or index {'.'.join(name)!r} does not exist")
        return found

    async def plain_views(self) -> dict[str, str]:
        """Map the folded names of plain views to their queries, with other plain views inlined."""
        found: dict[str, str] = {}
        # The catalog's order puts a view after the views that it names.
        for each in await self.all():
            if each.kind == PLAIN_VIEW:
                found[fold(each.name)] = inline_views(each.sql, found)
        return found

    async def find_present(self, name: QualifiedName) -> ObjectStatus:
        """Return an object as it is now, for statements that depend on its kind or its columns.
        Raises as `find` does."""
        await self.all()
        return await self.find(name)

    async def find_table(self, name: QualifiedName) -> tuple[str, TableSchema]:
        """Return the name and columns of a table that clients can write. Raises `UnknownObject`,
        and `InvalidUsage` for an object of another kind."""
        found = await self.find(name)
        if found.kind not in TABLE_KINDS or found.schema is None:
            raise InvalidUsage(f"cannot write to {found.name}, which is a {found.kind}")
        return found.name, found.schema

    async def readable(self) -> dict[str, TableSchema]:
        """Map the names of all objects that have rows to their columns, as they are now."""
        return schemas_of(await self.all(), READABLE_KINDS)

    async def reads_of(self, name: str) -> ReadObjects:
        """Return the object's id and name in the form in which reads are noted in `ReadRights`.
        Raises as `find` does."""
        found = await self.find((name,))
        return ((found.id, found.name),)

    def column_defaults(self, table: str) -> ColumnDefaults:
        """Return the defaults of a table's columns, as last seen."""
        found = (self._known or {}).get(fold(table))
        return {} if found is None else found.column_defaults


class SessionContext:
    """The state of one session. Statements use it one at a time."""

    def __init__(
        self, client: Client, settings: Settings, dialect: SqlDialect, variables: SessionVariables
    ) -> None:
        self.client = client
        self.settings = settings
        self.dialect = dialect
        self.variables = variables
        self.catalog = SessionCatalog(client)
        self.transaction: OpenTransaction | None = None
        self.spark_settings: Mapping[str, str] = {}
        """The session's Spark settings other than its time zone; replaced by `as_service`."""
        self._written_in: tuple[str, bool] | None = None
        """Zone in which the times in the text are read, and whether sessions in other zones will
        read the text. None means the session's zone, and that only this session reads the text.
        Set within `written_in`."""
        self.find_places: PlaceFinder | None = None
        """Finds expressions whose meaning in PostgreSQL depends on their types; None if they mean
        what Spark says. Set once, by the connection."""
        self._roles: PlaceRoles = {}
        """The result of `find_places` for the current statement; set within `typed`."""
        self.committing: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        """Context manager around each write, in which the statement cannot be canceled. Set once,
        by the connection."""

    # -- settings ----------------------------------------------------------------------------------

    def set_variable(self, name: str, value: str | None, *, local: bool = False) -> bool:
        """Set a setting, or reset it if `value` is None.

        Return False if that has no effect: outside a transaction, for `local` and for the settings
        of a transaction. Raises as `SessionVariables.set` does, and `ActiveTransaction`.
        """
        setting, transaction = setting_named(name), self.transaction
        own = setting is not None and bool(setting.of_transaction)
        if setting is not None and transaction is not None and own:
            self._check_mode(setting, value, transaction)
        if self.dialect is SqlDialect.SPARK and name.lower() == "timezone" and value is not None:
            value = parse_spark_zone(value).shown
        before = self.variables.state()
        # The modes of a transaction end with it.
        local = local or own
        if value is None:
            self.variables.reset(name, local=local)
        else:
            self.variables.set(name, value, local=local)
        if local and transaction is None:
            self.variables.restore(before)
            return False
        return True

    def _check_mode(
        self, setting: SessionSetting, value: str | None, transaction: OpenTransaction
    ) -> None:
        """Raise `ActiveTransaction` if a transaction mode can no longer change to `value`."""
        present = self.variables.get(setting.name)
        wanted = value or self.variables.get(setting.of_transaction)
        wanted = parse_setting(setting, wanted, present)
        if wanted == present or (setting.name == READ_ONLY and wanted == "on"):
            return
        what = "read-write mode" if setting.name == READ_ONLY else "isolation level"
        if transaction.queried:
            raise ActiveTransaction(f"transaction {what} must be set before any query")
        if transaction.has_savepoints:
            raise ActiveTransaction(f"transaction {what} must not be set after a savepoint")

    def begin_statement(self, statement: SqlStatement) -> None:
        """Prepare the transaction for a statement. Raises `ReadOnlyTransaction` for one that would
        change something in a read-only transaction."""
        name = READ_ONLY if self.transaction is not None else "default_transaction_read_only"
        if self.variables.get(name) == "on" and not only_reads(statement):
            raise ReadOnlyTransaction(
                f"cannot execute {command_of(statement)} in a read-only transaction"
            )
        if self.transaction is not None and self.variables.get(ISOLATION) != REPEATABLE_READ:
            # READ COMMITTED: each statement reads at the latest timestamp.
            self.transaction.time = None

    async def write(self, changes: Mapping[str, TableWrite]) -> None:
        """Write changes atomically, and note their timestamp in ``penstock.written_at``. Raises as
        `Client.write` does."""
        async with self.committing():
            self.variables.note_write(await self.client.write(changes))

    # -- texts -------------------------------------------------------------------------------------

    def spark(self, span: TextSpan, parameters: Sequence[SqlParameter] = ()) -> MappedSql:
        """Translate a query or an expression of the statement to Spark's dialect, with a mapping
        back to its source. Raises `SqlSyntaxError`."""
        if self.dialect is SqlDialect.SPARK:
            return MappedSql.of(span, SparkText(without_schema(span.as_text(), SCHEMAS, CATALOGS)))
        literals = [each.text for each in parameters]
        times = self.times
        with map_positions(span):
            spark = to_spark(
                span.as_text(),
                literals,
                # In UTC, which has no daylight saving time, Spark reads times as PostgreSQL does.
                None if times.is_utc else times,
                self._read_typed,
                name_columns=True,
                role_of=lambda offset: self._role_of(span, offset),
            )
        return MappedSql.of(span, spark)

    def _role_of(self, span: TextSpan, offset: int) -> str:
        place = span.place_of(offset) if self._roles else None
        return "" if place is None else self._roles.get(place, "")

    @asynccontextmanager
    async def typed(self, statement: SqlStatement) -> AsyncIterator[None]:
        """Within the block, translate type-dependent expressions as this statement means them."""
        before, self._roles = self._roles, await self._roles_in(statement)
        try:
            yield
        finally:
            self._roles = before

    async def _roles_in(self, statement: SqlStatement) -> PlaceRoles:
        find = self.find_places
        if find is None:
            return {}
        size = marked_length(statement)
        queries = await run_or_offload(size, lambda: marked_queries(statement)) if size else []
        if not queries:
            return {}
        schemas = schemas_of(await self.catalog.known())
        return await run_or_offload(size, lambda: find(queries, schemas))

    def _read_typed(self, text: str, kind: WrittenType) -> str:
        return typed_literal(text, kind, self.zone)

    async def spark_off_loop(
        self, span: TextSpan, parameters: Sequence[SqlParameter] = ()
    ) -> MappedSql:
        """Translate like `spark`, but in a thread if the text is long."""
        return await run_or_offload(len(span.text), lambda: self.spark(span, parameters))

    # -- the time zone -----------------------------------------------------------------------------

    @property
    def zone(self) -> str:
        """Return the session's time zone, by a name that `time_text.time_zone` and Spark accept."""
        return parse_session_zone(self.variables.get("TimeZone")).name

    @property
    def spark_zone(self) -> str:
        """Return the time zone to set for a query of the session; "" for the service's own."""
        zone = self.zone
        # The usual case: the query then shares the engine's session with everything else.
        return "" if is_utc(zone) and TIME_ZONE not in self.settings.spark_conf else zone

    def spark_conf(self) -> dict[str, str]:
        """Return the Spark settings under which the session's queries run. A view that the session
        creates keeps them."""
        zone = self.spark_zone
        return {**self.spark_settings, **({TIME_ZONE: zone} if zone else {})}

    def choose_query(
        self, text: str, schemas: Mapping[str, TableSchema], changed: Mapping[str, object] = {}
    ) -> QueryChoice:
        """Decide how to read a query in Spark's dialect under the session's settings, as
        `read_choice.choose_query` does."""
        names = [*self.settings.spark_conf, *self.spark_settings]
        return choose_query(text, schemas, names, changed)

    @contextmanager
    def as_service(self) -> Iterator[None]:
        """Within the block, run queries under the service's own Spark settings, in the session's
        zone. Used for column defaults, which must be the same in every session."""
        before, self.spark_settings = self.spark_settings, {}
        try:
            yield
        finally:
            self.spark_settings = before

    @contextmanager
    def written_in(self, zone: str, *, for_others: bool = False) -> Iterator[None]:
        """Within the block, read times in texts as of this zone.

        A prepared statement keeps the zone in which it was prepared. `for_others`: the text will be
        read by sessions in any zone.
        """
        before, self._written_in = self._written_in, (zone, for_others)
        try:
            yield
        finally:
            self._written_in = before

    @property
    def times(self) -> TimeLiterals:
        """Return the reader of the statement's times without a zone."""
        here = self.zone
        zone, for_others = self._written_in or (here, False)
        return TimeLiterals(zone, here, for_others, self.dialect is SqlDialect.SPARK)

    @property
    def deadline_ms(self) -> int | None:
        """Return the session's `statement_timeout`; None: the service's default deadline."""
        return self.variables.milliseconds("statement_timeout") or None

    # -- times -------------------------------------------------------------------------------------

    async def time_of(self, expression: TextSpan, parameters: Sequence[SqlParameter]) -> Time:
        """Return the time that an ``AS OF`` names, in milliseconds since the epoch.

        The expression gives milliseconds or a timestamp; Spark computes it if it is not a literal.
        Raises `InvalidUsage`, and what Spark's query raises.
        """
        try:
            value = literal_value(expression, parameters)
        except NotLocal:
            value = await self._computed(expression, parameters)
        if isinstance(value, SqlParameter):
            value = value.value
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                raise InvalidUsage(
                    f"invalid AS OF {value!r}: expected milliseconds or a timestamp"
                ) from None
        if isinstance(value, datetime):
            moment = value if value.tzinfo is not None else self.times.instant(value)
            return int(moment.timestamp() * 1000)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidUsage(
                f"invalid AS OF {expression.text}: expected milliseconds or a timestamp"
            )
        return value

    async def _computed(
        self, expression: TextSpan, parameters: Sequence[SqlParameter]
    ) -> int | datetime | str | None:
        text = concat_sql("SELECT ", self.spark(expression, parameters), " AS moment")
        rows = await self.collect(text.around(expression))
        found: int | datetime | str | None = rows[0][0].as_py() if rows.num_rows else None
        return found

    async def pinned_time(
        self, statement: QueryStatement, parameters: Sequence[SqlParameter]
    ) -> Time | None:
        """Return the time at which all objects of a query are read; None: the latest. Raises
        `InvalidUsage` if the query names several times."""
        wanted = [statement.as_of, *(pin.expression for pin in statement.pins)]
        if any(pin.is_version for pin in statement.pins):
            raise InvalidUsage("VERSION AS OF is not supported: use TIMESTAMP AS OF")
        texts = {span.text: span for span in wanted if span is not None}
        if len(texts) > 1:
            raise InvalidUsage(
                "all objects of a query are read at one timestamp: write AS OF once, at its end"
            )
        # At most one remains.
        for span in texts.values():
            return await self.time_of(span, parameters)
        variable = self.variables.get("penstock.as_of")
        return int(variable) if variable else None

    async def transaction_time(self) -> Time:
        """Return the time at which the open transaction reads. Its first read fixes that time."""
        assert self.transaction is not None
        self.transaction.queried = True
        if self.transaction.time is None:
            self.transaction.time = max(0, (await self.client.status()).tables_upper - 1)
        return self.transaction.time

    # -- rows --------------------------------------------------------------------------------------

    def read_rights(self) -> ReadRights:
        """Return the `ReadRights` for a result that the session's current role will read."""
        return ReadRights(self.client.session)

    async def rows(
        self, query: MappedSql, as_of: Time | None, rights: ReadRights | None = None
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield the rows of a query in Spark's dialect, at least one batch.

        `rights` notes the objects that are read. Without `as_of` the query sees every acknowledged
        write.
        """
        batches = self.client.query(
            query.text,
            as_of=as_of,
            deadline_ms=self.deadline_ms,
            latest=as_of is None,
            spark_conf=self.spark_conf(),
            rights=rights,
        )
        async with self.placed_errors(query), aclosing(batches) as found:
            async for batch in found:
                yield batch

    async def collect(self, query: MappedSql, as_of: Time | None = None) -> pa.Table:
        """Return all rows of a query in Spark's dialect. Raises `InvalidUsage` if they exceed
        `sql_rows_bytes_max`."""
        limit = self.settings.sql_rows_bytes_max
        batches, size = [], 0
        async with aclosing(self.rows(query, as_of)) as found:
            async for batch in found:
                # All rows are kept in memory: a change of rows is a single write.
                batches.append(batch)
                size += batch.nbytes
                if size > limit:
                    raise InvalidUsage(
                        f"the statement's rows exceed {limit} bytes (sql_rows_bytes_max): change "
                        "fewer rows at a time, or use COPY"
                    )
        return pa.Table.from_batches(batches)

    async def describe(self, query: MappedSql) -> TableSchema:
        """Return the columns of a query in Spark's dialect without running it."""
        async with self.placed_errors(query):
            return await self.client.describe_query(query.text, spark_conf=self.spark_conf())

    # -- errors ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def placed_errors(self, query: MappedSql) -> AsyncIterator[None]:
        """Map the positions of Spark's errors in this query to the user's statement."""
        try:
            yield
        except (QueryRejected, DefiniteError) as error:
            error.position = await self._place(str(error), query)
            raise

    async def _place(self, message: str, query: MappedSql) -> int | None:
        """Return the position in the statement that Spark's message refers to.

        None if it names no position, or one in a text that the user did not write.
        """
        if not names_place(message):
            return None
        try:
            text = query_text(query.text)
            sent = inline_views(text, await self.catalog.plain_views())
        # The client should get the query's own error, not this one.
        except PenstockError:
            return None
        if not query.text.startswith(text):
            return None
        # Spark's position counts in the text that the service sent, where the plain views precede
        # the query.
        offset = spark_position(message, sent) - 1 - sent.rfind(text)
        return query.place_of(offset) if offset >= 0 else None
