"""Actors under a system: asks, effects, timers, supervision, shutdown."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from actors.runtime.errors import ActorDead, DeadlineExceeded, InvalidUsage
from actors.runtime.kernel import (
    STOP,
    Actor,
    ActorAddress,
    ActorCrashed,
    ActorSystem,
    ReplySlot,
    restart,
)
from actors.testing.patience import PATIENCE_MS, PATIENCE_S


class Ask(msgspec.Struct, frozen=True):
    number: int
    reply: Any


class Fail(msgspec.Struct, frozen=True):
    text: str


class Computed(msgspec.Struct, frozen=True):
    number: int
    reply: Any


class Doubler(Actor[Ask | Fail | Computed]):
    """Doubles; odd numbers through an effect; 13 is never answered."""

    starts = 0

    async def on_start(self) -> None:
        Doubler.starts += 1

    async def receive(self, message: Ask | Fail | Computed) -> None:
        match message:
            case Ask(13):
                pass
            case Ask(number, reply) if number < 0:
                reply.fail(InvalidUsage(f"{number} is negative"))
            case Ask(number, reply) if number % 2:

                async def later() -> int:
                    await anyio.lowlevel.checkpoint()
                    return number * 2

                self.ctx.effect(later, done=lambda result: Computed(result, reply))
            case Ask(number, reply):
                reply.set(number * 2)
            case Computed(number, reply):
                reply.set(number)
            case Fail(text):
                raise ValueError(text)


async def ask(address: ActorAddress[Any], number: int, deadline_ms: float = PATIENCE_MS) -> int:
    def make(reply: ReplySlot[int]) -> Ask:
        return Ask(number, reply)

    return await address.ask(make, deadline_ms)


async def test_ask_is_answered_directly_and_through_an_effect() -> None:
    async with ActorSystem() as system:
        doubler = system.spawn(Doubler, "doubler")
        assert await ask(doubler, 2) == 4
        assert await ask(doubler, 3) == 6
        with pytest.raises(InvalidUsage, match="-1 is negative"):
            await ask(doubler, -1)


async def test_ask_has_a_deadline() -> None:
    async with ActorSystem() as system:
        doubler = system.spawn(Doubler, "doubler")
        with pytest.raises(DeadlineExceeded):
            await ask(doubler, 13, deadline_ms=1)  # expires: 13 gets no answer


async def test_a_dead_actor_answers_its_unanswered_asks() -> None:
    async with ActorSystem() as system:
        doubler = system.spawn(Doubler, "doubler", policy=STOP)
        caught: list[ActorDead] = []

        async def asker() -> None:
            try:
                await ask(doubler, 13)
            except ActorDead as error:
                caught.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(asker)
            await anyio.wait_all_tasks_blocked()
            await doubler.send(Fail("KABOOM"))
        assert "KABOOM" in str(caught[0])
        assert not caught[0].determinate
        assert system.failure is None


async def test_a_crash_escalates_with_its_story() -> None:
    with pytest.raises(ActorCrashed, match=r"/doubler failed after \['Fail'\]: ValueError: no"):
        async with ActorSystem() as system:
            doubler = system.spawn(Doubler, "doubler")
            await doubler.send(Fail("no"))
            with anyio.fail_after(PATIENCE_S):
                await system.failed.wait()


async def test_restart_keeps_waiting_messages_and_is_limited() -> None:
    Doubler.starts = 0
    with pytest.raises(ActorCrashed):
        async with ActorSystem() as system:
            policy = restart(restarts_max=2, within_ms=60_000, delay_ms=1)
            doubler = system.spawn(Doubler, "doubler", policy=policy)
            doubler.send_nowait(Fail("one"))
            assert await ask(doubler, 4) == 8
            assert Doubler.starts == 2
            await doubler.send(Fail("two"))
            await doubler.send(Fail("three"))
            with anyio.fail_after(PATIENCE_S):
                await system.failed.wait()


class Parent(Actor[str]):
    """Spawns a child, notes the order of stops."""

    def __init__(self, log: list[str], delay_ms: float) -> None:
        self.log = log
        self.delay_ms = delay_ms

    async def on_start(self) -> None:
        self.child = self.ctx.spawn(lambda: Child(self.log), "child")
        self.ctx.watch(self.child, "child stopped")
        self.ctx.after(self.delay_ms, "tick")

    async def receive(self, message: str) -> None:
        self.log.append(message)
        if message == "stop child":
            await self.ctx.stop_child(self.child)

    async def on_stop(self) -> None:
        self.log.append("parent stopped")


class Child(Actor[str]):
    """Notes its stop."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def receive(self, message: str) -> None:
        self.log.append(message)

    async def on_stop(self) -> None:
        self.log.append("child says bye")


async def test_children_stop_first_watchers_hear_of_it_and_timers_fire() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        parent = system.spawn(lambda: Parent(log, 1), "parent")
        with anyio.fail_after(PATIENCE_S):
            while "tick" not in log:
                await anyio.lowlevel.checkpoint()
        await parent.send("stop child")
        with anyio.fail_after(PATIENCE_S):
            while "child stopped" not in log:
                await anyio.lowlevel.checkpoint()
        assert log == ["tick", "stop child", "child says bye", "child stopped"]
    assert log[-1] == "parent stopped"

    log.clear()
    async with ActorSystem() as system:
        system.spawn(lambda: Parent(log, 60_000), "parent")
        await anyio.wait_all_tasks_blocked()
    assert log == ["child says bye", "parent stopped"]
