"""The sequencer: one order, no gap, nothing of a displaced connection."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from actors.kernel import Address, System
from actors.protocol.compute import AllowWrites, Hello, Schedule
from actors.protocol.internal import Propose, Sequenced
from actors.sequencer import Order, Sequencer
from actors.testing.probe import Probe, settle


def test_indices_have_no_gap_and_displaced_commands_are_dropped() -> None:
    order = Order()
    assert order.propose(Propose(1, Hello("a"))) == Sequenced(0, 1, Hello("a"))
    assert order.propose(Propose(2, Hello("b"))) == Sequenced(1, 2, Hello("b"))
    assert order.propose(Propose(1, AllowWrites())) is None
    assert order.propose(Propose(2, AllowWrites())) == Sequenced(2, 2, AllowWrites())
    assert order.dropped == 1


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_every_worker_sees_the_same_order(count: int) -> None:
    with anyio.fail_after(20):
        async with System(seed=1) as system:
            workers: list[Address[Any]] = []
            sequencer = system.spawn(lambda: Sequencer(workers), "sequencer")
            probes = [Probe.start(system, f"worker-{index}") for index in range(count)]
            workers.extend(probe.address for probe in probes)
            for number in range(20):
                await sequencer.send(Propose(1, Schedule(f"u{number}")))
            for probe in probes:
                for number in range(20):
                    await probe.expect(Sequenced, index=number, command=Schedule(f"u{number}"))


async def test_a_worker_that_has_stopped_harms_no_other() -> None:
    with anyio.fail_after(20):
        async with System(seed=1) as system:
            first, second = Probe.start(system, "first"), Probe.start(system, "second")
            sequencer = system.spawn(
                lambda: Sequencer([first.address, second.address]), "sequencer"
            )
            await settle()
            second.ctx.stop()
            await settle()
            assert "/second" not in system.cells
            await sequencer.send(Propose(1, AllowWrites()))
            await first.expect(Sequenced, index=0)
