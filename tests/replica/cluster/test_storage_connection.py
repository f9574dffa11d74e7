"""A connection to the storage half, alone: what it merges, and when it lets workers go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from actors.channel_adapter import (
    ConnectClient,
    FromClient,
    FromWorker,
    ResponsesAcked,
)
from actors.model.protocol.compute import AllowCompaction, Hello, InitializationComplete
from actors.model.protocol.storage import (
    ConnectorConfiguration,
    DroppedId,
    FrontierUpper,
    IngestionDescription,
    RunIngestion,
)
from actors.replica.cluster.connection import ClientCommands, ClusterConnection
from actors.replica.cluster.conversations import StorageConversation
from actors.runtime.errors import PenstockError, RemoteProtocolError
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.peer_probes import PeerProbe

RUN = RunIngestion(IngestionDescription("u1", "u1", ConnectorConfiguration("counter"), "r1"))


class Slow:
    """A client that takes a response when it is told to."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.ended: PenstockError | None = None
        self._may = anyio.Semaphore(0)

    async def send(self, response: Any) -> None:
        await self._may.acquire()
        self.taken.append(response)

    def try_send(self, responses: Sequence[Any]) -> int:
        return 0

    def end(self, error: PenstockError) -> None:
        self.ended = self.ended or error

    def take(self) -> None:
        self._may.release()


async def house(stage: ActorIsolation, outlet: Slow) -> tuple[SubjectActor[Any], list[PeerProbe]]:
    """A connection over two workers that runs a source."""
    adapters = [stage.probe(f"adapter-{index}") for index in range(2)]
    addresses = [adapter.address for adapter in adapters]
    connection = stage.start(
        lambda: ClusterConnection(
            StorageConversation(Hello("a"), 2, Settings()), addresses, outlet
        ),
        "connection",
    )
    await connection.send(ClientCommands((RUN, InitializationComplete())))
    for adapter in adapters:
        (await adapter.expect(ConnectClient, nonce="a")).reply.set(None)
        for command in (Hello("a"), RUN, InitializationComplete()):
            await adapter.expect(FromClient, nonce="a", command=command)
    return connection, adapters


async def test_what_waits_for_a_slow_client_is_not_acknowledged(stage: ActorIsolation) -> None:
    outlet = Slow()
    connection, (first, second) = await house(stage, outlet)
    connection.reply(FromWorker(0, "a", FrontierUpper("u1", EMPTY), 1))
    await first.expect(ResponsesAcked, serials=(1,))  # it completes nothing
    for upper in (5, 6):
        connection.reply(FromWorker(1, "a", FrontierUpper("u1", upper), upper))
    await second.expect_nothing()
    outlet.take()
    await second.expect(ResponsesAcked, serials=(5,))
    await second.expect_nothing()
    outlet.take()
    await second.expect(ResponsesAcked, serials=(6,))
    assert outlet.taken == [FrontierUpper("u1", 5), FrontierUpper("u1", 6)]


async def test_what_was_stashed_is_not_acknowledged_twice(stage: ActorIsolation) -> None:
    outlet = Slow()
    connection, (first, second) = await house(stage, outlet)
    connection.reply(FromWorker(0, "a", FrontierUpper("u1", 5), 0))
    connection.reply(FromWorker(1, "a", FrontierUpper("u1", 5), 0))
    outlet.take()
    await first.expect_nothing()
    await second.expect_nothing()
    assert outlet.taken == [FrontierUpper("u1", 5)]


async def test_an_id_is_free_when_its_drop_was_merged(stage: ActorIsolation) -> None:
    outlet = Slow()
    connection, adapters = await house(stage, outlet)
    drop = AllowCompaction("u1", EMPTY)
    await connection.send(ClientCommands((drop,)))
    for index, adapter in enumerate(adapters):
        await adapter.expect(FromClient, command=drop)
        connection.reply(FromWorker(index, "a", DroppedId("u1"), 1))
    outlet.take()
    for adapter in adapters:
        await adapter.expect(ResponsesAcked, serials=(1,))
    await connection.send(ClientCommands((RUN,)))
    for adapter in adapters:
        await adapter.expect(FromClient, command=RUN)
    assert outlet.ended is None


@pytest.mark.parametrize(
    "breach",
    [
        FromWorker(0, "a", FrontierUpper("unknown", 5), 1),
        ClientCommands((Hello("again"),)),
    ],
    ids=["worker", "client"],
)
async def test_who_breaks_a_rule_ends_it(stage: ActorIsolation, breach: Any) -> None:
    outlet = Slow()
    connection, _ = await house(stage, outlet)
    connection.reply(breach)
    await stage.idle()
    assert isinstance(outlet.ended, RemoteProtocolError)
    assert not connection.running
