"""Kills the service, Spark's process, its JVM and PostgreSQL while pgbench writes, and checks.

Run: ``python tests/proof/postgres_campaign.py [--kills 50] [--seed 1] [--rate 60]``.

PostgreSQL runs pgbench's TPC-B, whose transactions keep four sums equal: the balances of accounts,
of tellers and of branches, and the deltas of the history. `penstock serve` takes the four tables
by logical replication and keeps a view on each, and one that joins two. At random moments one of
the four is killed with ``kill -9``; now and then a column is added or dropped meanwhile. After
every kill, and at the end:

1. at one time the four sums are equal, whatever was lost when;
2. times and frontiers go on from where they stood.

At the end every view equals the same query in PostgreSQL. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import psycopg
from crash_campaign import Service, free_port

from actors import Client
from actors.runtime.errors import PenstockError
from actors.testing.postgres_server import PostgresServer, binary, postgres_server

TABLES = ("accounts", "branches", "tellers", "history")
VIEWS = {
    "sum_accounts": "SELECT sum(abalance) AS s FROM accounts",
    "sum_branches": "SELECT sum(bbalance) AS s FROM branches",
    "sum_tellers": "SELECT sum(tbalance) AS s FROM tellers",
    "sum_history": "SELECT coalesce(sum(delta), 0) AS s FROM history",
    "by_branch": "SELECT t.bid, count(*) AS n, sum(t.tbalance) AS s FROM tellers t "
    "JOIN branches b ON t.bid = b.bid GROUP BY t.bid",
}
SUMS = [name for name in VIEWS if name.startswith("sum_")]
STUCK_S = 600
VICTIMS = ("service", "engine", "jvm", "postgres")


class Bench:
    """pgbench, started again whenever it has ended."""

    def __init__(self, server: PostgresServer, rate: int) -> None:
        self._command = [binary("pgbench"), "-h", str(server.folder), "-p", str(server.port)]
        self._command += ["-U", "bench", "-n", "-c", "2", "-R", str(rate), "-T", "86400"]
        self._command += ["postgres"]
        self._process: subprocess.Popen[bytes] | None = None

    def go_on(self) -> None:
        """Sees to it that it runs."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )

    def stop(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


async def sql(server: PostgresServer, text: str) -> list[tuple[Any, ...]]:
    """Runs SQL as the superuser."""
    async with await psycopg.AsyncConnection.connect(server.conninfo(), autocommit=True) as wire:
        cursor = await wire.execute(text.encode())
        return await cursor.fetchall() if cursor.description else []


async def steady(client: Client, marks: int) -> int:
    """A time at which everything up to a mark is in all views."""
    time = 0
    async for found in client.subscribe("marks"):
        if found.table is not None and marks in found.table["n"].to_pylist():
            time = found.upper - 1
            break
    for view in VIEWS:
        await client.wait_for(view, time, deadline_ms=120_000)
    return time


async def tell(service: Any) -> None:
    """Prints how far everything is, and what the service said last."""
    with anyio.move_on_after(30):
        async with await Client.connect(service.address) as client:
            for found in (await client.status()).objects:
                print(f"  {found.name}: below {found.upper}, {found.state}", flush=True)
            for source in await client.sources():
                print(f"  source {source.name}: {source.health}", flush=True)
    log = (service.state.parent / "service.log").read_text().splitlines()
    print("\n".join(f"  {line[:300]}" for line in log[-60:]), flush=True)


async def check(server: PostgresServer, service: Any, mark: int, former: int) -> int:
    """Writes a mark, waits for it, and compares the sums; the time of it."""
    await sql(server, f"INSERT INTO marks VALUES ({mark})")
    time, sums = 0, dict[str, int]()
    with anyio.move_on_after(STUCK_S) as waited:
        while True:
            try:
                async with await Client.connect(service.address) as client:
                    time = await steady(client, mark)
                    sums = {name: await one(client, name, time) for name in SUMS}
                    break
            except PenstockError as error:
                print(f"  again: {type(error).__name__}: {error}"[:160], flush=True)
                await anyio.sleep(0.5)
    if waited.cancelled_caught:
        await tell(service)
        raise SystemExit(f"STUCK: mark {mark} is not in all views after {STUCK_S} s")
    if len(set(sums.values())) != 1 or time <= former:
        raise SystemExit(f"DIFFERENT at {time} (before {former}): {sums}")
    return time


async def one(client: Client, view: str, time: int) -> int:
    """The one value of a view."""
    table = await client.peek(view, as_of=time)
    return int(table["s"].to_pylist()[0] or 0)


async def compare(server: PostgresServer, service: Any, mark: int) -> None:
    """With nobody writing: every view equals the query in PostgreSQL."""
    time = await check(server, service, mark, 0)
    async with await Client.connect(service.address) as client:
        for name, query in VIEWS.items():
            text = query
            for table in TABLES:
                text = text.replace(f" {table}", f" pgbench_{table}")
            table = await client.peek(name, as_of=time)
            found = Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))
            wanted = Counter(await sql(server, text))
            if found != wanted:
                raise SystemExit(f"DIFFERENT: {name} at {time}: {found} and {wanted}")
            print(f"{name}: {found.total()} rows, equal", flush=True)


async def strike(victim: str, server: PostgresServer, service: Any) -> None:
    """Kills it, and starts again what does not by itself."""
    if victim == "postgres":
        server.kill()
        server.start()
    elif victim == "service":
        await service.kill()
    else:
        await service.kill_below(victim)


async def prepare(server: PostgresServer, service: Any) -> None:
    """Tables, the source, and views on it."""
    server.run("pgbench", ["-i", "-q", "-s", "1", "postgres"])
    await sql(server, "ALTER TABLE pgbench_history REPLICA IDENTITY FULL")
    await sql(server, "CREATE TABLE marks (n bigint)")
    await sql(server, "ALTER TABLE marks REPLICA IDENTITY FULL")
    config = {"kind": "postgres", "host": str(server.folder), "port": server.port}
    tables = {f"public.pgbench_{name}": name for name in TABLES} | {"public.marks": "marks"}
    async with await Client.connect(service.address) as client:
        await client.create_source("pg", config | {"user": "bench", "poll_ms": 500}, tables)
        for name, query in VIEWS.items():
            await client.create_materialized_view(name, query)


async def campaign(kills: int, seed: int, rate: int, victims: Sequence[str]) -> None:
    """All of it."""
    dice = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        postgres_server(wal_level="logical", wal_sender_timeout="30s") as server,
    ):
        service = Service(Path(folder) / "state", free_port())
        await service.start()
        bench = Bench(server, rate)
        try:
            await prepare(server, service)
            time, wide = await check(server, service, 0, 0), False
            for number in range(1, kills + 1):
                bench.go_on()
                await anyio.sleep(dice.random() * 2)
                if dice.random() < 0.15:
                    wide = not wide
                    await sql(server, "ALTER TABLE pgbench_branches "
                        + ("ADD COLUMN extra int" if wide else "DROP COLUMN extra"))  # fmt: skip
                victim = dice.choice(victims)
                await strike(victim, server, service)
                bench.go_on()
                time = await check(server, service, number, time)
                print(f"{number}: {victim} killed, sums equal at {time}", flush=True)
            bench.stop()
            await compare(server, service, kills + 1)
        finally:
            bench.stop()
            await service.stop()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=int, default=60, help="transactions a second")
    parser.add_argument("--victim", choices=VICTIMS, action="append")
    given = parser.parse_args()
    anyio.run(campaign, given.kills, given.seed, given.rate, given.victim or VICTIMS)
    print(f"{given.kills} kills: nothing differs")


if __name__ == "__main__":
    main()
