"""`penstock sql`, `penstock insert`: a shell alone is enough to use a service."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import anyio
import anyio.to_thread
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from actors.doors.client.client import Client
from actors.doors.commands import cli, copy_from
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import (
    BadSettings,
    DuplicateKey,
    InvalidUsage,
    UnknownObject,
)
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import in_memory_engine


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Service]:
    settings = Settings(state_dir=str(tmp_path / "state"), listen="127.0.0.1:0")
    settings = draw_for_test(settings)
    with anyio.fail_after(200):
        async with Service(settings, engine=in_memory_engine()) as service:
            yield service


async def test_tables_views_and_rows_from_a_shell(tmp_path: Path) -> None:
    async with running(tmp_path) as service, await Client.connect(service.address) as client:

        async def said(*arguments: str, stdin: str = "") -> str:
            """What a command printed. Raises what `penstock` would tell in one line."""
            command = [*arguments, "--connect", service.address]
            done = await anyio.to_thread.run_sync(
                lambda: CliRunner().invoke(cli.app, command, input=stdin)
            )
            if done.exception is not None:
                raise done.exception
            return str(done.output).strip()

        async def wrong(
            kind: type[BaseException], text: str, *arguments: str, stdin: str = ""
        ) -> None:
            with pytest.raises(kind, match=text):
                await said(*arguments, stdin=stdin)

        await said("sql", "-c", "CREATE TABLE t (id bigint PRIMARY KEY, s string)")
        query = "SELECT s, count(*) AS n FROM t GROUP BY s"
        await said("sql", stdin=f"CREATE MATERIALIZED VIEW n AS {query}; CREATE INDEX i ON n (s)")
        rows = '{"id": 1, "s": "a"}\n{"s": "a", "id": 2}\n\n{"id": 3}\n'
        assert (await said("insert", "t", stdin=rows)).startswith("3 rows inserted into t at ")
        found = (await client.peek("n")).to_pylist()
        assert sorted((row["s"] or "", row["n"]) for row in found) == [("", 1), ("a", 2)]
        file = tmp_path / "rows.jsonl"
        file.write_text('{"id": 4}\n')
        assert (await said("insert", "t", str(file))).startswith("1 rows")
        assert await said("insert", "t") == "0 rows inserted into t"
        await wrong(InvalidUsage, "line 1 is not a row", "insert", "t", stdin='{"id": "x"}')
        assert (await said("insert", "t", "-", stdin='{"id": 5}')).startswith("1 rows")
        await wrong(UnknownObject, "table u does not exist", "insert", "u", stdin="{}")
        await wrong(DuplicateKey, "4", "insert", "t", stdin='{"id": 4}')
        await wrong(BadSettings, "cannot read", "insert", "t", str(tmp_path / "none"))
        await wrong(SystemExit, "1", "sql", "-c", "DROP TABLE t")
        drops = "DROP INDEX i; DROP MATERIALIZED VIEW n; DROP TABLE t"
        assert (await said("sql", "-c", drops)).splitlines() == [
            *("DROP INDEX", "DROP MATERIALIZED VIEW", "DROP TABLE")
        ]
        assert (await client.status()).objects == ()


def test_lines_are_read_as_the_table_has_them() -> None:
    kinds = {"at": "timestamp", "amount": "decimal(10,2)", "tags": "map<int,binary>"}
    schema = TableSchema(tuple(TableColumn(name, kind) for name, kind in kinds.items()))
    line = b'{"amount": "1.50", "at": "2026-01-02 03:04:05", "tags": {"7": "AP8="}}\n'
    [found] = copy_from.read_rows(io.BytesIO(line + b"\n  \n"), schema)
    assert isinstance(found, pa.Table)
    assert found.to_pylist() == [
        {
            "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            "amount": Decimal("1.50"),
            "tags": [(7, b"\x00\xff")],
        }
    ]
    many = b'{"amount": null}\n' * (copy_from.ROWS_AT_ONCE + 1)
    pieces = [len(rows) for rows in copy_from.read_rows(io.BytesIO(many), schema)]
    assert pieces == [copy_from.ROWS_AT_ONCE, 1]


def test_lines_leave_out_what_has_a_default() -> None:
    columns = (TableColumn("a", "int", nullable=False), TableColumn("b", "string"))
    lines = io.BytesIO(b'{"b": "x"}\n{"a": 1}\n{"a": 2, "b": null}\n')
    [found] = copy_from.read_rows(lines, TableSchema(columns), {"a"})
    assert found == [{"b": "x"}, {"a": 1, "b": None}, {"a": 2, "b": None}]
    # What has no default stays as it was: NULL, or needed.
    with pytest.raises(InvalidUsage, match="line 1"):
        list(copy_from.read_rows(io.BytesIO(b"{}\n"), TableSchema(columns), {"b"}))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"other": 1}', "line 2 is not a row of the table: .*unknown field `other`"),
        (b'{"at": "yesterday"}', r"line 2 is not a row.*RFC3339.*\$.at"),
        (b'{"tags": {"x": ""}}', "line 2 is not a row.*column tags"),
        (b'{"tags": {"7": "no base64"}}', r"line 2 is not a row.*base64.*\$.tags"),
        (b'{"amount": 1.234}', "line 2 is not a row.*column amount .*cannot hold '1.234'"),
        (b'{"amount": 1', "line 2 is not a row.*truncated"),
        (b"\xff", "line 2 is not a row.*malformed"),
        (b"[1]", "line 2 is not a row.*Expected `object`, got `array`"),
        (b"x" * (copy_from.LINE_BYTES_MAX + 2), "line 2 is too long"),
    ],
)
def test_what_is_no_row_is_said_with_its_line(line: bytes, said: str) -> None:
    kinds = {"at": "timestamp", "amount": "decimal(10,2)", "tags": "map<int,binary>"}
    schema = TableSchema(tuple(TableColumn(name, kind) for name, kind in kinds.items()))
    with pytest.raises(InvalidUsage, match=said):
        list(copy_from.read_rows(io.BytesIO(b"{}\n" + line), schema))
