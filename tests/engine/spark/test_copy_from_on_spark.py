"""Copies from CSV, JSON lines and Parquet by the command line, read by Spark itself."""

from __future__ import annotations

import gzip
import json
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.doors.client.client import Client
from actors.runtime.errors import InvalidUsage
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.check_views import for_short_lives
from actors.testing.drawn_settings import draw_for_test

pytestmark = [pytest.mark.spark, pytest.mark.long]

COLUMNS = {"id": "bigint not null", "at": "timestamp", "price": "decimal(9,2)", "note": "string"}
AT = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def expected(start: int, note: str | None) -> list[dict[str, Any]]:
    return [
        {"id": n, "at": AT, "price": Decimal(n) / 4, "note": note} for n in range(start, start + 3)
    ]


def write_files(folder: Path) -> None:
    csv, lines, parquet = folder / "csv", folder / "json", folder / "parquet"
    for place in (csv, lines, parquet):
        place.mkdir(parents=True)
    rows = "".join(f"2026-03-01T12:30:00Z,{n},{n / 4}\n" for n in range(3))
    (csv / "a.csv").write_text("at,id,price\n" + rows)
    (csv / "empty.csv").write_text("")
    (csv / "only_a_header.csv").write_text("at,id,price\n")
    texts = [
        json.dumps({"id": n, "price": str(n / 4), "at": "2026-03-01T12:30:00Z", "note": "j"})
        for n in range(10, 13)
    ]
    with gzip.open(lines / "a.json.gz", "wt") as file:
        file.write("\n".join(texts))
    (lines / "empty.json").write_text("")
    # Not in the table's types, and without one of its columns: Spark reads it.
    made = pa.table(
        {
            "ID": pa.array(range(20, 23), pa.int32()),
            "price": pa.array([Decimal(n) / 4 for n in range(20, 23)], pa.decimal128(7, 2)),
            "at": pa.array([AT] * 3, pa.timestamp("us", tz="UTC")),
        }
    )
    pq.write_table(made, parquet / "a.parquet")


async def penstock(*given: str) -> tuple[int, str, str]:
    done = await anyio.run_process(
        [sys.executable, "-m", "actors.doors.commands.cli", *given], check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def test_every_format_comes_in_by_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_files(folder)
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        source_dirs=str(folder),
        spark_master="local[2]",
        peek_deadline_ms=400_000,
    )
    settings = draw_for_test(for_short_lives(settings))
    async with Service(settings) as service, await Client.connect(service.address) as client:
        await client.create_table("t", COLUMNS)
        await client.create_materialized_view(
            "v", "SELECT note, count(*) AS n, sum(price) AS s FROM t GROUP BY note"
        )
        connect = ("--connect", service.address)
        ordered = ("-c", "at", "-c", "id", "-c", "price")
        runs = (
            ("csv", *ordered, "-o", "header=true"),
            ("json",),
            ("parquet",),
        )
        rows: list[dict[str, Any]] = []
        for kind, *more in runs:
            status, out, err = await penstock(
                "copy-from", "t", str(folder / kind), "--format", kind, *more, "--json", *connect
            )
            assert status == 0, err
            assert "files" in err
            done = json.loads(out)
            assert done["rows"] == 3
            start = {"csv": 0, "json": 10, "parquet": 20}[kind]
            before = await client.peek("t", as_of=done["time"] - 1, order_by=["id"])
            assert before.to_pylist() == rows
            rows += expected(start, "j" if kind == "json" else None)
            found = await client.peek("t", as_of=done["time"], order_by=["id"])
            assert found.to_pylist() == rows
        sums = {row["note"]: (row["n"], row["s"]) for row in (await client.peek("v")).to_pylist()}
        total = sum((row["price"] for row in rows if row["note"] is None), Decimal(0))
        assert sums == {None: (6, total), "j": (3, Decimal(33) / 4)}

        await every_type_comes_in(client, folder)
        await texts_of_fixed_length_compare_as_in_spark(client)

        # Spark reads the copied parts' own files for a view that is made now.
        await client.create_materialized_view("w", "SELECT id, price FROM t WHERE id > 1")
        found = await client.peek("w", order_by=["id"])
        assert found.to_pylist() == [
            {"id": row["id"], "price": row["price"]} for row in rows if row["id"] > 1
        ]
        (folder / "csv" / "bad.csv").write_text("at,id,price\n2026-03-01T12:30:00Z,x,1\n")
        status, out, err = await penstock(
            "copy-from", "t", str(folder / "csv"), "--format", "csv", *ordered,
            "-o", "header=true", "--quiet", *connect,
        )  # fmt: skip
        assert (status, out) == (2, "")
        assert err.startswith("penstock: InvalidUsage: ")
        assert "bad.csv" in err
        (folder / "csv" / "bad.csv").write_text("at,id,price\n2026-03-01T12:30:00Z,,1\n")
        status, out, err = await penstock(
            "copy-from", "t", str(folder / "csv"), "--format", "csv", *ordered,
            "-o", "header=true", "--quiet", *connect,
        )  # fmt: skip
        assert status == 2
        assert "column id holds NULL, and may not" in err
        assert (await client.peek("t")).num_rows == 9


KINDS = {
    "i": "map<int,string>",
    "t": "map<timestamp,map<boolean,float>>",
    "a": "array<struct<d:map<date,binary>,n:timestamp_ntz>>",
    "b": "binary",
    "f": "double",
    "c": "char(4)",
}
LINE = """\
{"i":{"1":"x","-2":null},"t":{"2026-03-01T12:30:00.000001Z":{"true":"NaN","false":1.5}},\
"a":[{"d":{"0001-01-01":"AP8="},"n":"2026-03-01T12:30:00"},null],"b":"AP8=","f":"-Infinity","c":"ab"}
"""
CSV = 'b,f,c\nAP8=,-Infinity,"ab"\n,NaN,\n'


async def every_type_comes_in(client: Client, folder: Path) -> None:
    """Files of no copy, which Spark reads."""
    for name, text in (("types.json", LINE), ("types.csv", CSV), ("wrong.csv", "b\nn*t base64\n")):
        (folder / name).write_text(text)
    await client.create_table("json", KINDS)
    await client.copy_from("json", str(folder / "types.json"), "json")
    [row] = (await client.peek("json")).to_pylist()
    at = AT.replace(microsecond=1)
    inside = {"d": [(date(1, 1, 1), b"\x00\xff")], "n": AT.replace(tzinfo=None)}
    ((when, flags),) = row.pop("t")
    assert (when, repr(flags)) == (at, "[(True, nan), (False, 1.5)]")
    assert row == {
        "i": [(1, "x"), (-2, None)],
        "a": [inside, None],
        "b": b"\x00\xff",
        "f": float("-inf"),
        "c": "ab  ",
    }
    await client.create_table("csv", {"b": "binary", "f": "double", "c": "char(4)"})
    options = {"header": "true"}
    await client.copy_from("csv", str(folder / "types.csv"), "csv", options=options)
    rows = sorted(map(repr, (await client.peek("csv")).to_pylist()))
    assert rows == [
        "{'b': None, 'f': nan, 'c': None}",
        "{'b': b'\\x00\\xff', 'f': -inf, 'c': 'ab  '}",
    ]
    with pytest.raises(InvalidUsage, match=r"wrong.csv.*base64"):
        path = str(folder / "wrong.csv")
        await client.copy_from("csv", path, "csv", columns=["b"], options=options)
    await client.create_table("keys", {"m": "map<binary,int>"})
    with pytest.raises(InvalidUsage, match="cannot read JSON maps with keys of type binary"):
        await client.copy_from("keys", str(folder / "types.json"), "json")


async def texts_of_fixed_length_compare_as_in_spark(client: Client) -> None:
    await client.create_table("padded", {"c": "char(4)", "x": "int"})
    await client.create_table("texts", {"s": "string"})
    await client.create_materialized_view(
        "same", "SELECT x, length(c) AS n FROM padded WHERE c = 'ab'"
    )
    await client.create_materialized_view(
        "groups", "SELECT c, count(*) AS n FROM padded GROUP BY c"
    )
    await client.create_materialized_view("pairs", "SELECT x, s FROM padded JOIN texts ON c = s")
    rows = [{"c": "ab", "x": 1}, {"c": "ab  ", "x": 2}, {"c": "abc", "x": 3}]
    await client.insert("padded", rows)
    await client.insert("texts", [{"s": "ab"}, {"s": "ab  "}])
    assert (await client.peek("same", order_by=["x"])).to_pylist() == [
        {"x": 1, "n": 4},
        {"x": 2, "n": 4},
    ]
    assert (await client.peek("groups", order_by=["c"])).to_pylist() == [
        {"c": "ab  ", "n": 2},
        {"c": "abc ", "n": 1},
    ]
    assert (await client.peek("pairs", order_by=["x"])).to_pylist() == [
        {"x": 1, "s": "ab  "},
        {"x": 2, "s": "ab  "},
    ]
    found = [b async for b in client.query("SELECT x FROM padded WHERE c IN ('ab', 'zz')")]
    assert sorted(x for batch in found for x in batch.column(0).to_pylist()) == [1, 2]
    for given in ({"where": [("c", "=", "ab")]}, {"key": {"c": "ab"}}):
        assert (await client.peek("padded", **given)).num_rows == 2
