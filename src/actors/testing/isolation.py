"""A stage for one actor: its code is real, all its neighbours are probes, time advances by hand.

Theory of operation. `ActorIsolation` runs a `ActorSystem` on a `VirtualTimeLoop` whose time is
held: it goes on only by `advance`. The actor under test is started with `start`, which returns a
`SubjectActor` to speak to it; its neighbours are probes (`probe`, and `casting` for the children
that it spawns). Every wait of the kit first runs all ready callbacks (`VirtualTimeLoop.idle`): then
either the message has arrived, or it will never come, and the test fails at once with a list of
each actor's wait. Nothing sleeps, no thread and no socket is used, blocking calls run inline.

Rules. An actor's crash that its policy escalates fails the test, unless `expect_crash` consumed it.
A test that awaits anything else for ever ends in `VirtualDeadlock`, which names the same waits.
With ``encoded=True`` every message is encoded and decoded on its way (`actors.testing.encoding`),
so that actors share no objects.

Out of scope: several actors of real code may be started, but their interplay is better left to a
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
    """The actor under test, as a test speaks to it."""

    def __init__(self, stage: ActorIsolation, address: ActorAddress[M]) -> None:
        self._stage = stage
        self.address = address

    def send(self, message: M) -> Coroutine[Any, Any, None]:
        """Send, waiting for room: to be awaited. Raises `ResourceClosed` or `ConnectionBroken`."""
        return self.address.send(message)

    def send_nowait(self, message: M) -> None:
        """Send if there is room. Raises `WouldBlock`, `ResourceClosed` or `ConnectionBroken`."""
        self.address.send_nowait(message)

    def reply(self, message: M) -> bool:
        """Deliver a message in reserved room, as a neighbour that answers the subject's request."""
        return self.address.reply(message)

    def ask(
        self, make: Callable[[ReplySlot[R]], M], deadline_ms: float | None = None
    ) -> Coroutine[Any, Any, R]:
        """Ask and wait for the answer: see `ActorAddress.ask`. A deadline expires only if other
        code advances the time."""
        return self.address.ask(make, deadline_ms)

    async def request(self, make: Callable[[ReplySlot[R]], M]) -> ReplySlot[R]:
        """Ask without waiting; return the slot of the answer, for `ActorIsolation.answer` or
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
        """Return the actor's state, mailbox depth and counts. Raises `AssertionError` when it has
        stopped."""
        cell = self._stage.system.cells.get(self.address.path)
        if cell is None:
            raise AssertionError(f"{self.address.path} has stopped")
        return cell.statistics()


class ActorIsolation:
    """The surroundings of one actor: ``async with Isolation() as stage`` on a `VirtualTimeLoop`.

    The fixture `stage` of `actors.testing.fixtures` is one. `seed` seeds the actors' randomness.
    """

    def __init__(self, *, seed: int = 1, encoded: bool = False) -> None:
        self.clock = VirtualClock()
        self.system = ActorSystem(clock=self.clock, seed=seed)
        if encoded:
            self.system.mailbox_type = EncodedMailbox
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._host: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop.hold_time()
        self._loop.on_deadlock(self.waits)
        # Cancel scopes belong to one task; a fixture begins and ends in two.
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
                f"this test runs on {type(loop).__name__}: take the fixture `stage`, or run it "
                "on a VirtualTimeLoop"
            )
        return loop

    # -- the cast --------------------------------------------------------------------------------

    def start(
        self,
        factory: Callable[[], Actor[M]],
        name: str = "subject",
        *,
        mailbox: int | None = None,
        policy: CrashPolicy | None = None,
    ) -> SubjectActor[M]:
        """Start the actor under test; it runs when the test next waits."""
        return SubjectActor(self, self.system.spawn(factory, name, mailbox=mailbox, policy=policy))

    def probe(self, name: str = "probe", *, mailbox: int | None = None) -> PeerProbe:
        """Start and return a neighbour; its `address` goes to the actor under test."""
        probe = PeerProbe(self, name)
        probe.start_in(self.system, mailbox)
        return probe

    def casting(self, role: str) -> PeerProbeFactory:
        """Return a factory of probes in place of the children that the actor under test spawns."""
        return PeerProbeFactory(self, role)

    # -- time ------------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Return when all ready callbacks have run; no time passes."""
        await self._loop.idle()

    async def advance(self, delay_ms: float) -> None:
        """Let `delay_ms` pass: timers fire in order, each at its time; return when all callbacks
        that this made ready have run."""
        await self._loop.advance(delay_ms)

    def now_ms(self) -> float:
        """Return the virtual milliseconds since the loop's start."""
        return self.clock.monotonic_ms()

    def next_timer_ms(self) -> float | None:
        """Return the milliseconds until the next timer is due; None without one."""
        return self._loop.next_timer_ms()

    # -- answers and ends ------------------------------------------------------------------------

    async def answer(self, reply: ReplySlot[R]) -> R:
        """Return the answer. Raises the error with which the request failed, and `AssertionError`
        if it is unanswered once everything has run."""
        await self.idle()
        if not reply.answered:
            raise self.failed("expected an answer, none came")
        return await reply.wait()

    async def expect_crash(self, kind: type[E]) -> E:
        """Consume and return the error of an actor whose policy escalated its crash, so that it
        does not fail the test. Raises `AssertionError`."""
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
        """Return the first escalated crash that is not yet expected."""
        return self.system.failure

    # -- texts of a failing test -----------------------------------------------------------------

    def waits(self) -> str:
        """Return a text with the state or wait of every live actor."""
        lines = [_line(actor) for actor in self.system.statistics()]
        due = self.next_timer_ms() if self._host is not None else None
        timer = "no timer is set" if due is None else f"the next timer is due in {due:g} ms"
        return "\n  ".join([f"Actors ({timer}):", *lines])

    def failed(self, what: str) -> AssertionError:
        """Return the error of an expectation that was not met."""
        error = AssertionError(f"{what}.\n{self.waits()}")
        error.__cause__ = self.system.failure
        return error


def _line(actor: ActorStatistics) -> str:
    doing = f" ({actor.doing})" if actor.doing else ""
    waiting = f", {actor.depth} of {actor.limit} messages wait" if actor.depth else ""
    senders = f", {actor.senders_waiting} senders wait for room" if actor.senders_waiting else ""
    effects = f", {actor.effects} effects run" if actor.effects else ""
    return f"{actor.path}: {actor.state}{doing}{waiting}{senders}{effects}"
