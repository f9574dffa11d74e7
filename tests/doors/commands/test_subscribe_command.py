"""`penstock subscribe`: what it prints, and where it says to go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pyarrow as pa
import pytest
from anyio.streams.text import TextReceiveStream

from actors.doors.client.client import ChangeBatch, Client
from actors.doors.commands import copy_to
from actors.doors.commands.copy_to import SubscribePrinter
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.testing.drawn_settings import draw_for_test
from service_house import running_service  # type: ignore[import-not-found]


def changed(time: int, *values: Any) -> pa.Table:
    rows = [{"id": n, "s": value, "__time": time, "__diff": 1} for n, value in enumerate(values)]
    return pa.Table.from_pylist(rows)


def printed(as_json: bool, progress: bool, *changes: ChangeBatch) -> list[str]:
    found = SubscribePrinter(as_json=as_json, progress=progress, upper=None)
    return [line for change in changes for line in found.lines(change)]


def test_lines_are_rows_with_their_time() -> None:
    changes = [
        ChangeBatch(0, 6, changed(5, "a", None)),
        ChangeBatch(6, 9),
        ChangeBatch(9, EMPTY, changed(9, "b")),
    ]
    assert printed(False, False, *changes) == [
        "__time\t__diff\tid\ts",
        "5\t1\t0\ta",
        "5\t1\t1\tNULL",
        "9\t1\t0\tb",
    ]
    assert printed(True, True, *changes) == [
        '{"__time":5,"__diff":1,"id":0,"s":"a"}',
        '{"__time":5,"__diff":1,"id":1,"s":null}',
        '{"__upper":6}',
        '{"__upper":9}',
        '{"__time":9,"__diff":1,"id":0,"s":"b"}',
        '{"__upper":null}',
    ]
    assert printed(False, True, *changes)[3:] == [
        "# upper 6",
        "# upper 9",
        "9\t1\t0\tb",
        "# the end",
    ]


def test_pieces_have_no_upper_of_their_own() -> None:
    pieces = [ChangeBatch(5, 5, changed(5, "a"), True), ChangeBatch(5, 6, changed(5, "b"))]
    assert printed(False, True, *pieces)[1:] == ["5\t1\t0\ta", "5\t1\t0\tb", "# upper 6"]


@pytest.mark.parametrize(
    ("begins", "changes", "text"),
    [
        (None, [], ""),
        (7, [], "resume with --resume 7"),
        (
            None,
            [ChangeBatch(5, 5, None, True)],
            "nothing to resume from: the snapshot is incomplete",
        ),
        (None, [ChangeBatch(0, 6)], "resume with --resume 6"),
        (
            None,
            [ChangeBatch(0, 6), ChangeBatch(6, 6, None, True)],
            "resume with --resume 6; discard the last changes, which are incomplete",
        ),
        (None, [ChangeBatch(0, 6), ChangeBatch(6, EMPTY)], ""),
    ],
)
def test_where_to_go_on(begins: int | None, changes: list[ChangeBatch], text: str) -> None:
    found = SubscribePrinter(as_json=True, progress=False, upper=begins)
    for change in changes:
        found.done(change)
    assert found.resumption() == text


async def test_what_a_reader_has_seen_counts_though_a_signal_came_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lines were out, and the signal came before their writer had said so: the frontier told
    was the one before, and the lines would have come again."""
    monkeypatch.setattr(copy_to, "_SETTLE_S", 200)
    found = SubscribePrinter(as_json=True, progress=True, upper=5)
    out, told = threading.Event(), threading.Event()
    done = found.done

    def late(change: ChangeBatch) -> None:
        out.set()
        told.wait()
        done(change)

    monkeypatch.setattr(found, "done", late)
    async with anyio.create_task_group() as group:
        group.start_soon(found.write, ChangeBatch(5, 6))
        await asyncio.to_thread(out.wait)
        group.cancel_scope.cancel()
    resumption = asyncio.create_task(asyncio.to_thread(found.resumption))
    told.set()
    assert await resumption == "resume with --resume 6"


# -- the command -----------------------------------------------------------------------------------


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[tuple[Client, str]]:
    settings = Settings(state_dir=str(tmp_path / "state"), listen="127.0.0.1:0", maintenance_ms=20)
    settings = draw_for_test(settings)
    async with running_service(settings) as (service, client):
        await client.create_table("t", {"id": "bigint"}, ["id"])
        yield client, service.address


SUBSCRIBE = [sys.executable, "-m", "actors.doors.commands.cli", "subscribe", "t", "--connect"]


class Command:
    """`penstock subscribe t` as a process."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdout = TextReceiveStream(process.stdout)
        self._stderr = TextReceiveStream(process.stderr)
        self._text = ""

    @classmethod
    async def start(cls, address: str, *arguments: str) -> Command:
        command = [*SUBSCRIBE, address, *arguments]
        return cls(await anyio.open_process(command, stdin=subprocess.DEVNULL))

    async def line(self) -> str:
        while "\n" not in self._text:
            self._text += await self._stdout.receive()
        line, _, self._text = self._text.partition("\n")
        return line

    async def ended(self) -> tuple[int, str]:
        """Exit status, and what stands on stderr."""
        said = "".join([text async for text in self._stderr])
        status = await self.process.wait()
        await self.process.aclose()
        return status, said.strip()


async def test_an_interrupt_ends_it_and_says_where_to_go_on(tmp_path: Path) -> None:
    async with running(tmp_path) as (client, address):
        await client.insert("t", [{"id": 1}])
        command = await Command.start(address, "--json", "--progress")
        seen: Counter[int] = Counter()

        async def until(id_: int) -> int:
            """Reads up to the end of the interval in which that row came."""
            while True:
                found = json.loads(await command.line())
                if "__upper" not in found:
                    seen[found["id"]] += found["__diff"]
                elif seen[id_]:
                    return int(found["__upper"])

        await until(1)
        time = await client.insert("t", [{"id": 2}])
        upper = await until(2)
        assert upper > time
        command.process.send_signal(signal.SIGINT)
        status, said = await command.ended()
        assert status == 0
        frontier = int(said.removeprefix("resume with --resume "))
        assert frontier >= upper
        await client.insert("t", [{"id": 3}])
        await client.delete("t", [{"id": 1}])
        command = await Command.start(address, "--json", "--progress", "--resume", str(frontier))
        await until(3)
        while seen[1]:
            found = json.loads(await command.line())
            if "id" in found:
                seen[found["id"]] += found["__diff"]
        assert +seen == Counter([2, 3])
        command.process.send_signal(signal.SIGTERM)
        assert (await command.ended())[0] == 0


async def test_it_ends_where_it_was_told_to(tmp_path: Path) -> None:
    async with running(tmp_path) as (client, address):
        first = await client.insert("t", [{"id": 1}])
        second = await client.insert("t", [{"id": 2}])
        await client.insert("t", [{"id": 3}])
        bounds = ("--as-of", str(first), "--up-to", str(second + 1))
        command = await Command.start(address, *bounds)
        lines = [await command.line() for _ in range(3)]
        assert lines == ["__time\t__diff\tid", f"{first}\t1\t1", f"{second}\t1\t2"]
        assert await command.ended() == (0, "")
        command = await Command.start(address, *bounds, "--no-snapshot")
        assert [await command.line() for _ in range(2)] == lines[::2]
        assert await command.ended() == (0, "")
        command = await Command.start(address, "--as-of", "1", "--resume", "1")
        status, said = await command.ended()
        assert status == 2
        assert "penstock: InvalidUsage: " in said


async def test_a_reader_that_has_had_enough_ends_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (client, address):
        await client.insert("t", [{"id": 1}])
        ours, theirs = os.pipe()
        command = [*SUBSCRIBE, address]
        process = await anyio.open_process(command, stdin=subprocess.DEVNULL, stdout=theirs)
        os.close(theirs)
        assert await anyio.to_thread.run_sync(os.read, ours, 100)
        os.close(ours)
        assert process.stderr is not None
        said = ""
        status = None
        with anyio.move_on_after(200):
            async with anyio.create_task_group() as group:

                async def write() -> None:
                    for id_ in range(2, 10_000):
                        await client.insert("t", [{"id": id_}])

                group.start_soon(write)
                async for text in TextReceiveStream(process.stderr):
                    said += text
                status = await process.wait()
                await process.aclose()
                group.cancel_scope.cancel()
        assert status == 0
        assert said.startswith("resume with --resume ")
