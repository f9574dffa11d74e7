"""The storage half's adapter: the rules of nonces, with connections of its own."""

from __future__ import annotations

from typing import Any

import pytest

from actors.channel_adapter import (
    AdapterStatistics,
    ConnectClient,
    DisconnectClient,
    InspectAdapter,
    ResponsesAcked,
    StorageAdapter,
    StorageFromClient,
    StorageFromWorker,
    StorageGone,
    StoragePassed,
)
from actors.protocol.compute import AllowCompaction, AllowWrites, Hello
from actors.protocol.storage import FrontierUpper, StorageTagged, StorageTaggedResponse
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.neighbours import NeighbourProbe


def response(nonce: str, number: int = 0) -> StorageTaggedResponse:
    return StorageTaggedResponse(nonce, FrontierUpper("u1", number), number + 1)


def house(
    stage: ActorIsolation, stash: int = 10
) -> tuple[SubjectActor[Any], NeighbourProbe, NeighbourProbe]:
    """(adapter, worker, client)."""
    worker, client = stage.probe("worker"), stage.probe("client")
    adapter = stage.start(lambda: StorageAdapter(3, worker.address, stash), "adapter")
    return adapter, worker, client


async def inspect(adapter: SubjectActor[Any]) -> AdapterStatistics:
    statistics: AdapterStatistics = await adapter.ask(InspectAdapter)
    return statistics


async def test_commands_are_tagged_and_responses_acknowledged(stage: ActorIsolation) -> None:
    adapter, worker, client = house(stage)
    await adapter.send(StorageFromClient("a", AllowWrites()))  # nobody is connected: dropped
    await adapter.send(ConnectClient("a", client.address))
    await adapter.send(StorageFromClient("a", Hello("a")))
    await adapter.send(StorageFromClient("z", AllowWrites()))
    await worker.expect(StorageTagged, nonce="a", command=Hello("a"))
    adapter.reply(response("a", 5))
    await client.expect(
        StorageFromWorker, worker=3, nonce="a", response=FrontierUpper("u1", 5), serial=6
    )
    await worker.expect_nothing()  # not passed before the client took it
    await adapter.send(ResponsesAcked("a", (6,)))
    await worker.expect(StoragePassed, nonce="a", serials=(6,))
    await adapter.send(DisconnectClient("a"))
    await worker.expect(StorageGone, nonce="a")
    adapter.reply(response("a", 6))
    await worker.expect(StoragePassed, nonce="a", serials=(7,))  # drained
    await client.expect_nothing()
    assert await inspect(adapter) == AdapterStatistics(1, 1, 0, 0)


async def test_commands_in_flight_of_a_displaced_connection_are_dropped(
    stage: ActorIsolation,
) -> None:
    adapter, worker, client = house(stage)
    second = stage.probe("second")
    await adapter.send(ConnectClient("a", client.address))
    await adapter.send(DisconnectClient("a"))
    await worker.expect(StorageGone, nonce="a")
    await adapter.send(ConnectClient("b", second.address))
    await adapter.send(StorageFromClient("a", AllowCompaction("u1", 1 << 62)))
    await adapter.send(StorageFromClient("b", Hello("b")))
    await worker.expect(StorageTagged, nonce="b", command=Hello("b"))
    await worker.expect_nothing()
    adapter.reply(response("a", 1))  # what its worker had said to it
    await worker.expect(StoragePassed, nonce="a", serials=(2,))
    await client.expect_nothing()
    await second.expect_nothing()
    assert await inspect(adapter) == AdapterStatistics(0, 1, 0, 0)


async def test_a_stranger_waits_for_its_client_and_is_taken_once(stage: ActorIsolation) -> None:
    adapter, worker, client = house(stage)
    for number in range(2):
        adapter.reply(response("b", number))
        await worker.expect(StoragePassed, nonce="b", serials=(number + 1,))
    await adapter.send(ConnectClient("b", client.address))
    for number in range(2):
        upper = FrontierUpper("u1", number)
        await client.expect(StorageFromWorker, response=upper, serial=0)
    adapter.reply(response("b", 2))
    await client.expect(StorageFromWorker, response=FrontierUpper("u1", 2), serial=3)
    await adapter.send(ResponsesAcked("b", (0, 0, 3)))
    await worker.expect(StoragePassed, nonce="b", serials=(3,))  # the first two were passed before
    assert await inspect(adapter) == AdapterStatistics(3, 0, 0, 0)


async def test_at_the_bound_the_worker_is_not_read_and_nothing_is_lost(
    stage: ActorIsolation,
) -> None:
    adapter, worker, client = house(stage, stash=2)
    for number in range(4):
        adapter.reply(response("b", number))
    await worker.expect(StoragePassed, serials=(1,))
    await worker.expect(StoragePassed, serials=(2,))
    await worker.expect_nothing()
    assert await inspect(adapter) == AdapterStatistics(0, 0, 2, 2)
    await adapter.send(ConnectClient("b", client.address))
    for number in range(4):
        await client.expect(StorageFromWorker, response=FrontierUpper("u1", number))


async def test_a_worker_that_takes_nothing_holds_up_commands_and_loses_none(
    stage: ActorIsolation,
) -> None:
    adapter, worker, client = house(stage)
    worker.stall()
    await adapter.send(ConnectClient("a", client.address))
    for nonce in ("first", "second"):
        await adapter.send(StorageFromClient("a", Hello(nonce)))
    await worker.expect_nothing()
    assert adapter.statistics().state == "handles StorageFromClient"
    worker.resume()
    for nonce in ("first", "second"):
        await worker.expect(StorageTagged, nonce="a", command=Hello(nonce))


@pytest.mark.parametrize("how", ["stop", "crash"])
async def test_a_worker_that_is_gone_is_no_fault_of_the_adapter(
    stage: ActorIsolation, how: str
) -> None:
    adapter, worker, client = house(stage)
    await adapter.send(ConnectClient("a", client.address))
    await (worker.stop() if how == "stop" else worker.crash())
    await adapter.send(StorageFromClient("a", AllowWrites()))
    await adapter.send(DisconnectClient("a"))
    assert await inspect(adapter) == AdapterStatistics(0, 0, 0, 0)
