"""One-off queries over tables and views, at one time.

A query that is a plain read of one object (`views.simple`) does not run here: the answer names the
read that the client sends instead (`ReadInstead`). Every other query goes through these stages, all
in one effect of the controller, `_Run`:

1. analyse: Spark returns the query's columns, or the reason why it is refused;
2. hold: a durable hold is taken on every input at the query's time;
3. open and run: the inputs' parts are leased as for a full computation of a view, which waits until
   the time is sealed in all of them; then one Spark job makes the rows, in their order;
4. stream: the rows are sent piece by piece, each after the previous one was delivered to the
   client. Few rows are in memory; many are in files, of which one batch at a time is read.

Holds, leases and files are dropped when the run ends, for whatever reason. The run is canceled, and
with it its Spark job, when the client disconnects or cancels, or at the deadline (which applies
until the rows are ready). At most `queries_in_flight_max` queries run at a time, in the order in
which they arrived; others wait within their deadlines, and beyond `queries_waiting_max` they are
refused with `ResourceBusy`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import anyio
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from actors.control.access.role_registry import READ
from actors.control.controller.catalog.analysis_requests import analyzer
from actors.control.controller.catalog.boot import last_sealed_time, shard_import
from actors.control.controller.catalog.catalog import CatalogObject
from actors.control.controller.open_requests import OpenRequests
from actors.control.controller.reads.memory_reads import first_way
from actors.control.controller.roles.request_rights import named_denial, readable_by
from actors.control.controller.roles.revocation import HeldRights, held_reads
from actors.control.controller.state import (
    ControllerState,
    NoContentsYet,
    reply_error,
    to_penstock_error,
)
from actors.engine.views.plain_sql import query_text
from actors.engine.views.query_analysis import analyzed_query, find_mentioned_tables
from actors.engine.views.read_choice import (
    QueryChoice,
    choose_query,
    explain_read,
    explain_spark,
)
from actors.model.plan.jobs import ExecutorMessage, QueryAnalyzed, SelectContents
from actors.model.plan.schema import (
    DIFF,
    SYSTEM_COLUMNS,
    TableColumn,
    TableSchema,
    intervals_of_months,
)
from actors.model.plan.updates import ResultPiece, encode_stream_header, pieces
from actors.model.protocol.api import (
    CreateView,
    DescribeQuery,
    ExplainQuery,
    QueryDescribed,
    ReadContents,
    ReadInstead,
    RequestDone,
    RunQuery,
)
from actors.model.protocol.relations import RELATION_SCHEMAS, is_relation
from actors.replica.compute.peeks import row_too_large
from actors.replica.dataflow.engine import EngineClient, JobResult, MadeFiles
from actors.replica.dataflow.recompute import open_contents
from actors.runtime.errors import (
    DeadlineExceeded,
    DefiniteError,
    InvalidUsage,
    PenstockError,
    QueryRejected,
    ReadBelowSince,
    ResourceBusy,
    UnknownObject,
    ViewInError,
)
from actors.runtime.kernel import ActorAddress, RunningEffect
from actors.runtime.progress import EMPTY, Time
from actors.runtime.spans import use_context
from actors.runtime.telemetry import TRACEPARENT
from actors.runtime.threshold_probes import QUERY_ANSWER

PLAIN_CHARACTERS_MAX: Final = 65_536
"""A longer query is parsed in a thread, and is never treated as a plain read."""
BATCH_ROWS: int = 16_384
"""Approximate number of rows of a file in memory at a time."""


class QueryPiece(msgspec.Struct, frozen=True, gc=False):
    """Sent when a query has produced rows for its client."""

    number: int
    arrow: bytes
    last: bool


class QueryEnded(msgspec.Struct, frozen=True, gc=False):
    """A run has ended; without an error, all its rows were sent."""

    number: int
    error: PenstockError | None = None
    awaited: CatalogObject | None = None
    """A source's table without contents: run the query again once it has some."""


class QueryTimedOut(msgspec.Struct, frozen=True, gc=False):
    """A query's deadline has passed."""

    number: int


class InputsChecked(msgspec.Struct, frozen=True, gc=False):
    """The session may read everything that a view's text names, so the view may be created or
    explained."""

    session: ActorAddress[Any]
    request: CreateView | ExplainQuery
    role: str | None
    rights: HeldRights
    """Reads of its query, to check again: a right may have been revoked in the meantime."""


QueryTurn: TypeAlias = QueryPiece | QueryEnded | QueryTimedOut


class _Running(msgspec.Struct, eq=False):
    id: int
    """Number of the query within this service."""
    session: ActorAddress[Any]
    request: RunQuery
    time: Time
    """Time of the query: the requested time; without one that of the latest write, until the
    analysis shows which inputs there are."""
    deadline_ms: int
    """Time until the rows must be ready (ms)."""
    role: str | None
    """Role of the session; see `access.access_rules`."""
    since_ms: float
    """Time of the request (monotonic, ms)."""
    timer: RunningEffect
    """Timer of the deadline."""
    taken: anyio.Event
    """Set when the client was sent the last piece."""
    traceparent: str | None
    """Trace context of the request."""
    rights: HeldRights
    """Rights to read the inputs, once these are known."""
    names: str = ""
    """Names of the inputs, for display, once they are known."""
    effect: RunningEffect | None = None
    """The running `_Run`; None while the query waits for others."""
    streaming: bool = False
    """True once the rows are ready and being sent: the deadline no longer applies."""
    state: str = "waiting for other queries"
    """Current activity of the query, for display."""
    entry: None = None
    """No object: a query keeps its inputs' parts leased, whatever is dropped in the meantime."""

    @property
    def number(self) -> int:
        return self.request.request


class RunningQueries(OpenRequests[_Running]):
    """All running and waiting queries."""

    def __init__(
        self,
        state: ControllerState,
        executor: ActorAddress[ExecutorMessage],
        scratch: Path,
        await_contents: Callable[[ActorAddress[Any], RunQuery, str | None, CatalogObject], None],
    ) -> None:
        super().__init__()
        self._state = state
        self._await_contents = await_contents
        self._executor = executor
        self._scratch = scratch
        self._numbers = 0
        """Number of the last query."""
        self._running: dict[int, _Running] = {}
        """Queries by number, in the order in which they arrived."""

    # -- starting ----------------------------------------------------------------------------------

    def query(self, session: ActorAddress[Any], request: RunQuery, role: str | None = None) -> None:
        """Start a query for a session with this role, or answer with the read that replaces it.
        Raises `QueryRejected`, `UnknownObject`, `InvalidUsage`, `AccessDenied`, `ReadTooFarAhead`
        and `ResourceBusy`."""
        state, as_of = self._state, request.as_of
        sql = query_text(request.sql)
        if as_of is not None:
            state.check_time("query", as_of)
        instead = self._read_instead(sql, request, role)
        if instead is not None:
            session.reply(instead)
            return
        running, waiting = (
            state.settings.queries_in_flight_max,
            state.settings.queries_waiting_max,
        )
        if len(self._running) >= running + waiting:
            raise ResourceBusy(
                f"{running} queries are running (queries_in_flight_max) and {waiting} are waiting "
                "(queries_waiting_max): try again later"
            )
        deadline = request.deadline_ms
        deadline = state.settings.query_deadline_ms if deadline is None else deadline
        if deadline <= 0:
            raise InvalidUsage(f"deadline_ms = {deadline}: must be greater than zero")
        self._begin(session, msgspec.structs.replace(request, sql=sql), deadline, role)

    def _read_instead(self, sql: str, request: RunQuery, role: str | None) -> ReadInstead | None:
        if request.engine:
            return None
        found = self._choose(sql, request, self._state.catalog.readable()).read
        if found is None:
            return None
        as_of = request.as_of
        if not is_relation(found.name):
            entry = self._state.catalog.find(found.name)
            # The client's read will be checked again: refusing it here saves a round trip.
            self._state.access.check(role, READ, entry.id, entry.name)
            if as_of is None and not request.latest:
                as_of = readable_time(self._state, [entry])
        return ReadInstead(
            request.request,
            found.name,
            as_of,
            found.project,
            found.names,
            found.filter,
            found.finishing,
        )

    def _choose(
        self,
        sql: str,
        request: RunQuery | DescribeQuery | ExplainQuery,
        readable: Mapping[str, TableSchema],
    ) -> QueryChoice:
        """Decide whether a query is a plain read of these objects or runs in Spark. A long query
        always runs in Spark: parsing it would block the event loop."""
        if len(sql) > PLAIN_CHARACTERS_MAX:
            return QueryChoice(None, f"its text is longer than {PLAIN_CHARACTERS_MAX} characters")
        names = [*self._state.settings.spark_conf, *request.conf]
        inlined, _ = self._state.catalog.inlined(sql)
        return choose_query(inlined, {**readable, **RELATION_SCHEMAS}, names)

    def explain(self, session: ActorAddress[Any], request: ExplainQuery) -> None:
        """Answer with the way in which a query's rows would be read now."""
        state, sql = self._state, query_text(request.sql)
        readable = state.catalog.readable()
        found = self._choose(sql, request, readable)
        if found.read is None:
            views = (each.name for each in state.catalog.plain_views_in(sql))
            lines = explain_spark([*find_mentioned_tables(sql, readable), *views], found.reason)
        else:
            lines = explain_read(found.read, first_way(state, found.read))
        session.reply(RequestDone(request.request, "\n".join(lines)))

    def describe(
        self, session: ActorAddress[Any], request: DescribeQuery, role: str | None = None
    ) -> None:
        """Answer with a query's columns: for a plain read immediately, otherwise once Spark has
        analysed it."""
        state = self._state
        sql = query_text(request.sql)
        readable = readable_by(state.access, state.catalog, role)
        found = self._choose(sql, request, readable).read
        if found is not None:
            schema = (readable.get(found.name) or RELATION_SCHEMAS[found.name]).renamed(
                dict(zip(found.project, found.names, strict=True))
            )
            session.reply(QueryDescribed(request.request, schema))
            return
        self._numbers += 1
        name = f"describe-{self._numbers}"

        async def describe() -> None:
            try:
                text = await _inlined(state, sql)
                analyzed = await _analysed(state, self._executor, name, text, request.conf, role)
                session.reply(QueryDescribed(request.request, analyzed.schema))
            except Exception as error:  # noqa: BLE001 - each is the client's answer
                reply_error(session, request.request, to_penstock_error(error))

        state.ctx.effect(describe, done=lambda _: None)

    def check_inputs(
        self, session: ActorAddress[Any], request: CreateView | ExplainQuery, role: str | None
    ) -> None:
        """Let a view be created or explained (`InputsChecked`) if the session may use everything
        that its query does; otherwise answer with the error."""
        state = self._state
        self._numbers += 1
        name = f"inputs-{self._numbers}"
        # Analyse the text as it will be compiled: with the plain views that it names inlined.
        sql, _ = state.catalog.inlined(request.sql)

        async def check() -> InputsChecked | None:
            try:
                analyzed = await _analysed(state, self._executor, name, sql, request.conf, role)
                inputs = [state.catalog.find(each) for each in analyzed.inputs]
            except Exception as error:  # noqa: BLE001 - each is the client's answer
                reply_error(session, request.request, to_penstock_error(error))
                return None
            return InputsChecked(session, request, role, held_reads(role, inputs))

        state.ctx.effect(check, done=lambda checked: checked)

    def _begin(
        self,
        session: ActorAddress[Any],
        request: RunQuery,
        deadline_ms: int,
        role: str | None,
    ) -> None:
        state = self._state
        self._numbers += 1
        number = self._numbers
        made = self._running[number] = _Running(
            number,
            session,
            request,
            readable_time(state, ()) if request.as_of is None else request.as_of,
            deadline_ms,
            role,
            state.ctx.monotonic_ms(),
            state.ctx.after(deadline_ms, QueryTimedOut(number)),
            anyio.Event(),
            TRACEPARENT.get(),
            HeldRights(role),
        )
        self._opened(made)
        self._start_next()

    def _start_next(self) -> None:
        """Start waiting queries, oldest first, as far as the limit allows."""
        # The running queries come first, since the dictionary keeps the order of arrival. A query
        # whose rows are ready no longer needs Spark, however slowly its client reads them.
        free = self._state.settings.queries_in_flight_max
        for number, running in self._running.items():
            if running.streaming:
                continue
            if free == 0:
                return
            free -= 1
            if running.effect is None:
                self._start(number, running)

    def _start(self, number: int, running: _Running) -> None:
        running.state = "analysing"
        run = _Run(self._state, self._executor, self._scratch / f"query-{number}", number, running)

        async def carry_out() -> None:
            with use_context(running.traceparent):
                await run.carry_out()

        running.effect = self._state.ctx.effect(
            carry_out,
            done=lambda _: QueryEnded(number),
            failed=lambda error: _failed(number, error),
        )

    # -- progress ------------------------------------------------------------------------------

    def turn(self, message: QueryTurn) -> None:
        """Handle a run's rows, its end, or its deadline."""
        running = self._running.get(message.number)
        if running is None:
            return
        match message:
            case QueryPiece(arrow=arrow, last=last):
                if not running.streaming:
                    running.streaming = True
                    # The deadline applies until the first rows are ready.
                    running.timer.cancel()
                request, reads = running.request.request, running.rights.reads
                answer = ReadContents(request, running.time, arrow, not last, reads)
                running.session.reply(answer)
                if last:
                    self._end(running, None)
                else:
                    self._start_next()
            case QueryEnded(awaited=CatalogObject() as table):
                # The inputs are known only from the analysis.
                self._end(running, None)
                self._await_contents(running.session, running.request, running.role, table)
            case QueryEnded(error=error):
                if error is not None:
                    self._end(running, error)
            case QueryTimedOut():
                text = (
                    f"query over {running.names or 'no table'} at {running.time}: not finished "
                    f"within {running.deadline_ms} ms: it was {running.state}"
                )
                self._end(running, DeadlineExceeded(text))

    def delivered(self, session: str, request: int) -> bool:
        """Let the run send its next piece. Return False if there is no such query."""
        running = self._open.get((session, request))
        if running is not None:
            running.taken.set()
        return running is not None

    # -- ending --------------------------------------------------------------------------------

    def _end(self, made: _Running, error: PenstockError | None) -> None:
        if error is not None:
            reply_error(made.session, made.number, error)
        del self._running[made.id]
        self._closed(made)
        made.timer.cancel()
        if made.effect is not None:
            # This cancels the Spark job and drops the holds, leases and files (`_Run`).
            made.effect.cancel()
        self._start_next()

    # -- reporting -----------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of ``penstock.peeks`` about queries."""
        now = self._state.ctx.monotonic_ms()
        for running in self._running.values():
            yield (
                running.session.path,
                running.request.request,
                "query",
                running.names,
                running.time,
                "streaming" if running.streaming else running.state,
                now - running.since_ms,
                running.deadline_ms,
                None,
            )


async def _analysed(
    state: ControllerState,
    executor: ActorAddress[ExecutorMessage],
    name: str,
    sql: str,
    conf: Mapping[str, str],
    role: str | None,
) -> QueryAnalyzed:
    """Have Spark analyse a query over the objects that a role may read. Raises `AccessDenied` for
    other objects, and as `analyzed_query` does."""
    analyze = analyzer(executor, name, restricted=not state.access.is_free(role))
    readable = readable_by(state.access, state.catalog, role)
    try:
        return await analyzed_query(sql, readable, analyze, tuple(sorted(conf.items())))
    except UnknownObject as error:
        raise named_denial(state.access, state.catalog, role, error) from None


async def _inlined(state: ControllerState, sql: str) -> str:
    """Return a query with the plain views that it names inlined, working in a thread if it is
    long."""
    catalog = state.catalog
    if len(sql) <= PLAIN_CHARACTERS_MAX:
        return catalog.inlined(sql)[0]
    return (await state.ctx.clock.run_blocking(lambda: catalog.inlined(sql)))[0]


def readable_time(state: ControllerState, inputs: Sequence[CatalogObject]) -> Time:
    """Return the latest time at which all inputs can be read; without inputs, the time of the
    latest write."""
    if not inputs:
        return max(0, state.frontiers.tables_upper - 1)
    upper = min(state.frontiers.upper(entry) for entry in inputs)
    # An input was never computed: the only case in which a query without `as_of` waits.
    if upper == 0:
        return max(state.latest_with_contents(entry) for entry in inputs)
    return max(last_sealed_time(min(upper, EMPTY)), *(entry.as_of for entry in inputs), 0)


def _failed(number: int, error: Exception) -> QueryEnded:
    """Return the message for a run that failed."""
    if isinstance(error, NoContentsYet):
        return QueryEnded(number, awaited=error.table)
    return QueryEnded(number, to_penstock_error(error))


class _Run:
    """One running query, as an effect alongside the controller."""

    def __init__(
        self,
        state: ControllerState,
        executor: ActorAddress[ExecutorMessage],
        scratch: Path,
        number: int,
        running: _Running,
    ) -> None:
        self._state = state
        self._executor = executor
        self._scratch = scratch
        self._number = number
        self._running = running
        self._inputs: list[CatalogObject] = []
        """Inputs of the query; empty until the analysis."""
        self._sql = ""
        """The query with the plain views that it names inlined."""
        clock, settings = state.ctx.clock, state.settings
        self._name = f"query-{number}"
        self._engine = EngineClient(executor, clock, settings, scratch, self._name)

    async def carry_out(self) -> None:
        """Carry out the query, from its text to its last row."""
        schema = await self._analysed()
        made: JobResult | MadeFiles | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(self._held())
                self._running.state = "waiting until sealed"
                made = await self._made(stack, schema)
            # The rows are ready: drop holds and leases before a slow client reads them.
            await self._tell(made, schema)
        finally:
            with anyio.CancelScope(shield=True):
                await self._state.ctx.clock.run_blocking(partial(_remove, made, self._scratch))

    async def _analysed(self) -> TableSchema:
        """Return the query's columns, and record its inputs and its time."""
        state, running, request = self._state, self._running, self._running.request
        # Run exactly this text later, over the inputs found here.
        self._sql = await _inlined(state, request.sql)
        name = f"{self._name}/analyze"
        analyzed = await _analysed(
            state, self._executor, name, self._sql, request.conf, running.role
        )
        self._inputs = [state.catalog.find(name) for name in analyzed.inputs]
        running.rights = held_reads(running.role, self._inputs)
        # A right may have been revoked during the analysis; from here on the controller ends the
        # query.
        for entry in self._inputs:
            state.access.check(running.role, READ, entry.id, entry.name)
        running.names = ", ".join(analyzed.inputs)
        as_of = request.as_of
        if as_of is None and request.latest and self._inputs:
            as_of = max(state.latest_with_contents(entry) for entry in self._inputs)
        running.time = readable_time(state, self._inputs) if as_of is None else as_of
        for name in analyzed.schema.names:
            if name.lower() in SYSTEM_COLUMNS:
                raise QueryRejected(f"column name {name!r} is reserved: give it an alias")
        return analyzed.schema

    @contextlib.asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """Hold the inputs at the query's time while the block runs. Raises `ReadBelowSince`."""
        persist, time = self._state.persist, self._running.time
        shards = [(entry, entry.shard) for entry in self._inputs if entry.shard is not None]
        holder = f"query/{self._state.transient_id()}"
        try:
            for entry, shard in shards:
                # Hold before reading the since: in the other order a compaction could come in
                # between.
                with contextlib.suppress(ReadBelowSince):
                    await persist.set_holds([(shard, holder, time)])
                since = (await persist.state(shard)).since
                if time < since:
                    raise ReadBelowSince(
                        f"{entry.kind} {entry.name} cannot be read at {time}: its history begins "
                        f"at {since}"
                    )
            yield
        finally:
            with anyio.CancelScope(shield=True):
                for _, shard in shards:
                    with contextlib.suppress(PenstockError):
                        await persist.drop_hold(shard, holder)

    async def _made(
        self, stack: contextlib.AsyncExitStack, schema: TableSchema
    ) -> JobResult | MadeFiles:
        request, engine = self._running.request, self._engine
        imports = [shard_import(entry) for entry in self._inputs]
        try:
            contents = await open_contents(
                stack, engine, self._state.persist, imports, self._running.time, (0, 0)
            )
        except DefiniteError as error:
            raise ViewInError(str(error)) from None
        self._running.state = "run by Spark"
        names = [entry.name for entry in self._inputs]
        sql, output = with_unique_columns(self._sql, schema)
        return await engine.run_into_files(
            SelectContents(
                job_id=engine.job_id(0, 0, "select"),
                sql=sql,
                tables=tuple(zip(names, contents, strict=True)),
                output=output,
                conf=tuple(sorted(request.conf.items())),
                into_files=True,
            )
        )

    async def _tell(self, made: JobResult | MadeFiles, schema: TableSchema) -> None:
        """Send the rows piece by piece, each after the client was sent the previous one."""
        settings, running = self._state.settings, self._running
        shape = pa.schema([*schema.result_arrow(), pa.field(DIFF, pa.int64())])
        found = pieces(
            _batches(made, shape), encode_stream_header(shape), settings.inline_bytes_max
        )
        while True:
            piece: ResultPiece = await self._state.ctx.clock.run_blocking(lambda: next(found))
            if len(piece.arrow) > settings.result_bytes_max:
                raise InvalidUsage(row_too_large(settings.result_bytes_max).text)
            # Make a new event before sending: the old one may be set by the previous piece.
            running.taken = anyio.Event()
            message = QueryPiece(self._number, piece.arrow, piece.last)
            self._state.ctx.self.reply(message)
            if not QUERY_ANSWER.crossed(not piece.last):
                return
            await running.taken.wait()


def _batches(made: JobResult | MadeFiles, shape: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows in order, each once; from files one batch at a time."""
    if isinstance(made, MadeFiles):
        for file in made.files:
            with pq.ParquetFile(file.path) as opened_file:
                for batch in opened_file.iter_batches(BATCH_ROWS, use_threads=False):
                    yield _weighted(batch, shape)
        return
    for batch in made.rows.to_batches(max_chunksize=BATCH_ROWS):
        yield _weighted(batch, shape)


def _weighted(batch: pa.RecordBatch, shape: pa.Schema) -> pa.RecordBatch:
    columns = [
        column if column.type == field.type else _as_answered(column, field.type)
        for column, field in zip(batch.columns, list(shape)[:-1], strict=True)
    ]
    # The rows are in the query's order, so equal rows are not combined.
    ones = pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows)
    return pa.RecordBatch.from_arrays([*columns, ones], schema=shape)


def _as_answered(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the engine's values in the type of the answer."""
    if pa.types.is_interval(kind) and not pa.types.is_interval(column.type):
        return intervals_of_months(column)
    return column.cast(kind)


def _remove(made: JobResult | MadeFiles | None, scratch: Path) -> None:
    for file in made.files if isinstance(made, MadeFiles) else ():
        Path(file.path).unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


def with_unique_columns(sql: str, schema: TableSchema) -> tuple[str, TableSchema]:
    """Return a query whose columns have unique names, which files require, and its columns; the
    same query if its names are unique already.

    >>> one = TableColumn("a", "int")
    >>> sql, schema = with_unique_columns("select a, a from t", TableSchema((one, one)))
    >>> sql.splitlines()
    ['SELECT * FROM (', 'select a, a from t', ') AS q (c0, c1)']
    >>> schema.names
    ('c0', 'c1')
    """
    if len({name.lower() for name in schema.names}) == len(schema.columns):
        return sql, schema
    names = [f"c{number}" for number in range(len(schema.columns))]
    # On separate lines, since the query may end with a comment.
    text = f"SELECT * FROM (\n{sql}\n) AS q ({', '.join(names)})"
    columns = zip(schema.columns, names, strict=True)
    return text, TableSchema(tuple(TableColumn(n, c.type, c.nullable) for c, n in columns))
