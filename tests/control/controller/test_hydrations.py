"""How many dataflows hydrate at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.control.controller.replicas.replica import HydrationTracker, HydrationTurns
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Command,
    CreateDataflow,
    DataflowDescription,
    Export,
    Frontiers,
    IndexExport,
    ScheduleDataflow,
    ShardImport,
    StatusResponse,
    SubscribeExport,
    ViewExport,
)
from actors.runtime.progress import EMPTY, ObjectId
from actors.runtime.telemetry import TracedMessage
from suite_lanes import examples  # type: ignore[import-not-found]

SCHEMA = TableSchema((TableColumn("id", "bigint"),))
PLAN = DeltaPlan(("t",), (SCHEMA,), SCHEMA, "", "incremental", "", ())
AS_OF = 10


def created(id: ObjectId, export: Export, reads: str = "table") -> CreateDataflow:
    imports = (ShardImport(reads, SCHEMA),)
    return CreateDataflow(DataflowDescription(id, id, imports, export, AS_OF))


def view(id: ObjectId, reads: str = "table") -> CreateDataflow:
    return created(id, ViewExport(PLAN, f"shard of {id}"), reads)


def index(id: ObjectId) -> CreateDataflow:
    return created(id, IndexExport(("id",), SCHEMA))


def hydrated(id: ObjectId) -> Frontiers:
    return Frontiers(id, output=AS_OF + 1)


def sent(hydrations: HydrationTracker, commands: Sequence[Command]) -> list[Command]:
    return [out for command in commands for out in hydrations.command(command)]


def scheduled(commands: Sequence[Command]) -> list[ObjectId]:
    return [command.id for command in commands if isinstance(command, ScheduleDataflow)]


def test_so_many_at_a_time_and_the_rest_in_order() -> None:
    hydrations = HydrationTracker(2)
    ids = [f"u{n}" for n in range(5)]
    creates: list[Command] = [index(id) if id == "u1" else view(id) for id in ids]
    out = sent(hydrations, [*creates, *map(ScheduleDataflow, ids), AllowWrites()])
    assert out == [*creates, ScheduleDataflow("u0"), ScheduleDataflow("u1"), AllowWrites()]
    assert (hydrations.hydrating, hydrations.waiting) == (2, 3)
    assert hydrations.responded(Frontiers("u1", output=AS_OF)) == []
    assert hydrations.responded(Frontiers("u1", write=AS_OF + 1)) == []
    assert hydrations.responded(hydrated("u1")) == [ScheduleDataflow("u2")]
    assert hydrations.responded(hydrated("u1")) == []
    dropped = AllowCompaction("u0", EMPTY)
    assert hydrations.command(dropped) == [dropped, ScheduleDataflow("u3")]
    assert hydrations.command(AllowCompaction("u4", EMPTY)) == [AllowCompaction("u4", EMPTY)]
    assert hydrations.responded(hydrated("u2")) == []
    assert (hydrations.hydrating, hydrations.waiting) == (1, 0)


def test_a_subscribe_does_not_wait() -> None:
    hydrations = HydrationTracker(1)
    stream: list[Command] = [created("t1", SubscribeExport(SCHEMA)), ScheduleDataflow("t1")]
    sent(hydrations, [view("u1"), ScheduleDataflow("u1")])
    assert sent(hydrations, stream) == stream
    assert sent(hydrations, [view("u2"), ScheduleDataflow("u2")]) == [view("u2")]


def test_one_waits_for_what_it_reads_and_takes_no_place() -> None:
    hydrations = HydrationTracker(2)
    out = sent(
        hydrations,
        [
            view("u1"),
            view("u2", "shard of u1"),
            view("u3"),
            *map(ScheduleDataflow, ("u1", "u2", "u3")),
        ],
    )
    assert scheduled(out) == ["u1", "u3"]
    assert hydrations.responded(hydrated("u3")) == []
    assert hydrations.responded(hydrated("u1")) == [ScheduleDataflow("u2")]


@pytest.mark.parametrize("state", ["stalled", "frozen"])
def test_one_that_is_stuck_gives_its_place_up(state: str) -> None:
    hydrations = HydrationTracker(1)
    sent(hydrations, [view("u1"), view("u2"), ScheduleDataflow("u1"), ScheduleDataflow("u2")])
    assert hydrations.responded(StatusResponse("u1", "hydrating")) == []
    assert hydrations.responded(StatusResponse("u1", state)) == [ScheduleDataflow("u2")]
    assert hydrations.responded(StatusResponse("u1", state)) == []


def test_one_that_takes_long_gives_way_to_those_that_wait_and_goes_on() -> None:
    hydrations = HydrationTracker(2)
    ids = [f"u{n}" for n in range(7)]
    sent(hydrations, [*map(view, ids), *map(ScheduleDataflow, ids)])
    assert hydrations.slots_due() == [], "it has its slot for a whole interval"
    assert scheduled(hydrations.slots_due()) == ["u2", "u3"]
    assert hydrations.slots_due() == []
    assert hydrations.slots_due() == [], "as many go on without a slot as there are slots"
    assert hydrations.responded(hydrated("u0")) == []
    assert scheduled(hydrations.slots_due()) == ["u4"]
    dropped = AllowCompaction("u1", EMPTY)
    assert hydrations.command(dropped) == [dropped]
    assert hydrations.responded(StatusResponse("u2", "stalled")) == []
    assert scheduled(hydrations.slots_due()) == ["u5"]
    assert hydrations.responded(hydrated("u4")) == [ScheduleDataflow("u6")]
    assert (hydrations.hydrating, hydrations.waiting) == (2, 0)
    for _ in range(3):
        assert hydrations.slots_due() == []
    assert hydrations.hydrating == 2, "where nobody waits it keeps its slot"


def test_what_the_replica_kept_makes_room_at_once() -> None:
    hydrations = HydrationTracker(1)
    ids = [f"u{n}" for n in range(100)]
    out = sent(hydrations, [*map(view, ids), *map(ScheduleDataflow, ids)])
    assert scheduled(out) == ["u0"]
    for id in reversed(ids):
        assert hydrations.responded(hydrated(id)) == []
    assert (hydrations.hydrating, hydrations.waiting) == (0, 0)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(
            st.sampled_from(["create", "create on", "hydrate", "hydrate", "stall", "drop", "time"]),
            st.integers(0, 20),
        ),
        max_size=60,
    ),
)
def test_all_hydrate_in_the_end(limit: int, actions: list[tuple[str, int]]) -> None:
    hydrations = HydrationTracker(limit)
    running: set[ObjectId] = set()
    stuck: set[ObjectId] = set()
    living: list[ObjectId] = []
    done: set[ObjectId] = set()

    def take(commands: Sequence[Command]) -> None:
        for id in scheduled(commands):
            assert id not in running | done, "a Schedule passes once"
            running.add(id)
        assert hydrations.hydrating <= limit
        assert len(running - stuck) <= 2 * limit

    for number, (what, which) in enumerate(actions):
        id = living[which % len(living)] if living else ""
        if what == "create" or (what == "create on" and not id):
            living.append(f"u{number}")
            take(sent(hydrations, [view(f"u{number}"), ScheduleDataflow(f"u{number}")]))
        elif what == "create on":
            living.append(f"u{number}")
            take(
                sent(
                    hydrations,
                    [view(f"u{number}", f"shard of {id}"), ScheduleDataflow(f"u{number}")],
                )
            )
        elif what == "hydrate" and id in running:
            running.discard(id)
            stuck.discard(id)
            done.add(id)
            take(hydrations.responded(hydrated(id)))
        elif what == "stall" and id in running:
            stuck.add(id)
            take(hydrations.responded(StatusResponse(id, "stalled")))
        elif what == "time":
            take(hydrations.slots_due())
        elif what == "drop" and id:
            living.remove(id)
            for place in (running, stuck, done):
                place.discard(id)
            take(hydrations.command(AllowCompaction(id, EMPTY)))
    while running:
        id = running.pop()
        stuck.discard(id)
        done.add(id)
        take(hydrations.responded(hydrated(id)))
    assert done == set(living)
    assert (hydrations.hydrating, hydrations.waiting) == (0, 0)


def test_a_withheld_schedule_keeps_its_trace_context() -> None:
    hydrations = HydrationTracker(1)
    first, second = (TracedMessage(ScheduleDataflow(id), f"of {id}") for id in ("u1", "u2"))
    assert sent(hydrations, [index("u1"), index("u2")]) == [index("u1"), index("u2")]
    assert hydrations.command(first) == [first]
    assert hydrations.command(second) == []
    assert hydrations.responded(hydrated("u1")) == [second]


@settings(max_examples=examples(200))
@given(
    st.integers(2, 3),
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.sampled_from(["create", "hydrate", "hydrate", "stall", "lose", "drop"]),
            st.integers(0, 20),
            st.integers(0, 2),
        ),
        max_size=60,
    ),
)
def test_of_several_replicas_one_computes_a_view_and_all_get_it(
    replicas: int, limit: int, actions: list[tuple[str, int, int]]
) -> None:
    living: list[ObjectId] = []
    computing: dict[ObjectId, int] = {}
    """Views without contents that somebody computes, and who."""
    there: set[ObjectId] = set()
    running: list[set[ObjectId]] = [set() for _ in range(replicas)]
    done: list[set[ObjectId]] = [set() for _ in range(replicas)]

    def take(number: int, commands: Sequence[Command]) -> None:
        for id in scheduled(commands):
            assert id not in running[number] | done[number]
            running[number].add(id)
            assert computing.get(id) is None, "one at a time"
            computing[id] = number

    def released() -> None:
        for number, tracker in enumerate(trackers):
            take(number, tracker.resume())

    turns = HydrationTurns(released)
    trackers = [HydrationTracker(limit, turns) for _ in range(replicas)]

    def stop(id: ObjectId, number: int) -> None:
        running[number].discard(id)
        if computing.get(id) == number:
            del computing[id]

    def hydrate(id: ObjectId, number: int) -> None:
        stop(id, number)
        there.add(id)
        done[number].add(id)
        take(number, trackers[number].responded(hydrated(id)))

    for step, (what, which, who) in enumerate(actions):
        number = who % replicas
        mine = sorted(running[number])
        if what == "create":
            living.append(id := f"u{step}")
            for each, tracker in enumerate(trackers):
                take(each, sent(tracker, [view(id), ScheduleDataflow(id)]))
        elif what == "hydrate" and mine:
            hydrate(mine[which % len(mine)], number)
        elif what == "stall" and mine:
            id = mine[which % len(mine)]
            if computing.get(id) == number:
                del computing[id]
            take(number, trackers[number].responded(StatusResponse(id, "stalled")))
        elif what == "lose":
            for id in mine:
                stop(id, number)
            done[number].clear()
            trackers[number].close()
            trackers[number] = HydrationTracker(limit, turns)
            again = [view(id) for id in living] + [ScheduleDataflow(id) for id in living]
            take(number, sent(trackers[number], again))
        elif what == "drop" and living:
            id = living.pop(which % len(living))
            for each, tracker in enumerate(trackers):
                # Its turn goes on to a replica that is not told of the drop yet.
                stop(id, each)
                take(each, tracker.command(AllowCompaction(id, EMPTY)))
                done[each].discard(id)
    while any(running):
        number = next(each for each in range(replicas) if running[each])
        hydrate(min(running[number]), number)
    assert all(each == set(living) for each in done)
    assert all((each.hydrating, each.waiting) == (0, 0) for each in trackers)
