"""A wire in memory, and the words of a proposer that leads a log which begins at `START`."""

from __future__ import annotations

import asyncio
from collections import deque

from wal_disks import MemoryControl, MemoryDisk, MemoryWal  # type: ignore[import-not-found]

from actors.runtime.errors import ConnectionBroken, PenstockError
from actors.testing.isolation import ActorIsolation
from actors.wal import codec_v3
from actors.wal.acceptor_stores import ControlState
from actors.wal.messages import (
    AcceptorMessage,
    AppendRequest,
    MembershipConfig,
    ProposerElected,
    ProposerGreeting,
    ProposerMessage,
    TermEntry,
    VoteRequest,
)
from actors.wal.receiver import CopyEnd
from actors.wal.timeline import WalTimeline

TENANT = "0123456789abcdef0123456789abcdef"
TIMELINE = "fedcba9876543210fedcba9876543210"
START = 0x1000000
GREETING = ProposerGreeting(TENANT, TIMELINE, MembershipConfig(), 170005, 7, 16 * 1024 * 1024)
VOTE = VoteRequest(0, 1)
ELECTED = ProposerElected(0, 1, START, (TermEntry(1, START),))


def append(begin: int, size: int = 8, term: int = 1, commit: int = 0) -> AppendRequest:
    """`size` bytes of log from `begin` on."""
    return AppendRequest(0, term, begin, begin + size, commit, 0, bytes([begin // 8 % 251]) * size)


class Log(MemoryWal):  # type: ignore[misc]
    """A log in memory from which segments are removed."""

    removed_before = 0

    closed = False

    wants_segment = False

    def prepare(self) -> None:
        raise AssertionError("nobody wants a segment")

    def remove_before(self, lsn: int) -> None:
        self.removed_before = lsn

    def close(self) -> None:
        self.closed = True


def timeline_on(
    stage: ActorIsolation, disk: MemoryDisk | None = None
) -> tuple[WalTimeline, MemoryDisk]:
    """A timeline on a disk in memory."""
    state = ControlState(TENANT, TIMELINE, segment_bytes=16 * 1024 * 1024)
    disk = disk or MemoryDisk(state)
    clock = stage.system.clock
    return WalTimeline(5, MemoryControl(disk), Log(disk), clock), disk


class MemoryWire:
    """What the peer says is put in with `say`; what it hears is in `heard`."""

    peer = "a proposer"

    def __init__(self) -> None:
        self._said: deque[bytes | CopyEnd | PenstockError] = deque()
        self._arrived = asyncio.Event()
        self._taking = asyncio.Event()
        self._taking.set()
        self.heard: list[AcceptorMessage] = []
        self.read = 0
        """Messages that were taken off the wire."""
        self.broken = False

    def say(self, *messages: ProposerMessage | CopyEnd | PenstockError) -> None:
        """Puts messages in, which all are there at once."""
        for message in messages:
            if isinstance(message, CopyEnd | PenstockError):
                self._said.append(message)
            else:
                self._said.append(codec_v3.encode_proposer(message))
        self._arrived.set()

    def stall(self) -> None:
        """The peer takes nothing more."""
        self._taking.clear()

    def resume(self) -> None:
        """It does again."""
        self._taking.set()

    async def next_copy(self) -> bytes | CopyEnd:
        while not self._said:
            self._arrived.clear()
            await self._arrived.wait()
        data = self._said.popleft()
        if isinstance(data, PenstockError):
            raise data
        self.read += 1
        return data

    async def send_copy(self, data: bytes) -> None:
        await self._taking.wait()
        if self.broken:
            raise ConnectionBroken("the proposer is gone")
        self.heard.append(codec_v3.decode_acceptor(data))
