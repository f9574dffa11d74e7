"""Memory of a service: the ledger alone, and `penstock.memory` of a real one beside the system's
own account of its process."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pyarrow as pa
import pytest
from anyio.streams.text import TextReceiveStream

from actors.doors.client.client import Client
from actors.runtime.memory_ledger import (
    MemoryLedger,
    MemoryUse,
    allocated_bytes,
    anonymous_bytes,
    release_memory,
)

ROWS = 100_000
GROUPS = 20_000
MIB = 1 << 20


class Holder:
    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def memory(self) -> list[MemoryUse]:
        return [MemoryUse("held", "x", self.table.num_rows, self.table.nbytes)]


def test_holders_are_told_while_they_live_and_the_rest_of_arrow_apart() -> None:
    def table(rows: int) -> pa.Table:
        # In Arrow's own pool, as what is read and computed is.
        ones = pa.repeat(pa.scalar(1, pa.int64()), rows)
        return pa.table({"a": ones})

    ledger = MemoryLedger()
    holder, nobodys = Holder(table(4 * MIB)), table(MIB)
    ledger.add(holder.memory)
    told = {use.kind: use for use in ledger.uses()}
    assert told["held"] == MemoryUse("held", "x", 4 * MIB, 32 * MIB)
    assert 8 * MIB <= told["arrow"].bytes_memory < 12 * MIB
    assert nobodys.num_rows == MIB
    del holder
    assert {use.kind for use in ledger.uses()} == {"arrow", "python", "malloc", "allocator"}


def test_rows_that_lie_in_bytes_are_told_once() -> None:
    ledger = MemoryLedger()
    data = pa.py_buffer(bytearray(32 * MIB))
    table = pa.table({"a": pa.Array.from_buffers(pa.int64(), 4 * MIB, [None, data])})
    holder = Holder(table)
    ledger.add(holder.memory)
    told = {use.kind: use.bytes_memory for use in ledger.uses()}
    assert told["held"] == 32 * MIB
    assert told["arrow"] + told["malloc"] < 4 * MIB


def test_what_python_and_c_give_out_is_seen_and_given_back() -> None:
    before = allocated_bytes()
    small, large = [object() for _ in range(200_000)], bytearray(32 * MIB)
    now = allocated_bytes()
    assert now["python"] - before["python"] >= 200_000 * 16
    assert now["malloc"] - before["malloc"] >= len(large)
    assert len(small) == 200_000
    del small, large
    gc.collect()
    taken = anonymous_bytes()
    release_memory()
    assert allocated_bytes()["malloc"] - before["malloc"] < 16 * MIB
    assert anonymous_bytes() <= taken + MIB


# -- a whole service -------------------------------------------------------------------------------


def anonymous_of(pid: int) -> int:
    """What the system says that a process has of no file."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    return sum(int(kib) * 1024 for kib in re.findall(r"^Anonymous:\s+(\d+) kB$", text, re.M))


@asynccontextmanager
async def serving(state: Path) -> AsyncIterator[tuple[int, Client]]:
    """`penstock serve` with Spark, its process id, and a client of it."""
    command = [
        sys.executable,
        "-m",
        "actors.doors.commands.cli",
        "serve",
        "--state-dir",
        str(state),
    ]
    command += ["--listen", f"unix:{state.parent}/socket"]
    process = await anyio.open_process(command, stdin=subprocess.DEVNULL, stderr=None)
    try:
        assert process.stdout is not None
        text, lines = "", TextReceiveStream(process.stdout)
        while "ready\n" not in text:
            text += await lines.receive()
        async with await Client.connect(f"unix:{state.parent}/socket") as client:
            yield process.pid, client
    finally:
        process.terminate()
        with anyio.CancelScope(shield=True):
            await process.wait()
            await process.aclose()


async def memory(client: Client) -> tuple[int, Counter[tuple[str, str]]]:
    """The sum of what is told, and how many rows are held, by kind and object."""
    told = (await client.peek("penstock.memory")).to_pylist()
    rows: Counter[tuple[str, str]] = Counter()
    for each in told:
        rows[each["kind"], each["id"]] += each["rows"]
    return sum(each["bytes_memory"] for each in told), rows


SAMPLES_MAX = 30


async def compared(client: Client, pid: int) -> tuple[int, int, Counter[tuple[str, str]]]:
    """What the process takes, what it tells and the rows of that, at one moment: it gives memory
    back as it likes, so that both are asked for until nothing has moved between them."""
    while True:
        taken = anonymous_of(pid)
        told, rows = await memory(client)
        if abs(anonymous_of(pid) - taken) <= MIB:
            return taken, told, rows


async def at_rest(client: Client) -> bool:
    """Whether all changes are where they belong."""
    _, rows = await memory(client)
    hidden = sum(n for (kind, _), n in rows.items() if kind == "hidden")
    return hidden >= GROUPS and not any(n for (kind, _), n in rows.items() if kind == "changes")


@pytest.mark.long
async def test_what_is_told_of_memory_is_what_the_process_takes(tmp_path: Path) -> None:
    with anyio.fail_after(500):
        async with serving(tmp_path / "state") as (pid, client):
            await client.create_table("t", {"k": "bigint", "g": "bigint", "f": "string"}, ["k"])
            await client.create_table("d", {"g": "bigint", "name": "string"}, ["g"])
            taken_before, told_before, _ = await compared(client, pid)
            await client.create_materialized_view(
                "w", "SELECT g, count(*) AS n, max(k) AS m FROM t GROUP BY g"
            )
            await client.create_materialized_view(
                "j", "SELECT t.k, t.f, d.name FROM t JOIN d ON t.g = d.g"
            )
            await client.create_index("i", "j", ["k"])
            keys = pa.array(range(GROUPS))
            names = pa.array([f"the name of group {number}" for number in range(GROUPS)])
            time = await client.insert("d", pa.table({"g": keys, "name": names}))
            for start in range(0, ROWS, 25_000):
                numbers = range(start, start + 25_000)
                made = {
                    "k": pa.array(numbers),
                    "g": pa.array([number % GROUPS for number in numbers]),
                    "f": pa.array([f"row {number} " * 4 for number in numbers]),
                }
                time = await client.insert("t", pa.table(made))
            for name in ("w", "i"):
                await client.wait_for(name, time, deadline_ms=400_000)
            while not await at_rest(client):  # a view is sealed before its step is installed
                await anyio.lowlevel.checkpoint()
            for _ in range(SAMPLES_MAX):  # what was freed is given back every ten seconds
                taken, told, rows = await compared(client, pid)
                more, seen = taken - taken_before, told - told_before
                if abs(more - seen) <= 0.2 * more:
                    break
                await anyio.sleep(1)
            listed = (await client.peek("penstock.memory")).to_pylist()
            assert more > 20 * MIB
            assert abs(more - seen) <= 0.2 * more, (more, seen, listed)
            # What holds rows is told by name, wherever the rows lie.
            ids = {r["name"]: r["id"] for r in (await client.peek("penstock.objects")).to_pylist()}
            assert rows["table", ids["t"]] == rows["shared", ids["t"]] == ROWS
            assert rows["index", ids["i"]] == ROWS
            assert sum(n for (kind, _), n in rows.items() if kind == "hidden") >= GROUPS
            told_of = (await client.peek("penstock.arrangements")).to_pylist()
            held = {row["kind"]: row["bytes_memory"] + row["bytes_mapped"] for row in told_of}
            assert {kind for kind, size in held.items() if size} == {"index", "shared", "hidden"}
