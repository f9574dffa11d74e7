"""A worker's rules of copies: one answer, whatever happens to it."""

from __future__ import annotations

from typing import Any

import pytest

from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Command,
    CopyDone,
    CopyDropped,
    CopyFailed,
    CopyToResponse,
    CreateDataflow,
    CreateInstance,
    Hello,
    InitializationComplete,
    ScheduleDataflow,
)
from actors.model.protocol.internal import DataflowProgress, SequencedCommand
from actors.replica.compute import events as e
from actors.replica.compute.state import ComputeState
from actors.runtime.progress import EMPTY
from cluster_house import copy  # type: ignore[import-not-found]

DONE = CopyDone(3, 1, "m")
NOTHING = CopyDone(0, 0, "")
START = (CreateDataflow(copy()), ScheduleDataflow("c1"))


class Room:
    """A worker with a client."""

    def __init__(self, index: int = 0, count: int = 2) -> None:
        self.state = ComputeState(index, count, result_bytes_max=1000, peeks_max=9)
        self.connect("a")

    def event(self, event: e.Event) -> list[Any]:
        """The copies' answers that it leads to."""
        effects = self.state.handle(event)
        self.state.validate()
        said = [effect.response for effect in effects if isinstance(effect, e.SendComputeResponse)]
        return [response.result for response in said if isinstance(response, CopyToResponse)]

    def do(self, *commands: Command) -> list[Any]:
        said: list[Any] = []
        for command in commands:
            said += self.event(SequencedCommand(self.state.next_index, 1, command))
        return said

    def connect(self, nonce: str, *commands: Command) -> list[Any]:
        self.do(Hello(nonce), CreateInstance(self.state.count))
        return self.do(*commands, InitializationComplete(), AllowWrites())


def test_worker_0_copies_and_the_others_have_nothing_to_copy() -> None:
    assert Room(1).do(*START) == [NOTHING]
    room = Room(0)
    assert room.do(*START) == []
    assert room.event(e.CopyEnded(1, DONE)) == [DONE]


@pytest.mark.parametrize("index", [0, 1])
def test_it_is_answered_once(index: int) -> None:
    room = Room(index)
    answers = room.do(*START)
    answers += room.event(e.CopyEnded(1, DONE))
    answers += room.event(e.CopyEnded(1, CopyFailed("X", "x")))
    answers += room.event(e.DataflowCrashed(1, "boom"))
    answers += room.do(AllowCompaction("c1", EMPTY))
    answers += room.event(e.DropCompleted(1))
    assert len(answers) == 1


def test_a_dropped_copy_says_so() -> None:
    room = Room()
    room.do(*START)
    assert room.do(AllowCompaction("c1", EMPTY)) == [CopyDropped()]
    assert room.event(e.CopyEnded(1, DONE)) == []


def test_one_that_crashed_has_failed_and_is_not_started_afresh() -> None:
    room = Room()
    room.do(*START)
    effects = room.state.handle(e.DataflowCrashed(1, "boom"))
    assert effects == [e.SendComputeResponse(CopyToResponse("c1", CopyFailed("ActorDead", "boom")))]


def test_it_has_no_frontiers() -> None:
    room = Room()
    room.do(*START)
    progress = DataflowProgress("c1", 99, 99, 99)
    assert room.state.handle(e.DataflowProgressed(1, progress)) == []
    room.do(AllowCompaction("c1", EMPTY))
    assert room.state.handle(e.DropCompleted(1)) == []


def test_another_connection_has_it_done_over() -> None:
    """Done or not: only the one that asks now is answered, by a copy of its own."""
    for ends in (True, False):
        room = Room()
        room.do(*START)
        room.state.handle(e.ComputeClientLost("a"))
        if ends:
            assert room.event(e.CopyEnded(1, DONE)) == []
        assert room.connect("b", *START) == []
        assert room.event(e.CopyEnded(1, DONE)) == [], "of the former one"
        assert room.event(e.CopyEnded(2, DONE)) == [DONE]


def test_what_is_dropped_before_the_initialization_is_complete_says_nothing() -> None:
    for index in (0, 1):
        room = Room(index)
        assert room.connect("b", *START, AllowCompaction("c1", EMPTY)) == []
        assert not room.state.rendered
