"""Which connections may wait to prove themselves: the rule alone, and on sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import anyio
import pytest

from actors.runtime.errors import ResourceBusy
from actors.runtime.transport.connection_gate import AcceptedConnection, ConnectionGate
from actors.runtime.transport.unproven_connections import SPARED_MS, UnprovenConnections
from actors.testing.patience import PATIENCE_S

CASES = 200


# -- the rule --------------------------------------------------------------------------------------


def test_the_oldest_gives_way() -> None:
    unproven = UnprovenConnections(2)
    assert unproven.admit(1, 0.0) == []
    assert unproven.admit(2, 10.0) == []
    assert unproven.admit(3, 500.0) == [1]
    unproven.remove(2)
    assert unproven.admit(4, 500.0) == []
    assert [number in unproven for number in (1, 2, 3, 4)] == [False, False, True, True]
    assert unproven.oldest() == 3


def test_who_has_just_come_is_spared() -> None:
    unproven = UnprovenConnections(1)
    assert unproven.wait_ms(0.0) == 0
    unproven.admit(1, 1_000.0)
    assert unproven.wait_ms(1_000.0) == SPARED_MS
    assert unproven.wait_ms(1_000.0 + SPARED_MS / 4) == SPARED_MS * 3 / 4
    assert unproven.wait_ms(1_000.0 + SPARED_MS) == 0
    unproven.remove(1)
    assert unproven.wait_ms(1_000.0) == 0


def test_drawn_arrivals_keep_the_rule() -> None:
    for seed in range(CASES):
        rng = Random(seed)
        count_max = rng.randint(1, 5)
        unproven, came, now = UnprovenConnections(count_max), dict[int, float](), 0.0
        dropped = 0
        for number in range(40):
            now += rng.choice((0.0, rng.uniform(0, SPARED_MS), 10 * SPARED_MS))
            if came and rng.random() < 0.3:
                proven = rng.choice(list(came))
                unproven.remove(proven)
                del came[proven]
            now += unproven.wait_ms(now)
            for other in unproven.admit(number, now):
                assert came[other] == min(came.values()), "not the oldest"
                assert now - came.pop(other) >= SPARED_MS - 1e-6, "it had no time"
                dropped += 1
            came[number] = now
            assert len(unproven) == len(came) <= count_max
        assert dropped, seed


# -- the gate --------------------------------------------------------------------------------------


class Doorway:
    """A listening socket with a gate; a peer proves itself by one byte, `p`."""

    def __init__(self, unproven_max: int, proven_max: int) -> None:
        self.gate = ConnectionGate(unproven_max, proven_max, "some_max")
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.setblocking(False)
        self.accepted: list[AcceptedConnection] = []
        self.aborted: list[int] = []
        self.refused: list[ResourceBusy] = []
        self.open_at_first = 0
        """How many were open when the first was served."""
        self.lived_s: list[float] = []
        """How long each lived that was dropped."""

    async def converse(self, sock: socket.socket, accepted: AcceptedConnection) -> None:
        loop = asyncio.get_running_loop()
        self.accepted.append(accepted)
        self.open_at_first = self.open_at_first or self.gate.connections
        begun = loop.time()

        def abort() -> None:
            self.aborted.append(accepted.number)
            self.lived_s.append(loop.time() - begun)

        accepted.abort = abort
        with sock:
            while data := await loop.sock_recv(sock, 1):
                try:
                    accepted.prove()
                except ResourceBusy as error:
                    self.refused.append(error)
                    return
                await loop.sock_sendall(sock, data)

    async def peer(self, said: bytes = b"") -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, self.listening.getsockname())
        await loop.sock_sendall(sock, said)
        return sock


@asynccontextmanager
async def doorway(unproven_max: int = 2, proven_max: int = 2) -> AsyncIterator[Doorway]:
    made = Doorway(unproven_max, proven_max)
    with made.listening, anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(made.gate.accept, made.listening, group, made.converse)
            yield made
            group.cancel_scope.cancel()


async def heard(sock: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(sock, 10)


async def test_silent_peers_give_way_to_one_that_proves_itself() -> None:
    async with doorway(unproven_max=2) as door:
        silent = [await door.peer() for _ in range(7)]
        for sock in silent[:5]:
            assert await heard(sock) == b"", "the oldest are closed"
        good = await door.peer(b"p")
        assert await heard(good) == b"p"
        assert await heard(silent[5]) == b""
        assert door.aborted == [1, 2, 3, 4, 5, 6]
        for sock in (*silent, good):
            sock.close()
        while door.gate.connections:
            await anyio.sleep(0.01)


async def test_nobody_is_dropped_who_had_no_time() -> None:
    async with doorway(unproven_max=1) as door:
        silent = [await door.peer() for _ in range(4)]
        for sock in silent[:3]:
            assert await heard(sock) == b""
        # Each is served a turn of the loop after it was let in, so a bit less.
        assert min(door.lived_s) >= SPARED_MS / 1000 / 2
        assert len(door.lived_s) == 3
        for sock in silent:
            sock.close()


async def test_connections_are_served_while_others_are_accepted() -> None:
    door = Doorway(unproven_max=50, proven_max=1)
    with door.listening, anyio.fail_after(PATIENCE_S):
        waiting = [await door.peer() for _ in range(40)]
        async with anyio.create_task_group() as group:
            group.start_soon(door.gate.accept, door.listening, group, door.converse)
            while door.gate.connections < 40:
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        assert 0 < door.open_at_first < 10
        for sock in waiting:
            sock.close()


async def test_who_has_proved_itself_is_never_dropped() -> None:
    async with doorway(unproven_max=1) as door:
        good = await door.peer(b"p")
        assert await heard(good) == b"p"
        silent = [await door.peer() for _ in range(4)]
        for sock in silent[:3]:
            assert await heard(sock) == b""
        await asyncio.get_running_loop().sock_sendall(good, b"q")
        assert await heard(good) == b"q"
        assert door.gate.connections == 2
        assert not door.accepted[0].dropped
        for sock in (*silent, good):
            sock.close()


async def test_proven_ones_have_a_limit_of_their_own() -> None:
    async with doorway(unproven_max=1, proven_max=2) as door:
        good = [await door.peer(b"p") for _ in range(2)]
        for sock in good:
            assert await heard(sock) == b"p"
        assert door.gate.is_full
        late = await door.peer(b"p")
        assert await heard(late) == b""
        assert "2 clients are connected (some_max)" in str(door.refused[0])
        good.pop().close()
        while door.gate.is_full:
            await anyio.sleep(0.01)
        again = await door.peer(b"p")
        assert await heard(again) == b"p"
        for sock in (*good, late, again):
            sock.close()


async def test_who_was_dropped_proves_nothing() -> None:
    async with doorway(unproven_max=1, proven_max=1) as door:
        first = await door.peer()
        while not door.accepted:
            await anyio.sleep(0.01)
        dropped, full = door.accepted[0], list[bool]()

        def prove_late() -> None:
            dropped.prove()
            full.append(door.gate.is_full)

        dropped.abort = prove_late
        second = await door.peer()
        assert await heard(first) == b""
        assert full == [False]
        first.close()
        second.close()


async def test_without_file_descriptors_a_listener_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    right, failures = loop.sock_accept, [OSError(errno.EMFILE, "too many open files")]

    async def accept(listening: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await right(listening)

    monkeypatch.setattr(loop, "sock_accept", accept)
    async with doorway() as door:
        good = await door.peer(b"p")
        assert await heard(good) == b"p"
        assert failures == []
        good.close()


async def test_without_file_descriptors_the_oldest_unproven_gives_up_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with doorway(unproven_max=5) as door:
        silent = await door.peer()
        while not door.gate.connections:
            await anyio.sleep(0.01)
        loop = asyncio.get_running_loop()
        right, failures = loop.sock_accept, [OSError(errno.EMFILE, "too many open files")]

        async def accept(listening: socket.socket) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return await right(listening)

        monkeypatch.setattr(loop, "sock_accept", accept)
        wakes = await door.peer()
        good = await door.peer(b"p")
        assert await heard(silent) == b""
        assert await heard(good) == b"p"
        for sock in (silent, wakes, good):
            sock.close()
