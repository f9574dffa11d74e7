"""The stage itself: what it sees, what it injects, and how it fails."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from actors.runtime.errors import (
    ActorDead,
    ConnectionBroken,
    DeadlineExceeded,
    InvalidUsage,
    ResourceClosed,
    WouldBlock,
)
from actors.runtime.kernel import STOP, Actor, ActorAddress, ActorCrashed, ReplySlot, restart
from actors.testing.isolation import ActorIsolation
from actors.testing.peer_probes import PeerProbe, match
from actors.testing.virtual_time import VirtualDeadlock, VirtualTimeLoop


class Parcel(msgspec.Struct, frozen=True):
    number: int


class Delivered(msgspec.Struct, frozen=True):
    number: int
    at_ms: int


class Ticked(msgspec.Struct, frozen=True):
    text: str


class Weigh(msgspec.Struct, frozen=True):
    number: int
    reply: ReplySlot[int]


class Gone(msgspec.Struct, frozen=True):
    pass


class Depot(Actor[Any]):
    """Passes parcels on: heavy ones (as the scale says) after a second."""

    def __init__(self, scale: ActorAddress[Any], shop: ActorAddress[Any]) -> None:
        self.scale = scale
        self.shop = shop
        self.doing = "open"

    async def on_start(self) -> None:
        self.ctx.watch(self.scale, Gone())

    async def receive(self, message: Any) -> None:
        match message:
            case Parcel(13):
                raise ValueError("bad luck")
            case Parcel(number):
                try:
                    weight: int = await self.scale.ask(lambda reply: Weigh(number, reply), 500)
                except (
                    ActorDead,
                    ConnectionBroken,
                    ResourceClosed,
                    DeadlineExceeded,
                    InvalidUsage,
                ) as error:
                    await self.shop.send(Ticked(f"{number}: {type(error).__name__}"))
                    return
                self.ctx.after(weight, Ticked(str(number)))
            case Ticked(text):
                await self.shop.send(Delivered(int(text), int(self.ctx.monotonic_ms())))
            case Gone():
                self.doing = "no scale"

    def describe(self) -> str:
        return self.doing


def depot(stage: ActorIsolation, **options: Any) -> tuple[Any, PeerProbe, PeerProbe]:
    scale, shop = stage.probe("scale"), stage.probe("shop")
    return stage.start(lambda: Depot(scale.address, shop.address), "depot", **options), scale, shop


async def test_timers_fire_in_order_each_at_its_time(stage: ActorIsolation) -> None:
    subject, scale, shop = depot(stage)
    scale.answers(Weigh, lambda message: 100 * message.number)
    for number in (3, 1, 2):
        await subject.send(Parcel(number))
    await shop.expect_nothing()
    assert stage.next_timer_ms() == pytest.approx(100)
    await stage.advance(99)
    await shop.expect_nothing()
    await stage.advance(1)
    await shop.expect(Delivered, number=1, at_ms=100)
    await stage.advance(1000)
    assert stage.now_ms() == pytest.approx(1100)
    await shop.expect(Delivered, number=2, at_ms=200)
    await shop.expect(Delivered, number=3, at_ms=300)
    await shop.expect_nothing()


async def test_expectations_in_any_order_and_somewhere(stage: ActorIsolation) -> None:
    probe = stage.probe()
    for number in (1, 2, 3):
        await probe.address.send(Parcel(number))
    await probe.address.send(Ticked("x"))
    with pytest.raises(AssertionError, match="in any order"):
        await probe.expect_all(Parcel(3), Parcel(3))
    assert await probe.expect_all(match(Parcel), Parcel(1)) == [Parcel(2), Parcel(1)]
    assert await probe.pick(Ticked) == Ticked("x")
    with pytest.raises(AssertionError, match="number is 3, expected 4"):
        await probe.expect(Parcel, number=4)
    with pytest.raises(AssertionError, match=r"expected nothing, got \[Parcel\(number=3\)\]"):
        await probe.expect_nothing()
    with pytest.raises(AssertionError, match=r"expected Ticked, got Parcel"):
        await probe.expect(Ticked)
    await probe.expect(Parcel, number=3)
    with pytest.raises(AssertionError, match=r"got only \[\]"):
        await probe.expect_all(Parcel(1))


async def test_what_does_not_come_is_told_with_what_everybody_waits_for(
    stage: ActorIsolation,
) -> None:
    subject, scale, shop = depot(stage)
    await subject.send(Parcel(1))
    with pytest.raises(AssertionError) as failed:
        await shop.expect(Delivered)
    text = str(failed.value)
    assert "shop: expected Delivered, got nothing" in text
    assert "/depot: asks /scale (open)" in text
    assert "/scale: idle (a probe; not yet expected: Weigh)" in text
    assert "the next timer is due in 500 ms" in text
    await scale.expect(Weigh, number=1)


async def test_a_neighbour_answers_with_an_error_or_never(stage: ActorIsolation) -> None:
    subject, scale, shop = depot(stage)
    await subject.send(Parcel(1))
    await stage.advance(500)
    await shop.expect(Ticked, text="1: DeadlineExceeded")
    scale.answers(Weigh, InvalidUsage("too heavy"))
    await subject.send(Parcel(2))
    await shop.expect(Ticked, text="2: InvalidUsage")
    scale.received.clear()
    scale.answers(Weigh, 7)
    await subject.send(Parcel(3))
    await stage.advance(7)
    await shop.expect(Delivered, number=3)
    assert stage.now_ms() == pytest.approx(507), "an error is answered at once"


async def test_a_neighbour_crashes_or_stops(stage: ActorIsolation) -> None:
    subject, scale, shop = depot(stage)
    await subject.send(Parcel(1))
    await scale.expect(Weigh)
    await scale.crash("broken spring")
    await shop.expect(Ticked, text="1: ActorDead")
    assert subject.statistics().doing == "no scale"
    await subject.send(Parcel(2))
    await shop.expect(Ticked, text="2: ConnectionBroken")
    await shop.stop()
    await subject.send(Parcel(3))
    assert isinstance(await stage.expect_crash(ResourceClosed), ResourceClosed)


async def test_a_neighbour_is_slow_to_take(stage: ActorIsolation) -> None:
    subject, scale, shop = depot(stage)
    scale.answers(Weigh, 1)
    shop.stall()
    for number in (1, 2, 3):
        await subject.send(Parcel(number))
    await stage.advance(1)
    assert subject.statistics().state == "handles Ticked"
    assert subject.statistics().depth == 0
    with pytest.raises(WouldBlock):
        shop.address.send_nowait(Parcel(9))
    await shop.expect_nothing()
    assert "1 senders wait for room" in stage.waits()
    shop.resume()
    await shop.expect_all(*(match(Delivered, number=number) for number in (1, 2, 3)))


class Family(Actor[str]):
    """Has children made for it."""

    def __init__(self, make: Any) -> None:
        self.make = make

    async def receive(self, message: str) -> None:
        child = self.ctx.spawn(lambda: self.make(message, 7), message, policy=STOP)
        self.ctx.watch(child, f"{message}-again")


async def test_children_are_probes_too(stage: ActorIsolation) -> None:
    casting = stage.casting("child")
    subject = stage.start(lambda: Family(casting))
    await subject.send("a")
    first = await casting.expect()
    assert first.args == ("a", 7)
    await first.address.send(Parcel(1))
    await first.expect(Parcel)
    await casting.expect_none()
    await first.crash()
    assert (await casting.expect()).args == ("a-again", 7)
    assert [child.args[0] for child in casting.running] == ["a-again"]
    with pytest.raises(AssertionError, match="expected a child to be created"):
        await casting.expect()


async def test_a_crash_is_expected_or_fails_the_test(stage: ActorIsolation) -> None:
    subject, *_ = depot(stage)
    with pytest.raises(AssertionError, match="nothing crashed"):
        await stage.expect_crash(ValueError)
    await subject.send(Parcel(13))
    error = await stage.expect_crash(ValueError)
    assert str(error) == "bad luck"
    assert not subject.running
    with pytest.raises(AssertionError, match="/depot has stopped"):
        subject.statistics()


def run(body: Any) -> None:
    anyio.run(body, backend_options={"loop_factory": VirtualTimeLoop})


def test_an_unexpected_crash_fails_the_test() -> None:
    async def body() -> None:
        async with ActorIsolation() as stage:
            subject, _, shop = depot(stage)
            await subject.send(Parcel(13))
            with pytest.raises(AssertionError) as failed:
                await shop.expect(Delivered)
            assert isinstance(failed.value.__cause__, ActorCrashed)

    with pytest.raises(ActorCrashed, match="bad luck"):
        run(body)


def test_a_test_that_waits_for_ever_is_told_what_everybody_waits_for() -> None:
    async def body() -> None:
        async with ActorIsolation() as stage:
            subject, _, _ = depot(stage)
            await subject.send(Parcel(1))
            await anyio.sleep_forever()

    with pytest.raises(VirtualDeadlock, match=r"(?s)500 ms, but time is held.*/depot: asks /scale"):
        run(body)


async def test_a_restart_waits_for_its_backoff(stage: ActorIsolation) -> None:
    subject, scale, shop = depot(stage, policy=restart(delay_ms=50))
    scale.answers(Weigh, 0)
    await subject.send(Parcel(13))
    await subject.send(Parcel(1))
    await shop.expect_nothing()
    assert subject.statistics().state == "restarts"
    await stage.advance(50)
    await shop.expect(Delivered, number=1)


async def test_an_ask_of_the_tests_own(stage: ActorIsolation) -> None:
    scale = stage.probe("scale")
    subject = stage.start(lambda: Depot(scale.address, scale.address))
    reply: ReplySlot[int] = await subject.request(lambda slot: Weigh(1, slot))
    with pytest.raises(AssertionError, match="expected an answer, but none came"):
        await stage.answer(reply)
    await subject.stop()
    with pytest.raises(ActorDead):
        await stage.answer(reply)


def test_a_stage_needs_virtual_time() -> None:
    async def body() -> None:
        async with ActorIsolation():
            raise AssertionError("never")

    with pytest.raises(TypeError, match="use the fixture `stage`"):
        anyio.run(body)


async def test_other_tests_keep_their_loop() -> None:
    import asyncio

    assert not isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
