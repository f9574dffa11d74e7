"""Connections over real sockets: every kind of bad peer gets one named error."""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import uvloop

from actors.runtime.errors import (
    AddressInUse,
    ConnectionBroken,
    FrameTooLarge,
    IncompatibleVersion,
    LocalProtocolError,
    MalformedFrame,
    PenstockError,
    ResourceBusy,
    ResourceClosed,
    UnknownCommand,
    WrongService,
)
from actors.runtime.frames import HEADER
from actors.runtime.settings import Settings
from actors.runtime.transport.connection import FramedConnection, TransportListener, dial
from actors.runtime.transport.handshake import HandshakeOpening
from actors.testing.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("patient_loop")

MAGIC = b"TESTPROT"
OPENED = HandshakeOpening(MAGIC).encode() + b"\x00\x00"
"""What a dialler says before its first frame: no identity, no token."""
ANSWERED = HandshakeOpening(MAGIC).encode() + b"\x00"


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
    handler: Handler,
    settings: Settings | None = None,
    kinds: Any = Ping,
    first_bytes_max: int | None = None,
) -> AsyncIterator[TransportListener]:
    settings = settings or Settings()
    listener = await TransportListener.bind(
        "127.0.0.1:0",
        Ping,
        kinds,
        settings,
        MAGIC,
        first_bytes_max=first_bytes_max or settings.frame_bytes_max,
    )
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, handler)
        with anyio.fail_after(200):
            yield listener
        await listener.aclose()


async def connect(
    listener: TransportListener, settings: Settings | None = None, version: int = 1
) -> Any:
    return await dial(listener.address, Ping | Other, Ping, settings or Settings(), MAGIC, version)


async def raw(listener: TransportListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
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
        with pytest.raises(ResourceClosed):
            await connection.send(Ping(1))
        with pytest.raises(ResourceClosed):
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
        writer.write(OPENED)
        await reader.readexactly(len(ANSWERED))
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
        writer.write(OPENED + HEADER.pack(Settings().frame_bytes_max + 1))
        await reader.readexactly(len(ANSWERED))
        assert await reader.read() == b""  # closed
        assert [type(e) for e in seen.errors] == [FrameTooLarge]
        await good.send(Ping(1))
        assert await good.receive() == Ping(1)  # the others go on
        await good.aclose()
        await shut(writer)


async def test_own_message_over_the_limit_is_our_error_and_the_connection_goes_on() -> None:
    settings = Settings(frame_bytes_max=8192, result_bytes_max=4096, inline_bytes_max=4096)
    async with listening(echo, settings) as listener:
        connection = await connect(listener, settings)
        with pytest.raises(LocalProtocolError):
            await connection.send(Ping(1, bytes(9000)))
        await connection.send(Ping(2))
        assert await connection.receive() == Ping(2)
        await connection.aclose()


@pytest.mark.parametrize("body", [b"\xc1garbage", b"\x93\x01\x02\x03", b"\x81"])
async def test_garbage_in_a_frame(body: bytes) -> None:
    seen = Seen()
    async with listening(seen) as listener:
        reader, writer = await raw(listener)
        writer.write(OPENED + HEADER.pack(len(body)) + body)
        await reader.readexactly(len(ANSWERED))
        assert await reader.read() == b""
        assert [type(e) for e in seen.errors] == [MalformedFrame]
        await shut(writer)


async def test_unknown_command() -> None:
    seen = Seen()
    # The listener knows only two kinds, so that messages carry a tag it can fail to know.
    async with listening(seen, kinds=Ping | Unheard) as listener:
        connection = await connect(listener)
        await connection.send(Other(3))
        with pytest.raises(ConnectionBroken):
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
        await reader.readexactly(len(ANSWERED) - 1)
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
        await dial(f"127.0.0.1:{port}", Ping, Ping, Settings(), MAGIC)
    server.close()
    async with listening(echo) as listener:
        with pytest.raises(IncompatibleVersion):
            await connect(listener, version=2)


async def test_nobody_listens() -> None:
    listener = await TransportListener.bind("127.0.0.1:0", Ping, Ping, Settings(), MAGIC)
    port = listener.port
    await listener.aclose()
    with pytest.raises(ConnectionBroken, match=f"127.0.0.1:{port}"):
        await dial(f"127.0.0.1:{port}", Ping, Ping, Settings(), MAGIC)


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_listener_that_was_closed_before_it_served_ends_at_once(runner: Any) -> None:
    async def body() -> None:
        listener = await TransportListener.bind("127.0.0.1:0", Ping, Ping, Settings(), MAGIC)
        await listener.aclose()
        with anyio.move_on_after(PATIENCE_S) as scope:
            await listener.serve(echo)
        assert not scope.cancelled_caught

    runner(body())


async def test_port_in_use() -> None:
    async with listening(echo) as listener:
        with pytest.raises(AddressInUse, match=str(listener.port)):
            await TransportListener.bind(listener.address, Ping, Ping, Settings(), MAGIC)


async def test_peer_that_closes_in_the_middle_of_a_frame() -> None:
    seen = Seen()
    async with listening(seen) as listener:
        _, writer = await raw(listener)
        writer.write(OPENED + HEADER.pack(100) + b"abc")
        await shut(writer)
        await seen.ended.wait()
        assert [type(e) for e in seen.errors] == [ConnectionBroken]


async def test_half_open_peer_is_noticed_and_keepalives_hold_a_quiet_one() -> None:
    settings = Settings(keepalive_ms=20, idle_timeout_ms=200)
    seen = Seen()
    async with listening(seen, settings) as listener:
        reader, writer = await raw(listener)  # opens, then is silent for ever
        writer.write(OPENED)
        quiet = await connect(listener, settings)
        await seen.ended.wait()
        assert [type(e) for e in seen.errors] == [ConnectionBroken]
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
        with pytest.raises(ResourceBusy, match="connections_max"):
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
        with pytest.raises(ConnectionBroken):
            await connection.receive()
        await connection.aclose()


QUICK = Settings(keepalive_ms=10, idle_timeout_ms=400, write_timeout_ms=400, frame_timeout_ms=200)


async def opened(listener: TransportListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw peer that has introduced itself."""
    reader, writer = await raw(listener)
    writer.write(OPENED)
    assert await reader.readexactly(len(ANSWERED)) == ANSWERED
    return reader, writer


async def feed(writer: asyncio.StreamWriter, data: bytes, until: anyio.Event) -> None:
    """Sends those bytes again and again."""
    while not until.is_set():
        writer.write(data)
        await anyio.sleep(0.01)


async def test_half_a_frame_holds_nobody_for_ever_however_much_comes_after_it() -> None:
    seen = Seen()
    async with listening(seen, QUICK) as listener, anyio.create_task_group() as group:
        _, writer = await opened(listener)
        writer.write(HEADER.pack(1 << 20))
        group.start_soon(feed, writer, b"x", seen.ended)  # never silent, never done
        await seen.ended.wait()
        assert [type(e) for e in seen.errors] == [ConnectionBroken]
        assert "not the rest within 200 ms" in str(seen.errors[0])
        await shut(writer)


async def test_waiting_for_a_frame_that_has_not_begun_takes_as_long_as_it_likes() -> None:
    async with listening(echo, QUICK) as listener:
        connection = await connect(listener, QUICK)
        with anyio.move_on_after(QUICK.frame_timeout_ms * 3 / 1000):
            await connection.receive()  # keepalives alone
        await connection.send(Ping(1))
        assert await connection.receive() == Ping(1)
        await connection.aclose()


async def test_a_peer_that_reads_nothing_but_lives_is_found_within_the_idle_limit() -> None:
    ended = anyio.Event()
    found: list[tuple[str, float]] = []

    async def flood(connection: FramedConnection[Any, Any]) -> None:
        last = asyncio.get_running_loop().time()
        try:
            while True:
                await connection.send(Ping(1, bytes(1 << 18)))
                last = asyncio.get_running_loop().time()
        except ConnectionBroken as error:
            found.append((str(error), asyncio.get_running_loop().time() - last))
            ended.set()

    async with listening(flood, QUICK) as listener, anyio.create_task_group() as group:
        reader, writer = await opened(listener)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        group.start_soon(feed, writer, HEADER.pack(0), ended)  # its keepalives go on
        await ended.wait()
        ((text, after_s),) = found
        assert "waiting bytes for 400 ms" in text
        assert after_s < 0.8
        await shut(writer)
        assert reader is not None


async def test_who_is_canceled_while_it_closes_holds_no_place() -> None:
    alone = msgspec.structs.replace(QUICK, connections_max=1)
    async with listening(echo, alone) as listener:
        connection = await connect(listener, QUICK)
        await connection.send(Ping(1))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await connection.aclose()
        while listener.connections:
            await anyio.sleep(0.01)
        again = await connect(listener, QUICK)
        await again.send(Ping(2))
        assert await again.receive() == Ping(2)
        await again.aclose()


async def test_a_slow_reader_that_goes_on_is_not_cut_off() -> None:
    async def flood(connection: FramedConnection[Any, Any]) -> None:
        for number in range(6):
            await connection.send(Ping(number, bytes(1 << 20)))
        await anyio.sleep_forever()

    async with listening(flood, QUICK) as listener:
        connection = await connect(listener, QUICK)
        for number in range(6):
            await anyio.sleep(QUICK.write_timeout_ms / 2000)
            assert (await connection.receive()).number == number
        await connection.aclose()


async def test_who_did_not_read_is_told_so_when_it_reads_again() -> None:
    ended = anyio.Event()

    async def flood(connection: FramedConnection[Any, Any]) -> None:
        with suppress(ConnectionBroken):
            while True:
                await connection.send(Ping(1, bytes(1 << 18)))
        ended.set()

    async with listening(flood, QUICK) as listener:
        connection = await connect(listener, QUICK)
        await connection.receive()
        await ended.wait()
        with pytest.raises(ConnectionBroken, match="this side had read nothing for"):
            while True:
                await connection.receive()
        await connection.aclose()


async def test_a_cancelled_sender_leaves_no_half_frame() -> None:
    received: list[Ping] = []
    go, done = anyio.Event(), anyio.Event()

    async def late(connection: FramedConnection[Any, Any]) -> None:
        await go.wait()
        received.extend([await connection.receive(), await connection.receive()])
        done.set()

    async with listening(late) as listener:
        connection = await connect(listener)
        with anyio.move_on_after(0.05) as scope:
            await connection.send(Ping(1, b"x" * (30 << 20)))
        assert scope.cancelled_caught
        go.set()
        await connection.send(Ping(2))
        await done.wait()
        assert received == [Ping(1, b"x" * (30 << 20)), Ping(2)]
        await connection.aclose()


async def test_a_service_of_another_name_is_refused_by_both() -> None:
    seen: list[str] = []

    async def handler(connection: FramedConnection[Any, Any]) -> None:
        seen.append(connection.peer)

    listener = await TransportListener.bind(
        "127.0.0.1:0", Ping, Ping, Settings(), MAGIC, identity="blue"
    )
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, handler)
        for mine in ("blue", ""):
            connection = await dial(listener.address, Ping, Ping, Settings(), MAGIC, identity=mine)
            await connection.aclose()
        with pytest.raises(WrongService, match=r"'blue'.*'green'"):
            await dial(listener.address, Ping, Ping, Settings(), MAGIC, identity="green")
        reader, writer = await raw(listener)  # one that does not look itself
        writer.write(HandshakeOpening(MAGIC, 1, "green").encode() + b"\x00\x00")
        await reader.readexactly(len(HandshakeOpening(MAGIC, 1, "blue").encode()))
        assert await reader.read() == b""
        assert len(seen) == 2
        await shut(writer)
        await listener.aclose()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.long
async def test_many_connections_come_and_go_and_nothing_stays() -> None:
    """Ten thousand of three kinds: whole ones, ones that vanish, and ones that say nonsense."""
    settings = Settings(connections_max=200)
    count, tasks = 10_000, len(asyncio.all_tasks())
    async with listening(echo, settings) as listener:
        limit = anyio.CapacityLimiter(50)

        async def one(number: int) -> None:
            async with limit:
                reader, writer = await raw(listener)
                if number % 3 == 0:
                    writer.write(OPENED + HEADER.pack(3) + b"ab")
                elif number % 3 == 1:
                    writer.write(b"nonsense, and more of it than an opening has")
                else:
                    await reader.readexactly(1)
                writer.transport.abort()

        async def some(first: int, last: int) -> tuple[int, int]:
            async with anyio.create_task_group() as group:
                for number in range(first, last):
                    group.start_soon(one, number)
            # One that is counted no more may still be closing; two tasks are the listener's own.
            while listener.connections or len(asyncio.all_tasks()) > tasks + 2:
                await anyio.sleep(0.01)
            gc.collect()
            return resident_bytes(), len(gc.get_objects())

        rounds = [await some(0, count // 5) for _ in range(5)]
        # What leaks does so in every round; what the rest of the process does, in some.
        grown = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(rounds[1:])]
        assert min(objects for _, objects in grown) < 100, grown
        assert min(size for size, _ in grown) < 1 << 20, grown
        connection = await connect(listener)
        await connection.send(Ping(1))
        assert await connection.receive() == Ping(1)
        await connection.aclose()
    assert len(asyncio.all_tasks()) <= tasks
