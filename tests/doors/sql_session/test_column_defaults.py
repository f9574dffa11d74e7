"""Defaults of columns: statements against a plain model, through two sessions that do not hear of
each other, and what DDL refuses."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from decimal import Decimal
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from actors.doors.client.client import Client, TableWrite
from actors.doors.sql_session import SqlSession
from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.tokens import SqlDialect
from actors.model.plan.column_defaults import ColumnDefault, constant_default, defaults_digest
from actors.model.protocol.api import AlterObject
from actors.runtime.errors import DefinitionChanged, InvalidUsage, QueryRejected, TypeMismatch
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine

KINDS = {"a": "INT", "s": "STRING", "d": "DECIMAL(6,2)", "b": "BOOLEAN", "t": "DATE"}
VALUES: dict[str, list[tuple[str, Any]]] = {
    "a": [("7", 7), ("-3", -3), ("NULL", None)],
    "s": [("'new'", "new"), ("''", ""), ("'it''s'", "it's"), ("NULL", None)],
    "d": [("1.5", Decimal("1.50")), ("12", Decimal("12.00")), ("-0.25", Decimal("-0.25"))],
    "b": [("TRUE", True), ("false", False), ("NULL", None)],
    "t": [("DATE '2020-01-02'", date(2020, 1, 2)), ("DATE '1999-12-31'", date(1999, 12, 31))],
}
"""Literals of each column, and what they are; the quoting is that of both dialects."""


@asynccontextmanager
async def opened(
    folder: Path, **changes: Any
) -> AsyncIterator[tuple[Client, SqlSession, SqlSession]]:
    """A client, and a session of each dialect with a client of its own."""
    settings = Settings(state_dir=str(folder), listen="127.0.0.1:0", **changes)
    async with (
        Service(settings, engine=in_memory_engine()) as service,
        await Client.in_process(service) as client,
        await Client.in_process(service) as second,
    ):
        spark = SqlSession(client, settings, SqlDialect.SPARK)
        postgres = SqlSession(second, settings, SqlDialect.POSTGRES)
        yield client, spark, postgres
        await spark.close()
        await postgres.close()


async def run(session: SqlSession, text: str) -> list[dict[str, Any]]:
    """Carry out a statement; return the rows of its result."""
    result = await session.execute(parse_statement(text, session.context.dialect))
    rows: list[dict[str, Any]] = []
    if result.batches is not None:
        async for batch in result.batches:
            rows += batch.to_pylist()
    return rows


class Model:
    """The rows and defaults that there should be, and statements drawn at random."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.defaults: dict[str, Any] = {}
        self.rows: dict[int, dict[str, Any]] = {}
        self.next_id = 0

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def drawn(self, column: str) -> tuple[str, Any]:
        """A literal or DEFAULT, and its value."""
        if self.dice.random() < 0.4:
            return "DEFAULT", self.defaults.get(column)
        return self.dice.choice(VALUES[column])

    def some(self) -> list[str]:
        return self.dice.sample(list(KINDS), self.dice.randrange(len(KINDS) + 1))

    def put(self, id_: int, given: dict[str, Any]) -> dict[str, Any]:
        row: dict[str, Any] = {"id": id_}
        for name in KINDS:
            row[name] = given[name] if name in given else self.defaults.get(name)
        self.rows[id_] = row
        return row

    def alter(self) -> str:
        column = self.dice.choice(list(KINDS))
        if self.dice.random() < 0.3:
            self.defaults.pop(column, None)
            return f"ALTER TABLE t ALTER COLUMN {column} DROP DEFAULT"
        text, value = self.dice.choice(VALUES[column])
        self.defaults[column] = value
        return f"ALTER TABLE t ALTER {column} SET DEFAULT {text}"

    def insert(self) -> tuple[str, list[dict[str, Any]]]:
        columns = self.some()
        rows, made = [], []
        for _ in range(self.dice.randrange(1, 4)):
            id_ = self.new_id()
            values = {name: self.drawn(name) for name in columns}
            rows.append(f"({', '.join([str(id_), *(text for text, _ in values.values())])})")
            made.append(self.put(id_, {name: value for name, (_, value) in values.items()}))
        return f"INSERT INTO t ({', '.join(['id', *columns])}) VALUES {', '.join(rows)}", made

    def select(self) -> str:
        """A query's rows, which have some columns of a row that is there."""
        columns = self.some()
        old, id_ = self.dice.choice(list(self.rows)), self.new_id()
        self.put(id_, {name: self.rows[old][name] for name in columns})
        picked = ", ".join([f"{id_} AS id", *columns])
        names = ", ".join(["id", *columns])
        return f"INSERT INTO t ({names}) SELECT {picked} FROM t WHERE id = {old}"

    def update(self) -> str:
        columns = self.some() or ["a"]
        id_ = self.dice.choice(list(self.rows))
        values = {name: self.drawn(name) for name in columns}
        self.put(id_, self.rows[id_] | {name: value for name, (_, value) in values.items()})
        sets = ", ".join(f"{name} = {text}" for name, (text, _) in values.items())
        return f"UPDATE t SET {sets} WHERE id = {id_}"

    def upsert(self) -> str:
        """ON CONFLICT, of a row that is there or not."""
        columns = self.some() or ["s"]
        id_ = self.dice.choice([*self.rows, self.new_id()])
        values = {name: self.drawn(name) for name in columns}
        given = {name: value for name, (_, value) in values.items()}
        other = self.dice.choice([name for name in KINDS if name != columns[0]])
        if id_ in self.rows:
            changed = {columns[0]: given[columns[0]], other: self.defaults.get(other)}
            self.put(id_, self.rows[id_] | changed)
        else:
            self.put(id_, given)
        row = ", ".join([str(id_), *(text for text, _ in values.values())])
        return (
            f"INSERT INTO t ({', '.join(['id', *columns])}) VALUES ({row}) ON CONFLICT (id) "
            f"DO UPDATE SET {columns[0]} = EXCLUDED.{columns[0]}, {other} = DEFAULT"
        )

    def merge(self) -> str:
        """MERGE of a row that is there or not, by its key."""
        first, second = self.dice.sample(list(KINDS), 2)
        id_ = self.dice.choice([*self.rows, self.new_id()])
        text, value = self.drawn(first)
        if id_ in self.rows:
            changed = {first: value, second: self.defaults.get(second)}
            self.put(id_, self.rows[id_] | changed)
        else:
            self.put(id_, {first: value})
        source = f"(SELECT * FROM (VALUES ({id_})) AS v (id)) AS s"
        return (
            f"MERGE INTO t USING {source} ON t.id = s.id "
            f"WHEN MATCHED THEN UPDATE SET {first} = {text}, {second} = DEFAULT "
            f"WHEN NOT MATCHED THEN INSERT (id, {first}) VALUES (s.id, {text})"
        )


async def step(
    model: Model, client: Client, session: SqlSession, *, postgres: bool, told: list[str]
) -> None:
    """Carry out one statement that the model draws."""
    kinds = ["alter", "insert", "insert", "update", "merge", "select", "rows"]
    kind = model.dice.choice(kinds + ["upsert"] * postgres if model.rows else ["insert"])
    if kind == "rows":
        # By the client, which leaves columns out.
        columns, id_ = model.some(), model.new_id()
        row = model.put(id_, {name: model.dice.choice(VALUES[name])[1] for name in columns})
        told.append(f"rows {columns}")
        await client.insert("t", [{name: row[name] for name in ["id", *columns]}])
        return
    if kind == "insert":
        text, made = model.insert()
        text += " RETURNING *" if postgres else ""
        told.append(text)
        found = await run(session, text)
        assert not postgres or found == made
        return
    text = getattr(model, kind)()
    told.append(text)
    await run(session, text)


@pytest.mark.parametrize("seed", range(4))
async def test_statements_take_the_defaults_that_there_are(seed: int, tmp_path: Path) -> None:
    model = Model(seed)
    told: list[str] = []
    async with opened(tmp_path) as (client, spark, postgres):
        columns = []
        for name, kind in KINDS.items():
            text, value = model.dice.choice(VALUES[name])
            with_default = model.dice.random() < 0.5
            columns.append(f"{name} {kind}" + (f" DEFAULT {text}" if with_default else ""))
            if with_default:
                model.defaults[name] = value
        await run(spark, f"CREATE TABLE t (id BIGINT PRIMARY KEY, {', '.join(columns)})")
        for _ in range(40):
            session = model.dice.choice([spark, postgres])
            is_postgres = session is postgres
            in_transaction = is_postgres and model.dice.random() < 0.3
            try:
                if in_transaction:
                    await run(session, "BEGIN")
                    # The session has to know the defaults: it hears of others at COMMIT.
                    session.context.catalog.forget()
                    for text in (model.insert()[0], model.update()):
                        told.append(text)
                        await run(session, text)
                    await run(session, "COMMIT")
                else:
                    await step(model, client, session, postgres=is_postgres, told=told)
                found = (await client.peek("t", order_by=["id"])).to_pylist()
                assert found == [model.rows[id_] for id_ in sorted(model.rows)]
            except BaseException:
                print("\n".join(told))
                raise


async def test_a_transaction_that_used_other_defaults_fails_and_succeeds_again(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as (client, spark, postgres):
        await run(spark, "CREATE TABLE t (id BIGINT PRIMARY KEY, a INT DEFAULT 1, b INT)")
        await run(postgres, "BEGIN")
        await run(postgres, "INSERT INTO t (id) VALUES (1)")
        await run(spark, "ALTER TABLE t ALTER COLUMN a SET DEFAULT 2")
        with pytest.raises(DefinitionChanged):
            await run(postgres, "COMMIT")
        # What needs no default does not ask for them.
        await run(spark, "ALTER TABLE t ALTER COLUMN a SET DEFAULT 3")
        await run(postgres, "BEGIN")
        await run(postgres, "INSERT INTO t (id) VALUES (1)")
        assert await run(postgres, "SELECT a FROM t WHERE id = 1") == [{"a": 3}]
        await run(postgres, "UPDATE t SET b = DEFAULT, a = a + 1 WHERE id = 1")
        await run(postgres, "COMMIT")
        assert (await client.peek("t")).to_pylist() == [{"id": 1, "a": 4, "b": None}]


async def test_a_table_made_anew_is_written_by_its_present_columns(tmp_path: Path) -> None:
    """Values go by position: a session that knows the former columns puts none in a wrong place."""
    async with opened(tmp_path) as (client, spark, postgres):
        orders = list(permutations(("id", "a", "b")))
        for made, order in enumerate(orders):
            columns = ", ".join(f"{name} INT" for name in order)
            await run(spark, f"CREATE TABLE t ({columns}, PRIMARY KEY (id))")
            await run(postgres, "BEGIN")
            await run(postgres, "DELETE FROM t WHERE id = 0")
            await run(postgres, "INSERT INTO t VALUES (1, 2, 3)")
            known = made > 0  # the session knew other columns
            if known:
                with pytest.raises(DefinitionChanged):
                    await run(postgres, "COMMIT")
                await run(postgres, "INSERT INTO t VALUES (1, 2, 3)")
            else:
                await run(postgres, "COMMIT")
            row = dict(zip(order, (1, 2, 3), strict=True))
            assert (await client.peek("t")).to_pylist() == [row]
            again = orders[made - 1]
            columns = ", ".join(f"{name} INT" for name in again)
            await run(spark, "DROP TABLE t")
            await run(spark, f"CREATE TABLE t ({columns}, PRIMARY KEY (id))")
            await run(postgres, "INSERT INTO t VALUES (1, 2, 3)")
            row = dict(zip(again, (1, 2, 3), strict=True))
            assert (await client.peek("t")).to_pylist() == [row]
            await run(spark, "DROP TABLE t")


async def test_statements_go_by_what_a_name_is_now(tmp_path: Path) -> None:
    async with opened(tmp_path) as (client, spark, postgres):
        for _ in range(2):
            await run(spark, "CREATE TABLE t (id INT)")
            await run(postgres, "INSERT INTO t VALUES (1)")
            await run(spark, "DROP TABLE t")
            await run(spark, "CREATE VIEW t AS SELECT 1 AS id")
            await run(postgres, "DROP VIEW t")
        assert (await client.status()).objects == ()


async def test_the_time_is_one_in_a_statement_and_another_in_the_next(tmp_path: Path) -> None:
    async with opened(tmp_path) as (client, spark, postgres):
        made = "made TIMESTAMP DEFAULT current_timestamp(), wall TIMESTAMP_NTZ DEFAULT now()"
        day = "day DATE DEFAULT CURRENT_DATE, midnight TIMESTAMP DEFAULT current_date()"
        await run(spark, f"CREATE TABLE t (id INT, {made}, {day})")
        await run(spark, "INSERT INTO t (id) VALUES (1), (2)")
        await run(postgres, "INSERT INTO t DEFAULT VALUES")
        await client.insert("t", [{"id": 3}, {"id": 4}])
        rows = (await client.peek("t")).to_pylist()
        # The two of a statement are one bag's row each, with one time.
        times = {row["id"]: row["made"] for row in rows}
        assert times[1] == times[2] < times[None] < times[3] == times[4]
        for row in rows:
            assert row["wall"] == row["made"].replace(tzinfo=None)
            assert row["day"] == row["made"].date() == row["midnight"].date()
            assert row["midnight"].time().isoformat() == "00:00:00"


async def test_defaults_are_shown(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, spark, postgres):
        await run(postgres, "CREATE TABLE t (s text NOT NULL DEFAULT 'it''s', n int4 DEFAULT 1+1)")
        (row,) = await run(spark, "SHOW CREATE TABLE t")
        shown = row["createtab_stmt"]
        assert "`s` STRING NOT NULL DEFAULT 'it\\'s',\n  `n` INT DEFAULT 1+1" in shown
        await run(spark, "DROP TABLE t")
        # What is shown makes the same table.
        await run(spark, shown)
        rows = await run(spark, "DESCRIBE EXTENDED t")
        values = [tuple(row.values()) for row in rows]
        at = values.index(("# Column Default Values", "", ""))
        assert values[at + 1 :] == [("s", "string", "'it\\'s'"), ("n", "int", "1+1")]
        assert await run(postgres, "INSERT INTO t DEFAULT VALUES RETURNING *") == [
            {"s": "it's", "n": 2}
        ]


async def test_what_is_no_default_is_refused_at_its_place(tmp_path: Path) -> None:
    async with opened(tmp_path) as (client, spark, postgres):
        for text, problem in [
            ("CREATE TABLE t (v VARCHAR(3) DEFAULT ¦'abcd')", "longer than varchar"),
            ("CREATE TABLE t (u STRING DEFAULT ¦current_user)", "current_user is not supported"),
            ("CREATE TABLE t (u STRING DEFAULT ¦concat(user(), 'x'))", "user is not supported"),
        ]:
            with pytest.raises(QueryRejected, match=problem) as caught:
                await run(spark, text.replace("¦", ""))
            assert caught.value.position == text.index("¦")
        await run(spark, "CREATE TABLE t (a INT DEFAULT 1, b INT DEFAULT NULL)")
        await run(postgres, "ALTER TABLE t ADD COLUMN c INT DEFAULT NULL")
        await run(spark, "CREATE VIEW v AS SELECT * FROM t")
        for text, problem in [
            ("ALTER TABLE t ALTER COLUMN z SET DEFAULT 1", "no column z"),
            ("INSERT INTO t (a) VALUES (1, DEFAULT)", "2 values for 1 columns"),
        ]:
            with pytest.raises(InvalidUsage, match=problem):
                await run(postgres, text)
        one = {"a": constant_default("'x'", pa.array(["x"]))}
        with pytest.raises(InvalidUsage, match="is not a value of type int"):
            await client.submit(AlterObject(0, "t", column_defaults=one))
        with pytest.raises(InvalidUsage, match="is a time, but the column has type int"):
            await client.submit(
                AlterObject(0, "t", column_defaults={"a": ColumnDefault("now()", moment="date")})
            )
        with pytest.raises(InvalidUsage, match="only tables that clients write to"):
            await client.submit(AlterObject(0, "v", column_defaults={"a": ColumnDefault("")}))


async def test_a_client_is_told_of_what_the_service_cannot_fill(tmp_path: Path) -> None:
    async with opened(tmp_path) as (client, spark, _):
        await run(spark, "CREATE TABLE t (id INT PRIMARY KEY, n INT NOT NULL DEFAULT 5, d DATE)")
        computed = {"d": ColumnDefault("date_add(current_date(), 7)")}
        await client.submit(AlterObject(0, "t", column_defaults=computed))
        with pytest.raises(
            InvalidUsage, match=r"only SQL can compute its default, date_add\(current_date\(\), 7\)"
        ):
            await client.insert("t", [{"id": 1}])
        await client.insert("t", [{"id": 1, "d": None}])
        # A NULL that is given stays one.
        with pytest.raises(TypeMismatch, match="NULL in a NOT NULL column"):
            await client.insert("t", [{"id": 2, "d": None, "n": None}])
        assert (await client.peek("t")).to_pylist() == [{"id": 1, "n": 5, "d": None}]
        # The digest is of all defaults, and a write without one is not checked.
        (table,) = (await client.status()).objects
        digest = defaults_digest(table.column_defaults)
        rows = [{"id": 3, "n": 1, "d": None}]
        await client.write({"t": TableWrite(insert=rows, defaults=digest)})
        with pytest.raises(DefinitionChanged):
            await client.write({"t": TableWrite(delete=[{"id": 3}], defaults="")})


async def test_each_row_of_a_client_has_the_defaults_of_what_it_leaves_out(tmp_path: Path) -> None:
    async with opened(tmp_path) as (client, spark, _):
        columns = "n INT NOT NULL DEFAULT 5, s STRING, l ARRAY<INT> DEFAULT NULL"
        await run(spark, f"CREATE TABLE t (id INT PRIMARY KEY, {columns})")
        rows = [{"id": 1, "s": "a"}, {"N": 7, "id": 2}, {"id": 3, "s": None, "l": [1]}]
        await client.insert("t", rows)
        assert (await client.peek("t", order_by=["id"])).to_pylist() == [
            {"id": 1, "n": 5, "s": "a", "l": None},
            {"id": 2, "n": 7, "s": None, "l": None},
            {"id": 3, "n": 5, "s": None, "l": [1]},
        ]
        with pytest.raises(TypeMismatch, match="NULL in a NOT NULL column"):
            await client.insert("t", [{"id": 4, "n": None}, {"id": 5}])


async def test_default_in_rows_of_on_conflict_is_of_any_type(tmp_path: Path) -> None:
    """Also of one that has no literal in the dialect, and whatever the session's zone is."""
    async with opened(tmp_path) as (client, _, postgres):
        await run(
            postgres,
            "CREATE TABLE t (id int PRIMARY KEY, a int[] DEFAULT '{1,2}', "
            "m timestamptz DEFAULT '2024-01-02 03:04:05+00')",
        )
        await run(postgres, "SET TimeZone = 'Asia/Tokyo'")
        for _ in range(2):
            await run(
                postgres,
                "INSERT INTO t VALUES (1, DEFAULT, DEFAULT), (2, DEFAULT, NULL) "
                "ON CONFLICT (id) DO UPDATE SET a = DEFAULT, m = EXCLUDED.m",
            )
        moment = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
        assert (await client.peek("t", order_by=["id"])).to_pylist() == [
            {"id": 1, "a": [1, 2], "m": moment},
            {"id": 2, "a": [1, 2], "m": None},
        ]
