"""Splitting and merging the storage half for 1 to 5 workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    ConnectionRefused,
    Hello,
    InitializationComplete,
)
from actors.model.protocol.storage import (
    CancelOneshotIngestion,
    Command,
    ConnectorConfiguration,
    DroppedId,
    FilesStaged,
    FrontierUpper,
    IngestionDescription,
    IngestionExport,
    Response,
    RunIngestion,
    RunOneshotIngestion,
    StagedBatch,
    StagedBatches,
    StagingFailed,
    StagingResult,
    StatisticsUpdates,
    StatusUpdate,
)
from actors.replica.cluster.partitioned import StoragePartitioned, merge_staged
from actors.runtime.errors import RemoteProtocolError
from actors.runtime.progress import EMPTY

SCHEMA = TableSchema((TableColumn("k", "bigint"),))
CONFIGURATION = ConnectorConfiguration("counter")
counts = st.integers(1, 5)


def run(*exports: str) -> RunIngestion:
    made = tuple(IngestionExport(id, id, SCHEMA, f"s{id}") for id in exports)
    return RunIngestion(IngestionDescription("u1", "u1", CONFIGURATION, "r1", made))


def oneshot(uuid: str = "o1") -> RunOneshotIngestion:
    return RunOneshotIngestion(uuid, "t1", "s1", SCHEMA, CONFIGURATION)


def parts(count: int, *commands: Command) -> StoragePartitioned:
    made = StoragePartitioned(count)
    for command in (Hello("a"), *commands, InitializationComplete()):
        made.split(command)
    return made


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_command_goes_to_every_worker(count: int) -> None:
    made = StoragePartitioned(count)
    for command in (Hello("a"), run("e1"), AllowWrites()):
        assert made.split(command) == [(part, command) for part in range(count)]


@given(counts, st.data())
def test_uppers_are_the_meet_of_the_workers_and_advance_strictly(
    count: int, data: st.DataObject
) -> None:
    made = parts(count, run("e1"))
    frontier = st.one_of(st.integers(0, 20), st.just(EMPTY))
    reports = data.draw(st.lists(st.tuples(st.integers(0, count - 1), frontier), max_size=40))
    reached, known = [0] * count, 0
    for part, value in reports:
        reached[part] = max(reached[part], value)
        merged = made.absorb(part, FrontierUpper("e1", value))
        assert merged == (FrontierUpper("e1", min(reached)) if min(reached) > known else None)
        known = max(known, min(reached))


def test_those_who_do_not_own_an_object_do_not_hold_it_back() -> None:
    made = parts(3, run("e1"))
    for part in (0, 2):
        assert made.absorb(part, FrontierUpper("e1", EMPTY)) is None
    assert made.absorb(1, FrontierUpper("e1", 7)) == FrontierUpper("e1", 7)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_drop_is_told_when_all_have_told_it(count: int) -> None:
    made = parts(count, run("e1", "e2"))
    made.split(AllowCompaction("u1", EMPTY))
    for id in ("u1", "e1", "e2"):
        told = [made.absorb(part, DroppedId(id)) for part in range(count)]
        assert told == [None] * (count - 1) + [DroppedId(id)]
    assert made.idle()
    assert made.ended == ["u1", "e1", "e2"]
    made.split(run("e1"))  # the ids are free again
    assert not made.idle()


def test_an_export_left_out_of_an_update_is_merged_until_its_drop_was_told() -> None:
    made = parts(2, run("e1"))
    made.split(run("e2"))
    assert made.absorb(0, FrontierUpper("e1", 3)) is None
    assert made.absorb(1, FrontierUpper("e1", 3)) == FrontierUpper("e1", 3)
    for part in range(2):
        made.absorb(part, DroppedId("e1"))
        made.absorb(part, FrontierUpper("e2", 1))
    assert made.ended == ["e1"]


def test_what_was_dropped_before_the_replay_was_complete_never_ran() -> None:
    made = parts(2, run("e1", "e2"), AllowCompaction("e1", EMPTY), oneshot(), oneshot("o2"))
    made.absorb(0, FrontierUpper("e2", 1))
    with pytest.raises(RemoteProtocolError, match="worker 1 reported an upper of e1, which is not"):
        made.absorb(1, FrontierUpper("e1", 1))
    made = StoragePartitioned(1)
    for command in (Hello("a"), run("e1"), oneshot(), CancelOneshotIngestion("o1")):
        made.split(command)
    with pytest.raises(RemoteProtocolError, match="which is not running"):
        made.absorb(0, FrontierUpper("u1", 1))
    made.split(InitializationComplete())
    assert made.absorb(0, FrontierUpper("u1", 1)) == FrontierUpper("u1", 1)
    with pytest.raises(RemoteProtocolError, match="o1, which was not requested"):
        made.absorb(0, StagedBatches("o1", FilesStaged()))


@pytest.mark.parametrize(
    ("responses", "rule"),
    [
        ([FrontierUpper("x", 1)], "worker 1 reported an upper of x, which is not running"),
        ([DroppedId("x")], "worker 1 reported the drop of x, which is not running"),
        ([DroppedId("e1"), DroppedId("e1")], "worker 1 reported the drop of e1 after its drop"),
        (
            [DroppedId("e1"), FrontierUpper("e1", 1)],
            "worker 1 reported an upper of e1 after its drop",
        ),
        ([StagedBatches("x", FilesStaged())], "x, which was not requested"),
        (
            [StagedBatches("o1", FilesStaged())] * 2,
            "worker 1 answered one-shot ingestion o1 twice",
        ),
    ],
)
def test_a_worker_that_breaks_a_rule(responses: list[Response], rule: str) -> None:
    made = parts(2, run("e1"), oneshot())
    for response in responses[:-1]:
        made.absorb(1, response)
    with pytest.raises(RemoteProtocolError, match=rule):
        made.absorb(1, responses[-1])


results: st.SearchStrategy[StagingResult] = st.one_of(
    st.builds(
        FilesStaged,
        st.lists(st.builds(StagedBatch, st.binary(max_size=2), st.just(1), st.just(2))).map(tuple),
    ),
    st.builds(
        StagingFailed, st.sampled_from(["OperationCanceled", "StoreFull"]), st.sampled_from("xy")
    ),
)


@given(counts, st.data())
def test_a_oneshot_is_answered_when_all_have_answered(count: int, data: st.DataObject) -> None:
    made = parts(count, oneshot())
    given = data.draw(st.lists(results, min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    answers = [made.absorb(part, StagedBatches("o1", given[part])) for part in order]
    assert answers[:-1] == [None] * (count - 1)
    assert answers[-1] == StagedBatches("o1", merge_staged(given))
    assert made.ended == ["o1"]


def test_canceled_comes_before_other_errors_and_errors_before_batches() -> None:
    one, two = StagedBatch(b"1", 1, 1), StagedBatch(b"2", 1, 1)
    full, canceled = StagingFailed("StoreFull", ""), StagingFailed("OperationCanceled", "")
    assert merge_staged([FilesStaged((one,)), FilesStaged(), FilesStaged((two,))]) == FilesStaged(
        (one, two)
    )
    assert merge_staged([FilesStaged((one,)), full]) == full
    assert merge_staged([full, FilesStaged(), canceled]) == canceled


def test_the_rest_passes_through_and_a_hello_begins_afresh() -> None:
    made = parts(3, run("e1"))
    rest: list[Response] = [
        StatusUpdate("u1", "running"),
        StatisticsUpdates(),
        ConnectionRefused("x", "y"),
    ]
    for response in rest:
        assert made.absorb(2, response) is response
    made.absorb(0, FrontierUpper("e1", 5))
    made.split(Hello("b"))
    assert made.idle()
