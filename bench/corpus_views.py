"""The queries of a public corpus as live views: the code that `tpch` and `tpcds` share.

A service with default settings holds the corpus's tables and maintains one query at a time. A step
updates rows in place (half retractions, half insertions). Ours: from the acknowledgement of the
write until the view is durable beyond it. Peer: plain Spark runs the query's text in full over
Parquet files of the same tables, in the same Spark session. Both are warm.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests.kit`
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from actors import Client, Settings
from actors.runtime.errors import DefiniteError, PenstockError
from measure import Measure, Report, median
from tests.kit.corpora import CORPORA, CorpusQuery, read_queries
from view_step import Bench

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "corpora"
CHUNK = 100_000
DEADLINE_MS = 600_000


class Changes(Protocol):
    """Writes the changes of one step."""

    async def write(self, client: Client, query: CorpusQuery, rows: int) -> int:
        """Change about `rows` rows in one transaction and return its time."""
        ...


class StepSize(msgspec.Struct):
    """A step size: its label, the number of changed rows, and how many steps to run."""

    label: str
    rows: int
    warm: int
    counted: int
    target_median: float | None = None


class CorpusRun(msgspec.Struct):
    """Describes one run: the corpus, its tables, and the step sizes."""

    corpus: str
    changes: Changes
    steps: Sequence[StepSize]
    peer_warm: int
    peer_counted: int
    target_slowest: float
    keys: Mapping[str, Sequence[str]] = {}
    """Primary keys of tables whose schemas in the corpus have none."""


class NextRows:
    """Takes rows of tables that are far apart, so that a step affects many groups. Takes each row
    once."""

    STRIDE = 7919

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        self._tables = tables
        self._at = dict.fromkeys(tables, 0)

    def take(self, name: str, count: int) -> pa.Table:
        """Return the next `count` rows of a table, or as many as it has."""
        table = self._tables[name]
        begin = self._at[name]
        numbers = {i * self.STRIDE % table.num_rows for i in range(begin, begin + count)}
        self._at[name] += count
        return table.take(sorted(numbers))


def chosen(corpus: str) -> list[CorpusQuery]:
    """Return the corpus's queries, or those named by the environment variable QUERIES
    (``q1,q3``)."""
    names = set(filter(None, os.environ.get("QUERIES", "").split(",")))
    return [q for q in read_queries(FOLDER, corpus) if not names or q.name in names]


async def _load(client: Client, run: CorpusRun, tables: Mapping[str, pa.Table]) -> None:
    for name, schema in CORPORA[run.corpus].tables.items():
        types = {column.name: column.type for column in schema.columns}
        key = list(run.keys.get(name, schema.key))
        await client.create_table(name, types, primary_key=key)
        for start in range(0, tables[name].num_rows, CHUNK):
            await client.insert(name, tables[name].slice(start, CHUNK))


async def _one(
    report: Report, client: Client, bench: Bench, query: CorpusQuery, run: CorpusRun, files: Path
) -> dict[str, float]:
    """Create the view, step it and recompute it.

    Return ours / peer by step label. Omits a query whose result is an error.
    """
    created = time.perf_counter()
    await client.create_materialized_view(query.name, query.sql)
    paths = {name: files / f"{name}.parquet" for name in CORPORA[run.corpus].tables}
    status = await client.status()
    mode = next(o.mode for o in status.objects if o.name == query.name)
    ratios, measured = {}, []
    for step in run.steps:
        times = []
        for number in range(step.warm + step.counted):
            written = await run.changes.write(client, query, step.rows)
            started = time.perf_counter()
            await client.wait_for(query.name, written, deadline_ms=DEADLINE_MS)
            if number >= step.warm:
                times.append((time.perf_counter() - started) * 1000)
            elif number == 0 and step is run.steps[0]:
                print(f"{query.name}: {time.perf_counter() - created:.1f} s until its first step")
        measured.append((step.label, median(times)))
    await client.drop(query.name)
    again = []
    for _ in range(run.peer_warm + run.peer_counted):
        try:
            again.append(await bench.query(query.sql, paths))
        except DefiniteError as error:  # the query fails on these tables, and so does the view
            print(f"{query.name} is skipped because plain Spark fails: {error}", flush=True)
            return {}
    peer = median(again[run.peer_warm :])
    for label, ours in measured:
        name = f"{run.corpus}_{query.name}_{label}_{mode}"
        made = Measure(name, ours, peer, target=run.target_slowest)
        report.add(made)
        ratios[label] = made.ratio
    return ratios


async def run_corpus(
    report: Report, run: CorpusRun, tables: Mapping[str, pa.Table], folder: Path
) -> None:
    """Load the tables, measure the queries one by one, and report the median and slowest ratios.

    Args:
        report: Receives the measures.
        run: The queries and step sizes.
        tables: The corpus's rows.
        folder: An existing folder for the service's state and the peer's files.
    """
    files = folder / "files"
    files.mkdir()
    for name in CORPORA[run.corpus].tables:
        pq.write_table(tables[name], files / f"{name}.parquet")
    bench = Bench(Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0"))
    ratios = []
    async with bench.service as service, await Client.in_process(service) as client:
        await _load(client, run, tables)
        for query in chosen(run.corpus):
            try:
                ratios.append(await _one(report, client, bench, query, run, files))
            except PenstockError as error:  # the others are still measured
                print(f"{query.name} failed: {error}", flush=True)
                ratios.append({step.label: float("inf") for step in run.steps})
                if any(o.name == query.name for o in (await client.status()).objects):
                    await client.drop(query.name)
    for step in run.steps:
        found = [each[step.label] for each in ratios if each]
        if not found:
            continue
        name = f"{run.corpus}_{step.label}"
        report.add(Measure(f"{name}_median", 100 * median(found), 100, "%", step.target_median))
        report.add(Measure(f"{name}_slowest", 100 * max(found), 100, "%", run.target_slowest))
