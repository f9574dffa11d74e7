"""Actors, their addresses and supervision policies, and the context in which an actor runs.

An actor handles one message at a time. It reads clocks, draws randomness, sets timers, spawns
children and runs effects only through `ActorContext`, so that a simulation can replace all of them.
The result of an effect returns as a message of the actor itself, into reserved room. A supervision
policy is the consequence of an actor's crash.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio
import msgspec

from actors.runtime.errors import AskCycle, DeadlineExceeded, PenstockError
from actors.runtime.kernel.clock import ActorClock
from actors.runtime.kernel.mailbox import BoundedMailbox, MailboxStatistics, ReplySlot
from actors.runtime.measurement import Measurement

if TYPE_CHECKING:
    from actors.runtime.kernel.cell import ActorCell, MessageTimer
    from actors.runtime.telemetry import ActorStatistics

M = TypeVar("M")
N = TypeVar("N")
R = TypeVar("R")
T = TypeVar("T")

# -- supervision policies --------------------------------------------------------------------------


class ActorCrashed(PenstockError):
    """An actor failed by its own fault; the text has the types of its last messages."""


class CrashPolicy(msgspec.Struct, frozen=True):
    """The consequence of a crash: ``escalate``, ``stop`` or ``restart``."""

    kind: str
    restarts_max: int = 0
    within_ms: int = 0
    delay_ms: int = 0


ESCALATE: Final = CrashPolicy("escalate")
STOP: Final = CrashPolicy("stop")


def restart(restarts_max: int = 5, within_ms: int = 60_000, delay_ms: int = 50) -> CrashPolicy:
    """Start afresh after `delay_ms` (doubling), at most `restarts_max` times per `within_ms`."""
    return CrashPolicy("restart", restarts_max, within_ms, delay_ms)


# -- actors and their context ----------------------------------------------------------------------

HANDLING: ContextVar[BoundedMailbox[Any] | None] = ContextVar("handling", default=None)
"""Mailbox whose message is being handled; None beside actors, and in effects, which block no
actor."""


def _cycle(asker: BoundedMailbox[Any], asked: BoundedMailbox[Any]) -> str | None:
    """Return the path of asks from `asked` back to `asker`, as text; None when there is none."""
    ways: list[tuple[BoundedMailbox[Any], ...]] = [(asker, asked)]
    seen: set[BoundedMailbox[Any]] = set()
    while ways:
        way = ways.pop()
        if way[-1] is asker:
            return " → ".join(box.path for box in way)
        if way[-1] not in seen:
            seen.add(way[-1])
            # Only asks whose target still has to handle them block: a deferred answer (an effect's,
            # another actor's) may be given while the target itself waits.
            ways += [(*way, box) for box, reply in way[-1].asking if box.owes_reply(reply)]
    return None


class ActorAddress(Generic[M]):
    """Sends messages to an actor. Cheap to copy, safe to keep after its death."""

    __slots__ = ("_mailbox",)

    def __init__(self, mailbox: BoundedMailbox[M]) -> None:
        self._mailbox = mailbox

    @property
    def path(self) -> str:
        """Return the actor's path in the tree, for display."""
        return self._mailbox.path

    def __repr__(self) -> str:
        return f"<{self.path}>"

    def send(self, message: M) -> Coroutine[Any, Any, None]:
        """Send, waiting for room (backpressure): to be awaited. Raises `ResourceClosed` or
        `ConnectionBroken`."""
        return self._mailbox.send(message)

    def send_nowait(self, message: M) -> None:
        """Send if there is room. Raises `WouldBlock`, `ResourceClosed` or `ConnectionBroken`."""
        self._mailbox.send_nowait(message)

    @property
    def room(self) -> int:
        """Return how many messages `send_nowait` takes before the next await."""
        return self._mailbox.room

    def reply(self, message: M) -> bool:
        """Deliver the answer to an earlier request, in the room that it reserved: never waits.

        Returns False when the actor has stopped (counted there as unhandled).
        """
        return self._mailbox.deliver(message)

    async def ask(self, make: Callable[[ReplySlot[R]], M], deadline_ms: float | None = None) -> R:
        """Send ``make(reply)`` and wait for the answer.

        Raises what the actor failed the reply with, `ActorDead` when it stops first,
        `DeadlineExceeded`, and `AskCycle` when the actor itself waits, through others or not, for
        an answer of the asker's.
        """
        mailbox = self._mailbox
        asker = HANDLING.get()
        if (
            # Only while an ask can close a cycle: the target itself waits, or is the asker.
            asker is not None
            and (mailbox.asking or mailbox is asker)
            and (cycle := _cycle(asker, mailbox)) is not None
        ):
            raise AskCycle(f"an ask that can never be answered: {cycle}")
        reply: ReplySlot[R] = ReplySlot(mailbox.asks)
        # Recorded before the send, which may wait for room, too.
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
            # By identity: a handler may run several asks at once, which end in any order.
            if asker is not None:
                asker.asking = tuple(each for each in asker.asking if each is not waits)

    def statistics(self) -> MailboxStatistics:
        """Return the mailbox's statistics at this moment."""
        return self._mailbox.statistics()


class RunningEffect:
    """A running effect or timer, which can be cancelled."""

    __slots__ = ("_running",)

    def __init__(self, running: anyio.CancelScope | MessageTimer[Any]) -> None:
        self._running = running

    def cancel(self) -> None:
        """Stop it; its result message is not sent."""
        self._running.cancel()


class ActorContext(Generic[M]):
    """An actor's only access to its surroundings."""

    __slots__ = ("_cell",)

    def __init__(self, cell: ActorCell[M]) -> None:
        self._cell = cell

    @property
    def self(self) -> ActorAddress[M]:
        """Return this actor's own address."""
        return self._cell.address

    @property
    def path(self) -> str:
        """Return this actor's path."""
        return self._cell.path

    @property
    def clock(self) -> ActorClock:
        """Return the clock (also for code below that needs one)."""
        return self._cell.system.clock

    @property
    def random(self) -> random.Random:
        """Return the system's seeded source of randomness."""
        return self._cell.system.random

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since the epoch."""
        return self._cell.system.clock.now_ms()

    def monotonic_ms(self) -> float:
        """Return monotonic milliseconds."""
        return self._cell.system.clock.monotonic_ms()

    @property
    def has_waiting(self) -> bool:
        """Return whether another message follows the one being handled, so that an actor that
        batches its work may go on gathering."""
        return self._cell.mailbox.has_waiting

    def spawn(
        self,
        factory: Callable[[], Actor[N]],
        name: str,
        *,
        mailbox: int | None = None,
        policy: CrashPolicy | None = None,
    ) -> ActorAddress[N]:
        """Start a child; it is stopped with (before) this actor."""
        return self._cell.system.spawn_below(self._cell, factory, name, mailbox, policy)

    async def stop_child(self, child: ActorAddress[Any]) -> None:
        """Stop a child and wait until it has stopped."""
        await self._cell.stop_child(child)

    def watch(self, other: ActorAddress[Any], message: M) -> None:
        """Deliver `message` here when `other` stops (at once if it has)."""
        self._cell.system.watch(other, self._cell.address, message)

    def actors(self) -> list[ActorStatistics]:
        """Return the statistics of every live actor of the system."""
        return self._cell.system.statistics()

    def stop(self) -> None:
        """Stop this actor after the current message."""
        self._cell.request_stop()

    def after(self, delay_ms: float, message: M) -> RunningEffect:
        """Set a timer: deliver `message` here after `delay_ms`."""
        return RunningEffect(self._cell.after(delay_ms, message))

    def effect(
        self,
        run: Callable[[], Coroutine[Any, Any, T] | Awaitable[T]],
        *,
        done: Callable[[T], M | None],
        failed: Callable[[Exception], M | None] | None = None,
    ) -> RunningEffect:
        """Run a coroutine beside the actor; its result comes back as a message.

        ``done(result)`` (or ``failed(error)``) makes the message; None sends nothing. Without
        `failed` an error crashes the actor. Effects are cancelled when the actor stops.
        """
        return RunningEffect(self._cell.start(run, done, failed))


class Actor(Generic[M]):
    """One mailbox, one task, no shared mutable state. Subclass and write `receive`."""

    ctx: ActorContext[M]

    async def on_start(self) -> None:
        """Run before the first message."""

    def receive(self, message: M) -> Awaitable[None] | None:
        """Handle one message: a plain method, or an ``async def``."""
        raise NotImplementedError

    async def on_stop(self) -> None:
        """Run after the last message, children already stopped."""

    def describe(self) -> str:
        """Return a description of its present work, for operators."""
        return ""

    def measures(self) -> Iterable[Measurement]:
        """Return its metrics. Called between two of its turns, once `on_start` has returned."""
        return ()
