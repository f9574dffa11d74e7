"""What the outside keeps for a source that was dropped goes: after its last task, before the next
one of its id begins."""

from __future__ import annotations

from storage_house import (  # type: ignore[import-not-found]
    Room,
    drop,
    of,
    run,
    sink,
    source,
)

from actors.model.protocol.storage_internal import ResumeState
from actors.replica.storage import events as e


def stopping() -> Room:
    """A source that was dropped while it was suspended: its task has not stopped yet."""
    room = Room()
    room.connect("a")
    room.running(*run(source("u1")))
    room.event(e.TaskFailed(1, "no route"))
    assert of(e.StopTask, room.event(e.RestartDue(1))) == [e.StopTask(1, forget=False)]
    assert of(e.CleanUpSource, room.do(drop("u1"))) == []
    return room


def test_a_sink_of_the_same_id_starts_when_the_source_is_forgotten() -> None:
    room = stopping()
    effects = room.do(*run(sink("u1")))
    effects += room.event(e.TaskStopped(1))
    assert of(e.StartSink, effects) == []
    assert of(e.CleanUpSource, effects) == [e.CleanUpSource(-1, source("u1"))]
    assert room.event(e.TaskStopped(-1)) == [e.StartSink(2, sink("u1"))]


def test_a_source_of_the_same_id_starts_when_its_former_is_forgotten() -> None:
    room = Room()
    room.connect("a")
    room.do(*run(source("u1")))
    assert of(e.CleanUpSource, room.do(drop("u1"))) == [e.CleanUpSource(-1, source("u1"))]
    new = source("u1", remap="r9")
    assert of(e.StartIngestion, room.running(*run(new))) == []
    assert room.event(e.TaskStopped(-1)) == [e.StartIngestion(1, new, ResumeState())]


def test_all_sources_of_one_id_are_forgotten() -> None:
    room = stopping()
    new = source("u1", remap="r9")
    room.running(*run(new))
    room.do(drop("u1"))
    assert room.event(e.TaskStopped(1)) == [e.CleanUpSource(-1, source("u1"))]
    assert room.event(e.TaskStopped(-1)) == [e.CleanUpSource(-2, new)]
    assert room.event(e.TaskStopped(-2)) == []
    assert not room.state.tasks.stopping
