"""One timeline of this node: its acceptor, its disk, and who is connected.

Theory of operation. All that touches the acceptor or its disk goes through `run`: one call at a
time, off the loop, under a lock that is held until the disk has answered. The lock is twofold: in
the loop, so that those who wait keep their order, and in the thread, because a call goes on there
even when who waited for it was cancelled. `process` takes several messages in one call: a hop to
a thread costs as much as a small write. After every call `ends` shows how far the log is.

The timeline also knows what readers of the log say (`readers`), and puts it into the answers to
proposers: the oldest transactions that any standby sees. What a consumer tells about itself goes
to every proposer (`feeds`).

After an error of the disk its acceptor does nothing any more: whoever is connected is told, and
`timelines` opens it anew, as another `Timeline`.

What it does not do: it decides nothing of the protocol (`acceptor`), and when its control file is
saved is decided by `upkeep`.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

import anyio
import msgspec
from msgspec.structs import replace

from actors.errors import PenstockError, StorageError, WalRefused, WalRemoved
from actors.kernel import Clock
from actors.spans import measure, measuring
from actors.telemetry import WAL_BYTES, WAL_FLUSH_SECONDS, WAL_MESSAGES, WAL_WRITE_SECONDS
from actors.wal.acceptor import Acceptor, AppendUnflushed, FlushWal, Message
from actors.wal.archive import Archive
from actors.wal.lsn import SEGMENT_BYTES, lsn_text
from actors.wal.messages import (
    AcceptorMessage,
    AppendResponse,
    HotStandbyFeedback,
    PageserverFeedback,
    ProposerElected,
    VoteRequest,
)
from actors.wal.registry import Feeds, Registry
from actors.wal.replication import aggregate
from actors.wal.stores import ControlState, ControlStore, WalStore
from actors.wal.watch import Watch

log = logging.getLogger("penstock.wal")

R = TypeVar("R")

NO_FEEDBACK: Final = HotStandbyFeedback()


class Log(WalStore, Protocol):
    """What a timeline needs of its log besides what the acceptor does."""

    def read(self, begin_lsn: int, size: int) -> bytes:
        """The bytes [begin_lsn, begin_lsn + size) of what was written. Raises `InvalidUsage` for
        what is not there, `WalRemoved` for what no longer is, `StorageError`."""
        ...

    @property
    def wants_segment(self) -> bool:
        """Whether it is time to `prepare`."""
        ...

    def prepare(self) -> None:
        """Does now, beside other calls, what would hold up an append later. Raises
        `StorageError`."""
        ...

    def remove_before(self, lsn: int) -> object:
        """Removes whole segments that end at `lsn` or before. Raises `StorageError`."""
        ...

    def close(self) -> None:
        """Frees what it holds; nothing is written to it afterwards."""
        ...


class Ends(msgspec.Struct, frozen=True):
    """How far a log is, at one moment."""

    term: int
    flush_lsn: int
    commit_lsn: int


class Processed(msgspec.Struct, frozen=True):
    """What came of several messages: answers to those before the first that failed."""

    replies: tuple[AcceptorMessage, ...]
    error: PenstockError | None = None


class Timeline:
    """See the module. Raises `Corrupt` as `Acceptor` does."""

    def __init__(
        self,
        node_id: int,
        control: ControlStore,
        wal: Log,
        clock: Clock,
        archive: Archive | None = None,
        half_full: Callable[[], object] = lambda: None,
    ) -> None:
        self.acceptor = Acceptor(node_id, control, wal)
        self._half_full = half_full
        self._archive = archive
        self._control = control
        self._wal = wal
        self._clock = clock
        self._lock = anyio.Lock(fast_acquire=True)
        self._serial = threading.Lock()
        self.registry = Registry()
        self.feeds = Feeds()
        self._readers: dict[int, HotStandbyFeedback] = {}
        self._hot_standby = NO_FEEDBACK
        self.ends: Watch[Ends] = Watch(self._ends())

    @property
    def tenant(self) -> str:
        """32 hexadecimal digits."""
        return self._control.state.tenant

    @property
    def name(self) -> str:
        """Of the timeline: 32 hexadecimal digits."""
        return self._control.state.timeline

    def _ends(self) -> Ends:
        acceptor = self.acceptor
        return Ends(acceptor.term, acceptor.flush_lsn, acceptor.commit_lsn)

    def positions(self) -> str:
        """Return term and ends, for people."""
        ends = self._ends()
        return (
            f"term {ends.term}, last log term {self.acceptor.last_log_term}, "
            f"flush {lsn_text(ends.flush_lsn)}, commit {lsn_text(ends.commit_lsn)}"
        )

    @property
    def saved(self) -> ControlState:
        """What its control file says."""
        return self._control.state

    async def close(self) -> None:
        """Frees its log, when nobody is at it any more."""
        await self.run(self._wal.close)

    def check_going(self) -> None:
        """Raises `StorageError` when its disk has failed: connect again."""
        if self.acceptor.stopped is not None:
            raise StorageError(
                f"timeline {self.name} is opened anew after an error of its disk: connect again"
                f" ({self.acceptor.stopped})",
                determinate=True,
            )

    async def backed_up(self, lsn: int) -> None:
        """All before `lsn` is kept elsewhere, verified. Raises `StorageError`."""
        await self.run(lambda: self.acceptor.record_backup(lsn))

    async def remove_old(self, keep_bytes: int | None = None) -> None:
        """Removes what lies below the `horizon`. Raises `StorageError`."""

        def work() -> None:
            lsn = horizon(self._control.state, self.acceptor.flush_lsn, keep_bytes)
            if lsn:
                self._wal.remove_before(lsn)

        await self.run(work)

    async def prepare(self) -> None:
        """Makes the next segment if it is time (then `half_full` was called); appends go on
        meanwhile. Raises `StorageError`."""
        if self._wal.wants_segment:
            await self._clock.run_blocking(self._wal.prepare)

    async def run(self, function: Callable[[], R]) -> R:
        """Runs it off the loop, alone."""

        def alone() -> R:
            with self._serial:
                return function()

        try:
            self._lock.acquire_nowait()  # free as a rule, and a wait for it costs even then
        except anyio.WouldBlock:
            await self._lock.acquire()
        try:
            return await self._clock.run_blocking(alone)
        finally:
            self._lock.release()
            self.ends.set(self._ends())
            if self._wal.wants_segment:
                self._half_full()

    async def process(self, messages: Sequence[Message]) -> Processed:
        """Hands messages to the acceptor in one go; stops at the first that it refuses.

        What is no error of ours (a fault of this program) is raised."""
        measures: list[tuple[str, float, str]] = []

        def work() -> Processed:
            replies: list[AcceptorMessage] = []
            for message in messages:
                began_ms = self._clock.monotonic_ms()
                try:
                    reply = self.acceptor.process(message)
                except PenstockError as error:
                    measures.append((WAL_MESSAGES, 1, "failed"))
                    return Processed(tuple(replies), error)
                self._note(message, began_ms, measures)
                self._tell_election(message)
                if reply is not None:
                    replies.append(self._filled(reply))
            return Processed(tuple(replies))

        try:
            return await self.run(work)
        finally:
            for each in measures:
                measure(*each)

    def _note(
        self, message: Message, began_ms: float, measures: list[tuple[str, float, str]]
    ) -> None:
        if not measuring():
            return
        seconds = (self._clock.monotonic_ms() - began_ms) / 1000
        if isinstance(message, AppendUnflushed):
            measures.append((WAL_WRITE_SECONDS, seconds, ""))
            measures.append((WAL_BYTES, len(message.request.wal), ""))
        if isinstance(message, FlushWal):
            measures.append((WAL_FLUSH_SECONDS, seconds, ""))
        else:
            measures.append((WAL_MESSAGES, 1, "taken"))

    def _tell_election(self, message: Message) -> None:
        """Log who asked for this acceptor's vote, or announced itself, and how it stands now."""
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
        """A piece of the log; what was removed here comes from the archive. With a `term`, only
        while the acceptor is in it: looked at under the same lock. Raises `WalRefused`,
        `InvalidUsage`, `StorageError`."""

        def work(begin_lsn: int, size: int) -> bytes:
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
        """What a reader says of its transactions; None: it has gone."""
        if feedback is None:
            self._readers.pop(reader, None)
        else:
            self._readers[reader] = feedback
        self._hot_standby = aggregate(self._readers.values())

    async def consumed(self, feedback: PageserverFeedback) -> None:
        """How far a consumer is: every proposer hears of it. Raises `StorageError`."""
        self.feeds.broadcast(feedback)
        lsn = feedback.remote_consistent_lsn
        if lsn:
            await self.run(lambda: self.acceptor.record_remote_consistent(lsn))


def horizon(saved: ControlState, flush_lsn: int, keep_bytes: int | None = None) -> int:
    """Up to where the log is needed here by nobody: all consumers, the offload and a majority have
    it on disk, and so says the control file. 0: all is needed. With `keep_bytes` consumers count
    no further than so far behind the commit: what is older they read from the archive."""
    consumed_lsn = saved.remote_consistent_lsn
    if keep_bytes is not None:
        consumed_lsn = max(consumed_lsn, saved.commit_lsn - keep_bytes)
    return min(consumed_lsn, saved.backup_lsn, saved.commit_lsn, flush_lsn)
