"""Passes the messages of one connection to its timeline, several in one call, and flushes in
groups.

`actors.wal.receiver` describes the whole chain, of which this is a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias, assert_never

import msgspec

from actors.runtime.errors import ConnectionBroken, PenstockError, ResourceClosed, WalRefused
from actors.runtime.kernel import Actor, ActorAddress
from actors.runtime.metric_table import WAL_QUEUE_BYTES, WAL_QUEUE_DEPTH, WAL_QUEUED
from actors.runtime.settings import Settings
from actors.runtime.spans import measure
from actors.wal.acceptor import AppendUnflushed, FlushWal, Message
from actors.wal.messages import AcceptorMessage, AppendRequest, ProposerElected, ProposerMessage
from actors.wal.registry import SlotGuard
from actors.wal.timeline import WalTimeline

GATHERED_MAX: Final = 64
"""Maximum number of messages in one call to the disk; lower if ``wal_messages_max`` is small."""
FLUSH_MS: Final = 1_000
"""Maximum time in ms that an append waits for a flush."""
GATHERED_BYTES_MAX: Final = 1024 * 1024
"""Maximum size of the messages gathered for one call to the disk."""


def gathered_max(settings: Settings) -> int:
    """Return the maximum number of messages that are gathered for one call to the disk."""
    return min(GATHERED_MAX, settings.wal_messages_max // 4)


def waiting_max(settings: Settings) -> int:
    """Return the size of the mailbox, in messages."""
    # The actor takes out as many messages as the mailbox holds, and gathers some in addition.
    return (settings.wal_messages_max - gathered_max(settings)) // 2


class WriteAnswer(msgspec.Struct, frozen=True, gc=False):
    """Passes a reply to the writer."""

    message: AcceptorMessage


class FromProposer(msgspec.Struct, frozen=True, gc=False):
    """Passes a proposer's message to the acceptor."""

    message: ProposerMessage


class ReceiverDisconnected(msgspec.Struct, frozen=True, gc=False):
    """Tells the acceptor that no more messages follow."""


AcceptorInput: TypeAlias = FromProposer | ReceiverDisconnected


class QueueMeter:
    """Measures the messages that wait for an acceptor, as reported by their sender and their
    receiver."""

    def __init__(self) -> None:
        # The depth of the mailbox would not include messages that its actor has taken out.
        self._count = 0
        """Number of waiting messages."""
        self._bytes = 0
        """Size of the log bytes in the waiting messages."""

    def put(self, message: ProposerMessage, sign: int = 1) -> None:
        """Count a message that was sent (`sign` 1) or taken (`sign` -1)."""
        size = len(message.wal) if isinstance(message, AppendRequest) else 0
        self._add(sign, sign * size)

    def sample(self) -> None:
        """Record how many messages are waiting now."""
        measure(WAL_QUEUE_DEPTH, self._count)

    def drain(self) -> None:
        """Count the remaining messages as taken, because no task will take them."""
        self._add(-self._count, -self._bytes)

    def _add(self, count: int, size: int) -> None:
        self._count += count
        self._bytes += size
        measure(WAL_QUEUED, count)
        measure(WAL_QUEUE_BYTES, size)


class GroupFlush:
    """Decides when to flush appends: when no message follows, or when the first unflushed append
    has waited for `FLUSH_MS`."""

    def __init__(self) -> None:
        self._since_ms: float | None = None
        """Time of the first unflushed append; None if all are flushed."""

    @property
    def is_pending(self) -> bool:
        """Return whether there is an unflushed append."""
        return self._since_ms is not None

    def taken(self, now_ms: float) -> None:
        """Record an append."""
        if self._since_ms is None:
            self._since_ms = now_ms

    def is_due(self, now_ms: float, *, idle: bool) -> bool:
        """Return whether to flush now. `idle` means that no message follows."""
        return self._since_ms is not None and (idle or now_ms - self._since_ms >= FLUSH_MS)

    def flushed(self) -> None:
        """Record that everything was flushed."""
        self._since_ms = None


class WalAcceptor(Actor[AcceptorInput]):
    """Passes the messages of one connection to the timeline.

    Calls `ended` once, with the error if there is one.
    """

    def __init__(
        self,
        timeline: WalTimeline,
        guard: SlotGuard,
        writer: ActorAddress[WriteAnswer],
        ended: Callable[[PenstockError | None], object],
        queued: QueueMeter,
        settings: Settings,
    ) -> None:
        self._timeline = timeline
        self._guard = guard
        self._writer = writer
        self._ended = ended
        self._queued = queued
        self._gathered: list[Message] = []
        """Messages for the next call to the disk."""
        self._gathered_max = gathered_max(settings)
        self._gathered_bytes = 0
        """Size of the log bytes in them."""
        self._group = GroupFlush()
        """Decides when to flush."""
        self._has_ended = False
        """True once `ended` has been called."""

    async def receive(self, message: AcceptorInput) -> None:
        """Handle one message, or gather it while more are waiting."""
        last = False
        match message:
            case FromProposer(given):
                self._queued.put(given, -1)
                self._gather(given)
            case ReceiverDisconnected():
                last = True
            case _:
                assert_never(message)
        # While more messages wait in the mailbox, gather them for one call to the disk.
        idle = last or not self.ctx.has_waiting
        full = (
            len(self._gathered) >= self._gathered_max or self._gathered_bytes >= GATHERED_BYTES_MAX
        )
        if full or (idle and (self._gathered or self._group.is_pending)):
            await self._process_gathered(idle)
        if last and not self._has_ended:
            self._end(None)

    def _gather(self, given: ProposerMessage) -> None:
        if isinstance(given, AppendRequest):
            self._gathered.append(AppendUnflushed(given))
            self._gathered_bytes += len(given.wal)
            self._group.taken(self.ctx.monotonic_ms())
        else:
            if isinstance(given, ProposerElected):
                # Do this before the announcement is processed: a recovery from a peer must give way
                # to this proposer.
                self._guard.streaming()
            self._gathered.append(given)

    async def _process_gathered(self, idle: bool) -> None:
        """Pass the gathered messages to the timeline, with a flush if one is due."""
        messages, self._gathered, self._gathered_bytes = self._gathered, [], 0
        # Flush in the same call to the disk: a lone append is flushed immediately, and a burst
        # shares one flush.
        if self._group.is_due(self.ctx.monotonic_ms(), idle=idle):
            messages.append(FlushWal())
        done = await self._timeline.process(messages)
        if done.error is None and messages and isinstance(messages[-1], FlushWal):
            self._group.flushed()
        try:
            for reply in done.replies:
                await self._writer.send(WriteAnswer(reply))
        except (ResourceClosed, ConnectionBroken):
            # The writer is gone, but make durable what was taken.
            await self._flush()
            self._end(done.error)
            return
        if done.error is not None:
            # A refusal leaves the timeline working; any other error may have stopped it.
            if isinstance(done.error, WalRefused):
                await self._flush()
            self._end(done.error)

    async def _flush(self) -> None:
        if self._group.is_pending:
            self._group.flushed()
            await self._timeline.process([FlushWal()])

    def _end(self, error: PenstockError | None) -> None:
        self._has_ended = True
        self._ended(error)
        self.ctx.stop()

    def describe(self) -> str:
        """Return how many messages are gathered, and whether all appends are flushed."""
        left = "unflushed appends" if self._group.is_pending else "all flushed"
        return f"{len(self._gathered)} messages gathered, {left}"
