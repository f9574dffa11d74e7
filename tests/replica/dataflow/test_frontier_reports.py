"""What a dataflow reports of its frontiers: no loop, no clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from test_dataflow_machine import (  # type: ignore[import-not-found]
    answer,
    asks,
    described,
    machine,
    part,
    running,
    updates,
)

from actors.model.protocol.internal import DataflowProgress
from actors.replica.dataflow import events as m
from actors.replica.dataflow.frontier_reports import FrontierReports


def test_frontiers_say_what_is_known_durable_and_installed() -> None:
    made = machine(inputs=2)
    told: list[DataflowProgress] = []
    flow: Any = SimpleNamespace(id="d", export=None)
    worker: Any = SimpleNamespace(reply=told.append)
    reports = FrontierReports(flow, made, (worker,))

    def frontiers() -> tuple[int, int, int]:
        reports.report()
        return told[-1].input, told[-1].write, told[-1].output

    reports.report()
    assert told == [], "nothing is known"
    running(made)
    assert frontiers() == (5, 5, 5)
    made.handle(described(0, 5, 8, part("p", 5, 8)))
    assert frontiers() == (5, 5, 5), "the least of the inputs'"
    (ask,) = asks(made.handle(described(1, 5, 9)))
    assert frontiers() == (8, 5, 5)
    answer(made, ask, updates(6))
    made.handle(described(0, 8, 20))
    made.handle(described(1, 9, 30))
    assert frontiers() == (20, 5, 5)
    made.handle(m.StepComputed(1))
    made.handle(m.StepCommitted(1))
    assert frontiers() == (20, 8, 5)
    made.handle(m.StepInstalled(1))
    assert frontiers() == (20, 8, 8)
    made.handle(m.UpperMismatched(2, 25))  # another replica was first
    assert frontiers() == (20, 25, 8)
    made.handle(m.StageFailed(1, 2, "x", restart=True))
    made.handle(m.RetryDue(1))
    assert frontiers() == (20, 25, 8), "they do not go back"
    assert len(told) == len({(each.input, each.write, each.output) for each in told})


def test_a_step_without_changes_is_reported_when_it_is_done_or_does_not_end() -> None:
    made = running(machine())
    told: list[DataflowProgress] = []
    flow: Any = SimpleNamespace(id="d", export=None)
    worker: Any = SimpleNamespace(reply=told.append)
    reports = FrontierReports(flow, made, (worker, worker))
    reports.report()
    told.clear()

    def event(event: m.Event) -> list[DataflowProgress]:
        number = made.number
        made.handle(event)
        reports.after(event, number)
        news = told[::2]  # both workers hear the same
        assert news == told[1::2]
        told.clear()
        return news

    assert event(described(0, 5, 8)) == event(m.StepCommitted(1)) == []
    assert event(m.StepInstalled(1)) == [DataflowProgress("d", 8, 8, 8)]
    assert event(described(0, 8, 9)) == []
    assert event(described(0, 9, 12)) == [DataflowProgress("d", 8, 12, 8)]
