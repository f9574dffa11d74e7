"""What stands before the gateway's gRPC server: connections, and the room of messages."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.to_thread
import grpc
import grpc.aio
import pytest
from gateway_world import SparkStandIn, gateway_world  # type: ignore[import-not-found]
from pyspark.sql.connect.proto import base_pb2

from actors.doors.connect_gateway.front import ConnectFront
from actors.doors.connect_gateway.message_budget import MessageBudget, MessageReader
from actors.runtime.errors import ResourceBusy
from actors.runtime.settings import Settings
from actors.runtime.transport.address import NetworkAddress
from actors.testing.patience import PATIENCE_MS, PATIENCE_S
from tests.kit.hostile_peers import HostileCrowd

NARROW = 8 * 1024
TOKEN = "t" * 32
CONFIG = "/spark.connect.SparkConnectService/Config"
GREETING = b"the server speaks first"

# -- the front alone -------------------------------------------------------------------------------


class Behind:
    """A server behind a front, which greets, and keeps what it gets by connection."""

    def __init__(self, front: ConnectFront, place: NetworkAddress) -> None:
        self.front = front
        self.place = place
        self.got: dict[str, bytearray] = {}
        self.writers: dict[str, asyncio.StreamWriter] = {}
        self._clients: list[asyncio.StreamWriter] = []

    async def met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = str(writer.get_extra_info("peername"))
        self.got[name], self.writers[name] = bytearray(), writer
        writer.write(GREETING)
        with suppress(OSError):
            while data := await reader.read(65536):
                self.got[name] += data
        writer.close()

    async def client(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """A connection of a client that was greeted, and its name here."""
        before = set(self.got)
        reader, writer = await asyncio.open_connection(self.place.host, self.place.port)
        self._clients.append(writer)
        assert await reader.readexactly(len(GREETING)) == GREETING
        (name,) = set(self.got) - before
        return reader, writer, name

    async def end(self) -> None:
        """Close all clients."""
        for writer in self._clients:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def until(self, name: str, count: int) -> None:
        while len(self.got[name]) < count:
            await anyio.sleep(0.01)


@asynccontextmanager
async def behind(**fields: Any) -> AsyncIterator[Behind]:
    settings = Settings(
        **({"unproven_bytes_max": NARROW, "connect_timeout_ms": PATIENCE_MS} | fields)
    )
    front = ConnectFront(settings)
    try:
        place = await front.bind(NetworkAddress.parse("127.0.0.1:0"))
        made = Behind(front, place)
        path = front.inner_address.removeprefix("unix:")
        server = await asyncio.start_unix_server(made.met, path)
        async with server, anyio.create_task_group() as group:
            front.open()
            group.start_soon(front.serve)
            with anyio.fail_after(PATIENCE_S):
                yield made
                await made.end()
            group.cancel_scope.cancel()
    finally:
        front.close()


async def test_few_bytes_pass_before_proof_and_all_after_it() -> None:
    async with behind() as world:
        _, writer, name = await world.client()
        body = Random(1).randbytes(1 << 20)
        writer.write(body)
        await world.until(name, NARROW)
        # Another connection's bytes pass meanwhile, so that there was time for more of these.
        _, other, other_name = await world.client()
        other.write(b"x" * 100)
        await world.until(other_name, 100)
        assert len(world.got[name]) == NARROW
        host, port = writer.get_extra_info("sockname")
        assert world.front.prove(f"unix:{name}") == f"ipv4:{host}:{port}"
        await world.until(name, len(body))
        assert world.got[name] == body
        assert world.front.prove("unix:/somewhere/77") == "", "it has left"


async def test_what_the_server_says_last_arrives() -> None:
    async with behind() as world:
        reader, _, name = await world.client()
        world.front.prove(f"unix:{name}")
        last = bytes(300_000)
        world.writers[name].write(last)
        world.writers[name].close()
        assert await reader.read(-1) == last


async def test_a_client_that_does_not_read_holds_back_the_server() -> None:
    async with behind() as world:
        reader, writer, name = await world.client()
        world.front.prove(f"unix:{name}")
        transport: Any = writer.transport
        transport.pause_reading()
        size = 64 << 20
        world.writers[name].write(bytes(size))
        drained = asyncio.ensure_future(world.writers[name].drain())
        _, other, other_name = await world.client()
        other.write(b"x")
        await world.until(other_name, 1)
        left = world.writers[name].transport.get_write_buffer_size()
        # Kernels take some megabytes, and the front a few buffers.
        assert left > size // 2
        transport.resume_reading()
        for _ in range(size // 65536):
            await reader.readexactly(65536)
        await drained


async def test_silent_connections_give_way() -> None:
    async with behind(unproven_connections_max=2) as world:
        silent = [await world.client() for _ in range(5)]
        for reader, _, _ in silent[:3]:
            assert await reader.read() == b""
        world.front.prove(f"unix:{silent[3][2]}")
        assert (await world.client())[2]
        assert (await world.client())[2]
        assert await silent[4][0].read() == b""
        silent[3][1].write(b"lives")
        await world.until(silent[3][2], 5)


async def test_a_connection_without_a_call_ends_in_time() -> None:
    # expires: no call is made
    async with behind(connect_timeout_ms=100) as world:
        reader, _, _ = await world.client()
        assert await reader.read() == b""


async def test_proven_connections_are_bounded() -> None:
    async with behind(connect_connections_max=1) as world:
        _, _, first = await world.client()
        reader, _, second = await world.client()
        world.front.prove(f"unix:{first}")
        world.front.prove(f"unix:{first}")
        with pytest.raises(ResourceBusy, match="connect_connections_max"):
            world.front.prove(f"unix:{second}")
        assert not reader.at_eof()


# -- the gateway -----------------------------------------------------------------------------------


def with_tokens(folder: Path) -> dict[str, Any]:
    (folder / "tokens").write_text(TOKEN + "\n")
    (folder / "tokens").chmod(0o600)
    return {"token_file": str(folder / "tokens")}


def config(filling: int = 0) -> bytes:
    request = base_pb2.ConfigRequest(session_id="5" * 36)
    request.user_context.user_id = "someone"
    request.operation.get.keys.append("x" * filling)
    return bytes(request.SerializeToString())


@asynccontextmanager
async def channel(address: str) -> AsyncIterator[Any]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as made:
        yield made


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def test_a_token_is_looked_at_before_any_body_comes(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, **with_tokens(tmp_path)) as world:
        async with channel(world.service.connect_address) as made:
            # As another kind of call, in which no message is sent at all.
            call = made.stream_stream(CONFIG)(metadata=bearer("wrong"), timeout=PATIENCE_S)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            for filling in (0, 8 << 20):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await made.unary_unary(CONFIG)(
                        config(filling), metadata=bearer("wrong"), timeout=PATIENCE_S
                    )
                assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert world.spark.requests == []
        async with channel(world.service.connect_address) as made:
            await made.unary_unary(CONFIG)(
                config(3 << 20), metadata=bearer(TOKEN), timeout=PATIENCE_S
            )
        assert len(world.spark.requests[-1].operation.get.keys[0]) == 3 << 20


async def test_a_call_without_a_message_is_refused(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world, channel(world.service.connect_address) as made:
        call = made.stream_stream(CONFIG)(timeout=PATIENCE_S)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert "has no message" in await call.details()


async def test_clients_are_answered_beside_a_crowd(tmp_path: Path) -> None:
    settings = {**with_tokens(tmp_path), "unproven_connections_max": 8}
    async with gateway_world(tmp_path, **settings) as world, AsyncExitStack() as stack:
        crowd = HostileCrowd(world.service.connect_address, Random(1), kept_max=60)
        stack.push_async_callback(crowd.aclose)
        for _ in range(4):
            await crowd.attack(50)
            async with channel(world.service.connect_address) as made:
                told = await made.unary_unary(CONFIG)(
                    config(), metadata=bearer(TOKEN), timeout=PATIENCE_S
                )
                assert base_pb2.ConfigResponse.FromString(told).session_id == "5" * 36


async def test_a_call_that_runs_when_the_service_stops_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, asked, told = anyio.Event(), anyio.Event(), list[bytes]()
    right = SparkStandIn.ReleaseSession

    async def late(self: Any, request: Any, context: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await right(self, request, context)

    monkeypatch.setattr(SparkStandIn, "ReleaseSession", late)
    async with anyio.create_task_group() as group, AsyncExitStack() as stack:
        async with gateway_world(tmp_path) as world:
            address = world.service.connect_address
            made = await stack.enter_async_context(channel(address))

            async def call() -> None:
                request = base_pb2.ReleaseSessionRequest(session_id="5" * 36)
                method = CONFIG.replace("Config", "ReleaseSession")
                told.append(
                    await made.unary_unary(method)(request.SerializeToString(), timeout=PATIENCE_S)
                )

            async def answer_at_the_end() -> None:
                host, _, port = address.rpartition(":")
                with suppress(OSError):
                    while True:
                        _, writer = await asyncio.open_connection(host, int(port))
                        writer.close()
                        await anyio.sleep(0.01)
                go_on.set()

            group.start_soon(call)
            await asked.wait()
            group.start_soon(answer_at_the_end)
        with anyio.fail_after(PATIENCE_S):
            while not told:
                await anyio.sleep(0.01)
    assert base_pb2.ReleaseSessionResponse.FromString(told[0]).session_id == "5" * 36


async def test_a_half_open_body_of_a_stranger_reaches_nobody(tmp_path: Path) -> None:
    """A connection that begins as HTTP/2 does, and then only sends: it is not read."""
    async with gateway_world(tmp_path, **with_tokens(tmp_path)) as world:
        host, _, port = world.service.connect_address.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.setblocking(False)
            frame = struct.pack(">I", 16384)[1:] + b"\0\0\0\0\0\1" + bytes(16384)
            data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0" + frame * 2_000
            sent = 0
            with suppress(OSError):
                while sent < len(data):
                    sent += sock.send(data[sent:])
            async with channel(world.service.connect_address) as made:
                await made.unary_unary(CONFIG)(config(), metadata=bearer(TOKEN), timeout=PATIENCE_S)
            assert sent < len(data)


# -- the room of messages --------------------------------------------------------------------------


def test_the_largest_message_is_set_aside_until_one_is_there() -> None:
    budget = MessageBudget(bytes_max=24, message_bytes_max=10)
    assert [budget.reserve() for _ in range(3)] == [True, True, False]
    budget.shrink(4)
    assert budget.held_bytes == 14
    assert [budget.reserve() for _ in range(2)] == [True, False]
    budget.shrink(0)
    budget.release(4)
    assert budget.held_bytes == 10
    budget.shrink(10)
    budget.release(10)
    assert budget.held_bytes == 0


async def test_messages_wait_for_room_and_are_refused_in_the_end() -> None:
    reader = MessageReader(bytes_max=20, message_bytes_max=10, wait_ms=PATIENCE_MS)
    begun, go_on, order = anyio.Event(), anyio.Event(), list[str]()

    async def slow() -> bytes:
        begun.set()
        await go_on.wait()
        return bytes(10)

    async def hold(done: anyio.Event) -> None:
        async with reader.reading(slow):
            order.append("first")
            await done.wait()

    async def quick() -> bytes:
        order.append("second")
        return b"12"

    async with anyio.create_task_group() as group:
        done = anyio.Event()
        group.start_soon(hold, done)
        group.start_soon(hold, done)
        await begun.wait()

        async def late() -> None:
            async with reader.reading(quick) as message:
                assert message == b"12"

        group.start_soon(late)
        go_on.set()
        with anyio.fail_after(PATIENCE_S):
            while order.count("first") < 2:
                await anyio.sleep(0.01)
        assert "second" not in order, "both messages are held still"
        done.set()
    assert order == ["first", "first", "second"]
    # expires: nobody gives room back
    impatient = MessageReader(bytes_max=10, message_bytes_max=10, wait_ms=10)
    async with impatient.reading(quick), impatient_refusal(impatient):
        pass


@asynccontextmanager
async def impatient_refusal(reader: MessageReader) -> AsyncIterator[None]:
    async def never() -> bytes:
        raise AssertionError("there was no room for it")

    with pytest.raises(ResourceBusy, match="connect_bodies_bytes_max"):
        async with reader.reading(never):
            pass
    yield


async def test_a_message_that_does_not_come_gives_its_room_back() -> None:
    reader = MessageReader(bytes_max=10, message_bytes_max=10, wait_ms=PATIENCE_MS)

    async def fails() -> bytes:
        raise ConnectionResetError

    async def end() -> object:
        return grpc.aio.EOF

    for _ in range(3):
        with pytest.raises(ConnectionResetError):
            async with reader.reading(fails):
                pass
        async with reader.reading(end) as message:
            assert message is grpc.aio.EOF
