"""From `penstock wal push` to a service's table, each in separate processes: three acceptors, one
of which is killed, and a service that is killed over and over."""

from __future__ import annotations

import json
import subprocess
from collections import Counter as Bag
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest
from test_push_killed import TENANT, TIMELINE, acceptor, push  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from service_house import service_process  # type: ignore[import-not-found]

pytestmark = pytest.mark.anyio

SETTINGS = {"source_tick_ms": "20", "maintenance_ms": "20", "retry_delay_ms_max": "200"}
LIVES = 2
LINES = 1_000
"""Of each life."""
COUNT = 10 + LIVES * LINES


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def change(number: int) -> dict[str, Any]:
    """Every third takes back what the one before brought; every seventh is of another table."""
    if number % 7 == 0:
        return {"table": "notes", "row": {"text": f"note {number}"}}
    if number % 3 == 2 and (number - 1) % 7:
        return {"table": "orders", "row": order(number - 1), "diff": -1}
    return {"table": "orders", "row": order(number)}


def order(number: int) -> dict[str, Any]:
    return {"id": number, "text": "x" * (number % 300)}


def lines(count: int) -> bytes:
    return b"".join(json.dumps(change(number)).encode() + b"\n" for number in range(count))


Held = tuple[dict[int, int], dict[str, int]]
"""How often each order and each note is there."""


def prefixes(count: int) -> Iterator[Held]:
    """What the tables hold behind none, one, two … so many lines, by counting."""
    orders, notes = dict[int, int](), dict[str, int]()
    yield orders, notes
    for number in range(count):
        each = change(number)
        if each["table"] == "notes":
            notes[each["row"]["text"]] = 1
        elif "diff" in each:
            del orders[each["row"]["id"]]
        else:
            orders[each["row"]["id"]] = 1
        yield orders, notes


async def held(client: Client) -> Held:
    """At one time."""
    objects = (await client.status()).objects
    uppers = [each.upper for each in objects if each.name in ("orders", "notes")]
    if not min(uppers):
        return {}, {}
    orders = await client.peek("orders", as_of=min(uppers) - 1)
    notes = await client.peek("notes", as_of=min(uppers) - 1)
    return dict(Bag(orders["id"].to_pylist())), dict(Bag(notes["text"].to_pylist()))


@pytest.mark.long
async def test_each_line_is_there_once_whoever_is_killed(tmp_path: Path) -> None:
    with ExitStack() as those, anyio.fail_after(200):
        ports, processes = list[int](), list[subprocess.Popen[str]]()
        for number in range(3):
            port, process = those.enter_context(acceptor(tmp_path, number + 1))
            ports.append(port)
            processes.append(process)
        config = {
            "kind": "wal",
            "acceptors": ",".join(f"127.0.0.1:{port}" for port in ports),
            "tenant": TENANT,
            "timeline": TIMELINE,
            "tables": {"orders": {"id": "bigint", "text": "string"}, "notes": {"text": "string"}},
            "look_ms": 100,
        }
        done = await anyio.to_thread.run_sync(push, ports, lines(10))
        for life in range(LIVES):
            async with service_process(tmp_path / "state", **SETTINGS) as (client, process):
                if life == 0:
                    await client.create_source("log", config)
                before = await held(client)
                assert before in prefixes(COUNT), "as behind one of the lines"
                async with anyio.create_task_group() as group:

                    async def write(life: int = life) -> None:
                        nonlocal done
                        count = 10 + (life + 1) * LINES
                        text = lines(count)
                        done = await anyio.to_thread.run_sync(
                            lambda: push(ports, text, "--after", done)
                        )

                    group.start_soon(write)
                    while await held(client) == before:
                        await anyio.sleep(0.05)  # until some of what is pushed now is durable
                    process.kill()
                    if life == 0:
                        processes[0].kill()
                        processes[0].wait()
        *_, wanted = prefixes(COUNT)
        async with service_process(tmp_path / "state", **SETTINGS) as (client, _):
            while (found := await held(client)) != wanted:
                assert found in prefixes(COUNT)
                await anyio.sleep(0.05)
