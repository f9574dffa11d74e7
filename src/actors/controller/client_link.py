"""One client connection's requests and answers, shared by any number of tasks.

Each request has a slot for its answers. No task runs here: whoever waits for an answer and finds
nobody reading reads for all, until its own answer has come; then the next one takes over. So
nothing is read, and the service is held back, while nobody waits. A lost connection is final:
every call raises it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import anyio

from actors.errors import (
    Broken,
    Closed,
    PenstockError,
    RemoteProtocolError,
    from_wire,
    to_wire,
)
from actors.protocol.api import (
    CopyTo,
    Failed,
    Query,
    Read,
    ReadInstead,
    Request,
    Subscribe,
    Unsubscribe,
    WaitFor,
    Write,
)
from actors.settings import Settings

A = TypeVar("A")


class Link(Protocol):
    """A connection to a service, as the client needs it."""

    async def send(self, message: Any, /) -> None:
        """Sends a message, waiting while the service is slow."""
        ...

    def offer(self, messages: Sequence[Any], /) -> int:
        """Sends the first so many of them, without waiting. Raises as `send`, for the first."""
        ...

    async def receive(self) -> Any:
        """The next message. Cancelling it loses nothing."""
        ...

    async def aclose(self) -> None:
        """Ends the connection."""
        ...


class InProcess(Protocol):
    """A service in this process (`actors.Service`)."""

    async def connect_in_process(self) -> Link:
        """A link to it."""
        ...


class Slot:
    """One open request: its answers so far, and an event for the task that waits for them."""

    def __init__(self) -> None:
        self.answers: deque[Any] = deque()
        self.bytes = 0
        self.wake = asyncio.Event()


class Exchange:
    """Requests and answers over a link."""

    def __init__(self, link: Link, settings: Settings) -> None:
        self._link = link
        self._cancel_s = settings.connect_timeout_ms / 1000
        self._numbers = itertools.count(1)
        self._slots: dict[int, Slot] = {}
        self._reading = False
        self.lost: PenstockError | None = None
        """Why the connection is of no use any more."""

    def number(self) -> int:
        """The next request's number."""
        return next(self._numbers)

    async def aclose(self) -> None:
        """Ends the connection. Twice is harmless."""
        self.lose(Closed("the client was closed"))
        await self._link.aclose()

    async def ask(self, request: Request, kind: type[A]) -> A:
        """Sends a request and waits for its one answer."""
        slot = await self.open(request)
        answered = False
        try:
            answer = await self.next_answer(slot)
            answered = True
        finally:
            self.close(request.request)
            if not answered and self.lost is None and isinstance(request, Read | WaitFor):
                await self.cancel(request.request)
        if isinstance(answer, Failed):
            raise from_wire(answer.code, answer.text, answer.determinate)
        if not isinstance(answer, kind):
            raise RemoteProtocolError(
                f"the service answered {type(request).__name__} with {type(answer).__name__}"
            )
        return answer

    async def open(self, request: Request) -> Slot:
        """Sends a request; its answers come by `next_answer` until `close`. Raises why the
        connection is lost."""
        if self.lost is not None:
            raise from_wire(*to_wire(self.lost))
        slot = self._slots[request.request] = Slot()
        try:
            if not self._link.offer((request,)):
                await self._link.send(request)
        except (Broken, Closed) as error:
            self.close(request.request)
            self.lose(error)
            broken = Broken(f"the connection was lost while a request was sent: {error}")
            broken.determinate = not isinstance(request, Write | CopyTo)
            raise broken from None
        except BaseException:
            self.close(request.request)
            if isinstance(request, Subscribe | Read | WaitFor | Query | CopyTo):
                await self.cancel(request.request)
            raise
        return slot

    async def read_instead(self, number: int, slot: Slot) -> ReadInstead | None:
        """Which read answers a query; None: its own answers come, by `next_answer`."""
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
        """No more answers of this request are wanted."""
        self._slots.pop(number, None)

    async def cancel(self, number: int) -> None:
        """Tells the service, without waiting for its answer, which is then ignored. Also when
        the caller itself is being canceled, but not for long."""
        try:
            with anyio.move_on_after(self._cancel_s, shield=True):
                await self._link.send(Unsubscribe(self.number(), number))
        except PenstockError as error:
            self.lose(error)

    async def next_answer(self, slot: Slot) -> Any:
        """The next answer of a request. Whoever waits first reads for all."""
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
                self.lose(error)
            finally:
                self._reading = False
                self._hand_over()
        answer = slot.answers.popleft()
        slot.bytes -= _size(answer)
        return answer

    def _dispatch(self, answer: Any) -> None:
        number = getattr(answer, "request", 0)
        if number == 0 and isinstance(answer, Failed):
            self.lose(from_wire(answer.code, answer.text, answer.determinate))
            return
        slot = self._slots.get(number)
        if slot is not None:
            slot.answers.append(answer)
            slot.bytes += _size(answer)
            slot.wake.set()

    def _hand_over(self) -> None:
        """Those who wait wake, and the first of them takes over the reading."""
        for slot in self._slots.values():
            slot.wake.set()

    def lose(self, error: PenstockError) -> None:
        """The connection is of no use any more; who waits learns of it. The first reason stays."""
        if self.lost is None:
            self.lost = error
        for slot in self._slots.values():
            slot.wake.set()


def _lost_while_waiting(error: PenstockError) -> PenstockError:
    """What a task learns whose request was sent and never answered: it may have happened."""
    if isinstance(error, Closed):
        lost: PenstockError = Closed(str(error))
    elif isinstance(error, Broken):
        lost = Broken(f"the connection was lost before the answer came: {error}")
    else:
        lost = from_wire(*to_wire(error))
    lost.determinate = False
    return lost


def _size(answer: Any) -> int:
    arrow = getattr(answer, "arrow", None)
    return 0 if arrow is None else len(arrow)
