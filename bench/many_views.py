"""Twenty aggregate views of one source against one of them, and many steps in a row.

``many_views``: from the acknowledgement of a write of 100 changes until all 20 views (with
different group columns and filters) are durable beyond it. Peer: the same with only one of the
views, measured last, when everything is warmest.

``endurance``: consecutive steps of one view, 100 changes each (50 rows updated in place, so that
the table keeps its size; a minute of history is retained). Ours: the median of the last tenth of
the steps. Peer: that of the first tenth, after `WARM_ENDURANCE` steps that do not count. Memory is
the resident memory in MiB of this process (the service and this benchmark), of the engine's process
and of its JVM: the peer is its median in the second tenth of the steps, ours that in the last.
The environment variable STEPS sets the number of steps.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import numpy
import pyarrow as pa

from actors import Client, Service, Settings
from measure import Measure, Report, median, percentile

ROWS = 100_000
UPDATED = 50
VIEWS = 20
TARGET_MANY = 6.0
TARGET_STEP = 1.1
TARGET_MEMORY = 1.2
"""The same limit as in tests/proof/soak.py."""
WARM_ENDURANCE = 300
SAMPLE_EVERY = 20
DEADLINE_MS = 600_000
ONE = "SELECT c, count(*) AS n, sum(v) AS s FROM items GROUP BY c"


def views() -> dict[str, str]:
    """Return twenty aggregate views. The first one is also measured alone."""
    keys = ["c", "b", "a", "a, b", "b % 7"]
    filters = ["", "WHERE v >= 10", "WHERE a < 8", "WHERE b <> 3 AND v < 80"]
    made = {"one": ONE}
    for key in keys:
        for where in filters:
            names = ", ".join(f"{part} AS g{i}" for i, part in enumerate(key.split(", ")))
            text = f"SELECT {names}, count(*) AS n, sum(v) AS s FROM items {where} GROUP BY {key}"
            if (key, where) != ("c", ""):
                made[f"view{len(made)}"] = text
    assert len(made) == VIEWS
    return made


class Source:
    """The table and its changes: each write gives 50 rows, far apart, a new value."""

    def __init__(self, client: Client, rows: int) -> None:
        self._client = client
        self._rows = rows
        self._written = 0

    async def load(self) -> None:
        """Create and fill the table."""
        kinds = {"id": "bigint", "a": "bigint", "b": "bigint", "c": "bigint", "v": "bigint"}
        await self._client.create_table("items", kinds, primary_key=["id"])
        ids = numpy.arange(self._rows, dtype=numpy.int64)
        columns = {"id": ids, "a": ids % 10, "b": ids % 100, "c": ids % 1000, "v": ids % 90}
        await self._client.insert("items", pa.table(columns))

    async def step(self, names: Sequence[str]) -> float:
        """Write once, and return the ms from the acknowledgement until all named views are beyond
        it."""
        start = self._written * UPDATED
        ids = numpy.arange(start, start + UPDATED, dtype=numpy.int64) * 7919 % self._rows
        self._written += 1
        # Differs from the row's last value, so that each update is really two changes.
        values = (ids + 7 * (start // self._rows + 1)) % 90
        written = await self._client.update("items", pa.table({"id": ids, "v": values}))
        started = time.perf_counter()
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(self._beyond, name, written)
        return (time.perf_counter() - started) * 1000

    async def _beyond(self, name: str, written: int) -> None:
        await self._client.wait_for(name, written, deadline_ms=DEADLINE_MS)

    async def steps(self, names: Sequence[str], warm: int, counted: int) -> list[float]:
        """Return the milliseconds of the counted steps."""
        times = [await self.step(names) for _ in range(warm + counted)]
        return times[warm:]


async def many(report: Report, client: Client, source: Source) -> None:
    """Measure all views together, then one of them alone."""
    # The JVM keeps compiling the code of twenty views for some hundred steps.
    warm, counted = (5, 10) if report.quick else (300, 50)
    texts = views()
    for name, text in texts.items():
        await client.create_materialized_view(name, text)
    together = await source.steps(list(texts), warm, counted)
    status = await client.status()
    whole = sum(o.recomputed for o in status.objects if o.name in texts)
    for name in texts:
        if name != "one":
            await client.drop(name)
    alone = await source.steps(["one"], warm // 2, counted)
    await client.drop("one")
    target = TARGET_MANY
    report.add(Measure("many_views_20_p50", median(together), median(alone), target=target))
    p95 = percentile(together, 0.95), percentile(alone, 0.95)
    report.add(Measure("many_views_20_p95", *p95))
    # How many of them AUTO recomputed in the last step.
    report.add(Measure("many_views_20_recomputed", whole, VIEWS, unit=""))


def memory() -> dict[str, float]:
    """Return the resident MiB of this process, the engine's process and its JVM, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rsplit(")", 1)[1].split()[1])
    found = {"service": _resident(os.getpid()), "engine": 0.0, "jvm": 0.0}
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above != os.getpid() or pid == os.getpid():
            continue
        try:
            command = (Path("/proc") / str(pid) / "cmdline").read_text().split("\0")[0]
            kind = "jvm" if Path(command).name == "java" else "engine"
            found[kind] = max(found[kind], _resident(pid))
        except OSError:
            continue
    return found


def _resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def endurance(report: Report, client: Client, source: Source) -> None:
    """Measure consecutive steps."""
    steps = int(os.environ.get("STEPS", "50" if report.quick else "10000"))
    assert steps >= 20, "STEPS: at least 20"
    warm = 10 if report.quick else WARM_ENDURANCE
    await client.create_materialized_view("enduring", ONE)
    await source.steps(["enduring"], warm, 0)
    times: list[float] = []
    samples: list[tuple[int, dict[str, float]]] = []
    every = min(SAMPLE_EVERY, max(1, steps // 50))
    for number in range(steps):
        times.append(await source.step(["enduring"]))
        if number % every == 0:
            samples.append((number, memory()))
    tenth = steps // 10
    first, last = times[:tenth], times[-tenth:]
    p50 = median(last), median(first)
    report.add(Measure(f"endurance_{steps}_p50", *p50, target=TARGET_STEP))
    p95 = percentile(last, 0.95), percentile(first, 0.95)
    report.add(Measure(f"endurance_{steps}_p95", *p95))
    for name in ("service", "engine", "jvm"):
        early = [m[name] for number, m in samples if tenth <= number < 2 * tenth]
        late = [m[name] for number, m in samples if number >= steps - tenth]
        figure = f"endurance_{steps}_memory_{name}"
        sizes = median(late), median(early)
        report.add(Measure(figure, *sizes, unit="MiB", target=TARGET_MEMORY))


async def run(report: Report) -> None:
    """Measure both in one service."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            state_dir=str(Path(folder) / "state"), listen="127.0.0.1:0", retain_history_ms=60_000
        )
        async with Service(settings) as service, await Client.in_process(service) as client:
            source = Source(client, ROWS // 10 if report.quick else ROWS)
            await source.load()
            await many(report, client, source)
            await endurance(report, client, source)


if __name__ == "__main__":
    made = Report("Twenty views of one source against one, and many steps in a row.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
