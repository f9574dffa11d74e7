"""What tests of the PostgreSQL source share: databases of their own, and a driver in place of the
ingest task that applies what it is given to plain counters.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
from psycopg import sql

from actors.connectors.ingest.contents import joined, keys_to_find, resolve
from actors.connectors.sources.postgres import PostgresSource
from actors.connectors.sources.postgres_config import PostgresConfig
from actors.connectors.sources.source import (
    ExportFailed,
    ExportTruncated,
    Given,
    PositionMark,
    SourceExport,
    SourceIdle,
    SourceRows,
    SourceUnreachable,
    SourceUpserts,
)
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.testing.postgres_server import PostgresServer

Row = tuple[Any, ...]


class House:
    """A database of one test's own, and sources that read it."""

    def __init__(self, server: PostgresServer, database: str, admin: Any) -> None:
        self.server = server
        self.database = database
        self.sql: psycopg.AsyncConnection[Any] = admin
        self.sources: list[PostgresSource] = []

    def config(self, **options: Any) -> PostgresConfig:
        """Of a source that reads it."""
        known = {
            "host": str(self.server.folder),
            "port": self.server.port,
            "user": "bench",
            "database": self.database,
            "poll_ms": 200,
            **options,
        }
        return PostgresConfig(**known)

    def source(self, **options: Any) -> PostgresSource:
        """A fresh one; it is closed with the house."""
        made = PostgresSource(self.config(**options), self.database)
        self.sources.append(made)
        return made

    async def opened(
        self, exports: Mapping[str, Sequence[str]], **options: Any
    ) -> tuple[PostgresSource, Driver]:
        """A fresh source that was opened, and its driver."""
        source = self.source(**options)
        driver = Driver(await source.describe(exports))
        await driver.open(source)
        return source, driver

    async def filled(
        self, exports: Mapping[str, Sequence[str]], **options: Any
    ) -> tuple[PostgresSource, Driver]:
        """As `opened`, when the source has given its first contents."""
        source, driver = await self.opened(exports, **options)
        while driver.position is None:
            await driver.step(source)
        return source, driver

    async def run(self, statement: str, *values: Any) -> list[Row]:
        """Runs SQL as the superuser; rows, if it gives any."""
        cursor = await self.sql.execute(statement.encode(), values or None)
        return await cursor.fetchall() if cursor.description else []

    async def contents(self, export: SourceExport) -> Counter[Row]:
        """A table's, as PostgreSQL has them."""
        names = sql.SQL(", ").join(sql.Identifier(name) for name in export.schema.names)
        schema, table = export.name.split(".")
        cursor = await self.sql.execute(
            sql.SQL("SELECT {} FROM {}").format(names, sql.Identifier(schema, table))
        )
        return Counter(await cursor.fetchall())

    async def reconnect(self) -> None:
        """A new connection of the superuser's, after the server was restarted."""
        with contextlib.suppress(psycopg.Error):
            await self.sql.close()
        self.sql = await connection(self.server, self.database)


async def connection(server: PostgresServer, database: str) -> psycopg.AsyncConnection[Any]:
    """Of the superuser's, every statement a transaction."""
    return await psycopg.AsyncConnection.connect(server.conninfo(dbname=database), autocommit=True)


@contextlib.asynccontextmanager
async def house(server: PostgresServer, database: str) -> AsyncIterator[House]:
    """Makes a database, and drops it with its slots."""
    async with await connection(server, "postgres") as admin:
        await admin.execute(f"CREATE DATABASE {database}".encode())
    made = House(server, database, await connection(server, database))
    try:
        yield made
    finally:
        for source in made.sources:
            await source.close()
        await made.sql.close()
        async with await connection(server, "postgres") as admin:
            await _drop(admin, database)


async def _drop(admin: psycopg.AsyncConnection[Any], database: str) -> None:
    """A slot is free some time after its reader went."""
    slots = "FROM pg_replication_slots WHERE database = %s"
    while await (await admin.execute(f"SELECT 1 {slots}".encode(), (database,))).fetchall():
        for action, state in (
            ("pg_terminate_backend(active_pid, 10000)", "IS NOT NULL"),
            ("pg_drop_replication_slot(slot_name)", "IS NULL"),
        ):
            statement = f"SELECT {action} {slots} AND active_pid {state}"
            with contextlib.suppress(psycopg.errors.ObjectInUse):
                await admin.execute(statement.encode(), (database,))
    await admin.execute(f"DROP DATABASE {database} WITH (FORCE)".encode())


class Driver:
    """Stands for the ingest task. What it holds is what came before the last mark."""

    def __init__(self, exports: Sequence[SourceExport]) -> None:
        self.exports = {export.name: export for export in exports}
        self.contents: dict[str, Counter[Row]] = {name: Counter() for name in self.exports}
        self.position: str | None = None
        self.failed: dict[str, ExportFailed] = {}
        self.new: set[str] = set()
        """Exports that were added and are not filled yet."""
        self.marks: list[PositionMark] = []
        self.given: list[Given] = []
        """Since the last mark."""

    def add(self, export: SourceExport) -> None:
        """One more, to be filled."""
        self.exports[export.name] = export
        self.contents[export.name] = Counter()
        self.new.add(export.name)

    def widen(self, name: str, columns: Sequence[TableColumn]) -> None:
        """Give an export further columns: rows that are there have NULL."""
        export = self.exports[name]
        schema = TableSchema((*export.schema.columns, *columns), export.schema.key)
        self.exports[name] = msgspec.structs.replace(export, schema=schema)
        more = (None,) * len(columns)
        self.contents[name] = Counter(
            {(*row, *more): count for row, count in self.contents[name].items()}
        )

    async def open(self, source: PostgresSource) -> None:
        """At the position that is durable here; tried again while the server wants that."""
        live = [
            msgspec.structs.replace(each, is_new=each.is_new or name in self.new)
            for name, each in self.exports.items()
            if name not in self.failed
        ]
        self.given = []
        while True:
            try:
                await source.open(live, self.position)
                return
            except SourceUnreachable as error:
                await source.close()
                if "is in use by process" not in str(error):
                    raise

    async def step(self, source: PostgresSource) -> Given:
        """Takes one thing."""
        given = await source.next()
        if isinstance(given, PositionMark):
            self._mark(given)
            await source.taken(given.position)
        elif not isinstance(given, SourceIdle):
            self.given.append(given)
        return given

    async def until(self, source: PostgresSource, export: str, row: Row) -> None:
        """Goes on until a row stands in an export, at a mark."""
        while not self.contents[export][row]:
            await self.step(source)

    async def until_failed(self, source: PostgresSource, export: str) -> ExportFailed:
        """Goes on until an export has failed."""
        while export not in self.failed:
            given = await self.step(source)
            if isinstance(given, ExportFailed):
                self.failed[given.export] = given
        return self.failed[export]

    def _mark(self, mark: PositionMark) -> None:
        self.failed |= {each.export: each for each in self.given if isinstance(each, ExportFailed)}
        self.new -= set(mark.filled)
        for given in self.given:
            if getattr(given, "export", "") in self.failed:
                continue  # nothing of it counts since the last mark
            match given:
                case SourceRows(export, updates):
                    self._apply(export, updates)
                case SourceUpserts(export):
                    self._upsert(given)
                case ExportTruncated(export):
                    self.contents[export].clear()
        for name, counter in self.contents.items():
            assert min(counter.values(), default=0) >= 0, (name, counter)
            self.contents[name] = +counter
        self.given = []
        self.marks.append(mark)
        self.position = mark.position

    def _apply(self, export: str, updates: pa.Table) -> None:
        schema = self.exports[export].schema
        assert updates.schema == pa.schema([*schema.arrow(), pa.field(DIFF, pa.int64())])
        rows = zip(*(updates[name].to_pylist() for name in schema.names), strict=True)
        for row, diff in zip(rows, updates[DIFF].to_pylist(), strict=True):
            self.contents[export][row] += diff

    def _upsert(self, given: SourceUpserts) -> None:
        schema = self.exports[given.export].schema
        changes = joined(schema, [given.changes])
        places = [schema.names.index(name) for name in schema.key]
        wanted = {tuple(key.values()) for key in keys_to_find(schema, changes).to_pylist()}
        here = [
            dict(zip(schema.names, row, strict=True))
            for row, count in self.contents[given.export].items()
            if count and tuple(row[place] for place in places) in wanted
        ]
        found = pa.Table.from_pylist(here, schema.arrow())
        self._apply(given.export, resolve(schema, changes, found))


def lsn(position: str) -> str:
    """Of a position."""
    text: str = msgspec.json.decode(position)["lsn"]
    return text
