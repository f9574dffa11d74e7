"""A new view over a table of 5M rows until it can be read, against the plain batch query.

Ours: from the call of `create_materialized_view` until all times written so far are sealed in the
view (analysis, compilation, the computation and the durable result). Peer: plain Spark runs the
view's text over Parquet files of the same rows, in the same session. Both are warm: the first three
rounds of each do not count. ``_steppable`` (no target): from inserting a row, once the view can be
read, until the view is beyond it, which means that its arrangements are filled.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import anyio
import numpy
import pyarrow as pa
import pyarrow.parquet as pq

from actors import Client, Settings
from measure import Measure, Report, median
from view_step import Bench

CHUNK = 200_000
PRODUCTS = 10_000
CATEGORIES = 100
TARGET = 1.5
DEADLINE_MS = 1_800_000
TABLES = {
    "sales": {"id": "bigint", "product": "bigint", "region": "string", "amount": "bigint"},
    "products": {"product": "bigint", "category": "string"},
}
QUERIES = {
    "aggregate": "SELECT region, product % 1000 AS p, count(*) AS n, sum(amount) AS s FROM sales "
    "GROUP BY 1, 2",
    "join_aggregate": "SELECT p.category, count(*) AS n, sum(s.amount) AS s FROM sales s "
    "JOIN products p ON s.product = p.product GROUP BY p.category",
}


def sales(start: int, count: int) -> pa.Table:
    """Return rows `start` to ``start + count - 1``."""
    ids = numpy.arange(start, start + count, dtype=numpy.int64)
    regions = pa.DictionaryArray.from_arrays(
        pa.array(ids % 4, pa.int32()), pa.array(["north", "east", "south", "west"])
    )
    return pa.table(
        {
            "id": ids,
            "product": ids * 7919 % PRODUCTS,
            "region": regions.cast(pa.string()),
            "amount": ids % 997,
        }
    )


def products() -> pa.Table:
    """Return the dimension table."""
    names = [f"category {number % CATEGORIES}" for number in range(PRODUCTS)]
    return pa.table({"product": pa.array(range(PRODUCTS), pa.int64()), "category": names})


async def one(
    report: Report, client: Client, bench: Bench, kind: str, files: dict[str, Path], count: int
) -> None:
    """Measure one query: create and drop the view, then run the plain query, several times in
    alternation."""
    sql = QUERIES[kind]
    warm, turns = (1, 1) if report.quick else (3, 7)
    ready, steppable, again = [], [], []
    for turn in range(warm + turns):
        name = f"{kind}{turn}"
        written = await client.write({})
        started = time.perf_counter()
        await client.create_materialized_view(name, sql)
        await client.wait_for(name, written, deadline_ms=DEADLINE_MS)
        elapsed = (time.perf_counter() - started) * 1000
        row = sales(count, 1)
        written = await client.insert("sales", row)
        started = time.perf_counter()
        await client.wait_for(name, written, deadline_ms=DEADLINE_MS)
        first = (time.perf_counter() - started) * 1000
        await client.delete("sales", row)
        await client.drop(name)
        plain = [await bench.query(sql, files) for _ in range(3)]
        if turn >= warm:
            ready.append(elapsed)
            steppable.append(first)
            again += plain
    peer = median(again)
    report.add(Measure(f"hydrate_{kind}", median(ready), peer, target=TARGET))
    report.add(Measure(f"hydrate_{kind}_steppable", median(steppable), peer))


async def run(report: Report) -> None:
    """Load the tables, then measure all queries."""
    count = 50_000 if report.quick else 5_000_000
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = {name: folder / f"{name}.parquet" for name in TABLES}
        bench = Bench(Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0"))
        async with bench.service as service, await Client.in_process(service) as client:
            for name, columns in TABLES.items():
                await client.create_table(name, columns)
            await client.insert("products", products())
            pq.write_table(products(), files["products"])
            with pq.ParquetWriter(files["sales"], sales(0, 1).schema) as writer:
                for start in range(0, count, CHUNK):
                    chunk = sales(start, min(CHUNK, count - start))
                    await client.insert("sales", chunk)
                    writer.write_table(chunk)
            for kind in QUERIES:
                await one(report, client, bench, kind, files, count)


if __name__ == "__main__":
    made = Report("Hydration of a view, against the plain batch query.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
