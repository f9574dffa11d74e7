"""What a worker tells of itself: rows from states, without a loop."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from actors.durable.arrangement import ArrangementStatistics, SharedStatistics
from actors.model.plan.schema import DIFF
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.compute import (
    AllowCompaction,
    Command,
    CreateDataflow,
    Hello,
    IndexTarget,
    InitializationComplete,
    LogTarget,
    Peek,
    PeekResponse,
    ScheduleDataflow,
    StatusResponse,
)
from actors.model.protocol.internal import DataflowProgress, InputStatistics, SequencedCommand
from actors.model.protocol.message_parts import ColumnComparison, OrderBy, RowSetFinishing
from actors.model.protocol.relations import RELATIONS, is_relation, relation_of, worker_relation
from actors.replica.compute import events as e
from actors.replica.compute.logs import WorkerLogs, answer, table_of
from actors.replica.compute.reconciliation import (
    ReconcileObstacle,
    ReplacedDataflow,
    RunningDataflow,
)
from actors.replica.compute.rendering import DataflowRendering
from actors.replica.compute.state import ComputeState
from actors.runtime.errors import InvalidUsage, UnknownObject
from actors.runtime.progress import EMPTY
from cluster_house import index, subscribe  # type: ignore[import-not-found]

BY_WORKERS = [name for name, each in RELATIONS.items() if each.kept_by == "workers"]
SHARED = SharedStatistics(
    "s9", ("a", "b"), 3, 1, 5, ArrangementStatistics(7, 2, 700, 70, 0), ("a", "b", "c")
)


class Room:
    """A worker's state and its logs."""

    def __init__(self, worker: int = 0, rows_max: int = 3) -> None:
        self.state = ComputeState(worker, 2, result_bytes_max=1000, peeks_max=9)
        self.live: dict[int, DataflowRendering] = {}
        self.logs = WorkerLogs(self.state, self.live, rows_max, lambda: [SHARED])
        self.do(Hello("a"), InitializationComplete())

    def do(self, *commands: Command) -> list[e.Effect]:
        effects: list[e.Effect] = []
        for command in commands:
            effects += self.state.handle(SequencedCommand(self.state.next_index, 1, command))
        for effect in effects:
            if isinstance(effect, e.RenderDataflow):
                self.live[effect.number] = DataflowRendering(effect.number, effect.description)
            if isinstance(effect, e.LogReconciliation):
                self.logs.reconciliation.note(effect)
        return effects

    def says(self, number: int, **status: Any) -> None:
        """A dataflow speaks, as the worker hears it."""
        rendered = self.state.by_number(number)
        assert rendered is not None
        seen = StatusResponse(rendered.id, **status)
        self.logs.steps.note(rendered, seen, 1000 + seen.steps)
        self.state.handle(e.StatusSeen(number, seen))

    def rows(self, name: str, *inputs: InputStatistics) -> list[dict[str, Any]]:
        relation = relation_of(name)
        table = table_of(relation, self.logs.rows(name, inputs))
        assert table.schema.names == [*relation.schema.names, DIFF]
        found: list[dict[str, Any]] = table.drop_columns([DIFF]).to_pylist()
        return found


@pytest.mark.parametrize("name", BY_WORKERS)
@pytest.mark.parametrize("worker", [0, 1])
def test_each_relation_has_its_columns(name: str, worker: int) -> None:
    room = Room(worker)
    room.do(CreateDataflow(index()), ScheduleDataflow("i1"), CreateDataflow(subscribe()))
    room.says(1, state="hydrating")
    assert all(row["worker"] == worker for row in room.rows(name))


def test_a_dataflow_is_told_once_and_until_it_has_stopped() -> None:
    room = Room()
    room.do(CreateDataflow(index(as_of=10)), CreateDataflow(subscribe()), ScheduleDataflow("i1"))
    room.says(1, state="gathering", text="waits", steps=4)
    first, second = room.rows("penstock.dataflows")
    assert (first["id"], first["kind"], first["as_of"], first["until"]) == ("i1", "index", 10, None)
    assert (first["state"], first["text"], first["steps"]) == ("gathering", "waits", 4)
    assert (first["scheduled"], second["scheduled"], second["state"]) == (True, False, "suspended")
    room.do(AllowCompaction("i1", EMPTY))
    left = room.rows("penstock.dataflows")
    assert [(row["id"], row["state"]) for row in left] == [
        (second["id"], "suspended"),
        ("i1", "dropping"),
    ]
    room.state.handle(e.DropCompleted(1))
    assert [row["id"] for row in room.rows("penstock.dataflows")] == [second["id"]]


def test_frontiers_and_how_far_the_output_is_behind() -> None:
    room = Room()
    room.do(CreateDataflow(index(as_of=10)))
    room.state.handle(e.DataflowProgressed(1, DataflowProgress("i1", 0, 50, 0)))
    room.state.handle(e.IndexSealed(1, 20, 10))
    room.do(CreateDataflow(subscribe()))
    row, heard = room.rows("penstock.frontiers")
    told = [heard[name] for name in ("input", "write", "output", "lag_ms")]
    assert told == [None] * 4, "nothing is known of it"
    room.do(AllowCompaction(heard["id"], EMPTY))
    assert (row["since"], row["input"], row["write"], row["output"]) == (10, 50, 20, 20)
    assert row["lag_ms"] == 30
    room.state.handle(e.DataflowProgressed(1, DataflowProgress("i1", 0, EMPTY, 0)))
    room.state.handle(e.IndexSealed(1, EMPTY, 10))
    [row] = room.rows("penstock.frontiers")
    assert (row["input"], row["output"], row["lag_ms"]) == (None, None, 0)


def test_steps_are_remembered_once_each_and_only_so_many() -> None:
    room = Room(rows_max=3)
    room.do(CreateDataflow(index()))
    room.says(1, state="hydrating")
    for step in range(1, 6):
        room.says(1, state="running", steps=step - 1)
        room.says(1, state="gathering", steps=step, rows_in=step * 10, step_ms=1.5)
    rows = room.rows("penstock.steps")
    assert [(row["step"], row["rows_in"], row["at_ms"]) for row in rows] == [
        (3, 30, 1003),
        (4, 40, 1004),
        (5, 50, 1005),
    ]
    assert {row["ms"] for row in rows} == {1.5}


def test_reconciliations_are_counted_by_outcome_and_flag() -> None:
    room = Room()
    log = room.logs.reconciliation
    replaced = ReplacedDataflow(
        RunningDataflow(index(), 0), index(), (ReconcileObstacle.IMPORTS, ReconcileObstacle.EXPORT)
    )
    log.note(e.LogReconciliation("b", 5, 2, 1, (replaced,)))
    log.note(e.LogReconciliation("c", 7, 0, 0, ()))
    rows = {
        row["flag"]: (row["last"], row["total"]) for row in room.rows("penstock.reconciliation")
    }
    assert rows == {
        "reused": (7, 12),
        "created": (0, 2),
        "dropped": (0, 1),
        "replaced": (0, 1),
        ReconcileObstacle.IMPORTS.value: (0, 1),
        ReconcileObstacle.EXPORT.value: (0, 1),
    }
    assert log.flags() == tuple(
        sorted([(ReconcileObstacle.IMPORTS.value, 1), (ReconcileObstacle.EXPORT.value, 1)])
    )


def test_reads_that_wait_and_arrangements_that_are_shared() -> None:
    room = Room()
    room.do(CreateDataflow(index(as_of=10)), Peek("p1", IndexTarget("i1"), 12))
    room.do(Peek("p2", LogTarget("penstock.steps"), 0))
    rows = room.rows("penstock.worker_peeks")
    assert [(row["uuid"], row["kind"], row["target"], row["started"]) for row in rows] == [
        ("p1", "index", "i1", False),
        ("p2", "relation", "penstock.steps", True),
    ]
    [row] = room.rows("penstock.arrangements")
    assert (row["kind"], row["id"], row["key"], row["rows"]) == ("shared", "s9", "a, b", 7)
    assert (row["bytes_memory"], row["bytes_mapped"], row["users"]) == (70, 700, 3)
    assert Room(1).rows("penstock.arrangements") == [], "the registry is the process's"


def test_hydration_and_parts_in_flight() -> None:
    room = Room()
    room.do(CreateDataflow(index()))
    [row] = room.rows("penstock.hydration")
    assert (row["state"], row["parts_total"]) == ("suspended", None)
    room.says(1, state="hydrating", parts_read=1, parts_total=4, bytes_read=10, bytes_total=50)
    [row] = room.rows("penstock.hydration")
    assert (row["parts_read"], row["parts_total"], row["bytes_total"]) == (1, 4, 50)
    room.says(1, state="gathering")
    assert room.rows("penstock.hydration") == []
    pending = InputStatistics("i1", 0, "s1", EMPTY, 2, 20, 3, 30, 4, 40, 5, 50, 1)
    [row] = room.rows("penstock.parts_in_flight", pending)
    assert (row["shard"], row["described"], row["fetching"], row["bytes_fetched"]) == (
        "s1",
        None,
        3,
        40,
    )
    assert (row["parts_filtered"], row["bytes_filtered"], row["parts_audited"]) == (5, 50, 1)


def test_a_read_of_a_relation_is_filtered_and_finished_like_any_other() -> None:
    room = Room(rows_max=9)
    room.do(CreateDataflow(index()))
    for step in range(1, 6):
        room.says(1, state="gathering", steps=step, rows_in=step % 3)
    relation = worker_relation("penstock.steps")
    value = to_ipc(pa.table({"step": [2]}))
    peek = Peek(
        "p",
        LogTarget(relation.name),
        0,
        filter=(ColumnComparison("step", ">=", value),),
        project=("step",),
        finishing=RowSetFinishing((OrderBy("rows_in", descending=True),), limit=2),
    )
    [piece] = answer(relation, room.logs.rows(relation.name), peek, 10_000)
    found = from_ipc(piece.arrow).to_pylist()
    assert sorted((row["step"], row["rows_in"]) for row in found) == [(2, 2), (5, 2)]
    wrong = Peek("p", LogTarget(relation.name), 0, project=("nothing",))
    with pytest.raises(InvalidUsage, match="nothing"):
        list(answer(relation, room.logs.rows(relation.name), wrong, 10_000))


def test_a_relation_that_is_not_kept_here_is_refused_by_name() -> None:
    room = Room()
    for name in ("penstock.objects", "penstock.nothing"):
        effects = room.do(Peek(name, LogTarget(name), 0))
        [response] = [x.response for x in effects if isinstance(x, e.SendComputeResponse)]
        assert isinstance(response, PeekResponse)
        assert response.result.code == "UnknownObject"  # type: ignore[union-attr]
        assert name in response.result.text  # type: ignore[union-attr]
        assert "penstock.steps" in response.result.text  # type: ignore[union-attr]
    with pytest.raises(UnknownObject, match=r"penstock\.objects"):
        relation_of("penstock.nothing")
    assert relation_of("Penstock.STEPS").name == "penstock.steps"
    assert is_relation("PENSTOCK.x")
    assert not is_relation("penstock")
