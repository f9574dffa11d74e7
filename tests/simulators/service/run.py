"""The course of one run: clients at work while faults strike, then a fault-free end without leaks.

Clients do their operations one after another; subscriptions go on beside them. While faults strike,
a request may fail by any of the errors of `EXCUSED`. When all operations are done the faults stop,
and from then on nothing may fail: every object is written to, read and compared, every subscription
catches up, and after all objects were dropped no trace of them may be left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from actors.doors.client.client import Client, TableWrite
from actors.model.plan.schema import TableColumn
from actors.model.protocol.api import AlterObject
from actors.runtime.errors import (
    ConnectionBroken,
    InvalidUsage,
    ObjectExists,
    PenstockError,
    ResourceClosed,
)
from tests.simulators.service.calm import (
    CALM_S,
    EXCUSED,
    calm_down,
    doing,
    drop_all,
)
from tests.simulators.service.checkers import WriteRecord
from tests.simulators.service.cluster import SimulatedCluster
from tests.simulators.service.copies import copy
from tests.simulators.service.history import CheckerViolation
from tests.simulators.service.observed import ObservedLink
from tests.simulators.service.outside import MEMORY
from tests.simulators.service.queries import Row
from tests.simulators.service.rivals import compete
from tests.simulators.service.schedule import (
    OPERATOR,
    RIVAL,
    SOURCE_EVENTS,
    SOURCE_VIEWS,
    STORAGE_RIVAL,
    TABLES,
    VIEWS,
    ClientOperation,
)
from tests.simulators.service.storage_rivals import compete_for_storage

OPERATION_S: Final = 60.0
"""Virtual time within which an operation ends, with success or failure."""
KEYS: Final = 3


class SimulatedClients:
    """The clients of one run, and their shared knowledge."""

    def __init__(self, world: SimulatedCluster) -> None:
        self.world = world
        self.next_id = 0
        self.times: list[int] = []
        self.subscriptions: list[FollowedSubscription] = []
        self.calm = False

    def fresh_row(self, number: int) -> Row:
        """Return a row that was never written before."""
        self.next_id += 1
        return (self.next_id, (self.next_id * 7 + number) % KEYS, self.next_id)


class FollowedSubscription:
    """A subscription that a client follows until it ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.upper = 0
        self.task: asyncio.Task[None] | None = None

    async def follow(self, client: Client) -> None:
        """Receive changes until the subscription ends in any way. The link checks their
        contents."""
        with suppress(*EXCUSED):
            async for change in client.subscribe(self.name):
                self.upper = change.upper


def after(began: float) -> str:
    """Return the time since `began`, for a text: a deadline of the operation's own may be shorter
    than that of the simulator."""
    return f"after {asyncio.get_running_loop().time() - began:.3g} s"


class SimulatedClient:
    """One client, with its operations."""

    def __init__(self, shared: SimulatedClients, number: int) -> None:
        self.shared = shared
        self.world = shared.world
        self.number = number
        self.idle = False
        """True if all its requests were answered."""
        self.left = False
        """True if an abandoned request may be unanswered."""
        self.client: Client | None = None
        self.link: ObservedLink | None = None
        self.mine: dict[str, list[Row]] = {table: [] for table in TABLES}
        """Rows that surely are there, and that no other client touches."""

    async def connected(self) -> Client:
        """Return the connection, a new one if it was lost."""
        while self.client is None:
            try:
                link = self.world.dial()
                self.client = await Client.in_process(link, settings=self.world.settings)
                self.link = link
            except PenstockError:
                await asyncio.sleep(0.02)
        return self.client

    async def work(self, operations: list[ClientOperation]) -> None:
        """Run all operations, in order."""
        for operation in operations:
            await asyncio.sleep(operation.pause_ms / 1000)
            began = asyncio.get_running_loop().time()
            try:
                self.idle = False
                async with asyncio.timeout(OPERATION_S):
                    await self.do(operation)
                    self.idle = self.client is not None
            except TimeoutError:
                what = f"{operation.kind} {operation.name}"
                self.world.fail(
                    CheckerViolation(
                        f"liveness: {what} has no answer {after(began)}; {doing(self.world)}"
                    )
                )

    async def do(self, operation: ClientOperation) -> None:
        """Run one operation; an excused failure ends it."""
        self.world.trace.note("client", self.number, operation.kind, operation.name)
        try:
            await _KINDS[operation.kind](self, operation)
        except PenstockError as error:
            self.world.trace.note("client", self.number, type(error).__name__)
            if self.shared.calm or not isinstance(error, EXCUSED):
                self.world.fail(
                    CheckerViolation(
                        f"errors: {operation.kind} {operation.name}"
                        f"{' in the calm' if self.shared.calm else ''}: "
                        f"{type(error).__name__}: {error}"
                    )
                )
            if isinstance(error, ConnectionBroken | ResourceClosed):
                await self.leave()

    async def leave(self) -> None:
        """Close the connection; the next operation makes another."""
        client, self.client = self.client, None
        if client is None:
            return
        with suppress(PenstockError):
            await client.aclose()
        open_ = self.link.checker.unanswered if self.link is not None else []
        left, self.left = self.left, False
        if self.idle and open_ and not left:
            self.world.fail(CheckerViolation(f"exchange: never answered: {open_}"))

    # -- operations ----------------------------------------------------------------------------

    async def create_tables(self) -> None:
        """Create both tables, with retries until they surely exist."""
        key = ["id"] if self.world.schedule.setting.keyed else []
        columns = {"id": "bigint not null", "k": "bigint not null", "v": "bigint not null"}
        for table in TABLES:
            while True:
                client = await self.connected()
                try:
                    await client.create_table(table, columns, key)
                except ObjectExists:
                    break
                except EXCUSED as error:
                    if isinstance(error, ConnectionBroken | ResourceClosed):
                        await self.leave()
                    await asyncio.sleep(0.01)
                    continue
                break

    async def write(self, inserts: dict[str, list[Row]], deletes: dict[str, list[Row]]) -> int:
        """Write, and return the time. Raises the client's errors; the write is on record in any
        case."""
        record = WriteRecord(
            {
                table: [(row, 1) for row in inserts.get(table, ())]
                + [(row, -1) for row in deletes.get(table, ())]
                for table in {**inserts, **deletes}
            }
        )
        client = await self.connected()
        self.world.writes.records.append(record)
        try:
            time = await client.write(
                {
                    table: TableWrite(
                        insert=_dicts(inserts.get(table)), delete=_dicts(deletes.get(table))
                    )
                    for table in record.changes
                }
            )
        except PenstockError as error:
            if error.determinate:
                record.refused = f"{type(error).__name__}: {error}"
            raise
        record.time = time
        self.shared.times.append(time)
        for table, rows in inserts.items():
            self.mine[table] += rows
        return time

    def take(self, table: str, count: int) -> list[Row]:
        """Take rows of ours to delete."""
        taken, self.mine[table] = self.mine[table][:count], self.mine[table][count:]
        return taken

    async def _insert(self, operation: ClientOperation) -> None:
        rows = [self.shared.fresh_row(i) for i in range(operation.number)]
        await self.write({operation.name: rows}, {})

    async def _delete(self, operation: ClientOperation) -> None:
        rows = self.take(operation.name, operation.number)
        if rows:
            await self.write({}, {operation.name: rows})

    async def _update(self, operation: ClientOperation) -> None:
        rows = self.take(operation.name, 1)
        new = [self.shared.fresh_row(operation.number) for _ in rows]
        await self.write({operation.name: new}, {operation.name: rows} if rows else {})

    async def _both(self, operation: ClientOperation) -> None:
        await self.write({table: [self.shared.fresh_row(1)] for table in TABLES}, {})

    async def _peek(self, operation: ClientOperation) -> None:
        client = await self.connected()
        await client.peek(operation.name, deadline_ms=15_000)

    async def _peek_at(self, operation: ClientOperation) -> None:
        if not self.shared.times:
            return
        time = self.shared.times[-min(operation.number, len(self.shared.times))]
        client = await self.connected()
        await client.peek(operation.name, as_of=time, deadline_ms=15_000)

    async def _wait(self, operation: ClientOperation) -> None:
        if self.shared.times:
            client = await self.connected()
            await client.wait_for(operation.name, self.shared.times[-1], deadline_ms=15_000)

    async def _subscribe(self, operation: ClientOperation) -> None:
        client = await self.connected()
        made = FollowedSubscription(operation.name)
        made.task = asyncio.get_running_loop().create_task(made.follow(client))
        self.shared.subscriptions.append(made)

    async def _reconnect(self, operation: ClientOperation) -> None:
        await self.leave()

    async def _create_view(self, operation: ClientOperation) -> None:
        view = next(v for v in (*VIEWS, *SOURCE_VIEWS) if v.name == operation.name)
        client = await self.connected()
        await client.create_materialized_view(view.name, view.sql)

    async def _index(self, operation: ClientOperation) -> None:
        key = {"by_k": "k", "by_w": "w", "busy": "k"}.get(operation.name, "id")
        client = await self.connected()
        await client.create_index(f"{operation.name}_index", operation.name, [key])

    async def _create_source(self, operation: ClientOperation) -> None:
        client = await self.connected()
        rate = self.world.schedule.setting.source_rate
        config = {"kind": "counter", "rate": rate, "up_to": SOURCE_EVENTS}
        await client.create_source(operation.name, config)

    async def _add_column(self, operation: ClientOperation) -> None:
        client = await self.connected()
        column = TableColumn(f"x{operation.number}", "bigint")
        # It was added by an operation of which nobody knew the outcome, or a sink is there.
        with suppress(InvalidUsage):
            await client.submit(AlterObject(0, operation.name, add_columns=(column,)))

    async def _copy(self, operation: ClientOperation) -> None:
        rows = [self.shared.fresh_row(i) for i in range(operation.number)]
        await copy(self, operation.name, rows, asked=1)

    async def _copy_again(self, operation: ClientOperation) -> None:
        rows = [self.shared.fresh_row(i) for i in range(operation.number)]
        await copy(self, operation.name, rows, asked=4)

    async def _leave_copy(self, operation: ClientOperation) -> None:
        rows = [self.shared.fresh_row(i) for i in range(operation.number)]
        try:
            async with asyncio.timeout(operation.number / 1000):
                await copy(self, operation.name, rows, asked=1)
        except TimeoutError:
            self.left = True  # its answer, if any, is not read

    async def _drop_source(self, operation: ClientOperation) -> None:
        client = await self.connected()
        await client.drop_source(operation.name)

    async def _create_sink(self, operation: ClientOperation) -> None:
        client = await self.connected()
        await client.create_sink(f"{operation.name}_sink", operation.name, MEMORY)

    async def _drop_sink(self, operation: ClientOperation) -> None:
        client = await self.connected()
        await client.drop_sink(f"{operation.name}_sink")

    async def _drop(self, operation: ClientOperation) -> None:
        client = await self.connected()
        await client.drop(operation.name)


_KINDS: Final[dict[str, Callable[[SimulatedClient, ClientOperation], Awaitable[None]]]] = {
    "insert": SimulatedClient._insert,
    "delete": SimulatedClient._delete,
    "update": SimulatedClient._update,
    "both": SimulatedClient._both,
    "peek": SimulatedClient._peek,
    "peek at": SimulatedClient._peek_at,
    "wait": SimulatedClient._wait,
    "subscribe": SimulatedClient._subscribe,
    "reconnect": SimulatedClient._reconnect,
    "create view": SimulatedClient._create_view,
    "drop view": SimulatedClient._drop,
    "create source": SimulatedClient._create_source,
    "add column": SimulatedClient._add_column,
    "drop source": SimulatedClient._drop_source,
    "create sink": SimulatedClient._create_sink,
    "drop sink": SimulatedClient._drop_sink,
    "copy": SimulatedClient._copy,
    "copy again": SimulatedClient._copy_again,
    "leave a copy": SimulatedClient._leave_copy,
    "index": SimulatedClient._index,
}


def _dicts(rows: list[Row] | None) -> list[dict[str, int]] | None:
    return [dict(zip(("id", "k", "v"), row, strict=True)) for row in rows] if rows else None


async def drive(world: SimulatedCluster) -> None:
    """Drive a whole run; it ends early at the first violation."""
    body = asyncio.get_running_loop().create_task(_course(world))
    failed = asyncio.get_running_loop().create_task(world.failed.wait())
    await asyncio.wait((body, failed), return_when=asyncio.FIRST_COMPLETED)
    if body.done() and (error := body.exception()) is not None:
        world.fail(CheckerViolation(f"errors: {type(error).__name__}: {error}"))


async def _course(world: SimulatedCluster) -> None:
    loop = asyncio.get_running_loop()
    supervisor = loop.create_task(world.supervise())
    shared = SimulatedClients(world)
    by_client: dict[int, list[ClientOperation]] = {}
    for operation in world.schedule.operations:
        by_client.setdefault(operation.client, []).append(operation)
    operator = loop.create_task(_operate(world, by_client.pop(OPERATOR, [])))
    rivals = {number: by_client.pop(number) for number in sorted(by_client) if number <= RIVAL}
    workers = {number: SimulatedClient(shared, number) for number in by_client}
    first = SimulatedClient(shared, 99)
    await first.create_tables()
    tasks = [loop.create_task(workers[n].work(todo)) for n, todo in by_client.items()]
    for number, todo in rivals.items():
        theirs = compete_for_storage if number <= STORAGE_RIVAL else compete
        tasks.append(loop.create_task(theirs(world, todo)))
    for task in (*tasks, operator):
        await task
    world.injector.active = False
    world.trace.note("calm")
    shared.calm = True
    began = loop.time()
    try:
        async with asyncio.timeout(OPERATION_S + CALM_S):
            await calm_down(world, shared, first)
            for worker in workers.values():
                await worker.leave()
            await drop_all(world, first)
    except TimeoutError:
        world.fail(CheckerViolation(f"liveness: no rest {after(began)}: {doing(world)}"))
        return
    world.stop(for_good=True)
    await supervisor


async def _operate(world: SimulatedCluster, operations: list[ClientOperation]) -> None:
    for operation in operations:
        await asyncio.sleep(operation.pause_ms / 1000)
        world.trace.note("operator", operation.kind)
        if operation.kind == "kill":
            world.kill()
        elif operation.kind == "crash":
            world.crash(operation.name, operation.number)
        else:
            world.stop()
