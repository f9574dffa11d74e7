"""Passes a proposer's messages to a timeline, with separate actors for reading, appending and
writing.

A connection that pushes a log is a `WalReceiver`. It reads its socket in an effect and passes each
message to its `WalAcceptor`, which passes messages to the timeline and replies to the
`AnswerWriter`. Both have bounded mailboxes, so backpressure reaches the proposer: the writer's
mailbox is full → the acceptor waits → its mailbox is full → the socket is not read. At most
``wal_messages_max`` messages have been read without being in the log.

The acceptor ends before the connection does, so a status that is requested after a disconnect shows
everything that was read. An acceptor that refuses, fails or crashes ends only its own connection,
with an error that says so. When a timeline is stopped, nothing is drained or flushed.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from actors.runtime.errors import (
    ActorDead,
    ConnectionBroken,
    PenstockError,
    ResourceClosed,
    WouldBlock,
)
from actors.runtime.kernel import STOP, Actor, ActorAddress, ReplySlot, RunningEffect
from actors.runtime.metric_table import WAL_RECEIVERS
from actors.runtime.settings import Settings
from actors.runtime.spans import measure
from actors.wal.accepting import (
    AcceptorInput,
    FromProposer,
    QueueMeter,
    ReceiverDisconnected,
    WalAcceptor,
    WriteAnswer,
    waiting_max,
)
from actors.wal.messages import (
    AcceptorMessage,
    AppendResponse,
    ProposerMessage,
)
from actors.wal.registry import ReceiverFeed, SlotGuard
from actors.wal.timeline import WalTimeline

SLOW_MS: Final = 5_000
"""Time in ms that a message waits for room before a warning is logged."""
SAMPLE_MS: Final = 5_000
"""Interval in ms at which a connection's queue is measured."""

log = logging.getLogger("penstock.wal")


class CopyEnd(enum.Enum):
    """The ways in which a peer ends its side of the copy."""

    EOF = "the connection was closed"
    TERMINATE = "the peer sent Terminate"
    DONE = "the peer sent CopyDone"
    FAIL = "the peer sent CopyFail"


class ReceiverConnection(Protocol):
    """The interface that a receiver needs of a connection."""

    @property
    def peer(self) -> str:
        """Return the peer's name, for logs."""
        ...

    async def next_copy(self) -> bytes | CopyEnd:
        """Return the body of the next CopyData, or how the peer ended the copy.

        Raises `ConnectionBroken`, `MalformedFrame`, `FrameTooLarge`.
        """
        ...

    async def send_copy(self, data: bytes) -> None:
        """Send one CopyData, waiting while the peer is slow. Raises `ConnectionBroken`."""
        ...


class MessageCodec(Protocol):
    """One version of the messages: `codec_v3` or `codec_v2`."""

    def decode_proposer(self, data: bytes, /) -> ProposerMessage:
        """Decode a proposer's message. Raises `MalformedFrame`."""
        ...

    def encode_acceptor(self, message: AcceptorMessage, /) -> bytes:
        """Encode an acceptor's message, with its exact length."""
        ...


# -- the writer ------------------------------------------------------------------------------------


class FeedFilled(msgspec.Struct, frozen=True, gc=False):
    """Tells the writer that its feed is not empty."""


class FinishWriting(msgspec.Struct, frozen=True, gc=False):
    """Tells the writer that no message follows."""


WriterMessage: TypeAlias = WriteAnswer | FeedFilled | FinishWriting


class AnswerWriter(Actor[WriterMessage]):
    """Writes replies, and feedback attached to copies of replies."""

    def __init__(
        self,
        wire: ReceiverConnection,
        codec: MessageCodec,
        timeline: WalTimeline,
        failed: Callable[[PenstockError], object],
    ) -> None:
        self._wire = wire
        self._codec = codec
        self._feeds = timeline.feeds
        self._failed = failed
        self._feed: ReceiverFeed | None = None
        """Feedback for this proposer, once the writer has started."""
        self._last: AppendResponse | None = None
        """Last reply to an append."""

    async def on_start(self) -> None:
        """Subscribe to the feedback of consumers."""
        self._feed = self._feeds.open(lambda: self.ctx.self.reply(FeedFilled()))

    async def receive(self, message: WriterMessage) -> None:
        """Handle one message."""
        try:
            match message:
                case WriteAnswer(answer):
                    if isinstance(answer, AppendResponse):
                        self._last = answer
                    await self._send(answer)
                case FeedFilled():
                    assert self._feed is not None, "on_start opens the feed"
                    for feedback in self._feed.take():
                        # Feedback is dropped before the first append has a reply; the next feedback
                        # says more.
                        if self._last is not None:
                            await self._send(replace(self._last, pageserver=feedback))
                case FinishWriting():
                    self.ctx.stop()
                case _:
                    assert_never(message)
        except PenstockError as error:
            self._failed(error)
            self.ctx.stop()

    async def _send(self, answer: AcceptorMessage) -> None:
        await self._wire.send_copy(self._codec.encode_acceptor(answer))

    async def on_stop(self) -> None:
        """Unsubscribe from feedback."""
        if self._feed is not None:
            self._feeds.close(self._feed)


# -- the whole -------------------------------------------------------------------------------------


class ConnectionOutcome(msgspec.Struct, frozen=True, gc=False):
    """How a connection ended: by its peer (`end`), or by `error`, which is ours if
    `from_acceptor`."""

    end: CopyEnd | None = None
    error: PenstockError | None = None
    from_acceptor: bool = False


class _ReadEnded(msgspec.Struct, frozen=True, gc=False):
    end: CopyEnd | None
    error: PenstockError | None = None


class _Slow(msgspec.Struct, frozen=True, gc=False):
    """A message has waited for room for `SLOW_MS`."""


class _Sample(msgspec.Struct, frozen=True, gc=False):
    """Time to measure the queue."""


class _AcceptorEnded(msgspec.Struct, frozen=True, gc=False):
    error: PenstockError | None


class _WriterFailed(msgspec.Struct, frozen=True, gc=False):
    error: PenstockError


class _AcceptorGone(msgspec.Struct, frozen=True, gc=False):
    pass


class _WriterGone(msgspec.Struct, frozen=True, gc=False):
    pass


_ReceiverMessage: TypeAlias = (
    _ReadEnded | _Slow | _Sample | _AcceptorEnded | _WriterFailed | _AcceptorGone | _WriterGone
)


class WalReceiver(Actor[_ReceiverMessage]):
    """One connection of a proposer, from its greeting on. Sets `outcome` when it is over."""

    def __init__(
        self,
        wire: ReceiverConnection,
        codec: MessageCodec,
        timeline: WalTimeline,
        greeting: ProposerMessage,
        outcome: ReplySlot[ConnectionOutcome],
        settings: Settings,
    ) -> None:
        self._wire = wire
        self._codec = codec
        self._timeline = timeline
        self._greeting = greeting
        self._outcome = outcome
        self._settings = settings
        self._queued = QueueMeter()
        """Measures the messages that wait for the acceptor."""
        self._guard: SlotGuard | None = None
        """Slot in the timeline's registry, once started."""
        self._reading: RunningEffect | None = None
        """The effect that reads the socket."""
        self._read: _ReadEnded | None = None
        """How reading has ended, or None."""
        self._ended: _AcceptorEnded | None = None
        """How the acceptor has ended, or None."""
        self._writer_error: PenstockError | None = None
        """Error of the writer, or None."""
        self._gone = {"acceptor": False, "writer": False}
        """Which of the two actors have stopped."""

    async def on_start(self) -> None:
        """Start the chain of actors, and start to read."""
        own, settings = self.ctx.self, self._settings
        self._guard = self._timeline.registry.register(self._wire.peer)
        measure(WAL_RECEIVERS, 1)
        self._writer: ActorAddress[WriterMessage] = self.ctx.spawn(
            lambda: AnswerWriter(
                self._wire, self._codec, self._timeline, lambda e: own.reply(_WriterFailed(e))
            ),
            "writer",
            # The other half of the limit may already have been taken out by the writer.
            mailbox=settings.wal_replies_max // 2,
            policy=STOP,
        )
        guard, writer = self._guard, self._writer
        self._acceptor: ActorAddress[AcceptorInput] = self.ctx.spawn(
            lambda: WalAcceptor(
                self._timeline,
                guard,
                writer,  # type: ignore[arg-type]  # an address accepts what its actor does
                lambda e: own.reply(_AcceptorEnded(e)),
                self._queued,
                settings,
            ),
            "acceptor",
            mailbox=waiting_max(settings),
            policy=STOP,
        )
        self.ctx.watch(self._acceptor, _AcceptorGone())
        self.ctx.watch(self._writer, _WriterGone())
        self._reading = self.ctx.effect(self._read_all, done=lambda ended: ended)
        self.ctx.after(SAMPLE_MS, _Sample())

    # -- reading ---------------------------------------------------------------------------------

    async def _read_all(self) -> _ReadEnded:
        try:
            await self._put(self._greeting)
            while True:
                data = await self._wire.next_copy()
                if isinstance(data, CopyEnd):
                    return _ReadEnded(data)
                await self._put(self._codec.decode_proposer(data))
        except PenstockError as error:
            # Report it instead of raising it: messages read before it must still reach the log.
            return _ReadEnded(None, error)

    async def _put(self, message: ProposerMessage) -> None:
        """Pass a message to the acceptor, waiting for room. Raise `ResourceClosed` or
        `ConnectionBroken`."""
        given = FromProposer(message)
        try:
            self._acceptor.send_nowait(given)
        except WouldBlock:
            began_ms = self.ctx.monotonic_ms()
            slow = self.ctx.after(SLOW_MS, _Slow())
            await self._acceptor.send(given)
            slow.cancel()
            waited_ms = self.ctx.monotonic_ms() - began_ms
            if waited_ms >= SLOW_MS:
                log.warning(
                    "a message of %s waited %.0f ms for room in timeline %s",
                    self._wire.peer,
                    waited_ms,
                    self._timeline.name,
                )
        self._queued.put(message)

    # -- ending ----------------------------------------------------------------------------------

    async def receive(self, message: _ReceiverMessage) -> None:
        """Handle a timer, or the end of a part of the chain."""
        match message:
            case _Slow():
                log.warning(
                    "a message of %s has waited for room in timeline %s for %d ms: the disk "
                    "or the peer is slow",
                    self._wire.peer,
                    self._timeline.name,
                    SLOW_MS,
                )
            case _Sample():  # not in the acceptor, which may be waiting for the disk
                self._queued.sample()
                self.ctx.after(SAMPLE_MS, _Sample())
            case _ReadEnded():
                self._read = message
                self._tell(self._acceptor, ReceiverDisconnected())
            case _AcceptorEnded():
                self._ended = message
            case _WriterFailed(error):
                self._writer_error = error
            case _WriterGone():
                self._gone["writer"] = True
                # Nothing can be answered any more. The acceptor flushes what it has, and drops the
                # rest.
                if not self._gone["acceptor"]:
                    self._stop_reading()
                    self._tell(self._acceptor, ReceiverDisconnected())
            case _AcceptorGone():
                self._gone["acceptor"] = True
                # The acceptor crashed before it could report.
                if self._ended is None:
                    self._ended = _AcceptorEnded(await self._crashed())
                self._stop_reading()
                self._tell(self._writer, FinishWriting())
            case _:
                assert_never(message)
        if all(self._gone.values()):
            self._finish()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def _tell(
        self, address: ActorAddress[AcceptorInput] | ActorAddress[WriterMessage], last: object
    ) -> None:
        """Send the last message to one of the chain's actors, which may have ended."""

        async def tell() -> None:
            with suppress(ResourceClosed, ConnectionBroken):
                await address.send(last)  # type: ignore[arg-type]

        self.ctx.effect(tell, done=lambda _: None)

    async def _crashed(self) -> PenstockError:
        """Return why the acceptor ended without a report."""
        try:
            # Sending to an actor that has ended raises the reason why it ended.
            await self._acceptor.send(ReceiverDisconnected())
        except (ResourceClosed, ConnectionBroken) as error:
            return ActorDead(f"{error}; unanswered messages may have been processed: connect again")
        raise AssertionError("the acceptor has ended")

    def _finish(self) -> None:
        assert self._ended is not None, "the acceptor has ended"
        # Prefer the acceptor's error: those of reader and writer may be its consequences.
        error, ours = self._ended.error, True
        if error is None:
            ours = False
            error = self._writer_error or (self._read.error if self._read else None)
        end = self._read.end if self._read and error is None else None
        log.info(
            "end of the stream of %s: timeline %s, %s: %s",
            self._wire.peer,
            self._timeline.name,
            self._timeline.positions(),
            error if error is not None else end.value if end is not None else "it was stopped",
        )
        self._outcome.set(ConnectionOutcome(end, error, ours and error is not None))
        self.ctx.stop()

    async def on_stop(self) -> None:
        """Release the slot, and report an outcome if there is none yet."""
        self._queued.drain()
        if self._guard is not None:
            self._guard.release()
            measure(WAL_RECEIVERS, -1)
        if not self._outcome.answered:
            self._outcome.set(ConnectionOutcome(error=ResourceClosed("the acceptor was stopped")))

    def describe(self) -> str:
        """Return the peer and the timeline's positions."""
        return f"{self._wire.peer}: {self._timeline.positions()}"
