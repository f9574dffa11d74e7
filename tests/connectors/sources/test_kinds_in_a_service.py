"""Generators and files in the whole service: exact at every time, and over restarts."""

from __future__ import annotations

from collections import Counter as Bag
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pyarrow as pa
import pyarrow.parquet as pq

from actors.doors.client.client import Client
from actors.model.protocol.api import SourceStatus
from actors.runtime.settings import Settings
from service_house import running_service  # type: ignore[import-not-found]


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Client]:
    (tmp_path / "in").mkdir(exist_ok=True)
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        source_tick_ms=50,
        maintenance_ms=20,
        source_dirs=str(tmp_path / "in"),
    )
    async with running_service(settings) as (_, client):
        yield client


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():
        await anyio.sleep(0.02)


async def status(client: Client, name: str) -> SourceStatus:
    (found,) = [each for each in await client.sources() if each.name == name]
    return found


def put(folder: Path, name: str, keys: list[int]) -> None:
    part = folder / f"_{name}"
    pq.write_table(pa.table({"k": pa.array(keys, pa.int64()), "v": ["x"] * len(keys)}), part)
    part.rename(folder / name)


async def keys(client: Client, name: str, column: str, as_of: int | None = None) -> Bag[int]:
    table = await client.peek(name, as_of=as_of)
    return Bag(table[column].to_pylist())


async def test_files_are_taken_once_over_lives_of_the_service(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "clicks"
    folder.mkdir(parents=True)
    columns = [{"name": "k", "type": "bigint"}, {"name": "v", "type": "string"}]
    config = {
        "kind": "files",
        "folder": str(folder),
        "format": "parquet",
        "columns": columns,
        "poll_ms": 20,
    }
    for life in range(3):
        put(folder, f"{life}-before.parquet", [10 * life, 10 * life + 1])
        async with running(tmp_path) as client:
            if life == 0:
                await client.create_source("clicks", config, {"rows": "clicks_in"})
            put(folder, f"{life}-while.parquet", [10 * life + 2])
            await until(partial(all_there, client, life))
            if life == 2:
                put(folder, "2-while.parquet", [99])
                await until(
                    partial(warned, client, "changed after it was ingested: 2-while.parquet")
                )
                assert await all_there(client, life)


async def all_there(client: Client, life: int) -> bool:
    wanted = Bag(10 * number + place for number in range(life + 1) for place in range(3))
    found = await keys(client, "clicks_in", "k")
    assert found <= wanted
    return found == wanted


async def warned(client: Client, said: str) -> bool:
    """A source that goes on says what it left out."""
    health = (await status(client, "clicks")).health
    assert health.status == "running"
    return said in (health.hint or "")


async def test_refresh_functions_are_transactions(tmp_path: Path) -> None:
    config = {
        "kind": "tpch", "scale": 0.001, "orders_per_refresh": 200, "rate": 20, "every_ms": 20
    }  # fmt: skip
    async with running(tmp_path) as client:
        await client.create_source("shop", config, ["orders", "lineitem", "region"])

        async def filled() -> bool:
            return bool((await client.peek("orders")).num_rows)

        await until(filled)
        seen: set[int] = set()

        async def at_some_time() -> bool:
            uppers = {each.name: each.upper for each in (await client.status()).objects}
            time = min(uppers["orders"], uppers["lineitem"]) - 1
            orders = await keys(client, "orders", "o_orderkey", time)
            lines = await keys(client, "lineitem", "l_orderkey", time)
            assert lines.keys() == orders.keys()
            assert orders.total() in (1_500, 1_700)
            assert max(orders.values()) == 1
            seen.add(sum(orders))
            return len(seen) > 4

        await until(at_some_time)
        assert (await client.peek("region")).num_rows == 5


async def test_nexmark_ends_where_it_should(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        config = {"kind": "nexmark", "up_to": 5_000, "rate": 20_000}
        await client.create_source("auctions", config)

        async def whole() -> bool:
            return bool((await client.peek("bid")).num_rows == 4_600)

        await until(whole)
        assert (await client.peek("auction")).num_rows == 300
        assert (await client.peek("person")).num_rows == 100


async def test_a_table_that_is_added_or_comes_again_is_filled(tmp_path: Path) -> None:
    """Of sources that have nothing more to give, so that nothing but the filling is a mark."""
    folder = tmp_path / "in" / "clicks"
    folder.mkdir(parents=True)
    put(folder, "1.parquet", [1, 2])
    put(folder, "2.parquet", [3])
    columns = [{"name": "k", "type": "bigint"}, {"name": "v", "type": "string"}]
    files = {
        "kind": "files", "folder": str(folder), "format": "parquet", "columns": columns,
        "poll_ms": 20, "batch_files_max": 1,
    }  # fmt: skip
    async with running(tmp_path) as client:
        await client.create_source(
            "auctions", {"kind": "nexmark", "up_to": 500}, ["auction", "bid"]
        )
        await client.create_source("clicks", files, {"rows": "clicks_in"})

        async def holds(name: str, count: int) -> bool:
            return bool((await client.peek(name)).num_rows == count)

        await until(partial(holds, "auction", 30))
        await until(partial(holds, "clicks_in", 3))
        await client.alter_source("auctions", ["person"])
        await until(partial(holds, "person", 10))
        await client.drop("person")
        await client.alter_source("auctions", ["person"])
        await until(partial(holds, "person", 10))
        await client.drop("clicks_in")
        await client.alter_source("clicks", {"rows": "clicks_in"})
        await until(partial(holds, "clicks_in", 3))
        assert {each.health.status for each in await client.sources()} == {"running"}
        assert await holds("auction", 30)
