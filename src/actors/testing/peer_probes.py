"""Doubles of an actor's peers: probes that record messages and fail on command.

A `PeerProbe` is an actor that keeps its messages in order until the test expects them. A test can
make it behave as real peers do: it answers asks (`answers`), with an error or never; it is slow
(`stall`: its mailbox is full and senders wait); it stops or crashes. A `PeerProbeFactory` makes the
peers that the actor under test spawns as its own children.

Every expectation first runs all ready callbacks: a message that has not arrived by then never will.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from actors.runtime.errors import PenstockError
from actors.runtime.kernel import STOP, Actor, ActorAddress, ActorSystem

if TYPE_CHECKING:
    from actors.testing.isolation import ActorIsolation

T = TypeVar("T")


class PeerCrashed(Exception):
    """The error with which a probe crashes on command."""


class _Crash(msgspec.Struct, frozen=True):
    text: str


class MessageMatch:
    """Matches messages of a kind with given field values; see `match`."""

    def __init__(self, kind: type[Any], fields: dict[str, Any]) -> None:
        self.kind = kind
        self.fields = fields

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.fields.items())
        return f"{self.kind.__name__}({fields}…)" if fields else self.kind.__name__

    def why_not(self, message: Any) -> str | None:
        """Return why a message does not match; None if it does."""
        if not isinstance(message, self.kind):
            return f"expected {self!r}, got {message!r}"
        for name, wanted in self.fields.items():
            found = getattr(message, name)
            if not same(found, wanted):
                return f"{name} is {found!r}, expected {wanted!r}, in {message!r}"
        return None


def match(kind: type[Any], **fields: Any) -> MessageMatch:
    """Return a matcher, for `expect_all`, of any message of the kind with these field values."""
    return MessageMatch(kind, fields)


def same(found: Any, wanted: Any) -> bool:
    """Return whether values are equal; errors are equal if their types and texts are."""
    if isinstance(wanted, BaseException):
        return type(found) is type(wanted) and str(found) == str(wanted)
    return bool(found == wanted)


class PeerProbe(Actor[Any]):
    """A probe in place of an actor's peer, made by `ActorIsolation.probe` or by a
    `PeerProbeFactory`."""

    address: ActorAddress[Any]
    """Its address, once it was spawned."""

    def __init__(self, stage: ActorIsolation, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.args = args
        """Arguments with which the actor under test made it (only from a `PeerProbeFactory`)."""
        self.received: deque[Any] = deque()
        """Messages that the test has not expected yet, in order."""
        self.stopped = False
        """True once it has stopped or crashed."""
        self._stage = stage
        self._plays: list[tuple[type[Any], Callable[[Any], object]]] = []
        """Actions to run with each message of a kind, the latest set first."""
        self._system: ActorSystem = stage.system

    def start_in(self, system: ActorSystem, mailbox: int | None) -> None:
        """Spawn it as a root actor; its death does not affect other actors."""
        self.address = system.spawn(lambda: self, self.name, mailbox=mailbox, policy=STOP)

    # -- as an actor -----------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Record its address."""
        self.address = self.ctx.self

    def receive(self, message: Any) -> None:
        """Keep the message, and run the action set for its kind."""
        if isinstance(message, _Crash):
            self.stopped = True
            raise PeerCrashed(message.text)
        self.received.append(message)
        for kind, action in self._plays:
            if isinstance(message, kind):
                action(message)
                return

    async def on_stop(self) -> None:
        """Record its end."""
        self.stopped = True

    def describe(self) -> str:
        """Return a text with the kinds of the messages not yet expected."""
        kinds = ", ".join(type(message).__name__ for message in self.received)
        return f"a probe; not yet expected: {kinds}" if kinds else "a probe"

    # -- its messages ----------------------------------------------------------------------------

    async def expect(self, kind: type[T], **fields: Any) -> T:
        """Return the next message, which must be a `kind` with these field values.

        Raises `AssertionError` with the message that came instead, or with what every actor waits
        for.
        """
        wanted = MessageMatch(kind, fields)
        await self._stage.idle()
        if not self.received:
            raise self._stage.failed(f"{self.name}: expected {wanted!r}, got nothing")
        why = wanted.why_not(self.received[0])
        if why is not None:
            raise AssertionError(f"{self.name}: {why}")
        found: T = self.received.popleft()
        return found

    async def expect_all(self, *wanted: Any) -> list[Any]:
        """Return the next messages, as many as are given, in any order. Each argument is a message
        or a `match`.

        They are returned in the order of the arguments. Raises `AssertionError`.
        """
        await self._stage.idle()
        if len(self.received) < len(wanted):
            have = list(self.received)
            raise self._stage.failed(f"{self.name}: expected {list(wanted)!r}, got only {have!r}")
        head = [self.received[index] for index in range(len(wanted))]
        order = _assigned(wanted, head)
        if order is None:
            raise AssertionError(
                f"{self.name}: expected {list(wanted)!r} in any order, got {head!r}"
            )
        for _ in wanted:
            self.received.popleft()
        return [head[index] for index in order]

    async def pick(self, kind: type[T], **fields: Any) -> T:
        """Return the first matching message at any position; earlier messages stay.

        Raises `AssertionError`.
        """
        wanted = MessageMatch(kind, fields)
        await self._stage.idle()
        for index, message in enumerate(self.received):
            if wanted.why_not(message) is None:
                del self.received[index]
                found: T = message
                return found
        raise self._stage.failed(
            f"{self.name}: expected {wanted!r} among {list(self.received)!r}, it is not there"
        )

    async def expect_nothing(self) -> None:
        """Assert that no unexpected message has come after everything has run. No time passes.
        Raises `AssertionError`."""
        await self._stage.idle()
        if self.received:
            raise AssertionError(f"{self.name}: expected nothing, got {list(self.received)!r}")

    # -- its behaviour ---------------------------------------------------------------------------

    def answers(self, kind: type[Any], answer: Any) -> None:
        """Answer later messages of the kind through their field ``reply``: with a value, with an
        error (a `PenstockError`), or with the result of a function of the message. By default such
        messages are never answered. The latest call for a kind takes precedence."""
        self.set_action(kind, lambda message: _answer(message, answer))

    def set_action(self, kind: type[Any], action: Callable[[Any], object]) -> None:
        """Run `action` with each later message of the kind, in addition to keeping it. The latest
        call for a kind takes precedence."""
        self._plays.insert(0, (kind, action))

    def stall(self) -> None:
        """Make its mailbox full: `send` waits, `send_nowait` raises `WouldBlock`; answers still
        arrive."""
        self._set_limit(0)

    def resume(self) -> None:
        """Accept messages again; those that waited come first."""
        self._set_limit(self._limit)

    def _set_limit(self, limit: int) -> None:
        mailbox = self.address._mailbox
        if mailbox.limit:
            self._limit = mailbox.limit
        mailbox.limit = limit
        mailbox._rebound()
        mailbox._grant()

    async def crash(self, text: str = "told to crash") -> None:
        """Crash: askers get `ActorDead`, watchers are notified, later sends raise."""
        self.address.reply(_Crash(text))
        await self._stage.idle()

    async def stop(self) -> None:
        """Stop regularly, and wait until it has stopped."""
        cell = self._system.cells.get(self.address.path)
        if cell is not None and cell.address is self.address:
            cell.request_stop()
            await cell.stopped.wait()
            await self._stage.idle()


class PeerProbeFactory:
    """Replaces a factory of actors: it makes probes, and records them in order."""

    def __init__(self, stage: ActorIsolation, role: str) -> None:
        self.role = role
        self.made: list[PeerProbe] = []
        """All probes, in the order in which they were made."""
        self._stage = stage
        self._expected = 0
        """Number of probes that the test has expected so far."""

    def __call__(self, *args: Any) -> PeerProbe:
        """Make a probe when the actor under test makes a child."""
        made = PeerProbe(self._stage, f"{self.role} {len(self.made)}", args)
        self.made.append(made)
        return made

    @property
    def running(self) -> list[PeerProbe]:
        """Return the probes that have started and not stopped."""
        return [probe for probe in self.made if hasattr(probe, "address") and not probe.stopped]

    async def expect(self) -> PeerProbe:
        """Return the next probe made. Raises `AssertionError` if there is none after everything has
        run."""
        await self._stage.idle()
        if len(self.made) <= self._expected:
            raise self._stage.failed(f"expected a {self.role} to be created, but none was")
        self._expected += 1
        return self.made[self._expected - 1]

    async def expect_none(self) -> None:
        """Assert that no more probes were made. Raises `AssertionError`."""
        await self._stage.idle()
        more = self.made[self._expected :]
        if more:
            raise AssertionError(
                f"expected no further {self.role}: one was created with {more[0].args!r}"
            )


def _answer(message: Any, answer: Any) -> None:
    try:
        given = answer(message) if callable(answer) else answer
    except PenstockError as error:
        given = error
    if isinstance(given, PenstockError):
        message.reply.fail(given)
    else:
        message.reply.set(given)


def _assigned(wanted: Sequence[Any], found: Sequence[Any]) -> list[int] | None:
    """Return, for each of `wanted`, the index of a matching message in `found`, without duplicates;
    None if there is no such assignment."""

    def fits(index: int, place: int) -> bool:
        each = wanted[index]
        if isinstance(each, MessageMatch):
            return each.why_not(found[place]) is None
        return same(found[place], each)

    def search(taken: list[int]) -> list[int] | None:
        if len(taken) == len(wanted):
            return taken
        for place in range(len(found)):
            if place not in taken and fits(len(taken), place):
                whole = search([*taken, place])
                if whole is not None:
                    return whole
        return None

    return search([])
