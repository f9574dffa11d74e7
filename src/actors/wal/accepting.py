"""Puts the messages of one connection into its timeline, several in one call, and flushes groups.

Part of `actors.wal.receiver`, which describes the whole chain.
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
"""Most messages in one call to the disk; fewer if ``wal_messages_max`` is small."""
FLUSH_MS: Final = 1_000
GATHERED_BYTES_MAX: Final = 1024 * 1024


def gathered_max(settings: Settings) -> int:
    """Return how many messages at most are gathered before they go to the disk."""
    return min(GATHERED_MAX, settings.wal_messages_max // 4)


def waiting_max(settings: Settings) -> int:
    """Return the size of the mailbox, in messages."""
    # The actor takes out as many as the mailbox holds, and gathers some besides.
    return (settings.wal_messages_max - gathered_max(settings)) // 2


class WriteAnswer(msgspec.Struct, frozen=True, gc=False):
    """Passes a reply to the writer."""

    message: AcceptorMessage


class FromProposer(msgspec.Struct, frozen=True, gc=False):
    """Passes a proposer's message to the acceptor."""

    message: ProposerMessage


class ReceiverDisconnected(msgspec.Struct, frozen=True, gc=False):
    """Tells the acceptor that no message follows."""


AcceptorInput: TypeAlias = FromProposer | ReceiverDisconnected


class QueueMeter:
    """Measures the messages that wait for an acceptor, by reports of their sender and their
    taker."""

    def __init__(self) -> None:
        self._count = 0  # the mailbox's depth would lack the messages that its actor took out
        self._bytes = 0

    def put(self, message: ProposerMessage, sign: int = 1) -> None:
        """Count a message that was sent, or (`sign` -1) taken."""
        size = len(message.wal) if isinstance(message, AppendRequest) else 0
        self._add(sign, sign * size)

    def sample(self) -> None:
        """Measure how many messages wait now."""
        measure(WAL_QUEUE_DEPTH, self._count)

    def drain(self) -> None:
        """Count the rest as taken: no task will take it."""
        self._add(-self._count, -self._bytes)

    def _add(self, count: int, size: int) -> None:
        self._count += count
        self._bytes += size
        measure(WAL_QUEUED, count)
        measure(WAL_QUEUE_BYTES, size)


class GroupFlush:
    """Decides when appends that were taken unflushed are flushed: when nothing follows, or when
    the first of them has waited for `FLUSH_MS`."""

    def __init__(self) -> None:
        self._since_ms: float | None = None

    @property
    def is_pending(self) -> bool:
        """Return whether an append was taken and not flushed since."""
        return self._since_ms is not None

    def taken(self, now_ms: float) -> None:
        """Note an append."""
        if self._since_ms is None:
            self._since_ms = now_ms

    def is_due(self, now_ms: float, *, idle: bool) -> bool:
        """Return whether to flush now; `idle`: nothing follows."""
        return self._since_ms is not None and (idle or now_ms - self._since_ms >= FLUSH_MS)

    def flushed(self) -> None:
        """Note a flush of all that was taken."""
        self._since_ms = None


class WalAcceptor(Actor[AcceptorInput]):
    """Puts the messages of one connection into the timeline. Calls `ended` once, with the error if
    any."""

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
        self._gathered_max = gathered_max(settings)
        self._gathered_bytes = 0
        self._group = GroupFlush()
        self._over = False

    async def receive(self, message: AcceptorInput) -> None:
        """Handle one message."""
        last = False
        match message:
            case FromProposer(given):
                self._queued.put(given, -1)
                self._gather(given)
            case ReceiverDisconnected():
                last = True
            case _:
                assert_never(message)
        # While more messages wait in the mailbox they are gathered for one call to the disk.
        idle = last or not self.ctx.has_waiting
        full = (
            len(self._gathered) >= self._gathered_max or self._gathered_bytes >= GATHERED_BYTES_MAX
        )
        if full or (idle and (self._gathered or self._group.is_pending)):
            await self._work(idle)
        if last and not self._over:
            self._end(None)

    def _gather(self, given: ProposerMessage) -> None:
        if isinstance(given, AppendRequest):
            self._gathered.append(AppendUnflushed(given))
            self._gathered_bytes += len(given.wal)
            self._group.taken(self.ctx.monotonic_ms())
        else:
            if isinstance(given, ProposerElected):
                # Before the announcement is processed: a recovery from a peer must give way to this
                # proposer.
                self._guard.streaming()
            self._gathered.append(given)

    async def _work(self, idle: bool) -> None:
        """Put the gathered messages into the timeline, with a flush if one is due."""
        messages, self._gathered, self._gathered_bytes = self._gathered, [], 0
        # In the same call to the disk: a lone append is flushed at once, and a burst shares one
        # flush.
        if self._group.is_due(self.ctx.monotonic_ms(), idle=idle):
            messages.append(FlushWal())
        done = await self._timeline.process(messages)
        if done.error is None and messages and isinstance(messages[-1], FlushWal):
            self._group.flushed()
        try:
            for reply in done.replies:
                await self._writer.send(WriteAnswer(reply))
        except (
            ResourceClosed,
            ConnectionBroken,
        ):  # the writer is gone: what was taken becomes durable
            await self._flush()
            self._end(done.error)
            return
        if done.error is not None:
            # A refusal leaves the timeline at work; any other error may have stopped it.
            if isinstance(done.error, WalRefused):
                await self._flush()
            self._end(done.error)

    async def _flush(self) -> None:
        if self._group.is_pending:
            self._group.flushed()
            await self._timeline.process([FlushWal()])

    def _end(self, error: PenstockError | None) -> None:
        self._over = True
        self._ended(error)
        self.ctx.stop()

    def describe(self) -> str:
        """Return how much is gathered, and whether it is flushed."""
        left = "unflushed appends" if self._group.is_pending else "all flushed"
        return f"{len(self._gathered)} messages gathered, {left}"
