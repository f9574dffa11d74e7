"""A controller reconnects to a cluster that already runs what it wants: no work may be repeated.

``reconcile_*``: from the new connection's Hello to the frontiers of every dataflow, over loopback
TCP, with two workers. ``*_engine_jobs`` and ``*_restarts``: work that was repeated (none may be).
``*_memory``: traced bytes per dataflow beyond those before the new client connected, with the old
one disconnected; its peer is the limit.

    python bench/reconcile.py [--json FILE] [--quick]
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from time import perf_counter

from measure import Measure, Report, median, size_name
from steady_cluster import Executor, Steady, house, joined, replay

DATAFLOWS = 10_000
WANTED_MS = 2_000.0
BYTES_MAX = 1024.0
TURNS = 3


async def run(report: Report) -> None:
    """Measure time and repeated work, then memory in a separate, smaller cluster."""
    count = 500 if report.quick else DATAFLOWS
    name = f"reconcile_{size_name(count)}"
    async with house() as built:
        client = await built.client()
        began = perf_counter()
        await joined(client, replay("n0", count), count)
        create_ms = (perf_counter() - began) * 1000
        report.add(Measure(f"create_{size_name(count)}", create_ms, 0, missing="no target"))
        Steady.made = Executor.jobs = 0
        times = []
        for turn in range(1, TURNS + 1):
            commands = replay(f"n{turn}", count)
            again = await built.client()
            began = perf_counter()
            await joined(again, commands, count)
            times.append((perf_counter() - began) * 1000)
            await client.close()
            client = again
        report.add(Measure(name, median(times), WANTED_MS, target=1.0))
        report.add(Measure(f"{name}_engine_jobs", Executor.jobs, 1, "", target=0.0))
        report.add(Measure(f"{name}_restarts", Steady.made, 1, "", target=0.0))
        await client.close()
    used = await memory(200 if report.quick else 2_000)
    report.add(Measure("reconcile_memory", used, BYTES_MAX, "B", target=1.0))


async def memory(count: int) -> float:
    """Return the bytes per dataflow that a second client leaves behind, beyond what the first
    needed."""
    async with house() as built:
        first = await built.client()
        await joined(first, replay("n0", count), count)
        tracemalloc.start()
        second = await built.client()
        await joined(second, replay("n1", count), count)
        await first.close()
        del first
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await second.close()
    return used / count


if __name__ == "__main__":
    made = Report("Reconciliation of unchanged dataflows.")
    asyncio.run(run(made))
    made.close()
