"""Faults of the network between the two sides: each is found by whom it concerns, in time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from actors.runtime.errors import ConnectionBroken, PenstockError
from actors.runtime.settings import Settings
from actors.runtime.transport.connection import FramedConnection, TransportListener, dial
from tests.kit.proxy import SIDES, TcpProxy

pytestmark = pytest.mark.usefixtures("patient_loop")

MAGIC = b"TESTPROT"
IDLE_MS = 400
SETTINGS = Settings(keepalive_ms=20, idle_timeout_ms=IDLE_MS, write_timeout_ms=IDLE_MS)
LATE_S = 1.5
"""How late the timers and the proxy may be, in the time of the patient loop."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


class Peer:
    """The listener's side: echoes; keeps what ended each connection, and when."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, float]] = []
        self.end = anyio.Event()
        self.flood = 0

    async def __call__(self, connection: FramedConnection[Ping, Ping]) -> None:
        try:
            while True:
                got = await connection.receive()
                await connection.send(got)
                for _ in range(self.flood):
                    await connection.send(Ping(0, bytes(1 << 20)))
        except PenstockError as error:
            self.ended.append((str(error), anyio.current_time()))
            self.end.set()
            raise


class World:
    def __init__(self, proxy: TcpProxy, peer: Peer, connection: Any) -> None:
        self.proxy = proxy
        self.peer = peer
        self.connection = connection

    async def echoed(self, number: int, size: int = 0) -> None:
        await self.connection.send(Ping(number, bytes(size)))
        while (await self.connection.receive()).number != number:
            pass

    async def lost(self) -> tuple[str, float]:
        """Why and when the dialler's side learned that it is over."""
        with pytest.raises(ConnectionBroken) as caught:
            while True:
                await self.connection.receive()
        return str(caught.value), anyio.current_time()


@asynccontextmanager
async def world(unix: Path | None = None) -> AsyncIterator[World]:
    peer = Peer()
    place = f"unix:{unix}/target" if unix else "127.0.0.1:0"
    listener = await TransportListener.bind(
        place, Ping, Ping, SETTINGS, MAGIC, first_bytes_max=SETTINGS.frame_bytes_max
    )
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, peer)
        with anyio.fail_after(200):
            where = f"unix:{unix}/proxy" if unix else "127.0.0.1:0"
            async with TcpProxy(where, listener.address) as proxy:
                connection = await dial(proxy.address, Ping, Ping, SETTINGS, MAGIC)
                yield World(proxy, peer, connection)
                await connection.aclose()
        await listener.aclose()


async def test_without_a_fault_bytes_pass_as_they_are(tmp_path: Path) -> None:
    for unix in (None, tmp_path):
        async with world(unix) as w:
            for number, size in enumerate((0, 100_000, 3_000_000), 1):
                sent = Ping(number, Random(number).randbytes(size))
                await w.connection.send(sent)
                assert await w.connection.receive() == sent


async def test_a_cut_is_seen_by_both_at_once() -> None:
    async with world() as w:
        await w.echoed(1)
        w.proxy.cut()
        mine, _ = await w.lost()
        await w.peer.end.wait()
        for text in (mine, w.peer.ended[0][0]):
            assert "nothing for" not in text, "not by its silence"
        again = await dial(w.proxy.address, Ping, Ping, SETTINGS, MAGIC)
        await again.send(Ping(5))
        assert await again.receive() == Ping(5)
        await again.aclose()


async def test_refused_connections_are_broken_ones() -> None:
    async with world() as w:
        w.proxy.refuse()
        with pytest.raises(ConnectionBroken):
            await dial(w.proxy.address, Ping, Ping, SETTINGS, MAGIC)
        w.proxy.heal()
        again = await dial(w.proxy.address, Ping, Ping, SETTINGS, MAGIC)
        await again.aclose()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_network_that_vanishes_is_found_by_both_within_the_idle_limit(busy: bool) -> None:
    async with world() as w, anyio.create_task_group() as group:
        await w.echoed(1)

        async def talk() -> None:
            with suppress(ConnectionBroken):
                while True:
                    await w.connection.send(Ping(2, bytes(1 << 18)))

        if busy:
            group.start_soon(talk)
        w.proxy.vanish()
        began = anyio.current_time()
        mine = await w.lost()
        await w.peer.end.wait()
        for text, when in (mine, w.peer.ended[0]):
            assert "nothing for 400 ms" in text
            assert when - began < IDLE_MS / 1000 + LATE_S
        w.proxy.cut()


async def test_what_one_side_sends_is_read_no_more() -> None:
    """Found by the other side, which hears nothing, and told to the first by the close."""
    for side in SIDES:
        async with world() as w:
            await w.echoed(1)
            w.proxy.stop_reading(side)
            began = anyio.current_time()
            if side == "client":
                await w.peer.end.wait()
                text, when = w.peer.ended[0]
            else:
                text, when = await w.lost()
            assert "sent nothing for 400 ms" in text
            assert when - began < IDLE_MS / 1000 + LATE_S
            w.proxy.heal()  # the farewell passes
            if side == "client":
                await w.lost()
            else:
                await w.connection.aclose()
                await w.peer.end.wait()


async def test_a_side_that_reads_nothing_is_found_by_the_one_that_writes() -> None:
    """Its own keepalives go on: only the bytes it does not take tell."""
    async with world() as w:
        w.peer.flood = 40
        await w.connection.send(Ping(1))
        began = anyio.current_time()
        w.proxy.stop_reading("target")
        await w.peer.end.wait()
        text, when = w.peer.ended[0]
        assert "waiting bytes for 400 ms" in text
        assert when - began < IDLE_MS / 1000 + LATE_S
        w.proxy.cut()


@pytest.mark.parametrize("side", ["client", "target"])
async def test_a_half_closed_connection_ends_for_both(side: Any) -> None:
    async with world() as w:
        await w.echoed(1)
        began = anyio.current_time()
        w.proxy.half_close(side)
        if side == "client":
            await w.peer.end.wait()
            text, _ = w.peer.ended[0]
            assert "closed the connection" in text
            _, when = await w.lost()
        else:
            text, when = await w.lost()
            assert "closed the connection" in text
            await w.connection.aclose()
            await w.peer.end.wait()
        assert when - began < IDLE_MS / 1000 + LATE_S


@pytest.mark.parametrize(
    "fault",
    [lambda p: p.delay(IDLE_MS / 4), lambda p: p.throttle(4_000_000)],
    ids=["delay", "slow"],
)
async def test_a_slow_network_is_borne(fault: Callable[[TcpProxy], None]) -> None:
    async with world() as w:
        fault(w.proxy)
        for number, size in enumerate((10, 200_000, 1_000_000), 1):
            await w.echoed(number, size)
        assert w.peer.ended == []


async def test_a_delay_that_changes_keeps_the_order() -> None:
    async with world() as w:

        async def send() -> None:
            for number in range(1, 100):
                w.proxy.delay(0 if number % 7 else 30)
                await w.connection.send(Ping(number))
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            for number in range(1, 100):
                assert (await w.connection.receive()).number == number
