"""Unix sockets: who may connect, and which left-over files are removed."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import anyio
import msgspec
import pytest

from actors.runtime.errors import AddressInUse, ConnectionBroken
from actors.runtime.settings import Settings
from actors.runtime.transport.connection import FramedConnection, TransportListener, dial

MAGIC = b"TESTPROT"


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


async def echo(connection: FramedConnection[Ping, Ping]) -> None:
    while True:
        await connection.send(await connection.receive())


async def bound(path: Path) -> TransportListener:
    return await TransportListener.bind(f"unix:{path}", Ping, Ping, Settings(), MAGIC)


async def test_messages_pass_and_only_the_owner_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = await bound(path)
    mode = os.stat(path).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(listener.serve, echo)
            connection = await dial(str(listener.address), Ping, Ping, Settings(), MAGIC)
            for size in (0, 5_000_000):
                await connection.send(Ping(size, bytes(size)))
                assert await connection.receive() == Ping(size, bytes(size))
            await connection.aclose()
            await listener.aclose()
    assert not path.exists()


async def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()  # closing removes no file
    listener = await bound(path)
    await listener.aclose()
    assert not path.exists()


async def test_a_live_listener_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = await bound(path)
    with pytest.raises(AddressInUse, match="another process listens there"):
        await bound(path)
    os.unlink(f"{path}.lock")  # even then
    with pytest.raises(AddressInUse, match="another process listens there"):
        await bound(path)
    assert path.exists()
    await listener.aclose()


async def test_another_process_s_socket_without_a_lock_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(AddressInUse, match="another process listens there"):
            await bound(path)
        assert path.exists()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(AddressInUse, match="is not a socket"):
        await bound(path)
    assert path.read_text() == "precious"


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(ConnectionBroken, match="cannot connect to unix:"):
        await dial(f"unix:{tmp_path}/s", Ping, Ping, Settings(), MAGIC)


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AddressInUse, match="No such file"):
        await bound(tmp_path / "gone" / "s")
