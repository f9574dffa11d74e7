"""The TPC-H queries as live views: a step beside recomputing the query, same session.

A service with the embedded default is loaded with TPC-H data of tpchgen-cli and maintains one
query at a time; each step changes rows of lineitem, orders, customer and partsupp (updated in
place: half retractions, half insertions). Ours: the write is acknowledged → the view is durable
beyond it. Peer: the query's own text run whole by plain Spark over Parquet files of the same
tables. Both are warm. ``_100``: 100 changes a step; ``_0.1%``: a thousandth of the rows.
``_median`` and ``_slowest`` are of all queries' ratios.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from decimal import Decimal
from pathlib import Path

import anyio
import pyarrow as pa
import pyarrow.parquet as pq

from actors import Client, Settings, TableWrite
from actors.testing.corpora import CORPORA, read_queries
from measure import Measure, Report, median, percentile
from view_step import Bench

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "corpora"
QUERIES = {query.name: query.sql for query in read_queries(CORPUS, "tpch")}
SCHEMAS = CORPORA["tpch"].tables
KEYS = {
    "customer": ["c_custkey"],
    "lineitem": ["l_orderkey", "l_linenumber"],
    "nation": ["n_nationkey"],
    "orders": ["o_orderkey"],
    "part": ["p_partkey"],
    "partsupp": ["ps_partkey", "ps_suppkey"],
    "region": ["r_regionkey"],
    "supplier": ["s_suppkey"],
}
CHUNK = 100_000
WARM = 15
TARGETS = {"100": 1 / 15, "0.1%": 1 / 4}
TARGET_SLOWEST = 1.1


def generate(scale: float, folder: Path) -> dict[str, pa.Table]:
    """The benchmark's tables, in the service's types."""
    tool = Path(sys.executable).parent / "tpchgen-cli"
    command = [str(tool), "parquet", "-s", str(scale), "--output-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    found = {}
    for name, schema in SCHEMAS.items():
        table = pq.read_table(folder / f"{name}.parquet", columns=list(schema.names))
        found[name] = table.cast(schema.arrow())
        pq.write_table(found[name], folder / f"{name}.parquet")
    return found


class Changes:
    """Updates in place: each step takes the next rows of four tables."""

    def __init__(self, tables: dict[str, pa.Table]) -> None:
        self._tables = tables
        self._at = dict.fromkeys(("lineitem", "orders", "customer", "partsupp"), 0)

    def _next(self, name: str, count: int) -> pa.Table:
        table = self._tables[name]
        # Far apart, so that a step touches many groups; each row is changed once.
        stride = 7919
        numbers = [(self._at[name] + i) * stride % table.num_rows for i in range(count)]
        self._at[name] += count
        return table.take(sorted(set(numbers)))

    async def write(self, client: Client, rows: int) -> int:
        """One transaction of about `rows` changes; its time."""
        updated = max(3, rows // 2)
        lineitem = self._next("lineitem", updated * 7 // 10)
        orders = self._next("orders", max(1, updated * 15 // 100))
        customer = self._next("customer", max(1, updated * 5 // 100))
        partsupp = self._next("partsupp", max(1, updated // 10))
        quantity = pa.array(
            [Decimal(i % 50 + 1) for i in range(lineitem.num_rows)],
            lineitem.schema.field("l_quantity").type,
        )
        priority = pa.array([("1-URGENT", "5-LOW")[i % 2] for i in range(orders.num_rows)])
        segment = pa.array([("BUILDING", "MACHINERY")[i % 2] for i in range(customer.num_rows)])
        costs = pa.array(
            [Decimal(i % 900 + 1) for i in range(partsupp.num_rows)],
            partsupp.schema.field("ps_supplycost").type,
        )
        changed = {
            "lineitem": _set(lineitem, "lineitem", "l_quantity", quantity),
            "orders": _set(orders, "orders", "o_orderpriority", priority),
            "customer": _set(customer, "customer", "c_mktsegment", segment),
            "partsupp": _set(partsupp, "partsupp", "ps_supplycost", costs),
        }
        return await client.write({n: TableWrite(update=rows) for n, rows in changed.items()})


def _set(table: pa.Table, name: str, column: str, values: pa.Array) -> pa.Table:
    return table.select(KEYS[name]).append_column(column, values)


class Given:
    """What all queries share."""

    def __init__(self, folder: Path, tables: dict[str, pa.Table], steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.changes = Changes(tables)
        self.thousandth = max(10, sum(tables[t].num_rows for t in KEYS) // 1000)


async def one(
    report: Report, client: Client, bench: Bench, name: str, given: Given
) -> dict[str, float]:
    """One query: create, step, recompute. Returns ours / peer by the size of the step."""
    ratios = {}
    await client.create_view(name, QUERIES[name])
    status = await client.status()
    mode = next(o.mode for o in status.objects if o.name == name)
    files = {table: given.folder / f"{table}.parquet" for table in SCHEMAS}
    again = [await bench.query(QUERIES[name], files) for _ in range(given.steps // 2 + 5)]
    peer = median(again[5:])
    for label, rows, count in (("100", 100, given.steps), ("0.1%", given.thousandth, 8)):
        times = []
        for number in range(count + WARM):
            written = await given.changes.write(client, rows)
            started = time.perf_counter()
            await client.wait_for(name, written, deadline_ms=600_000)
            if number >= WARM:
                times.append((time.perf_counter() - started) * 1000)
        made = Measure(f"tpch_{name}_{label}_{mode}", median(times), peer, target=TARGET_SLOWEST)
        report.add(made)
        ratios[label] = made.ratio
        report.add(Measure(f"tpch_{name}_{label}_p95", percentile(times, 0.95), peer))
    await client.drop(name)
    return ratios


async def run(report: Report) -> None:
    """All queries, or those that the environment names."""
    scale = float(os.environ.get("TPCH_SCALE", "0.01" if report.quick else "1"))
    names = os.environ.get("TPCH_QUERIES", ",".join(QUERIES)).split(",")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tables = generate(scale, folder)
        bench = Bench(Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0"))
        async with bench.service as service, await Client.in_process(service) as client:
            for name, schema in SCHEMAS.items():
                await client.create_table(
                    name,
                    {column.name: column.type for column in schema.columns},
                    primary_key=KEYS[name],
                )
                table = tables[name]
                for start in range(0, table.num_rows, CHUNK):
                    await client.insert(name, table.slice(start, CHUNK))
            given = Given(folder, tables, 6 if report.quick else 50)
            ratios = [await one(report, client, bench, name, given) for name in names]
    for label, target in TARGETS.items():
        found = [each[label] for each in ratios]
        report.add(Measure(f"tpch_{label}_median", 100 * median(found), 100, "%", target))
        report.add(Measure(f"tpch_{label}_slowest", 100 * max(found), 100, "%", TARGET_SLOWEST))


if __name__ == "__main__":
    made = Report("TPC-H queries as live views beside full recomputation.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
