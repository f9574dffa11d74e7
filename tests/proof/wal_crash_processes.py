"""The processes of `wal_crash`: acceptors and proposers, started, heard, stopped and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import deque
from pathlib import Path

import anyio
import msgspec
from anyio.abc import Process, TaskGroup
from wal_crash_proposer import Orders

from actors.testing.postgres_server import reserve_port
from actors.wal.acceptor_stores import ControlState
from actors.wal.control import CONTROL_NAME, decode
from actors.wal.dialling import dial, parse_addresses
from actors.wal.files import OperatingSystemFiles
from actors.wal.lsn import PARTIAL, SEGMENT_BYTES, parse_lsn
from actors.wal.segments import SegmentFiles

TENANT, TIMELINE = "0a" * 16, "0b" * 16
HERE = Path(__file__).parent
BYTES_A_LOOK = 1 << 20
DIAL_TIMEOUT_MS = 60_000
PEER_INTERVAL_MS = 100
START_S = 600


class Stuck(Exception):
    """Something that must come does not."""


class Lines:
    """What a process says, a line at a time."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._rest = b""
        self._whole: deque[str] = deque()

    async def next(self) -> str | None:
        """None: it says no more. What is not whole was never said."""
        while not self._whole:
            try:
                piece = await self._stream.receive()
            except anyio.EndOfStream:
                return None
            *whole, self._rest = (self._rest + piece).split(b"\n")
            self._whole += [line.decode() for line in whole]
        return self._whole.popleft()


class AcceptorProcess:
    """One acceptor: its port and its folder outlive its processes."""

    def __init__(self, folder: Path, node_id: int, fault: str) -> None:
        self.node_id = node_id
        self.peers: list[str] = []
        """Addresses. Whoever is behind fetches from them, when no proposer streams to it."""
        self._folder = folder / str(node_id)
        self._held = reserve_port()
        self._port: int = self._held.getsockname()[1]
        self._fault = fault
        self._process: Process | None = None

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self._port}"

    @property
    def is_up(self) -> bool:
        """Started, and not killed."""
        return self._process is not None

    async def start(self) -> None:
        """Until it is ready. Raises `ViewStuck`."""
        command = [sys.executable, str(HERE / "wal_crash_faults.py"), self._fault, "serve"]
        command += ["--listen", self.address, "--node-id", str(self.node_id)]
        command += ["--dir", str(self._folder), "--log-level", "error"]
        if self.peers:
            command += ["--peers", ",".join(self.peers)]
        environment = os.environ | {"PENSTOCK_WAL_PEER_INTERVAL_MS": str(PEER_INTERVAL_MS)}
        self._process = await anyio.open_process(command, stderr=None, env=environment)
        lines = Lines(self._process)
        with anyio.move_on_after(START_S):
            while (line := await lines.next()) != "ready":
                if line is None:
                    break
            else:
                return
        raise Stuck(f"acceptor {self.node_id} does not start")

    def pause(self) -> None:
        """SIGSTOP."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    async def kill(self) -> int:
        """With SIGKILL; how many died."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.returncode is not None:
            raise Stuck(f"acceptor {self.node_id} ended by itself: {process.returncode}")
        process.kill()
        await process.aclose()
        return 1

    async def commit_lsn(self) -> int:
        """What it calls committed; while it is away: what it wrote down."""
        if not self.is_up:
            return self.control().commit_lsn
        [address] = parse_addresses(self.address)
        connection = await dial(address, TENANT, TIMELINE, timeout_ms=DIAL_TIMEOUT_MS)
        try:
            [(_, commit)] = await connection.query("TIMELINE_STATUS")
        finally:
            connection.abort()
        return parse_lsn(str(commit))

    # -- its disk ---------------------------------------------------------------------------------

    @property
    def _timeline(self) -> Path:
        return self._folder / TENANT / TIMELINE

    def control(self) -> ControlState:
        """What its control file says; that of a new timeline where there is none yet."""
        try:
            return decode((self._timeline / CONTROL_NAME).read_bytes())
        except FileNotFoundError:
            return ControlState(TENANT, TIMELINE)

    def segments(self) -> dict[str, Path]:
        """Its files, by the names that they have when they are whole."""
        return {path.name.removesuffix(PARTIAL): path for path in self._timeline.glob("0*")}

    def bytes_at(self, begin_lsn: int, size: int) -> bytes:
        """Of its segments."""
        files = SegmentFiles(self._timeline, OperatingSystemFiles())
        found = []
        while size:
            number, offset = divmod(begin_lsn, SEGMENT_BYTES)
            part = min(size, SEGMENT_BYTES - offset)
            file, _ = files.open(number)
            try:
                found.append(file.read_at(offset, part))
            finally:
                file.close()
            begin_lsn, size = begin_lsn + part, size - part
        return b"".join(found)


class News:
    """Something was said. One waits."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def tell(self) -> None:
        """Wakes who waits."""
        self._event.set()

    async def wait(self) -> None:
        """Until something was told since the last time."""
        await self._event.wait()
        self._event = anyio.Event()


class ProposerProcess:
    """One life of a proposer, and what it said."""

    def __init__(self, orders: Orders, news: News, elections: deque[ProposerProcess]) -> None:
        """It puts itself among the `elections` when it is elected."""
        self.orders = orders
        self.term = 0
        self.start_lsn = 0
        self.attempts = 0
        self.acknowledged: dict[int, int] = {}
        """Behind each transfer."""
        self.unchecked: dict[int, int] = {}
        """Those of them that were not looked for yet."""
        self.broken = ""
        """Why it ended by itself."""
        self.over = False
        """It is dead, and all that it said is known."""
        self._news = news
        self._elections = elections
        self._ended = anyio.Event()
        self._process: Process | None = None

    async def start(self, group: TaskGroup) -> None:
        """Until it is up; it waits for `campaign`. Raises `ViewStuck`."""
        command = [sys.executable, str(HERE / "wal_crash_proposer.py")]
        command += [msgspec.json.encode(self.orders).decode()]
        self._process = await anyio.open_process(command, stderr=None)
        lines = Lines(self._process)
        with anyio.move_on_after(START_S):
            if await lines.next() == "up":
                group.start_soon(self._hear, self._process, lines)
                return
        raise Stuck(f"life {self.orders.life} does not start")

    async def campaign(self) -> None:
        """Lets it begin."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(anyio.BrokenResourceError):
            await self._process.stdin.send(b"go\n")

    async def _hear(self, process: Process, lines: Lines) -> None:
        while (line := await lines.next()) is not None:
            word, _, rest = line.partition(" ")
            match word:
                case "elected":
                    self.term, self.start_lsn = map(int, rest.split())
                    self._elections.append(self)
                case "try":
                    self.attempts = int(rest) + 1
                case "ok":
                    attempt, lsn = map(int, rest.split())
                    self.acknowledged[attempt] = self.unchecked[attempt] = lsn
                case "broken":
                    self.broken = rest
            self._news.tell()
        await process.wait()
        self.over = True
        self._ended.set()
        self._news.tell()

    def checked(self, lsn: int) -> None:
        """All that ends up to `lsn` was looked for."""
        self.unchecked = {key: end for key, end in self.unchecked.items() if end > lsn}

    def pause(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            self._process.send_signal(number)

    async def kill(self) -> int:
        """With SIGKILL, and hears the last of it; how many died."""
        if self._process is None or self.over:
            return 0
        died = self._process.returncode is None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._ended.wait()
        return int(died)
