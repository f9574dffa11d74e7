"""A source lives by its table (`protocol_tables`)."""

from __future__ import annotations

import pytest
from storage_house import (  # type: ignore[import-not-found]
    Room,
    drop,
    of,
    run,
    source,
)

from actors.model.protocol.storage_internal import ResumeState
from actors.replica.storage import events as e
from protocol_tables import SOURCE as SOURCE_LIFE  # type: ignore[import-not-found]

SOURCE = source("u1", "a")
WAYS: dict[str, list[str]] = {
    "absent": [],
    "looked up": ["Run"],
    "running": ["Run", "look-up answered"],
    "stalled": ["Run", "look-up answered", "task failed"],
    "stopping": ["Run", "look-up answered", "dropped"],
}


class Life:
    """One source on its one worker."""

    def __init__(self) -> None:
        self.room = Room()
        self.room.connect("a")
        self.ticket = 0

    def state(self) -> str:
        state = self.room.state
        state.validate()
        tasks = state.tasks
        if state.desired.get("u1") is None:
            return "stopping" if tasks.stopping else "absent"
        if "u1" in state.desired.looked_up():
            return "looked up"
        (task,) = tasks.running.values()
        return "stalled" if task.failed else "running"

    def step(self, event: str) -> None:
        room = self.room
        number = room.numbers.get("u1", 0)
        effects: list[e.Effect] = []
        match event:
            case "Run":
                effects = room.do(*run(SOURCE))
            case "update":
                effects = room.do(*run(source("u1", "ab")))
            case "look-up failed":
                effects = room.event(e.ResumeFailed(self.ticket, "no store"))
            case "look-up answered":
                effects = room.event(e.ResumeFound(self.ticket, ResumeState()))
            case "dropped":
                effects = room.do(drop("u1"))
            case "reconciled: kept":
                effects = room.connect("b", *run(SOURCE))
            case "reconciled: not mentioned":
                effects = room.connect("b")
            case "task failed":
                effects = room.event(e.TaskFailed(number, "no route"))
            case "SuspendAndRestart":
                effects = room.event(e.RestartDue(number))
            case "task stopped":
                effects = room.event(e.TaskStopped(next(iter(room.state.tasks.stopping))))
            case _:
                raise AssertionError(event)
        for asked in of(e.LookUp, effects):
            self.ticket = asked.ticket


@pytest.mark.parametrize(("state", "event"), SOURCE_LIFE)
def test_a_source_lives_by_its_table(state: str, event: str) -> None:
    life = Life()
    for before in WAYS[state]:
        life.step(before)
    assert life.state() == state
    life.step(event)
    assert life.state() == SOURCE_LIFE[state, event]
