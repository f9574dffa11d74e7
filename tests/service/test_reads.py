"""Reads through the public client: filters, order, limits; results of any size by the stash."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

from actors import Client
from actors.doors.commands.inspect import parse_condition
from actors.durable.persist.stashed_blobs import StashedBlobs
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import DeadlineExceeded, InvalidUsage, PenstockError, TypeMismatch
from actors.runtime.settings import Settings
from actors.testing.drawn_settings import draw_for_test
from service_house import running_service  # type: ignore[import-not-found]

ROWS = 6_000
SMALL = {"inline_bytes_max": 1 << 14, "result_bytes_max": 1 << 17, "frame_bytes_max": 1 << 18}


@asynccontextmanager
async def running(place: Path, **changes: Any) -> AsyncIterator[Client]:
    chosen = {"workers": 2, "maintenance_ms": 20, **SMALL, **changes}
    settings = Settings(state_dir=str(place / "state"), listen="127.0.0.1:0", **chosen)
    settings = draw_for_test(settings, chosen, many_rows=True)
    async with running_service(settings) as (_, client):
        yield client


async def filled(client: Client) -> int:
    """A table of `ROWS` rows; its time."""
    columns = {"id": "bigint", "s": "string", "day": "date", "v": "double"}
    await client.create_table("t", columns, ["id"])
    ids = list(range(ROWS))
    table = pa.table({"id": ids, "s": [f"s{i % 7}" for i in ids], "v": [i / 4 for i in ids]})
    return await client.insert("t", table)


def stashed(place: Path) -> list[str]:
    folder = place / "state" / "blob" / "_stash"
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:  # the folder goes with its last file, also between two looks
        return []


async def until(holds: Callable[[], bool], client: Client) -> None:
    """Looks again after each turn of the service."""
    while not holds():
        await client.write({})


@pytest.mark.parametrize("index", [None, ["id"], ["s", "id"]])
async def test_filter_order_limit(tmp_path: Path, index: list[str] | None) -> None:
    async with running(tmp_path) as client:
        time = await filled(client)
        if index is not None:
            await client.create_index("i", "t", index)
            await client.wait_for("i", await client.write({}))
            time = await client.write({})
        everything = await client.peek("t", time)
        assert sorted(everything["id"].to_pylist()) == list(range(ROWS))
        if index is not None:
            report = await client.status()
            (shown,) = (found for found in report.objects if found.name == "i")
            assert shown.held_rows == ROWS
            assert shown.held_bytes_memory + shown.held_bytes_mapped > ROWS * 8
        top = await client.peek(
            "t",
            time,
            where=[("s", "=", "s3"), ("v", "<", 1000)],
            columns=["S", "v"],
            order_by=["ID desc"],
            limit=3,
            offset=1,
        )
        ids = [i for i in range(ROWS - 1, -1, -1) if i % 7 == 3 and i / 4 < 1000][1:4]
        assert top.to_pylist() == [{"s": "s3", "v": i / 4} for i in ids]
        assert (await client.peek("t", time, limit=5)).num_rows == 5
        assert (await client.peek("t", time, limit=0)).column_names == ["id", "s", "day", "v"]
        nothing = await client.peek("t", time, where=[("day", "is not null")])
        assert (nothing.num_rows, nothing.column_names) == (0, ["id", "s", "day", "v"])
        one = await client.peek("t", time, {"s": "s1", "id": 8}, columns=["id"])
        assert one.to_pylist() == [{"id": 8}]
        assert (await client.peek("t", time, where=[("id", "=", 9)])).num_rows == 1
        assert (await client.peek("t", time, where=[("id", "=", None)])).num_rows == 0
        in_order = await client.peek("t", time, order_by=["s", "v desc nulls last"])
        expected = sorted(range(ROWS), key=lambda i: (i % 7, -i))
        assert in_order["id"].to_pylist() == expected
    assert stashed(tmp_path) == []


async def test_pieces_of_a_large_result(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        time = await filled(client)
        await client.create_index("i", "t", ["id"])
        await client.wait_for("i", await client.write({}))
        time = await client.write({})
        pieces = [piece async for piece in client.peek_batches("t", time)]
        assert len(pieces) > 5
        assert max(piece.nbytes for piece in pieces) <= SMALL["inline_bytes_max"]
        found = pa.concat_tables(pieces)["id"].to_pylist()
        assert sorted(found) == list(range(ROWS))
        # Left early: what was not taken is removed, and the connection goes on.
        async for piece in client.peek_batches("t", time):
            assert piece.num_rows
            break
        some = [p.num_rows async for p in client.peek_batches("t", time, limit=700, offset=100)]
        assert sum(some) == 700
        assert len(some) > 1
        await until(lambda: stashed(tmp_path) == [], client)


async def test_a_client_that_goes_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        time = await filled(client)
        address = client_address(client)
        async with await Client.connect(address) as other:
            pieces = other.peek_batches("t", time)
            await anext(pieces)
            assert stashed(tmp_path)
        with pytest.raises(PenstockError):
            await anext(pieces)
        await until(lambda: stashed(tmp_path) == [], client)


def client_address(client: Client) -> str:
    link: Any = client._exchange._link
    return str(link.peer)


async def test_what_is_taken_too_late_is_gone_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = StashedBlobs.get

    async def read_late(self: StashedBlobs, key: str) -> bytes | None:
        """Only when the collection has been there."""
        await until(lambda: key.rpartition("/")[2] not in stashed(tmp_path), client)
        return await read(self, key)

    async with running(tmp_path, stash_orphan_ms=1) as client:
        time = await filled(client)
        monkeypatch.setattr(StashedBlobs, "get", read_late)
        with pytest.raises(DeadlineExceeded, match="stash_orphan_ms"):
            async for _ in client.peek_batches("t", time):
                pass
        assert (await client.peek("t", time, {"id": 1})).num_rows == 1


async def test_what_a_former_life_left_goes_at_the_start(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await filled(client)
    folder = tmp_path / "state" / "blob" / "_stash"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "0123456789abcdef-0-00000001").write_bytes(b"left")
    async with running(tmp_path) as client:
        await until(lambda: stashed(tmp_path) == [], client)
        assert (await client.peek("t")).num_rows == ROWS


async def test_wishes_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        time = await filled(client)
        refused: list[tuple[dict[str, Any], str]] = [
            ({"where": [("nothere", "=", 1)]}, "no column 'nothere'"),
            ({"where": [("id", "like", 1)]}, "an operator of ="),
            ({"where": [("id", "=")]}, "an operator of ="),
            ({"columns": ["id", "ID"]}, "duplicate"),
            ({"order_by": ["nothere desc"]}, "no column"),
            ({"order_by": ["id sideways"]}, "COLUMN"),
            ({"limit": -1}, "limit -1"),
            ({"limit": 1, "offset": -1}, "offset -1"),
        ]
        for given, rule in refused:
            with pytest.raises(InvalidUsage, match=rule):
                await client.peek("t", time, **given)
        with pytest.raises(TypeMismatch, match="does not fit"):
            await client.peek("t", time, where=[("id", ">", "abc")])


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("v > 1.5", ("v", ">", 1.5)),
        ("`s`='a b'", ("s", "=", "a b")),
        ("S <> it's", ("S", "<>", "it's")),
        ("day >= 2013-02-01", ("day", ">=", datetime.date(2013, 2, 1))),
        ("day IS  NOT null", ("day", "is not null")),
        ("other < 5", ("other", "<", "5")),
    ],
)
def test_a_condition_as_text(text: str, condition: tuple[Any, ...]) -> None:
    columns = (TableColumn("s", "string"), TableColumn("day", "date"), TableColumn("v", "double"))
    assert parse_condition(text, TableSchema(columns)) == condition


@pytest.mark.parametrize("text", ["v", "v >", "v is null 5", "v ~ 5", "v > abc"])
def test_text_that_is_no_condition(text: str) -> None:
    with pytest.raises(InvalidUsage, match="--filter"):
        parse_condition(text, TableSchema((TableColumn("v", "double"),)))


async def test_the_command(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await filled(client)
        command = [sys.executable, "-m", "actors.doors.commands.cli", "peek", "t"]
        command += ["--connect", client_address(client), "--filter", "s = s2"]
        command += ["--filter", "id < 20", "--columns", "id,s,day", "--order-by", "id desc"]
        shown = await anyio.run_process([*command, "--limit", "2"])
        assert shown.stdout.decode() == "id\ts\tday\n16\ts2\tNULL\n9\ts2\tNULL\n"
        shown = await anyio.run_process([*command, "--offset", "2", "--json"])
        assert json.loads(shown.stdout) == {"id": 2, "s": "s2", "day": None}
        shown = await anyio.run_process([*command, "--filter", "no > 1"], check=False)
        assert shown.returncode == 2
        assert "no column 'no'" in shown.stderr.decode()
