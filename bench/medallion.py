"""An hour of changes to a shop, from the write until fifteen views are up to date.

There are seven tables with about a million rows in total. Eight views clean and join them, and
seven views are built on these: revenue by supplier, products at risk, orders by state with distinct
counts, a weekly trend with LAG, moving averages and running sums, cancellations, alerts, and the
demand of the last 24 hours before the latest order. An hour is 5,000 changed rows, including
updates and deletes, in one transaction.

``medallion_hour``: ours, until the last view has it. The peer is plain Spark, which recomputes all
fifteen over the current tables (Parquet; the lower eight are cached for the upper seven). Its
target applies to ours only; that of ``medallion_hour_anew`` applies to the ratio.

The environment variable SHARE (``0.1``) makes the tables smaller.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actors import Client, Service, Settings, TableWrite
from measure import Measure, Report, median
from streaming import Peer

TARGET_MS, TARGET_RATIO = 2_000.0, 0.1
WARM, COUNTED, PEER_RUNS = 4, 6, 3
START = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
STATES = ("new", "paid", "shipped", "delivered", "cancelled")
TABLES: dict[str, tuple[int, dict[str, str]]] = {
    "customers": (50_000, {"id": "bigint", "email": "string", "city": "string"}),
    "suppliers": (1_000, {"id": "bigint", "name": "string", "country": "string"}),
    "products": (
        20_000,
        {"id": "bigint", "supplier": "bigint", "category": "int", "price": "decimal(9,2)"},
    ),
    "orders": (
        150_000,
        {"id": "bigint", "customer": "bigint", "state": "string", "placed": "timestamp"},
    ),
    "order_items": (
        400_000,
        {"id": "bigint", "order_id": "bigint", "product": "bigint", "quantity": "int"},
    ),
    "stock_movements": (
        150_000,
        {"id": "bigint", "product": "bigint", "quantity": "int", "moved": "timestamp"},
    ),
    "clicks": (
        200_000,
        {"id": "bigint", "customer": "bigint", "product": "bigint", "seen": "timestamp"},
    ),
}
"""The number of rows and the columns of each table. ``id`` is the key of each."""
HOUR = {
    "customers": (20, 80, 0),
    "suppliers": (0, 20, 0),
    "products": (10, 70, 0),
    "orders": (600, 400, 50),
    "order_items": (1_500, 200, 50),
    "stock_movements": (900, 0, 0),
    "clicks": (1_100, 0, 0),
}
"""Rows inserted, updated and deleted in an hour, by table: 5,000 in total."""
WEEKS = "PARTITION BY category ORDER BY week"
CLEAN = {
    "clean_customers": "SELECT id, lower(trim(email)) AS email, coalesce(city, 'unknown') AS city "
    "FROM customers WHERE email LIKE '%@%'",
    "clean_products": "SELECT p.id, p.category, p.price, s.id AS supplier, s.name, s.country "
    "FROM products p JOIN suppliers s ON p.supplier = s.id WHERE p.price > 0",
    "clean_orders": "SELECT o.id, o.customer, o.state, o.placed, c.city FROM orders o "
    "JOIN clean_customers c ON o.customer = c.id WHERE o.placed IS NOT NULL",
    "clean_items": "SELECT i.id, i.order_id, i.product, i.quantity, p.supplier, p.category, "
    "i.quantity * p.price AS amount FROM order_items i JOIN clean_products p ON i.product = p.id "
    "WHERE i.quantity > 0",
    "sold": "SELECT i.id, i.order_id, i.product, i.quantity, i.supplier, i.category, i.amount, "
    "o.customer, o.state, o.placed FROM clean_items i JOIN clean_orders o ON i.order_id = o.id",
    "stock": "SELECT product, sum(quantity) AS level, max(moved) AS last_moved "
    "FROM stock_movements GROUP BY product",
    "visits": "SELECT k.id, k.product, k.seen, c.city FROM clicks k "
    "LEFT JOIN clean_customers c ON k.customer = c.id",
    "cancelled": "SELECT id, customer, placed FROM clean_orders WHERE state = 'cancelled'",
}
ABOVE = {
    "by_supplier": "SELECT supplier, count(*) AS items, count(DISTINCT order_id) AS orders, "
    "sum(amount) AS revenue FROM sold WHERE state <> 'cancelled' GROUP BY supplier",
    "at_risk": "SELECT p.id, p.name, s.level, d.wanted FROM clean_products p "
    "JOIN stock s ON s.product = p.id JOIN (SELECT product, sum(quantity) AS wanted FROM sold "
    "WHERE state IN ('new', 'paid') GROUP BY product) d ON d.product = p.id "
    "WHERE s.level < d.wanted",
    "by_state": "SELECT state, city, count(*) AS orders, count(DISTINCT customer) AS customers "
    "FROM clean_orders GROUP BY state, city",
    "weekly": "SELECT category, week, revenue, "
    f"revenue - lag(revenue) OVER ({WEEKS}) AS change, "
    f"avg(revenue) OVER ({WEEKS} ROWS BETWEEN 3 PRECEDING AND CURRENT ROW) AS moving, "
    f"sum(revenue) OVER ({WEEKS} ROWS UNBOUNDED PRECEDING) AS running FROM (SELECT category, "
    "date_trunc('WEEK', placed) AS week, sum(amount) AS revenue FROM sold "
    "GROUP BY category, date_trunc('WEEK', placed))",
    "cancellations": "SELECT date_trunc('DAY', placed) AS day, count(*) AS orders, "
    "count(DISTINCT customer) AS customers FROM cancelled GROUP BY date_trunc('DAY', placed)",
    "alerts": "SELECT 'stock' AS kind, product AS id, level AS value FROM stock WHERE level < 0 "
    "UNION ALL SELECT 'large', id, CAST(quantity AS bigint) FROM clean_items WHERE quantity >= 9 "
    "UNION ALL SELECT 'busy', product, count(*) FROM visits GROUP BY product HAVING count(*) > 25",
    "demand": "SELECT product, sum(quantity) AS wanted FROM sold WHERE placed > "
    "(SELECT max(placed) FROM orders) - INTERVAL 24 HOURS GROUP BY product",
}


class Shop:
    """The tables' rows, and hours of changes to them, all generated from one seed."""

    def __init__(self, share: float) -> None:
        self._random = np.random.default_rng(7)
        self._next = dict.fromkeys(TABLES, 0)
        self._gone: dict[str, set[int]] = {name: set() for name in TABLES}
        self._hours = 0
        self._sizes = {name: max(20, int(rows * share)) for name, (rows, _) in TABLES.items()}
        self.rows = {name: self._made(name, size) for name, size in self._sizes.items()}
        """The current rows by table."""

    def _made(self, name: str, count: int, ids: np.ndarray[Any, Any] | None = None) -> pa.Table:
        """Return rows with new ids, or new values of the rows `ids`."""
        if ids is None:
            ids = np.arange(self._next[name], self._next[name] + count)
            self._next[name] += count
        columns = [pa.array(ids)]
        for column, kind in list(TABLES[name][1].items())[1:]:
            columns.append(self._values(name, column, kind, ids))
        return pa.table(columns, names=list(TABLES[name][1]))

    def _values(self, name: str, column: str, kind: str, ids: np.ndarray[Any, Any]) -> pa.Array:
        draw, count = self._random, len(ids)
        others = {"supplier": "suppliers", "customer": "customers", "product": "products"}
        others |= {"order_id": "orders"}
        if column in others:
            return pa.array(draw.integers(0, self._sizes[others[column]], count))
        if kind == "timestamp":
            # The last hours are written hour by hour; earlier rows are spread over a year.
            hours = draw.integers(0, 24 * 365, count) if not self._hours else 24 * 365 + self._hours
            micros = (hours * 3_600 + draw.integers(0, 3_600, count)) * 1_000_000
            start = int(START.timestamp()) * 1_000_000
            return pa.array(micros + start).cast(pa.timestamp("us", tz="UTC"))
        if column == "state":
            weights = (0.15, 0.15, 0.1, 0.55, 0.05)
            picked = draw.choice(len(STATES), count, p=weights)
            return pa.array([STATES[each] for each in picked], pa.string())
        if column == "price":
            cents = pa.array(draw.integers(100, 20_000, count)).cast(pa.decimal128(20, 0))
            made = [value.as_py() / 100 for value in cents]
            return pa.array(made, pa.decimal128(9, 2))
        if column == "quantity":
            low = -3 if name == "stock_movements" else 1
            return pa.array(draw.integers(low, 10, count).astype(np.int32))
        if column == "category":
            return pa.array(draw.integers(0, 40, count).astype(np.int32))
        words = {"email": " User{}@Example.org ", "city": "city{}", "name": "supplier {}"}
        spread = {"city": 60, "country": 30}.get(column)
        numbers = ids if spread is None else draw.integers(0, spread, count)
        return pa.array([words.get(column, "{}").format(n) for n in numbers], pa.string())

    def hour(self) -> dict[str, TableWrite]:
        """Return the changes of the next hour."""
        self._hours += 1
        made = {}
        for name, (inserts, updates, deletes) in HOUR.items():
            rows = self.rows[name]
            picked = self._random.choice(rows.num_rows, updates + deletes, replace=False)
            ids = rows["id"].to_numpy()[picked]
            new = self._made(name, inserts)
            changed = self._made(name, updates, ids[:updates])
            gone = rows.take(pa.array(picked[updates:]))
            kept = ~np.isin(rows["id"].to_numpy(), ids)
            self.rows[name] = pa.concat_tables([rows.filter(pa.array(kept)), changed, new])
            made[name] = TableWrite(insert=new, update=changed, delete=gone)
        return made


def sized(writes: Mapping[str, TableWrite]) -> dict[str, TableWrite]:
    """Return the writes, omitting tables without rows."""
    found = {}
    for name, write in writes.items():
        parts = {"insert": write.insert, "update": write.update, "delete": write.delete}
        kept = {k: v for k, v in parts.items() if isinstance(v, pa.Table) and v.num_rows}
        if kept:
            found[name] = TableWrite(**kept)
    return found


async def ours(shop: Shop, runs: int) -> list[float]:
    """Return the milliseconds of each hour after the warm-up."""
    taken = []
    with tempfile.TemporaryDirectory() as place:
        settings = Settings(state_dir=f"{place}/state", listen="127.0.0.1:0")
        async with Service(settings) as service, await Client.in_process(service) as client:
            for name, (_, types) in TABLES.items():
                await client.create_table(name, types, primary_key=["id"])
                for start in range(0, shop.rows[name].num_rows, 100_000):
                    await client.insert(name, shop.rows[name].slice(start, 100_000))
            views = CLEAN | ABOVE
            begun = time.perf_counter()
            for name, sql in views.items():
                await client.create_materialized_view(name, sql)
            written = await client.write(sized(shop.hour()))
            for name in views:
                await client.wait_for(name, written, deadline_ms=600_000)
            print(f"  first contents after {time.perf_counter() - begun:.1f} s", flush=True)
            for number in range(WARM + runs):
                changes = sized(shop.hour())
                begun = time.perf_counter()
                written = await client.write(changes)
                for name in views:
                    await client.wait_for(name, written, deadline_ms=600_000)
                ms = 1000 * (time.perf_counter() - begun)
                print(f"  hour {number}: {ms:.0f} ms", flush=True)
                taken.append(ms)
    return taken[WARM:]


def theirs(shop: Shop, runs: int) -> list[float]:
    """Return the milliseconds that plain Spark takes for all fifteen, after a warm-up."""
    taken = []
    with tempfile.TemporaryDirectory() as place:
        peer = Peer(Path(place))
        try:
            session: Any = peer.session
            for name, rows in shop.rows.items():
                file = f"{place}/{name}.parquet"
                pq.write_table(rows, file)
                session.read.parquet(file).createOrReplaceTempView(name)
            for _ in range(1 + runs):
                begun = time.perf_counter()
                for name, sql in (CLEAN | ABOVE).items():
                    found = session.sql(sql)
                    if name in CLEAN:
                        found = found.cache()
                    found.createOrReplaceTempView(name)
                    found.write.format("noop").mode("overwrite").save()
                taken.append(1000 * (time.perf_counter() - begun))
                session.catalog.clearCache()
        finally:
            peer.close()
    return taken[1:]


async def run(report: Report) -> None:
    """Measure ours, then plain Spark over the final tables."""
    share = float(os.environ.get("SHARE", "0.05" if report.quick else "1"))
    shop = Shop(share)
    own = await ours(shop, 2 if report.quick else COUNTED)
    peer = await anyio.to_thread.run_sync(theirs, shop, 1 if report.quick else PEER_RUNS)
    times = median(own), median(peer)
    report.add(Measure("medallion_hour", *times, most=TARGET_MS))
    report.add(Measure("medallion_hour_anew", *times, target=TARGET_RATIO))


if __name__ == "__main__":
    made = Report("An hour of changes to a shop, until fifteen views are up to date.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
