"""The history: reducing changes nothing that a replica could see, and keeps it short."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Hello,
    IndexExport,
    IndexTarget,
    InitializationComplete,
    Peek,
    ScheduleDataflow,
    ShardImport,
    SubscribeExport,
    UpdateConfiguration,
)
from actors.model.protocol.internal import SequencedCommand
from actors.replica.compute.history import ComputeHistory, reduced
from actors.replica.compute.state import ComputeState
from actors.runtime.progress import EMPTY, is_empty

SCHEMA = TableSchema((TableColumn("k", "bigint"),))


def dataflow(id: str, as_of: int = 0) -> DataflowDescription:
    imports = (ShardImport("s1", SCHEMA),)
    return DataflowDescription(id, id, imports, IndexExport(("k",), SCHEMA), as_of)


def subscribe(id: str, as_of: int = 0, snapshot: bool = True) -> DataflowDescription:
    imports = (ShardImport("s1", SCHEMA),)
    return DataflowDescription(id, id, imports, SubscribeExport(SCHEMA, snapshot), as_of)


def peek(uuid: str, id: str = "i0", time: int = 5) -> Peek:
    return Peek(uuid, IndexTarget(id), time)


def applied(commands: list[Command]) -> dict[str, object]:
    """A replica reduced to what a client can see of it; shares no code with the history."""
    flows: dict[str, tuple[int, bool, object]] = {}
    others: dict[str, int] = {}
    peeks: dict[str, Peek] = {}
    limits: dict[str, int] = {}
    once: dict[str, Command] = {}
    for command in commands:
        match command:
            case CreateDataflow(dataflow=flow):
                if flow.id not in flows:
                    flows[flow.id] = (flow.as_of, False, flow.export)
                    others.pop(flow.id, None)
            case ScheduleDataflow(id=id):
                if id in flows:
                    flows[id] = (flows[id][0], True, flows[id][2])
            case AllowCompaction(id=id, frontier=frontier):
                if id not in flows:
                    others[id] = max(others.get(id, 0), frontier)
                elif is_empty(frontier):
                    del flows[id]
                elif frontier > flows[id][0]:
                    export = flows[id][2]
                    if isinstance(export, SubscribeExport):  # its reader has had the snapshot
                        export = SubscribeExport(export.schema, snapshot=False)
                    flows[id] = (frontier, flows[id][1], export)
            case Peek(uuid=uuid):
                if uuid not in peeks:
                    peeks[uuid] = command
            case CancelPeek(uuid=uuid):
                peeks.pop(uuid, None)
            case UpdateConfiguration():
                for name in command.__struct_fields__:
                    if getattr(command, name) is not None:
                        limits[name] = getattr(command, name)
            case _:
                once[type(command).__name__] = command
    return {"flows": flows, "others": others, "peeks": peeks, "limits": limits, "once": once}


def run(commands: list[Command]) -> dict[str, object]:
    """What a real worker's state holds after the commands."""
    state = ComputeState(0, 1, result_bytes_max=1, peeks_max=100)
    for command in (Hello("h"), InitializationComplete(), *commands):
        if not isinstance(command, Hello) or state.nonce is None:
            state.handle(SequencedCommand(state.next_index, 1, command))
            state.validate()
    return {
        "flows": {
            id: (max(r.allowed, r.description.as_of), r.scheduled)
            for id, r in state.rendered.items()
        },
        "writes": state.writes_allowed,
        "limits": (
            state.reads.result_bytes_max,
            state.reads.inline_bytes_max,
            state.maintenance_ms,
        ),
    }


ids = st.sampled_from(["i0", "i1", "i2"])
uuids = st.sampled_from(["p0", "p1", "p2"])
times = st.integers(0, 20)
limits = st.one_of(st.none(), st.integers(1, 9))
commands = st.one_of(
    st.builds(lambda id, t: CreateDataflow(dataflow(id, t)), ids, times),
    st.builds(lambda id, t: CreateDataflow(subscribe(id, t)), ids, times),
    st.builds(ScheduleDataflow, ids),
    st.builds(AllowCompaction, ids, st.one_of(times, st.just(EMPTY))),
    st.builds(peek, uuids, ids, times),
    st.builds(CancelPeek, uuids),
    st.builds(UpdateConfiguration, limits, limits, limits),
    st.builds(Hello, st.sampled_from("ab")),
    st.builds(CreateInstance, st.integers(1, 2)),
    st.just(InitializationComplete()),
    st.just(AllowWrites()),
)


@given(st.lists(commands, max_size=60))
def test_applying_the_reduced_history_equals_applying_the_whole(raw: list[Command]) -> None:
    """Of all lists: with ids that are unknown, dropped, created twice; peeks alike."""
    assert applied(reduced(raw)) == applied(raw)
    assert reduced(reduced(raw)) == reduced(raw)


@given(st.lists(commands, max_size=60))
def test_a_worker_cannot_tell_the_reduced_history_from_the_whole(raw: list[Command]) -> None:
    assert run(reduced(raw)) == run(raw)


@example([peek("p0"), peek("p0"), CancelPeek("p0")])
@given(st.lists(commands, max_size=200))
def test_pushing_keeps_the_meaning_and_the_length(raw: list[Command]) -> None:
    history = ComputeHistory()
    longest = 8
    for command in raw:
        history.push(command)
        # It is reduced at twice the length after the last time; since then less may be left.
        longest = max(longest, len(reduced(history.commands())))
        assert len(history) <= 2 * longest + 1
    assert applied(history.commands()) == applied(raw)


def test_configurations_merge_field_by_field() -> None:
    given = [UpdateConfiguration(5), UpdateConfiguration(None, 7), UpdateConfiguration(6, None, 9)]
    assert reduced(given) == [UpdateConfiguration(6, 7, 9)]


def test_order_of_the_reduced_history() -> None:
    raw: list[Command] = [
        Hello("n"),
        CreateInstance(2),
        InitializationComplete(),
        AllowWrites(),
        AllowCompaction("stranger", 3),
        peek("p0"),
        ScheduleDataflow("i0"),
        UpdateConfiguration(7),
        UpdateConfiguration(None),
        CreateDataflow(dataflow("i0", 1)),
        CreateDataflow(dataflow("i1", 1)),
        ScheduleDataflow("i0"),
        AllowCompaction("i0", 4),
        AllowCompaction("i0", 2),
        AllowCompaction("i1", EMPTY),
    ]
    assert reduced(raw) == [
        Hello("n"),
        CreateInstance(2),
        UpdateConfiguration(7),
        CreateDataflow(dataflow("i0", 4)),
        ScheduleDataflow("i0"),
        peek("p0"),
        AllowCompaction("stranger", 3),
        InitializationComplete(),
        AllowWrites(),
    ]


def test_a_long_life_stays_short() -> None:
    history = ComputeHistory([Hello("n"), CreateInstance(1), CreateDataflow(dataflow("i0"))])
    for time in range(10_000):
        history.push(peek(f"p{time}"))
        history.push(CancelPeek(f"p{time}"))
        history.push(AllowCompaction("i0", time))
    assert len(history) < 40


def test_what_was_said_before_a_dataflow_was_created_is_not_about_it() -> None:
    created = CreateDataflow(dataflow("i1"))
    for early in (AllowCompaction("i1", EMPTY), AllowCompaction("i1", 9), ScheduleDataflow("i1")):
        assert reduced([early, created]) == [created]


def test_a_subscribe_that_has_gone_on_is_replayed_without_its_snapshot() -> None:
    created = CreateDataflow(subscribe("s"))
    moved = CreateDataflow(subscribe("s", 7, snapshot=False))
    assert reduced([created, AllowCompaction("s", 0)]) == [created]
    assert reduced([created, AllowCompaction("s", 7)]) == [moved]
