"""The committed log, read from whichever of several acceptors has it: real ports, real disks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from wal_nodes import (  # type: ignore[import-not-found]
    FAST,
    TENANT,
    TIMELINE,
    Node,
    append,
    nodes,
)

from actors.runtime.errors import ConnectionBroken
from actors.runtime.kernel import SystemClock
from actors.testing.patience import PATIENCE_MS
from actors.wal.dialling import AcceptorAddress, AcceptorConnection, dial
from actors.wal.following import AllRemoved, WalFollower, choose_furthest
from actors.wal.framing import START_LSN, RecordDecoder
from actors.wal.lsn import SEGMENT_BYTES
from actors.wal.proposer import ProposerConfig
from actors.wal.proposing import propose
from actors.wal.pushing import push

pytestmark = pytest.mark.anyio

LINE_BYTES = 700


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def lines(first: int, stop: int) -> list[bytes]:
    rows = ({"id": number, "text": "x" * LINE_BYTES} for number in range(first, stop))
    return [json.dumps({"table": "t", "row": row}).encode() for row in rows]


async def connect(address: AcceptorAddress) -> AcceptorConnection:
    return await dial(address, TENANT, TIMELINE, timeout_ms=PATIENCE_MS)


class Reading:
    """A follower, and the records that it brought."""

    def __init__(self, those: list[Any], lsn: int = START_LSN, **more: int) -> None:
        times = {"silence_ms": 30_000, "look_ms": 3_600_000} | more
        addresses = [getattr(each, "address", each) for each in those]
        self.follower = WalFollower(addresses, lsn, connect, SystemClock(), **times)
        self.decoder = RecordDecoder(lsn)
        self.ids: list[int] = []

    async def until(self, count: int) -> None:
        while len(self.ids) < count:
            await self.take()

    async def take(self) -> bytes:
        wal = await self.follower.next()
        self.ids += [json.loads(each.payload)["row"]["id"] for each in self.decoder.feed(wal)]
        assert self.follower.next_lsn == self.decoder.fed_lsn
        assert self.follower.known_lsn >= self.follower.next_lsn
        return bytes(wal)


@asynccontextmanager
async def reading(those: list[Any], lsn: int = START_LSN, **more: int) -> AsyncIterator[Reading]:
    made = Reading(those, lsn, **more)
    try:
        yield made
    finally:
        made.follower.close()


@asynccontextmanager
async def impostor(answers: bytes = b"") -> AsyncIterator[AcceptorAddress]:
    """It takes connections, says that much, and then nothing more."""
    held: list[asyncio.StreamWriter] = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        writer.write(answers)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield AcceptorAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for writer in held:
            writer.transport.abort()
        await server.wait_closed()


def test_who_is_further() -> None:
    one, two, three = (AcceptorAddress("h", port) for port in (1, 2, 3))
    assert choose_furthest({one: 5, two: 7, three: 7}, 6) == two
    assert choose_furthest({one: 5, two: 7}, 7) is None
    assert choose_furthest({}, 0) is None


async def test_where_one_goes_down_the_next_goes_on_at_the_same_byte(tmp_path: Path) -> None:
    async with nodes(tmp_path) as those:
        await append(those, lines(0, 900))
        async with reading(those) as found:
            await found.until(100)
            assert len(found.ids) < 900, "it comes in pieces"
            await those[0].down()
            await found.until(900)
            assert those[0].address in {
                at for at, seen in found.follower.seen.items() if seen.error
            }
            await those[1].down()
            await those[0].up()
            await append([those[0], those[2]], lines(900, 950))
            await found.until(950)
            assert found.ids == list(range(950))
            await those[0].down()
            await those[2].down()
            with pytest.raises(ConnectionBroken, match="cannot connect to acceptor"):
                await found.take()


async def test_only_what_is_committed_comes(tmp_path: Path) -> None:
    """One of three has on disk what the two others never got."""
    async with nodes(tmp_path) as those:
        config = ProposerConfig(TENANT, TIMELINE, START_LSN, heartbeat_ms=20)
        async with propose(config, [node.address for node in those], timing=FAST) as log:
            committed = (await push(log, lines(0, 10), [])).lsn
            kept = those[0].timeline
            await kept.ends.until(lambda ends: ends.commit_lsn == committed)
            await those[1].down()
            await those[2].down()
            async with anyio.create_task_group() as group:
                group.start_soon(push, log, lines(10, 20), [])
                await kept.ends.until(lambda ends: ends.flush_lsn > committed)
                async with reading(those[:1]) as found:
                    await found.until(10)
                    assert await found.take() == b"", "it says only that it is there"
                    assert found.follower.next_lsn == found.follower.known_lsn == committed
                group.cancel_scope.cancel()


async def test_one_that_is_behind_is_read_when_nobody_is_further(tmp_path: Path) -> None:
    async with nodes(tmp_path) as those:
        lsn = await append(those, lines(0, 10))
        await those[2].down()
        more = await append(those[:2], lines(10, 20))
        await those[2].up()
        behind = those[2].timeline.acceptor.commit_lsn
        assert behind <= lsn < more
        async with reading(those[2:], more) as found:
            assert await found.take() == b""
            assert found.follower.seen[those[2].address].commit_lsn == behind
            assert found.follower.known_lsn == more
        async with reading([those[2], those[0]], more) as found:
            assert await found.take() == b""
            assert found.follower.seen[those[0].address].commit_lsn == more
            await append(those[:2], lines(20, 30))
            await found.until(10)
            assert found.ids == list(range(20, 30))


async def test_a_reader_leaves_who_learns_of_nothing_new(tmp_path: Path) -> None:
    """The acceptor that is read is up, and its proposer cannot reach it."""
    async with nodes(tmp_path) as those:
        await append(those, lines(0, 10))
        async with reading(those, look_ms=10) as found:
            await found.until(10)
            assert found.follower.seen.keys() >= {those[0].address}
            await append(those[1:], lines(10, 20))
            await found.until(20)
            assert found.ids == list(range(20))


async def test_one_that_says_nothing_is_left_for_another(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1) as those, impostor() as silent:
        await append(those, lines(0, 10))
        # expires: the first says nothing
        async with reading([silent, *those], silence_ms=300) as found:
            while len(found.ids) < 10:
                try:
                    await found.take()
                except ConnectionBroken:  # where this machine is slower than that
                    continue
            assert "sent nothing for 0.3 s" in found.follower.seen[silent].error


async def test_one_that_is_no_acceptor_is_named(tmp_path: Path) -> None:
    async with (
        impostor(b"HTTP/1.1 400\r\n\r\n") as other,
        nodes(tmp_path, 1) as those,
        reading([other, *those]) as found,
    ):
        with pytest.raises(
            ConnectionBroken, match=r"is it an acceptor\?; acceptor .* has no such timeline"
        ):
            await found.take()
        await found.follower.look()
        assert found.follower.seen[those[0].address].is_absent
        assert not found.follower.seen[other].is_absent


async def test_what_all_have_removed(tmp_path: Path) -> None:
    """The log begins in a later segment: the first is as if it had been removed."""
    begin = 3 * SEGMENT_BYTES + 40
    async with nodes(tmp_path) as those:
        end = await append(those, lines(0, 10), begin)
        async with reading(those) as found:
            with pytest.raises(
                AllRemoved, match="no acceptor keeps the log from 0/1000028 any more"
            ):
                await found.take()
        # One that is behind never gets it, either; one that is down may have it.
        fresh = Node(tmp_path / "4", 4)
        await fresh.up()
        try:
            await fresh.make()
            async with reading([fresh, *those]) as found:
                with pytest.raises(AllRemoved, match="is committed only up to 0/0"):
                    await found.take()
            await those[0].down()
            async with reading(those) as found:
                with pytest.raises(
                    ConnectionBroken, match="cannot read the log from 0/1000028: cannot connect"
                ) as failed:
                    await found.take()
                assert not isinstance(failed.value, AllRemoved)
        finally:
            await fresh.down()
        async with reading(those, begin) as found:
            await found.until(10)
            assert found.follower.next_lsn == end


async def test_acceptors_hear_what_was_consumed_and_no_more(tmp_path: Path) -> None:
    async with nodes(tmp_path) as those:
        first = await append(those, lines(0, 10))
        lsn = await append(those, lines(10, 20))

        def told() -> list[int]:
            return [node.timeline.acceptor.state.remote_consistent_lsn for node in those]

        begin = told()
        async with reading(those) as found:
            await found.until(20)
            await found.follower.look()
            assert told() == begin, "nothing is durable here yet"
            found.follower.report_consumed(first)
            found.follower.report_consumed(START_LSN)
            await found.follower.look()
            assert told() == [first] * 3
            await those[1].down()
            found.follower.report_consumed(lsn)
            await found.follower.look()
            assert [told()[0], told()[2]] == [lsn] * 2
            await those[1].up()
            await found.follower.look()
            assert told() == [lsn] * 3
            assert await found.take() == b"", "the connection that is read goes on"
