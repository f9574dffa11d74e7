"""The Python client: tables, views, writes, reads at exact times, and streams of changes.

    async with await Client.connect("127.0.0.1:6874") as client:
        await client.create_table("flights", {"id": "bigint", "carrier": "string"}, ["id"])
        sql = "SELECT carrier, count(*) n FROM flights GROUP BY 1"
        await client.create_materialized_view("by_carrier", sql)
        time = await client.insert("flights", [{"id": 1, "carrier": "UA"}])
        print(await client.peek("by_carrier", as_of=time))
        async for change in client.subscribe("by_carrier"):
            print(change.upper, change.table)

Many tasks may use one client at the same time. The client starts no tasks of its own: the first
task that waits for an answer runs the read loop for all of them. While none waits, nothing is read,
which holds back the service. Errors are those of `actors.runtime.errors`, as the service raised
them. After a connection is lost, every call raises `ConnectionBroken`: connect again. An error
whose `determinate` is True says that the operation did not happen; otherwise it may have happened.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import pyarrow as pa

from actors.doors.client.answers import (
    AnswerCollector,
    CopyFormat,
    SubscribeSpec,
    await_copy_to,
    follow,
)
from actors.doors.client.answers import ChangeBatch as ChangeBatch
from actors.doors.client.answers import CopiedRows as CopiedRows
from actors.doors.client.answers import CopiedTo as CopiedTo
from actors.doors.client.answers import concatenate_pieces as concatenate_pieces
from actors.doors.client.connectors import ClientSources
from actors.doors.client.requests import (
    InProcess,
    RequestExchange,
    RequestSlot,
    ServiceLink,
    reads_of,
)
from actors.doors.client.rows import (
    PLAIN_READ,
    ReadSpec,
    column_of,
    empty_batch,
    encode,
    encode_left_out,
    expand,
    holds_dicts,
)
from actors.doors.client.rows import Condition as Condition
from actors.doors.client.rows import Rows as Rows
from actors.model.plan.column_defaults import ColumnDefaults
from actors.model.plan.schema import DIFF, TableSchema
from actors.model.protocol.api import (
    CLIENT_MAGIC,
    CLIENT_MAGIC_VERSION,
    COPY_FILE_BYTES,
    PROTOCOL_VERSION,
    ActorReport,
    CatalogStatement,
    ChangeReplicas,
    ClientHello,
    ClientMessage,
    CopyProgressed,
    CopyTo,
    CreateIndex,
    CreateTable,
    CreateView,
    DescribeQuery,
    DropObject,
    ExplainQuery,
    ExplainView,
    ListActors,
    QueryDescribed,
    ReadStatus,
    ReplicaReport,
    Request,
    RequestDone,
    RequestFailed,
    RunQuery,
    ServiceHello,
    ServiceMessage,
    SetTracing,
    SignalSession,
    StatusReport,
    TableChange,
    TracingReport,
    WaitFor,
    WriteCommitted,
    WriteTables,
    objects_of,
)
from actors.model.protocol.role_messages import CheckRight, ListRoles, RolesReport, RoleStatement
from actors.runtime.errors import (
    RemoteProtocolError,
    from_wire,
)
from actors.runtime.progress import Frontier, Time
from actors.runtime.settings import Settings
from actors.runtime.spans import begin_root, make_request_context, root_span
from actors.runtime.telemetry import CLIENT_REQUEST
from actors.runtime.transport.address import NetworkAddress
from actors.runtime.transport.connection import dial
from actors.runtime.transport.security import for_dialler

if TYPE_CHECKING:
    from actors.control.access.open_sessions import OpenSession, ReadRights


class TableWrite(msgspec.Struct, frozen=True):
    """Changes of one table in `Client.write`: deletes first, then updates, then inserts."""

    insert: Rows | None = None
    delete: Rows | None = None
    update: Rows | None = None
    defaults: str | None = None
    """Digest of the column defaults that the client filled into the rows (`plan.column_defaults`);
    None: the service fills in missing columns."""
    columns: str | None = None
    """Digest of the columns for which the rows were built (`TableSchema.digest`); None: do not
    check the columns."""


class Client(ClientSources):
    """A connection to a Penstock service."""

    def __init__(self, link: ServiceLink, settings: Settings) -> None:
        """Wrap a link that has exchanged the greetings. Use `connect` or `in_process` instead."""
        self._exchange = RequestExchange(link, settings)
        self._settings = settings

    # -- connecting ----------------------------------------------------------------------------

    @classmethod
    async def connect(cls, address: str, *, settings: Settings | None = None) -> Self:
        """Connect to ``host:port`` or ``unix:/path``.

        The settings `tls_certificate`, `tls_key`, `tls_authority` and `token_file` authenticate the
        client; `identity` is the name that the service must have. Raises `ConnectionBroken`,
        `ResourceBusy`, `IncompatibleVersion`, `AuthenticationFailed`, `WrongService`, and
        `BadSettings`.
        """
        settings = settings or Settings()
        place = NetworkAddress.parse(address)
        link = await dial(
            place,
            ClientMessage,
            ServiceMessage,
            settings,
            CLIENT_MAGIC,
            CLIENT_MAGIC_VERSION,
            identity=settings.identity,
            security=for_dialler(place, settings, settings.token_file),
        )
        return await cls._welcome(link, settings)

    @classmethod
    async def in_process(cls, service: InProcess, *, settings: Settings | None = None) -> Self:
        """Connect to a service in this process. The client then works as with `connect`."""
        return await cls._welcome(await service.connect_in_process(), settings or Settings())

    @classmethod
    async def _welcome(cls, link: ServiceLink, settings: Settings) -> Self:
        try:
            await link.send(ClientHello(PROTOCOL_VERSION, "penstock-python"))
            answer = await link.receive()
        except BaseException:
            await link.aclose()
            raise
        if isinstance(answer, ServiceHello):
            return cls(link, settings)
        await link.aclose()
        if isinstance(answer, RequestFailed):
            raise from_wire(answer.code, answer.text, answer.determinate)
        raise RemoteProtocolError(f"the service answered Welcome with {type(answer).__name__}")

    @property
    def session(self) -> OpenSession | None:
        """Return the client's session if the service is in this process, else None."""
        return self._exchange.session

    @property
    def is_lost(self) -> bool:
        """Return whether the connection is lost, so that every call fails."""
        return self._exchange.lost is not None

    async def aclose(self) -> None:
        """Close the connection, which ends its subscribes. Idempotent."""
        await self._exchange.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # -- objects -------------------------------------------------------------------------------

    async def submit(self, statement: CatalogStatement | RoleStatement) -> str:
        """Send a statement that `actors.engine.sql` parsed from SQL, and return its notices, one
        per line.

        Raises `AccessDenied`, `StorageError`, and the statement's own errors: `InvalidUsage`,
        `ObjectExists`, `UnknownObject`, `ObjectInUse`, `QueryRejected`.
        """
        return await self._exchange.submit(statement)

    async def create_table(
        self,
        name: str,
        columns: Mapping[str, str] | TableSchema,
        primary_key: Sequence[str] = (),
        *,
        retain_history_ms: int | None = None,
        comment: str = "",
        column_comments: Mapping[str, str] | None = None,
        column_defaults: ColumnDefaults | None = None,
    ) -> None:
        """Create a table.

        `columns` maps names to Spark types, such as ``{"id": "bigint", "at": "timestamp"}``. End a
        type with ``not null`` to refuse NULL. With `primary_key`, inserting an existing key raises
        `DuplicateKey`, and deleting or updating a missing one raises `AbsentRow`; without it, the
        table may hold duplicate rows. History is kept for `retain_history_ms` (default: the
        service's). `column_defaults` come from the SQL statement ``CREATE TABLE``; use that to
        define defaults. Raises `ObjectExists`, `InvalidUsage`.
        """
        if isinstance(columns, TableSchema):
            schema = columns
            if primary_key:
                schema = msgspec.structs.replace(schema, key=tuple(primary_key))
        else:
            made = tuple(column_of(column, text) for column, text in columns.items())
            schema = TableSchema(made, tuple(primary_key))
        comments, defaults = dict(column_comments or {}), dict(column_defaults or {})
        statement = CreateTable(0, name, schema, retain_history_ms, comment, comments, defaults)
        await self.submit(statement)

    async def create_materialized_view(
        self,
        name: str,
        sql: str,
        *,
        retain_history_ms: int | None = None,
        spark_conf: Mapping[str, str] | None = None,
        refresh_policy: str = "auto",
        target_lag_ms: int = 0,
        replace: bool = False,
        comment: str = "",
        as_of: Time | None = None,
    ) -> None:
        """Create a maintained view of a Spark SQL query over tables and views.

        The call returns when the view is in the catalog; reads wait until it is computed.
        `spark_conf` are the view's Spark SQL settings. `refresh_policy` is ``auto`` (whichever is
        cheaper), ``incremental`` (in steps), ``incremental strict`` (in steps; refused if the view
        would be opaque) or ``full`` (recomputed). `target_lag_ms` is how stale the view may be (0:
        as fresh as possible): changes are batched until then, and a read returns the current
        contents unless they are older.

        With `replace`, an existing view of this name is replaced. The new view is computed
        alongside it and then replaces it at a single timestamp for readers, subscribers and
        dependent views; the call returns then. If the new view fails, or the call is canceled, the
        old one stays. If the columns change, other than by additional nullable columns at the end,
        nothing may depend on the view (`ObjectInUse`).

        The view's contents start at `as_of`. None, or a later time, means the latest time at which
        its inputs can be read. Raises `QueryRejected`, `UnknownObject`, `ObjectExists`,
        `ReadBelowSince`, `InvalidUsage`.
        """
        statement = CreateView(
            0,
            name,
            sql,
            retain_history_ms,
            dict(spark_conf or {}),
            refresh_policy,
            target_lag_ms,
            replace=replace,
            comment=comment,
            as_of=as_of,
        )
        await self.submit(statement)

    async def create_plain_view(
        self, name: str, sql: str, *, replace: bool = False, comment: str = ""
    ) -> None:
        """Create a view that stores nothing and is inlined where a query or another view names it.

        With `replace`, an existing plain view of this name is replaced. Raises as
        `create_materialized_view` does.
        """
        await self.submit(CreateView(0, name, sql, replace=replace, comment=comment, plain=True))

    def create_view(
        self, name: str, sql: str, *, conf: Mapping[str, str] | None = None, **options: Any
    ) -> Coroutine[Any, Any, None]:
        """Call `create_materialized_view` by its former name. Removed in the next release."""
        text = "Client.create_view(conf=…) is now create_materialized_view(spark_conf=…)"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self.create_materialized_view(name, sql, spark_conf=conf, **options)

    async def create_index(self, name: str, on: str, key: Sequence[str]) -> None:
        """Create an index on these columns of a table or view, which makes peeks by key fast.
        Raises `UnknownObject`, `ObjectExists`, `InvalidUsage`."""
        await self.submit(CreateIndex(0, name, on, tuple(key)))

    async def drop(self, name: str, *, cascade: bool = False) -> str:
        """Drop a table, view or index. With `cascade`, also drop all dependent objects, atomically.

        Return a line for each dependent object. Raises `UnknownObject`, `ObjectInUse`.
        """
        return await self.submit(DropObject(0, name, cascade))

    async def status(self) -> StatusReport:
        """Return the status of all objects: frontiers, lag, state and step times."""
        return await self._exchange.ask(ReadStatus(self._exchange.number()), StatusReport)

    async def actors(self) -> ActorReport:
        """Return all running actors of the service. Counters only grow; two reports give rates."""
        return await self._exchange.ask(ListActors(self._exchange.number()), ActorReport)

    async def replicas(self, *, add: str = "", drop: str = "") -> ReplicaReport:
        """Return all replicas, after adding or dropping one permanently. Raises `InvalidUsage`,
        `StorageError`."""
        request = ChangeReplicas(self._exchange.number(), add, drop)
        return await self._exchange.ask(request, ReplicaReport)

    async def tracing(self, ratio: float | None = None) -> TracingReport:
        """Return whether the service exports traces, and the share of new traces that it samples.

        With `ratio` (0 to 1), set that share first. Raises `InvalidUsage`.
        """
        return await self._exchange.ask(SetTracing(self._exchange.number(), ratio), TracingReport)

    async def explain(self, view: str) -> str:
        """Return the plan of a maintained view. Raises `UnknownObject`, `InvalidUsage`."""
        return (
            await self._exchange.ask(ExplainView(self._exchange.number(), view), RequestDone)
        ).text

    async def explain_query(
        self, sql: str, *, spark_conf: Mapping[str, str] | None = None, refresh_policy: str = "auto"
    ) -> str:
        """Return the plan that a maintained view of this query would have, without creating it.

        With `refresh_policy` "none", return how the query would be read now. Raises as
        `create_materialized_view` does.
        """
        number = self._exchange.number()
        request = ExplainQuery(number, sql, dict(spark_conf or {}), refresh_policy)
        return (await self._exchange.ask(request, RequestDone)).text

    async def describe_query(self, sql: str, *, spark_conf: Mapping[str, str] = {}) -> TableSchema:
        """Return the columns of a query under these Spark settings, without running it. Raises
        `QueryRejected`, `UnknownObject`, and `InvalidUsage` for a setting that is not permitted."""
        request = DescribeQuery(self._exchange.number(), sql, dict(spark_conf))
        return (await self._exchange.ask(request, QueryDescribed)).schema

    # -- roles and sessions --------------------------------------------------------------------

    async def roles(self) -> RolesReport:
        """Return all roles, with their rights."""
        return await self._exchange.ask(ListRoles(self._exchange.number()), RolesReport)

    async def check_right(self, right: str, name: str) -> None:
        """Raise `AccessDenied` unless this connection now has the right on the object."""
        await self._done(CheckRight(self._exchange.number(), right, name))

    async def end_session(self, number: int, *, cancel: bool = False) -> None:
        """End the session with this number in ``penstock.sessions``, of any protocol.

        With `cancel`, only cancel its running statement. Raises `UnknownObject`, `AccessDenied`.
        """
        await self._done(SignalSession(self._exchange.number(), number, not cancel))

    # -- writing -------------------------------------------------------------------------------

    async def insert(self, table: str, rows: Rows) -> Time:
        """Insert rows atomically, and return the timestamp of the write once it is durable.

        Missing columns get their default, or else NULL. Raises `TypeMismatch`, `DuplicateKey`,
        `UnknownObject`, `StoreFull`.
        """
        return await self.write({table: TableWrite(insert=rows)})

    async def delete(self, table: str, rows: Rows) -> Time:
        """Delete rows atomically: full rows, or only the key columns if the table has a PRIMARY
        KEY. Raises `AbsentRow`, and as `insert` does."""
        return await self.write({table: TableWrite(delete=rows)})

    async def update(self, table: str, rows: Rows) -> Time:
        """Update rows of a table with a PRIMARY KEY: rows hold the key and the columns to set.
        Raises `AbsentRow`, and as `insert` does."""
        return await self.write({table: TableWrite(update=rows)})

    async def write(self, changes: Mapping[str, TableWrite]) -> Time:
        """Change several tables atomically, and return the timestamp of the write. Without changes,
        only advance the tables' upper. Raises as `insert`, `delete` and `update` do."""
        encoded = tuple([await self._encoded(*change) for change in changes.items()])
        number = self._exchange.number()
        with root_span(CLIENT_REQUEST) as opened:
            request = WriteTables(number, encoded)
            if opened is not None:
                opened.describe(number, objects_of(request))
            context = make_request_context(opened)
            return (await self._exchange.ask(request, WriteCommitted, context)).time

    async def _encoded(self, table: str, change: TableWrite) -> TableChange:
        parts = (change.insert, change.delete, change.update)
        shape = None
        # A dict may be a struct or a map, so get the types of the table's columns.
        if any(map(holds_dicts, parts)):
            shape = (await self.peek(table, limit=0)).schema
        insert, delete, update = (encode(table, rows, shape) for rows in parts)
        left_out = encode_left_out(change.insert)
        return TableChange(table, insert, delete, update, change.defaults, left_out, change.columns)

    # -- reading -------------------------------------------------------------------------------

    async def peek(
        self,
        name: str,
        as_of: Time | None = None,
        key: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        where: Sequence[Condition] = (),
        columns: Sequence[str] | None = None,
        order_by: Sequence[str] = (),
        limit: int | None = None,
        offset: int = 0,
        deadline_ms: int | None = None,
    ) -> pa.Table:
        """Return the contents of a table or view at `as_of` (None: the latest written timestamp).

        `key` selects rows by equality with one or several keys; an index on exactly these columns
        makes this fast. `where` selects rows by conditions, all of which must hold, such as
        ``("amount", ">", 5)`` or ``("region", "is null")``. `columns` selects columns. `order_by`
        names columns, each optionally followed by ``desc``, ``nulls first`` or ``nulls last``;
        without it the order is undefined. `offset` rows are skipped, then at most `limit` returned.
        Waits up to `deadline_ms` until the timestamp is sealed (`DeadlineExceeded`). Raises
        `ReadBelowSince`, `ReadTooFarAhead`, `ViewInError`, `UnknownObject`, `InvalidUsage`.
        """
        spec = ReadSpec.of(name, key, where, columns, order_by, limit, offset)
        async with contextlib.aclosing(self._pieces(name, as_of, spec, deadline_ms)) as pieces:
            tables = [piece async for piece in pieces]
        return expand(tables[0] if len(tables) == 1 else pa.concat_tables(tables))

    async def peek_batches(
        self,
        name: str,
        as_of: Time | None = None,
        key: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        where: Sequence[Condition] = (),
        columns: Sequence[str] | None = None,
        order_by: Sequence[str] = (),
        limit: int | None = None,
        offset: int = 0,
        deadline_ms: int | None = None,
    ) -> AsyncGenerator[pa.Table, None]:
        """Yield what `peek` returns in pieces, for results of any size; at least one table.

        Neither side holds more than a few pieces in memory, except that `order_by` without `limit`
        needs all rows here. Leave the loop to stop early. Consume the pieces within the service's
        `stash_orphan_ms`.
        """
        spec = ReadSpec.of(name, key, where, columns, order_by, limit, offset)
        async with contextlib.aclosing(self._pieces(name, as_of, spec, deadline_ms)) as pieces:
            async for piece in pieces:
                yield expand(piece)

    async def _pieces(
        self,
        name: str,
        as_of: Time | None,
        spec: ReadSpec,
        deadline_ms: int | None,
        rights: ReadRights | None = None,
    ) -> AsyncGenerator[pa.Table, None]:
        """Yield the rows of a read with their diffs, ordered and limited; at least one table."""
        number = self._exchange.number()
        # `root` would leave its context set in the caller's task between two pieces.
        opened = begin_root(CLIENT_REQUEST, number, name)
        request = spec.read(number, name, as_of, deadline_ms)
        failed: BaseException | None = None
        try:
            slot = await self._exchange.open(request, make_request_context(opened))
            async with contextlib.aclosing(self._answers(number, slot, spec, rights)) as pieces:
                async for piece in pieces:
                    yield piece
        except BaseException as error:
            failed = error
            raise
        finally:
            if opened is not None:
                opened.end(failed)

    async def _answers(
        self, number: int, slot: RequestSlot, spec: ReadSpec, rights: ReadRights | None = None
    ) -> AsyncGenerator[pa.Table, None]:
        gathering = AnswerCollector(spec)
        try:
            while not gathering.over:
                answer = await self._exchange.next_answer(slot)
                if rights is not None:
                    rights.note(reads_of(answer))
                rows = gathering.take(answer)
                if rows is not None:
                    yield rows
        finally:
            self._exchange.close(number)
            # Tell the service to stop if more answers would come.
            if not gathering.ended and self._exchange.lost is None:
                await self._exchange.cancel(number)
        rest = gathering.rest()
        if rest is not None:
            yield rest

    async def query(
        self,
        sql: str,
        *,
        as_of: Time | None = None,
        deadline_ms: int | None = None,
        latest: bool = False,
        spark_conf: Mapping[str, str] = {},
        rights: ReadRights | None = None,
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield the rows of a Spark SQL query over tables and views, in the query's order; at least
        one batch.

        All objects are read at `as_of`. None means the greatest time at which all of them are
        sealed or, with `latest`, the latest written timestamp. A plain read of one object (columns,
        comparisons with literals, ORDER BY, LIMIT) is served from an index or a shard; Spark runs
        any other query. The call waits until the time is sealed. `deadline_ms` limits how long the
        rows may take (default: `query_deadline_ms`). Neither side holds more than a few
        batches in memory. Leave the loop to stop early. `spark_conf` are Spark settings for the
        query. `rights` notes the objects that are read. Raises `QueryRejected`, `DefiniteError`
        (the query fails for the data), `ViewInError`, `ReadBelowSince`, `ReadTooFarAhead`,
        `UnknownObject`, `DeadlineExceeded`, `ResourceBusy` and `InvalidUsage`.
        """
        async with contextlib.aclosing(
            self._queried(
                sql, as_of, deadline_ms, latest=latest, spark_conf=spark_conf, rights=rights
            )
        ) as pieces:
            async for piece in pieces:
                table = expand(piece)
                # Yield a batch even without rows, so that the caller learns the columns.
                for batch in table.to_batches() or [empty_batch(table.schema)]:
                    yield batch

    async def _queried(
        self,
        sql: str,
        as_of: Time | None,
        deadline_ms: int | None,
        *,
        engine: bool = False,
        latest: bool = False,
        spark_conf: Mapping[str, str] = {},
        rights: ReadRights | None = None,
    ) -> AsyncGenerator[pa.Table, None]:
        """Yield a query's rows, as `_pieces` does. With `engine`, Spark runs even a plain read."""
        number = self._exchange.number()
        with root_span(CLIENT_REQUEST, number, "query") as opened:
            request = RunQuery(number, sql, as_of, deadline_ms, engine, latest, dict(spark_conf))
            slot = await self._exchange.open(request, make_request_context(opened))
            instead = await self._exchange.read_instead(number, slot)
        if instead is None:
            found, names = self._answers(number, slot, PLAIN_READ, rights), None
        else:
            spec = ReadSpec(None, (), instead.filter, instead.project, instead.finishing)
            found, names = (
                self._pieces(instead.name, instead.as_of, spec, deadline_ms, rights),
                instead.names,
            )
        async with contextlib.aclosing(found) as pieces:
            async for piece in pieces:
                yield piece if names is None else piece.rename_columns([*names, DIFF])

    async def wait_for(self, name: str, time: Time, *, deadline_ms: int | None = None) -> None:
        """Wait until the object is sealed up to and including `time`. Raises `DeadlineExceeded`,
        `ReadTooFarAhead`, `UnknownObject`."""
        await self._done(WaitFor(self._exchange.number(), name, time, deadline_ms))

    async def subscribe(
        self,
        name: str,
        from_: Frontier | None = None,
        *,
        as_of: Time | None = None,
        up_to: Frontier | None = None,
        snapshot: bool = True,
        progress: bool = True,
        rights: ReadRights | None = None,
    ) -> AsyncGenerator[ChangeBatch, None]:
        """Yield the changes of a table or view: first its contents as of `as_of` (None: now), then
        all later changes.

        Without `snapshot`, the contents are omitted. With `up_to`, only changes before it follow,
        and the last one has the empty upper. Without `progress`, changes without rows are omitted,
        except the last. With `from_`, only changes with ``time >= from_`` follow: to resume without
        gap or repeat, pass the `upper` of the last change that was not `partial`. A large change
        arrives in pieces (see `ChangeBatch`), which `concatenate_pieces` joins.

        The generator ends when no more changes can come; leave the loop to stop early. A slow
        client delays only itself, but one that consumes nothing for too long is disconnected.
        `rights` notes the objects whose changes are returned. Raises `ReadBelowSince`,
        `InvalidUsage`, `ViewInError`, `UnknownObject`, `SlowSubscriber`, `ConnectionBroken`.
        """
        spec = SubscribeSpec(name, from_, as_of, up_to, snapshot, progress)
        limit = self._settings.subscribe_inflight_bytes_max
        stream = follow(self._exchange, spec, limit, rights)
        async with contextlib.aclosing(stream) as changes:
            async for change in changes:
                yield change

    async def copy_to(
        self,
        name: str,
        destination: str,
        *,
        as_of: Time | None = None,
        format: CopyFormat = "parquet",
        file_bytes_max: int = COPY_FILE_BYTES,
        overwrite: bool = False,
        deadline_ms: int | None = None,
        progress: Callable[[CopyProgressed], object] | None = None,
    ) -> CopiedTo:
        """Write the contents of a table or view as of `as_of` (None: the latest written timestamp)
        into files: ``parquet``, ``csv`` or ``json`` (one object per line).

        The service writes the files. `destination` is a folder below its `copy_dir`, as a path or
        ``file:`` URL, or a place in one of its `copy_buckets`. Files have about `file_bytes_max`
        bytes. The manifest that lists them is written last, so the copy is atomic. An existing copy
        is an error; with `overwrite` it is replaced once the new one is complete. The call waits
        until the time is sealed. The copy is dropped if the call is canceled, the connection is
        lost, or `deadline_ms` have passed (`DeadlineExceeded`). `progress` is called with each
        report. Raises `ResourceBusy`, `ViewInError`, `ReadBelowSince`, `ReadTooFarAhead`,
        `StoreFull`, `StorageError`, and `InvalidUsage` and its subclasses.
        """
        request = CopyTo(
            self._exchange.number(),
            name,
            destination,
            format,
            as_of,
            file_bytes_max,
            overwrite,
            deadline_ms,
            progress is not None,
        )
        return await await_copy_to(self._exchange, request, progress)

    async def _done(self, request: Request, traceparent: str | None = None) -> str:
        return (await self._exchange.ask(request, RequestDone, traceparent)).text
