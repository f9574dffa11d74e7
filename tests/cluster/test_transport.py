"""Connections over real sockets: every kind of bad peer gets one named error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import msgspec
import pytest

from actors.cluster.transport import OPENING, FramedConnection, Listener, dial
from actors.errors import (
    AddressInUse,
    Broken,
    Busy,
    Closed,
    FrameTooLarge,
    IncompatibleVersion,
    LocalProtocolError,
    MalformedFrame,
    PenstockError,
    UnknownCommand,
)
from actors.protocol.frames import HEADER
from actors.settings import Settings

MAGIC = b"TESTPROT"


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


class Other(msgspec.Struct, frozen=True, tag=True):
    number: int


Handler = Callable[[FramedConnection[Any, Any]], Awaitable[None]]


async def echo(connection: FramedConnection[Any, Any]) -> None:
    while True:
        await connection.send(await connection.receive())


class Seen:
    """A handler that echoes and keeps the error that ended each connection."""

    def __init__(self) -> None:
        self.errors: list[PenstockError] = []
        self.ended = anyio.Event()

    async def __call__(self, connection: FramedConnection[Any, Any]) -> None:
        try:
            await echo(connection)
        except PenstockError as error:
            self.errors.append(error)
            self.ended.set()
            raise


@asynccontextmanager
async def listening(
    handler: Handler, settings: Settings | None = None, kinds: Any = Ping
) -> AsyncIterator[Listener]:
    listener = await Listener.bind("", 0, Ping, kinds, settings or Settings(), MAGIC)
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, handler)
        with anyio.fail_after(20):
            yield listener
        await listener.aclose()


async def connect(listener: Listener, settings: Settings | None = None, version: int = 1) -> Any:
    return await dial(
        "127.0.0.1", listener.port, Ping | Other, Ping, settings or Settings(), MAGIC, version
    )


async def raw(listener: Listener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", listener.port)


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def test_messages_go_both_ways_in_order() -> None:
    async with listening(echo) as listener:
        connection = await connect(listener)
        sent = [Ping(n, bytes(n * 1000)) for n in range(50)]

        async def send() -> None:
            for message in sent:
                await connection.send(message)

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            assert [await connection.receive() for _ in sent] == sent
        await connection.aclose()
        await connection.aclose()
        with pytest.raises(Closed):
            await connection.send(Ping(1))
        with pytest.raises(Closed):
            await connection.receive()


async def test_several_writers_do_not_mix_frames() -> None:
    async with listening(echo) as listener:
        connection = await connect(listener)

        async def send(number: int) -> None:
            for _ in range(10):
                await connection.send(Ping(number, bytes([number]) * 50_000))

        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(send, number)
            for _ in range(40):
                message = await connection.receive()
                assert message.data == bytes([message.number]) * 50_000
        await connection.aclose()


async def test_receive_cancelled_in_the_middle_of_a_frame_loses_nothing() -> None:
    async with listening(echo) as listener:
        reader, writer = await raw(listener)
        writer.write(OPENING.pack(MAGIC, 1))
        await reader.readexactly(OPENING.size)
        body = msgspec.msgpack.encode(Ping(7))
        writer.write(HEADER.pack(len(body)) + body[:3])
        connection = await connect(listener)
        with anyio.move_on_after(0.02):
            await connection.receive()
        writer.write(body[3:])
        assert await reader.readexactly(HEADER.size + len(body)) == HEADER.pack(len(body)) + body
        await connection.send(Ping(8))
        assert await connection.receive() == Ping(8)
        await connection.aclose()
        await shut(writer)


async def test_frame_over_the_limit_is_refused_before_its_body() -> None:
    seen = Seen()
    async with listening(seen) as listener:
        good = await connect(listener)
        reader, writer = await raw(listener)
        writer.write(OPENING.pack(MAGIC, 1) + HEADER.pack(Settings().frame_bytes_max + 1))
        await reader.readexactly(OPENING.size)
        assert await reader.read() == b""  # closed
        assert [type(e) for e in seen.errors] == [FrameTooLarge]
        await good.send(Ping(1))
        assert await good.receive() == Ping(1)  # the others go on
        await good.aclose()
        await shut(writer)


async def test_own_message_over_the_limit_is_our_error_and_the_connection_goes_on() -> None:
    settings = Settings(frame_bytes_max=1000, result_bytes_max=999)
    async with listening(echo, settings) as listener:
        connection = await connect(listener, settings)
        with pytest.raises(LocalProtocolError):
            await connection.send(Ping(1, bytes(2000)))
        await connection.send(Ping(2))
        assert await connection.receive() == Ping(2)
        await connection.aclose()


@pytest.mark.parametrize("body", [b"\xc1garbage", b"\x93\x01\x02\x03", b"\x81"])
async def test_garbage_in_a_frame(body: bytes) -> None:
    seen = Seen()
    async with listening(seen) as listener:
        reader, writer = await raw(listener)
        writer.write(OPENING.pack(MAGIC, 1) + HEADER.pack(len(body)) + body)
        await reader.readexactly(OPENING.size)
        assert await reader.read() == b""
        assert [type(e) for e in seen.errors] == [MalformedFrame]
        await shut(writer)


async def test_unknown_command() -> None:
    seen = Seen()
    # The listener knows only two kinds, so that messages carry a tag it can fail to know.
    async with listening(seen, kinds=Ping | Unheard) as listener:
        connection = await connect(listener)
        await connection.send(Other(3))
        with pytest.raises(Broken):
            await connection.receive()
        assert [type(e) for e in seen.errors] == [UnknownCommand]
        await connection.aclose()


class Unheard(msgspec.Struct, frozen=True, tag=True):
    number: int


async def test_garbage_instead_of_an_opening() -> None:
    async with listening(echo) as listener:
        _, writer = await raw(listener)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        reader, _ = _, writer
        await reader.readexactly(OPENING.size)
        assert await reader.read() == b""
        await shut(writer)


async def test_dialling_a_stranger_and_another_version() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        await shut(writer)

    server = await asyncio.start_server(http, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(MalformedFrame):
        await dial("127.0.0.1", port, Ping, Ping, Settings(), MAGIC)
    server.close()
    async with listening(echo) as listener:
        with pytest.raises(IncompatibleVersion):
            await connect(listener, version=2)


async def test_nobody_listens() -> None:
    listener = await Listener.bind("", 0, Ping, Ping, Settings(), MAGIC)
    port = listener.port
    await listener.aclose()
    with pytest.raises(Broken, match=f"127.0.0.1:{port}"):
        await dial("127.0.0.1", port, Ping, Ping, Settings(), MAGIC)


async def test_port_in_use() -> None:
    async with listening(echo) as listener:
        with pytest.raises(AddressInUse, match=str(listener.port)):
            await Listener.bind("", listener.port, Ping, Ping, Settings(), MAGIC)


async def test_peer_that_closes_in_the_middle_of_a_frame() -> None:
    seen = Seen()
    async with listening(seen) as listener:
        _, writer = await raw(listener)
        writer.write(OPENING.pack(MAGIC, 1) + HEADER.pack(100) + b"abc")
        await shut(writer)
        await seen.ended.wait()
        assert [type(e) for e in seen.errors] == [Broken]


async def test_half_open_peer_is_noticed_and_keepalives_hold_a_quiet_one() -> None:
    settings = Settings(keepalive_ms=20, idle_timeout_ms=200)
    seen = Seen()
    async with listening(seen, settings) as listener:
        reader, writer = await raw(listener)  # opens, then is silent for ever
        writer.write(OPENING.pack(MAGIC, 1))
        quiet = await connect(listener, settings)
        await seen.ended.wait()
        assert [type(e) for e in seen.errors] == [Broken]
        assert "sent nothing" in str(seen.errors[0])
        await quiet.send(Ping(5))  # lived on keepalives alone
        assert await quiet.receive() == Ping(5)
        await quiet.aclose()
        await shut(writer)
        assert reader is not None


async def test_one_connection_too_many_is_told_busy() -> None:
    settings = Settings(connections_max=2)
    async with listening(echo, settings) as listener:
        first, second = await connect(listener), await connect(listener)
        for connection in (first, second):
            await connection.send(Ping(1))
            await connection.receive()
        with pytest.raises(Busy, match="connections_max"):
            await connect(listener)
        await first.send(Ping(1))
        assert await first.receive() == Ping(1)
        await first.aclose()
        await second.aclose()


async def test_end_of_the_listener_ends_its_connections() -> None:
    async with listening(echo) as listener:
        connection = await connect(listener)
        await connection.send(Ping(1))
        await connection.receive()
        await listener.aclose()
        with pytest.raises(Broken):
            await connection.receive()
        await connection.aclose()
