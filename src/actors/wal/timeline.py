"""One timeline of this node: its acceptor, its disk, and its connections.

All calls to the acceptor or its disk go through `run`: one at a time, off the loop, under a lock
that is held until the disk has answered. After every call `ends` has the log's new positions.

Readers of the log report their oldest transactions, which go into replies to proposers. A
consumer's feedback goes to every proposer (`feeds`). After an error of the disk the acceptor does
nothing any more: every connection gets an error, and `timelines` opens the folder as another
`WalTimeline`.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar

import anyio
import msgspec
from msgspec.structs import replace

from actors.runtime.errors import PenstockError, StorageError, WalRefused, WalRemoved
from actors.runtime.kernel import ActorClock
from actors.runtime.measurement import MetricDefinition
from actors.runtime.metric_table import (
    WAL_BYTES,
    WAL_FLUSH_SECONDS,
    WAL_MESSAGES,
    WAL_WRITE_SECONDS,
)
from actors.runtime.spans import is_measuring, measure
from actors.wal.acceptor import AcceptorCore, AppendUnflushed, FlushWal, Message
from actors.wal.acceptor_stores import ControlState, ControlStore, WalStore
from actors.wal.archive import WalArchive
from actors.wal.lsn import SEGMENT_BYTES, lsn_text
from actors.wal.messages import (
    AcceptorMessage,
    AppendResponse,
    HotStandbyFeedback,
    PageserverFeedback,
    ProposerElected,
    VoteRequest,
)
from actors.wal.registry import ReceiverRegistry, TimelineFeeds, ValueWatch
from actors.wal.replication import aggregate

log = logging.getLogger("penstock.wal")

_Recorded: TypeAlias = tuple[MetricDefinition, float, tuple[str, ...]]
"""A value that a thread has measured, with the values of the labels."""

R = TypeVar("R")

NO_FEEDBACK: Final = HotStandbyFeedback()


class TimelineLog(WalStore, Protocol):
    """The interface of a log that a timeline needs, besides the acceptor's."""

    def read(self, begin_lsn: int, size: int) -> bytes:
        """Read the bytes [begin_lsn, begin_lsn + size) of what was written. Raises `InvalidUsage`
        for bytes that were not written, `WalRemoved` for removed ones, `StorageError`."""
        ...

    @property
    def wants_segment(self) -> bool:
        """Return whether it is time to `prepare`."""
        ...

    def prepare(self) -> None:
        """Prepare the next segment beside other calls, so that no append waits for it. Raises
        `StorageError`."""
        ...

    def remove_before(self, lsn: int) -> object:
        """Remove whole segments that end at `lsn` or before. Raises `StorageError`."""
        ...

    def close(self) -> None:
        """Close the log; nothing is written to it afterwards."""
        ...


class LogEnds(msgspec.Struct, frozen=True):
    """The positions of a log, at one moment."""

    term: int
    flush_lsn: int
    commit_lsn: int


class ProcessedMessages(msgspec.Struct, frozen=True):
    """The result of several messages: replies to those before the first that failed."""

    replies: tuple[AcceptorMessage, ...]
    error: PenstockError | None = None


class WalTimeline:
    """Serialises all access to one timeline. Raises `CorruptData` as `AcceptorCore` does."""

    def __init__(
        self,
        node_id: int,
        control: ControlStore,
        wal: TimelineLog,
        clock: ActorClock,
        archive: WalArchive | None = None,
        half_full: Callable[[], object] = lambda: None,
    ) -> None:
        self.acceptor = AcceptorCore(node_id, control, wal)
        self._half_full = half_full
        self._archive = archive
        self._control = control
        self._wal = wal
        self._clock = clock
        self._lock = anyio.Lock(fast_acquire=True)
        self._serial = threading.Lock()
        self.registry = ReceiverRegistry()
        self.feeds = TimelineFeeds()
        self._readers: dict[int, HotStandbyFeedback] = {}
        self._hot_standby = NO_FEEDBACK
        self.ends: ValueWatch[LogEnds] = ValueWatch(self._ends())

    @property
    def tenant(self) -> str:
        """Return the tenant's id: 32 hexadecimal digits."""
        return self._control.state.tenant

    @property
    def name(self) -> str:
        """Return the timeline's id: 32 hexadecimal digits."""
        return self._control.state.timeline

    def _ends(self) -> LogEnds:
        acceptor = self.acceptor
        return LogEnds(acceptor.term, acceptor.flush_lsn, acceptor.commit_lsn)

    def positions(self) -> str:
        """Return term and ends, for people."""
        ends = self._ends()
        return (
            f"term {ends.term}, last log term {self.acceptor.last_log_term}, "
            f"flush {lsn_text(ends.flush_lsn)}, commit {lsn_text(ends.commit_lsn)}"
        )

    @property
    def saved(self) -> ControlState:
        """Return the state in the control file."""
        return self._control.state

    async def close(self) -> None:
        """Close the log, after the calls that wait already."""
        await self.run(self._wal.close)

    def check_running(self) -> None:
        """Raise `StorageError` when the disk has failed: the peer must connect again."""
        if self.acceptor.stopped is not None:
            raise StorageError(
                f"timeline {self.name} is opened anew after an error of its disk: connect again"
                f" ({self.acceptor.stopped})",
                determinate=True,
            )

    async def backed_up(self, lsn: int) -> None:
        """Record that all before `lsn` is archived, verified. Raises `StorageError`."""
        await self.run(lambda: self.acceptor.record_backup(lsn))

    async def remove_old(self, keep_bytes: int | None = None) -> None:
        """Remove whole segments below the `horizon`. Raises `StorageError`."""

        def work() -> None:
            lsn = horizon(self._control.state, self.acceptor.flush_lsn, keep_bytes)
            if lsn:
                self._wal.remove_before(lsn)

        await self.run(work)

    async def prepare(self) -> None:
        """Prepare the next segment if it is time (`half_full` was called then), beside appends.
        Raises `StorageError`."""
        if self._wal.wants_segment:
            await self._clock.run_blocking(self._wal.prepare)

    async def run(self, function: Callable[[], R]) -> R:
        """Run a function off the loop, alone."""

        def alone() -> R:
            # The loop's lock keeps the order of waiting tasks, but is released when one is
            # cancelled; its call goes on in the thread even then.
            with self._serial:
                return function()

        try:
            self._lock.acquire_nowait()  # mostly free, and awaiting it costs even then
        except anyio.WouldBlock:
            await self._lock.acquire()
        try:
            return await self._clock.run_blocking(alone)
        finally:
            self._lock.release()
            # Also after an error: part of the call may have happened.
            self.ends.set(self._ends())
            if self._wal.wants_segment:
                self._half_full()

    async def process(self, messages: Sequence[Message]) -> ProcessedMessages:
        """Pass messages to the acceptor in one call; stop at the first that it refuses.

        An exception that is no `PenstockError` is a fault of this program, and is raised.
        """
        measures: list[_Recorded] = []

        def work() -> ProcessedMessages:
            replies: list[AcceptorMessage] = []
            for message in messages:
                began_ms = self._clock.monotonic_ms()
                try:
                    reply = self.acceptor.process(message)
                except PenstockError as error:
                    measures.append((WAL_MESSAGES, 1, ("failed",)))
                    return ProcessedMessages(tuple(replies), error)
                self._note(message, began_ms, measures)
                self._tell_election(message)
                if reply is not None:
                    replies.append(self._filled(reply))
            return ProcessedMessages(tuple(replies))

        try:
            # One call for several messages: a hop to a thread costs as much as a small write.
            return await self.run(work)
        finally:
            for metric, value, labels in measures:
                measure(metric, value, *labels)

    def _note(self, message: Message, began_ms: float, measures: list[_Recorded]) -> None:
        if not is_measuring():
            return
        seconds = (self._clock.monotonic_ms() - began_ms) / 1000
        if isinstance(message, AppendUnflushed):
            measures.append((WAL_WRITE_SECONDS, seconds, ()))
            measures.append((WAL_BYTES, len(message.request.wal), ()))
        if isinstance(message, FlushWal):
            measures.append((WAL_FLUSH_SECONDS, seconds, ()))
        else:
            measures.append((WAL_MESSAGES, 1, ("taken",)))

    def _tell_election(self, message: Message) -> None:
        """Log a vote request or an announced election, and the positions after it."""
        match message:
            case VoteRequest(term=term):
                what = f"asked to vote for term {term}"
            case ProposerElected(term=term, start_streaming_at=start_lsn):
                what = f"told that term {term} was elected, to go on at {lsn_text(start_lsn)}"
            case _:
                return
        log.info("timeline %s was %s: it is in %s", self.name, what, self.positions())

    def _filled(self, reply: AcceptorMessage) -> AcceptorMessage:
        if isinstance(reply, AppendResponse) and self._hot_standby != NO_FEEDBACK:
            return replace(reply, hot_standby=self._hot_standby)
        return reply

    # -- readers of the log ----------------------------------------------------------------------

    async def read(self, begin_lsn: int, size: int, term: int | None) -> bytes:
        """Read a piece of the log; removed bytes come from the archive. With a `term`, only while
        the acceptor is in that term. Raises `WalRefused`, `InvalidUsage`, `StorageError`."""

        def work(begin_lsn: int, size: int) -> bytes:
            # Checked under the same lock as the read: a later leader may replace these bytes.
            now = self.acceptor.term
            if term is not None and now != term:
                raise WalRefused(
                    f"this acceptor is in term {now}, and the log was asked for in term {term}"
                )
            return self._wal.read(begin_lsn, size)

        try:
            return await self.run(lambda: work(begin_lsn, size))
        except WalRemoved:
            if self._archive is None:
                raise
        # Segment by segment, since later ones may still be here.
        parts, at, end_lsn = [], begin_lsn, begin_lsn + size
        while at < end_lsn:
            number, offset = divmod(at, SEGMENT_BYTES)
            part = min(end_lsn - at, SEGMENT_BYTES - offset)
            try:
                parts.append(await self.run(functools.partial(work, at, part)))
            except WalRemoved:
                segment = await self._archive.segment(self.tenant, self.name, number)
                if segment is None:
                    raise
                parts.append(segment[offset : offset + part])
            at += part
        return b"".join(parts)

    def hot_standby(self, reader: int, feedback: HotStandbyFeedback | None) -> None:
        """Record a reader's oldest transactions; None: it has gone."""
        if feedback is None:
            self._readers.pop(reader, None)
        else:
            self._readers[reader] = feedback
        self._hot_standby = aggregate(self._readers.values())

    async def consumed(self, feedback: PageserverFeedback) -> None:
        """Record a consumer's position, and pass it to every proposer. Raises `StorageError`."""
        # Before the disk's lock is awaited: proposers need not wait for it.
        self.feeds.broadcast(feedback)
        lsn = feedback.remote_consistent_lsn
        if lsn:
            await self.run(lambda: self.acceptor.record_remote_consistent(lsn))


def horizon(saved: ControlState, flush_lsn: int, keep_bytes: int | None = None) -> int:
    """Return the LSN before which the log is not needed here; 0: all is needed.

    All consumers, the archive and a majority have the bytes before it on disk, by the saved state.
    With `keep_bytes` consumers count no further than so far below the commit LSN: older bytes they
    read from the archive.
    """
    consumed_lsn = saved.remote_consistent_lsn
    if keep_bytes is not None:
        consumed_lsn = max(consumed_lsn, saved.commit_lsn - keep_bytes)
    return min(consumed_lsn, saved.backup_lsn, saved.commit_lsn, flush_lsn)
