"""Connections that have ended leave nothing behind, however they ended."""

from __future__ import annotations

import gc
from typing import Any

from actors.channel_adapter import ConnectClient, DisconnectClient, ManyFromWorker
from actors.model.protocol.compute import CreateInstance, Frontiers, Hello, InitializationComplete
from actors.replica.cluster.connection import (
    AcceptConnection,
    ClientCommands,
    ClusterConnection,
    ConnectionAcceptor,
)
from actors.replica.cluster.conversations import ClientConversation, ComputeConversation
from actors.replica.cluster.partitioned import ConnectionLimits
from actors.replica.compute.index import ClusterPartitions
from actors.runtime.errors import ConnectionBroken, PenstockError
from actors.runtime.settings import Settings
from actors.testing.encoding import carry_by_reference
from actors.testing.isolation import ActorIsolation


class Failing:
    """An outlet whose peer is gone: it raises the same error for ever, as a stream does."""

    def __init__(self) -> None:
        self.lost: PenstockError = ConnectionBroken("connection reset by peer")
        self.ended: PenstockError | None = None

    async def send(self, response: Any) -> None:
        raise self.lost

    def try_send(self, responses: Any) -> int:
        return 0

    def end(self, error: PenstockError) -> None:
        self.ended = self.ended or error


carry_by_reference(Failing)


async def test_a_connection_that_failed_while_it_sent_is_freed(stage: ActorIsolation) -> None:
    adapter, settings = stage.probe("adapter"), Settings(workers=1)

    def converse(hello: Hello, instance: CreateInstance | None) -> ClientConversation:
        assert instance is not None
        limits, partitions = ConnectionLimits(1 << 20), ClusterPartitions(1)
        return ComputeConversation(hello, instance, 1, limits, partitions, settings)

    acceptor = stage.start(
        lambda: ConnectionAcceptor([adapter.address], settings, converse), "acceptor"
    )
    for number in range(3):
        nonce, outlet = f"n{number}", Failing()
        connection = await acceptor.ask(
            lambda reply, n=nonce, o=outlet: AcceptConnection(Hello(n), CreateInstance(1), o, reply)  # type: ignore[misc]
        )
        (await adapter.pick(ConnectClient, nonce=nonce)).reply.set(None)
        await connection.send(ClientCommands((InitializationComplete(),)))
        connection.reply(ManyFromWorker(0, nonce, ((1, Frontiers("v", write=7)),)))
        await stage.idle()
        assert outlet.ended is outlet.lost
        await adapter.pick(DisconnectClient, nonce=nonce)
        adapter.received.clear()
    del connection, outlet
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, ClusterConnection)]
