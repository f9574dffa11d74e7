"""A client in the process of the cluster: what it hands to the adapters, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from actors.channel_adapter import ConnectClient, FromClient, FromWorker, ResponsesAcked
from actors.model.protocol.compute import (
    AllowCompaction,
    Command,
    CommandBatch,
    CreateInstance,
    Frontiers,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekResponse,
    PeekRows,
    UpdateConfiguration,
)
from actors.replica.cluster.client import LocalClient
from actors.replica.cluster.connection import (
    AcceptConnection,
    EndConnection,
    LocalInbox,
)
from actors.replica.cluster.conversations import ComputeConversation
from actors.replica.cluster.partitioned import ConnectionLimits
from actors.replica.compute.index import ClusterPartitions
from actors.runtime.errors import ConnectionBroken, RemoteProtocolError, ResourceClosed
from actors.runtime.settings import Settings
from actors.testing.probe import settle

SETTINGS = Settings(workers=2, responses_in_flight_max=4)
START: tuple[Command, ...] = (Hello("a"), CreateInstance(2), InitializationComplete())


class FakeAdapter:
    """An adapter with so much room."""

    def __init__(self) -> None:
        self.room = 1000
        self.got: deque[Any] = deque()
        self.gone = False
        self._changed = anyio.Event()

    def send_nowait(self, message: Any) -> None:
        if self.gone:
            raise ResourceClosed("it has stopped")
        assert self.room > 0, "the caller has looked"
        self.room -= 1
        self.got.append(message)

    async def ask(self, make: Any) -> None:
        assert isinstance(make(None), ConnectClient)

    async def send(self, message: Any) -> None:
        while self.room <= 0:
            await self._changed.wait()
        self.send_nowait(message)

    def make_room(self, room: int) -> None:
        self.room = room
        self._changed.set()
        self._changed = anyio.Event()

    def commands(self) -> list[Command]:
        """The commands that it got, out of their batches."""
        found: list[Command] = []
        while self.got:
            message = self.got.popleft()
            assert isinstance(message, FromClient)
            assert message.nonce == "a"
            batch = isinstance(message.command, CommandBatch)
            found += message.command.commands if batch else (message.command,)  # type: ignore[union-attr, arg-type]
        return found


class FakeCluster:
    """The acceptor, which takes everybody, and the cluster's end of the connection."""

    def __init__(self) -> None:
        self.adapters = [FakeAdapter(), FakeAdapter()]
        self.ended = False
        self.inbox: LocalInbox | None = None

    async def ask(self, make: Any) -> Any:
        message = make(None)
        assert isinstance(message, AcceptConnection)
        assert isinstance(message.sink, LocalInbox)
        self.inbox = message.sink
        for way in self.inbox.ways:
            await way.attach("a", self.inbox.address)
        return self

    def reply(self, message: Any) -> None:
        assert isinstance(message, EndConnection)
        self.ended = True

    def client(self) -> LocalClient:
        def converse(hello: Hello, instance: CreateInstance | None) -> ComputeConversation:
            assert instance is not None
            limits = ConnectionLimits(SETTINGS.result_bytes_max)
            return ComputeConversation(hello, instance, 2, limits, ClusterPartitions(2), SETTINGS)

        cluster: Any = self
        adapters: Sequence[Any] = self.adapters
        return LocalClient(cluster, adapters, converse)

    async def joined(self) -> LocalClient:
        client = self.client()
        for command in START:
            await client.send(command)
        assert self.adapters[0].commands() == list(START)
        assert self.adapters[1].commands() == []
        return client

    def answer(self, worker: int, response: Any, serial: int) -> None:
        assert self.inbox is not None
        self.inbox.address.reply(FromWorker(worker, "a", response, serial))


def peek(number: int) -> Peek:
    return Peek(f"p{number}", IndexTarget("i1"), 5)


async def test_nothing_is_offered_before_the_cluster_has_accepted() -> None:
    client = FakeCluster().client()
    assert client.try_send([Hello("a")]) == 0
    await client.send(Hello("a"))
    assert client.try_send([CreateInstance(2)]) == 0
    assert client.receive_nowait(10) == []


@pytest.mark.parametrize("room", [0, 1, 2, 5, 1000])
async def test_what_finds_no_room_is_left_to_the_caller_and_none_is_lost(room: int) -> None:
    cluster = FakeCluster()
    client = await cluster.joined()
    first, second = cluster.adapters
    wide = UpdateConfiguration(result_bytes_max=1000)
    left: list[Command] = [wide, *(peek(n) for n in range(10)), wide, AllowCompaction("v", 4)]
    wanted = list(left)
    while left:
        first.make_room(room)
        second.make_room(room)
        taken = client.try_send(left)
        del left[:taken]
        if not taken:
            async with anyio.create_task_group() as group:
                group.start_soon(client.send, left.pop(0))
                await settle()
                first.make_room(1)
                second.make_room(1)
    assert first.commands() == wanted
    assert second.commands() == [], "worker 0 tells the others"


async def test_a_wrong_command_ends_the_connection_unless_the_caller_has_checked_it() -> None:
    cluster = FakeCluster()
    client = await cluster.joined()
    assert client.try_send([peek(1), peek(1), peek(2)]) == 3
    assert cluster.adapters[0].commands() == [peek(1)]
    assert cluster.ended
    with pytest.raises(RemoteProtocolError, match="is still pending"):
        await client.receive()
    trusting = FakeCluster()
    other = trusting.client().trust()
    for command in START:
        await other.send(command)
    trusting.adapters[0].got.clear()
    assert other.try_send([peek(1), peek(1)]) == 2
    assert trusting.adapters[0].commands() == [peek(1), peek(1)]
    assert not trusting.ended


async def test_responses_are_merged_and_acknowledged_when_they_are_taken() -> None:
    cluster = FakeCluster()
    client = await cluster.joined()
    await client.send(peek(1))
    for each in cluster.adapters:
        each.got.clear()
    answer = PeekResponse("p1", PeekRows(b"", 0))
    cluster.answer(0, answer, 1)
    cluster.answer(1, answer, 1)
    cluster.answer(0, Frontiers("v", write=5), 2)
    cluster.answer(1, Frontiers("v", write=4), 2)
    assert not cluster.adapters[0].got, "the client has not looked"
    assert await client.receive() == answer
    assert client.receive_nowait(10) == [Frontiers("v", write=4)]
    assert list(cluster.adapters[0].got) == [
        ResponsesAcked("a", (1,)),
        ResponsesAcked("a", (2,)),
    ] or list(cluster.adapters[0].got) == [ResponsesAcked("a", (1, 2))]


async def test_acknowledgements_wait_for_room_where_the_client_may_wait() -> None:
    cluster = FakeCluster()
    client = await cluster.joined()
    first, second = cluster.adapters
    second.make_room(0)
    cluster.answer(0, Frontiers("v", write=5), 1)
    cluster.answer(1, Frontiers("v", write=5), 1)
    assert client.receive_nowait(10) == [Frontiers("v", write=5)]
    assert not first.got
    async with anyio.create_task_group() as group:
        group.start_soon(client.receive)
        await settle()
        assert first.got
        assert not second.got
        second.make_room(1)
        await settle()
        assert second.got
        group.cancel_scope.cancel()


async def test_an_adapter_that_is_gone_breaks_the_connection() -> None:
    cluster = FakeCluster()
    client = await cluster.joined()
    cluster.adapters[0].gone = True
    with pytest.raises(ConnectionBroken):
        client.try_send([peek(1)])
    with pytest.raises(ConnectionBroken):
        await client.send(peek(2))


async def test_what_came_before_the_end_is_received_first() -> None:
    cluster = FakeCluster()
    client = await cluster.joined()
    for worker in range(2):
        cluster.answer(worker, Frontiers("v", write=5), 1)
    assert cluster.inbox is not None
    cluster.inbox.end(ConnectionBroken("displaced"))
    assert await client.receive() == Frontiers("v", write=5)
    with pytest.raises(ConnectionBroken, match="displaced"):
        await client.receive()
