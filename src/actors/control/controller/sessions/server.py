"""The client listener, and one session actor for each connection.

A session sends Welcomed, then reads one request at a time and passes it to the controller. Answers
arrive in any order and are written one at a time. At most `requests_in_flight_max` requests may be
open (`ResourceBusy` beyond that). A peer that breaks the protocol gets one `RequestFailed` with
request 0, then its connection is closed. The controller watches each session and ends its requests
when it stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeGuard, assert_never

import anyio
import msgspec

from actors.control.access.open_sessions import OpenSession, OpenSessions, SessionDoor
from actors.control.controller.messages import BARE_ANSWER_BYTES, BytesDelivered, SubmitRequest
from actors.control.controller.sessions.memory_link import MemoryConnection, pair
from actors.model.protocol.api import (
    PROTOCOL_VERSION,
    Answer,
    ClientHello,
    ClientMessage,
    CopyFromProgress,
    CopyProgressed,
    CreateView,
    DescribeQuery,
    EndRequest,
    ExplainQuery,
    ReadContents,
    Request,
    RequestFailed,
    RunQuery,
    ServiceHello,
    ServiceMessage,
    SubscribeChanges,
    SubscribeObject,
    Traced,
    objects_of,
)
from actors.runtime.errors import (
    ConnectionBroken,
    IncompatibleVersion,
    InvalidUsage,
    LocalProtocolError,
    PenstockError,
    ProtocolError,
    RemoteProtocolError,
    ResourceBusy,
    ResourceClosed,
    SessionEnded,
    to_wire,
)
from actors.runtime.kernel import STOP, Actor, ActorAddress, ReplySlot, RunningEffect
from actors.runtime.measurement import Measurement
from actors.runtime.settings import Settings
from actors.runtime.spans import OpenSpan, begin_request, span_below, use_context
from actors.runtime.telemetry import (
    SESSION_CHANGES,
    SESSION_REQUEST,
    TRACEPARENT,
    split_context,
    with_context,
)
from actors.runtime.transport.connection import TransportListener

log = logging.getLogger("penstock.sessions")

SERVICE_NAME: Final = "penstock"


class SessionConnection(Protocol):
    """A connection as a session needs it, over a socket or in memory."""

    @property
    def peer(self) -> str:
        """Return the other side's address, for display."""
        ...

    async def send(self, message: Any, /) -> None:
        """Send a message, waiting while the peer is slow."""
        ...

    def try_send(self, messages: Sequence[Any], /) -> int:
        """Send as many of the first messages as possible without waiting, and return their
        number."""
        ...

    async def receive(self) -> Any:
        """Return the next message."""
        ...

    async def aclose(self) -> None:
        """Close the connection."""
        ...


class _MessageReceived(msgspec.Struct, frozen=True, gc=False):
    message: ClientMessage
    traceparent: str | None


class _ReadFailed(msgspec.Struct, frozen=True, gc=False):
    error: PenstockError


class _AnswerWritten(msgspec.Struct, frozen=True, gc=False):
    answer: ServiceMessage


class _WriteFailed(msgspec.Struct, frozen=True, gc=False):
    answer: ServiceMessage
    error: PenstockError


class _WelcomeTimedOut(msgspec.Struct, frozen=True, gc=False):
    """The client did not send Welcome in time."""


class _EndNow(msgspec.Struct, frozen=True, gc=False):
    """The session must end, though its client did not ask for it."""

    error: SessionEnded


class _CancelAll(msgspec.Struct, frozen=True, gc=False):
    """Everything that runs for the client must be canceled."""


_SessionMessage: TypeAlias = (
    _MessageReceived
    | _ReadFailed
    | _AnswerWritten
    | _WriteFailed
    | _WelcomeTimedOut
    | _EndNow
    | _CancelAll
    | Answer
)


class ClientSession(Actor[_SessionMessage]):
    """One client connection."""

    def __init__(
        self,
        connection: SessionConnection,
        controller: ActorAddress[Any],
        settings: Settings,
        opened: OpenSession,
    ) -> None:
        self._connection = connection
        self._opened = opened
        self._controller = controller
        self._settings = settings
        self._welcomed = False
        """True once the client has sent Welcome."""
        self._open: dict[int, float] = {}
        """Open requests by number, with the time at which each was read; 0 if its duration is not
        counted."""
        self._refused: dict[int, RequestFailed] = {}
        """Open requests that the controller was told to end, with the answers to give then."""
        self._spans: dict[int, OpenSpan] = {}
        """Spans of open requests that are traced."""
        self._out: deque[tuple[ServiceMessage, str | None]] = deque()
        """Answers to write, in order, each with its trace context."""
        self._out_bytes = 0
        """Total size of `_out`."""
        self._writing = False
        """True while an answer is being written."""
        self._reading: RunningEffect | None = None
        """The effect that reads requests; None before the first read."""
        self._turn = asyncio.Event()
        """Set when the next request may be read."""
        self._expecting = False
        """True while a request may be read and none has arrived."""
        self._ending = False
        """True once the session has begun to end: no more requests are read."""
        self._last_error: SessionEnded | None = None
        """Error that ends the session once its open requests are answered."""

    async def on_start(self) -> None:
        self._opened.path = self.ctx.path
        self.ctx.after(self._settings.connect_timeout_ms, _WelcomeTimedOut())
        self._read()

    async def on_stop(self) -> None:
        for number in list(self._spans):
            self._end_span(number, "the connection ended first")
        await self._connection.aclose()

    async def receive(self, message: _SessionMessage) -> None:
        match message:
            case _MessageReceived(got, traceparent):
                self._expecting = False
                await self._handle(got, traceparent)
                self._read()
            case _ReadFailed(error):
                self._reading = None
                self._read_failed(error)
            case _AnswerWritten(answer):
                self._writing = False
                self._out_bytes -= _size(answer)
                if _is_one_of_many(answer):
                    # Backpressure: the controller sends the next one only after this one was
                    # written.
                    await self._delivered(answer.request, _size(answer))
                self._write()
                self._read()
            case _WriteFailed(answer, error):
                self._writing = False
                self._out_bytes -= _size(answer)
                await self._write_failed(answer, error)
            case _EndNow(error) if self._opened.answer_first and self._open:
                self._last_error = error
            case _EndNow(error):
                self._drop_rows()
                # A client that reads nothing must not delay it.
                if self._writing:
                    self.ctx.stop()
                else:
                    self._end(error)
            case _CancelAll():
                for number in self._open:
                    # No client uses a negative number, so `_answer` drops the answer to it.
                    await self._submit(EndRequest(-number, number))
            case _WelcomeTimedOut():
                if not self._welcomed and not self._ending:
                    self._end(RemoteProtocolError("no Welcome received in time"))
            case _:
                self._answer(message)

    # -- reading -------------------------------------------------------------------------------

    def _read(self) -> None:
        """Let the next request arrive, unless too much is waiting to be written."""
        # Backpressure: a client that does not read its answers cannot send more requests.
        full = self._out_bytes > self._settings.frame_bytes_max
        if self._expecting or self._ending or full:
            return
        self._expecting = True
        self._turn.set()
        if self._reading is None:
            self._reading = self.ctx.effect(
                self._receive_all,
                done=lambda _: None,
                failed=lambda error: _ReadFailed(_peer_error(error)),
            )

    async def _receive_all(self) -> None:
        """Receive one request at a time, each once `_turn` is set."""
        while True:
            await self._turn.wait()
            self._turn.clear()
            self.ctx.self.reply(_MessageReceived(*split_context(await self._connection.receive())))

    def _read_failed(self, error: PenstockError) -> None:
        if isinstance(error, ProtocolError):
            log.warning("%s broke the protocol: %s", self._connection.peer, error)
            self._end(error)
        elif isinstance(error, ResourceBusy):
            self._end(error)
        else:
            self.ctx.stop()

    async def _handle(self, message: ClientMessage, traceparent: str | None) -> None:
        if isinstance(message, ClientHello):
            self._welcome(message)
            return
        if not self._welcomed:
            self._end(RemoteProtocolError("the first frame of a connection must be Welcome"))
            return
        number = message.request
        if number in self._open or number <= 0:
            self._end(
                RemoteProtocolError(
                    f"invalid request number {number}: it is in use, or not greater than zero"
                )
            )
            return
        limit = self._settings.requests_in_flight_max
        # A client at its limit must still be able to cancel.
        if len(self._open) >= limit and not isinstance(message, EndRequest):
            busy = ResourceBusy(
                f"too many open requests on this connection: {limit} (requests_in_flight_max)"
            )
            self._push(RequestFailed(number, *to_wire(busy)))
            return
        # A subscribe lasts as long as its client wishes.
        counts = self._opened.door == "client" and not isinstance(message, SubscribeObject)
        self._open[number] = self._opened.clock_ms() if counts else 0.0
        self._note_begin(message)
        opened = self._begin_span(message, traceparent)
        with use_context(None if opened is None else opened.traceparent):
            await self._submit(message)

    def _note_begin(self, request: Request) -> None:
        """Show a request as the running statement, unless the listener shows its own."""
        opened = self._opened
        opened.requests += 1
        # A listener knows the statement; this is only one of the requests that it consists of.
        if opened.door == "client":
            opened.begin(_text_of(request))

    async def _submit(self, request: Request) -> None:
        """Send a request to the controller, or answer it if the controller has stopped."""
        try:
            await self._controller.send(
                SubmitRequest(
                    self.ctx.self, request, self._connection.peer, self._opened.role, self._opened
                )
            )
        except (ResourceClosed, ConnectionBroken) as error:
            self._answer(RequestFailed(request.request, *to_wire(error)))

    def _begin_span(self, request: Request, traceparent: str | None) -> OpenSpan | None:
        if not isinstance(request, Traced):
            return None
        opened = begin_request(SESSION_REQUEST, traceparent=traceparent)
        if opened is not None:
            opened.describe(request.request, objects_of(request), self.ctx.path)
            if isinstance(request, SubscribeObject):
                opened.end()  # a subscribe does not end; its changes have their own traces
            else:
                self._spans[request.request] = opened
        return opened

    def _end_span(self, number: int, error: str = "") -> None:
        opened = self._spans.pop(number, None)
        if opened is not None:
            if error:
                opened.fail(error)
            opened.end()

    def _welcome(self, message: ClientHello) -> None:
        if self._welcomed:
            self._end(RemoteProtocolError("Welcome may be sent only once, as the first frame"))
        elif message.version != PROTOCOL_VERSION:
            text = f"the client speaks version {message.version}, the service {PROTOCOL_VERSION}"
            self._end(IncompatibleVersion(text))
        else:
            self._welcomed = True
            self._push(ServiceHello(PROTOCOL_VERSION, SERVICE_NAME))

    # -- writing -------------------------------------------------------------------------------

    def _answer(self, answer: Answer) -> None:
        if answer.request in self._refused:
            return
        # Clients use positive numbers. This answers the session's own `EndRequest`, after
        # everything that the controller sends for the refused request.
        if answer.request < 0:
            refused = self._refused.pop(-answer.request, None)
            if refused is None:
                return
            answer = refused
        traceparent = None
        if isinstance(answer, SubscribeChanges):
            traceparent = self._sign(answer)
        elif not _is_one_of_many(answer):
            self._count(answer)
            if self._opened.door == "client" and not self._open:
                self._opened.begin("")
            if self._spans:
                failure = (
                    f"{answer.code}: {answer.text}" if isinstance(answer, RequestFailed) else ""
                )
                self._end_span(answer.request, failure)
        self._push(answer, traceparent)
        if self._last_error is not None and not self._open:
            self._end(self._last_error)

    def _count(self, answer: Answer) -> None:
        """Count a request that its last answer ends; a door counts its own statements."""
        began_ms = self._open.pop(answer.request, 0.0)
        if began_ms:
            self._opened.answered(began_ms)
        if isinstance(answer, RequestFailed) and self._opened.door == "client":
            self._opened.statistics.errors[answer.code] += 1

    def _sign(self, changes: SubscribeChanges) -> str | None:
        """Return the trace context of this session's span for the changes."""
        with span_below(TRACEPARENT.get(), SESSION_CHANGES) as opened:
            if opened is None:
                return None
            lower, upper, size = changes.lower, changes.upper, _size(changes)
            opened.describe(self.ctx.path, changes.request, lower, upper, size)
            return opened.traceparent

    def _push(self, message: ServiceMessage, traceparent: str | None = None) -> None:
        self._out.append((message, traceparent))
        self._out_bytes += _size(message)
        self._write()

    def _write(self) -> None:
        if self._writing:
            return
        self._write_at_once()
        if not self._out:
            if self._ending:
                self.ctx.stop()
            return
        answer, traceparent = self._out.popleft()
        self._writing = True
        self.ctx.effect(
            lambda: self._connection.send(with_context(answer, traceparent)),
            done=lambda _: _AnswerWritten(answer),
            failed=lambda error: _WriteFailed(answer, _peer_error(error)),
        )

    def _write_at_once(self) -> None:
        """Write the first answers that the connection accepts without waiting and that need no
        `BytesDelivered`."""
        bare = 0
        while bare < len(self._out) and not _is_one_of_many(self._out[bare][0]):
            bare += 1
        if not bare:
            return
        try:
            count = self._connection.try_send([self._out[number][0] for number in range(bare)])
        except PenstockError:
            return  # the effect of `_write` will meet the same error and handle it
        for _ in range(count):
            self._out_bytes -= _size(self._out.popleft()[0])

    async def _write_failed(self, answer: ServiceMessage, error: PenstockError) -> None:
        if not isinstance(error, LocalProtocolError) or isinstance(
            answer, ServiceHello | RequestFailed
        ):
            self.ctx.stop()
            return
        # Nothing of the answer was sent, and the connection still works: only this request fails.
        refused = InvalidUsage(f"the answer is too large: {error}")
        failed = RequestFailed(answer.request, *to_wire(refused))
        if _is_one_of_many(answer):
            # The controller has more and waits for this answer's delivery: tell it to end the
            # request.
            self._refused[answer.request] = failed
            self._drop_waiting(answer.request)
            await self._submit(EndRequest(-answer.request, answer.request))
            self._write()
        else:
            self._push(failed)

    def _drop_rows(self) -> None:
        """Remove all waiting answers: the client lost its right to them with its session."""
        self._out.clear()
        self._out_bytes = 0

    def _drop_waiting(self, request: int) -> None:
        """Remove a request's waiting answers, which would be wrong without the one before them."""
        kept = [
            (each, traceparent)
            for each, traceparent in self._out
            if isinstance(each, ServiceHello) or each.request != request
        ]
        self._out_bytes = sum(_size(each) for each, _ in kept)
        self._out = deque(kept)

    async def _delivered(self, request: int, size: int) -> None:
        try:
            await self._controller.send(BytesDelivered(self.ctx.path, request, size))
        except (ResourceClosed, ConnectionBroken):
            self.ctx.stop()

    def _end(self, error: PenstockError) -> None:
        """Send the peer its error, and close the connection after that was written."""
        self._ending = True
        self._push(RequestFailed(0, *to_wire(error)))

    def describe(self) -> str:
        return (
            f"{self._connection.peer}: {len(self._open)} requests open, {len(self._out)} answers "
            f"({self._out_bytes} bytes) to write"
        )


def _is_one_of_many(
    answer: ServiceMessage,
) -> TypeGuard[SubscribeChanges | ReadContents | CopyProgressed | CopyFromProgress]:
    """Return whether the controller waits for `BytesDelivered` before it sends the next answer."""
    if isinstance(answer, ReadContents):
        return answer.more
    return isinstance(answer, SubscribeChanges | CopyProgressed | CopyFromProgress)


def _size(message: ServiceMessage) -> int:
    if isinstance(message, ReadContents | SubscribeChanges) and message.arrow is not None:
        return len(message.arrow)
    return BARE_ANSWER_BYTES


def _text_of(request: Request) -> str:
    """Return a request as readable text, without its rows and options."""
    if isinstance(request, RunQuery | DescribeQuery | ExplainQuery | CreateView):
        return request.sql
    named = objects_of(request) if isinstance(request, Traced) else ""
    return f"{type(request).__name__} {named}".rstrip()


def _peer_error(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    return ConnectionBroken(f"{type(error).__name__}: {error}")


class ConnectionAccepted(msgspec.Struct, frozen=True, gc=False):
    """A connection was accepted. `ended` is called when its session has stopped."""

    connection: SessionConnection
    ended: Callable[[], Any]


class ConnectInProcess(msgspec.Struct, frozen=True, gc=False):
    """A client in this process wants a connection; answered with its end of it."""

    reply: ReplySlot[MemoryConnection[Any, Any]]
    role: str | None = None
    """Role of all its requests; None if it is trusted."""
    opened: OpenSession | None = None
    """The session, if a listener has opened and will end it; None to open one here."""
    door: SessionDoor = "client"
    """Listener of a session that is opened here."""


class _SessionEnded(msgspec.Struct, frozen=True, gc=False):
    ended: Callable[[], Any]


class _ListenerEnded(msgspec.Struct, frozen=True, gc=False):
    """The listener was closed."""


_ServerMessage: TypeAlias = ConnectionAccepted | ConnectInProcess | _SessionEnded | _ListenerEnded


class ApiServer(Actor[_ServerMessage]):
    """Accepts clients. `listener` is already bound; None to serve only clients in this process."""

    def __init__(
        self,
        listener: TransportListener | None,
        controller: ActorAddress[Any],
        settings: Settings,
        sessions: OpenSessions,
    ) -> None:
        self._sessions = sessions
        self._listener = listener
        self._controller = controller
        self._settings = settings
        self._accepted = 0
        """Number of clients accepted so far."""

    async def on_start(self) -> None:
        listener = self._listener
        if listener is not None:
            self.ctx.effect(lambda: listener.serve(self._converse), done=lambda _: _ListenerEnded())

    async def on_stop(self) -> None:
        if self._listener is not None:
            await self._listener.aclose()

    async def _converse(self, connection: Any) -> None:
        """Start a session and return when it has stopped: the listener's task keeps the
        connection."""
        ended = anyio.Event()
        await self.ctx.self.send(ConnectionAccepted(connection, ended.set))
        await ended.wait()

    async def receive(self, message: _ServerMessage) -> None:
        match message:
            case ConnectionAccepted(connection, ended):
                opened = self._sessions.open("client", None, connection.peer)
                self._start(connection, ended, opened, own=True)
            case ConnectInProcess(reply, role, given, door):
                mine, theirs = pair(self._settings.requests_in_flight_max)
                mine.session = given or self._sessions.open(door, role, theirs.peer)
                self._start(theirs, lambda: None, mine.session, own=given is None)
                reply.set(mine)
            case _SessionEnded(ended):
                ended()
            case _ListenerEnded():
                log.info("the client listener is closed")
            case _:
                assert_never(message)

    def _start(
        self,
        connection: SessionConnection,
        ended: Callable[[], Any],
        opened: OpenSession,
        *,
        own: bool,
    ) -> None:
        """Start a session on a connection. `own` means that the session was opened here and is
        closed here."""
        self._accepted += 1
        session = self.ctx.spawn(
            lambda: ClientSession(connection, self._controller, self._settings, opened),
            f"session-{self._accepted}",
            # A session cannot outlive its connection, so it is never restarted.
            policy=STOP,
        )
        # Whoever opened the session is notified: it has the client's connection.
        if own:
            opened.on_end = lambda error: session.reply(_EndNow(error))
            opened.on_cancel = lambda: session.reply(_CancelAll())

        def closed() -> None:
            if own:
                opened.close()
            ended()

        self.ctx.watch(session, _SessionEnded(closed))

    def measures(self) -> Iterator[Measurement]:
        return self._sessions.measures()

    def describe(self) -> str:
        where = "in process" if self._listener is None else f"{self._listener.address}"
        return f"{where}; {self._accepted} clients so far"
