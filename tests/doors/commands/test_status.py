"""`penstock status --watch`: what it draws, and a real one on a terminal across a restart."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from rich.console import Console

from actors.doors.client.client import Client
from actors.doors.commands.status import (
    StatusSample,
    lines,
    render_screen,
    summary,
    take_snapshot,
    watch,
)
from actors.runtime.errors import ConnectionBroken
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[Service]:
    """On one socket, with the same state each time."""
    settings = Settings(state_dir=str(tmp_path / "state"), listen=f"unix:{tmp_path}/socket")
    async with Service(settings, engine=in_memory_engine()) as service:
        yield service


async def fill(client: Client) -> None:
    await client.create_table("t", {"k": "bigint", "v": "bigint"}, ["k"])
    await client.create_materialized_view("w", "SELECT v, count(*) AS n FROM t GROUP BY v")
    await client.wait_for("w", await client.insert("t", [{"k": 1, "v": 2}]))


def sight_of(at_ms: float, steps: int, **rows: list[dict[str, Any]]) -> StatusSample:
    found: dict[str, list[dict[str, Any]]] = {
        "dataflows": [{"state": "gathering", "steps": steps}, {"state": "running", "steps": 1}],
        "sessions": [{"number": 1}, {"number": 2}],
        "peeks": [],
        "subscribes": [],
        "spark_jobs": [{"state": "running"}],
        "parts_in_flight": [],
        "hydration": [],
        "reconciliation": [
            {"replica": "r1", "worker": 0, "flag": "reused", "total": 5},
            {"replica": "r1", "worker": 0, "flag": "created", "total": 0},
            {"replica": "r1", "worker": 1, "flag": "reused", "total": 5},
        ],
        "errors": [],
    }
    return StatusSample(at_ms, 61_000, [], found | rows)


def test_rates_are_those_between_two_sights_and_never_negative() -> None:
    first, second = sight_of(1_000, 10), sight_of(3_000, 17)
    assert dict(summary(first, None))["steps per second"] == "…"
    assert dict(summary(second, first))["steps per second"] == "3.5"
    assert dict(summary(first, second))["steps per second"] == "0.0"


def test_the_summary_tells_what_is_there() -> None:
    mib = 1 << 20
    part = {"waiting": 3, "fetching": 2, "bytes_fetching": mib, "bytes_fetched": mib // 2}
    told = dict(
        summary(
            sight_of(
                0,
                0,
                peeks=[
                    {"kind": "read", "state": "asked", "waited_ms": 7.4},
                    {"kind": "wait", "state": "waiting", "waited_ms": 99.0},
                ],
                parts_in_flight=[part, part],
                hydration=[{"state": "hydrating", "parts_read": 1, "parts_total": 4}],
                errors=[
                    {"object": f"v{n}", "state": "stalled", "text": "a\nb", "since_ms": 1_000}
                    for n in range(9)
                ],
            ),
            None,
        )
    )
    assert (told["workers"], told["sessions"], told["subscribes"]) == ("2", "2", "0")
    assert told["peeks"] == "1 waiting, oldest 7 ms"
    assert told["dataflows"] == "1 gathering, 1 running"
    assert told["Spark jobs"] == "1 running"
    assert told["parts in flight"] == "4 fetching, 6 waiting, 3.0 MiB"
    assert told["hydrating"] == "1, 1 of 4 parts read"
    assert told["reconciled"] == "reused 5"
    assert (told["errors"], told["  v0"]) == ("9", "stalled for 60 s: a b")
    assert "  v8" not in told
    assert told[""] == "and 1 more in penstock.errors"


def test_of_several_replicas_all_are_counted() -> None:
    rows = [
        {"replica": f"r{replica}", "worker": worker, "flag": flag, "total": replica}
        for replica in (1, 2, 3)
        for worker in (0, 1)
        for flag in ("reused", "created")
    ]
    told = dict(summary(sight_of(0, 0, reconciliation=rows), None))
    assert told["workers"] == "6, of 3 replicas"
    assert told["reconciled"] == "reused 6, created 6"


async def test_both_ways_of_drawing_show_the_same(tmp_path: Path) -> None:
    with anyio.fail_after(200):
        async with serving(tmp_path) as service, await Client.in_process(service) as client:
            await fill(client)
            sight = await take_snapshot(client)
    plain = "\n".join(lines(sight, None))
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    console.print(render_screen(sight, None, "reconnecting: [x]"))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (plain, drawn):
        assert {"t", "w", "table", "view", "gathering"} <= set(text.split())
        assert "steps per second" in text
        assert "reconciled" in text
    assert "reconnecting: [x]" in drawn, "a note is text, not markup"


async def test_without_a_terminal_it_prints_block_after_block(tmp_path: Path) -> None:
    written = io.StringIO()
    with anyio.fail_after(200):
        async with serving(tmp_path) as service:
            async with await Client.in_process(service) as client:
                await fill(client)
            async with anyio.create_task_group() as group:

                async def blocks() -> None:
                    while written.getvalue().count("steps per second") < 3:
                        await anyio.lowlevel.checkpoint()
                    group.cancel_scope.cancel()

                group.start_soon(blocks)
                group.start_soon(
                    watch,
                    lambda: Client.connect(service.address),
                    0.01,
                    Console(file=written, force_terminal=False),
                )
    assert written.getvalue().count("name  ") >= 3
    assert "\x1b" not in written.getvalue()


async def test_who_cannot_connect_at_first_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConnectionBroken):
        await watch(
            lambda: Client.connect(f"unix:{tmp_path}/nobody"), 0.01, Console(file=io.StringIO())
        )


class Terminal:
    """A process on a pseudo-terminal, and what it has drawn."""

    def __init__(self, *arguments: str) -> None:
        self.screen, end = pty.openpty()
        self.drawn = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "actors.doors.commands.cli", *arguments],
            stdin=end,
            stdout=end,
            stderr=end,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "160"},
        )
        os.close(end)

    async def draws(self, text: str) -> None:
        """Waits until it has drawn that since it was asked last."""
        while text not in self.drawn:
            data = await anyio.to_thread.run_sync(os.read, self.screen, 65_536)
            self.drawn += data.decode(errors="replace")
        self.drawn = ""

    async def ends(self) -> int:
        """Its status; what it draws meanwhile is read, or it could not end."""
        while True:
            try:
                data = await anyio.to_thread.run_sync(os.read, self.screen, 65_536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            self.drawn += data.decode(errors="replace")
        return await anyio.to_thread.run_sync(self.process.wait)


async def test_on_a_terminal_it_survives_a_restart_and_ends_at_sigint(tmp_path: Path) -> None:
    with anyio.fail_after(200):
        async with serving(tmp_path) as service:
            async with await Client.in_process(service) as client:
                await fill(client)
            terminal = Terminal("status", "--watch", "0.1", "--connect", service.address)
            try:
                await terminal.draws("steps per second")
                await terminal.draws("gathering")
            except BaseException:
                terminal.process.kill()
                raise
        try:
            await terminal.draws("reconnecting: ")
            async with serving(tmp_path):
                await terminal.draws("reconciled")
                await terminal.draws("steps per second")
                terminal.process.send_signal(signal.SIGINT)
                assert await terminal.ends() == 0
            assert "Traceback" not in terminal.drawn
        finally:
            terminal.process.kill()
            terminal.process.wait()
            os.close(terminal.screen)
