"""Steps of a view that joins a million accounts to ten branches, where the branches change.

A branch has a hundred thousand accounts. The view sums these by a column of the branch, so an
update of one branch affects them all.

- ``wide_join_branch``: the step of such an update. The peer is the query in plain Spark over the
  same tables, cached.
- ``wide_join_branch_rows``: the same, against a service that joins the rows themselves
  (`eager_aggregation_rows_min` out of reach).
- ``wide_join_account``: a step of 100 changes of accounts in both: the cost of the sums below the
  join.
- ``wide_join_many_times``: twenty updates of branches, one after another, until the view has all of
  them. The peer is plain Spark once.

The environment variable ROWS sets the number of accounts.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy
import pyarrow as pa
import pyarrow.parquet as pq

from actors import Client, Service, Settings
from measure import Measure, Report, median, size_name, sizes
from streaming import Peer

BRANCHES = 10
CHUNK = 100_000
CHANGES = 100
TIMES = 20
DEADLINE_MS = 600_000
SQL = (
    "SELECT b.funds, b.city, count(*) AS n, sum(a.balance) AS total, max(a.balance) AS most "
    "FROM account a JOIN branch b ON a.bid = b.bid GROUP BY b.funds, b.city"
)


def accounts(start: int, end: int, shift: int = 0) -> pa.Table:
    """Return the accounts `start` to ``end - 1``; another `shift` gives them other balances."""
    ids = numpy.arange(start, end, dtype=numpy.int64)
    balances = (ids * 2_654_435_761 + shift * 40_503) % 1_000_003
    return pa.table({"aid": ids, "bid": (ids % BRANCHES).astype(numpy.int32), "balance": balances})


def branches(numbers: list[int], funds: int) -> pa.Table:
    """Return branches with these funds."""
    ids = pa.array(numbers, pa.int32())
    cities = pa.array([f"city {number}" for number in numbers])
    return pa.table({"bid": ids, "funds": pa.array([funds] * len(numbers)), "city": cities})


class Steps:
    """Updates a different row of either table each time, and measures how long the view takes."""

    def __init__(self, client: Client, count: int) -> None:
        self._client = client
        self._count = count
        self._taken = 0

    async def branch(self, times: int = 1) -> float:
        """Return the milliseconds until the view has `times` updates of branches."""
        started, written = time.perf_counter(), 0
        for _ in range(times):
            self._taken += 1
            row = branches([self._taken % BRANCHES], self._taken)
            written = await self._client.update("branch", row)
        return await self._since(started, written)

    async def account(self) -> float:
        """Return the milliseconds of a step of changed accounts."""
        rows = []
        for _ in range(CHANGES // 2):
            self._taken += 1
            number = self._taken * 7919 % self._count
            rows.append(accounts(number, number + 1, self._taken))
        written = await self._client.update("account", pa.concat_tables(rows))
        return await self._since(time.perf_counter(), written)

    async def _since(self, started: float, written: int) -> float:
        await self._client.wait_for("by_city", written, deadline_ms=DEADLINE_MS)
        return (time.perf_counter() - started) * 1000


async def ours(count: int, counted: int, settings: Settings, *, many: bool) -> dict[str, float]:
    """Return the medians by kind of step. `many`: include many updates at once."""
    with tempfile.TemporaryDirectory() as folder:
        placed = msgspec.structs.replace(settings, state_dir=f"{folder}/state")
        async with Service(placed) as service, await Client.in_process(service) as client:
            types = {"aid": "bigint", "bid": "int", "balance": "bigint"}
            await client.create_table("account", types, primary_key=["aid"])
            types = {"bid": "int", "funds": "bigint", "city": "string"}
            await client.create_table("branch", types, primary_key=["bid"])
            await client.insert("branch", branches(list(range(BRANCHES)), 0))
            for start in range(0, count, CHUNK):
                await client.insert("account", accounts(start, min(start + CHUNK, count)))
            await client.create_materialized_view("by_city", SQL)
            steps = Steps(client, count)
            found = {}
            kinds: dict[str, Any] = {"account": steps.account, "branch": steps.branch}
            if many:
                kinds["many_times"] = partial(steps.branch, TIMES)
            for name, step in kinds.items():
                taken = [await step() for _ in range(2 * counted)]
                found[name] = median(taken[counted:])
                print(f"  {name}: {found[name]:.1f} ms", flush=True)
            return found


def peer(count: int, counted: int) -> float:
    """Return the milliseconds of the query in plain Spark over cached tables."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        spark = Peer(place)
        try:
            session: Any = spark.session
            tables = {"account": accounts(0, count), "branch": branches(list(range(BRANCHES)), 0)}
            for name, rows in tables.items():
                pq.write_table(rows, place / f"{name}.parquet")
                cached = session.read.parquet(str(place / f"{name}.parquet")).cache()
                cached.count()
                cached.createOrReplaceTempView(name)
            taken = []
            for _ in range(2 * counted):
                started = time.perf_counter()
                session.sql(SQL).collect()
                taken.append((time.perf_counter() - started) * 1000)
            return median(taken[counted:])
        finally:
            spark.close()


async def run(report: Report) -> None:
    """Measure ours with and without sums below the join, then the peer."""
    counted = 3 if report.quick else 20
    for count in sizes((20_000,) if report.quick else (1_000_000,)):
        settings = Settings(listen="127.0.0.1:0")
        eager = await ours(count, counted, settings, many=True)
        settings = msgspec.structs.replace(settings, eager_aggregation_rows_min=count)
        rows = await ours(count, max(3, counted // 4), settings, many=False)
        spark = await anyio.to_thread.run_sync(partial(peer, count, counted))
        size = size_name(count)
        report.add(Measure(f"wide_join_{size}_branch", eager["branch"], spark, target=1.0))
        report.add(Measure(f"wide_join_{size}_branch_rows", eager["branch"], rows["branch"]))
        report.add(Measure(f"wide_join_{size}_account", eager["account"], rows["account"]))
        report.add(Measure(f"wide_join_{size}_many_times", eager["many_times"], spark))


if __name__ == "__main__":
    made = Report("Steps of a join whose small side changes, against plain Spark.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
