"""The history: reducing changes nothing that a replica could see, and keeps it short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.compute.history import ComputeHistory, reduced
from actors.plan.schema import Column, Schema
from actors.progress import EMPTY, is_empty
from actors.protocol.compute import (
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
    Schedule,
    SourceImport,
    UpdateConfiguration,
)

SCHEMA = Schema((Column("k", "bigint"),))


def dataflow(id: str, as_of: int = 0) -> DataflowDescription:
    imports = (SourceImport("s1", SCHEMA),)
    return DataflowDescription(id, id, imports, IndexExport(("k",), SCHEMA), as_of)


def peek(uuid: str, id: str = "i0", time: int = 5) -> Peek:
    return Peek(uuid, IndexTarget(id), time)


def applied(commands: list[Command]) -> dict[str, object]:
    """A replica reduced to what a client can see of it; shares no code with the history."""
    flows: dict[str, tuple[int, bool]] = {}
    others: dict[str, int] = {}
    peeks: dict[str, Peek] = {}
    limit: int | None = None
    flags = {"complete": False, "writes": False}
    for command in commands:
        match command:
            case CreateDataflow(dataflow=flow):
                flows[flow.id] = (flow.as_of, False)
            case Schedule(id=id):
                if id in flows:
                    flows[id] = (flows[id][0], True)
            case AllowCompaction(id=id, frontier=frontier):
                if id not in flows:
                    others[id] = max(others.get(id, 0), frontier)
                elif is_empty(frontier):
                    del flows[id]
                    others.pop(id, None)
                else:
                    flows[id] = (max(flows[id][0], frontier), flows[id][1])
            case Peek(uuid=uuid):
                peeks[uuid] = command
            case CancelPeek(uuid=uuid):
                peeks.pop(uuid, None)
            case UpdateConfiguration(result_bytes_max=value):
                limit = limit if value is None else value
            case InitializationComplete():
                flags["complete"] = True
            case AllowWrites():
                flags["writes"] = True
    return {"flows": flows, "others": others, "peeks": peeks, "limit": limit, **flags}


ids = st.sampled_from(["i0", "i1", "i2"])
uuids = st.sampled_from(["p0", "p1", "p2"])
times = st.integers(0, 20)
commands = st.one_of(
    st.builds(lambda id, t: CreateDataflow(dataflow(id, t)), ids, times),
    st.builds(Schedule, ids),
    st.builds(AllowCompaction, ids, st.one_of(times, st.just(EMPTY))),
    st.builds(peek, uuids, ids, times),
    st.builds(CancelPeek, uuids),
    st.builds(UpdateConfiguration, st.one_of(st.none(), st.integers(1, 9))),
    st.just(InitializationComplete()),
    st.just(AllowWrites()),
)


def wellformed(raw: list[Command]) -> list[Command]:
    """Leaves out what the protocol forbids: an id created twice, a Schedule of nothing."""
    live: set[str] = set()
    created: set[str] = set()
    out: list[Command] = []
    for command in raw:
        if isinstance(command, CreateDataflow):
            if command.dataflow.id in created:
                continue
            created.add(command.dataflow.id)
            live.add(command.dataflow.id)
        elif isinstance(command, Schedule) and command.id not in live:
            continue
        elif isinstance(command, AllowCompaction):
            if command.id not in live:
                continue
            if is_empty(command.frontier):
                live.discard(command.id)
        out.append(command)
    return out


@given(st.lists(commands, max_size=60))
def test_applying_the_reduced_history_equals_applying_the_whole(raw: list[Command]) -> None:
    whole = wellformed(raw)
    assert applied(reduced(whole)) == applied(whole)
    assert reduced(reduced(whole)) == reduced(whole)


@given(st.lists(commands, max_size=200))
def test_pushing_keeps_the_meaning_and_the_length(raw: list[Command]) -> None:
    whole = wellformed(raw)
    history = ComputeHistory()
    for command in whole:
        history.push(command)
        assert len(history) <= 2 * max(len(reduced(history.commands())), 8) + 1
    assert applied(history.commands()) == applied(whole)


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
        Schedule("i0"),
        UpdateConfiguration(7),
        UpdateConfiguration(None),
        CreateDataflow(dataflow("i0", 1)),
        CreateDataflow(dataflow("i1", 1)),
        Schedule("i0"),
        AllowCompaction("i0", 4),
        AllowCompaction("i0", 2),
        AllowCompaction("i1", EMPTY),
    ]
    assert reduced(raw) == [
        Hello("n"),
        CreateInstance(2),
        UpdateConfiguration(7),
        CreateDataflow(dataflow("i0", 4)),
        Schedule("i0"),
        peek("p0"),
        AllowCompaction("stranger", 3),
        InitializationComplete(),
        AllowWrites(),
    ]


def test_discard_peeks() -> None:
    history = ComputeHistory([Hello("n"), peek("p0"), peek("p1"), CancelPeek("p1")])
    history.discard_peeks()
    assert history.commands() == [Hello("n")]


def test_a_long_life_stays_short() -> None:
    history = ComputeHistory([Hello("n"), CreateInstance(1), CreateDataflow(dataflow("i0"))])
    for time in range(10_000):
        history.push(peek(f"p{time}"))
        history.push(CancelPeek(f"p{time}"))
        history.push(AllowCompaction("i0", time))
    assert len(history) < 40
