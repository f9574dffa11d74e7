"""A stage for one actor: its code is real, all its peers are probes, and time advances by hand.

Theory of operation. `ActorIsolation` runs an `ActorSystem` on a `VirtualTimeLoop` whose time is
held: it advances only by `advance`. `start` starts the actor under test and returns a
`SubjectActor` to talk to it. Its peers are probes (`probe`, and `casting` for the children that it
spawns). Every wait of the kit first runs all ready callbacks (`VirtualTimeLoop.idle`): then either
the message has arrived, or it never will, and the test fails immediately with a list of what each
actor waits for. Nothing sleeps, no thread and no socket is used, and blocking calls run inline.

Rules. An actor's crash that its policy escalates fails the test, unless `expect_crash` consumes it.
A test that waits forever for anything else ends in `VirtualDeadlock`, with the same list. With
``encoded=True`` every message is encoded and decoded on its way (`actors.testing.encoding`), so
that actors share no objects.

Out of scope: several real actors may be started, but their interplay is better tested by a
simulation of the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from actors.runtime.kernel import (
    Actor,
    ActorAddress,
    ActorCrashed,
    ActorStatistics,
    ActorSystem,
    CrashPolicy,
    ReplySlot,
)
from actors.testing.encoding import EncodedMailbox
from actors.testing.peer_probes import PeerProbe, PeerProbeFactory
from actors.testing.virtual_time import VirtualClock, VirtualTimeLoop

M = TypeVar("M")
R = TypeVar("R")
E = TypeVar("E", bound=BaseException)


class SubjectActor(Generic[M]):
    """The actor under test, as a test talks to it."""

    def __init__(self, stage: ActorIsolation, address: ActorAddress[M]) -> None:
        self._stage = stage
        self.address = address

    def send(self, message: M) -> Coroutine[Any, Any, None]:
        """Send, waiting for room; must be awaited. Raises `ResourceClosed` or
        `ConnectionBroken`."""
        return self.address.send(message)

    def send_nowait(self, message: M) -> None:
        """Send if there is room. Raises `WouldBlock`, `ResourceClosed` or `ConnectionBroken`."""
        self.address.send_nowait(message)

    def reply(self, message: M) -> bool:
        """Deliver a message in reserved room, like a peer that answers the subject's request."""
        return self.address.reply(message)

    def ask(
        self, make: Callable[[ReplySlot[R]], M], deadline_ms: float | None = None
    ) -> Coroutine[Any, Any, R]:
        """Ask and wait for the answer: see `ActorAddress.ask`. A deadline expires only if other
        code advances the time."""
        return self.address.ask(make, deadline_ms)

    async def request(self, make: Callable[[ReplySlot[R]], M]) -> ReplySlot[R]:
        """Ask without waiting. Return the slot of the answer, for `ActorIsolation.answer` or
        `answered`."""
        reply: ReplySlot[R] = ReplySlot(self.address._mailbox.asks)
        await self.address.send(make(reply))
        return reply

    async def stop(self) -> None:
        """Stop the actor as its supervisor does, and wait until it has stopped."""
        cell = self._stage.system.cells.get(self.address.path)
        if cell is not None:
            cell.request_stop()
            await cell.stopped.wait()

    @property
    def running(self) -> bool:
        """Return whether the actor is alive."""
        return self.address.path in self._stage.system.cells

    def statistics(self) -> ActorStatistics:
        """Return the actor's state, mailbox depth and counts. Raises `AssertionError` if it has
        stopped."""
        cell = self._stage.system.cells.get(self.address.path)
        if cell is None:
            raise AssertionError(f"{self.address.path} has stopped")
        return cell.statistics()


class ActorIsolation:
    """The environment of one actor: ``async with ActorIsolation() as stage`` on a
    `VirtualTimeLoop`.

    The fixture `stage` of `actors.testing.fixtures` is one. `seed` seeds the actors' randomness.
    """

    def __init__(self, *, seed: int = 1, encoded: bool = False) -> None:
        self.clock = VirtualClock()
        self.system = ActorSystem(clock=self.clock, seed=seed)
        if encoded:
            self.system.mailbox_type = EncodedMailbox
        self._begun = asyncio.Event()
        """Set once the actor system runs."""
        self._over = asyncio.Event()
        """Set when the block is left, to end the actor system."""
        self._host: asyncio.Task[None] | None = None
        """The task in which the actor system runs."""

    async def __aenter__(self) -> Self:
        self._loop.hold_time()
        self._loop.on_deadlock(self.waits)
        # A cancel scope belongs to one task, but a fixture is entered and left in two.
        self._host = asyncio.get_running_loop().create_task(self._run())
        await self._begun.wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._host is not None, "it was entered"
        self._loop.release_time()
        self._over.set()
        await self._host

    async def _run(self) -> None:
        async with self.system:
            self._begun.set()
            await self._over.wait()

    @property
    def _loop(self) -> VirtualTimeLoop:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualTimeLoop):
            raise TypeError(
                f"this test runs on {type(loop).__name__}: use the fixture `stage`, or run it "
                "on a VirtualTimeLoop"
            )
        return loop

    # -- actors -----------------------------------------------------------------------------------

    def start(
        self,
        factory: Callable[[], Actor[M]],
        name: str = "subject",
        *,
        mailbox: int | None = None,
        policy: CrashPolicy | None = None,
    ) -> SubjectActor[M]:
        """Start the actor under test. It runs when the test next waits."""
        return SubjectActor(self, self.system.spawn(factory, name, mailbox=mailbox, policy=policy))

    def probe(self, name: str = "probe", *, mailbox: int | None = None) -> PeerProbe:
        """Start and return a peer, whose `address` to pass to the actor under test."""
        probe = PeerProbe(self, name)
        probe.start_in(self.system, mailbox)
        return probe

    def casting(self, role: str) -> PeerProbeFactory:
        """Return a factory of probes to use instead of the children that the actor under test
        spawns."""
        return PeerProbeFactory(self, role)

    # -- time ------------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Return when all ready callbacks have run. No time passes."""
        await self._loop.idle()

    async def advance(self, delay_ms: float) -> None:
        """Let `delay_ms` pass: timers fire in order, each at its time. Return when all callbacks
        that become ready have run."""
        await self._loop.advance(delay_ms)

    def now_ms(self) -> float:
        """Return the virtual milliseconds since the loop's start."""
        return self.clock.monotonic_ms()

    def next_timer_ms(self) -> float | None:
        """Return the milliseconds until the next timer fires; None without a timer."""
        return self._loop.next_timer_ms()

    # -- answers and ends ------------------------------------------------------------------------

    async def answer(self, reply: ReplySlot[R]) -> R:
        """Return the answer. Raises the error with which the request failed, and `AssertionError`
        if there is no answer after everything has run."""
        await self.idle()
        if not reply.answered:
            raise self.failed("expected an answer, but none came")
        return await reply.wait()

    async def expect_crash(self, kind: type[E]) -> E:
        """Return and consume the error of an actor whose policy escalated its crash, so that the
        crash does not fail the test. Raises `AssertionError` if there is none."""
        await self.idle()
        system = self.system
        found, system.failure = system.failure, None
        cause, system._failure_cause = system._failure_cause, None
        if found is None:
            raise self.failed(f"expected a crash by {kind.__name__}, nothing crashed")
        if not isinstance(cause, kind):
            raise AssertionError(f"expected a crash by {kind.__name__}: {found}") from cause
        return cause

    @property
    def crash(self) -> ActorCrashed | None:
        """Return the first escalated crash that was not consumed yet."""
        return self.system.failure

    # -- texts of a failing test -----------------------------------------------------------------

    def waits(self) -> str:
        """Return a text with the state or wait of every live actor."""
        lines = [_line(actor) for actor in self.system.statistics()]
        due = self.next_timer_ms() if self._host is not None else None
        timer = "no timer is set" if due is None else f"the next timer is due in {due:g} ms"
        return "\n  ".join([f"Actors ({timer}):", *lines])

    def failed(self, what: str) -> AssertionError:
        """Return the error for an expectation that was not met."""
        error = AssertionError(f"{what}.\n{self.waits()}")
        error.__cause__ = self.system.failure
        return error


def _line(actor: ActorStatistics) -> str:
    doing = f" ({actor.doing})" if actor.doing else ""
    waiting = f", {actor.depth} of {actor.limit} messages wait" if actor.depth else ""
    senders = f", {actor.senders_waiting} senders wait for room" if actor.senders_waiting else ""
    effects = f", {actor.effects} effects run" if actor.effects else ""
    return f"{actor.path}: {actor.state}{doing}{waiting}{senders}{effects}"
