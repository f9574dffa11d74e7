"""The sequencer: one order, no gap, nothing of a displaced connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from actors.model.protocol.compute import AllowWrites, Hello, ScheduleDataflow
from actors.model.protocol.internal import ProposeCommand, SequencedCommand
from actors.model.protocol.storage_internal import DropObjects, ForStorage
from actors.replica.cluster.sequencer import CommandOrder, Sequencer
from actors.runtime.kernel import Actor, ActorAddress
from actors.testing.isolation import ActorIsolation


def test_indices_have_no_gap_and_displaced_commands_are_dropped() -> None:
    order = CommandOrder()
    assert order.propose(ProposeCommand(1, Hello("a"))) == SequencedCommand(0, 1, Hello("a"))
    assert order.propose(ProposeCommand(2, Hello("b"))) == SequencedCommand(1, 2, Hello("b"))
    assert order.propose(ProposeCommand(1, AllowWrites())) is None
    assert order.propose(ProposeCommand(2, AllowWrites())) == SequencedCommand(2, 2, AllowWrites())
    assert order.dropped == 1


def test_displacement_on_one_half_drops_nothing_of_the_other() -> None:
    order = CommandOrder()
    drop = ForStorage(DropObjects(("u1",)))
    assert order.propose(ProposeCommand(7, Hello("a"))) == SequencedCommand(0, 7, Hello("a"))
    assert order.propose(ProposeCommand(1, drop)) == SequencedCommand(1, 1, drop)
    assert order.propose(ProposeCommand(2, drop)) == SequencedCommand(2, 2, drop)
    assert order.propose(ProposeCommand(7, AllowWrites())) == SequencedCommand(3, 7, AllowWrites())
    assert order.propose(ProposeCommand(1, drop)) is None
    assert order.propose(ProposeCommand(6, AllowWrites())) is None
    assert order.dropped == 2


class Owner(Actor[ProposeCommand]):
    """Stands for worker 0: it proposes what it is sent."""

    def __init__(self, workers: Sequence[ActorAddress[Any]]) -> None:
        self._sequencer = Sequencer(workers)

    async def receive(self, message: ProposeCommand) -> None:
        await self._sequencer.propose(message)


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_every_worker_sees_the_same_order(stage: ActorIsolation, count: int) -> None:
    workers: list[ActorAddress[Any]] = []
    owner = stage.start(lambda: Owner(workers), "owner")
    probes = [stage.probe(f"worker-{index}") for index in range(count)]
    workers.extend(probe.address for probe in probes)
    for number in range(20):
        await owner.send(ProposeCommand(1, ScheduleDataflow(f"u{number}")))
    wanted = [SequencedCommand(n, 1, ScheduleDataflow(f"u{n}")) for n in range(20)]
    for probe in probes:
        assert [await probe.expect(SequencedCommand) for _ in wanted] == wanted
        await probe.expect_nothing()


@pytest.mark.parametrize("how", ["stop", "crash"])
async def test_a_worker_that_is_gone_harms_no_other(stage: ActorIsolation, how: str) -> None:
    first, second, third = (stage.probe(name) for name in ("first", "second", "third"))
    owner = stage.start(lambda: Owner([first.address, second.address, third.address]), "owner")
    await (second.stop() if how == "stop" else second.crash())
    await owner.send(ProposeCommand(1, AllowWrites()))
    await first.expect(SequencedCommand, index=0)
    await third.expect(SequencedCommand, index=0)
    assert owner.statistics().state == "idle"


async def test_a_slow_worker_holds_up_the_order_and_loses_nothing(stage: ActorIsolation) -> None:
    """Worker 0 is answered in reserved room whatever it does; the others are waited for."""
    own, slow = stage.probe("own"), stage.probe("slow")
    own.stall()
    slow.stall()
    owner = stage.start(lambda: Owner([own.address, slow.address]), "owner")
    for _ in range(3):
        await owner.send(ProposeCommand(1, AllowWrites()))
    await own.expect(SequencedCommand, index=0)
    await own.expect_nothing()
    await slow.expect_nothing()
    assert owner.statistics().state == "handles ProposeCommand"
    slow.resume()
    for index in range(3):
        await slow.expect(SequencedCommand, index=index)
    for index in (1, 2):
        await own.expect(SequencedCommand, index=index)
