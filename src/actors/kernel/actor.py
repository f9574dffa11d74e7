"""What an actor is, its address, and the context through which alone it touches the world.

An actor handles one message at a time. It reads clocks, draws randomness, sets timers, spawns
children and runs effects only through `Context`, so that a simulation can replace all of them.
The result of an effect comes back as a message of the actor itself, into reserved room.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from actors.errors import AskCycle, DeadlineExceeded
from actors.kernel.clock import Clock
from actors.kernel.mailbox import Mailbox, MailboxStatistics, Reply

if TYPE_CHECKING:
    from actors.kernel.cell import ActorStatistics, Cell, Timer
    from actors.kernel.policy import Policy

M = TypeVar("M")
N = TypeVar("N")
R = TypeVar("R")
T = TypeVar("T")


HANDLING: ContextVar[Mailbox[Any] | None] = ContextVar("handling", default=None)
"""Whose message is being handled; None beside actors, and in their effects, which keep nobody."""


def _cycle(asker: Mailbox[Any], asked: Mailbox[Any]) -> str | None:
    """The way from `asked` back to `asker`, as text; None when there is none.

    It goes along asks that wait for an actor to come to them or to have handled them: what that
    actor has put off (to an effect, to another) may be answered while it waits itself.
    """
    ways: list[tuple[Mailbox[Any], ...]] = [(asker, asked)]
    seen: set[Mailbox[Any]] = set()
    while ways:
        way = ways.pop()
        if way[-1] is asker:
            return " → ".join(box.path for box in way)
        if way[-1] not in seen:
            seen.add(way[-1])
            ways += [(*way, box) for box, reply in way[-1].asking if box.owes(reply)]
    return None


class Address(Generic[M]):
    """Where to send an actor its messages. Cheap to copy, safe to keep after its death."""

    __slots__ = ("_mailbox",)

    def __init__(self, mailbox: Mailbox[M]) -> None:
        self._mailbox = mailbox

    @property
    def path(self) -> str:
        """Name of the actor in the tree, for people."""
        return self._mailbox.path

    def __repr__(self) -> str:
        return f"<{self.path}>"

    def send(self, message: M) -> Coroutine[Any, Any, None]:
        """Sends, waiting for room: to be awaited. Raises `Closed` or `Broken`."""
        return self._mailbox.send(message)

    def send_nowait(self, message: M) -> None:
        """Sends if there is room. Raises `WouldBlock`, `Closed` or `Broken`."""
        self._mailbox.send_nowait(message)

    def reply(self, message: M) -> bool:
        """Answers an earlier request, in the room that request reserved: never waits.

        False when the actor has stopped (counted there as unhandled).
        """
        return self._mailbox.deliver(message)

    async def ask(self, make: Callable[[Reply[R]], M], deadline_ms: float | None = None) -> R:
        """Sends ``make(reply)`` and waits for the answer.

        Raises what the actor failed the reply with, `ActorDead` when it stops first,
        `DeadlineExceeded`, and `AskCycle` when the actor itself waits, through others or not,
        for an answer of the asker's.
        """
        mailbox = self._mailbox
        asker = HANDLING.get()
        if (
            asker is not None
            and (mailbox.asking or mailbox is asker)
            and (cycle := _cycle(asker, mailbox)) is not None
        ):
            raise AskCycle(f"an ask that can never be answered: {cycle}")
        reply: Reply[R] = Reply(mailbox.asks)
        waits = (mailbox, reply)
        if asker is not None:
            asker.asking = (*asker.asking, waits)
        try:
            if deadline_ms is None:
                await mailbox.send(make(reply))
                return await reply.future
            with anyio.fail_after(deadline_ms / 1000):
                await mailbox.send(make(reply))
                return await reply.future
        except TimeoutError:
            raise DeadlineExceeded(f"{self.path} did not answer in {deadline_ms} ms") from None
        finally:
            reply.forget()
            if asker is not None:
                asker.asking = tuple(each for each in asker.asking if each is not waits)

    def statistics(self) -> MailboxStatistics:
        """The mailbox at this moment."""
        return self._mailbox.statistics()


class Effect:
    """A running effect or timer; cancel it when its result no longer matters."""

    __slots__ = ("_running",)

    def __init__(self, running: anyio.CancelScope | Timer[Any]) -> None:
        self._running = running

    def cancel(self) -> None:
        """Stops it; its result message is not sent."""
        self._running.cancel()


class Context(Generic[M]):
    """An actor's only way to the world."""

    __slots__ = ("_cell",)

    def __init__(self, cell: Cell[M]) -> None:
        self._cell = cell

    @property
    def self(self) -> Address[M]:
        """This actor's own address."""
        return self._cell.address

    @property
    def path(self) -> str:
        """This actor's path."""
        return self._cell.path

    @property
    def clock(self) -> Clock:
        """The clock (also for code below that needs one)."""
        return self._cell.system.clock

    @property
    def random(self) -> random.Random:
        """The system's seeded source of randomness."""
        return self._cell.system.random

    def now_ms(self) -> int:
        """Wall clock in milliseconds since the epoch."""
        return self._cell.system.clock.now_ms()

    def monotonic_ms(self) -> float:
        """Milliseconds that never go back."""
        return self._cell.system.clock.monotonic_ms()

    @property
    def more_waits(self) -> bool:
        """Whether another message follows the one being handled: who does work for many at once
        goes on gathering while there is."""
        return self._cell.mailbox.more_waits

    def spawn(
        self,
        factory: Callable[[], Actor[N]],
        name: str,
        *,
        mailbox: int | None = None,
        policy: Policy | None = None,
    ) -> Address[N]:
        """Starts a child; it is stopped with (before) this actor."""
        return self._cell.system.spawn_below(self._cell, factory, name, mailbox, policy)

    async def stop_child(self, child: Address[Any]) -> None:
        """Stops a child and waits until it has stopped."""
        await self._cell.stop_child(child)

    def watch(self, other: Address[Any], message: M) -> None:
        """Delivers `message` here when `other` stops (at once if it has)."""
        self._cell.system.watch(other, self._cell.address, message)

    def actors(self) -> list[ActorStatistics]:
        """Every live actor of the system."""
        return self._cell.system.statistics()

    def stop(self) -> None:
        """Asks this actor to stop after the current message."""
        self._cell.request_stop()

    def after(self, delay_ms: float, message: M) -> Effect:
        """A timer: delivers `message` here after `delay_ms`."""
        return Effect(self._cell.after(delay_ms, message))

    def effect(
        self,
        run: Callable[[], Coroutine[Any, Any, T] | Awaitable[T]],
        *,
        done: Callable[[T], M | None],
        failed: Callable[[Exception], M | None] | None = None,
    ) -> Effect:
        """Runs a coroutine beside the actor; its result comes back as a message.

        ``done(result)`` (or ``failed(error)``) makes the message; None sends nothing. Without
        `failed` an error crashes the actor. Effects are cancelled when the actor stops.
        """
        return Effect(self._cell.start(run, done, failed))


class Actor(Generic[M]):
    """One mailbox, one task, no shared mutable state. Subclass and write `receive`."""

    ctx: Context[M]

    async def on_start(self) -> None:
        """Runs before the first message."""

    def receive(self, message: M) -> Awaitable[None] | None:
        """Handles one message: a plain method, or an ``async def``."""
        raise NotImplementedError

    async def on_stop(self) -> None:
        """Runs after the last message, children already stopped."""

    def describe(self) -> str:
        """What it is doing or waiting for, for people."""
        return ""
