"""One timeline of this node: its acceptor, its disk, and its connections.

All calls to the acceptor or its disk go through `run`: one at a time, off the event loop, under a
lock that is held until the disk has answered. After every call `ends` has the log's new positions.

Readers of the log report their oldest transactions, which are included in replies to proposers. A
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
    """The interface of a log that a timeline needs, in addition to the acceptor's."""

    def read(self, begin_lsn: int, size: int) -> bytes:
        """Read the bytes [begin_lsn, begin_lsn + size) of what was written.

        Raises `InvalidUsage` for bytes that were not written, `WalRemoved` for removed ones,
        `StorageError`.
        """
        ...

    @property
    def wants_segment(self) -> bool:
        """Return whether it is time to `prepare`."""
        ...

    def prepare(self) -> None:
        """Prepare the next segment concurrently with other calls, so that no append waits for it.

        Raises `StorageError`.
        """
        ...

    def remove_before(self, lsn: int) -> object:
        """Remove full segments that end at or before `lsn`. Raises `StorageError`."""
        ...

    def close(self) -> None:
        """Close the log. Nothing is written to it afterwards."""
        ...


class LogEnds(msgspec.Struct, frozen=True):
    """The positions of a log at one moment."""

    term: int
    flush_lsn: int
    commit_lsn: int


class ProcessedMessages(msgspec.Struct, frozen=True):
    """The result of several messages: replies to those before the first that failed, and its
    error."""

    replies: tuple[AcceptorMessage, ...]
    error: PenstockError | None = None


class WalTimeline:
    """Serializes all access to one timeline. Raises `CorruptData` like `AcceptorCore`."""

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
        """Rules and state of the acceptor; call it only through `run`."""
        self._half_full = half_full
        self._archive = archive
        self._control = control
        self._wal = wal
        self._clock = clock
        self._lock = anyio.Lock(fast_acquire=True)
        """Held by the task whose call runs; keeps waiting tasks in order."""
        self._serial = threading.Lock()
        """Held by the thread of a call, even after its task was cancelled."""
        self.registry = ReceiverRegistry()
        """Receivers that are connected."""
        self.feeds = TimelineFeeds()
        """Feeds of consumers' positions to the proposers."""
        self._readers: dict[int, HotStandbyFeedback] = {}
        """Oldest transactions that each reader reports, by connection."""
        self._hot_standby = NO_FEEDBACK
        """The oldest transactions over all readers; included in replies."""
        self.ends: ValueWatch[LogEnds] = ValueWatch(self._ends())
        """Positions of the log after the last call, to wait for."""

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
        """Return the terms and positions as readable text."""
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
        """Close the log, after the calls that are already waiting."""
        await self.run(self._wal.close)

    def check_running(self) -> None:
        """Raise `StorageError` if the disk has failed, so that the peer must connect again."""
        if self.acceptor.stopped is not None:
            raise StorageError(
                f"timeline {self.name} is being reopened after a disk error: connect again"
                f" ({self.acceptor.stopped})",
                determinate=True,
            )

    async def backed_up(self, lsn: int) -> None:
        """Record that everything before `lsn` is archived and verified. Raise `StorageError`."""
        await self.run(lambda: self.acceptor.record_backup(lsn))

    async def remove_old(self, keep_bytes: int | None = None) -> None:
        """Remove full segments below the `horizon`. Raise `StorageError`."""

        def work() -> None:
            lsn = horizon(self._control.state, self.acceptor.flush_lsn, keep_bytes)
            if lsn:
                self._wal.remove_before(lsn)

        await self.run(work)

    async def prepare(self) -> None:
        """Prepare the next segment if it is time (`half_full` was called then), concurrently with
        appends.

        Raise `StorageError`.
        """
        if self._wal.wants_segment:
            await self._clock.run_blocking(self._wal.prepare)

    async def run(self, function: Callable[[], R]) -> R:
        """Run a function off the event loop, one at a time."""

        def alone() -> R:
            # The loop's lock keeps the order of waiting tasks, but is released when a task is
            # cancelled; the call then still continues in its thread.
            with self._serial:
                return function()

        try:
            self._lock.acquire_nowait()  # mostly free, and awaiting it has a cost even then
        except anyio.WouldBlock:
            await self._lock.acquire()
        try:
            return await self._clock.run_blocking(alone)
        finally:
            self._lock.release()
            # Do this after an error too, because part of the call may have happened.
            self.ends.set(self._ends())
            if self._wal.wants_segment:
                self._half_full()

    async def process(self, messages: Sequence[Message]) -> ProcessedMessages:
        """Pass messages to the acceptor in one call, stopping at the first that it refuses.

        An exception that is not a `PenstockError` is a bug of this program, and is raised.
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
                self._log_election(message)
                if reply is not None:
                    replies.append(self._with_hot_standby(reply))
            return ProcessedMessages(tuple(replies))

        try:
            # Use one call for several messages: a hop to a thread costs as much as a small write.
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

    def _log_election(self, message: Message) -> None:
        """Log a vote request or an announced election, with the positions after it."""
        match message:
            case VoteRequest(term=term):
                what = f"was asked to vote for term {term}"
            case ProposerElected(term=term, start_streaming_at=start_lsn):
                what = f"follows the leader of term {term} from {lsn_text(start_lsn)}"
            case _:
                return
        log.info("timeline %s %s: now at %s", self.name, what, self.positions())

    def _with_hot_standby(self, reply: AcceptorMessage) -> AcceptorMessage:
        if isinstance(reply, AppendResponse) and self._hot_standby != NO_FEEDBACK:
            return replace(reply, hot_standby=self._hot_standby)
        return reply

    # -- readers of the log ----------------------------------------------------------------------

    async def read(self, begin_lsn: int, size: int, term: int | None) -> bytes:
        """Read a piece of the log. Removed bytes come from the archive.

        With a `term`, read only while the acceptor is in that term. Raise `WalRefused`,
        `InvalidUsage` or `StorageError`.
        """

        def work(begin_lsn: int, size: int) -> bytes:
            # Check it under the same lock as the read, because a later leader may replace these
            # bytes.
            now = self.acceptor.term
            if term is not None and now != term:
                raise WalRefused(
                    f"this acceptor is in term {now}, but the log was requested for term {term}"
                )
            return self._wal.read(begin_lsn, size)

        try:
            return await self.run(lambda: work(begin_lsn, size))
        except WalRemoved:
            if self._archive is None:
                raise
        # Read segment by segment, because later ones may still be here.
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
        """Record a reader's oldest transactions; None: the reader is gone."""
        if feedback is None:
            self._readers.pop(reader, None)
        else:
            self._readers[reader] = feedback
        self._hot_standby = aggregate(self._readers.values())

    async def consumed(self, feedback: PageserverFeedback) -> None:
        """Record a consumer's position, and pass it to every proposer. Raise `StorageError`."""
        # Do this before waiting for the disk's lock, because proposers need not wait for it.
        self.feeds.broadcast(feedback)
        lsn = feedback.remote_consistent_lsn
        if lsn:
            await self.run(lambda: self.acceptor.record_remote_consistent(lsn))


def horizon(saved: ControlState, flush_lsn: int, keep_bytes: int | None = None) -> int:
    """Return the LSN before which the log is not needed here; 0: everything is needed.

    According to the saved state, all consumers, the archive and a majority have the bytes before it
    on disk. With `keep_bytes`, consumers hold back at most that many bytes before the commit LSN:
    they read older bytes from the archive.
    """
    consumed_lsn = saved.remote_consistent_lsn
    if keep_bytes is not None:
        consumed_lsn = max(consumed_lsn, saved.commit_lsn - keep_bytes)
    return min(consumed_lsn, saved.backup_lsn, saved.commit_lsn, flush_lsn)
