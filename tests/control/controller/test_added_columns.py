"""ALTER TABLE … ADD COLUMNS under writes, with views, indexes and readers, over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
from test_replacing import running  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.api import AlterObject
from actors.runtime.errors import InvalidUsage, ObjectInUse

ITEMS = TableSchema(
    (TableColumn("id", "bigint"), TableColumn("k", "int"), TableColumn("v", "int")), ("id",)
)
SUMS = "select k, sum(v) as s from t group by k"


def rows_of(table: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    wanted = [name for name in (names or table.column_names) if not name.startswith("__")]
    return sorted(zip(*(table[name].to_pylist() for name in wanted), strict=True), key=repr)


def items(*rows: tuple[int, int, int]) -> pa.Table:
    ids, ks, vs = zip(*rows, strict=True)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "k": pa.array(ks, pa.int32()),
            "v": pa.array(vs, pa.int32()),
        }
    )


async def _made(client: Client) -> int:
    await client.create_table("t", ITEMS)
    await client.create_materialized_view("sums", SUMS)
    await client.create_materialized_view("alike", "select * from t where v > 1")
    await client.create_index("t_k", "t", ["k"])
    return await client.insert("t", items((1, 1, 1), (2, 1, 2), (3, 2, 3)))


async def test_older_rows_have_null_and_dependents_stay(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        before = await _made(client)
        await client.wait_for("t_k", before)
        added = [TableColumn("note", "string"), TableColumn("w", "double")]
        await client.submit(
            AlterObject(0, "t", add_columns=tuple(added), column_comments={"NOTE": "a word"})
        )
        status = {each.name: each for each in (await client.status()).objects}
        assert status["t"].schema is not None
        assert status["t"].schema.names == ("id", "k", "v", "note", "w")
        assert status["t"].column_comments == {"note": "a word"}
        await client.insert("t", items((4, 2, 4)))
        new = items((5, 2, 5)).append_column("note", pa.array(["five"]))
        time = await client.insert("t", new)
        await client.update("t", pa.table({"id": [1], "note": ["one"]}))
        found = await client.peek("t")
        assert rows_of(found, "id", "note", "w") == [
            (1, "one", None),
            (2, None, None),
            (3, None, None),
            (4, None, None),
            (5, "five", None),
        ]
        assert rows_of(await client.peek("t", before), "id", "note") == [
            (1, None),
            (2, None),
            (3, None),
        ]
        # By the key, by the index that was built anew, and by a query.
        keyed = await client.peek("t", None, [{"id": 5}])
        assert rows_of(keyed, "id", "v", "note") == [(5, 5, "five")]
        await client.wait_for("t_k", time)
        indexed = await client.peek("t", time, [{"k": 2}])
        assert rows_of(indexed, "id", "note") == [(3, None), (4, None), (5, "five")]
        # A view that takes all columns goes on with those that it had.
        alike = await client.peek("alike")
        assert alike.column_names[:3] == ["id", "k", "v"]
        assert "note" not in alike.column_names
        assert rows_of(alike, "id") == [(2,), (3,), (4,), (5,)]
        assert rows_of(await client.peek("sums")) == [(1, 3), (2, 12)]
        await client.create_materialized_view(
            "notes", "select note, count(*) as n from t group by note"
        )
        assert rows_of(await client.peek("notes")) == [("five", 1), ("one", 1), (None, 3)]
    async with running(tmp_path) as client:
        await client.insert("t", items((6, 1, 6)).append_column("note", pa.array(["six"])))
        assert rows_of(await client.peek("alike"), "id")[-1] == (6,)
        assert "note" not in (await client.peek("alike")).column_names
        assert rows_of(await client.peek("sums")) == [(1, 9), (2, 12)]
        # A plan that is made anew reads what the former one read.
        await client.submit(AlterObject(0, "alike", refresh_policy="full"))
        await client.insert("t", items((7, 3, 7)))
        assert rows_of(await client.peek("alike"), "id")[-1] == (7,)
        assert rows_of(await client.peek("notes"), "note", "n")[-1] == (None, 4)


async def test_writes_that_wait_are_fitted_to_the_new_columns(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await _made(client)
        async with anyio.create_task_group() as tasks:
            for number in range(10, 60):
                tasks.start_soon(client.insert, "t", items((number, 9, 1)))
                if number % 10 == 5:
                    column = TableColumn(f"c{number}", "int")
                    tasks.start_soon(
                        lambda one: client.submit(AlterObject(0, "t", add_columns=(one,))), column
                    )
        found = await client.peek("t")
        assert found.num_rows == 53
        names = {name for name in found.column_names if name.startswith("c")}
        assert names == {f"c{number}" for number in range(15, 60, 10)}
        assert (9, 50) in rows_of(await client.peek("sums"))


async def test_what_cannot_be_added_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await _made(client)
        await client.create_plain_view("all_of_it", "select * from t")

        async def refused(name: str, column: TableColumn, why: str, kind: type[Exception]) -> None:
            with pytest.raises(kind, match=why):
                await client.submit(AlterObject(0, name, add_columns=(column,)))

        note = TableColumn("note", "string")
        await refused("t", note, "all_of_it selects all columns", ObjectInUse)
        await client.drop("all_of_it")
        await refused("t", TableColumn("K", "string"), "duplicate column", InvalidUsage)
        await refused("t", TableColumn("n", "string", False), "NOT NULL", InvalidUsage)
        await refused("sums", note, "materialized view|a view", InvalidUsage)
        await client.submit(AlterObject(0, "t", add_columns=(note,)))
        assert (await client.peek("t")).column_names[:4] == ["id", "k", "v", "note"]
