"""Keeps five views fresh for an hour under pgbench, at the highest rate that they keep up with.

Run: ``python tests/proof/loaded_hour.py [--minutes 60] [--rates 400,800,1600] [--scale 5]``.

A service of its own, as a user starts it, has a source of pgbench's tables and the five views of
``bench/freshness.py``. First the rates are tried for half a minute each, lowest first: one is kept
up with when no view is older than a second for a twentieth of the samples, and all are there a
second after the load. Then the highest of these for the whole time. Meanwhile the ages of all
views are sampled ten times a second, and the memory of the service, its engine and its JVM every
two seconds; a line a minute is printed.

Exit status 1 when a view was older than three seconds at any sample, when the memory of a process
grew by more than a tenth from the second quarter to the last, when the load was not all written,
or when a view differs from PostgreSQL's own answer at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import anyio
import psycopg
from crash_campaign import Service, free_port
from soak import sample

from actors.doors.client.client import Client
from actors.runtime.settings import Settings
from actors.testing.postgres_server import PostgresServer, binary, postgres_server

TABLES: Final = ("accounts", "branches", "tellers", "history")
VIEWS: Final = {
    "by_branch": "SELECT b.bid, count(*) AS n, sum(a.abalance) AS total FROM accounts a "
    "JOIN branches b ON a.bid = b.bid GROUP BY b.bid",
    "by_teller": "SELECT t.tid, count(h.tid) AS n, sum(h.delta) AS moved FROM tellers t "
    "LEFT JOIN history h ON t.tid = h.tid GROUP BY t.tid",
    "balances": "SELECT sum(abalance) AS total FROM accounts",
    "moved": "SELECT aid, count(*) AS n, max(delta) AS most FROM history "
    "GROUP BY aid HAVING count(*) > 1",
    "watched": "SELECT a.aid, a.abalance, b.bbalance FROM accounts a "
    "JOIN branches b ON a.bid = b.bid WHERE a.aid <= 500",
}
SAMPLE_SECONDS: Final = 0.1
TRIAL_SECONDS: Final = 30
SETTLE_SECONDS: Final = 90
"""Plans are built and the JVM compiles what runs often: the rates are tried after that."""
KEPT_UP_MS: Final = 1_000
AGE_MS_MAX: Final = 3_000
GROWTH_MAX: Final = 1.1
"""Of memory, from the second quarter to the last."""
ROWS_MAX: Final = 10_000_000
CATCH_UP_SECONDS_MAX: Final = 120.0
WRITTEN_MIN: Final = 0.98
"""The share of a rate that pgbench must reach: beyond, PostgreSQL is the bound."""


class LoadedBank:
    """pgbench's database, a service that follows it, and what was seen of both."""

    def __init__(self, server: PostgresServer, service: Service, client: Client) -> None:
        self._server = server
        self._service = service
        self._client = client
        self.ages: list[tuple[float, str, float]] = []
        """(`time.time`, view, milliseconds from its upper until then)."""
        self.memory: list[dict[str, float]] = []

    async def uppers(self) -> dict[str, float]:
        """Return the time up to which each view is known, as `time.time` has it."""
        objects = (await self._client.status()).objects
        return {each.name: each.upper / 1000 for each in objects if each.name in VIEWS}

    async def caught_up(self) -> float:
        """Wait until every view has all that was written before now; returns the seconds."""
        begun = time.time()
        while min((await self.uppers()).values(), default=0.0) < begun:
            if time.time() > begun + CATCH_UP_SECONDS_MAX:
                break
            await anyio.sleep(SAMPLE_SECONDS / 2)
        return time.time() - begun

    async def watch_ages(self) -> None:
        """Sample ages until it is canceled."""
        while True:
            begun = time.time()
            uppers = await self.uppers()
            now = time.time()
            self.ages += [(now, name, 1000 * (now - each)) for name, each in uppers.items()]
            await anyio.sleep(max(0.0, begun + SAMPLE_SECONDS - time.time()))

    async def watch_memory(self) -> None:
        """Sample memory until it is canceled."""
        assert self._service.process is not None
        while True:
            self.memory.append(sample(self._service.process.pid))
            await anyio.sleep(2)

    async def tell(self) -> None:
        """Print a line a minute until it is canceled."""
        while True:
            begun = time.time()
            await anyio.sleep(60)
            memory = " ".join(f"{name}={mb:.0f}MiB" for name, mb in self.memory[-1].items())
            print(
                f"  {told([age for at, _, age in self.ages if at >= begun])}; {memory}", flush=True
            )

    async def load(self, rate: int, seconds: int) -> float:
        """Run pgbench's own transactions at a rate; returns the share of it that was reached."""
        before = self._transactions()
        await anyio.run_process(
            [
                binary("pgbench"), "-h", str(self._server.folder), "-p", str(self._server.port),
                "-U", "bench", "-n", "-R", str(rate), "-T", str(seconds), "-c", "4", "postgres",
            ]
        )  # fmt: skip
        return (self._transactions() - before) / (rate * seconds)

    def _transactions(self) -> int:
        return int(next(iter(self.answer("SELECT count(*) FROM history")))[0])

    async def keeps_up(self, rate: int) -> bool:
        """Try a rate for half a minute."""
        self.ages.clear()
        written = await self.load(rate, TRIAL_SECONDS)
        ages = [age for _, _, age in self.ages]
        late = await self.caught_up()
        held = written >= WRITTEN_MIN and late <= 1.0 and quantiles(ages, n=20)[-1] <= KEPT_UP_MS
        print(
            f"{rate}/s: {told(ages)}; {written:.0%} written, caught up after {late:.2f} s: ", end=""
        )
        print("kept up" if held else "too much", flush=True)
        return held

    def answer(self, query: str) -> Counter[tuple[Any, ...]]:
        """Return PostgreSQL's own answer."""
        with psycopg.connect(self._server.conninfo()) as wire:
            return Counter(wire.execute(query.encode()).fetchall())

    async def differing(self) -> list[str]:
        """Return the views that differ from PostgreSQL's answers, which nobody changes."""
        await self.caught_up()
        found = []
        for name, query in VIEWS.items():
            table = await self._client.peek(name, limit=ROWS_MAX)
            rows = Counter(zip(*(each.to_pylist() for each in table.columns), strict=True))
            if rows != self.answer(query):
                found.append(name)
        return found


def told(ages: list[float]) -> str:
    """Return median, 95th percentile and most of ages, in words."""
    if len(ages) < 2:
        return "no ages"
    p95 = quantiles(ages, n=20)[-1]
    return f"ages p50 {median(ages):.0f} ms, p95 {p95:.0f} ms, most {max(ages):.0f} ms"


def grown(memory: list[dict[str, float]]) -> list[str]:
    """Print the medians of the second and last quarter; returns the processes that grew."""
    quarter, found = max(1, len(memory) // 4), []
    for name in memory[0]:
        early = median(each[name] for each in memory[quarter : 2 * quarter])
        late = median(each[name] for each in memory[-quarter:])
        print(f"{name}: second quarter {early:.0f} MiB, last quarter {late:.0f} MiB")
        if late > early * GROWTH_MAX:
            found.append(name)
    return found


async def spend(bank: LoadedBank, rates: list[int], minutes: float) -> list[str]:
    """Find the rate and hold it; returns what did not hold."""
    async with anyio.create_task_group() as group:
        group.start_soon(bank.watch_ages)
        group.start_soon(bank.watch_memory)
        await bank.load(rates[0], SETTLE_SECONDS)  # plans are built
        await bank.caught_up()
        best = 0
        for rate in rates:
            if not await bank.keeps_up(rate):
                break
            best = rate
        if not best:
            group.cancel_scope.cancel()
            return [f"{rates[0]} transactions a second are too much"]
        print(f"{minutes:g} minutes of {best} transactions a second", flush=True)
        bank.ages.clear()
        bank.memory.clear()
        group.start_soon(bank.tell)
        written = await bank.load(best, int(60 * minutes))
        ages, memory = list(bank.ages), list(bank.memory)
        group.cancel_scope.cancel()
    print(f"{best}/s: {told([age for _, _, age in ages])}; {written:.0%} written", flush=True)
    for name in VIEWS:
        print(f"  {name}: {told([age for _, each, age in ages if each == name])}", flush=True)
    faults = [f"memory of the {name} grows" for name in grown(memory)]
    oldest = max(age for _, _, age in ages)
    if oldest > AGE_MS_MAX:
        faults.append(f"a view was {oldest:.0f} ms old")
    if written < WRITTEN_MIN:
        faults.append(f"only {written:.0%} of the transactions were made")
    return faults + [f"{name} differs from PostgreSQL" for name in await bank.differing()]


async def hour(rates: list[int], minutes: float, scale: int, folder: Path) -> list[str]:
    """Do all of it; returns what did not hold."""
    with postgres_server(wal_level="logical", max_connections="30") as server:
        server.run("pgbench", ["-i", "-q", "-s", str(scale), "postgres"], timeout_s=1200)
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            # It has no key; without this PostgreSQL would refuse to publish its changes.
            admin.execute("ALTER TABLE pgbench_history REPLICA IDENTITY FULL")
            for name in TABLES:
                admin.execute(f"CREATE VIEW {name} AS SELECT * FROM pgbench_{name}".encode())
        service = Service(folder / "state", free_port())
        service.retain_history_ms = Settings().retain_history_ms
        await service.start()
        try:
            async with service.client() as client:
                config = {"kind": "postgres", "host": str(server.folder), "port": server.port}
                config |= {"user": "bench", "dbname": "postgres"}
                tables = {f"public.pgbench_{name}": name for name in TABLES}
                await client.create_source("bank", config, tables)
                for name, sql in VIEWS.items():
                    await client.create_materialized_view(name, sql)
                bank = LoadedBank(server, service, client)
                print(f"views are there after {await bank.caught_up():.1f} s", flush=True)
                return await spend(bank, rates, minutes)
        finally:
            await service.stop()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rates", default="400,600,800,1200,1600", help="transactions a second")
    parser.add_argument("--scale", type=int, default=5, help="of pgbench: 100,000 accounts each")
    given = parser.parse_args()
    rates = [int(each) for each in given.rates.split(",")]
    with tempfile.TemporaryDirectory(prefix="penstock-loaded-") as folder:
        faults = anyio.run(hour, rates, given.minutes, given.scale, Path(folder))
    for fault in faults:
        print(f"DOES NOT HOLD: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
