"""Feeds that write the demo's flights: directly in SQL, or through a PostgreSQL database.

`SqlFeed` creates tables in the service and writes to them with the statements that the demo prints.
`FromPostgres` starts a PostgreSQL server, writes there (INSERT and UPDATE, one transaction per tick
of the stream), and lets the service ingest the tables with a source of kind postgres.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import anyio.to_thread
import pyarrow as pa

from actors.doors.client.client import Client, concatenate_pieces
from actors.model.pgwire.quoting import quote_literal, quote_name
from actors.model.plan.schema import TIME
from actors.runtime.errors import InvalidUsage
from actors.runtime.progress import Time
from actors.testing.postgres_server import NoPostgres, PostgresServer
from penstock_flights import statements as texts
from penstock_flights.flights import TABLES, FlightDelta, FlightTransaction
from penstock_flights.play import ChangeLog, DemoView, pace, rows_of
from penstock_flights.script import DemoScript

if TYPE_CHECKING:
    from actors.connectors.sources.postgres_wire import PostgresConnection

PLAYED: Final = "played"
SOURCE: Final = "airline"
_TYPES: Final = {
    "string": "text",
    "bigint": "bigint",
    "double": "double precision",
    "timestamp": "timestamp with time zone",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_POLL_MS: Final = 1_000


class DemoFeed(Protocol):
    """A way to write the flights."""

    log: ChangeLog
    """The transactions that the service has."""
    name: str
    """Name of the feed, for display."""

    async def begin(self, script: DemoScript, client: Client, opening: FlightTransaction) -> None:
        """Create the tables with their initial rows, and wait until the service has them."""
        ...

    async def play(
        self,
        stream: Sequence[FlightTransaction],
        speed: float | None,
        written: Callable[[FlightTransaction], None],
    ) -> None:
        """Write the stream at the pace of `play.pace`, and call `written` with each durable
        transaction."""
        ...

    async def settle(self) -> None:
        """Wait until the service has all written transactions."""
        ...

    async def answer(self, view: DemoView, schema: pa.Schema) -> pa.Table | None:
        """Return the current result of a view's query in the external database; None if the feed
        has no such database."""
        ...


class SqlFeed:
    """Writes with SQL statements to the service; see `DemoFeed`."""

    name = "SQL"

    def __init__(self) -> None:
        self.log = ChangeLog()
        self._script: DemoScript | None = None

    async def begin(self, script: DemoScript, client: Client, opening: FlightTransaction) -> None:
        """See `DemoFeed`."""
        self._script = script
        for name in TABLES:
            await script.run(texts.create_table(name))
        # One transaction, so that all initial rows have the same timestamp in the log.
        await script.run("BEGIN")
        for delta in opening.deltas:
            assert delta.insert is not None, "the opening only inserts"
            await script.copy_in(texts.copy_in(delta.table), texts.copy_rows(delta.insert))
        await script.run("COMMIT")
        await script.run(texts.INDEX)
        result = await script.run(texts.WRITTEN_AT)
        self.log.add(_time_of(result.rows), opening.deltas)

    async def play(
        self,
        stream: Sequence[FlightTransaction],
        speed: float | None,
        written: Callable[[FlightTransaction], None],
    ) -> None:
        """See `DemoFeed`."""
        await pace(self._write, stream, speed, written)

    async def _write(self, transaction: FlightTransaction) -> None:
        assert self._script is not None, "begun"
        statements = [*texts.transaction_statements(transaction), texts.WRITTEN_AT]
        # A single text needs only one round trip.
        *_, told = await self._script.door.query("; ".join(statements))
        self.log.add(_time_of(told.rows), transaction.deltas)

    async def settle(self) -> None:
        """See `DemoFeed`. Does nothing, because each write waits until it is durable."""

    async def answer(self, view: DemoView, schema: pa.Schema) -> pa.Table | None:
        """See `DemoFeed`."""
        return None


def _time_of(rows: Sequence[Sequence[str | None]]) -> Time:
    ((text,),) = rows
    return int(text or 0)


class FromPostgres:
    """Writes through a database; see `DemoFeed`. Created with `from_postgres`."""

    name = "PostgreSQL"

    def __init__(self, server: PostgresServer, wire: PostgresConnection) -> None:
        self.log = ChangeLog()
        self._server = server
        self._wire = wire
        self._played: list[FlightTransaction] = []
        """Transactions written to the database."""
        self._arrived = 0
        """The number of them that the service has."""
        self._moved = anyio.Event()
        """Set, and replaced, when `_arrived` grows."""
        self._group: anyio.abc.TaskGroup | None = None
        """Runs `_follow` while `running` is active."""

    async def begin(self, script: DemoScript, client: Client, opening: FlightTransaction) -> None:
        """See `DemoFeed`. The initial rows are written before the service takes its snapshot."""
        assert self._group is not None, "running"
        for statement in definitions():
            await self._wire.query(statement)
        await self._write(opening)
        server = self._server
        options = {"host": str(server.folder), "port": str(server.port)}
        options |= {"user": server.user, "poll_ms": str(_POLL_MS)}
        tables = {f"public.{name}": name for name in (*TABLES, PLAYED)}
        await script.run(texts.create_source(SOURCE, options, tables))
        self._group.start_soon(self._follow, client)
        await self.settle()

    async def _write(self, transaction: FlightTransaction) -> None:
        self._played.append(transaction)
        await self._wire.query(statements(len(self._played), transaction.deltas))

    async def play(
        self,
        stream: Sequence[FlightTransaction],
        speed: float | None,
        written: Callable[[FlightTransaction], None],
    ) -> None:
        """See `DemoFeed`."""
        await pace(self._write, stream, speed, written)

    async def _follow(self, client: Client) -> None:
        """Log the time of each transaction in the service."""
        # Each transaction inserts its number into ``played``, which gets the same timestamp as the
        # other tables of the transaction.
        async for change in concatenate_pieces(client.subscribe(PLAYED)):
            if change.table is None or not change.table.num_rows:
                continue
            names = (TIME, "number")
            found = sorted(zip(*(change.table[name].to_pylist() for name in names), strict=True))
            for time in sorted({time for time, _ in found}):
                # Transactions that share a timestamp get one entry in the log.
                numbers = [number for at, number in found if at == time]
                together = [self._played[number - 1] for number in numbers]
                deltas = [delta for transaction in together for delta in transaction.deltas]
                self.log.add(time, deltas, len(numbers))
                self._arrived += len(numbers)
            self._moved.set()
            self._moved = anyio.Event()

    async def settle(self) -> None:
        """See `DemoFeed`."""
        while self._arrived < len(self._played):
            await self._moved.wait()

    async def answer(self, view: DemoView, schema: pa.Schema) -> pa.Table | None:
        """See `DemoFeed`."""
        rows = await self._wire.query(as_postgres_writes(view.sql))
        read: dict[pa.DataType, Callable[[str], Any]] = {pa.int64(): int, pa.float64(): float}
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        arrays = [
            pa.array(
                [None if text is None else read.get(field.type, str)(text) for text in column],
                field.type,
            )
            for field, column in zip(schema, columns, strict=True)
        ]
        return pa.table(arrays, schema=schema)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FromPostgres]:
        """Follow the service while the block runs. If following fails, the block is canceled."""
        async with anyio.create_task_group() as group:
            self._group = group
            yield self
            group.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def from_postgres() -> AsyncIterator[FromPostgres]:
    """Run a temporary server while the block runs, at most until this process ends. Raises
    `InvalidUsage` if PostgreSQL or psycopg is not installed, or the server does not start."""
    try:
        # Imported here: psycopg is an optional dependency.
        from actors.connectors.sources.postgres_wire import PostgresConnection
    except ImportError as error:
        raise InvalidUsage(
            f"flights from PostgreSQL need psycopg ({error}): "
            "pip install 'penstock-views[postgres]'"
        ) from None
    with contextlib.ExitStack() as stack:
        try:
            server = await anyio.to_thread.run_sync(lambda: stack.enter_context(_server()))
        except NoPostgres as error:
            raise InvalidUsage(f"flights from PostgreSQL: {error}") from None
        parameters = {"host": str(server.folder), "port": str(server.port), "user": server.user}
        wire = await PostgresConnection.connect(parameters | {"dbname": "postgres"})
        try:
            yield FromPostgres(server, wire)
        finally:
            wire.close()


@contextlib.contextmanager
def _server() -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
    try:
        server = PostgresServer(folder, {"wal_level": "logical"})
        # With a guard, the server also ends when this process is killed.
        with server.guarded():
            server.start()
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- SQL ---------------------------------------------------------------------------------------


def definitions() -> list[str]:
    """Return the statements that create the tables."""
    made = []
    for name, (columns, key) in TABLES.items():
        parts = [f"{quote_name(column)} {_TYPES[type_]}" for column, type_ in columns.items()]
        if key:
            parts.append(f"PRIMARY KEY ({', '.join(map(quote_name, key))})")
        made.append(f"CREATE TABLE {quote_name(name)} ({', '.join(parts)})")
        if not key:
            # Without a key, the whole old row is needed to identify a changed row.
            made.append(f"ALTER TABLE {quote_name(name)} REPLICA IDENTITY FULL")
    return [*made, f"CREATE TABLE {PLAYED} (number bigint PRIMARY KEY)"]


def statements(number: int, deltas: Sequence[FlightDelta]) -> str:
    """Format a transaction as SQL: it inserts its number, and makes its changes."""
    parts = [f"INSERT INTO {PLAYED} VALUES ({number})"]
    for delta in deltas:
        if delta.insert is not None:
            parts.append(f"INSERT INTO {quote_name(delta.table)} {_values(delta, delta.insert)}")
        if delta.update is not None:
            parts.append(_update(delta, delta.update))
    return "; ".join(["BEGIN", *parts, "COMMIT"])


def _update(delta: FlightDelta, rows: pa.Table) -> str:
    columns, key = TABLES[delta.table]
    names = rows.column_names
    sets = [f"{quote_name(name)} = new.{quote_name(name)}" for name in names if name not in key]
    same = [f"old.{quote_name(name)} = new.{quote_name(name)}" for name in key]
    # With casts, because a column of only NULLs would have the type text.
    typed = [f"{quote_name(name)}::{_TYPES[columns[name]]}" for name in names]
    listed = ", ".join(map(quote_name, names))
    return (
        f"UPDATE {quote_name(delta.table)} AS old SET {', '.join(sets)} FROM "
        f"(SELECT {', '.join(typed)} FROM ({_values(delta, rows)}) AS given ({listed})) AS new "
        f"WHERE {' AND '.join(same)}"
    )


def _values(delta: FlightDelta, rows: pa.Table) -> str:
    types = TABLES[delta.table][0]
    made = (
        ", ".join(_literal(value, types[name]) for name, value in row.items())
        for row in rows_of(rows)
    )
    return "VALUES " + ", ".join(f"({row})" for row in made)


def _literal(value: Any, type_: str) -> str:
    if value is None:
        return "NULL"
    if type_ == "timestamp":
        value = (_EPOCH + timedelta(microseconds=value)).isoformat()
    return str(value) if type_ == "bigint" else quote_literal(str(value))


def as_postgres_writes(sql: str) -> str:
    """Convert a view's query to PostgreSQL, where dividing integers would result in an integer."""
    return sql.replace("/ count(*)", "/ count(*)::double precision")
