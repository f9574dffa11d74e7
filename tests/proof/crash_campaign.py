"""Kills the service with SIGKILL at random points of the demo stream, and checks what is left.

Run: ``python tests/proof/crash_campaign.py [--victim service|engine|jvm] [--kills 20] …``.

A service process (`penstock serve`) is fed the demo's stream over TCP. At random moments it is
killed with ``kill -9`` and started again on the same state directory. Each transaction also
inserts its number into the table ``played``; after a crash that tells whether the write that was
under way happened (its outcome was unknown to the client). At the end:

1. every write is there exactly once, at an increasing time;
2. each view, read AS OF many retained times, equals plain Spark over the inputs at that time;
3. a subscriber of each view, which resumed by its frontier after every crash, saw contiguous
   intervals, and what it accumulated equals the view at each of these times.

With ``--victim engine`` (the child process that holds PySpark) or ``jvm`` the service itself
stays up and must recover by itself. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pyarrow as pa

from actors import Client, TableWrite
from actors.doors.client.client import concatenate_pieces
from actors.model.plan.schema import DIFF, TIME
from actors.runtime.errors import ConnectionBroken, DeadlineExceeded, PenstockError
from penstock_flights import flights
from penstock_flights.play import VIEWS, ChangeLog, changes_of
from penstock_flights.proof import differences, expected

PLAYED = "played"


class Service:
    """The service as a separate process, killed and started again at the same address."""

    def __init__(self, state: Path, port: int) -> None:
        self.state = state
        self.address = f"127.0.0.1:{port}"
        self.process: anyio.abc.Process | None = None
        self.kills = 0
        self.retain_history_ms = 86_400_000
        self.up = anyio.Event()

    async def start(self) -> None:
        """Starts the process and waits until a client can connect."""
        await self.launch()
        assert self.process is not None
        with anyio.fail_after(120):
            while True:
                try:
                    async with await Client.connect(self.address):
                        break
                except (PenstockError, OSError):
                    if self.process.returncode is not None:
                        raise RuntimeError(
                            f"the service ended with {self.process.returncode}"
                        ) from None
                    await anyio.sleep(0.1)
        self.up.set()

    async def launch(self) -> None:
        """Starts the process alone."""
        command = [sys.executable, *self.program(), "serve", "--state-dir", str(self.state)]
        command += ["--listen", self.address]
        for name, value in self.settings().items():
            command += ["--set", f"{name}={value}"]
        with (self.state.parent / "service.log").open("ab") as log:
            self.process = await anyio.open_process(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=None
            )

    def program(self) -> list[str]:
        """What Python runs as `penstock`."""
        return ["-m", "actors.doors.commands.cli"]

    def settings(self) -> dict[str, Any]:
        """Settings beside its address and its state directory."""
        return {"retain_history_ms": self.retain_history_ms}

    async def end(self) -> None:
        """kill -9, and nothing more."""
        assert self.process is not None
        self.up = anyio.Event()
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()
        self.kills += 1

    async def kill(self) -> None:
        """kill -9, then a new process."""
        await self.end()
        await self.start()

    async def kill_below(self, victim: str) -> None:
        """kill -9 of the engine's process or its JVM, once there is one."""
        assert self.process is not None
        word = "actors.engine.spark" if victim == "engine" else "java"
        with anyio.fail_after(120):
            while True:
                found = [pid for pid, command in descendants(self.process.pid) if word in command]
                if found:
                    break
                await anyio.sleep(0.05)
        os.kill(found[0], signal.SIGKILL)
        self.kills += 1

    async def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A connection to the service once it is up."""
        await self.up.wait()
        async with await Client.connect(self.address) as client:
            yield client


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def descendants(root: int) -> list[tuple[int, str]]:
    """(pid, command line) of all processes below `root`, from /proc."""
    children: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text()
            commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        parent = int(status.rsplit(")", 1)[1].split()[1])
        children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        for pid in children.get(queue.pop(), []):
            found.append((pid, commands[pid]))
            queue.append(pid)
    return found


class Subscriber:
    """Accumulates a view from its changes alone, across connections."""

    def __init__(self, view: str) -> None:
        self.view = view
        self.frontier: int | None = None
        self.updates: list[tuple[tuple[Any, ...], int, int]] = []
        self.resumed = 0

    async def run(self, service: Service, until: ChangeLog, done: anyio.Event) -> None:
        """Follows the view until it has passed the last time of a finished log."""
        while True:
            try:
                async with service.client() as client:
                    async for change in concatenate_pieces(
                        client.subscribe(self.view, self.frontier)
                    ):
                        self.take(change.lower, change.upper, change.table)
                        if done.is_set() and change.upper > until.times[-1]:
                            return
            except (ConnectionBroken, OSError):
                self.resumed += 1
                await anyio.sleep(0.05)

    def take(self, lower: int, upper: int, table: pa.Table | None) -> None:
        """One interval. Raises `AssertionError` on a gap, a repeat or a stray time."""
        if self.frontier is not None:
            assert lower == self.frontier, f"{self.view}: {lower} follows {self.frontier}"
        if table is not None:
            names = [name for name in table.column_names if name not in (TIME, DIFF)]
            for row in table.to_pylist():
                assert row[TIME] < upper, (row[TIME], upper)
                values = tuple(str(row[name]) for name in names)
                self.updates.append((values, row[TIME], row[DIFF]))
        self.frontier = upper

    def contents(self, time: int) -> Counter[tuple[Any, ...]]:
        """The view at `time` as this subscriber knows it."""
        sums: Counter[tuple[Any, ...]] = Counter()
        for values, at, diff in self.updates:
            if at <= time:
                sums[values] += diff
        assert all(count >= 0 for count in sums.values()), "a negative weight"
        return +sums


async def create(client: Client) -> None:
    """Tables and views of the demo, and the table of what was played."""
    for name, (columns, key) in flights.TABLES.items():
        await client.create_table(name, columns, primary_key=list(key))
    await client.create_table(PLAYED, {"n": "bigint"}, primary_key=["n"])
    for view in VIEWS:
        await client.create_materialized_view(view.name, view.sql)


async def was_played(service: Service, number: int) -> int | None:
    """The time at which transaction `number` was written; None when it was not."""
    while True:
        try:
            async with service.client() as client:
                found = await client.peek(PLAYED, key={"n": number})
                if not found.num_rows:
                    return None
                report = await client.status()
                since = next(o.since for o in report.objects if o.name == PLAYED)
                async for change in concatenate_pieces(client.subscribe(PLAYED, from_=since + 1)):
                    if change.table is not None:
                        for row in change.table.to_pylist():
                            if row["n"] == number:
                                return int(row[TIME])
        except (ConnectionBroken, DeadlineExceeded, OSError):
            await anyio.sleep(0.05)


async def play(
    service: Service, stream: list[flights.FlightTransaction], log: ChangeLog, pace: float
) -> None:
    """Writes every transaction exactly once, whatever happens to the service."""
    number = 0
    while number < len(stream):
        try:
            async with service.client() as client:
                while number < len(stream):
                    changes = changes_of(stream[number])
                    marker = pa.table({"n": pa.array([number], pa.int64())})
                    time = await client.write({**changes, PLAYED: TableWrite(insert=marker)})
                    log.add(time, stream[number].deltas)
                    number += 1
                    await anyio.sleep(pace)
        except (ConnectionBroken, OSError):
            found = await was_played(service, number)
            if found is not None:
                log.add(found, stream[number].deltas)
                number += 1


async def campaign(arguments: argparse.Namespace, folder: Path) -> int:
    """Starts the service for one run; the number of differences."""
    service = Service(folder / "state", free_port())
    await service.start()
    async with service.client() as client:
        await create(client)
    try:
        return await run(arguments, service, folder)
    finally:
        if service.process is not None and service.process.returncode is None:
            service.process.kill()


async def run(arguments: argparse.Namespace, service: Service, folder: Path) -> int:
    """Plays, kills and checks; the number of differences."""
    choose = random.Random(arguments.seed)
    stream = flights.history(flights.read(), days=arguments.days)
    log, done = ChangeLog(), anyio.Event()
    subscribers = [Subscriber(view.name) for view in VIEWS]
    async with anyio.create_task_group() as group:
        for subscriber in subscribers:
            group.start_soon(subscriber.run, service, log, done)

        async def kill_now_and_then() -> None:
            while service.kills < arguments.kills:
                await anyio.sleep(choose.uniform(0.2, arguments.every))
                if arguments.victim == "service":
                    await service.kill()
                else:
                    await service.kill_below(arguments.victim)
                print(f"kill {service.kills}: {len(log.entries)}/{len(stream)} written", flush=True)

        group.start_soon(kill_now_and_then)
        await play(service, stream, log, arguments.pace)
        while service.kills < arguments.kills:
            await anyio.sleep(0.1)
        done.set()
        async with service.client() as client:
            # one more write, so that subscribers hear that the log is complete
            time = await client.write({PLAYED: TableWrite(insert=[{"n": len(stream)}])})
            log.add(time, [])
            for view in VIEWS:
                await client.wait_for(view.name, time)
    print(f"{len(log.entries)} writes, {log.changes} changes, {service.kills} kills", flush=True)
    wrong = await check(service, log, subscribers, arguments.times, folder)
    status = await service.stop()
    if status != 0:
        print(f"the service ended with status {status}")
        wrong += 1
    return wrong


async def check(
    service: Service, log: ChangeLog, subscribers: list[Subscriber], count: int, folder: Path
) -> int:
    """Views and subscribers against plain Spark at `count` times spread over the stream."""
    step = max(1, len(log.times) // count)
    times = sorted({*log.times[::step], log.times[-1]})
    scratch = folder / "proof"
    scratch.mkdir()
    wanted = await expected(log, VIEWS, times, scratch)
    wrong = 0
    async with service.client() as client:
        rows = await client.peek(PLAYED)
        numbers = sorted(rows["n"].to_pylist())
        wrong += report("played", 0, [] if numbers == list(range(len(log.entries))) else ["gap"])
        for subscriber, view in zip(subscribers, VIEWS, strict=True):
            if subscriber.frontier is None or subscriber.frontier <= log.times[-1]:
                wrong += report(view.name, log.times[-1], ["its subscriber did not get there"])
            first = min((at for _, at, _ in subscriber.updates), default=0)
            for time in times:
                found = await client.peek(view.name, as_of=time)
                wrong += report(view.name, time, differences(wanted[view.name, time], found))
                if time >= first:
                    names = found.column_names
                    peeked = Counter(
                        tuple(str(row[name]) for name in names) for row in found.to_pylist()
                    )
                    same = peeked == subscriber.contents(time)
                    wrong += report(f"subscriber of {view.name}", time, [] if same else ["differs"])
    resumed = sum(subscriber.resumed for subscriber in subscribers)
    print(f"{len(times)} times × {len(VIEWS)} views compared, {resumed} resumes: {wrong} wrong")
    return wrong


def report(name: str, time: int, lines: list[str]) -> int:
    """Prints what differs; 1 when something does."""
    for line in lines:
        print(f"WRONG {name} at {time}: {line}", flush=True)
    return 1 if lines else 0


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--victim", choices=["service", "engine", "jvm"], default="service")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--days", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--every", type=float, default=12.0, help="seconds between kills, at most")
    parser.add_argument("--pace", type=float, default=0.2, help="seconds between writes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 1 if anyio.run(campaign, arguments, Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
