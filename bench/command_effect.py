"""The latency from a command to its effect, on an idle cluster with two workers over loopback TCP.

``command_to_answer``: a peek of an index that does not exist passes through the connection, the
adapter, the worker, the sequencer and both workers, and the merged response comes back. Ours is the
median minus that of a bare echo of as many bytes over the same loopback; the peer is the limit.

    python bench/command_effect.py [--json FILE] [--quick]
"""

from __future__ import annotations

import asyncio
from time import perf_counter_ns

import msgspec

from actors.model.protocol.compute import IndexTarget, Peek, PeekResponse
from measure import Measure, Report, median
from steady_cluster import AS_OF, house, joined, replay

COMMANDS = 2_000
WANTED_MS = 1.0


async def echo_ms(count: int, size: int) -> float:
    """Return the median round trip of `size` bytes over loopback, in ms."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(size):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    times = []
    for _ in range(count):
        began = perf_counter_ns()
        writer.write(bytes(size))
        await reader.readexactly(size)
        times.append((perf_counter_ns() - began) / 1e6)
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()
    return median(times)


async def run(report: Report) -> None:
    """Measure peeks one after another."""
    count = 200 if report.quick else COMMANDS
    async with house() as built:
        client = await built.client()
        await joined(client, replay("n0", 10), 10)
        times = []
        size = 0
        for number in range(count):
            peek = Peek(f"p{number}", IndexTarget("unknown"), AS_OF)
            size = len(msgspec.msgpack.encode(peek))
            began = perf_counter_ns()
            await client.send(peek)
            while not isinstance(await client.receive(), PeekResponse):
                pass
            times.append((perf_counter_ns() - began) / 1e6)
        await client.close()
    bare = await echo_ms(count, size)
    report.add(Measure("command_to_answer", median(times) - bare, WANTED_MS, target=1.0))


if __name__ == "__main__":
    made = Report("Latency from a command to its effect on an idle cluster.")
    asyncio.run(run(made))
    made.close()
