"""The TPC-H queries as live views: a step against recomputing the query, in the same session.

See `corpus_views`; the data is from tpchgen-cli. Each step changes rows of lineitem, orders,
customer and partsupp. ``_100``: 100 changes per step; ``_0.1%``: a thousandth of the rows.
``_median`` and ``_slowest`` are over all queries' ratios.

Environment variables: SCALE sets another scale than 1, QUERIES (``q01,q03``) the queries.
"""

from __future__ import annotations

import os
import sys
import tempfile
from decimal import Decimal
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests.kit`
import anyio
import pyarrow as pa

from actors import Client, TableWrite
from corpus_views import CorpusRun, NextRows, StepSize, run_corpus
from measure import Report
from tests.kit.corpora import CORPORA, CorpusQuery, make_tables

KEYS = {name: list(schema.key) for name, schema in CORPORA["tpch"].tables.items()} | {
    "partsupp": ["ps_partkey", "ps_suppkey"]
}


class Updates:
    """Updates in place of four tables, mostly of the largest."""

    def __init__(self, tables: dict[str, pa.Table]) -> None:
        self._next = NextRows(tables)

    async def write(self, client: Client, query: CorpusQuery, rows: int) -> int:
        """Write about `rows` changes, whatever the query reads."""
        updated = max(3, rows // 2)
        lineitem = self._next.take("lineitem", updated * 7 // 10)
        orders = self._next.take("orders", max(1, updated * 15 // 100))
        customer = self._next.take("customer", max(1, updated * 5 // 100))
        partsupp = self._next.take("partsupp", max(1, updated // 10))
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


async def run(report: Report) -> None:
    """Measure all queries."""
    scale = float(os.environ.get("SCALE", "0.01" if report.quick else "1"))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tables = make_tables("tpch", scale, 0, folder)
        thousandth = max(10, sum(table.num_rows for table in tables.values()) // 1000)
        steps = (
            StepSize("100", 100, 15, 6 if report.quick else 50, 1 / 15),
            StepSize("0.1%", thousandth, 4, 8, 1 / 4),
        )
        await run_corpus(
            report, CorpusRun("tpch", Updates(tables), steps, 5, 10, 1.1, KEYS), tables, folder
        )


if __name__ == "__main__":
    made = Report("TPC-H queries as live views, against full recomputation.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
