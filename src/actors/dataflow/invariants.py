"""Checks the invariants of a dataflow's machine; tests call it after every event. Pure."""

from __future__ import annotations

from actors.dataflow.life import CARRYING
from actors.dataflow.machine import DataflowMachine


def check_machine(machine: DataflowMachine) -> None:
    """Assert the invariants that `machine` names. Raise `AssertionError`."""
    assert (machine.step is not None) == (machine.state in CARRYING), (machine.state, machine.step)
    if machine.hi is not None:
        assert machine.hi > machine.lo
    if machine.step is not None:
        assert machine.step.lo == machine.lo
        assert machine.step.hi == machine.hi
        assert all(time < machine.step.hi for time in machine.step.times)
        assert not (machine.opaque and machine.durable and not machine.in_error) or (
            len(machine.step.times) <= 1 or machine.step.followed
        )
    assert machine.reported is None or machine.reported >= machine.as_of
    for source in machine.sources:
        source.validate()
