"""Random changes of rows and of tables against a real PostgreSQL, drawn from a seed.

Every text says in which column it was put (``a:17``), so a row that PostgreSQL never had shows
itself at whichever mark it appears; and at each quiet point what is held equals what the tables
hold, unless the table has ended with an error that says why. A table that ended is made anew there
where it must, and added again. Now and then a table is given a column that it has only there.
"""

from __future__ import annotations

import random
from collections import Counter

import anyio
import msgspec
import psycopg
from postgres_house import Driver, House  # type: ignore[import-not-found]

from actors.connectors.sources.postgres import PostgresSource
from actors.connectors.sources.source import ExportFailed, PositionMark, SourceUnreachable
from actors.runtime.errors import InvalidUsage

TABLES = {
    "plain": "CREATE TABLE plain (id int PRIMARY KEY, a text, b text, n bigint, m mood)",
    "whole": "CREATE TABLE whole (id int, a text, b text, n bigint, m mood);"
    " ALTER TABLE whole REPLICA IDENTITY FULL",
    "indexed": "CREATE TABLE indexed (a text, k int NOT NULL, id int, b text, n bigint, m mood);"
    " CREATE UNIQUE INDEX ON indexed (k); ALTER TABLE indexed REPLICA IDENTITY USING INDEX"
    " indexed_k_idx",
    "parts": "CREATE TABLE parts (id int PRIMARY KEY, a text, b text, n bigint, m mood)"
    " PARTITION BY RANGE (id); CREATE TABLE parts_0 PARTITION OF parts FOR VALUES FROM (0) TO (20);"
    " CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (20) TO (40)",
}
TRIED = (psycopg.errors.Error,)
"""Statements that PostgreSQL refuses count for nothing: a partition that is not there, say."""


class Fuzz:
    """One run. `counts` says what came of it: marks, quiet points, refills, errors by text."""

    def __init__(self, db: House, seed: int) -> None:
        self._db = db
        self._draw = random.Random(seed)
        self._number = 0
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []

    async def run(self, rounds: int) -> None:
        """Play so many quiet points. Raises AssertionError."""
        db = self._db
        # What waits for a lock of a copy that nobody goes on with would wait for ever.
        await db.run("SET lock_timeout = '200ms'")
        await db.run("CREATE TYPE mood AS ENUM ('sad', 'glad')")
        await db.run("CREATE TABLE finish (n int PRIMARY KEY)")
        for made in TABLES.values():
            await db.run(made)
        for _ in range(10):
            await self._rows()
        self._source: PostgresSource = db.source()
        self._driver = Driver(
            await self._source.describe({**dict.fromkeys(TABLES, ()), "finish": ()})
        )
        await self._driver.open(self._source)
        for _ in range(rounds):
            for _ in range(self._draw.randrange(1, 8)):
                await (self._rows() if self._draw.random() < 0.6 else self._table())
                # expires: where nothing comes; asking is given up anywhere
                with anyio.move_on_after(0.05):
                    for _ in range(self._draw.choice((0, 0, 1, 3))):
                        await self._step()
            if self._draw.random() < 0.6:
                await self._grow()
            if self._draw.random() < 0.2:
                await self._reopen()
            await self._quiet()
            await self._again()

    # -- there -----------------------------------------------------------------------------------

    async def _do(self, *statements: str) -> None:
        """Run statements: as one transaction or one by one; refused ones count for nothing."""
        whole = len(statements) > 1 and self._draw.random() < 0.5
        if whole:
            statements = (f"BEGIN; {'; '.join(statements)}; COMMIT",)
        for statement in statements:
            try:
                await self._db.run(statement)
                self.log.append(statement)
            except TRIED as error:
                self.log.append(f"-- {statement}: {type(error).__name__}")
                if whole:
                    await self._db.run("ROLLBACK")

    def _dml(self, table: str) -> str:
        self._number += 1
        id_, n = self._draw.randrange(40), self._number
        mood = self._draw.choice(("'sad'", "'glad'", "NULL"))
        key, more = ("k", ", id") if table == "indexed" else ("id", "")
        value = f"{id_}{', 1' if more else ''}, 'a:{n}', 'b:{n}', {n}, {mood}"
        return self._draw.choice(
            [
                f"INSERT INTO {table} ({key}{more}, a, b, n, m) VALUES ({value})",
                f"INSERT INTO {table} ({key}{more}, a, b, n, m) VALUES ({value})",
                f"UPDATE {table} SET a = 'a:{n}' WHERE {key} % 3 = {n % 3}",
                f"UPDATE {table} SET b = 'b:{n}', m = {mood} WHERE {key} = {id_}",
                f"UPDATE {table} SET {key} = {key} + 1 WHERE {key} = {id_}",
                f"DELETE FROM {table} WHERE {key} % 5 = {n % 5}",
                f"UPDATE {table} SET x = {n} WHERE {key} % 3 = {n % 3}",
                f"UPDATE {table} SET y = 'y:{n}', a = 'a:{n}' WHERE {key} % 4 = {n % 4}",
            ]
        )

    async def _rows(self) -> None:
        table = self._draw.choice(list(TABLES))
        await self._do(*(self._dml(table) for _ in range(self._draw.choice((1, 2, 4)))))
        if self._draw.random() < 0.05:
            await self._do(f"TRUNCATE {table}")

    async def _table(self) -> None:
        table = self._draw.choice([*TABLES, "parts"])
        change = self._draw.choice(
            _PARTS if table == "parts" and self._draw.random() < 0.7 else _DDL
        )
        statements: list[str] = []
        for statement in change:
            text = statement.replace("{t}", table)
            text = text.replace("{anew}", TABLES[table])
            text = text.replace("{publication}", f"penstock_{self._db.database}")
            if text.startswith("VACUUM"):
                await self._do(text)
                continue
            statements.append(text)
            if self._draw.random() < 0.4:
                statements.append(self._dml(table))
        await self._do(*statements)

    # -- here ------------------------------------------------------------------------------------

    async def _step(self) -> None:
        """Take one thing, and look at what is held where it is a mark."""
        try:
            given = await self._driver.step(self._source)
        except SourceUnreachable as error:
            if "refilled" not in error.hint and "while it started" not in str(error):
                raise AssertionError((str(error), self.log)) from None
            self.counts["refills"] += "refilled" in error.hint
            with anyio.CancelScope(shield=True):
                await self._reopen()
            return
        if isinstance(given, PositionMark):
            self.counts["marks"] += 1
            self._check_columns()

    def _check_columns(self) -> None:
        for name, export in self._driver.exports.items():
            if name in self._driver.failed or name == "public.finish":
                continue
            places = [
                (at, column) for at, column in enumerate(export.schema.names) if column in "ab"
            ]
            for row in self._driver.contents[name]:
                for at, column in places:
                    assert row[at] is None or row[at].startswith(f"{column}:"), (
                        name,
                        row,
                        self.log,
                    )

    async def _reopen(self) -> None:
        await self._source.close()
        self._source = self._db.source()
        await self._driver.open(self._source)

    async def _grow(self) -> None:
        """Give a table one of the columns that only PostgreSQL has; one is added there now and
        then."""
        name = self._draw.choice([each for each in self._driver.exports if "finish" not in each])
        if self._draw.random() < 0.7:
            table, number = name.removeprefix("public."), self._number
            default = self._draw.choice(("", f" DEFAULT {number}"))
            await self._do(f"ALTER TABLE {table} ADD COLUMN z{number} int{default}")
            await self._do(f"UPDATE {table} SET z{number} = {number} WHERE n % 2 = 0")
        export = self._driver.exports[name]
        if name in self._driver.failed:
            return
        asked = self._db.source()
        try:
            (there,) = await asked.describe({name: ()})
            known = set(export.schema.names)
            more = [each for each in there.schema.columns if each.name not in known]
            if not more:
                return
            found = await asked.describe_added(export, [self._draw.choice(more)])
        except (InvalidUsage, SourceUnreachable):
            return  # it was altered there, so that it cannot be read as it is
        self.counts["grown"] += 1
        self.log.append(f"-- grown: {name} by {found}")
        self._driver.widen(name, found)
        await self._reopen()

    async def _quiet(self) -> None:
        """Let all that was committed come, and compare."""
        self._number += 1
        await self._db.run(f"INSERT INTO finish VALUES ({self._number})")
        while not self._driver.contents["public.finish"][(self._number,)]:
            assert "public.finish" not in self._driver.failed, self._driver.failed
            await self._step()
        for name, export in self._driver.exports.items():
            if name in self._driver.failed:
                continue
            try:
                there = await self._db.contents(export)
            except TRIED as error:
                raise AssertionError((name, str(error), self.log)) from None
            assert self._driver.contents[name] == there, (name, self.log)
            self.counts["quiet"] += 1

    async def _again(self) -> None:
        """Add again what has ended, as its error says."""
        failed: dict[str, ExportFailed] = self._driver.failed
        for name, error in list(failed.items()):
            assert error.error, name
            self.counts[error.error] += 1
            table = name.removeprefix("public.")
            try:
                # Values go by the names that the columns have now.
                await self._db.run(f"UPDATE {table} SET a = 'a:now', b = 'b:now'")
                (export,) = await self._db.source().describe({name: ()})
            except (*TRIED, InvalidUsage):
                await self._db.run(f"DROP TABLE IF EXISTS {table}, {table}_x CASCADE")
                if table == "parts":
                    await self._db.run("DROP TABLE IF EXISTS parts_0, parts_1, parts_2")
                await self._db.run(TABLES[table])
                (export,) = await self._db.source().describe({name: ()})
            self._driver.add(msgspec.structs.replace(export, is_new=True))
            del failed[name]
            await self._reopen()
            self._driver.exports[name] = export


_SWAP = (
    "ALTER TABLE {t} RENAME a TO c",
    "ALTER TABLE {t} RENAME b TO a",
    "ALTER TABLE {t} RENAME c TO b",
)
_DDL: list[tuple[str, ...]] = [
    _SWAP,
    (*_SWAP, *_SWAP),
    ("ALTER TABLE {t} DROP COLUMN b", "ALTER TABLE {t} ADD COLUMN b text"),
    ("ALTER TABLE {t} RENAME n TO o", "ALTER TABLE {t} RENAME o TO n"),
    ("ALTER TABLE {t} RENAME b TO c",),
    ("ALTER TABLE {t} ADD COLUMN x int DEFAULT 7",),
    ("ALTER TABLE {t} DROP COLUMN x",),
    ("ALTER TABLE {t} ADD COLUMN y text",),
    ("ALTER TABLE {t} ADD COLUMN x int", "ALTER TABLE {t} ADD COLUMN y text DEFAULT 'y'"),
    ("ALTER TABLE {t} DROP COLUMN y",),
    ("ALTER TABLE {t} ALTER b SET DEFAULT 'b:0'",),
    ("ALTER TABLE {t} ALTER a SET STATISTICS 50",),
    ("ALTER TABLE {t} ALTER a TYPE varchar(99)",),
    ("ALTER TABLE {t} ALTER a TYPE text",),
    ("ALTER TABLE {t} ALTER a TYPE text USING 'a:' || length(a)",),
    ("ALTER TABLE {t} ALTER n TYPE int", "ALTER TABLE {t} ALTER n TYPE bigint USING n + 1"),
    ("VACUUM FULL {t}",),
    ("ANALYZE {t}",),
    ("ALTER TABLE {t} REPLICA IDENTITY FULL",),
    ("ALTER TABLE {t} REPLICA IDENTITY DEFAULT",),
    ("DROP TABLE {t}", "{anew}"),
    ("ALTER TABLE {t} RENAME TO {t}_x", "ALTER TABLE {t}_x RENAME TO {t}"),
    (
        "ALTER PUBLICATION {publication} DROP TABLE {t}",
        "ALTER PUBLICATION {publication} ADD TABLE {t}",
    ),
    (
        "ALTER TYPE mood RENAME VALUE 'glad' TO 'happy'",
        "ALTER TYPE mood RENAME VALUE 'happy' TO 'glad'",
    ),
    ("ALTER TYPE mood ADD VALUE IF NOT EXISTS 'numb'",),
    ("TRUNCATE {t}",),
]
_PARTS: list[tuple[str, ...]] = [
    ("TRUNCATE parts_0",),
    ("ALTER TABLE parts DETACH PARTITION parts_1",),
    ("UPDATE parts_1 SET a = 'a:out' WHERE id < 30",),
    ("ALTER TABLE parts ATTACH PARTITION parts_1 FOR VALUES FROM (20) TO (40)",),
    ("DROP TABLE parts_0",),
    ("CREATE TABLE parts_0 PARTITION OF parts FOR VALUES FROM (0) TO (20)",),
    ("CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (40) TO (60)",),
    ("DROP TABLE parts_2",),
    (
        "CREATE TABLE parts_2 (LIKE parts INCLUDING ALL)",
        "INSERT INTO parts_2 (id, a, b) VALUES (41, 'a:in', 'b:in')",
        "ALTER TABLE parts ATTACH PARTITION parts_2 FOR VALUES FROM (40) TO (60)",
    ),
    ("ALTER TABLE parts_0 REPLICA IDENTITY FULL",),
    ("TRUNCATE parts",),
]
