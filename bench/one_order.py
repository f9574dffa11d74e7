"""What a flood of commands on one half costs the other half, on two workers.

Both halves' commands share one sequence.

- ``storage_behind_flood``: a sink is started and its first status comes back, through every worker
  and the sequencer, while the compute half's client sends compactions as fast as they are accepted.
- ``compute_behind_flood``: a peek of an index that does not exist, while the storage half's client
  sends configurations in the same way.
- ``…_allowed``: the same against its limit. ``commands_in_flight_max`` of the other half limits
  what can be ahead of a command.
- ``…_flood_command``: the time of one command of the flood with no other load. Its peer is the same
  without that limit.

Everything runs in one process. Ours is the 99th percentile; the peer is the same without a flood.

    python bench/one_order.py [--json FILE] [--quick]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from time import perf_counter_ns
from typing import Any

import anyio

from actors.model.protocol import storage
from actors.model.protocol.compute import (
    AllowCompaction,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekResponse,
    ShardImport,
)
from actors.model.protocol.storage import (
    ConnectorConfiguration,
    DroppedId,
    RunSink,
    SinkDescription,
    StatusUpdate,
    UpdateStorageConfiguration,
)
from actors.replica.cluster import ClusterClient
from actors.runtime.progress import EMPTY
from measure import Measure, Report, percentile
from steady_cluster import AS_OF, SCHEMA, house, joined, replay

PROBES = 200
FLOOD_S = 5.0
WANTED_MS = 50.0
"""The longest acceptable wait behind a flood."""
NUMBERS = count()


async def say(client: ClusterClient, command: storage.Command) -> None:
    """Send one command to the storage half."""
    await client.send(command)  # type: ignore[arg-type]


async def sink(client: ClusterClient) -> None:
    """Run a sink, wait for its first status, and drop it."""
    id = f"k{next(NUMBERS)}"
    source = ShardImport("s1", SCHEMA)
    await say(
        client, RunSink(SinkDescription(id, id, source, ConnectorConfiguration("none"), AS_OF))
    )
    while not isinstance(await client.receive(), StatusUpdate):
        pass
    await say(client, AllowCompaction(id, EMPTY))
    while not isinstance(await client.receive(), DroppedId):
        pass


async def peek(client: ClusterClient) -> None:
    """Send a peek that is refused."""
    await client.send(Peek(f"p{next(NUMBERS)}", IndexTarget("unknown"), AS_OF))
    while not isinstance(await client.receive(), PeekResponse):
        pass


async def flood_compute(client: ClusterClient, flooded: Count) -> None:
    """Send compactions as fast as they are accepted."""
    for number in count(AS_OF):
        await client.send(AllowCompaction("unknown", number))
        flooded.taken += 1


async def flood_storage(client: ClusterClient, flooded: Count) -> None:
    """Send configurations as fast as they are accepted."""
    for number in count(1):
        await say(client, UpdateStorageConfiguration(number))
        flooded.taken += 1


class Count:
    """Counts the accepted commands of a flood."""

    def __init__(self) -> None:
        self.taken = 0


async def timed(
    client: ClusterClient, probe: Callable[[ClusterClient], Awaitable[None]], times: int
) -> float:
    """Return the 99th percentile in ms of `times` probes, one after another."""
    found = []
    for _ in range(times):
        began = perf_counter_ns()
        await probe(client)
        found.append((perf_counter_ns() - began) / 1e6)
    return percentile(found, 0.99)


async def pace(flooded: Count, seconds: float) -> float:
    """Return the milliseconds per command of a flood that has the loop to itself."""
    first, began = flooded.taken, perf_counter_ns()
    await anyio.sleep(seconds)
    return (perf_counter_ns() - began) / 1e6 / (flooded.taken - first)


async def with_both(
    window: int | None, told: Callable[[str, ClusterClient, Any, ClusterClient, Any], Any]
) -> None:
    """Yield, for each half, its client, a probe of it, the other half's client, and a flood for
    that one."""
    async with house(storage=True, window=window) as built:
        compute = await built.cluster.connect()
        await joined(compute, replay("n0", 10), 10)
        stored = await built.cluster.connect("storage")
        for command in (Hello("s0"), InitializationComplete()):
            await say(stored, command)
        await told("storage", stored, sink, compute, flood_compute)
        await told("compute", compute, peek, stored, flood_storage)
        await stored.close()
        await compute.close()


async def run(report: Report) -> None:
    """Measure each half idle, then behind a flood on the other; and the floods alone."""
    times = 20 if report.quick else PROBES
    seconds = FLOOD_S / 10 if report.quick else FLOOD_S
    unbounded: dict[str, float] = {}

    async def unbound(
        name: str, client: ClusterClient, probe: Any, other: ClusterClient, flood: Any
    ) -> None:
        flooded = Count()
        async with anyio.create_task_group() as group:
            group.start_soon(flood, other, flooded)
            await probe(client)
            unbounded[name] = await pace(flooded, seconds)
            group.cancel_scope.cancel()
        await probe(client)  # finish what is in flight

    async def bound(
        name: str, client: ClusterClient, probe: Any, other: ClusterClient, flood: Any
    ) -> None:
        idle = await timed(client, probe, times)
        flooded = Count()
        async with anyio.create_task_group() as group:
            group.start_soon(flood, other, flooded)
            behind = await timed(client, probe, times)
            alone = await pace(flooded, seconds)
            group.cancel_scope.cancel()
        await probe(client)
        report.add(Measure(f"{name}_behind_flood", behind, idle))
        report.add(Measure(f"{name}_behind_flood_allowed", behind, WANTED_MS, target=1.0))
        paces = alone * 1000, unbounded[name] * 1000
        report.add(Measure(f"{name}_flood_command", *paces, unit="µs", target=1.1))

    await with_both(1_000_000, unbound)
    await with_both(None, bound)


if __name__ == "__main__":
    made = Report("The cost of a flood on one half to the other half.")
    asyncio.run(run(made))
    made.close()
