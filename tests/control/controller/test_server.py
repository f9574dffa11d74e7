"""Sessions: the handshake, limits, bad frames, and what ends with a connection."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from actors.control.access.open_sessions import OpenSessions
from actors.control.controller.messages import BytesDelivered, SubmitRequest
from actors.control.controller.sessions.memory_link import MemoryConnection, pair
from actors.control.controller.sessions.server import ApiServer, ConnectInProcess
from actors.model.protocol.api import (
    CLIENT_MAGIC,
    PROTOCOL_VERSION,
    ClientHello,
    ClientMessage,
    EndRequest,
    ReadStatus,
    RequestDone,
    RequestFailed,
    ServiceHello,
    ServiceMessage,
    SubscribeChanges,
)
from actors.runtime.errors import ConnectionBroken, ResourceClosed
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.runtime.transport.connection import TransportListener, dial
from actors.testing.patience import PATIENCE_S
from actors.testing.probe import MessageProbe, settle

SETTINGS = Settings(requests_in_flight_max=3, frame_bytes_max=1 << 16, result_bytes_max=1 << 15)


class World:
    def __init__(self, system: ActorSystem, listener: TransportListener) -> None:
        self.system = system
        self.listener = listener
        self.controller = MessageProbe.start(system, "controller")
        self.server = system.spawn(
            lambda: ApiServer(listener, self.controller.address, SETTINGS, OpenSessions(lambda: 0)),
            "sessions",
        )

    async def connect(self) -> MemoryConnection[Any, Any]:
        link: MemoryConnection[Any, Any] = await self.server.ask(ConnectInProcess)
        await link.send(ClientHello(PROTOCOL_VERSION))
        assert isinstance(await link.receive(), ServiceHello)
        return link

    def sessions(self) -> list[str]:
        return [path for path, _ in self.system.describe() if "session-" in path]


@asynccontextmanager
async def started() -> AsyncIterator[World]:
    with anyio.fail_after(200):
        listener = await TransportListener.bind(
            "127.0.0.1:0", ServiceMessage, ClientMessage, SETTINGS, CLIENT_MAGIC
        )
        async with ActorSystem() as system:
            yield World(system, listener)


async def test_requests_reach_the_controller_and_answers_return_in_any_order() -> None:
    async with started() as world:
        link = await world.connect()
        await link.send(ReadStatus(1))
        await link.send(ReadStatus(2))
        first = await world.controller.expect(SubmitRequest)
        second = await world.controller.expect(SubmitRequest)
        second.session.reply(RequestDone(2, "b"))
        first.session.reply(RequestDone(1, "a"))
        assert [await link.receive(), await link.receive()] == [
            RequestDone(2, "b"),
            RequestDone(1, "a"),
        ]


async def test_busy_beyond_the_limit_but_unsubscribe_passes() -> None:
    async with started() as world:
        link = await world.connect()
        for number in range(1, 5):
            await link.send(ReadStatus(number))
        answer = await link.receive()
        assert (answer.request, answer.code) == (4, "ResourceBusy")
        await link.send(EndRequest(5, 1))
        submits = [await world.controller.expect(SubmitRequest) for _ in range(4)]
        assert submits[-1].request == EndRequest(5, 1)
        submits[0].session.reply(RequestDone(1))
        submits[0].session.reply(RequestDone(5))
        assert {(await link.receive()).request, (await link.receive()).request} == {1, 5}
        await link.send(ReadStatus(6))
        assert (await world.controller.expect(SubmitRequest)).request == ReadStatus(6)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (ReadStatus(1), "RemoteProtocolError"),
        (ClientHello(PROTOCOL_VERSION + 1), "IncompatibleVersion"),
    ],
)
async def test_a_wrong_beginning_is_told_and_closed(message: Any, code: str) -> None:
    async with started() as world:
        link: MemoryConnection[Any, Any] = await world.server.ask(ConnectInProcess)
        await link.send(message)
        answer = await link.receive()
        assert (answer.request, answer.code) == (0, code)
        with pytest.raises(ConnectionBroken):
            await link.receive()


async def test_a_request_number_in_use_breaks_the_protocol() -> None:
    async with started() as world:
        link = await world.connect()
        await link.send(ReadStatus(1))
        await link.send(ReadStatus(1))
        answer = await link.receive()
        assert (answer.request, "number 1: it is in use" in answer.text) == (0, True)


async def test_changes_are_counted_as_delivered() -> None:
    async with started() as world:
        link = await world.connect()
        await link.send(ReadStatus(1))
        submit = await world.controller.expect(SubmitRequest)
        submit.session.reply(SubscribeChanges(1, 0, 5, b"12345"))
        submit.session.reply(SubscribeChanges(1, 5, 6))
        delivered = await world.controller.expect(BytesDelivered)
        assert (delivered.session, delivered.request, delivered.bytes) == (
            submit.session.path,
            1,
            5,
        )
        assert [(await link.receive()).upper, (await link.receive()).upper] == [5, 6]


async def test_a_closed_connection_ends_its_session() -> None:
    async with started() as world:
        link = await world.connect()
        await link.send(ReadStatus(1))
        submit = await world.controller.expect(SubmitRequest)
        ended = anyio.Event()
        world.system.watch(submit.session, world.controller.address, "ended")
        await link.aclose()
        assert await world.controller.expect(str) == "ended"
        assert world.sessions() == []
        ended.set()
        with pytest.raises(ResourceClosed):
            await link.receive()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"\xc1garbage", "MalformedFrame"),
        (msgspec.msgpack.encode({"type": "DropEverything", "request": 1}), "UnknownCommand"),
        (msgspec.msgpack.encode({"type": "Status", "request": "x"}), "MalformedFrame"),
        (b"", "FrameTooLarge"),
    ],
)
async def test_bad_bytes_end_their_connection_alone(body: bytes, code: str) -> None:
    async with started() as world:
        good = await world.connect()
        where = world.listener.address
        bad = await dial(where, ClientMessage, ServiceMessage, SETTINGS, CLIENT_MAGIC)
        await bad.send(ClientHello(PROTOCOL_VERSION))
        assert isinstance(await bad.receive(), ServiceHello)
        length = len(body) if body else 1 << 30
        bad._stream.write(struct.pack(">I", length) + body)
        answer = await bad.receive()
        assert isinstance(answer, RequestFailed)
        assert (answer.request, answer.code) == (0, code)
        with pytest.raises(ConnectionBroken):
            await bad.receive()
        await bad.aclose()
        await good.send(ReadStatus(1))
        assert (await world.controller.expect(SubmitRequest)).request == ReadStatus(1)


async def test_an_answer_that_no_frame_holds_is_told() -> None:
    async with started() as world:
        where = world.listener.address
        link = await dial(where, ClientMessage, ServiceMessage, SETTINGS, CLIENT_MAGIC)
        await link.send(ClientHello(PROTOCOL_VERSION))
        await link.receive()
        await link.send(ReadStatus(1))
        submit = await world.controller.expect(SubmitRequest)
        submit.session.reply(RequestDone(1, "x" * (1 << 17)))
        answer = await link.receive()
        assert (answer.request, answer.code) == (1, "InvalidUsage")
        await link.aclose()


async def test_changes_that_no_frame_holds_end_their_request_alone() -> None:
    """The controller hears of it: else it would wait for their delivery for ever."""
    async with started() as world:
        where = world.listener.address
        link = await dial(where, ClientMessage, ServiceMessage, SETTINGS, CLIENT_MAGIC)
        await link.send(ClientHello(PROTOCOL_VERSION))
        await link.receive()
        await link.send(ReadStatus(1))
        submit = await world.controller.expect(SubmitRequest)
        submit.session.reply(SubscribeChanges(1, 0, 5, b"x" * (1 << 17)))
        submit.session.reply(SubscribeChanges(1, 5, 6))
        ended = await world.controller.expect(SubmitRequest)
        assert isinstance(ended.request, EndRequest)
        assert ended.request.target == 1
        submit.session.reply(SubscribeChanges(1, 6, 7))
        submit.session.reply(RequestDone(ended.request.request))
        # Nothing behind the gap comes.
        seen = await link.receive()
        assert (seen.request, seen.code) == (1, "InvalidUsage")
        # Its number is free, and nothing counts as waiting to be written.
        await link.send(ReadStatus(1))
        again = await world.controller.expect(SubmitRequest)
        again.session.reply(RequestDone(1, "after"))
        assert await link.receive() == RequestDone(1, "after")
        texts = [text for path, text in world.system.describe() if "session-" in path]
        assert all("(0 bytes) to write" in text for text in texts)
        await link.aclose()


async def test_memory_link_is_bounded_and_keeps_what_was_sent_before_the_close() -> None:
    left, right = pair(2)
    for number in range(2):
        await left.send(number)
    sent: list[int] = []

    async def third() -> None:
        await left.send(2)
        sent.append(2)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(third)
            await settle()
            assert sent == []
            assert await right.receive() == 0
        await left.aclose()
        assert [await right.receive(), await right.receive()] == [1, 2]
        with pytest.raises(ConnectionBroken):
            await right.receive()
        with pytest.raises(ConnectionBroken):
            await right.send(1)
