"""Acceptors in this process: real listeners on real ports, over files; each can go down and come
back, on its port and its disk."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel

from actors.runtime.kernel import ActorSystem, SystemClock
from actors.runtime.settings import Settings
from actors.wal.dialling import AcceptorAddress
from actors.wal.framing import PG_VERSION, START_LSN
from actors.wal.listener import WalListener
from actors.wal.lsn import SEGMENT_BYTES
from actors.wal.messages import MembershipConfig, ProposerGreeting
from actors.wal.proposer import ProposerConfig
from actors.wal.proposing import ProposerTiming, propose
from actors.wal.pushing import push
from actors.wal.timeline import WalTimeline
from actors.wal.timelines import FileTimelineStore, TimelineRegistry

TENANT, TIMELINE = "0a" * 16, "0b" * 16
FAST = ProposerTiming(tick_ms=10, retry_delay_ms_min=5, retry_delay_ms_max=20)
SETTINGS = Settings()


class Node:
    """One acceptor."""

    def __init__(
        self, folder: Path, node_id: int, tls: ssl.SSLContext | None = None, token: str = ""
    ) -> None:
        self.folder = folder
        self.node_id = node_id
        self._tls = tls
        self._token = token.encode()
        self.port = 0
        self._timelines: TimelineRegistry | None = None
        self._stop = asyncio.Event()
        self._served: asyncio.Task[None] | None = None

    @property
    def address(self) -> AcceptorAddress:
        return AcceptorAddress("127.0.0.1", self.port)

    @property
    def timeline(self) -> WalTimeline:
        assert self._timelines is not None
        found = self._timelines.find(TENANT, TIMELINE)
        assert found is not None
        return found

    async def up(self) -> None:
        sock = socket.create_server(("127.0.0.1", self.port))
        sock.setblocking(False)
        self.port = sock.getsockname()[1]
        clock = SystemClock()
        self._timelines = TimelineRegistry(
            self.folder, self.node_id, FileTimelineStore(), clock, SETTINGS
        )
        await self._timelines.open()
        self._stop = asyncio.Event()
        self._served = asyncio.create_task(self._serve(sock, self._timelines, clock))

    async def _serve(
        self, sock: socket.socket, timelines: TimelineRegistry, clock: SystemClock
    ) -> None:
        try:
            async with ActorSystem(clock=clock) as system, anyio.create_task_group() as group:
                knows = self._token.__eq__ if self._token else None
                listener = WalListener(
                    timelines, system, clock, SETTINGS, knows=knows, tls=self._tls
                )
                group.start_soon(listener.serve, [sock])
                await self._stop.wait()
                group.cancel_scope.cancel()
        finally:
            sock.close()
            timelines.close()

    async def make(self) -> None:
        """The timeline, of which it has nothing yet."""
        assert self._timelines is not None
        greeting = ProposerGreeting(
            TENANT, TIMELINE, MembershipConfig(), PG_VERSION, 0, SEGMENT_BYTES
        )
        await self._timelines.get_or_create(greeting, may_create=True)

    async def down(self) -> None:
        if self._served is not None:
            self._stop.set()
            await self._served
            self._served = None


@asynccontextmanager
async def nodes(folder: Path, count: int = 3) -> AsyncIterator[list[Node]]:
    """So many acceptors, up."""
    made = [Node(folder / str(number), number) for number in range(1, count + 1)]
    try:
        for node in made:
            await node.up()
        yield made
    finally:
        for node in made:
            await node.down()


async def append(
    those: Sequence[Node],
    lines: Iterable[bytes],
    start_lsn: int = START_LSN,
    *,
    tls: ssl.SSLContext | None = None,
    token: str = "",
) -> int:
    """Elects a writer among them, which pushes the lines; the place behind them. All of them have
    it all, and know that it is committed."""
    config = ProposerConfig(TENANT, TIMELINE, start_lsn, heartbeat_ms=20)
    addresses = [node.address for node in those]
    async with propose(config, addresses, timing=FAST, tls=tls, token=token) as log:
        done = await push(log, lines, [])
        for node in those:
            await node.timeline.ends.until(lambda ends: ends.commit_lsn == done.lsn)
    return done.lsn
