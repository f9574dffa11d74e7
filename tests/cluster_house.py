"""What tests of workers and clusters share: fakes of the actors below a worker, and data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import pyarrow as pa

from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import from_ipc
from actors.model.protocol.compute import (
    CopyToExport,
    DataflowDescription,
    IndexExport,
    PeekResponse,
    PeekRows,
    ShardImport,
    SubscribeExport,
)
from actors.replica.compute.rendering import ActorFactory
from actors.runtime.kernel import Actor, ActorAddress, SystemClock

T = TypeVar("T")
R = TypeVar("R")

SCHEMA = TableSchema((TableColumn("k", "bigint"), TableColumn("v", "string")))
SOURCE = ShardImport("s1", SCHEMA)


class InlineClock(SystemClock):
    """Blocking calls run inline, so that a system that has settled is done."""

    async def run_blocking(self, function: Callable[[], R]) -> R:
        return function()


class Crash(msgspec.Struct, frozen=True):
    """Makes a fake fail."""


class Fake(Actor[Any]):
    """An actor that only records; `kind` and `args` say how it was made."""

    def __init__(self, kind: str, args: tuple[Any, ...], stage: Stage) -> None:
        self.kind = kind
        self.args = args
        self.stage = stage
        self.received: list[Any] = []
        self.stopped = False

    async def on_start(self) -> None:
        self.stage.made.append(self)
        self.stage.notify()

    async def receive(self, message: Any) -> None:
        if isinstance(message, Crash):
            raise RuntimeError("asked to crash")
        self.received.append(message)
        self.stage.notify()

    async def on_stop(self) -> None:
        self.stopped = True
        self.stage.notify()

    @property
    def address(self) -> ActorAddress[Any]:
        return self.ctx.self

    def tell_workers(self, *messages: Any) -> None:
        """A dataflow: one message for each worker (one given: the same for all)."""
        workers = self.args[1]
        for index, worker in enumerate(workers):
            worker.reply(messages[index] if len(messages) > 1 else messages[0])


class Stage:
    """All fakes that were made, in order."""

    def __init__(self) -> None:
        self.made: list[Fake] = []
        self._changed = anyio.Event()

    def notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def of(self, kind: str) -> list[Fake]:
        return [fake for fake in self.made if fake.kind == kind]

    def running(self, kind: str) -> list[Fake]:
        return [fake for fake in self.of(kind) if not fake.stopped]

    async def until(self, condition: Callable[[], T]) -> T:
        """Waits until the condition gives something true."""
        while not (found := condition()):
            await self._changed.wait()
        return found

    async def dataflow(self, number: int = 0) -> Fake:
        """The dataflow made as number `number`."""
        made = await self.until(lambda: self.of("dataflow")[number : number + 1])
        return made[0]

    async def message(self, fake: Fake, kind: type[T], count: int = 1) -> list[T]:
        """The first messages of a kind that a fake got."""
        return await self.until(
            lambda: (
                (found := [m for m in fake.received if isinstance(m, kind)])[count - 1 :]
                and found[:count]
            )
        )

    def factory(self) -> ActorFactory:
        def dataflow(
            description: DataflowDescription, workers: tuple[ActorAddress[Any], ...], scratch: Path
        ) -> Fake:
            return Fake("dataflow", (description, workers, scratch), self)

        return ActorFactory(
            dataflow=dataflow,
            listen=lambda *args: Fake("listen", args, self),
            fetch=lambda *args: Fake("fetch", args, self),
        )


def index(id: str = "i1", as_of: int = 0, key: tuple[str, ...] = ("k",)) -> DataflowDescription:
    return DataflowDescription(id, id, (SOURCE,), IndexExport(key, SCHEMA), as_of)


def copy(id: str = "c1", as_of: int = 10) -> DataflowDescription:
    export = CopyToExport(SCHEMA, "out", "json", 1 << 20)
    return DataflowDescription(id, id, (SOURCE,), export, as_of)


def subscribe(id: str = "t1", as_of: int = 0, snapshot: bool = True) -> DataflowDescription:
    return DataflowDescription(id, id, (SOURCE,), SubscribeExport(SCHEMA, snapshot), as_of)


def updates(*found: tuple[int, str, int, int]) -> pa.Table:
    """(k, v, time, diff) each."""
    columns = [
        pa.array([row[0] for row in found], pa.int64()),
        pa.array([row[1] for row in found], pa.string()),
        pa.array([row[2] for row in found], pa.int64()),
        pa.array([row[3] for row in found], pa.int64()),
    ]
    return pa.table(columns, names=["k", "v", TIME, DIFF])


def rows_of(response: Any) -> list[tuple[Any, ...]]:
    """Rows of a peek's answer."""
    assert isinstance(response, PeekResponse), response
    assert isinstance(response.result, PeekRows), response
    table = from_ipc(response.result.arrow)
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=str)
