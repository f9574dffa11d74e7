"""State that the parts of an SQL session share: its client, its variables, its transaction."""

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
    """The transaction has begun to read or write, so that its modes cannot change any more."""

    sqlstate = "25001"


class ReadOnlyTransaction(InvalidUsage):
    """A statement would change something in a transaction that only reads."""

    sqlstate = "25006"


def schemas_of(
    objects: Iterable[ObjectStatus], kinds: Container[str] | None = None
) -> dict[str, TableSchema]:
    """Return the columns of objects, or of those of some kinds, by name."""
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
    """Return the command of a statement, for an error.

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
    """Objects of the service, as the session last saw them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, ObjectStatus] | None = None

    def forget(self) -> None:
        """Forget all objects: one may have changed."""
        self._known = None

    async def all(self) -> list[ObjectStatus]:
        """Return all objects as they are now."""
        found = (await self._client.status()).objects
        # A view that is computed to come in another one's place is nobody's to read yet, and one of
        # a subscribe is nothing that a user has made.
        objects = [
            each for each in found if not each.replaces and not is_subscribed_view(each.name)
        ]
        self._known = {fold(each.name): each for each in objects}
        return objects

    async def known(self) -> list[ObjectStatus]:
        """Return all objects as they were seen last, which may be a little ago."""
        return await self.all() if self._known is None else list(self._known.values())

    async def find(self, name: QualifiedName) -> ObjectStatus:
        """Return an object. Raises `UnknownObject` and `InvalidUsage`."""
        wanted = fold(object_name(name))
        # Another session may have created it since the objects were read.
        if self._known is None or wanted not in self._known:
            await self.all()
        assert self._known is not None
        found = self._known.get(wanted)
        if found is None:
            raise UnknownObject(f"there is no table, view or index named {'.'.join(name)!r}")
        return found

    async def plain_views(self) -> dict[str, str]:
        """Return the queries of the plain views by their names in lower case, each with those that
        it names inlined."""
        found: dict[str, str] = {}
        # In the catalog's order: a view comes after those that it names.
        for each in await self.all():
            if each.kind == PLAIN_VIEW:
                found[fold(each.name)] = inline_views(each.sql, found)
        return found

    async def find_present(self, name: QualifiedName) -> ObjectStatus:
        """Return an object as it is now, for a statement that goes by its kind or its columns.
        Raises as `find` does."""
        await self.all()
        return await self.find(name)

    async def find_table(self, name: QualifiedName) -> tuple[str, TableSchema]:
        """Return the name and columns of a table that clients write. Raises `InvalidUsage` and
        `UnknownObject`."""
        found = await self.find(name)
        if found.kind not in TABLE_KINDS or found.schema is None:
            raise InvalidUsage(f"{found.name} is a {found.kind}: only tables are written")
        return found.name, found.schema

    async def readable(self) -> dict[str, TableSchema]:
        """Return the columns of all objects that have rows, by their names."""
        return schemas_of(await self.all(), READABLE_KINDS)

    async def reads_of(self, name: str) -> ReadObjects:
        """Return an object as one whose rows are read. Raises as `find` does."""
        found = await self.find((name,))
        return ((found.id, found.name),)

    def column_defaults(self, table: str) -> ColumnDefaults:
        """Return the defaults of a table's columns, as `find_table` has seen them last."""
        found = (self._known or {}).get(fold(table))
        return {} if found is None else found.column_defaults


class SessionContext:
    """State of one session. One statement uses it at a time."""

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
        """Settings of Spark that the session has beside its time zone."""
        self._written_in: tuple[str, bool] | None = None
        self.find_places: PlaceFinder | None = None
        """Finds what places of a statement mean by their types; None: they mean what Spark says."""
        self._roles: PlaceRoles = {}
        self.committing: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        """Is around each write: the statement cannot be canceled then."""

    # -- settings ----------------------------------------------------------------------------------

    def set_variable(self, name: str, value: str | None, *, local: bool = False) -> bool:
        """Set a setting, or reset it (None). Return whether that has an effect: `local`, and what
        is the transaction's own, have none without a transaction. Raises as
        `SessionVariables.set` does, and `ActiveTransaction`."""
        setting, transaction = setting_named(name), self.transaction
        own = setting is not None and bool(setting.of_transaction)
        if setting is not None and transaction is not None and own:
            self._check_mode(setting, value, transaction)
        if self.dialect is SqlDialect.SPARK and name.lower() == "timezone" and value is not None:
            value = parse_spark_zone(value).shown
        before = self.variables.state()
        # The transaction's modes end with it.
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
        """Raise `ActiveTransaction` if a mode cannot change any more."""
        present = self.variables.get(setting.name)
        wanted = value or self.variables.get(setting.of_transaction)
        wanted = parse_setting(setting, wanted, present)
        if wanted == present or (setting.name == READ_ONLY and wanted == "on"):
            return
        what = "read-write mode" if setting.name == READ_ONLY else "isolation level"
        if transaction.queried:
            raise ActiveTransaction(f"transaction {what} must be set before any query")
        if transaction.has_savepoints:
            raise ActiveTransaction(f"transaction {what} must not be set behind a savepoint")

    def begin_statement(self, statement: SqlStatement) -> None:
        """Check that a statement may be carried out now. Raises `ReadOnlyTransaction`."""
        name = READ_ONLY if self.transaction is not None else "default_transaction_read_only"
        if self.variables.get(name) == "on" and not only_reads(statement):
            raise ReadOnlyTransaction(
                f"cannot execute {command_of(statement)} in a read-only transaction"
            )
        if self.transaction is not None and self.variables.get(ISOLATION) != REPEATABLE_READ:
            # Each statement reads at the latest time.
            self.transaction.time = None

    async def write(self, changes: Mapping[str, TableWrite]) -> None:
        """Write changes at one time, which the session keeps. Raises as `Client.write` does."""
        async with self.committing():
            self.variables.note_write(await self.client.write(changes))

    # -- texts -------------------------------------------------------------------------------------

    def spark(self, span: TextSpan, parameters: Sequence[SqlParameter] = ()) -> MappedSql:
        """Return a query or an expression of the statement in Spark's dialect, with its places.
        Raises `SqlSyntaxError`."""
        if self.dialect is SqlDialect.SPARK:
            return MappedSql.of(span, SparkText(without_schema(span.as_text(), SCHEMAS, CATALOGS)))
        literals = [each.text for each in parameters]
        times = self.times
        with map_positions(span):
            spark = to_spark(
                span.as_text(),
                literals,
                # In UTC, which has no summer time, Spark reads all as PostgreSQL does.
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
        """Read what depends on types, meanwhile, as it is meant in this statement."""
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
        """Return what `spark` does; a long text is rewritten in a thread."""
        return await run_or_offload(len(span.text), lambda: self.spark(span, parameters))

    # -- the time zone -----------------------------------------------------------------------------

    @property
    def zone(self) -> str:
        """Return the session's time zone, as `time_text.time_zone` and Spark read it."""
        return parse_session_zone(self.variables.get("TimeZone")).name

    @property
    def spark_zone(self) -> str:
        """Return the time zone for a query of the session; "" if it is the service's."""
        zone = self.zone
        # By far the most sessions: their queries share the engine's session with everything else.
        return "" if is_utc(zone) and TIME_ZONE not in self.settings.spark_conf else zone

    def spark_conf(self) -> dict[str, str]:
        """Return the settings of Spark that the session's queries are run under, and that a view
        of it keeps."""
        zone = self.spark_zone
        return {**self.spark_settings, **({TIME_ZONE: zone} if zone else {})}

    def choose_query(
        self, text: str, schemas: Mapping[str, TableSchema], changed: Mapping[str, object] = {}
    ) -> QueryChoice:
        """Return whether a query in Spark's dialect is a plain read, as `read_choice.choose_query`
        does, under the settings of the session."""
        names = [*self.settings.spark_conf, *self.spark_settings]
        return choose_query(text, schemas, names, changed)

    @contextmanager
    def as_service(self) -> Iterator[None]:
        """Run queries under the service's own settings meanwhile, in the session's zone: what a
        column has by default is the same to every session."""
        before, self.spark_settings = self.spark_settings, {}
        try:
            yield
        finally:
            self.spark_settings = before

    @contextmanager
    def written_in(self, zone: str, *, for_others: bool = False) -> Iterator[None]:
        """Read times in texts as of this zone meanwhile: a statement that was prepared keeps the
        one that it was prepared in. `for_others`: the text is kept for sessions in any zone."""
        before, self._written_in = self._written_in, (zone, for_others)
        try:
            yield
        finally:
            self._written_in = before

    @property
    def times(self) -> TimeLiterals:
        """Return what reads times without a zone in the statement."""
        here = self.zone
        zone, for_others = self._written_in or (here, False)
        return TimeLiterals(zone, here, for_others, self.dialect is SqlDialect.SPARK)

    @property
    def deadline_ms(self) -> int | None:
        """Return the deadline of a statement; None: the service's own."""
        return self.variables.milliseconds("statement_timeout") or None

    # -- times -------------------------------------------------------------------------------------

    async def time_of(self, expression: TextSpan, parameters: Sequence[SqlParameter]) -> Time:
        """Return the time that an ``AS OF`` names: milliseconds, or a timestamp. Raises
        `InvalidUsage`, and what the query of another expression raises."""
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
                    f"AS OF {value!r}: neither a time in ms nor a timestamp"
                ) from None
        if isinstance(value, datetime):
            moment = value if value.tzinfo is not None else self.times.instant(value)
            return int(moment.timestamp() * 1000)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidUsage(f"AS OF {expression.text}: neither a time in ms nor a timestamp")
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
        """Return the one time at which all names of a query are read; None: the latest. Raises
        `InvalidUsage` if it names several."""
        wanted = [statement.as_of, *(pin.expression for pin in statement.pins)]
        if any(pin.is_version for pin in statement.pins):
            raise InvalidUsage("VERSION AS OF: objects have times, not versions")
        texts = {span.text: span for span in wanted if span is not None}
        if len(texts) > 1:
            raise InvalidUsage(
                "all names of a query are read at one time: write AS OF once, at its end"
            )
        # At most one is left.
        for span in texts.values():
            return await self.time_of(span, parameters)
        variable = self.variables.get("penstock.as_of")
        return int(variable) if variable else None

    async def transaction_time(self) -> Time:
        """Return the time at which the open transaction reads, which its first read fixes."""
        assert self.transaction is not None
        self.transaction.queried = True
        if self.transaction.time is None:
            self.transaction.time = max(0, (await self.client.status()).tables_upper - 1)
        return self.transaction.time

    # -- rows --------------------------------------------------------------------------------------

    def read_rights(self) -> ReadRights:
        """Return the rights of a result that the session's present role is to read."""
        return ReadRights(self.client.session)

    async def rows(
        self, query: MappedSql, as_of: Time | None, rights: ReadRights | None = None
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield the rows of a query in Spark's dialect, at least one batch, and note in `rights`
        what they are of. Without `as_of` it sees every write that was acknowledged."""
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
        """Return all rows of a query in Spark's dialect. Raises `InvalidUsage` for more bytes than
        a statement may hold."""
        limit = self.settings.sql_rows_bytes_max
        batches, size = [], 0
        async with aclosing(self.rows(query, as_of)) as found:
            async for batch in found:
                # Held whole: a change of rows is one write.
                batches.append(batch)
                size += batch.nbytes
                if size > limit:
                    raise InvalidUsage(
                        f"the statement's rows have more than {limit} bytes "
                        "(sql_rows_bytes_max): change fewer at once, or use COPY"
                    )
        return pa.Table.from_batches(batches)

    async def describe(self, query: MappedSql) -> TableSchema:
        """Return the columns of a query in Spark's dialect, which is not run."""
        async with self.placed_errors(query):
            return await self.client.describe_query(query.text, spark_conf=self.spark_conf())

    # -- errors ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def placed_errors(self, query: MappedSql) -> AsyncIterator[None]:
        """Give errors of Spark in this query their place in the statement that the user wrote."""
        try:
            yield
        except (QueryRejected, DefiniteError) as error:
            error.position = await self._place(str(error), query)
            raise

    async def _place(self, message: str, query: MappedSql) -> int | None:
        """Return the place in the statement that a message of Spark's names; None: it names none,
        or one in a text that the user did not write."""
        if not names_place(message):
            return None
        try:
            text = query_text(query.text)
            sent = inline_views(text, await self.catalog.plain_views())
        # The query's own error is what the client is told.
        except PenstockError:
            return None
        if not query.text.startswith(text):
            return None
        # Spark counts in what the service has sent, where plain views come before the query.
        offset = spark_position(message, sent) - 1 - sent.rfind(text)
        return query.place_of(offset) if offset >= 0 else None
