"""The steps of top-k, window and session views against the step of an aggregate over the same rows.

A service with default settings holds a million readings of a thousand devices, a thousand each, and
maintains all views, one after another. A step has 100 changes (50 readings updated in place). Ours:
the step of the named view. Peer: the step of ``sum`` and ``count`` by device, right after it.

Environment variables: ROWS sets the numbers of readings, VIEWS (``session,top_k``) the views.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import anyio
import numpy
import pyarrow as pa

from actors import Client, Service, Settings
from measure import Measure, Report, median, size_name, sizes

CHANGES = 100
PER_DEVICE = 1_000
CHUNK = 100_000
DEADLINE_MS = 600_000
WARM = 60
TARGET = 1.5
TOTAL = "SELECT device, sum(value) AS total, count(*) AS n FROM reading GROUP BY device"
VIEWS = {
    "top_k": "SELECT id, device, value FROM reading ORDER BY value DESC, id LIMIT 100",
    "top_k_by_group": (
        "SELECT id, device, value FROM (SELECT *, row_number() OVER (PARTITION BY device "
        "ORDER BY value DESC, id) AS place FROM reading) WHERE place <= 10"
    ),
    "window_rank": (
        "SELECT id, device, rank() OVER (PARTITION BY device ORDER BY value DESC) AS place "
        "FROM reading"
    ),
    "window_lag": (
        "SELECT id, device, value - lag(value) OVER (PARTITION BY device ORDER BY at, id) AS step "
        "FROM reading"
    ),
    "window_moving": (
        "SELECT id, device, sum(value) OVER (PARTITION BY device ORDER BY at, id "
        "ROWS BETWEEN 5 PRECEDING AND CURRENT ROW) AS moving FROM reading"
    ),
    "session": (
        "SELECT device, session_window.start AS begun, count(*) AS n, sum(value) AS total "
        "FROM reading GROUP BY device, session_window(at, '5 minutes')"
    ),
}
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "device": pa.int32(),
        "value": pa.int64(),
        "at": pa.timestamp("us", tz="UTC"),
    }
)


def readings(start: int, end: int, shift: int = 0) -> pa.Table:
    """Return the readings `start` to ``end - 1``; another `shift` gives them other values."""
    ids = numpy.arange(start, end, dtype=numpy.int64)
    # A device reports every minute, and pauses after about ten reports.
    minutes = ids // PER_DEVICE * 1 + (ids % PER_DEVICE * 7919 % PER_DEVICE) // 10 * 10
    values = (ids * 2_654_435_761 + shift * 40_503) % 1_000_003
    columns = [
        pa.array(ids),
        pa.array((ids // PER_DEVICE).astype(numpy.int32)),
        pa.array(values),
        pa.array(minutes * 60_000_000 + ids % PER_DEVICE % 10 * 20_000_000),
    ]
    return pa.table([c.cast(f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


class Steps:
    """Updates readings, a different one each time."""

    def __init__(self, client: Client, count: int) -> None:
        self._client = client
        self._count = count
        self._taken = 0

    async def take(self, view: str) -> float:
        """Return the milliseconds of one step of a view."""
        rows = []
        for _ in range(CHANGES // 2):
            self._taken += 1
            number = self._taken * 7919 % self._count
            rows.append(readings(number, number + 1, self._taken))
        written = await self._client.update("reading", pa.concat_tables(rows))
        started = time.perf_counter()
        await self._client.wait_for(view, written, deadline_ms=DEADLINE_MS)
        return (time.perf_counter() - started) * 1000


async def one(client: Client, steps: Steps, name: str, counted: int) -> Measure:
    """Measure one view against the aggregate. Only the one being measured exists at a time."""
    found: dict[str, list[float]] = {}
    for view, sql in ((name, VIEWS[name]), ("totals", TOTAL)):
        await client.create_materialized_view(view, sql)
        taken = [await steps.take(view) for _ in range(WARM + counted)]
        found[view] = taken[WARM:]
        await client.drop(view)
    return Measure(name, median(found[name]), median(found["totals"]), target=TARGET)


async def run(report: Report) -> None:
    """Measure all views at every size."""
    for count in sizes((20_000,) if report.quick else (1_000_000,)):
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(state_dir=str(Path(folder) / "state"), listen="127.0.0.1:0")
            async with Service(settings) as service, await Client.in_process(service) as client:
                types = {"id": "bigint", "device": "int", "value": "bigint", "at": "timestamp"}
                await client.create_table("reading", types, primary_key=["id"])
                for start in range(0, count, CHUNK):
                    await client.insert("reading", readings(start, min(start + CHUNK, count)))
                steps = Steps(client, count)
                wanted = os.environ.get("VIEWS", "") or ",".join(VIEWS)
                for name in wanted.split(","):
                    measure = await one(client, steps, name, 5 if report.quick else 40)
                    measure.name = f"rule_step_{size_name(count)}_{name}"
                    report.add(measure)


if __name__ == "__main__":
    made = Report("Steps of top-k, window and session views, against an aggregate's.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
