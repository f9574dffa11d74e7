"""The latency from an INSERT to the change of a view at a subscriber, over PostgreSQL's protocol.

A service with its own Spark holds 200,000 orders of 1,000 customers, and a view of the orders' sums
by the customers' countries: an aggregate over a join. One connection follows the view with ``COPY
(SUBSCRIBE …) TO STDOUT``; another one inserts an order. The clock runs from the acknowledgement
until the changed sum has arrived. ``sql_subscribed``: the median. The peer is one-stage Spark: a
sum over 100 rows in one partition, without files, in plain PySpark after the service has ended.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

from measure import Measure, Report, median
from sources_service import FLOOR
from sql_door import connected, service

ORDERS = 200_000
CUSTOMERS = 1_000
VIEW = (
    "SELECT c.country, count(*) AS n, sum(o.amount) AS total FROM orders o "
    "JOIN customers c ON o.customer = c.id GROUP BY c.country"
)
WAIT_SECONDS = 120.0


class Follower:
    """A connection that follows the view in its own thread."""

    def __init__(self, dsn: str) -> None:
        self.lines: queue.Queue[tuple[float, list[str]]] = queue.Queue()
        self._db = psycopg.connect(dsn, autocommit=True)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            with (
                self._db.cursor() as cursor,
                cursor.copy("COPY (SUBSCRIBE totals) TO STDOUT") as rows,
            ):
                for row in rows:
                    self.lines.put((time.perf_counter(), bytes(row).decode().split("\t")))
        except psycopg.errors.QueryCanceled:
            return

    def until(self, country: str, n: int) -> float:
        """Return the moment at which the sum of `n` orders arrived."""
        deadline = time.perf_counter() + WAIT_SECONDS
        while True:
            moment, columns = self.lines.get(timeout=deadline - time.perf_counter())
            if country in columns and str(n) in columns:
                return moment

    def close(self) -> None:
        self._db.cancel_safe()
        self._thread.join(WAIT_SECONDS)
        self._db.close()


def fill(db: psycopg.Connection[Any]) -> None:
    db.execute("CREATE TABLE customers (id bigint PRIMARY KEY, country text)")
    db.execute("CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint, amount bigint)")
    db.execute(
        f"INSERT INTO customers SELECT id, concat('c', id % 20) FROM range({CUSTOMERS}) AS r (id)"
    )
    db.execute(
        f"INSERT INTO orders SELECT id, id % {CUSTOMERS}, id % 97 FROM range({ORDERS}) AS r (id)"
    )
    db.execute(f"CREATE MATERIALIZED VIEW totals AS {VIEW}")


def subscribed(dsn: str, warm: int, counted: int) -> list[float]:
    """Return the milliseconds of each of `counted` changes."""
    found = []
    with connected(dsn) as db:
        fill(db)
        follower = Follower(dsn)
        n = ORDERS // 20
        follower.until("c7", n)
        for number in range(warm + counted):
            n += 1
            db.execute("INSERT INTO orders VALUES (%s, 7, 1)", (ORDERS + number,), prepare=True)
            acknowledged = time.perf_counter()
            found.append((follower.until("c7", n) - acknowledged) * 1000)
        follower.close()
    return found[warm:]


def floor(warm: int, counted: int) -> list[float]:
    """Return the milliseconds of one-stage queries in plain Spark."""
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    found = []
    for _ in range(warm + counted):
        began = time.perf_counter()
        assert spark.sql(FLOOR).toArrow().num_rows == 10
        found.append((time.perf_counter() - began) * 1000)
    spark.stop()
    return found[warm:]


def main() -> None:
    report = Report(__doc__ or "")
    warm, counted = (20, 30) if report.quick else (100, 200)
    with tempfile.TemporaryDirectory() as folder, service(Path(folder) / "state") as dsn:
        ours = subscribed(dsn, warm, counted)
    theirs = floor(warm, counted)
    report.add(Measure("sql_subscribed", median(ours), median(theirs), target=6.0))
    report.close()


if __name__ == "__main__":
    main()
