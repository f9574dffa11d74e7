"""How stale five views over a PostgreSQL under pgbench are, as a reader sees it.

PostgreSQL holds pgbench's tables (scale 5: 500,000 accounts). A source ingests them, and there are
five views: accounts by branch, tellers with their history, the sum of all balances, accounts with
more than one transfer, and the rows of 500 accounts with their branch's balance. pgbench runs 20,
100 and 400 transactions a second, one rate after another, starting once the views have caught up.
The age is the current time minus a view's upper, sampled ten times a second over all views.

``freshness_R_p50``, ``…_p95``: at R transactions a second. ``freshness_first_p95``: in the first
ten seconds. ``freshness_R_caught_up``: from the end of the load until the last view has all of it.
The peer is plain Spark, which runs the five queries over the same tables (Parquet, cached) in a
loop: the median, or the percentile, of the ages of its answers. ``…_postgres``: the same with
PostgreSQL itself. Targets apply to ours only.

``freshness_beside_heavy_p95``: the four lighter views at 100 transactions a second, next to a view
of sums of doubles by branch, whose groups of 100,000 rows are recomputed. The peer is the same
without it.

Environment variables: SECONDS sets the length of each load (30), RATES the rates (``20,100``),
VIEWS the views (``balances,moved``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psycopg
import pyarrow.csv as pc
import pyarrow.parquet as pq

from actors import Client, Service, Settings
from actors.testing.postgres_server import NoPostgres, PostgresServer, binary, postgres_server
from measure import Measure, Report, median, percentile
from streaming import Peer

SCALE = 5
SAMPLE_SECONDS = 0.1
FIRST_SECONDS = 10.0
CATCH_UP_SECONDS_MAX = 120.0
PEER_ROUNDS = 5
TABLES = ("accounts", "branches", "tellers", "history")
VIEWS = {
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
HEAVY = "SELECT bid, sum(CAST(abalance AS double) * 1.5) AS total FROM accounts GROUP BY bid"
HEAVY_TARGET = 1.5
TARGETS = {20: (300, 700), 100: (300, 700), 400: (450, 1_200)}
"""Limits of the median and the 95th percentile in ms, by transactions a second."""
FIRST_TARGET, CAUGHT_UP_TARGET = 1_500, 1_000


class Ages:
    """Samples the age of views, in ms, until cancelled."""

    def __init__(self, client: Client, views: Sequence[str]) -> None:
        self._client = client
        self._views = frozenset(views)
        self.samples: list[tuple[float, str, float]] = []
        """The samples so far: (`time.time` of the sample, view, age in ms)."""

    async def uppers(self) -> dict[str, float]:
        """Return each view's upper in seconds, comparable with `time.time`."""
        objects = (await self._client.status()).objects
        return {each.name: each.upper / 1000 for each in objects if each.name in self._views}

    async def wait_there(self) -> None:
        """Wait until all views exist and have caught up to now."""
        begun = time.time()
        while min((await self.uppers()).values(), default=0.0) < begun:
            await anyio.sleep(SAMPLE_SECONDS)
        print(f"  views caught up after {time.time() - begun:.1f} s", flush=True)

    async def sample(self) -> None:
        """Sample forever."""
        while True:
            begun = time.time()
            uppers = await self.uppers()
            now = time.time()
            self.samples += [(now, name, 1000 * (now - each)) for name, each in uppers.items()]
            await anyio.sleep(max(0.0, begun + SAMPLE_SECONDS - time.time()))

    def between(self, start: float, end: float) -> list[float]:
        """Return the ages of all views in an interval."""
        return [age for at, _, age in self.samples if start <= at < end]

    def tell(self, start: float, end: float) -> None:
        """Print the ages of each view in an interval."""
        for name in sorted(self._views):
            own = [age for at, each, age in self.samples if start <= at < end and each == name]
            p50, p95 = median(own), percentile(own, 0.95)
            print(f"    {name}: {p50:.0f} ms, p95 {p95:.0f} ms, most {max(own):.0f} ms", flush=True)


def seconds_of(report: Report) -> float:
    """Return the length of each load in seconds."""
    return float(os.environ.get("SECONDS", "12" if report.quick else "30"))


async def load(server: PostgresServer, rate: int, seconds: float) -> None:
    """Run pgbench's built-in transactions at a rate."""
    await anyio.run_process(
        [
            binary("pgbench"), "-h", str(server.folder), "-p", str(server.port), "-U", "bench",
            "-n", "-R", str(rate), "-T", str(int(seconds)), "-c", "4", "postgres",
        ]
    )  # fmt: skip


async def serve(report: Report, server: PostgresServer, views: dict[str, str]) -> dict[str, float]:
    """Maintain the views under all loads. Returns our figures by measure name."""
    seconds = seconds_of(report)
    rates = [int(each) for each in os.environ.get("RATES", "20,100,400").split(",")]
    found: dict[str, float] = {}
    async with bank(server) as client:
        for name, sql in views.items():
            await client.create_materialized_view(name, sql)
        ages = Ages(client, list(views))
        await ages.wait_there()
        async with anyio.create_task_group() as group:
            group.start_soon(ages.sample)
            begun = time.time()
            for rate in rates:
                started = time.time()
                # The first seconds are reported separately: plans are built then.
                warm = FIRST_SECONDS if rate == rates[0] else 2.0
                await load(server, rate, seconds + warm)
                ended = time.time()
                steady = ages.between(started + warm, ended)
                found[f"freshness_{rate}_p50"] = median(steady)
                found[f"freshness_{rate}_p95"] = percentile(steady, 0.95)
                while min((await ages.uppers()).values()) < ended:
                    if time.time() > ended + CATCH_UP_SECONDS_MAX:
                        break
                    await anyio.sleep(SAMPLE_SECONDS / 2)
                late = f"freshness_{rate}_caught_up"
                found[late] = 1000 * (time.time() - ended)
                p50, p95 = (found[f"freshness_{rate}_{part}"] for part in ("p50", "p95"))
                print(f"  {rate}/s: p50 {p50:.0f} ms, p95 {p95:.0f} ms, caught up", end="")
                print(f" {found[late]:.0f} ms after it", flush=True)
                ages.tell(started + warm, ended)
            first = ages.between(begun, begun + FIRST_SECONDS)
            found["freshness_first_p95"] = percentile(first, 0.95)
            group.cancel_scope.cancel()
    return found


@contextlib.asynccontextmanager
async def bank(server: PostgresServer) -> AsyncIterator[Client]:
    """Yield a client of a service with a source of pgbench's tables."""
    with tempfile.TemporaryDirectory() as place:
        settings = Settings(state_dir=f"{place}/state", listen="127.0.0.1:0")
        async with Service(settings) as service, await Client.in_process(service) as client:
            config = {"kind": "postgres", "host": str(server.folder), "port": server.port}
            config |= {"user": "bench", "database": "postgres"}
            tables = {f"public.pgbench_{name}": name for name in TABLES}
            await client.create_source("bank", config, tables)
            yield client


async def beside_heavy(server: PostgresServer, views: dict[str, str], seconds: float) -> Measure:
    """Measure the 95th percentile of light views' ages, with and without a heavy view."""
    found = []
    async with bank(server) as client:
        for name, sql in views.items():
            await client.create_materialized_view(name, sql)
        ages = Ages(client, list(views))
        await ages.wait_there()
        for heavy in (False, True):
            if heavy:
                await client.create_materialized_view("heavy", HEAVY)
                await Ages(client, ["heavy"]).wait_there()
            async with anyio.create_task_group() as group:
                group.start_soon(ages.sample)
                started = time.time()
                await load(server, 100, seconds + 2 * FIRST_SECONDS)
                steady = ages.between(started + 2 * FIRST_SECONDS, time.time())
                found.append(percentile(steady, 0.95))
                group.cancel_scope.cancel()
    return Measure("freshness_beside_heavy_p95", found[1], found[0], target=HEAVY_TARGET)


def answer_ages(run: Sequence[Callable[[], object]]) -> list[float]:
    """Return the ages in ms of answers when queries run in a loop, each answer as of the start of
    its query. Sampled as in `Ages`."""
    for each in run:  # compiles the code
        each()
    spans: list[list[tuple[float, float]]] = [[] for _ in run]
    for _ in range(PEER_ROUNDS):
        for place, each in enumerate(run):
            begun = time.time()
            each()
            spans[place].append((begun, time.time()))
    ages = []
    for own in spans:
        for (begun, ended), (_, replaced) in itertools.pairwise(own):
            at = ended
            while at < replaced:
                ages.append(1000 * (at - begun))
                at += SAMPLE_SECONDS / 10
    return ages


def spark_ages(server: PostgresServer, views: dict[str, str]) -> list[float]:
    """Return the ages of plain Spark's answers over cached Parquet files of the tables."""
    with tempfile.TemporaryDirectory() as place, psycopg.connect(server.conninfo()) as admin:
        folder = Path(place)
        peer = Peer(folder)
        try:
            session: Any = peer.session
            for name in TABLES:
                file = folder / f"{name}.csv"
                with admin.cursor() as cursor, file.open("wb") as out:
                    sql = f"COPY pgbench_{name} TO STDOUT (FORMAT csv, HEADER)"
                    with cursor.copy(sql) as copy:
                        for piece in copy:
                            out.write(piece)
                rows = pc.read_csv(file)
                pq.write_table(rows, folder / f"{name}.parquet", coerce_timestamps="us")
                cached = session.read.parquet(str(folder / f"{name}.parquet")).cache()
                cached.count()
                cached.createOrReplaceTempView(name)

            def answer(sql: str) -> object:
                return session.sql(sql).collect()

            return answer_ages([partial(answer, sql) for sql in views.values()])
        finally:
            peer.close()


def postgres_ages(server: PostgresServer, views: dict[str, str]) -> list[float]:
    """Return the ages of PostgreSQL's own answers."""
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        for name in TABLES:
            admin.execute(f"CREATE VIEW {name} AS SELECT * FROM pgbench_{name}")

        def answer(sql: str) -> object:
            return admin.execute(sql).fetchall()

        return answer_ages([partial(answer, sql) for sql in views.values()])


async def run(report: Report) -> None:
    """Measure ours under load, then the peers alone."""
    wanted = os.environ.get("VIEWS", "") or ",".join(VIEWS)
    views = {name: VIEWS[name] for name in wanted.split(",")}
    with postgres_server(wal_level="logical", max_connections="30") as server:
        server.run("pgbench", ["-i", "-q", "-s", str(SCALE), "postgres"], timeout_s=300)
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            # The table has no key; PostgreSQL refuses to publish its changes without this.
            admin.execute("ALTER TABLE pgbench_history REPLICA IDENTITY FULL")
        found = await serve(report, server, views)
        light = {name: sql for name, sql in views.items() if name != "by_branch"}
        heavy = await beside_heavy(server, light, seconds_of(report))
        spark = await anyio.to_thread.run_sync(spark_ages, server, views)
        postgres = await anyio.to_thread.run_sync(postgres_ages, server, views)
    report.add(heavy)
    for name, ours in found.items():
        part = name.rpartition("_")[2]
        share = 0.95 if part == "p95" else 0.5
        report.add(Measure(name, ours, percentile(spark, share), most=target_of(name)))
        if part in ("p50", "p95"):
            report.add(Measure(f"{name}_postgres", ours, percentile(postgres, share)))


def target_of(name: str) -> float | None:
    """Return the target of a measure in ms, if it has one."""
    _, rate, part = name.split("_", 2)
    if part == "caught_up":
        return CAUGHT_UP_TARGET
    if rate == "first":
        return FIRST_TARGET
    targets = TARGETS.get(int(rate))
    return None if targets is None else targets[part == "p95"]


if __name__ == "__main__":
    made = Report("Ages of five views on a PostgreSQL under pgbench.")
    try:
        anyio.run(run, made, backend_options={"use_uvloop": True})
    except NoPostgres as error:
        print(f"no PostgreSQL: {error}")
    made.close()
