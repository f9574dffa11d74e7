"""An acceptor that is behind takes the log from a peer: whom it believes, and with processes."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from acceptor_house import NODE, START, House  # type: ignore[import-not-found]
from test_wal_command import started_with_page  # type: ignore[import-not-found]
from wal_wires import TENANT, TIMELINE  # type: ignore[import-not-found]

from actors.runtime.errors import MalformedFrame, WalRefused
from actors.wal.acceptor import AppendUnflushed, FlushWal
from actors.wal.dialling import AcceptorAddress, AcceptorConnection, dial
from actors.wal.framing import PG_VERSION, START_LSN, encode, framed_bytes_max
from actors.wal.lsn import lsn_text, parse_lsn
from actors.wal.messages import AppendRequest, TermEntry, VoteResponse
from actors.wal.peer_status import (
    PeerStatus,
    is_useful_donor,
    make_announcement,
    parse_status,
    peer_status,
    status_row,
    vote_request,
)
from actors.wal.proposer import ProposerConfig
from actors.wal.proposing import LeadingProposer, propose

HISTORY = (TermEntry(1, 0x1000), TermEntry(3, 0x2000))
DONOR = PeerStatus(9, 3, 0x3000, 0x2800, 0x2100, 0x2000, 0x1000, HISTORY)


def other(**changes: Any) -> PeerStatus:
    return msgspec.structs.replace(DONOR, node_id=5, **changes)


def test_whom_an_acceptor_believes() -> None:
    assert is_useful_donor(DONOR, other(flush_lsn=0x2FFF))
    assert is_useful_donor(DONOR, other(term=2, history=(TermEntry(2, 0x1000),), flush_lsn=0x9000))
    assert is_useful_donor(DONOR, other(term=0, history=(), flush_lsn=0))
    assert not is_useful_donor(DONOR, other()), "nothing to gain"
    assert not is_useful_donor(DONOR, other(term=4, flush_lsn=0x1000)), "promised to a later leader"
    voted = msgspec.structs.replace(DONOR, term=4)
    assert not is_useful_donor(voted, other(flush_lsn=0x1000)), (
        "its term's leader may not be elected"
    )
    assert not is_useful_donor(DONOR, msgspec.structs.replace(DONOR, flush_lsn=0x2000)), "itself"


def test_a_status_goes_over_the_wire() -> None:
    assert parse_status(status_row(DONOR)) == DONOR
    empty = PeerStatus(1, 0, 0, 0, 0, 0, 0, ())
    assert parse_status(status_row(empty)) == empty
    good = list(status_row(DONOR))
    for at, wrong in (
        (0, "x"), (1, "2"), (1, str(1 << 64)), (2, "5"), (2, "0/1FFF"), (7, "3@0/1 1@0/2"),
        (7, "1"), (7, None),
    ):  # fmt: skip
        cells: list[str | None] = [*good[:at], wrong, *good[at + 1 :]]
        if wrong is None:
            cells = good[:7]  # type: ignore[assignment]
        with pytest.raises(MalformedFrame, match="invalid peer status"):
            parse_status(cells)


def recovered(house: House, source: House) -> None:
    """All that the source has, in the rules' steps."""
    donor = msgspec.structs.replace(peer_status(source.acceptor), node_id=NODE + 1)
    vote = house.tell(vote_request(donor, 0))
    assert isinstance(vote, VoteResponse)
    announced = make_announcement(donor, vote)
    assert announced is not None
    assert house.tell(announced) is None
    begin = announced.start_streaming_at
    wal = bytes(source.disk.wal[begin - source.disk.start_lsn :])
    request = AppendRequest(0, donor.term, begin, begin + len(wal), 0, 0, wal)
    assert house.tell(AppendUnflushed(request)) is None
    house.tell(FlushWal())


def test_what_another_leader_left_is_cut_off() -> None:
    source, house = House(), House()
    for each in (source, house):
        each.lead(1)
        each.append(1, b"a" * 64, START + 32)
    house.lead(2)
    house.append(2, b"b" * 640)
    source.lead(3)
    source.append(3, b"c" * 64, START + 128)
    recovered(house, source)
    ours, theirs = peer_status(house.acceptor), peer_status(source.acceptor)
    assert (ours.term, ours.history, ours.flush_lsn) == (3, theirs.history, theirs.flush_lsn)
    assert house.disk.wal == source.disk.wal
    assert ours.commit_lsn == START + 32, "nobody told it of more"
    house.acceptor.record_peer(theirs.as_peer())
    assert house.acceptor.commit_lsn == START + 128
    assert not is_useful_donor(
        msgspec.structs.replace(theirs, node_id=9), peer_status(house.acceptor)
    )


def test_a_later_promise_ends_it() -> None:
    source, house = House(), House()
    source.lead(3)
    source.append(3, b"c" * 64)
    donor = msgspec.structs.replace(peer_status(source.acceptor), node_id=NODE + 1)
    house.acceptor.bump_term(7)
    vote = house.tell(vote_request(donor, 0))
    assert make_announcement(donor, vote) is None
    with pytest.raises(WalRefused, match="generation"):
        house.tell(vote_request(donor, 1))


# -- processes -------------------------------------------------------------------------------------


class Node:
    """A process, and a connection to ask it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.flags = flags

    async def up(self) -> None:
        self.process, port, self.page = await started_with_page(self.folder, *self.flags)
        self.address = AcceptorAddress("127.0.0.1", port)
        self._asking: AcceptorConnection | None = None

    async def measured(self, name: str) -> float:
        """The value of a metric without labels."""

        def lines() -> list[str]:
            with urllib.request.urlopen(self.page) as found:
                return str(found.read().decode()).splitlines()

        [line] = [each for each in await asyncio.to_thread(lines) if each.startswith(f"{name} ")]
        return float(line.split()[1])

    async def kill(self) -> None:
        if self._asking is not None:
            self._asking.abort()
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    async def ends(self) -> tuple[int, int]:
        """(flush, commit)."""
        if self._asking is None:
            self._asking = await dial(self.address, TENANT, TIMELINE, timeout_ms=60_000)
        [(flush, commit)] = await self._asking.query("TIMELINE_STATUS")
        return parse_lsn(str(flush)), parse_lsn(str(commit))

    async def until(self, end_lsn: int) -> None:
        while await self.ends() != (end_lsn, end_lsn):
            pass

    def wal(self) -> dict[str, bytes]:
        return {
            path.name: path.read_bytes() for path in (self.folder / TENANT / TIMELINE).glob("0*")
        }


async def push(log: LeadingProposer, count: int) -> int:
    """Records of 2,000 bytes."""
    end = 0
    for number in range(count):
        payload = f"{number} ".encode() * 400

        def made(lsn: int, payload: bytes = payload) -> bytes:
            return encode(payload, lsn)

        end = await log.append_at(made, framed_bytes_max(len(payload)))
    return end


async def test_an_acceptor_that_was_down_catches_up_without_a_proposer(tmp_path: Path) -> None:
    first, second = Node(tmp_path / "1", "--node-id", "1"), Node(tmp_path / "2", "--node-id", "2")
    nodes = [first, second]
    try:
        with anyio.fail_after(200):
            await asyncio.gather(first.up(), second.up())
            peers = f"{first.address},{second.address}"
            flags = ("--node-id", "3", "--peers", peers, "--metrics-listen", "127.0.0.1:0")
            third = Node(tmp_path / "3", *flags)
            await third.up()
            nodes.append(third)
            config = ProposerConfig(TENANT, TIMELINE, START_LSN, pg_version=PG_VERSION)
            addresses = [node.address for node in nodes]
            async with propose(config, addresses) as log:
                end = await push(log, 5)
                await third.until(end)
                await third.kill()
                end = await push(log, 200)
                await first.until(end)
                await second.until(end)
            await third.up()
            await third.until(end)
            assert third.wal() == first.wal() == second.wal()
            assert await third.measured("penstock_wal_recovered_bytes_total") > 100_000
            assert (await third.ends())[0] == end, lsn_text(end)
            # it is one of the quorum again
            await first.kill()
            async with propose(config, [addresses[1], third.address]) as log:
                assert await log.elected() == end
                end = await push(log, 1)
            assert end
    finally:
        for node in nodes:
            await node.kill()
