"""The TPC-DS queries as live views: a step against recomputing the query, in the same session.

See `corpus_views`; the data is from tpcgen-cli. Each step changes 100 rows of those of the seven
fact tables that the query reads: dates, quantities and amounts of sales, returns and stocks are
updated in place to the values of other rows. ``_median`` and ``_slowest`` are over all queries'
ratios.

Environment variables: SCALE sets another scale than 0.3, QUERIES (``q01,q14a``) the queries.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests.kit`
import anyio
import pyarrow as pa

from actors import Client, TableWrite
from corpus_views import CorpusRun, NextRows, StepSize, run_corpus
from measure import Report
from tests.kit.corpora import CORPORA, CorpusQuery, make_tables, tables_of

FACTS = {
    "store_sales": ("ss_sold_date_sk", "ss_quantity", "ss_sales_price", "ss_ext_sales_price"),
    "catalog_sales": ("cs_sold_date_sk", "cs_quantity", "cs_sales_price", "cs_ext_sales_price"),
    "web_sales": ("ws_sold_date_sk", "ws_quantity", "ws_sales_price", "ws_ext_sales_price"),
    "store_returns": ("sr_returned_date_sk", "sr_return_quantity", "sr_return_amt"),
    "catalog_returns": ("cr_returned_date_sk", "cr_return_quantity", "cr_return_amount"),
    "web_returns": ("wr_returned_date_sk", "wr_return_quantity", "wr_return_amt"),
    "inventory": ("inv_quantity_on_hand",),
}
"""The fact tables, and the columns of a row that are changed."""
DIMENSIONS = ("customer", "item", "customer_address", "date_dim")
"""One of these is changed for a query that reads no fact table."""


class Updates:
    """Updates in place of the fact tables that a query reads."""

    def __init__(self, tables: dict[str, pa.Table]) -> None:
        self._next = NextRows(tables)

    async def write(self, client: Client, query: CorpusQuery, rows: int) -> int:
        """Write about `rows` changes, spread evenly over the tables."""
        read = tables_of(query)
        names = [name for name in FACTS if name in read]
        if not names:
            names = [next(name for name in DIMENSIONS if name in read)]
        each = max(1, rows // 2 // len(names))
        return await client.write({n: TableWrite(update=self._updated(n, each)) for n in names})

    def _updated(self, name: str, count: int) -> pa.Table:
        """Return rows with values from other rows of the table."""
        key = list(CORPORA["tpcds"].tables[name].key)
        rows, others = self._next.take(name, count), self._next.take(name, count)
        columns = FACTS.get(name) or tuple(c for c in rows.schema.names if c not in key)[-1:]
        length = min(rows.num_rows, others.num_rows)
        made = rows.select(key).slice(0, length)
        for column in columns:
            made = made.append_column(column, others[column].slice(0, length))
        return made


async def run(report: Report) -> None:
    """Measure all queries."""
    scale = float(os.environ.get("SCALE", "0.01" if report.quick else "0.3"))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tables = make_tables("tpcds", scale, 0, folder)
        steps = (StepSize("100", 100, 3 if report.quick else 25, 3 if report.quick else 7, 1 / 10),)
        await run_corpus(
            report, CorpusRun("tpcds", Updates(tables), steps, 2, 3, 1.2), tables, folder
        )


if __name__ == "__main__":
    made = Report("TPC-DS queries as live views, against full recomputation.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
