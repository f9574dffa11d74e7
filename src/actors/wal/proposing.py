"""Runs a `proposer` on asyncio: connections to acceptors, time, and tasks that wait for a commit.

One task per acceptor dials it, passes its messages to the core and writes the core's messages. When
the connection ends, the task dials again, after a pause that doubles. One task ticks. A fetch reads
from another acceptor over a separate connection, which is kept for the next piece. The core gets
one event at a time and never waits.

Tasks that append wait in order while there is no room. A fatal error of the core ends all of them;
for bytes that were already appended it is indeterminate. Before the election the proposer also ends
if the last answer of every acceptor was a `PeerRejected`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Self

import anyio
import msgspec
from anyio.abc import TaskGroup

from actors.runtime.errors import (
    ConnectionBroken,
    InvalidUsage,
    PeerRejected,
    PenstockError,
    ResourceClosed,
    first_error,
)
from actors.runtime.kernel import RetryLoop
from actors.runtime.settings import Settings, backoff_ms
from actors.wal import codec_v3
from actors.wal.dialling import (
    AcceptorAddress,
    AcceptorConnection,
    dial,
    start_push,
)
from actors.wal.following import LogReader
from actors.wal.messages import ProposerMessage
from actors.wal.proposer import (
    CommitMoved,
    DropConnection,
    Effect,
    FetchLog,
    LeadTerm,
    ProposerConfig,
    SendMessage,
    StopProposer,
    SyncFinished,
    WalProposer,
)

log = logging.getLogger("penstock.wal")

WRITE_BYTES: Final = 512 * 1024
"""Number of message bytes that are written before waiting for the socket."""


class ProposerTiming(msgspec.Struct, frozen=True):
    """Intervals and timeouts of the connections."""

    tick_ms: int = 100
    connect_timeout_ms: int = 5_000
    retry_delay_ms_min: int = 100
    retry_delay_ms_max: int = 5_000
    fetch_timeout_ms: int = 10_000

    def retry_delay_ms(self, failures: int) -> int:
        """Return the delay in ms before an acceptor is dialled again."""
        return backoff_ms(failures, self.retry_delay_ms_min, self.retry_delay_ms_max)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the timing that the settings configure."""
        return cls(
            connect_timeout_ms=settings.connect_timeout_ms,
            retry_delay_ms_min=settings.retry_delay_ms_min,
            retry_delay_ms_max=max(cls().retry_delay_ms_max, settings.retry_delay_ms_min),
        )


class _Link:
    """Outgoing messages of one connection."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        """Cancelled to end the connection."""
        self.messages: deque[ProposerMessage] = deque()
        """Messages that have not been written yet."""
        self.filled = anyio.Event()
        """Set while there are messages."""
        self.is_over = False
        """True once the core has dropped the connection."""

    def put(self, message: ProposerMessage) -> None:
        self.messages.append(message)
        self.filled.set()


class LeadingProposer:
    """A running proposer. `propose` creates it."""

    def __init__(
        self,
        config: ProposerConfig,
        addresses: Sequence[AcceptorAddress],
        timing: ProposerTiming,
        token: str,
        tls: ssl.SSLContext | None,
        group: TaskGroup,
    ) -> None:
        self.core = WalProposer(config, range(len(addresses)))
        self._addresses = addresses
        self._timing = timing
        self._token = token
        self._tls = tls
        self._group = group
        self._links: dict[int, _Link] = {}
        """Open connection of each acceptor."""
        self._readers: dict[int, tuple[int, LogReader]] = {}
        """Stream kept for the fetches of each acceptor, with the number of its source."""
        self._elected = anyio.Event()
        """Set once the proposer is elected, or has stopped."""
        self._synced = anyio.Event()
        """Set once the acceptors agree in sync mode, or the proposer has stopped."""
        self._order = anyio.Lock(fast_acquire=True)
        """Held by the task that appends next."""
        self._gathered: list[bytes] = []
        """Bytes after the end of the log that are appended in this turn of the event loop."""
        self._gathered_bytes = 0
        """Size of these bytes."""
        self._moved = anyio.Event()
        """Set when the commit LSN advances, or the proposer has stopped."""
        self._waiting: list[tuple[int, int, anyio.Event]] = []
        """Heap of (LSN, number, event) of tasks that wait for a commit."""
        self._numbers = itertools.count()
        self._error: PenstockError | None = None
        """Reason why the proposer has stopped, or None."""
        self._rejections: dict[int, PeerRejected] = {}
        """Rejections by the acceptors whose last answer was one."""

    # -- for appending tasks --

    @property
    def commit_lsn(self) -> int:
        """Return the LSN before which everything is on the disks of a quorum."""
        return self.core.commit_lsn

    @property
    def end_lsn(self) -> int:
        """Return the LSN after the last appended byte."""
        return self.core.end_lsn + self._gathered_bytes

    async def elected(self) -> int:
        """Wait for the election, and return where the log continues.

        Raise `ConnectionBroken` if it was lost, and `PeerRejected` with each acceptor's reason if
        none accepts this proposer.
        """
        await self._elected.wait()
        self._check()
        return self.core.start_lsn

    async def synced(self) -> int:
        """Wait until the acceptors agree (sync mode), and return where their log ends (0: there is
        none).

        Raise what `elected` raises.
        """
        await self._synced.wait()
        self._check()
        return self.core.start_lsn

    async def append(self, wal: bytes) -> int:
        """Append to the log, and return its end once a quorum has it on disk."""
        return await self.append_at(lambda _: wal, len(wal))

    async def append_at(self, encode: Callable[[int], bytes], bytes_max: int) -> int:
        """Append what `encode` returns for the LSN passed to it, at most `bytes_max` bytes, like
        `append`.

        Raise what `put` and `committed` raise.
        """
        end_lsn = await self.put(encode, bytes_max)
        await self.committed(end_lsn)
        return end_lsn

    async def put(self, encode: Callable[[int], bytes], bytes_max: int) -> int:
        """Append like `append_at`, but wait only for room, and return the end for `committed`.

        Raise `InvalidUsage` if the bytes can never fit, `ConnectionBroken` if this proposer no
        longer leads, or `ResourceClosed`; nothing was appended then.
        """
        if self.core.config.is_sync:
            raise InvalidUsage("cannot append in sync mode")
        if bytes_max > self.core.config.pending_bytes_max:
            raise InvalidUsage(
                f"append too large: {bytes_max} bytes (limit {self.core.config.pending_bytes_max},"
                " pending_bytes_max)"
            )
        await self.elected()
        # Keep the order: a small append must not overtake a large one that waits for room.
        async with self._order:
            while self.core.room < self._gathered_bytes + bytes_max:
                self._check()
                self._moved = moved = anyio.Event()
                await moved.wait()
            self._check()
            wal = encode(self.end_lsn)
            # One commit wakes up many tasks. Everything that they append in this turn becomes one
            # message.
            if not self._gathered:
                asyncio.get_running_loop().call_soon(self._append_gathered)
            self._gathered.append(wal)
            self._gathered_bytes += len(wal)
            return self.end_lsn

    def _append_gathered(self) -> None:
        wal = b"".join(self._gathered)
        self._gathered, self._gathered_bytes = [], 0
        if self._error is None:
            try:
                self._perform(self.core.append(wal))
            except InvalidUsage as error:  # a callback has no caller that could handle it
                self._stop(error)

    async def committed(self, lsn: int) -> None:
        """Wait until everything before `lsn` is committed.

        Raise `ConnectionBroken`, which is indeterminate: the bytes may still be committed.
        """
        if self.core.commit_lsn < lsn:
            self._check(determinate=False)
            event = anyio.Event()
            # The number breaks ties, because events have no order.
            heapq.heappush(self._waiting, (lsn, next(self._numbers), event))
            # `_stop` sets the event as well.
            await event.wait()
            if self.core.commit_lsn < lsn:
                self._check(determinate=False)

    def _check(self, *, determinate: bool = True) -> None:
        if self._error is not None:
            # Raise a copy for each waiting task, because determinacy differs between them.
            error = type(self._error)(str(self._error))
            error.determinate = determinate
            raise error

    # -- effects --

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(acceptor, message):
                    if (link := self._links.get(acceptor)) is not None:
                        link.put(message)
                case DropConnection(acceptor, reason):
                    log.warning(
                        "dropped the connection to acceptor %s: %s",
                        self._addresses[acceptor],
                        reason,
                    )
                    if (link := self._links.get(acceptor)) is not None:
                        link.is_over = True
                        link.scope.cancel()
                case LeadTerm(term, start_lsn, donor):
                    log.info("elected in term %d at %d, donor %d", term, start_lsn, donor)
                    self._elected.set()
                case CommitMoved(lsn):
                    self._wake(lsn)
                case FetchLog():
                    # Use a separate task: the core must continue while the bytes arrive.
                    self._group.start_soon(self._fetch, effect)
                case StopProposer(reason):
                    self._stop(ConnectionBroken(f"this proposer no longer leads: {reason}"))
                case SyncFinished(lsn):
                    self._wake(lsn)
                    self._elected.set()
                    self._synced.set()

    def _wake(self, lsn: int) -> None:
        while self._waiting and self._waiting[0][0] <= lsn:
            heapq.heappop(self._waiting)[2].set()
        self._moved.set()

    def _stop(self, error: PenstockError) -> None:
        if self._error is None:
            self._error = error
            log.info("%s", error)
        self._elected.set()
        self._synced.set()
        self._moved.set()
        for _, _, event in self._waiting:
            event.set()
        self._waiting.clear()
        self._group.cancel_scope.cancel()

    def close(self) -> None:
        """Close the proposer. Waiting tasks get `ResourceClosed`."""
        self._stop(ResourceClosed("the proposer was closed"))

    # -- tasks --

    async def run(self) -> None:
        """Start the tasks."""
        for acceptor in range(len(self._addresses)):
            self._group.start_soon(self._keep, acceptor)
        self._group.start_soon(self._tick)

    async def _tick(self) -> None:
        while True:
            self._perform(self.core.tick(int(anyio.current_time() * 1000)))
            await anyio.sleep(self._timing.tick_ms / 1000)

    async def _keep(self, acceptor: int) -> None:
        """Keep a connection to one acceptor, dialling again whenever it ends."""
        retry, warned = RetryLoop(self._timing), ""
        while True:
            began = anyio.current_time()
            try:
                await self._converse(acceptor)
            except PenstockError as error:
                self._note_rejection(acceptor, error)
                # Warn once for each reason: a lasting fault must be visible without flooding the
                # log.
                level = logging.INFO if str(error) == warned else logging.WARNING
                warned = str(error)
                log.log(level, "acceptor %s: %s", self._addresses[acceptor], error)
            if (anyio.current_time() - began) * 1000 > self._timing.retry_delay_ms_max:
                retry.reset()  # the connection was stable
            await retry.pause()

    def _note_rejection(self, acceptor: int, error: PenstockError) -> None:
        self._rejections.pop(acceptor, None)
        if not isinstance(error, PeerRejected):
            return
        self._rejections[acceptor] = error
        # An elected proposer continues: its acceptors accepted it before, so the fault may be
        # repaired.
        if len(self._rejections) == len(self._addresses) and not self._elected.is_set():
            said = "; ".join(str(self._rejections[n]) for n in sorted(self._rejections))
            self._stop(PeerRejected(f"no acceptor accepts this proposer: {said}"))

    async def _dial(self, acceptor: int) -> AcceptorConnection:
        config = self.core.config
        return await dial(
            self._addresses[acceptor],
            config.tenant,
            config.timeline,
            timeout_ms=self._timing.connect_timeout_ms,
            token=self._token,
            tls=self._tls,
        )

    async def _converse(self, acceptor: int) -> None:
        connection = await self._dial(acceptor)
        link = _Link()
        try:
            with anyio.fail_after(self._timing.connect_timeout_ms / 1000):
                await start_push(connection)
            # Register the link before the core knows of the connection, because its greeting is
            # sent over the link.
            self._links[acceptor] = link
            with link.scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._write, connection, link)
                    self._perform(self.core.connected(acceptor))
                    while True:
                        message = codec_v3.decode_acceptor(await connection.receive())
                        self._perform(self.core.received(acceptor, message))
        except TimeoutError:
            raise ConnectionBroken(
                f"acceptor {connection.address} did not start the copy"
            ) from None
        except ExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            connection.abort()
            if self._links.get(acceptor) is link:
                del self._links[acceptor]
                # The core itself has dropped this connection, and must not get any more events of
                # it.
                if not link.is_over:
                    self._perform(self.core.disconnected(acceptor))

    async def _write(self, connection: AcceptorConnection, link: _Link) -> None:
        while True:
            await link.filled.wait()
            bodies: list[bytes] = []
            count = 0
            while link.messages and count < WRITE_BYTES:
                bodies.append(codec_v3.encode_proposer(link.messages.popleft()))
                count += len(bodies[-1])
            if not link.messages:
                link.filled = anyio.Event()
            await connection.send(bodies)

    async def _fetch(self, asked: FetchLog) -> None:
        """Read one piece, and keep the connection for the next one."""
        reader: LogReader | None = None
        try:
            with anyio.fail_after(self._timing.fetch_timeout_ms / 1000):
                reader = await self._reader(asked)
                wal = b""
                # Keepalives are empty.
                while not wal:
                    wal = await reader.next()
        except (PenstockError, TimeoutError) as error:
            log.info("cannot read from acceptor %s: %s", self._addresses[asked.source], error)
            if reader is not None:
                reader.abort()
            self._perform(self.core.fetch_failed(asked.acceptor, asked.begin_lsn))
            return
        except BaseException:
            if reader is not None:
                reader.abort()
            raise
        if len(wal) <= asked.end_lsn - asked.begin_lsn:
            self._readers[asked.acceptor] = (asked.source, reader)
        else:  # the core discards what it did not request, so the next piece would have a gap
            reader.abort()
        self._perform(self.core.fetched(asked.acceptor, asked.begin_lsn, wal))

    async def _reader(self, asked: FetchLog) -> LogReader:
        kept = self._readers.pop(asked.acceptor, None)
        if kept is not None:
            source, reader = kept
            # The kept stream is usable only if it continues exactly there.
            if source == asked.source and reader.next_lsn == asked.begin_lsn:
                return reader
            reader.abort()
        reader = LogReader(await self._dial(asked.source), asked.begin_lsn)
        try:
            await reader.start(asked.term)
        except BaseException:
            reader.abort()
            raise
        return reader

    def abort_readers(self) -> None:
        """Close the connections that are kept for fetches."""
        for _, reader in self._readers.values():
            reader.abort()
        self._readers.clear()


@asynccontextmanager
async def propose(
    config: ProposerConfig,
    addresses: Sequence[AcceptorAddress],
    *,
    timing: ProposerTiming | None = None,
    token: str = "",
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[LeadingProposer]:
    """Run a proposer that campaigns and, once `elected`, leads until the block ends.

    When it no longer leads, everything that waits for it raises `ConnectionBroken`; the block is
    not interrupted.
    """
    if not addresses:
        raise InvalidUsage("no acceptors given")
    failed: Exception | None = None
    async with anyio.create_task_group() as outer:
        ready: list[LeadingProposer] = []
        made = anyio.Event()

        async def work() -> None:
            async with anyio.create_task_group() as group:
                ready.append(
                    LeadingProposer(
                        config, addresses, timing or ProposerTiming(), token, tls, group
                    )
                )
                await ready[0].run()
                made.set()

        # Give the tasks their own group: their end must not cancel the caller's block.
        outer.start_soon(work)
        await made.wait()
        try:
            yield ready[0]
        except Exception as error:  # noqa: BLE001 - the block's own; the group would wrap it
            failed = error
        finally:
            ready[0].close()
            ready[0].abort_readers()
    if failed is not None:
        raise failed
