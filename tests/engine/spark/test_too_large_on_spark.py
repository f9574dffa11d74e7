"""Views whose jobs end the engine, or would: each has a named error, and all others go on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pyarrow as pa
import pytest

from actors import Client
from actors.model.protocol.api import ObjectStatus
from actors.runtime.errors import JobTooLarge, PenstockError, ViewInError

pytestmark = [pytest.mark.spark, pytest.mark.long]

WAIT_MS = 400_000
GUILTY = r"JobTooLarge: Step .* ended the engine twice while running alone"
MORE_THAN_THE_HEAP = 1_900_000_000
FINE = "SELECT k, count(*) AS n FROM t GROUP BY k"
KILLER = "SELECT k, length(repeat('x', n)) AS l FROM t"
"""Takes as much memory as a row says."""


@asynccontextmanager
async def service(folder: Path) -> AsyncIterator[tuple[Client, anyio.abc.Process]]:
    """A service in a process of its own, which dies by SIGKILL at the end."""
    command = [
        sys.executable,
        "-m",
        "actors.doors.commands.cli",
        "serve",
        "--state-dir",
        str(folder / "state"),
    ]
    socket = folder / "socket"
    command += ["--listen", f"unix:{socket}", "--set", "spark_driver_memory=512m"]
    command += ["--set", "engine_killer_retry_ms_min=600000"]
    with (folder / "log").open("ab") as log:
        process = await anyio.open_process(command, stdout=log, stderr=log, stdin=None)
    try:
        with anyio.fail_after(120):
            while True:
                try:
                    client = await Client.connect(f"unix:{socket}")
                    break
                except (PenstockError, OSError):
                    assert process.returncode is None, (folder / "log").read_text()
                    await anyio.sleep(0.1)
        async with client:
            yield client, process
    finally:
        process.kill()
        await process.wait()


def rows(*given: tuple[int, int]) -> pa.Table:
    keys, numbers = zip(*given, strict=True)
    return pa.table({"k": pa.array(keys, pa.int32()), "n": pa.array(numbers, pa.int32())})


async def contents(client: Client, view: str, at: int) -> list[tuple[int, ...]]:
    found = await client.peek(view, at, deadline_ms=WAIT_MS)
    return sorted(tuple(row.values()) for row in found.to_pylist())


async def status_of(client: Client, name: str) -> ObjectStatus:
    return next(s for s in (await client.status()).objects if s.name == name)


def found_engine(service_pid: int) -> int | None:
    """The process id of the engine's process of a service; None where there is none."""
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == service_pid
                and b"actors.engine.spark.child" in (entry / "cmdline").read_bytes()
            ):
                return int(entry.name)
        except (OSError, ValueError):
            continue
    return None


async def engine_of(service_pid: int) -> int:
    """The process id of a service's engine, which may be about to start."""
    with anyio.fail_after(120):
        while (found := found_engine(service_pid)) is None:
            await anyio.sleep(0.05)
    return found


@pytest.mark.sampled
async def test_a_view_that_kills_the_engine_is_in_error_and_all_others_go_on(
    tmp_path: Path, whole: bool
) -> None:
    """Each end of the engine takes seconds: the suite leaves out an end by somebody else, changes
    after the one that ends it, a second view that does, and a service that starts with such a
    view."""
    async with service(tmp_path) as (client, process):
        await client.create_table("t", {"k": "int", "n": "int"})
        await client.create_materialized_view("fine", FINE)
        await client.create_materialized_view("killer", KILLER)
        at = await client.insert("t", rows((1, 1), (2, 2)))
        assert await contents(client, "killer", at) == [(1, 1), (2, 2)]
        await what_is_nested_too_deeply_is_refused_and_the_engine_lives(client, process.pid)

        if whole:
            os.kill(await engine_of(process.pid), signal.SIGKILL)
        at = await client.insert("t", rows((3, 3)))
        assert await contents(client, "fine", at) == [(1, 1), (2, 1), (3, 1)]
        assert await contents(client, "killer", at) == [(1, 1), (2, 2), (3, 3)]

        before = at
        at = await client.insert("t", rows((4, MORE_THAN_THE_HEAP)))
        with pytest.raises(ViewInError, match=GUILTY):
            await contents(client, "killer", at)
        assert await contents(client, "killer", before) == [(1, 1), (2, 2), (3, 3)]
        assert await contents(client, "fine", at) == [(1, 1), (2, 1), (3, 1), (4, 1)]
        shown = await status_of(client, "killer")
        assert shown.state == "errored"
        assert "OutOfMemoryError" in shown.text

        if not whole:
            return
        # It was not what the view is made of but this row: another change has it computed whole.
        at = await client.insert("t", rows((5, 5)))
        with pytest.raises(ViewInError, match="JobTooLarge"):
            await contents(client, "killer", at)
        assert (5, 1) in await contents(client, "fine", at)
        engine = await engine_of(process.pid)
        for number in (6, 7):  # now it is left alone
            at = await client.insert("t", rows((number, 1)))
            assert (number, 1) in await contents(client, "fine", at)
            with pytest.raises(ViewInError, match="JobTooLarge"):
                await contents(client, "killer", at)
        assert await engine_of(process.pid) == engine

        await client.create_materialized_view("other", KILLER.replace("'x'", "'y'"))
        with pytest.raises(ViewInError, match=GUILTY):
            await contents(client, "other", await client.write({}))
        await client.drop("other")
    async with service(tmp_path) as (client, process):
        at = await client.insert("t", rows((8, 1)))
        assert (8, 1) in await contents(client, "fine", at)
        with pytest.raises(ViewInError, match="JobTooLarge"):
            await contents(client, "killer", at)
        await client.drop("killer")
        await client.create_materialized_view("killer", f"{KILLER} WHERE n < 100")
        assert (8, 1) in await contents(client, "killer", await client.write({}))


async def what_is_nested_too_deeply_is_refused_and_the_engine_lives(
    client: Client, service_pid: int
) -> None:
    engine = await engine_of(service_pid)
    deep = "n"
    for _ in range(5_000):
        deep = f"({deep} + 1)"
    for text in (f"SELECT k, {deep} AS x FROM t", f"SELECT k, '{'x' * 2_200_000}' AS s FROM t"):
        with pytest.raises(JobTooLarge):
            await client.create_materialized_view("deep", text)
    at = await client.write({})
    assert await contents(client, "fine", at) == [(1, 1), (2, 1)]
    assert await engine_of(service_pid) == engine
