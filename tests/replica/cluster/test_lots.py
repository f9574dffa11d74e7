"""What is there at the same time travels together, and nothing else changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from actors.channel_adapter import (
    ChannelAdapter,
    ClientGone,
    ConnectClient,
    DisconnectClient,
    FromClient,
    FromWorker,
    InspectAdapter,
    ManyFromWorker,
    ResponsesAcked,
    ResponsesForwarded,
)
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Command,
    CommandBatch,
    ConnectionRefused,
    CreateInstance,
    Frontiers,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekResponse,
    PeekRows,
    Response,
    SubscribeBatch,
    SubscribeResponse,
)
from actors.model.protocol.internal import TaggedResponses
from actors.replica.cluster.connection import (
    ClientCommands,
    ClusterConnection,
)
from actors.replica.cluster.conversations import AcknowledgementWindow, ComputeConversation
from actors.replica.cluster.partitioned import ConnectionLimits
from actors.replica.compute.index import ClusterPartitions
from actors.runtime.errors import LocalProtocolError, MalformedFrame
from actors.runtime.kernel import ReplySlot
from actors.runtime.settings import Settings
from actors.runtime.telemetry import TracedMessage
from actors.runtime.transport.connection import FramedConnection, TransportListener, dial
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.peer_probes import PeerProbe

MAGIC = b"TESTLOTS"


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


# -- the socket ------------------------------------------------------------------------------------


@asynccontextmanager
async def both_ends(
    settings: Settings | None = None,
) -> AsyncIterator[tuple[FramedConnection[Any, Any], FramedConnection[Any, Any]]]:
    """(dialler, listener)."""
    settings = settings or Settings()
    accepted: list[FramedConnection[Any, Any]] = []
    came, over = anyio.Event(), anyio.Event()

    async def keep(connection: FramedConnection[Any, Any]) -> None:
        accepted.append(connection)
        came.set()
        await over.wait()

    listener = await TransportListener.bind(
        "127.0.0.1:0", Ping, Ping, settings, MAGIC, first_bytes_max=settings.frame_bytes_max
    )
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, keep)
        with anyio.fail_after(60):
            dialled = await dial(listener.address, Ping, Ping, settings, MAGIC)
            await came.wait()
            yield dialled, accepted[0]
            over.set()
            await dialled.aclose()
        await listener.aclose()


async def test_what_is_offered_leaves_in_one_write_and_is_found_at_hand() -> None:
    async with both_ends() as (near, far):
        sent = [Ping(number) for number in range(20)]
        assert near.try_send(sent) == 20
        found = [await far.receive()]
        found += far.receive_nowait(5)
        assert found == sent[:6], "they came together, and no more than asked for is taken"
        found += far.receive_nowait(100)
        assert found == sent
        assert far.receive_nowait(100) == []


async def test_nothing_is_offered_past_a_message_that_waits() -> None:
    settings = Settings()
    async with both_ends(settings) as (near, far):
        large = Ping(1, bytes(settings.frame_bytes_max - 1000))
        async with anyio.create_task_group() as group:
            group.start_soon(near.send, large)
            await anyio.wait_all_tasks_blocked()
            assert near.try_send([Ping(2)]) == 0, "the peer is slow, and a frame is not whole yet"
            assert await far.receive() == large
        assert near.try_send([Ping(3)]) == 1
        assert await far.receive() == Ping(3)


async def test_a_message_that_fits_no_frame_is_told_of_when_it_is_the_first() -> None:
    settings = Settings()
    async with both_ends(settings) as (near, far):
        large = Ping(1, bytes(settings.frame_bytes_max + 1))
        assert near.try_send([Ping(0), large, Ping(2)]) == 1
        with pytest.raises(LocalProtocolError, match="too large for a frame"):
            near.try_send([large, Ping(2)])
        assert near.try_send([Ping(2)]) == 1
        assert [await far.receive(), await far.receive()] == [Ping(0), Ping(2)]


async def test_what_came_before_a_bad_frame_is_taken_first() -> None:
    async with both_ends() as (near, far):
        near.try_send([Ping(0), Ping(1)])
        near._stream.write(b"\x00\x00\x00\x01\xc1")  # a byte that msgpack never uses
        found = [await far.receive()]
        while len(found) < 2:
            found += far.receive_nowait(10) or [await far.receive()]
        assert found == [Ping(0), Ping(1)]
        with pytest.raises(MalformedFrame):
            await far.receive()
        assert far.receive_nowait(10) == []


# -- the adapter -----------------------------------------------------------------------------------


def lot(nonce: str, *numbers: int) -> TaggedResponses:
    return TaggedResponses(nonce, tuple((n, Frontiers("v", write=n)) for n in numbers))


def adapter_house(
    stage: ActorIsolation, stash: int = 4
) -> tuple[SubjectActor[Any], PeerProbe, PeerProbe]:
    """(adapter, worker, client)."""
    worker, client = stage.probe("worker"), stage.probe("client")
    adapter = stage.start(lambda: ChannelAdapter(1, worker.address, stash), "adapter")
    return adapter, worker, client


async def test_a_lot_of_the_current_nonce_goes_on_as_one(stage: ActorIsolation) -> None:
    adapter, worker, client = adapter_house(stage)
    adapter.reply(lot("old", 1, 2))  # from the future, as far as it knows
    await worker.expect(ResponsesForwarded, nonce="old", serials=(1,))
    await worker.expect(ResponsesForwarded, nonce="old", serials=(2,))
    await adapter.send(ConnectClient("a", client.address, ReplySlot()))
    adapter.reply(lot("a", 3, 4, 5))
    await client.expect(ManyFromWorker, worker=1, nonce="a", responses=lot("a", 3, 4, 5).responses)
    await worker.expect_nothing()  # not passed before the client took them
    await adapter.send(ResponsesAcked("a", (3, 4, 5)))
    await worker.expect(ResponsesForwarded, nonce="a", serials=(3, 4, 5))
    await adapter.send(DisconnectClient("a"))
    await adapter.send(ConnectClient("old", client.address, ReplySlot()))
    await client.expect_nothing()  # what was stashed for it was older
    found = await adapter.ask(InspectAdapter)
    assert (found.forwarded, found.dropped, found.stashed) == (3, 2, 0)


async def test_lots_of_others_are_judged_one_by_one(stage: ActorIsolation) -> None:
    adapter, worker, client = adapter_house(stage, stash=2)
    await adapter.send(ConnectClient("past", client.address, ReplySlot()))
    await adapter.send(DisconnectClient("past"))
    await worker.expect(ClientGone, nonce="past")
    await adapter.send(ConnectClient("a", client.address, ReplySlot()))
    adapter.reply(lot("past", 1, 2))
    await worker.expect(ResponsesForwarded, nonce="past", serials=(1,))  # dropped
    await worker.expect(ResponsesForwarded, nonce="past", serials=(2,))
    adapter.reply(lot("next", 3, 4, 5))
    await worker.expect(
        ResponsesForwarded, nonce="next", serials=(3,)
    )  # stashed, as many as there is room
    await worker.expect(ResponsesForwarded, nonce="next", serials=(4,))
    await worker.expect_nothing()
    await client.expect_nothing()
    await adapter.send(DisconnectClient("a"))
    await adapter.send(ConnectClient("next", client.address, ReplySlot()))
    for number, serial in ((3, 0), (4, 0), (5, 5)):
        await client.expect(FromWorker, response=Frontiers("v", write=number), serial=serial)
    found = await adapter.ask(InspectAdapter)
    assert (found.forwarded, found.delivered, found.dropped) == (1, 2, 2)


# -- what is told to the workers -------------------------------------------------------------------


def told(acks: AcknowledgementWindow, worker: int, serial: int, response: Response) -> list[Any]:
    acks.note_sent(worker, serial, response)
    return acks.take_due()


def test_what_has_left_is_told_by_the_quarter_of_a_window() -> None:
    acks, frontiers = AcknowledgementWindow(2, 12, 4000), Frontiers("v", 1)
    assert told(acks, 0, 1, frontiers) == []
    assert told(acks, 1, 1, frontiers) == []
    assert told(acks, 0, 2, frontiers) == []
    assert told(acks, 0, 0, frontiers) == [], "it was stashed: nobody counts it"
    assert told(acks, 0, 3, frontiers) == [(0, (1, 2, 3))]
    assert told(acks, 0, 4, frontiers) == [], "and it begins again"
    rows = PeekResponse("p", PeekRows(bytes(1000), 1))
    assert told(acks, 0, 5, rows) == [(0, (4, 5))], "a quarter of the bytes"


def test_a_batch_of_a_subscribe_is_told_at_once_with_all_before_it() -> None:
    acks = AcknowledgementWindow(2, 64, 1 << 20)
    assert told(acks, 1, 1, Frontiers("v", 1)) == []
    batch = SubscribeResponse("s", SubscribeBatch(1, 2))
    assert told(acks, 1, 2, batch) == [(1, (1, 2))]
    assert told(acks, 0, 1, Frontiers("v", 1)) == []


def test_the_smallest_window_is_opened_again_by_each() -> None:
    acks = AcknowledgementWindow(1, 1, 1)
    assert told(acks, 0, 1, Frontiers("v", 1)) == [(0, (1,))]
    assert told(acks, 0, 2, Frontiers("v", 1)) == [(0, (2,))]


# -- the connection --------------------------------------------------------------------------------


class Taken:
    """An outlet that takes so many responses at once, and keeps them by how they left."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.writes: list[list[Response]] = []
        self.error: Exception | None = None

    async def send(self, response: Response) -> None:
        self.writes.append([response])

    def try_send(self, responses: Any) -> int:
        taken = list(responses[: self.room])
        if taken:
            self.writes.append(taken)
        return len(taken)

    def end(self, error: Exception) -> None:
        self.error = self.error or error


class Talk:
    """A connection between probes: `workers` adapters and an outlet."""

    def __init__(self, stage: ActorIsolation, workers: int = 1, room: int = 100) -> None:
        self.adapters = [stage.probe(f"adapter-{number}") for number in range(workers)]
        self.outlet = Taken(room)
        settings = Settings(workers=workers, responses_in_flight_max=8)
        self.connection = stage.start(
            lambda: ClusterConnection(
                ComputeConversation(
                    Hello("a"),
                    CreateInstance(workers),
                    workers,
                    ConnectionLimits(settings.result_bytes_max),
                    ClusterPartitions(workers),
                    settings,
                ),
                [adapter.address for adapter in self.adapters],
                self.outlet,
            ),
            "connection",
        )

    async def begin(self) -> None:
        """Past InitializationComplete."""
        await self.connection.send(ClientCommands((InitializationComplete(),)))
        for adapter in self.adapters:
            (await adapter.expect(ConnectClient)).reply.set(None)
        await self.adapters[0].expect(FromClient, command=Hello("a"))
        complete = CommandBatch((CreateInstance(len(self.adapters)), InitializationComplete()))
        await self.adapters[0].expect(FromClient, command=complete)


def peek(uuid: str) -> Peek:
    return Peek(uuid, IndexTarget("i1"), 5)


async def test_commands_that_came_together_go_on_together(stage: ActorIsolation) -> None:
    talk = Talk(stage)
    await talk.begin()
    commands: tuple[Command, ...] = (AllowWrites(), peek("p1"), AllowCompaction("v", 4))
    await talk.connection.send(ClientCommands(commands))
    await talk.adapters[0].expect(FromClient, nonce="a", command=CommandBatch(commands))
    await talk.connection.send(ClientCommands((peek("p2"),)))
    await talk.adapters[0].expect(FromClient, nonce="a", command=peek("p2"))
    await talk.adapters[0].expect_nothing()
    assert (talk.outlet.error, talk.outlet.writes) == (None, [])


async def test_what_stands_before_a_command_that_breaks_a_rule_is_passed_on(
    stage: ActorIsolation,
) -> None:
    talk = Talk(stage)
    await talk.begin()
    await talk.connection.send(ClientCommands((peek("p1"), peek("p1"), peek("p2"))))
    await talk.adapters[0].expect(FromClient, command=peek("p1"))
    await talk.adapters[0].expect_nothing()
    assert "is still pending" in str(talk.outlet.error)


async def test_a_context_that_is_not_let_in_does_not_travel(stage: ActorIsolation) -> None:
    talk = Talk(stage)
    await talk.begin()
    traceparent = f"00-{1:032x}-{1:016x}-01"
    await talk.connection.send(ClientCommands((TracedMessage(peek("p1"), traceparent), peek("p2"))))
    passed = await talk.adapters[0].expect(FromClient)
    assert passed.command == CommandBatch((peek("p1"), peek("p2")))


def answers(*uuids: str) -> tuple[tuple[int, Response], ...]:
    return tuple((n, PeekResponse(uuid, PeekRows(b"", 0))) for n, uuid in enumerate(uuids, 1))


async def test_answers_that_are_complete_leave_in_one_write(stage: ActorIsolation) -> None:
    talk = Talk(stage, workers=2)
    await talk.begin()
    await talk.connection.send(ClientCommands((peek("p1"), peek("p2"), peek("p3"))))
    talk.connection.reply(ManyFromWorker(0, "a", answers("p1", "p2", "p3")))
    await talk.adapters[0].expect(FromClient)
    await talk.adapters[0].expect(
        ResponsesAcked, nonce="a", serials=(1, 2, 3)
    )  # nothing to send of it
    await talk.adapters[0].expect_nothing()
    assert talk.outlet.writes == []
    talk.connection.reply(ManyFromWorker(1, "a", answers("p1", "p2")))
    await talk.adapters[1].expect(ResponsesAcked, nonce="a", serials=(1, 2))
    talk.connection.reply(ManyFromWorker(1, "stranger", answers("p3")))
    await talk.adapters[1].expect_nothing()
    written = [[response for _, response in answers("p1", "p2")]]
    assert talk.outlet.writes == written


async def test_what_finds_no_room_follows_in_order(stage: ActorIsolation) -> None:
    talk = Talk(stage, room=2)
    await talk.begin()
    uuids = [f"p{number}" for number in range(7)]
    await talk.connection.send(ClientCommands(tuple(peek(uuid) for uuid in uuids)))
    talk.connection.reply(ManyFromWorker(0, "a", answers(*uuids[:4])))
    talk.connection.reply(ManyFromWorker(0, "a", answers(*uuids[4:])))
    await stage.idle()
    left = [response.uuid for write in talk.outlet.writes for response in write]  # type: ignore[union-attr]
    assert left == uuids
    assert max(map(len, talk.outlet.writes)) == 2
    assert not any(isinstance(response, ConnectionRefused) for [response, *_] in talk.outlet.writes)
