"""`penstock serve --role …` with real Spark in each process, and a controller that is killed."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
import pytest

from actors.doors.client.client import Client
from actors.runtime.errors import PenstockError

JOINED = (
    "SELECT n.name, count(*) AS n, sum(t.v) AS s FROM t JOIN names n ON t.k = n.k GROUP BY n.name"
)


class ServedRole:
    """One process of a service, as a user starts it."""

    def __init__(self, process: anyio.abc.Process, log: Path) -> None:
        self.process = process
        self.log = log
        self.address = ""

    async def until_logged(self, text: str) -> None:
        """Wait until its log has this text."""
        while text not in self.log.read_text():
            await anyio.sleep(0.05)

    async def until_ready(self) -> str:
        """Wait until it serves, and return its address."""
        assert self.process.stdout is not None
        told = ""
        while "\nready\n" not in told:
            told += (await self.process.stdout.receive()).decode()
        [self.address] = [
            line.removeprefix("listening on ")
            for line in told.splitlines()
            if line.startswith("listening on ")
        ]
        return self.address


@asynccontextmanager
async def serve(tmp_path: Path, name: str, *options: str) -> AsyncIterator[ServedRole]:
    given = {
        "state_dir": tmp_path / name,
        "listen": "127.0.0.1:0",
        "blob_url": f"file:{tmp_path}/blobs",
        "consensus_url": f"sqlite:{tmp_path}/documents.db",
        "spark_master": "local[1]",
        "store_poll_ms": 50,
    }
    settings = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "actors.doors.commands.cli", "serve", *settings, *options]
    log = tmp_path / f"{name}.log"
    with log.open("wb") as logged:
        process = await anyio.open_process(command, stderr=logged)
    try:
        yield ServedRole(process, log)
    finally:
        if process.returncode is None:
            process.terminate()
        with anyio.CancelScope(shield=True):
            await process.wait()
            await process.aclose()


async def joined(client: Client) -> dict[str, tuple[int, int]]:
    rows = (await client.peek("joined")).to_pylist()
    return {row["name"]: (row["n"], row["s"]) for row in rows}


async def greatest(client: Client) -> list[dict[str, int]]:
    """A query that Spark runs."""
    pieces = client.query("SELECT max(v) AS m FROM t WHERE k = 1")
    return [row async for piece in pieces for row in piece.to_pylist()]


async def write_again(standby: ServedRole, row: dict[str, int]) -> None:
    """Write a row at a controller as soon as that takes it."""
    await standby.until_ready()
    async with await Client.connect(standby.address) as client:
        await client.insert("t", [row])


@pytest.mark.long
async def test_views_go_on_at_a_replica_whose_controller_is_killed(tmp_path: Path) -> None:
    replica = serve(tmp_path, "r", "--role", "replica", "--cluster-listen", "127.0.0.1:0")
    first = serve(tmp_path, "c1", "--role", "controller")
    async with replica as replica_process, first as controller:
        await replica_process.until_ready()
        async with (
            await Client.connect(await controller.until_ready()) as client,
            serve(tmp_path, "c2", "--role", "controller", "--standby") as standby,
        ):
            await client.create_table("t", {"id": "bigint", "k": "bigint", "v": "bigint"}, ["id"])
            await client.create_table("names", {"k": "bigint", "name": "string"}, ["k"])
            await client.insert("names", [{"k": k, "name": f"n{k}"} for k in range(3)])
            await client.create_materialized_view("joined", JOINED)
            await client.insert("t", [{"id": i, "k": i % 3, "v": i} for i in range(30)])
            assert await joined(client) == {f"n{k}": (10, 135 + 10 * k) for k in range(3)}
            # A query runs on the controller's own Spark.
            assert await greatest(client) == [{"m": 28}]
            await standby.until_logged("standing by")
            controller.process.kill()
            killed = time.monotonic()
            with suppress(PenstockError):
                await client.insert("t", [{"id": 99, "k": 9, "v": 0}])
            await write_again(standby, {"id": 100, "k": 1, "v": 7})
            print(f"writes are acknowledged again after {time.monotonic() - killed:.1f} s")
            async with await Client.connect(standby.address) as other:
                assert await joined(other) == {"n0": (10, 135), "n1": (11, 152), "n2": (10, 155)}
                rows = (await other.peek("penstock.dataflows")).to_pylist()
                assert {row["replica"] for row in rows} == {replica_process.address}
                assert await greatest(other) == [{"m": 28}]
            assert replica_process.process.returncode is None
