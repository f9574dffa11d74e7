"""Copies from CSV, JSON lines and Parquet by the command line, read by Spark itself."""

from __future__ import annotations

import gzip
import json
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.client import Client
from actors.service import Service
from actors.settings import Settings
from actors.testing.check_views import for_short_lives
from actors.testing.drawn_settings import draw_for_test

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

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
    done = await anyio.run_process([sys.executable, "-m", "actors.cli", *given], check=False)
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
        await client.create_view(
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

        # Spark reads the copied parts' own files for a view that is made now.
        await client.create_view("w", "SELECT id, price FROM t WHERE id > 1")
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
