"""Actors, their addresses, their supervision policies, and the context in which they run.

An actor handles one message at a time. It reads clocks, draws random numbers, sets timers, spawns
children and runs effects only through its `ActorContext`, so a simulation can replace all of them.
The result of an effect comes back as a message to the actor itself and never waits for room. A
supervision policy says what happens when an actor crashes.
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
    """An actor raised an unexpected error; the text names the types of its last messages."""


class CrashPolicy(msgspec.Struct, frozen=True):
    """The reaction to a crash: ``escalate``, ``stop`` or ``restart`` (see `restart`)."""

    kind: str
    restarts_max: int = 0
    within_ms: int = 0
    delay_ms: int = 0


ESCALATE: Final = CrashPolicy("escalate")
STOP: Final = CrashPolicy("stop")


def restart(restarts_max: int = 5, within_ms: int = 60_000, delay_ms: int = 50) -> CrashPolicy:
    """Return a policy that restarts the actor, at most `restarts_max` times per `within_ms`.

    The first restart comes after `delay_ms`, and the delay doubles each time. Beyond the limit the
    crash escalates.
    """
    return CrashPolicy("restart", restarts_max, within_ms, delay_ms)


# -- actors and their context ----------------------------------------------------------------------

HANDLING: ContextVar[BoundedMailbox[Any] | None] = ContextVar("handling", default=None)
"""Mailbox whose message is being handled. None outside actors, and in effects, because they do not
block their actor."""


def _cycle(asker: BoundedMailbox[Any], asked: BoundedMailbox[Any]) -> str | None:
    """Return the cycle that an ask of `asked` by `asker` would close, as text; None if it closes
    none."""
    ways: list[tuple[BoundedMailbox[Any], ...]] = [(asker, asked)]
    seen: set[BoundedMailbox[Any]] = set()
    while ways:
        way = ways.pop()
        if way[-1] is asker:
            return " → ".join(box.path for box in way)
        if way[-1] not in seen:
            seen.add(way[-1])
            # Only an ask that its target has yet to handle blocks. An answer that was deferred (to
            # an effect or another actor) may come while the target itself waits.
            ways += [(*way, box) for box, reply in way[-1].asking if box.owes_reply(reply)]
    return None


class ActorAddress(Generic[M]):
    """Sends messages to an actor. It is cheap to copy and safe to keep after the actor's end."""

    __slots__ = ("_mailbox",)

    def __init__(self, mailbox: BoundedMailbox[M]) -> None:
        self._mailbox = mailbox

    @property
    def path(self) -> str:
        """Return the actor's path in the tree of actors, for display."""
        return self._mailbox.path

    def __repr__(self) -> str:
        return f"<{self.path}>"

    def send(self, message: M) -> Coroutine[Any, Any, None]:
        """Send a message, waiting for room (backpressure). The result must be awaited.

        Raises `ResourceClosed` if the actor has stopped, `ConnectionBroken` if it has crashed.
        """
        return self._mailbox.send(message)

    def send_nowait(self, message: M) -> None:
        """Send a message if there is room. Raises `WouldBlock`, `ResourceClosed` or
        `ConnectionBroken`."""
        self._mailbox.send_nowait(message)

    @property
    def room(self) -> int:
        """Return how many messages `send_nowait` accepts before the next await."""
        return self._mailbox.room

    def reply(self, message: M) -> bool:
        """Deliver a message that the actor has asked for, such as an answer. Never waits.

        Such messages do not count against the mailbox's bound; the request that asked for them
        does. Returns False if the actor has stopped, which counts the message as unhandled.
        """
        return self._mailbox.deliver(message)

    async def ask(self, make: Callable[[ReplySlot[R]], M], deadline_ms: float | None = None) -> R:
        """Send ``make(reply)`` and wait for the answer.

        Raises the error with which the actor fails the reply, `ActorDead` if the actor stops
        first, `DeadlineExceeded` after `deadline_ms`, and `AskCycle` if the actor itself waits,
        directly or indirectly, for an answer from the asker.
        """
        mailbox = self._mailbox
        asker = HANDLING.get()
        if (
            # An ask can close a cycle only if the target itself waits, or is the asker.
            asker is not None
            and (mailbox.asking or mailbox is asker)
            and (cycle := _cycle(asker, mailbox)) is not None
        ):
            raise AskCycle(f"actors would wait for each other forever: {cycle}")
        reply: ReplySlot[R] = ReplySlot(mailbox.asks)
        # Recorded before the send, because the send may wait as well.
        waits = (mailbox, reply)
        if asker is not None:
            asker.asking = (*asker.asking, waits)
        try:
            if deadline_ms is None:
                await self.send(make(reply))
                return await reply.future
            with anyio.fail_after(deadline_ms / 1000):
                await self.send(make(reply))
                return await reply.future
        except TimeoutError:
            raise DeadlineExceeded(f"{self.path} did not answer in {deadline_ms} ms") from None
        finally:
            reply.forget()
            # Compare by identity: a handler may run several asks at a time, which end in any order.
            if asker is not None:
                asker.asking = tuple(each for each in asker.asking if each is not waits)

    def statistics(self) -> MailboxStatistics:
        """Return the current statistics of the actor's mailbox."""
        return self._mailbox.statistics()


class RunningEffect:
    """A running effect or timer, which can be cancelled."""

    __slots__ = ("_running",)

    def __init__(self, running: anyio.CancelScope | MessageTimer[Any]) -> None:
        self._running = running

    def cancel(self) -> None:
        """Stop it. Its message is not sent."""
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
        """Return the system's clock, also for code to which the actor passes it on."""
        return self._cell.system.clock

    @property
    def random(self) -> random.Random:
        """Return the system's seeded random number generator."""
        return self._cell.system.random

    def now_ms(self) -> int:
        """Return the wall clock time, in milliseconds since the epoch."""
        return self._cell.system.clock.now_ms()

    def monotonic_ms(self) -> float:
        """Return milliseconds that never go back, for measuring durations."""
        return self._cell.system.clock.monotonic_ms()

    @property
    def has_waiting(self) -> bool:
        """Return whether another message waits, so that an actor can decide to batch more work."""
        return self._cell.mailbox.has_waiting

    def spawn(
        self,
        factory: Callable[[], Actor[N]],
        name: str,
        *,
        mailbox: int | None = None,
        policy: CrashPolicy | None = None,
    ) -> ActorAddress[N]:
        """Start a child actor. It is stopped before this actor is.

        `mailbox` is the bound of its mailbox in messages. Raises `ValueError` if `name` is in use.
        """
        return self._cell.system.spawn_below(self._cell, factory, name, mailbox, policy)

    async def stop_child(self, child: ActorAddress[Any]) -> None:
        """Stop a child and wait until it has stopped. Does nothing if it is not a child."""
        await self._cell.stop_child(child)

    def watch(self, other: ActorAddress[Any], message: M) -> None:
        """Deliver `message` here when `other` stops, or now if it has stopped already."""
        self._cell.system.watch(other, self._cell.address, message)

    def actors(self) -> list[ActorStatistics]:
        """Return the statistics of every live actor of the system."""
        return self._cell.system.statistics()

    def stop(self) -> None:
        """Stop this actor after the current message."""
        self._cell.request_stop()

    def after(self, delay_ms: float, message: M) -> RunningEffect:
        """Set a timer that delivers `message` here after `delay_ms`."""
        return RunningEffect(self._cell.after(delay_ms, message))

    def effect(
        self,
        run: Callable[[], Coroutine[Any, Any, T] | Awaitable[T]],
        *,
        done: Callable[[T], M | None],
        failed: Callable[[Exception], M | None] | None = None,
    ) -> RunningEffect:
        """Run a coroutine concurrently with the actor; its result comes back as a message.

        ``done(result)`` or ``failed(error)`` makes the message; None sends nothing. Without
        `failed`, an error crashes the actor. Effects are cancelled when the actor stops.
        """
        return RunningEffect(self._cell.start(run, done, failed))


class Actor(Generic[M]):
    """Base class of actors: one mailbox, one task, no shared mutable state.

    Subclasses implement `receive`. `ctx` is set before `on_start` runs.
    """

    ctx: ActorContext[M]

    async def on_start(self) -> None:
        """Prepare the actor; runs before the first message."""

    def receive(self, message: M) -> Awaitable[None] | None:
        """Handle one message. May be a plain method or an ``async def``."""
        raise NotImplementedError

    async def on_stop(self) -> None:
        """Clean up; runs after the last message, when the children have stopped.

        Does not run after a crash.
        """

    def describe(self) -> str:
        """Describe what the actor is doing, for operators."""
        return ""

    def measures(self) -> Iterable[Measurement]:
        """Return its metrics. Called between two of its turns, once `on_start` has returned."""
        return ()
