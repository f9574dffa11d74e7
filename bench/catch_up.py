"""A view that fell behind by 1,000 inserts of 1,000 rows, against one batch aggregate.

A gate sits between the service and its engine. While it is closed, 1,000 inserts of 1,000 rows are
acknowledged, each at its own timestamp, and the view cannot step. Ours: from opening the gate until
the view is durable beyond the last insert, with correct contents at every timestamp. Peer: plain
Spark runs the view's text once over a Parquet file of the same rows, in the same session, which is
correct at one timestamp. The ratio compares times, the inverse of rates: 0.3 × the peer's rate is a
ratio of 3.33.

The first insert has already reached the engine when the gate closes, so it is a step of its own.
Three rounds warm up the large steps and five count. The peer is warm too.
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
from actors.model.plan.jobs import ExecutorMessage
from actors.runtime.kernel import Actor, ActorAddress, ActorSystem
from actors.service import start_spark
from measure import Measure, Report, median
from view_step import Bench

RATE = 0.3
"""Target: the share of the peer's rate."""
GROUPS = (1000, 10)
DEADLINE_MS = 1_800_000


class Gate(Actor[ExecutorMessage]):
    """Forwards every message to the engine, in order, while it is open."""

    def __init__(self, engine: ActorAddress[ExecutorMessage]) -> None:
        self._engine = engine
        self._open = anyio.Event()
        self._open.set()

    def shut(self) -> None:
        """Close the gate: no message passes until `release`."""
        self._open = anyio.Event()

    def release(self) -> None:
        """Open the gate, and let the waiting messages pass."""
        self._open.set()

    async def receive(self, message: ExecutorMessage) -> None:
        """Forward a message once the gate is open."""
        await self._open.wait()
        await self._engine.send(message)


class GatedBench(Bench):
    """A service whose engine is behind a gate. The peer's queries bypass the gate."""

    gate: Gate

    def _start(
        self, system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        self.engine = engine = start_spark(system, settings, scratch)
        self.gate = Gate(engine)
        address: ActorAddress[ExecutorMessage] = system.spawn(lambda: self.gate, "gate")
        return address


def changes(number: int, count: int, groups: int) -> pa.Table:
    """Return the rows of insert `number`."""
    ids = numpy.arange(number * count, (number + 1) * count, dtype=numpy.int64)
    return pa.table({"id": ids, "k": ids * 7919 % groups, "v": ids % 90})


async def behind(
    bench: GatedBench, client: Client, view: str, table: str, many: list[pa.Table]
) -> float:
    """Insert the slices of `many` while the view is blocked, then return the milliseconds that it
    takes to catch up."""
    bench.gate.shut()
    try:
        written = 0
        for piece in many:
            written = await client.insert(table, piece)
    finally:
        bench.gate.release()
    started = time.perf_counter()
    await client.wait_for(view, written, deadline_ms=DEADLINE_MS)
    return (time.perf_counter() - started) * 1000


async def one(report: Report, groups: int, times: int, count: int, folder: Path) -> None:
    """Measure one number of groups: warm up, fall behind, catch up, recompute."""
    bench = GatedBench(Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0"))
    sql = "SELECT k, count(*) AS n, sum(v) AS s FROM changes GROUP BY k"
    counted: list[tuple[float, int]] = []
    pieces = [changes(number, count, groups) for number in range(times)]
    async with bench.service as service, await Client.in_process(service) as client:
        warm, turns = (1, 1) if times < 1000 else (3, 5)
        for turn in range(warm + turns):
            table, view = f"changes{turn}", f"by_group{turn}"
            await client.create_table(table, {"id": "bigint", "k": "bigint", "v": "bigint"})
            await client.create_materialized_view(
                view, sql.replace("FROM changes", f"FROM {table}")
            )
            first = await client.insert(table, pieces[0].slice(0, 0))
            await client.wait_for(view, first, deadline_ms=DEADLINE_MS)
            elapsed = await behind(bench, client, view, table, pieces)
            status = await client.status()
            steps = next(o.steps for o in status.objects if o.name == view)
            held = await client.peek(view)
            assert sum(held["n"].to_pylist()) == times * count
            await client.drop(view)
            await client.drop(table)
            if turn >= warm:
                counted.append((elapsed, steps))
        file = folder / "changes.parquet"
        pq.write_table(pa.concat_tables(pieces), file)
        again = [await bench.query(sql, {"changes": file}) for _ in range(30)]
    peer = median(again[10:])
    ours, taken = median([t for t, _ in counted]), median([n for _, n in counted])
    name = f"catch_up_{groups}_groups"
    report.add(Measure(name, ours, peer, target=1 / RATE))
    rates = times * count / ours, times * count / peer
    report.add(Measure(f"{name}_rate", *rates, unit="/ms"))
    report.add(Measure(f"{name}_steps", taken, times, unit=""))


async def run(report: Report) -> None:
    """Measure many groups, then few."""
    times, count = (20, 100) if report.quick else (1000, 1000)
    for groups in GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            await one(report, groups, times, count, Path(folder))


if __name__ == "__main__":
    made = Report("Catching up with many timestamps, against one batch aggregate.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
