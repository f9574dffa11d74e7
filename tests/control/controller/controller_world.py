"""A controller between a store in memory, an engine in memory and a replica that is the test."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import pyarrow as pa

from actors.control.controller.catalog.boot import load
from actors.control.controller.controller import Controller
from actors.control.controller.messages import SubmitRequest
from actors.control.controller.reads.memory_reads import MemoryReads
from actors.control.controller.replicas.instance import FixedReplicas
from actors.durable.persist import PersistClient
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import to_ipc
from actors.model.protocol.api import (
    Answer,
    CreateTable,
    Request,
    RequestDone,
    RequestFailed,
    TableChange,
    WriteCommitted,
    WriteTables,
)
from actors.model.protocol.compute import (
    Command,
    CreateDataflow,
    InitializationComplete,
    Response,
)
from actors.replica.compute.index import ClusterPartitions
from actors.runtime.errors import ConnectionBroken
from actors.runtime.kernel import ActorAddress, ActorSystem, SystemClock
from actors.runtime.settings import Settings
from actors.testing.engine import InMemoryExecutor
from actors.testing.probe import MessageProbe

A = TypeVar("A")
C = TypeVar("C")

KEYED = TableSchema((TableColumn("id", "bigint"), TableColumn("n", "int")), ("id",))
SETTINGS = Settings(
    hold_downgrade_ms=20,
    retain_history_ms=60_000,
    retry_delay_ms_min=1,
    group_commit_ms=1,
    subscribe_inflight_bytes_max=1_500,
)


class FakeReplica:
    """The other end of the replica link's connection, with the commands that it was sent."""

    def __init__(self) -> None:
        self.commands: deque[Command] = deque()
        self.responses: deque[Response] = deque()
        self.broken = False
        self.connections = 0
        self._changed = anyio.Event()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def connect(self) -> FakeReplica:
        self.broken = False
        self.connections += 1
        self.commands.clear()
        return self

    async def send(self, command: Any) -> None:
        self.commands.append(command)
        self._notify()

    def try_send(self, commands: Sequence[Any]) -> int:
        self.commands.extend(commands)
        self._notify()
        return len(commands)

    async def receive(self) -> Response:
        while not self.responses:
            if self.broken:
                raise ConnectionBroken("the replica is gone")
            await self._changed.wait()
        return self.responses.popleft()

    def receive_nowait(self, count_max: int) -> list[Response]:
        return [self.responses.popleft() for _ in range(min(count_max, len(self.responses)))]

    async def close(self) -> None:
        pass

    def respond(self, response: Response) -> None:
        self.responses.append(response)
        self._notify()

    def break_connection(self) -> None:
        self.broken = True
        self._notify()

    async def expect(self, kind: type[C]) -> C:
        """The next command of that kind; others before it are skipped."""
        while True:
            while self.commands:
                command = self.commands.popleft()
                if isinstance(command, kind):
                    return command
            await self._changed.wait()


class World:
    """See the module's text."""

    def __init__(
        self,
        system: ActorSystem,
        persist: PersistClient,
        scratch: Path,
        settings: Settings = SETTINGS,
    ) -> None:
        self.settings = settings
        self.system, self.persist, self.scratch = system, persist, scratch
        self.session = MessageProbe.start(system, "session")
        self.maintenance = MessageProbe.start(system, "maintenance")
        self.executor: ActorAddress[Any] = system.spawn(lambda: InMemoryExecutor(), "engine")
        self.replica = FakeReplica()
        self.numbers = 0
        self.partitions: list[ClusterPartitions] = []
        """Partitions of indexes that are in this process."""
        self.controller: ActorAddress[Any]

    async def start(self, name: str = "controller") -> None:
        boot = await load(self.persist)
        self.replica = FakeReplica()
        self.controller = self.system.spawn(
            lambda: Controller(
                boot,
                self.persist,
                self.executor,
                FixedReplicas({"r1": self.replica.connect}),
                self.settings,
                self.scratch / name,
                self.maintenance.address,
                memory_reads=MemoryReads(lambda: self.partitions),
            ),
            name,
        )
        await self.replica.expect(InitializationComplete)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    async def submit(self, request: Request) -> None:
        await self.controller.send(SubmitRequest(self.session.address, request))

    async def ask(self, request: Request, kind: type[A]) -> A:
        await self.submit(request)
        return await self.session.expect(kind)

    async def refused(self, request: Request) -> str:
        """The code of the error that it is answered with."""
        return (await self.ask(request, RequestFailed)).code

    async def answer(self) -> Answer:
        answer: Answer = await self.session.expect(object)  # type: ignore[arg-type]
        return answer

    async def created(self) -> CreateDataflow:
        return await self.replica.expect(CreateDataflow)


def change(table: str, *rows: dict[str, Any]) -> TableChange:
    """An insert."""
    return TableChange(table, insert=to_ipc(pa.Table.from_pylist(list(rows))))


@asynccontextmanager
async def started(tmp_path: Path, **changes: Any) -> AsyncIterator[World]:
    """A controller on an empty store; `changes` are settings."""
    clock = SystemClock()
    settings = msgspec.structs.replace(SETTINGS, **changes)
    persist = await PersistClient.in_memory(SETTINGS, clock)
    with anyio.fail_after(200):
        async with ActorSystem(clock=clock, seed=7) as system:
            world = World(system, persist, tmp_path, settings)
            await world.start()
            yield world
    await persist.close()


async def table(world: World) -> int:
    """Make table t with one row, and return the time of the row."""
    await world.ask(CreateTable(world.number(), "t", KEYED), RequestDone)
    written = await world.ask(
        WriteTables(world.number(), (change("t", {"id": 1, "n": 2}),)), WriteCommitted
    )
    return int(written.time)


@asynccontextmanager
async def with_row(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[World, int]]:
    """As `started`, with the table and row of `table`; yield the time of the row, too."""
    async with started(tmp_path, **changes) as world:
        yield world, await table(world)
