"""A peek whose result is 1 GiB: the service's extra memory stays within 128 MiB.

Run: ``python tests/proof/large_peek.py [--mebibytes 1024] [--shard]``. A service of its own process
holds a table with an index (``--shard``: without one, so that the read goes by the shard's parts);
the whole of it is read by `Client.peek_batches`, as fast as this process takes it. Meanwhile the
service's resident memory is looked at; pages of mapped files are told apart, since the kernel
takes those back at will. Exit status 1 when it grew by more, when rows are missing or when a
part of the result is left in the store.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio
import anyio.to_thread
import pyarrow as pa

from actors import Client, Service, Settings
from actors.testing.engine import InMemoryExecutor

EXTRA_MIB_MAX = 128
ROW_BYTES = 256
STEADY_LOOKS = 40
ROWS_AT_ONCE = 50_000
MIB = 1 << 20


async def serve(place: Path) -> None:
    """The service, until stdin ends."""
    # Compaction of what was just written takes memory of its own, at its own time.
    settings = Settings(state_dir=str(place), listen="127.0.0.1:0", batches_per_shard_max=1_000_000)
    service = Service(settings, engine=lambda system, *_: system.spawn(InMemoryExecutor, "engine"))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, give_back)
    async with service:
        print(service.address, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)


def give_back() -> None:
    """Frees what allocators keep of earlier work, which would hide what the peek takes."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)


class Memory:
    """A process's resident memory in MiB, of its own and of mapped files; and the most seen."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._status = Path(f"/proc/{process}/status")
        self.most: dict[str, float] = {}

    def look(self) -> dict[str, float]:
        """As it is now."""
        found = {}
        for line in self._status.read_text().splitlines():
            name, _, text = line.partition(":")
            if name in ("RssAnon", "RssFile"):
                found[name] = int(text.split()[0]) / 1024
                self.most[name] = max(found[name], self.most.get(name, 0.0))
        return found

    async def settled(self) -> dict[str, float]:
        """Once compaction of what was written has ended: it has not changed for a while."""
        steady, last = 0, self.look()
        while steady < STEADY_LOOKS:
            os.kill(self._process, signal.SIGUSR1)
            await anyio.sleep(0.1)
            now = self.look()
            steady = steady + 1 if abs(now["RssAnon"] - last["RssAnon"]) < 2 else 0
            last = now
        return last

    async def watch(self) -> None:
        """Looks again and again."""
        while True:
            self.look()
            await anyio.sleep(0.01)


async def run(place: Path, mebibytes: int, shard: bool) -> int:
    """The exit status."""
    command = [sys.executable, __file__, "--serve", str(place)]
    process = await anyio.to_thread.run_sync(
        lambda: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        async with await Client.connect(address) as client:
            return await measure(client, Memory(process.pid), place, mebibytes, shard)
    finally:
        process.stdin.close()
        process.wait(60)


async def measure(client: Client, memory: Memory, place: Path, mebibytes: int, shard: bool) -> int:
    """Fills, reads, judges."""
    await client.create_table("t", {"id": "bigint", "s": "string"})
    if not shard:
        await client.create_index("i", "t", ["id"])
    rows = mebibytes * MIB // ROW_BYTES
    text = "x" * (ROW_BYTES - 16)
    written = 0
    for start in range(0, rows, ROWS_AT_ONCE):
        ids = range(start, min(rows, start + ROWS_AT_ONCE))
        table = pa.table({"id": list(ids), "s": [f"{i:08d}{text}"[: ROW_BYTES - 20] for i in ids]})
        written = await client.insert("t", table)
    await client.wait_for("t" if shard else "i", written, deadline_ms=600_000)
    # One piece each, so that what is used for every read is there.
    async for _ in client.peek_batches("t", written, limit=10):
        pass
    before = await memory.settled()
    memory.most.clear()
    found = size = 0
    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        group.start_soon(memory.watch)
        async for piece in client.peek_batches("t", written, deadline_ms=600_000):
            found += piece.num_rows
            size += piece.nbytes
        group.cancel_scope.cancel()
    seconds = time.perf_counter() - started
    extra = {name: memory.most[name] - before[name] for name in before}
    folder = place / "blob" / "_stash"
    await client.write({})
    left = len(list(folder.iterdir())) if folder.is_dir() else 0
    print(
        f"{found} of {rows} rows, {size / MIB:.0f} MiB in {seconds:.1f} s; the service before: "
        f"{before['RssAnon']:.0f} MiB of its own, {before['RssFile']:.0f} of files; more at most: "
        f"{extra['RssAnon']:.0f} and {extra['RssFile']:.0f} MiB (limit {EXTRA_MIB_MAX}); "
        f"{left} parts left"
    )
    return int(found != rows or sum(extra.values()) > EXTRA_MIB_MAX or left > 1)


def main() -> int:
    """The exit status."""
    if sys.argv[1:2] == ["--serve"]:
        anyio.run(serve, Path(sys.argv[2]), backend_options={"use_uvloop": True})
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--shard", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        status: int = anyio.run(run, Path(place), chosen.mebibytes, chosen.shard)
    return status


if __name__ == "__main__":
    sys.exit(main())
