"""The sequencer: one order, no gap, nothing of a displaced connection."""

from __future__ import annotations

from typing import Any

import pytest

from actors.kernel import Address
from actors.protocol.compute import AllowWrites, Hello, Schedule
from actors.protocol.internal import Propose, Sequenced
from actors.protocol.storage_internal import DropDataflow, ForStorage
from actors.sequencer import Order, Sequencer
from actors.testing.isolation import Isolation


def test_indices_have_no_gap_and_displaced_commands_are_dropped() -> None:
    order = Order()
    assert order.propose(Propose(1, Hello("a"))) == Sequenced(0, 1, Hello("a"))
    assert order.propose(Propose(2, Hello("b"))) == Sequenced(1, 2, Hello("b"))
    assert order.propose(Propose(1, AllowWrites())) is None
    assert order.propose(Propose(2, AllowWrites())) == Sequenced(2, 2, AllowWrites())
    assert order.dropped == 1


def test_displacement_on_one_half_drops_nothing_of_the_other() -> None:
    order = Order()
    drop = ForStorage(DropDataflow(("u1",)))
    assert order.propose(Propose(7, Hello("a"))) == Sequenced(0, 7, Hello("a"))
    assert order.propose(Propose(1, drop)) == Sequenced(1, 1, drop)
    assert order.propose(Propose(2, drop)) == Sequenced(2, 2, drop)
    assert order.propose(Propose(7, AllowWrites())) == Sequenced(3, 7, AllowWrites())
    assert order.propose(Propose(1, drop)) is None
    assert order.propose(Propose(6, AllowWrites())) is None
    assert order.dropped == 2


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_every_worker_sees_the_same_order(stage: Isolation, count: int) -> None:
    workers: list[Address[Any]] = []
    sequencer = stage.start(lambda: Sequencer(workers), "sequencer")
    probes = [stage.probe(f"worker-{index}") for index in range(count)]
    workers.extend(probe.address for probe in probes)
    for number in range(20):
        await sequencer.send(Propose(1, Schedule(f"u{number}")))
    for probe in probes:
        for number in range(20):
            await probe.expect(Sequenced, index=number, command=Schedule(f"u{number}"))
        await probe.expect_nothing()


@pytest.mark.parametrize("how", ["stop", "crash"])
async def test_a_worker_that_is_gone_harms_no_other(stage: Isolation, how: str) -> None:
    first, second, third = (stage.probe(name) for name in ("first", "second", "third"))
    sequencer = stage.start(
        lambda: Sequencer([first.address, second.address, third.address]), "sequencer"
    )
    await (second.stop() if how == "stop" else second.crash())
    await sequencer.send(Propose(1, AllowWrites()))
    await first.expect(Sequenced, index=0)
    await third.expect(Sequenced, index=0)


async def test_a_slow_worker_holds_up_the_order_and_loses_nothing(stage: Isolation) -> None:
    """Worker 0 is answered in reserved room whatever it does; the others are waited for."""
    own, slow = stage.probe("own"), stage.probe("slow")
    own.stall()
    slow.stall()
    sequencer = stage.start(lambda: Sequencer([own.address, slow.address]), "sequencer")
    for _ in range(3):
        await sequencer.send(Propose(1, AllowWrites()))
    await own.expect(Sequenced, index=0)
    await own.expect_nothing()
    await slow.expect_nothing()
    assert sequencer.statistics().state == "handles Propose"
    slow.resume()
    for index in range(3):
        await slow.expect(Sequenced, index=index)
    for index in (1, 2):
        await own.expect(Sequenced, index=index)
