"""What is done for one dataflow or peek does not grow with how many there are.

Lines executed are counted, not time: the counts are the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from actors.model.protocol.compute import (
    CancelPeek,
    Command,
    CreateDataflow,
    DataflowDescription,
    Hello,
    IndexExport,
    IndexTarget,
    InitializationComplete,
    Peek,
    ShardImport,
)
from actors.model.protocol.internal import DataflowProgress, SequencedCommand
from actors.replica.compute import events as e
from actors.replica.compute.dataflow_children import DataflowChildren
from actors.replica.compute.rendering import ActorFactory, DataflowRendering, WorkerContext
from actors.replica.compute.state import ComputeState
from actors.runtime.settings import Settings
from cluster_house import SCHEMA  # type: ignore[import-not-found]


def lines(run: Callable[[], object]) -> int:
    """Lines of Python executed by `run`."""
    counted = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal counted
        counted += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return counted


def flow(number: int) -> DataflowDescription:
    imports = (ShardImport("s1", SCHEMA),)
    return DataflowDescription(f"i{number}", "", imports, IndexExport(("k",), SCHEMA), 0)


class Room:
    def __init__(self) -> None:
        self.state = ComputeState(0, 1, result_bytes_max=1, peeks_max=10_000)
        self.do(Hello("a"), InitializationComplete())

    def do(self, *commands: Command) -> None:
        for command in commands:
            self.state.handle(SequencedCommand(self.state.next_index, 1, command))


def dataflows(count: int) -> None:
    room = Room()
    room.do(*(CreateDataflow(flow(number)) for number in range(count)))
    for number in range(1, count + 1):
        room.state.handle(e.DataflowProgressed(number, DataflowProgress(f"i{number - 1}", 5, 5, 5)))


def peeks(count: int) -> None:
    """Each of an index of its own, sealed and answered while the others wait."""
    room = Room()
    room.do(*(CreateDataflow(flow(number)) for number in range(count)))
    room.do(*(Peek(f"p{number}", IndexTarget(f"i{number}"), 50) for number in range(count)))
    for number in range(count):
        room.state.handle(e.IndexSealed(number + 1, 10))
        room.do(CancelPeek(f"p{number}"))


class Still:
    """A context in which nothing runs."""

    def spawn(self, *args: Any, **kwargs: Any) -> object:
        return object()

    def watch(self, *args: Any) -> None:
        pass


def renders(count: int) -> None:
    still: Any = Still()
    renderings: dict[int, DataflowRendering] = {}
    factory: Any = ActorFactory
    context = WorkerContext(still, 0, 1, (), factory, Settings(), Path(), renderings, still)
    children = DataflowChildren(context, still, lambda number: [])
    for number in range(1, count + 1):
        renderings[number] = DataflowRendering(number, flow(number))
        children.render(renderings[number])


@pytest.mark.parametrize("run", [dataflows, peeks, renders])
def test_four_times_as_many_take_four_times_as_long(run: Callable[[int], None]) -> None:
    few, many = lines(lambda: run(100)), lines(lambda: run(400))
    assert many < 4.5 * few
