"""Lives of actors: circles of asks, effects that crash their actor, what is left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from actors.runtime.errors import AskCycle, ConnectionBroken, DeadlineExceeded
from actors.runtime.kernel import (
    STOP,
    Actor,
    ActorAddress,
    ActorCrashed,
    ActorSystem,
    ReplySlot,
    restart,
)
from actors.runtime.measurement import Measurement, ValueHistogram
from actors.runtime.metric_table import SESSIONS
from actors.runtime.telemetry import TRACEPARENT, activate_context, deactivate_context
from actors.testing.patience import PATIENCE_S


class Ask(msgspec.Struct, frozen=True):
    reply: ReplySlot[str]


class PutOff(msgspec.Struct, frozen=True):
    """Answered by an effect, when the test says so."""

    reply: ReplySlot[str]


class Go(msgspec.Struct, frozen=True):
    """Asks the other in a handler."""

    reply: ReplySlot[str]
    make: Callable[[ReplySlot[str]], Any] = Ask


class Asker(Actor[Ask | PutOff | Go]):
    """Passes asks on to the next, in its handler."""

    def __init__(self) -> None:
        self.next: ActorAddress[Any] | None = None
        self.release = anyio.Event()

    async def receive(self, message: Ask | PutOff | Go) -> None:
        match message:
            case Ask(reply) if self.next is None:
                reply.set(f"{self.ctx.path} is the last")
            case Ask(reply):
                assert self.next is not None
                await self._pass_on(reply, Ask)
            case Go(reply, make):
                await self._pass_on(reply, make)
            case PutOff(reply):

                async def later() -> None:
                    await self.release.wait()
                    reply.set("put off")

                self.ctx.effect(later, done=lambda _: None)

    async def _pass_on(self, reply: ReplySlot[str], make: Callable[[ReplySlot[str]], Any]) -> None:
        assert self.next is not None
        try:
            answer: str = await self.next.ask(make)
        except (AskCycle, ConnectionBroken) as error:
            reply.fail(error)
        else:
            reply.set(answer)


def asker(system: ActorSystem, name: str) -> tuple[Asker, ActorAddress[Any]]:
    made = Asker()
    return made, system.spawn(lambda: made, name)


async def test_a_circle_of_asks_is_named_and_nobody_hangs() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with ActorSystem() as system:
            (a, to_a), (b, to_b), (c, to_c) = (asker(system, name) for name in "abc")
            a.next, b.next = to_b, to_c
            assert await to_a.ask(Ask) == "/c is the last"
            c.next = to_a
            with pytest.raises(AskCycle, match="/c → /a → /b → /c"):
                await to_a.ask(Ask)
            # They live, and a circle that is no more is none.
            c.next = None
            assert await to_a.ask(Ask) == "/c is the last"
            b.next = to_b
            with pytest.raises(AskCycle, match="/b → /b"):
                await to_a.ask(Ask)


async def test_an_ask_that_waits_in_the_queue_closes_a_circle_too() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with ActorSystem() as system:
            (a, to_a), (b, to_b) = (asker(system, name) for name in "ab")
            a.next, b.next = to_b, to_a
            answers: list[str] = []

            async def ask(to: ActorAddress[Any]) -> None:
                try:
                    answers.append(await to.ask(Ask))
                except AskCycle as error:
                    answers.append(str(error))

            async with anyio.create_task_group() as group:
                group.start_soon(ask, to_a)
                group.start_soon(ask, to_b)
            assert any("actors would wait for each other forever" in answer for answer in answers)


async def test_what_was_put_off_is_no_circle() -> None:
    """b owes a an answer, but does not keep it back while it waits for a."""
    with anyio.fail_after(PATIENCE_S):
        async with ActorSystem() as system:
            (a, to_a), (b, to_b) = (asker(system, name) for name in "ab")
            a.next, b.next = to_b, to_a
            answers: list[str] = []

            async def ask(to: ActorAddress[Any], make: Callable[[ReplySlot[str]], Any]) -> None:
                answers.append(await to.ask(make))

            async with anyio.create_task_group() as group:
                group.start_soon(ask, to_a, lambda reply: Go(reply, PutOff))
                await anyio.wait_all_tasks_blocked()
                group.start_soon(ask, to_b, lambda reply: Go(reply, PutOff))
                await anyio.wait_all_tasks_blocked()
                b.release.set()
                await anyio.wait_all_tasks_blocked()
                a.release.set()
            assert answers == ["put off", "put off"]


class Do(msgspec.Struct, frozen=True):
    what: str


class Odd(Actor[Do]):
    """A handler that never ends, beside an effect that fails."""

    lives = 0

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def on_start(self) -> None:
        Odd.lives += 1

    async def receive(self, message: Do) -> None:
        match message.what:
            case "wait" | "swallow":
                self.ctx.effect(self.failing, done=lambda _: None)
                self.ctx.effect(self.lasting, done=lambda _: None)
                try:
                    await anyio.sleep_forever()
                except asyncio.CancelledError:
                    self.log.append("interrupted")
                    if message.what == "wait":
                        raise
            case other:
                self.log.append(f"{other} in life {Odd.lives}")

    async def failing(self) -> None:
        await anyio.lowlevel.checkpoint()
        raise ValueError("of the effect")

    async def lasting(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self.log.append("effect ended")


@pytest.mark.parametrize("what", ["wait", "swallow"])
async def test_an_effect_that_fails_crashes_its_actor_where_it_stands(what: str) -> None:
    log: list[str] = []
    Odd.lives = 0
    with anyio.fail_after(PATIENCE_S):
        async with ActorSystem() as system:
            to = system.spawn(lambda: Odd(log), "odd", policy=restart(delay_ms=1))
            to.send_nowait(Do(what))
            to.send_nowait(Do("note"))
            while len(log) < 3:
                await anyio.lowlevel.checkpoint()
            assert system.failure is None
    assert log == ["interrupted", "effect ended", "note in life 2"]


async def test_a_crash_by_an_effect_tells_of_the_effect() -> None:
    with pytest.raises(ActorCrashed, match=r"/odd failed after \['Do'\]: ValueError: of the ef"):
        async with ActorSystem() as system:
            to = system.spawn(lambda: Odd([]), "odd")
            to.send_nowait(Do("wait"))
            with anyio.fail_after(PATIENCE_S):
                await system.failed.wait()


async def test_what_nobody_handled_is_counted() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        to = system.spawn(lambda: Odd(log), "odd", policy=STOP)
        for what in ("wait", "one", "two"):
            to.send_nowait(Do(what))
        with anyio.fail_after(PATIENCE_S):
            while system.cells:
                await anyio.lowlevel.checkpoint()
        assert system.unhandled == 2
        with pytest.raises(ConnectionBroken, match="of the effect"):
            await to.send(Do("three"))


class Plain(Actor[Do]):
    """A handler without waits."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []

    def receive(self, message: Do) -> None:
        self.seen.append((message.what, TRACEPARENT.get()))


async def test_a_plain_method_handles_and_sees_the_trace_of_its_message_alone() -> None:
    plain = Plain()
    async with ActorSystem() as system:
        token = activate_context("00-a-b-01")
        to = system.spawn(lambda: plain, "plain")
        to.send_nowait(Do("traced"))
        deactivate_context(token)
        to.send_nowait(Do("bare"))
        await anyio.wait_all_tasks_blocked()
    assert plain.seen == [("traced", "00-a-b-01"), ("bare", None)]


async def test_an_ask_with_a_deadline_leaves_nothing_behind() -> None:
    async with ActorSystem() as system:
        (a, to_a), (b, to_b) = (asker(system, name) for name in "ab")
        a.next = to_b
        with pytest.raises(DeadlineExceeded, match="/b did not answer in 1 ms"):
            await to_b.ask(PutOff, 1)
        assert await to_a.ask(Ask) == "/b is the last"
        del b


async def test_abort_ends_who_does_not_stop() -> None:
    log: list[str] = []
    with anyio.fail_after(PATIENCE_S):
        async with ActorSystem() as system:
            to = system.spawn(lambda: Odd(log), "odd")

            class Deaf(Odd):
                async def receive(self, message: Do) -> None:
                    try:
                        await anyio.sleep_forever()
                    finally:
                        self.log.append("cancelled")

            deaf = system.spawn(lambda: Deaf(log), "deaf")
            deaf.send_nowait(Do("never ends"))
            to.send_nowait(Do("note"))
            await anyio.wait_all_tasks_blocked()
            system.abort()
    assert "cancelled" in log


async def test_a_cancelled_effect_sends_nothing_though_its_wait_was_over() -> None:
    """Cancelling reaches no task whose wait has just ended: it goes on once more."""
    heard: list[str] = []

    class Waiter(Actor[Do]):
        async def on_start(self) -> None:
            self.gate = anyio.Event()
            self.waiting = self.ctx.effect(self.gate.wait, done=lambda _: Do("result"))

        async def receive(self, message: Do) -> None:
            heard.append(message.what)
            if message.what == "cancel":
                self.gate.set()
                self.waiting.cancel()

    with anyio.fail_after(PATIENCE_S):
        async with ActorSystem() as system:
            to = system.spawn(Waiter, "waiter")
            await anyio.wait_all_tasks_blocked()
            to.send_nowait(Do("cancel"))
            await anyio.wait_all_tasks_blocked()
    assert heard == ["cancel"]


class Crash(msgspec.Struct, frozen=True):
    """Whoever gets it fails."""


class Fragile(Actor[Any]):
    async def receive(self, message: Any) -> None:
        match message:
            case Crash():
                raise RuntimeError("it was to fail")
            case Ask(reply):
                reply.set(self.ctx.path)


class Guardian(Actor[Any]):
    """Starts a child and a grandchild in every life."""

    lives = 0

    async def on_start(self) -> None:
        Guardian.lives += 1
        self.child = self.ctx.spawn(Middle, "middle")
        self.ctx.spawn(Fragile, "beside")

    async def receive(self, message: Any) -> None:
        await self.child.send(message)


class Middle(Actor[Any]):
    async def on_start(self) -> None:
        self.child = self.ctx.spawn(Fragile, "low")

    async def receive(self, message: Any) -> None:
        await self.child.send(message)


async def test_a_crash_below_restarts_the_guardian_and_all_that_stands_below_it() -> None:
    Guardian.lives = 0
    async with ActorSystem(seed=1) as system:
        guardian = system.spawn(Guardian, "guardian", policy=restart(delay_ms=1))
        other = system.spawn(Fragile, "other")
        with anyio.fail_after(PATIENCE_S):
            assert await guardian.ask(Ask) == "/guardian/middle/low"
            before = {path: cell.address for path, cell in system.cells.items()}
            await guardian.send(Crash())
            while Guardian.lives < 2:
                await anyio.lowlevel.checkpoint()
            assert await guardian.ask(Ask) == "/guardian/middle/low"
            for path in ("/guardian/middle", "/guardian/middle/low", "/guardian/beside"):
                assert system.cells[path].address is not before[path]
            assert await other.ask(Ask) == "/other"
            assert system.failure is None


async def test_a_guardian_that_crashes_too_often_ends_the_system() -> None:
    Guardian.lives = 0
    with pytest.raises(ActorCrashed, match="/guardian failed"):
        async with ActorSystem(seed=1) as system:
            policy = restart(restarts_max=1, within_ms=60_000, delay_ms=1)
            guardian = system.spawn(Guardian, "guardian", policy=policy)
            with anyio.fail_after(PATIENCE_S):
                for life in (1, 2):
                    while Guardian.lives < life or system.cells["/guardian"].statistics().state != (
                        "idle"
                    ):
                        await anyio.lowlevel.checkpoint()
                    await guardian.send(Crash())
                await system.failed.wait()


async def test_one_root_is_stopped_and_the_others_go_on() -> None:
    async with ActorSystem(seed=1) as system:
        gone, other = system.spawn(Guardian, "gone"), system.spawn(Fragile, "other")
        await system.stop_root(gone)
        assert list(system.cells) == ["/other"]
        assert await other.ask(Ask) == "/other"
        assert await system.spawn(Fragile, "gone").ask(Ask) == "/gone"


class Failure(msgspec.Struct, frozen=True, gc=False):
    """As many messages are: out of the garbage collector's sight."""

    error: Exception


class Large:
    """Something that is worth freeing."""


class Trying(Actor[Do | Failure]):
    """Starts an effect that fails."""

    def __init__(self) -> None:
        self.heard: list[Exception] = []

    def receive(self, message: Do | Failure) -> None:
        if isinstance(message, Failure):
            self.heard.append(message.error)
            return

        async def run() -> None:
            large = Large()
            raise ValueError(large)

        self.ctx.effect(run, done=lambda _: None, failed=Failure)


async def test_an_effect_that_failed_is_freed_with_its_error() -> None:
    trying = Trying()
    async with ActorSystem() as system:
        address = system.spawn(lambda: trying, "trying")
        await address.send(Do("fail"))
        await anyio.wait_all_tasks_blocked()
        assert len(trying.heard) == 1
        trying.heard.clear()
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, Large)]


class Counter(Actor[str]):
    """Reports how many messages it has had, once it has started; "crash" makes it start anew."""

    def __init__(self, may_start: anyio.Event) -> None:
        self._may_start = may_start

    async def on_start(self) -> None:
        await self._may_start.wait()
        self.count = 0

    def receive(self, message: str) -> None:
        self.count += 1
        if message == "crash":
            raise RuntimeError("it was told to")

    def measures(self) -> list[Measurement]:
        return [Measurement(SESSIONS, self.count, ("here",))]


async def test_a_live_actor_reports_its_metrics_from_its_start_to_its_end() -> None:
    may_start = anyio.Event()

    def measured() -> dict[tuple[str, ...], float]:
        return {
            (each.metric.name, *each.labels): each.value
            for each in system.measures()
            if not isinstance(each.value, ValueHistogram)
        }

    with anyio.fail_after(PATIENCE_S):
        async with ActorSystem() as system:
            address = system.spawn(lambda: Counter(may_start), "counter", policy=restart())
            for message in ("one", "two"):
                await address.send(message)
            await anyio.lowlevel.checkpoint()
            # Its own numbers are not made yet, and its mailbox is measured all the same.
            assert measured().get(("penstock.mailbox.depth", "/counter")) == 2
            assert ("penstock.sessions", "here") not in measured()
            may_start.set()
            while measured().get(("penstock.sessions", "here")) != 2:
                await anyio.lowlevel.checkpoint()
            assert measured()["penstock.mailbox.received", "/counter"] == 2
            await address.send("crash")
            while measured().get(("penstock.sessions", "here")) != 0:
                await anyio.lowlevel.checkpoint()
            await system.stop()
            assert measured() == {}
