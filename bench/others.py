"""A view's step against two systems other than Spark: DuckDB and Pathway. Without targets.

All maintain ``SELECT k, count(*) AS n, sum(v) AS s FROM items GROUP BY k`` over a million rows in
1,000 groups, and get the same 100 changes at a time: 50 rows updated in place, each in another
group. The final result of each is checked.

- Ours: from the acknowledgement of the write until the view is durable beyond it.
- DuckDB: the table of groups is in a database file, and the changes in memory. A transaction sums
  the changes and upserts the affected groups; the commit writes to disk. It is the bare aggregate:
  neither the input nor any history is kept.
- Pathway, in a separate process and environment (`pathway_peer`): from passing it the rows until
  the view's changes are in a file, fsynced. Its state is in memory only.

The peers run after the service is closed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio
import duckdb
import msgspec
import numpy
import pyarrow as pa

from actors import Client, Service, Settings
from measure import Measure, Report, median, percentile

ROWS = 1_000_000
ROWS_QUICK = 20_000
GROUPS = 1000
UPDATED = 50
CHUNK = 100_000
SPREAD = 7919
"""Coprime to the number of rows and of groups, so no row is updated twice and no group twice in a
step."""
DEADLINE_MS = 600_000
PATHWAY_SECONDS_MAX = 900
VIEW = "SELECT k, count(*) AS n, sum(v) AS s FROM items GROUP BY k"
UPSERT = """
INSERT INTO groups SELECT k, sum(diff), sum(diff * v) FROM changes GROUP BY k
ON CONFLICT (k) DO UPDATE SET n = n + excluded.n, s = s + excluded.s
RETURNING k, n, s
"""


class Work(msgspec.Struct):
    """The input of every side: the initial rows, and batches of updates (id, k, old, v)."""

    rows: int
    warm: int
    batches: list[pa.Table]

    def items(self) -> list[pa.Table]:
        """Return the initial rows in chunks."""
        return [
            items(numpy.arange(start, min(start + CHUNK, self.rows), dtype=numpy.int64))
            for start in range(0, self.rows, CHUNK)
        ]

    def answer(self) -> dict[int, tuple[int, int]]:
        """Return the count and sum of each group after all batches."""
        ids = numpy.arange(self.rows, dtype=numpy.int64)
        values = ids % 90
        for batch in self.batches:
            values[batch["id"].to_numpy()] = batch["v"].to_numpy()
        counts = numpy.bincount(ids % GROUPS)
        sums = numpy.bincount(ids % GROUPS, values)
        return {k: (int(counts[k]), int(sums[k])) for k in range(GROUPS)}


class Taken(msgspec.Struct):
    """The report of one side: milliseconds of every step, and its final result (k, n, s)."""

    times: list[float]
    groups: list[tuple[int, int, int]]


def items(ids: numpy.ndarray) -> pa.Table:
    """Return the initial rows with these ids."""
    return pa.table({"id": ids, "k": ids % GROUPS, "v": ids % 90})


def work(quick: bool) -> Work:
    """Return the rows and all updates."""
    rows = ROWS_QUICK if quick else ROWS
    warm, counted = (5, 10) if quick else (150, 100)
    batches = []
    for number in range(warm + counted):
        numbers = numpy.arange(number * UPDATED, (number + 1) * UPDATED, dtype=numpy.int64)
        before = items(numbers * SPREAD % rows)
        after = pa.array((before["v"].to_numpy() + 7) % 90)
        batches.append(before.rename_columns(["id", "k", "old"]).append_column("v", after))
    return Work(rows, warm, batches)


async def ours(given: Work, folder: Path) -> Taken:
    """Run the steps on a service with default settings."""
    service = Service(Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0"))
    times = []
    async with service, await Client.in_process(service) as client:
        columns = {"id": "bigint", "k": "bigint", "v": "bigint"}
        await client.create_table("items", columns, primary_key=["id"])
        for chunk in given.items():
            await client.insert("items", chunk)
        await client.create_materialized_view("by_group", VIEW)
        for batch in given.batches:
            written = await client.update("items", batch.select(["id", "v"]))
            started = time.perf_counter()
            await client.wait_for("by_group", written, deadline_ms=DEADLINE_MS)
            times.append((time.perf_counter() - started) * 1000)
        held = await client.peek("by_group", as_of=written)
    columns_held = [held[name].to_pylist() for name in ("k", "n", "s")]
    return Taken(times, list(zip(*columns_held, strict=True)))


def changes(batch: pa.Table) -> pa.Table:
    """Return a batch as retractions and insertions."""
    count = batch.num_rows
    return pa.table(
        {
            "k": pa.chunked_array([*batch["k"].chunks, *batch["k"].chunks]),
            "v": pa.chunked_array([*batch["old"].chunks, *batch["v"].chunks]),
            "diff": pa.array([-1] * count + [1] * count, pa.int64()),
        }
    )


def duckdb_steps(given: Work, folder: Path) -> Taken:
    """Run one transaction for each batch."""
    times = []
    with duckdb.connect(str(folder / "groups.duckdb")) as database:
        database.execute("CREATE TABLE groups (k BIGINT PRIMARY KEY, n BIGINT, s BIGINT)")
        for chunk in given.items():
            ones = pa.array(numpy.ones(chunk.num_rows, numpy.int64))
            database.register("changes", chunk.append_column("diff", ones))
            database.execute(UPSERT).fetchall()
        database.execute("CHECKPOINT")
        for batch in given.batches:
            database.register("changes", changes(batch))
            started = time.perf_counter()
            database.execute("BEGIN")
            touched = database.execute(UPSERT).fetchall()
            database.execute("COMMIT")
            times.append((time.perf_counter() - started) * 1000)
            assert len(touched) == UPDATED
        groups = database.execute("SELECT k, n, s FROM groups").fetchall()
    return Taken(times, groups)


def pathway_steps(given: Work, folder: Path) -> Taken | str:
    """Run Pathway in a separate process. Returns a text if it is not available."""
    python = Path(sys.prefix) / "pathway" / "bin" / "python"
    if not python.exists():
        return "Pathway is not installed (make bench tries to install requirements/pathway.txt)"
    for name, tables in (("items", given.items()), ("batches", given.batches)):
        tables = [table.select(["id", "k", "v"]).combine_chunks() for table in tables]
        with pa.ipc.new_file(folder / f"{name}.arrow", tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
    script = Path(__file__).with_name("pathway_peer.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), str(script), str(folder)],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATHWAY_SECONDS_MAX,
    )
    if done.returncode != 0:
        raise SystemExit(f"pathway_peer.py ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return msgspec.json.decode((folder / "taken.json").read_bytes(), type=Taken)


def check(name: str, taken: Taken, given: Work) -> list[float]:
    """Return the times that count. Raises `SystemExit` if the final result is wrong."""
    answer = {k: (n, s) for k, n, s in taken.groups}
    if answer != given.answer():
        raise SystemExit(f"{name} returned a wrong result with {len(answer)} groups")
    assert len(taken.times) == len(given.batches)
    return taken.times[given.warm :]


def run(report: Report) -> None:
    """Measure ours, then each peer."""
    given = work(report.quick)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        taken = anyio.run(ours, given, folder, backend_options={"use_uvloop": True})
        mine = check("the view", taken, given)
        for name, side in (("duckdb", duckdb_steps), ("pathway", pathway_steps)):
            peer = side(given, folder)
            p50, p95 = f"others_{name}_p50", f"others_{name}_p95"
            if isinstance(peer, str):
                report.add(Measure(p50, median(mine), 0.0, missing=peer))
                continue
            theirs = check(name, peer, given)
            report.add(Measure(p50, median(mine), median(theirs)))
            report.add(Measure(p95, percentile(mine, 0.95), percentile(theirs, 0.95)))


if __name__ == "__main__":
    made = Report("A view's step against DuckDB and Pathway.")
    run(made)
    made.close()
