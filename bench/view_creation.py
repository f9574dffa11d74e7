"""Creating views: the queries of TPC-DS, one after another, on a service with its tables.

``create_view`` is the time of the whole call: Spark analyses the text, the translation is verified,
and the plan of its changes is created and stored. Each view is dropped again. The first queries
warm up the engine and do not count. Peer: the time that users are promised (0.3 s at the median,
1.5 s for the largest), since plain Spark has no such views.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests.kit`
import anyio

from actors import Client, Service, Settings
from measure import Measure, Report, median
from tests.kit.corpora import CORPORA, read_queries

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "corpora"
PROMISED_MEDIAN_MS = 300.0
PROMISED_LARGEST_MS = 1_500.0
WARM_QUERIES = 10
QUICK_QUERIES = 15


async def create_all(client: Client, quick: bool) -> list[tuple[float, str]]:
    """Return how long each query takes in ms."""
    for name, schema in CORPORA["tpcds"].tables.items():
        await client.create_table(name, {each.name: each.type for each in schema.columns})
    queries = read_queries(FOLDER, "tpcds")
    found: list[tuple[float, str]] = []
    for number, query in enumerate((*queries[:WARM_QUERIES], *queries)):
        if quick and number >= QUICK_QUERIES:
            break
        begun = time.perf_counter()
        await client.create_materialized_view("made", query.sql)
        taken_ms = (time.perf_counter() - begun) * 1_000
        await client.drop("made")
        if number >= WARM_QUERIES:
            found.append((taken_ms, query.name))
    return found


async def run(report: Report) -> None:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        settings = Settings(state_dir=str(Path(folder) / "state"), listen="127.0.0.1:0")
        async with Service(settings) as service, await Client.in_process(service) as client:
            found = await create_all(client, report.quick)
    times = [taken_ms for taken_ms, _ in found]
    report.add(Measure("create_view_median", median(times), PROMISED_MEDIAN_MS, target=1.0))
    largest_ms, name = max(found)
    report.add(Measure(f"create_view_{name}", largest_ms, PROMISED_LARGEST_MS, target=1.0))


if __name__ == "__main__":
    made = Report("Creating a view.")
    anyio.run(run, made)
    made.close()
