"""The requests and answers of one client connection, shared by any number of tasks.

Each request has a slot for its answers. There is no background task: the first task that waits for
an answer runs the read loop for all until its own answer arrives; then another waiter takes over.
So nothing is read while no task waits, which is the backpressure on the service. A lost connection
is final: every later call raises its error.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import anyio
import msgspec

from actors.model.protocol.api import (
    CatalogStatement,
    CopyTo,
    CreateView,
    DescribeQuery,
    EndRequest,
    ExplainQuery,
    ExplainView,
    ListActors,
    ListSources,
    ReadInstead,
    ReadObject,
    ReadStatus,
    Request,
    RequestDone,
    RequestFailed,
    RunQuery,
    SubscribeChanges,
    SubscribeObject,
    WaitFor,
)
from actors.model.protocol.role_messages import CheckRight, ListRoles, RoleStatement
from actors.runtime.errors import (
    ConnectionBroken,
    PenstockError,
    RemoteProtocolError,
    ResourceClosed,
    SessionEnded,
    from_wire,
    to_wire,
)
from actors.runtime.settings import Settings
from actors.runtime.spans import make_request_context, root_span
from actors.runtime.telemetry import CLIENT_REQUEST, split_context, with_context

if TYPE_CHECKING:
    from actors.control.access.open_sessions import OpenSession, ReadObjects

A = TypeVar("A")


class ServiceLink(Protocol):
    """A connection to a service, as the client uses it."""

    async def send(self, message: Any, /) -> None:
        """Send a message; wait while the connection's buffer is full."""
        ...

    def try_send(self, messages: Sequence[Any], /) -> int:
        """Send as many messages as possible without waiting, and return their number. Raises as
        `send` does, if the first cannot be sent."""
        ...

    async def receive(self) -> Any:
        """Wait for the next message and return it. Cancellation loses no message."""
        ...

    async def aclose(self) -> None:
        """Close the connection."""
        ...


class InProcess(Protocol):
    """A service in this process (`actors.Service`)."""

    async def connect_in_process(self) -> ServiceLink:
        """Open a link to the service."""
        ...


class RequestSlot:
    """The state of one open request."""

    def __init__(self) -> None:
        self.answers: deque[Any] = deque()
        """Answers that were received and not taken yet."""
        self.bytes = 0
        """Bytes of Arrow data in `answers`."""
        self.wake = asyncio.Event()
        """Set when an answer arrives, when the connection is lost, or when this slot's waiter may
        take over the read loop."""


# Subscribes and reads use resources of the service, which it frees when their session is lost.
READ_ONLY: Final = (
    CheckRight,
    DescribeQuery,
    ExplainQuery,
    ExplainView,
    ListActors,
    ListRoles,
    ListSources,
    RunQuery,
    ReadObject,
    ReadStatus,
    SubscribeObject,
    EndRequest,
    WaitFor,
)
"""Requests that change nothing, so a lost one may be sent again."""


class RequestExchange:
    """Matches the answers of a link to its requests."""

    def __init__(self, link: ServiceLink, settings: Settings) -> None:
        self._link = link
        self.session: OpenSession | None = getattr(link, "session", None)
        """The client's session if the service is in this process, else None."""
        self._cancel_s = settings.connect_timeout_ms / 1000
        self._numbers = itertools.count(1)
        self._slots: dict[int, RequestSlot] = {}
        """The open requests by number."""
        self._reading = False
        """True while a task runs the read loop."""
        self.lost: PenstockError | None = None
        """The error that ended the connection; None while it works."""

    def number(self) -> int:
        """Return a new request number."""
        return next(self._numbers)

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        self.fail_all(ResourceClosed("the client was closed"))
        await self._link.aclose()

    async def ask(self, request: Request, kind: type[A], traceparent: str | None = None) -> A:
        """Send a request in a trace context, and return its single answer, which must be a `kind`.
        Raises the service's error."""
        slot = await self.open(request, traceparent)
        answered = False
        try:
            answer = await self.next_answer(slot)
            answered = True
        finally:
            self.close(request.request)
            # Other requests are short, cannot be canceled, or are canceled by their own methods.
            long = isinstance(request, ReadObject | WaitFor) or (
                isinstance(request, CreateView) and request.replace
            )
            if not answered and self.lost is None and long:
                await self.cancel(request.request)
        if isinstance(answer, RequestFailed):
            raise from_wire(answer.code, answer.text, answer.determinate)
        if not isinstance(answer, kind):
            raise RemoteProtocolError(
                f"the service answered {type(request).__name__} with {type(answer).__name__}"
            )
        return answer

    async def submit(self, statement: CatalogStatement | RoleStatement) -> str:
        """Send a statement under a new request number, and return its notices, one per line."""
        number = self.number()
        request = msgspec.structs.replace(statement, request=number)
        if not isinstance(request, CatalogStatement):
            return (await self.ask(request, RequestDone)).text
        with root_span(CLIENT_REQUEST, number, request.name) as opened:
            context = make_request_context(opened)
            return (await self.ask(request, RequestDone, context)).text

    async def open(self, request: Request, traceparent: str | None = None) -> RequestSlot:
        """Send a request in a trace context and return its slot.

        Get its answers with `next_answer`, then call `close`. Raises the error that ended the
        connection.
        """
        if self.lost is not None:
            raise from_wire(*to_wire(self.lost))
        slot = self._slots[request.request] = RequestSlot()
        try:
            message = with_context(request, traceparent)
            if not self._link.try_send((message,)):
                await self._link.send(message)
        except (ConnectionBroken, ResourceClosed) as error:
            self.close(request.request)
            self.fail_all(error)
            if isinstance(self.lost, SessionEnded):
                raise from_wire(*to_wire(self.lost)) from None
            broken = ConnectionBroken(f"connection lost while sending a request: {error}")
            # The entire frame may have been sent before the connection broke.
            broken.determinate = isinstance(request, READ_ONLY)
            raise broken from None
        # A canceled `send` may still write its frame, so tell the service to drop the request.
        except BaseException:
            self.close(request.request)
            if isinstance(request, SubscribeObject | ReadObject | WaitFor | RunQuery | CopyTo):
                await self.cancel(request.request)
            raise
        return slot

    async def read_instead(self, number: int, slot: RequestSlot) -> ReadInstead | None:
        """Return the read that the service asks for in place of a query, or None if the query's own
        answers follow (`next_answer`)."""
        try:
            answer = await self.next_answer(slot)
        except BaseException:
            self.close(number)
            if self.lost is None:
                await self.cancel(number)
            raise
        if isinstance(answer, ReadInstead):
            self.close(number)
            return answer
        slot.answers.appendleft(answer)
        slot.bytes += _size(answer)
        return None

    def close(self, number: int) -> None:
        """Forget a request. Its later answers are dropped."""
        self._slots.pop(number, None)

    async def cancel(self, number: int) -> None:
        """Tell the service to cancel a request, without waiting for its acknowledgement."""
        try:
            # Shielded, because the caller may itself be canceled, and limited, so as not to delay
            # it.
            with anyio.move_on_after(self._cancel_s, shield=True):
                await self._link.send(EndRequest(self.number(), number))
        except PenstockError as error:
            self.fail_all(error)

    async def next_answer(self, slot: RequestSlot) -> Any:
        """Wait for the next answer of a request. The first waiter runs the read loop for all."""
        while not slot.answers:
            if self.lost is not None:
                raise _lost_while_waiting(self.lost)
            if self._reading:
                slot.wake.clear()
                await slot.wake.wait()
                continue
            self._reading = True
            try:
                while not slot.answers and self.lost is None:
                    self._dispatch(await self._link.receive())
            except PenstockError as error:
                self.fail_all(error)
            finally:
                self._reading = False
                # Even after an error or a cancellation, another waiter must take over the loop.
                self._hand_over()
        answer = slot.answers.popleft()
        told = split_context(answer)[0]
        slot.bytes -= _size(told)
        self._check_rights(told)
        return answer

    def _check_rights(self, answer: Any) -> None:
        """Raise `AccessDenied` if the right to read an answer's rows was revoked while it waited
        here."""
        session, reads = self.session, reads_of(answer)
        # The other protocols, whose sessions may act as other roles, check the rights themselves.
        if reads and session is not None and session.door in ("client", ""):
            # Imported here: a client in another process must not load parts of the service.
            from actors.control.access.open_sessions import ReadRights

            rights = ReadRights(session)
            rights.note(reads)
            rights.check()

    def _dispatch(self, received: Any) -> None:
        answer, _ = split_context(received)
        number = getattr(answer, "request", 0)
        if number == 0 and isinstance(answer, RequestFailed):
            # A failure of request 0 means that the service ends the connection.
            self.fail_all(from_wire(answer.code, answer.text, answer.determinate))
            return
        slot = self._slots.get(number)
        # Answers to a closed request are dropped.
        if slot is not None:
            # Changes keep their trace context: a span is opened below it when they are taken.
            slot.answers.append(received if isinstance(answer, SubscribeChanges) else answer)
            slot.bytes += _size(answer)
            slot.wake.set()

    def _hand_over(self) -> None:
        """Wake all waiters, so that one of them takes over the read loop."""
        for slot in self._slots.values():
            slot.wake.set()

    def fail_all(self, error: PenstockError) -> None:
        """Mark the connection as lost and wake all waiters. Only the first error is kept."""
        session = self.session
        # Later errors are consequences of the first.
        if self.lost is None:
            # If the session was ended, that is the cause, and the closed connection a consequence.
            self.lost = error if session is None or session.ended is None else session.ended
        for slot in self._slots.values():
            slot.wake.set()


def _lost_while_waiting(error: PenstockError) -> PenstockError:
    """Return the error for a request that was sent but not answered. It is indeterminate."""
    if isinstance(error, ResourceClosed):
        lost: PenstockError = ResourceClosed(str(error))
    elif isinstance(error, ConnectionBroken):
        lost = ConnectionBroken(f"connection lost before the answer arrived: {error}")
    else:
        lost = from_wire(*to_wire(error))
    lost.determinate = False
    return lost


def reads_of(answer: Any) -> ReadObjects:
    """Return the objects whose rows an answer contains and whose rights can be revoked."""
    return getattr(answer, "reads", ())


def _size(answer: Any) -> int:
    arrow = getattr(answer, "arrow", None)
    return 0 if arrow is None else len(arrow)
