"""`penstock table`, `view`, `index`, `insert`, `drop`: a shell alone is enough to use a service."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from actors import cli, statements
from actors.client import Client
from actors.errors import BadSettings, DuplicateKey, InvalidUsage, ObjectExists, ObjectInUse
from actors.kernel import Address, System
from actors.plan.jobs import ExecutorMessage
from actors.service import Service
from actors.settings import Settings
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import InMemoryExecutor


def in_memory(system: System, settings: Settings, scratch: Path) -> Address[ExecutorMessage]:
    address: Address[Any] = system.spawn(lambda: InMemoryExecutor(), "engine")
    return address


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Service]:
    settings = Settings(state_dir=str(tmp_path / "state"), listen="127.0.0.1:0")
    settings = draw_for_test(settings)
    with anyio.fail_after(200):
        async with Service(settings, engine=in_memory) as service:
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

        async def wrong(kind: type[Exception], text: str, *arguments: str, stdin: str = "") -> None:
            with pytest.raises(kind, match=text):
                await said(*arguments, stdin=stdin)

        await said("table", "create", "t", "id=bigint", "s=string", "--key", "id")
        await said("view", "create", "n", "-", stdin="SELECT s, count(*) AS n FROM t GROUP BY s")
        await said("index", "create", "i", "n", "s")
        rows = '{"id": 1, "s": "a"}\n{"s": "a", "id": 2}\n\n{"id": 3}\n'
        assert (await said("insert", "t", stdin=rows)).startswith("3 rows are in t at ")
        found = (await client.peek("n")).to_pylist()
        assert sorted((row["s"] or "", row["n"]) for row in found) == [("", 1), ("a", 2)]
        file = tmp_path / "rows.jsonl"
        file.write_text('{"id": 4}\n')
        assert (await said("insert", "t", str(file))).startswith("1 rows")
        assert await said("insert", "t") == "0 rows are in t"
        await wrong(InvalidUsage, "lines 1 to 1 are no rows", "insert", "t", stdin='{"id": "x"}')
        await wrong(DuplicateKey, "4", "insert", "t", stdin='{"id": 4}')
        await wrong(BadSettings, "cannot be read", "insert", "t", str(tmp_path / "none"))
        await wrong(BadSettings, "NAME=TYPE", "table", "create", "u", "id")
        await wrong(BadSettings, "named twice", "table", "create", "u", "a=int", "a=int")
        await wrong(ObjectExists, "n", "view", "create", "n", "SELECT 1 AS a")
        await wrong(ObjectInUse, "n", "drop", "t")
        for name in ("i", "n", "t"):
            assert await said("drop", name) == f"{name} is dropped"
        assert (await client.status()).objects == ()


def test_values_are_read_as_the_table_has_them() -> None:
    schema = pa.schema(
        [
            ("at", pa.timestamp("us", "UTC")),
            ("amount", pa.decimal128(10, 2)),
            ("tags", pa.list_(pa.string())),
        ]
    )
    line = b'{"amount": "1.50", "at": "2026-01-02T03:04:05Z", "tags": ["x"]}\n'
    [found] = statements.tables(io.BytesIO(line), schema)
    assert found.to_pylist() == [
        {
            "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            "amount": Decimal("1.50"),
            "tags": ["x"],
        }
    ]
    many = b'{"amount": null}\n' * (statements.ROWS_AT_ONCE + 1)
    pieces = [table.num_rows for table in statements.tables(io.BytesIO(many), schema)]
    assert pieces == [statements.ROWS_AT_ONCE, 1]
    with pytest.raises(InvalidUsage, match="lines 10001 to 10001"):
        list(statements.tables(io.BytesIO(many[:17] * 10_000 + b'{"other": 1}\n'), schema))
    with pytest.raises(InvalidUsage, match="longer than"):
        list(statements.tables(io.BytesIO(b"x" * (statements.LINE_BYTES_MAX + 2)), schema))
