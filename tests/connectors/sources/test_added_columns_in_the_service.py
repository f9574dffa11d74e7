"""ALTER TABLE … ADD COLUMN of tables that sources fill, by the whole service: nothing is filled
anew, and what is read is right at every time, also when the service is killed.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from postgres_house import House, connection  # type: ignore[import-not-found]
from test_postgres_in_the_service import (  # type: ignore[import-not-found]
    caught_up,
    options_of,
    rows,
    running,
    told,
)

from actors.doors.client.client import Client
from actors.model.plan.schema import TableColumn
from actors.model.protocol.api import AlterObject, SourceTable
from actors.runtime.errors import ConnectionBroken, InvalidUsage, ObjectInUse, PenstockError
from service_house import service_process  # type: ignore[import-not-found]

SETTINGS = {
    "source_tick_ms": "50",
    "retry_delay_ms_min": "20",
    "retry_delay_ms_max": "200",
    "workers": "3",
}
SUMS = "SELECT k, sum(v) AS s FROM orders GROUP BY k"
LIVES = 5
NOTE = TableColumn("note", "string")


async def prepare(db: House) -> None:
    await db.run("CREATE TABLE orders (id bigint PRIMARY KEY, k int, v int)")
    await db.run("CREATE TABLE whole (id bigint, k int, v int)")
    await db.run("CREATE TABLE marks (n bigint PRIMARY KEY)")
    await db.run("ALTER TABLE whole REPLICA IDENTITY FULL")
    for name in ("orders", "whole"):
        await db.run(f"INSERT INTO {name} SELECT i, i % 3, i FROM generate_series(1, 90) i")


async def add(client: Client, name: str, *columns: TableColumn) -> None:
    await client.submit(AlterObject(0, name, add_columns=tuple(columns)))


async def test_views_indexes_and_readers_go_on(db: House, tmp_path: Path) -> None:
    await prepare(db)
    async with running(tmp_path) as client:
        tables = {f"public.{name}": name for name in ("orders", "whole", "marks")}
        await client.create_source("pg", options_of(db), tables)
        await client.create_materialized_view("sums", SUMS)
        await client.create_materialized_view("alike", "SELECT * FROM orders WHERE v > 80")
        await client.create_index("by_k", "orders", ["k"])
        before = await caught_up(db, client, 1)
        old = await rows(client, "orders", before)
        with pytest.raises(InvalidUsage, match=r"public\.orders has no upstream column note"):
            await add(client, "orders", NOTE)
        for name in ("orders", "whole"):
            await db.run(f"ALTER TABLE {name} ADD COLUMN note text")
            await db.run(f"UPDATE {name} SET note = 'n' || id WHERE id % 10 = 0")
        await caught_up(db, client, 2)
        (status,) = await client.sources()
        assert status.health.status == "running"
        for column, words in (
            (TableColumn("note", "int"), "note of public.orders has type string, not int"),
            (TableColumn("K", "int"), "duplicate column"),
            (TableColumn("note", "string", False), "NOT NULL"),
        ):
            with pytest.raises(InvalidUsage, match=words):
                await add(client, "orders", column)
        for name in ("orders", "whole"):
            await add(client, name, NOTE)
            await db.run(f"INSERT INTO {name} VALUES (1000, 1, 1, 'late')")
        await db.run("UPDATE orders SET v = v + 1 WHERE id = 10")
        time = await caught_up(db, client, 3)
        for name in ("orders", "whole"):
            wanted = Counter(await db.run(f"SELECT id, k, v, note FROM {name}"))
            assert await rows(client, name, time) == wanted
        # History: as it was known then.
        assert await rows(client, "orders", before) == Counter((*row, None) for row in old)
        for view, query in (("sums", SUMS), ("alike", "SELECT id, k, v FROM orders WHERE v > 80")):
            await client.wait_for(view, time)
            assert await rows(client, view, time) == Counter(await db.run(query))
        await client.wait_for("by_k", time)
        indexed = await client.peek("orders", time, [{"k": 1}])
        wanted = Counter(await db.run("SELECT id, k, v, note FROM orders WHERE k = 1"))
        assert Counter(tuple(row.values()) for row in indexed.to_pylist()) == wanted
        (status,) = await client.sources()
        assert {table.health.status for table in status.tables} == {"running"}
    async with running(tmp_path) as client:
        await db.run("ALTER TABLE orders ADD COLUMN price numeric(9,2) DEFAULT 1.5 NOT NULL")
        await db.run("UPDATE orders SET price = 2, note = 'dear' WHERE id < 10")
        await add(client, "orders", TableColumn("price", "decimal(9,2)"))
        await client.create_materialized_view("sales", "SELECT sum(price) AS s FROM orders")
        time = await caught_up(db, client, 4)
        wanted = Counter(await db.run("SELECT id, k, v, note, price FROM orders"))
        assert await rows(client, "orders", time) == wanted
        await client.wait_for("sales", time)
        assert list(await rows(client, "sales", time)) == await db.run(
            "SELECT sum(price) FROM orders"
        )
        await client.create_plain_view("all_of_it", "SELECT * FROM orders")
        await db.run("ALTER TABLE orders ADD COLUMN last int")
        with pytest.raises(ObjectInUse, match="all_of_it selects all columns"):
            await add(client, "orders", TableColumn("last", "int"))


async def test_files_that_come_later_have_more_columns(tmp_path: Path, db: House) -> None:
    """Those that were taken before have NULL, those that come after the statement their values."""
    folder = tmp_path / "in"
    folder.mkdir()

    def put(number: int, **more: Any) -> None:
        table = pa.table({"id": pa.array([number], pa.int64()), **more})
        pq.write_table(table, tmp_path / "new")
        (tmp_path / "new").rename(folder / f"{number}.parquet")

    async def until(client: Client, count: int) -> list[dict[str, Any]]:
        while (found := await client.peek("rows")).num_rows < count:
            await anyio.sleep(0.02)
        return sorted(found.to_pylist(), key=lambda row: int(row["id"]))

    async with running(tmp_path, source_dirs=str(folder)) as client:
        config = {
            "kind": "files",
            "folder": str(folder),
            "format": "parquet",
            "columns": {"id": "bigint", "out": "int"},
            "poll_ms": 10,
        }
        put(1, out=pa.array([1], pa.int32()), note=pa.array(["never read"]))
        await client.create_source("f", config, [SourceTable("rows", "rows", ("out",))])
        assert await until(client, 1) == [{"id": 1}]
        with pytest.raises(InvalidUsage, match="the source declares out, but this table leaves"):
            await add(client, "rows", TableColumn("out", "int"))
        for number in range(2, 30, 2):
            name = f"c{number}"
            await add(client, "rows", TableColumn(name, "int"))
            # Whole: Parquet that lacks a column is read by Spark.
            put(number, **{f"c{each}": pa.array([None if each < number else each], pa.int32())
                for each in range(2, number + 1, 2)})  # fmt: skip
            await until(client, number // 2 + 1)
        found = await until(client, 15)
        assert [row["id"] for row in found] == [1, *range(2, 30, 2)]
        for row in found[1:]:
            assert row[f"c{row['id']}"] == row["id"]
            assert sum(value is not None for value in row.values()) == 2


async def test_generators_have_all_of_their_columns(tmp_path: Path, db: House) -> None:
    async with running(tmp_path) as client:
        await client.create_source("ticks", {"kind": "counter", "rate": 100})
        with pytest.raises(InvalidUsage, match="is generated with all its columns"):
            await add(client, "ticks", NOTE)


async def columns_of(client: Client, name: str) -> list[str]:
    (found,) = (each for each in (await client.status()).objects if each.name == name)
    assert found.schema is not None
    return list(found.schema.names)


async def keep_writing(db: House, dice: random.Random, over: anyio.Event) -> None:
    """Change rows until it is over, in all columns that there are."""
    number = 0
    async with await connection(db.server, db.database) as sql:
        while not over.is_set():
            number += 1
            name, id_ = dice.choice(("orders", "whole")), dice.randrange(120)
            found = await sql.execute(
                b"SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass"
                b" AND attname LIKE 'c%%' AND attnum > 0",
                (name,),
            )
            names = [row[0] for row in await found.fetchall()]
            sets = "".join(f", {each} = {number}" for each in names if dice.random() < 0.6)
            change = dice.choice(
                (
                    f"UPDATE {name} SET v = {number}{sets} WHERE id % 17 = {id_ % 17}",
                    f"UPDATE {name} SET id = -id WHERE id = {id_}",
                    f"DELETE FROM {name} WHERE id = {id_}",
                    f"INSERT INTO {name} (id, k, v) VALUES ({number + 10_000}, 1, 1)",
                )
            )
            await sql.execute(change.encode())
            await anyio.sleep(0.01)


async def finish(db: House, client: Client, life: int) -> dict[str, tuple[list[str], int]]:
    """Add what the former life did not come to, and compare all columns of the catalog. Returns the
    columns and the number of rows that were compared, by table."""
    compared = {}
    for name in ("orders", "whole"):
        if life and f"c{life}" not in await columns_of(client, name):
            await add(client, name, TableColumn(f"c{life}", "bigint"))
    # What a source does first (a publication) would wait for the lock, and this for the source.
    await caught_up(db, client, -life - 1)
    # Nobody writes between the mark and the comparison.
    async with db.sql.transaction():
        await db.run("LOCK TABLE orders, whole IN SHARE MODE")
        async with await connection(db.server, db.database) as sql:
            await sql.execute(b"INSERT INTO marks VALUES (%s)", (life,))
        time = await told(client, "marks", life)
        for name in ("orders", "whole"):
            columns = await columns_of(client, name)
            wanted = Counter(await db.run(f"SELECT {', '.join(columns)} FROM {name}"))
            assert await rows(client, name, time) == wanted, (life, name)
            compared[name] = columns, wanted.total()
    (status,) = await client.sources()
    assert {table.health.status for table in status.tables} == {"running"}
    return compared


async def live_and_die(db: House, tmp_path: Path, life: int, dice: random.Random) -> None:
    """Check what the former life left; then add a column there and here, and be killed."""
    column = TableColumn(f"c{life + 1}", "bigint")
    async with service_process(tmp_path / "state", **SETTINGS) as (client, served):
        if life == 0:
            tables = {f"public.{name}": name for name in ("orders", "whole", "marks")}
            await client.create_source("pg", options_of(db), tables)
        await finish(db, client, life)
        default = dice.choice(("", " DEFAULT 5"))
        for name in ("orders", "whole"):
            await db.run(f"ALTER TABLE {name} ADD COLUMN {column.name} bigint{default}")

        async def alter() -> None:
            with suppress(ConnectionBroken, PenstockError):
                for name in ("orders", "whole"):
                    await add(client, name, column)

        async with anyio.create_task_group() as group:
            group.start_soon(alter)
            await anyio.sleep(dice.random())
            served.send_signal(signal.SIGKILL)
            await served.wait()


@pytest.mark.long
async def test_killed_anywhere_while_columns_are_added(db: House, tmp_path: Path) -> None:
    """A writer goes on all the time. After each life both tables are what PostgreSQL has, in all of
    the columns that the catalog says."""
    await prepare(db)
    dice, over = random.Random(11), anyio.Event()
    with anyio.fail_after(500):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_writing, db, random.Random(12), over)
            for life in range(LIVES):
                await live_and_die(db, tmp_path, life, dice)
            async with service_process(tmp_path / "state", **SETTINGS) as (client, _):
                compared = await finish(db, client, LIVES)
            over.set()
    assert compared.keys() == {"orders", "whole"}
    for columns, count in compared.values():
        assert columns == ["id", "k", "v", *(f"c{life}" for life in range(1, LIVES + 1))]
        assert count > 0
