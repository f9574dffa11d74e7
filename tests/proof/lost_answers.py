"""Loses the answers of writes, kills the service, and comes back late: no row twice, none lost.

Run: ``python tests/proof/lost_answers.py [--writes 2000] [--seed 1] [--every 40] [--keep FOLDER]``.

A service process (`penstock serve`) gets INSERTs of one row each, by an unmodified PySpark over
Spark Connect and by psycopg, through proxies. Before most of them an answer is lost: the service's
bytes stop on their way, and when the row is there, or after a moment, the connections are cut. Then

- the client comes back at once and takes its operation up again;
- it comes back after `connect_detached_ms`, when the operation was given up;
- or the service is killed with ``kill -9`` and started again meanwhile (one in `--every` writes).

PySpark sends its operation again by itself. Each write has a number of its own, and says whether it
was acknowledged. At the end each acknowledged number is in the table once, each other one once or
never, and the client was told of an error. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
import anyio
import anyio.to_thread
import psycopg
from crash_campaign import free_port
from pyspark.sql.connect.session import SparkSession
from sql_kills import SqlService

from actors import Client
from tests.kit.proxy import TcpProxy

DETACHED_MS = 500
SWEPT_SECONDS = 7.0
"""Time after which an operation without a client was given up: the sweep comes all five seconds."""
WRITE_SECONDS = 300


class ConnectService(SqlService):
    """The service with both doors, at the same addresses in every life."""

    def __init__(self, state: Path) -> None:
        super().__init__(state, memory=False)
        self.connect_port = free_port()

    def settings(self) -> dict[str, Any]:
        door = {"connect_listen": f"127.0.0.1:{self.connect_port}"}
        return {**super().settings(), **door, "connect_detached_ms": DETACHED_MS}


class LostAnswers:
    """The writes of one run, and what was told of them."""

    def __init__(self, service: ConnectService, arguments: argparse.Namespace) -> None:
        self.service = service
        self.rng = Random(arguments.seed)
        self.every = arguments.every
        self.acknowledged: set[int] = set()
        self.failed: dict[int, str] = {}
        self.done: Counter[str] = Counter()
        self.spark: Any = None
        self.killed = False
        """True if the service was killed since psycopg has connected."""
        self.postgres: psycopg.AsyncConnection[Any] | None = None

    async def write(self, number: int, spark: TcpProxy, postgres: TcpProxy) -> None:
        """Write one row by one of the doors, and disturb it."""
        door = self.rng.choice(["spark", "spark", "psycopg"])
        (fault,) = self.rng.choices(["none", "cut", "late"], weights=[30, 65, 5])
        if self.rng.randrange(self.every) == 0:
            fault = "kill"
        proxy = spark if door == "spark" else postgres
        with anyio.fail_after(WRITE_SECONDS):
            await self._connect(spark, postgres)
            async with anyio.create_task_group() as group:
                if fault != "none":
                    proxy.stop_reading("target")
                write = self._by_spark if door == "spark" else self._by_psycopg
                group.start_soon(write, number)
                if fault != "none":
                    await self._disturb(fault, number, proxy)
        self.done[f"{door}, {fault}"] += 1

    async def _connect(self, spark: TcpProxy, postgres: TcpProxy) -> None:
        """Open what is not open: what is lost is to be the answer of a write."""
        if self.spark is None:
            address = f"sc://{spark.address}"
            self.spark = await anyio.to_thread.run_sync(lambda: SparkSession(address))
        # A kill ends it unseen.
        while self.postgres is None or self.killed:
            host, _, port = postgres.address.rpartition(":")
            place = f"host={host} port={port} user=writer sslmode=disable connect_timeout=60"
            try:
                self.postgres = await psycopg.AsyncConnection.connect(place, autocommit=True)
                self.killed = False
            except psycopg.OperationalError:
                # The service may be starting still.
                await anyio.sleep(0.1)

    async def _disturb(self, fault: str, number: int, proxy: TcpProxy) -> None:
        # Half of them when the row is there, the others at any moment before.
        if self.rng.random() < 0.5:
            await anyio.sleep(self.rng.uniform(0, 0.1))
        else:
            await self._until_there(number)
        if fault == "kill":
            await self.service.end()
            self.killed = True
        proxy.refuse()
        if fault == "late":
            await anyio.sleep(SWEPT_SECONDS)
        if fault == "kill":
            await self.service.start()
        proxy.heal()

    async def _until_there(self, number: int) -> None:
        async with await Client.connect(self.service.address) as client:
            # expires: it never came to the service
            with anyio.move_on_after(10):
                while not (await client.peek("t", where=[("id", "=", number)])).num_rows:
                    await anyio.sleep(0.02)

    async def _by_spark(self, number: int) -> None:
        text = f"INSERT INTO t VALUES ({number})"
        try:
            await anyio.to_thread.run_sync(lambda: self.spark.sql(text).collect())
            self.acknowledged.add(number)
        except Exception as error:  # noqa: BLE001 - a client's errors have no common class
            self.failed[number] = f"{type(error).__name__}: {error}"
            # Of another server, and closed for good.
            if "SESSION_" in str(error):
                self.spark = None

    async def _by_psycopg(self, number: int) -> None:
        assert self.postgres is not None
        try:
            await self.postgres.execute(f"INSERT INTO t VALUES ({number})".encode())
            self.acknowledged.add(number)
        except psycopg.Error as error:
            self.failed[number] = f"{type(error).__name__}: {error}"
        if self.postgres.broken:
            self.postgres = None

    async def check(self, writes: int) -> int:
        """Compare the table with what was told; return the number of differences."""
        async with await Client.connect(self.service.address) as client:
            found = Counter((await client.peek("t"))["id"].to_pylist())
        wrong = 0
        for number in range(writes):
            there, told = found.pop(number, 0), number in self.acknowledged
            if there > 1 or (told and not there) or (not told and number not in self.failed):
                wrong += 1
                print(f"WRONG: {number} is there {there} times, acknowledged: {told}, "
                      f"{self.failed.get(number, 'no error')}", flush=True)  # fmt: skip
        return wrong + len(found)


async def run(arguments: argparse.Namespace, folder: Path) -> int:
    """The number of differences."""
    service = ConnectService(folder / "state")
    campaign = LostAnswers(service, arguments)
    try:
        await service.start()
        async with await Client.connect(service.address) as client:
            await client.create_table("t", {"id": "int"})
        places = (f"127.0.0.1:{service.connect_port}", f"127.0.0.1:{service.pg_port}")
        async with (
            TcpProxy("127.0.0.1:0", places[0]) as spark,
            TcpProxy("127.0.0.1:0", places[1]) as postgres,
        ):
            for number in range(arguments.writes):
                await campaign.write(number, spark, postgres)
                if (number + 1) % 100 == 0:
                    print(f"{number + 1} writes, {service.kills} kills", flush=True)
            wrong = await campaign.check(arguments.writes)
    finally:
        if service.process is not None and service.process.returncode is None:
            service.process.kill()
    print(f"{dict(sorted(campaign.done.items()))}")
    print(
        f"{arguments.writes} writes, {service.kills} kills, {len(campaign.acknowledged)} "
        f"acknowledged, {len(campaign.failed)} with an error: {wrong} wrong"
    )
    return wrong


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--writes", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=40, help="writes between two kills")
    parser.add_argument("--keep", default="", help="folder for the state and log of a wrong run")
    arguments = parser.parse_args()
    # PySpark logs each error that it raises, too.
    logging.getLogger("pyspark.sql.connect").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="penstock_lost_") as folder:
        wrong = anyio.run(run, arguments, Path(folder))
        if wrong and arguments.keep:
            shutil.copytree(folder, arguments.keep, dirs_exist_ok=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
