"""A loop whose time stops while the loop is late: pauses pass no deadline, waiting does."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest

from actors.testing.patience import PATIENCE_S
from actors.testing.patient_loop import TURN_S, PatientLoop

pytestmark = pytest.mark.usefixtures("patient_loop")

PAUSE_S = 0.3


def pause() -> None:
    """Hold the whole process up."""
    end = time.monotonic() + PAUSE_S
    while time.monotonic() < end:
        pass


async def test_the_fixture_gives_this_loop() -> None:
    assert isinstance(asyncio.get_running_loop(), PatientLoop)


async def test_a_pause_of_the_process_passes_no_deadline() -> None:
    answered = anyio.Event()

    async def peer() -> None:
        pause()
        await anyio.lowlevel.checkpoint()
        pause()
        answered.set()

    began, really = anyio.current_time(), time.monotonic()
    async with anyio.create_task_group() as group:
        group.start_soon(peer)
        with anyio.fail_after(PAUSE_S):
            await answered.wait()
    assert time.monotonic() - really >= 2 * PAUSE_S
    assert anyio.current_time() - began <= 10 * TURN_S


async def test_bytes_that_came_during_a_pause_are_read_before_a_deadline_passes() -> None:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readexactly(4))
        pause()
        writer.write(b"pong")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"ping")
    with anyio.fail_after(PAUSE_S):
        assert await reader.readexactly(4) == b"pong"
    assert heard == [b"ping"]
    writer.close()
    server.close()
    await server.wait_closed()


async def test_time_goes_on_while_it_waits_and_while_it_is_busy() -> None:
    began = anyio.current_time()
    await anyio.sleep(0.05)
    assert anyio.current_time() - began >= 0.05
    with anyio.move_on_after(0.05) as scope:  # expires: the callbacks never end
        with anyio.fail_after(PATIENCE_S):
            while True:
                await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
