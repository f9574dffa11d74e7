"""Large first contents: Spark writes files, which become parts; every type keeps its values."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors import Client, Service, Settings
from actors.testing.check_views import for_short_lives

pytestmark = [pytest.mark.spark, pytest.mark.long]

ROWS = 15_000
COLUMNS = {
    "id": "bigint",
    "flag": "boolean",
    "small": "smallint",
    "ratio": "double",
    "price": "decimal(12,2)",
    "wide": "decimal(38,10)",
    "name": "string",
    "day": "date",
    "at": "timestamp",
    "local": "timestamp_ntz",
    "raw": "binary",
    "tags": "array<string>",
    "pair": "struct<a:int,b:string>",
    "bag": "map<string,bigint>",
}
DEADLINE_MS = 400_000
NOTHING = {
    "nothing": "SELECT id, name, tags, pair, bag FROM t WHERE id < 0",
    "unmatched": "SELECT l.id, l.name, r.price FROM t l JOIN t r ON l.id = -1 - r.id",
}
"""Views that are empty, though much is read for them."""
ODD = """
    SELECT id AS `unit price`, array(named_struct('n', 1, 't', 'x')) AS `a,b;(c)=d`,
           map(id, cast(NULL AS string)) AS m, cast(0.5 AS float) AS ratio,
           array(NULL) AS nothing
    FROM t"""
"""Columns of which Spark's files say other than ours: never NULL inside; of no type; odd names."""


def value_rows(start: int, count: int) -> list[dict[str, object]]:
    """Rows with NULLs here and there, and a text that does not compress."""
    rand = random.Random(start)
    moment = datetime(2024, 1, 31, 23, 59, 59, 123456, UTC)
    return [
        {
            "id": number,
            "flag": number % 3 == 0,
            "small": number % 1000,
            "ratio": -0.0 if number % 5 == 0 else number / 7,
            "price": Decimal(number) / 100,
            "wide": Decimal(number) * 10**15 + Decimal("0.0000000001"),
            "name": None if number % 11 == 0 else rand.randbytes(48).hex(),
            "day": date(2024, 2, 29),
            "at": moment,
            "local": moment.replace(tzinfo=None),
            "raw": rand.randbytes(4),
            "tags": [None, str(number)],
            "pair": {"a": number % 9, "b": None},
            "bag": [("k", number)],
        }
        for number in range(start, start + count)
    ]


def arrow_rows(rows: list[dict[str, object]]) -> pa.Table:
    types = {
        "id": pa.int64(), "flag": pa.bool_(), "small": pa.int16(), "ratio": pa.float64(),
        "price": pa.decimal128(12, 2), "wide": pa.decimal128(38, 10), "name": pa.string(),
        "day": pa.date32(), "at": pa.timestamp("us", "UTC"), "local": pa.timestamp("us"),
        "raw": pa.binary(), "tags": pa.list_(pa.string()),
        "pair": pa.struct([("a", pa.int32()), ("b", pa.string())]),
        "bag": pa.map_(pa.string(), pa.int64()),
    }  # fmt: skip
    return pa.Table.from_pylist(rows, schema=pa.schema(list(types.items())))


def counted(table: pa.Table) -> Counter[str]:
    """The rows as they print, which tells -0.0 from 0.0."""
    return Counter(map(repr, table.to_pylist()))


async def test_a_large_view_goes_by_files_and_loses_nothing(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        engine_collected_bytes_max=1,
        spark_conf={"spark.driver.maxResultSize": "1m"},
    )
    async with (
        Service(for_short_lives(settings)) as service,
        await Client.in_process(service) as client,
    ):
        await client.create_table("t", COLUMNS)
        rows = value_rows(0, ROWS)
        for start in range(0, ROWS, ROWS // 3):
            await client.insert("t", arrow_rows(rows[start : start + ROWS // 3]))
        gone = rows[ROWS // 2 : ROWS // 2 + 500]
        await client.delete("t", arrow_rows(gone))
        kept = [row for row in rows if row not in gone[:1]][: ROWS // 2] + rows[ROWS // 2 + 500 :]
        names = ", ".join(COLUMNS)
        await client.create_materialized_view("copy", f"SELECT {names} FROM t WHERE id % 4 <> 1")
        # One row a group: the collection overflows, and the query runs again, into files.
        await client.create_materialized_view(
            "groups", "SELECT name, id, count(*) AS n FROM t GROUP BY 1, 2"
        )
        for name, text in NOTHING.items():
            await client.create_materialized_view(name, text)
        await client.create_materialized_view("odd", ODD)
        written = await client.write({})
        await client.wait_for("copy", written, deadline_ms=DEADLINE_MS)
        await client.wait_for("groups", written, deadline_ms=DEADLINE_MS)

        wanted = [row for row in kept if int(str(row["id"])) % 4 != 1]
        found = await client.peek("copy", deadline_ms=DEADLINE_MS)
        assert counted(found.select(list(COLUMNS))) == counted(arrow_rows(wanted))
        groups = await client.peek("groups", deadline_ms=DEADLINE_MS)
        assert groups.num_rows == len(kept)
        assert set(groups["n"].to_pylist()) == {1}
        for name in NOTHING:
            await client.wait_for(name, written, deadline_ms=DEADLINE_MS)
            assert (await client.peek(name, deadline_ms=DEADLINE_MS)).num_rows == 0
        await client.wait_for("odd", written, deadline_ms=DEADLINE_MS)
        odd = (await client.peek("odd", deadline_ms=DEADLINE_MS)).to_pylist()
        assert Counter(row["unit price"] for row in odd) == Counter(row["id"] for row in kept)
        assert all(row["a,b;(c)=d"] == [{"n": 1, "t": "x"}] and row["ratio"] == 0.5 for row in odd)
        assert all(dict(row["m"]) == {row["unit price"]: None} for row in odd)
        assert all(row["nothing"] == [None] for row in odd)
        engine = tmp_path / "state" / "scratch" / "engine"
        assert not list((engine / "out").iterdir()), "an answer's files go with it"
        assert "is written to files" in (engine / "engine.log").read_text(), (
            "the groups were collected"
        )
        blobs = (tmp_path / "state" / "blob").glob("*/*.parquet")
        makers = Counter(pq.read_metadata(blob).created_by.split()[0] for blob in blobs)
        assert makers["parquet-mr"] > 0, "the copy was not taken over"

        # It goes on from what was taken over: by its hidden state, and by its own rows.
        more = value_rows(ROWS, 8)
        await client.insert("t", arrow_rows(more))
        written = await client.delete("t", arrow_rows(kept[:2]))
        await client.wait_for("copy", written, deadline_ms=DEADLINE_MS)
        await client.wait_for("groups", written, deadline_ms=DEADLINE_MS)
        wanted = [row for row in kept[2:] + more if int(str(row["id"])) % 4 != 1]
        found = await client.peek("copy", deadline_ms=DEADLINE_MS)
        assert counted(found.select(list(COLUMNS))) == counted(arrow_rows(wanted))
        groups = await client.peek("groups", deadline_ms=DEADLINE_MS)
        assert groups.num_rows == len(kept) + len(more) - 2
