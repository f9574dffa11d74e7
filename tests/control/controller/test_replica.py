"""The link to a replica: replay, reconnection, and responses told apart by connection."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from actors.control.controller.replicas.replica import (
    ConnectionLost,
    LinkTurn,
    ReplicaConnected,
    ReplicaLink,
    ReplicaLost,
    ReplicaResponse,
)
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import (
    AllowWrites,
    CancelPeek,
    Command,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Frontiers,
    Hello,
    IndexExport,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekCanceled,
    PeekResponse,
    Response,
    ScheduleDataflow,
    ShardImport,
)
from actors.runtime.errors import ConnectionBroken
from actors.runtime.kernel import Actor, ActorAddress, ActorSystem
from actors.runtime.settings import Settings
from actors.testing.probe import MessageProbe

COMMANDS: list[Command] = [CreateInstance(2), InitializationComplete(), AllowWrites()]


class FakeClient:
    """A connection whose other end is the test."""

    def __init__(self) -> None:
        self.sent: deque[Command] = deque()
        self.responses: deque[Response | Exception] = deque()
        self.closed = False
        self.room = 0
        """Commands that go without waiting."""
        self._changed = anyio.Event()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def send(self, command: Any) -> None:
        self.sent.append(command)
        self._notify()

    def try_send(self, commands: Sequence[Any]) -> int:
        if self.closed:
            raise ConnectionBroken("closed")
        taken = list(commands)[: self.room]
        self.room -= len(taken)
        self.sent.extend(taken)
        self._notify()
        return len(taken)

    def receive_nowait(self, count_max: int) -> list[Response]:
        found: list[Response] = []
        while self.responses and len(found) < count_max:
            first = self.responses[0]
            if isinstance(first, Exception):
                break
            found.append(first)
            self.responses.popleft()
        return found

    async def receive(self) -> Response:
        while not self.responses:
            await self._changed.wait()
        response = self.responses.popleft()
        if isinstance(response, Exception):
            raise response
        return response

    async def close(self) -> None:
        self.closed = True

    def respond(self, response: Response | Exception) -> None:
        self.responses.append(response)
        self._notify()

    async def expect(self, count: int) -> list[Command]:
        while len(self.sent) < count:
            await self._changed.wait()
        return [self.sent.popleft() for _ in range(count)]


class PushCommand(msgspec.Struct, frozen=True):
    command: Command


class ReplayHistory(msgspec.Struct, frozen=True):
    incarnation: int
    commands: tuple[Command, ...]


class LinkOwner(Actor[PushCommand | ReplayHistory | LinkTurn]):
    """Stands for the controller: it owns the link, and passes its news on."""

    def __init__(self, connect: Any, controller: ActorAddress[Any]) -> None:
        self._connect = connect
        self._controller = controller

    async def on_start(self) -> None:
        settings = Settings(retry_delay_ms_min=1, retry_delay_ms_max=2)
        self._link = ReplicaLink(self.ctx, "r1", self._connect, settings)
        self._link.connect()

    async def on_stop(self) -> None:
        await self._link.aclose()

    async def receive(self, message: PushCommand | ReplayHistory | LinkTurn) -> None:
        match message:
            case PushCommand(command):
                self._link.push(command)
            case ReplayHistory(incarnation, commands):
                self._link.replay(incarnation, commands)
            case LinkTurn():
                for news in self._link.turn(message):
                    await self._controller.send(news)


class World:
    def __init__(self, system: ActorSystem) -> None:
        self.clients: list[FakeClient] = []
        self.made: list[FakeClient] = []
        """Those that the link was given."""
        self.refusals = 0
        self.answers = anyio.Event()
        """Set: the replica takes connections."""
        self.answers.set()
        self.controller = MessageProbe.start(system, "controller")
        self.owner = LinkOwner(self.connect, self.controller.address)
        self.replica: ActorAddress[Any] = system.spawn(lambda: self.owner, "owner")

    async def connected(self, commands: list[Command] = COMMANDS) -> ReplicaConnected:
        """The next connection, which is given the history."""
        told = await self.controller.expect(ReplicaConnected)
        assert told.replica == "r1"
        await self.replica.send(ReplayHistory(told.incarnation, tuple(commands)))
        return told

    async def connect(self) -> FakeClient:
        if self.refusals:
            self.refusals -= 1
            raise ConnectionBroken("nobody listens")
        client = FakeClient()
        self.clients.append(client)
        await self.answers.wait()
        self.made.append(client)
        return client


@asynccontextmanager
async def started() -> AsyncIterator[World]:
    with anyio.fail_after(200):
        async with ActorSystem(seed=1) as system:
            yield World(system)


async def test_replays_hello_and_history_then_sends_on() -> None:
    async with started() as world:
        assert (await world.connected()).incarnation == 1
        client = world.clients[0]
        hello, *rest = await client.expect(4)
        assert isinstance(hello, Hello)
        assert rest == COMMANDS
        await world.replica.send(PushCommand(ScheduleDataflow("u1")))
        assert await client.expect(1) == [ScheduleDataflow("u1")]


async def test_reconnects_with_a_fresh_nonce_and_is_given_the_history_again() -> None:
    async with started() as world:
        await world.connected()
        first = await world.clients[0].expect(4)
        answer = PeekResponse("p1", PeekCanceled())
        world.clients[0].respond(answer)
        assert (await world.controller.expect(ReplicaResponse)).response == answer
        world.refusals = 3
        world.clients[0].respond(ConnectionBroken("gone"))
        lost = [await world.controller.expect(ReplicaLost) for _ in range(4)]
        assert "nobody listens" in str(lost[-1].error)
        live = Peek("p2", IndexTarget("u2"), 6)
        connected = await world.connected([*COMMANDS, live])
        second = await world.clients[1].expect(5)
        assert world.clients[0].closed
        assert isinstance(first[0], Hello)
        assert isinstance(second[0], Hello)
        assert first[0].nonce != second[0].nonce
        assert second[1:] == [*COMMANDS, live]
        world.clients[1].respond(Frontiers("u2", write=9))
        response = await world.controller.expect(ReplicaResponse)
        assert response.incarnation == connected.incarnation > lost[-1].incarnation


@pytest.mark.parametrize("room", [0, 1, 3, 100])
async def test_commands_keep_their_order_whatever_goes_without_waiting(room: int) -> None:
    async with started() as world:
        await world.connected()
        client = world.clients[0]
        await client.expect(4)
        ids = [f"u{n}" for n in range(20)]
        for id in ids:
            client.room = room
            await world.replica.send(PushCommand(ScheduleDataflow(id)))
        assert await client.expect(20) == [ScheduleDataflow(id) for id in ids]


async def test_responses_that_are_there_come_in_order_and_before_the_end() -> None:
    async with started() as world:
        await world.connected()
        client = world.clients[0]
        said = [Frontiers("u1", write=number) for number in range(1, 200)]
        client.responses.extend(said)
        client.respond(ConnectionBroken("gone"))
        heard = [(await world.controller.expect(ReplicaResponse)).response for _ in said]
        assert heard == said
        assert "gone" in str((await world.controller.expect(ReplicaLost)).error)


async def test_what_cannot_be_offered_loses_the_connection() -> None:
    async with started() as world:
        await world.connected()
        client = world.clients[0]
        await client.expect(4)
        client.closed = True
        await world.replica.send(PushCommand(ScheduleDataflow("u1")))
        assert "closed" in str((await world.controller.expect(ReplicaLost)).error)
        connected = await world.connected([*COMMANDS, ScheduleDataflow("u1")])
        assert connected.incarnation > 1
        assert (await world.clients[1].expect(5))[-1] == ScheduleDataflow("u1")


async def test_an_attempt_that_was_given_up_makes_no_connection() -> None:
    async with started() as world:
        await world.connected()
        await world.clients[0].expect(4)
        world.answers = anyio.Event()
        world.clients[0].respond(ConnectionBroken("gone"))
        attempt = (await world.controller.expect(ReplicaLost)).incarnation + 2
        while len(world.clients) < 2:
            await anyio.lowlevel.checkpoint()
        given_up = ConnectionLost(attempt, ConnectionBroken("given up"))
        await world.replica.send(LinkTurn(world.owner._link, given_up))
        assert "given up" in str((await world.controller.expect(ReplicaLost)).error)
        world.answers.set()
        assert (await world.connected()).incarnation == attempt + 2
        assert len(await world.clients[2].expect(4)) == 4
        assert world.clients[1].closed
        assert not world.clients[1].sent


@pytest.mark.parametrize("turns", range(8))
async def test_a_connection_made_as_its_owner_ends_is_closed(turns: int) -> None:
    async with started() as world:
        await world.connected()
        world.answers = anyio.Event()
        world.clients[0].respond(ConnectionBroken("gone"))
        await world.controller.expect(ReplicaLost)
        while len(world.clients) < 2:
            await anyio.lowlevel.checkpoint()
        world.answers.set()
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        made = world.made.copy()
    assert all(client.closed for client in made)


async def test_what_was_said_before_the_history_is_in_it() -> None:
    """Nothing is sent twice, nor before the Hello; a history of another connection is nobody's."""
    async with started() as world:
        told = await world.controller.expect(ReplicaConnected)
        peek = Peek("p1", IndexTarget("u2"), 5)
        await world.replica.send(PushCommand(peek))
        await world.replica.send(ReplayHistory(told.incarnation - 1, (AllowWrites(),)))
        await world.replica.send(ReplayHistory(told.incarnation, (*COMMANDS, peek)))
        await world.replica.send(PushCommand(CancelPeek("p1")))
        sent = await world.clients[0].expect(6)
        assert sent[1:] == [*COMMANDS, peek, CancelPeek("p1")]


async def test_only_so_many_dataflows_hydrate_at_a_time() -> None:
    async with started() as world:
        await world.connected()
        client = world.clients[0]
        await client.expect(4)
        ids = [f"u{n}" for n in range(6)]
        for id in ids:
            await world.replica.send(PushCommand(CreateDataflow(index(id))))
            await world.replica.send(PushCommand(ScheduleDataflow(id)))
        sent = await client.expect(10)
        assert [c.id for c in sent if isinstance(c, ScheduleDataflow)] == ids[:4], "hydrations_max"
        client.respond(Frontiers("u2", output=11))
        assert await client.expect(1) == [ScheduleDataflow("u4")]
        # The next connection begins anew: what it has kept tells so.
        await world.controller.expect(ReplicaResponse)
        client.respond(ConnectionBroken("gone"))
        await world.controller.expect(ReplicaLost)
        made: list[Command] = [CreateDataflow(index(id)) for id in ids]
        await world.connected([COMMANDS[0], *made, *map(ScheduleDataflow, ids), *COMMANDS[1:]])
        again = world.clients[1]
        sent = await again.expect(4 + 6 + 4)
        assert [c.id for c in sent if isinstance(c, ScheduleDataflow)] == ids[:4]
        for id in ids[:4]:
            again.respond(Frontiers(id, output=11))
        assert await again.expect(2) == [ScheduleDataflow("u4"), ScheduleDataflow("u5")]


def index(id: str) -> DataflowDescription:
    schema = TableSchema((TableColumn("id", "bigint"),))
    imports = (ShardImport("table", schema),)
    return DataflowDescription(id, id, imports, IndexExport(("id",), schema), 10)
