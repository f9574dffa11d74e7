"""What may be said on a connection of the storage half, by either side."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    ConnectionRefused,
    Hello,
    InitializationComplete,
    ShardImport,
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
    RetryDelays,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    SinkDescription,
    StagedBatches,
    StagingFailed,
    StatisticsUpdates,
    StatusUpdate,
    UpdateStorageConfiguration,
)
from actors.replica.cluster.rules import OTHER
from actors.replica.cluster.storage_rules import (
    STAGES,
    StorageCommandRules,
    StorageResponseRules,
)
from actors.runtime.errors import InvalidUsage, RemoteProtocolError
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings

SCHEMA = TableSchema((TableColumn("k", "bigint"),))
KIND = ConnectorConfiguration("counter", b"x")
SETTINGS = Settings(dataflows_max=6)
START: list[Command] = [Hello("a")]
GO: list[Command] = [Hello("a"), InitializationComplete()]


def source(id: str = "u1", *exports: str, **changes: Any) -> RunIngestion:
    made = tuple(IngestionExport(export, export, SCHEMA, f"s{export}") for export in exports)
    description = IngestionDescription(id, id, KIND, f"r{id}", made)
    return RunIngestion(msgspec.structs.replace(description, **changes))


def sink(id: str = "k1", **changes: Any) -> RunSink:
    description = SinkDescription(id, id, ShardImport("s1", SCHEMA), KIND, 5)
    return RunSink(msgspec.structs.replace(description, **changes))


def oneshot(uuid: str = "o1") -> RunOneshotIngestion:
    return RunOneshotIngestion(uuid, "t1", "s1", SCHEMA, KIND)


def drop(id: str) -> AllowCompaction:
    return AllowCompaction(id, EMPTY)


def check(*commands: Command) -> StorageCommandRules:
    rules = StorageCommandRules(SETTINGS)
    for command in commands:
        rules.check(command)
    return rules


def test_a_good_conversation() -> None:
    rules = check(
        Hello("a"),
        UpdateStorageConfiguration(5),
        source("u1", "e1", "e2"),
        sink(),
        oneshot(),
        AllowCompaction("unknown", 3),
        InitializationComplete(),
        AllowWrites(),
        source("u1", "e1", "e2", name="other", retry=RetryDelays(1, 2)),
        source("u1", "e2"),
        sink(as_of=9),
        drop("unknown"),
        drop("u1"),
        drop("k1"),
        CancelOneshotIngestion("o1"),
        CancelOneshotIngestion("unknown"),
    )
    assert rules.complete
    # The last description of u1 left out e1, which ended it; the drops ended the others.
    for id in ("u1", "e1", "e2", "k1"):
        with pytest.raises(RemoteProtocolError, match=f"{id} was dropped"):
            rules.check(source("u2", id) if id.startswith("e") else source(id))
    with pytest.raises(RemoteProtocolError, match="o1 is still in use"):
        rules.check(oneshot())


@pytest.mark.parametrize(
    ("commands", "rule"),
    [
        ([AllowWrites()], "got AllowWrites before Hello"),
        ([InitializationComplete()], "got InitializationComplete before Hello"),
        ([Hello("")], "nonce of Hello is empty"),
        ([Hello("a"), Hello("b")], "Hello may be sent only once"),
        ([*GO, InitializationComplete()], "InitializationComplete may be sent only once"),
        ([*START, source("")], "is empty"),
        ([*START, source("u1", "e" * 257)], "limit 256"),
        ([*START, source("u1", "e1"), source("u2", "e1")], "e1 is already an export of source u1"),
        ([*START, source("u1", "e1"), source("e1")], "e1 is already an export"),
        ([*START, source("u1", "e1"), sink("e1")], "e1 is already an export"),
        ([*START, source("u1"), sink("u1")], "u1 is already a source"),
        ([*START, source("u2"), source("u1", "u2")], "u2 is already a source"),
        ([*START, sink("k1"), source("k1")], "k1 is already a sink"),
        ([*START, sink(as_of=-1)], "invalid as_of -1"),
        ([*START, source("u1", configuration=ConnectorConfiguration(""))], "kind of u1 is empty"),
        ([*START, oneshot(), oneshot()], "choose a new uuid"),
        ([*START, oneshot("o" * 65)], "limit 64"),
        (
            [*GO, source("u1", "e1"), drop("u1"), source("u1")],
            "u1 was dropped but that has not",
        ),
        (
            [*GO, source("u1", "e1"), source("u1"), sink("e1")],
            "e1 was dropped but that has not",
        ),
        ([*GO, source("u1", "e1"), drop("e1"), source("u1", "e1")], "e1 was dropped"),
        ([*GO, sink(), drop("k1"), sink()], "k1 was dropped"),
        ([*GO, oneshot(), CancelOneshotIngestion("o1"), oneshot()], "choose a new uuid"),
    ],
)
def test_a_broken_order(commands: list[Command], rule: str) -> None:
    check(*commands[:-1])
    with pytest.raises(RemoteProtocolError, match=rule):
        check(*commands)


@pytest.mark.parametrize(
    ("commands", "rule"),
    [
        ([source("u1", "e1", "e1")], "has duplicate ids"),
        ([source("u1", "u1")], "has duplicate ids"),
        ([source("u1", "e1", remap_shard="se1")], "has duplicate shards"),
        ([source("u1"), source("u1", remap_shard="r9")], "remap shard ru1 → r9. Drop it"),
        (
            [source("u1"), source("u1", configuration=ConnectorConfiguration("x"))],
            "kind counter → x",
        ),
        ([sink(), sink(configuration=ConnectorConfiguration("x"))], "kind counter → x"),
        ([source("u1", retry=RetryDelays(0))], "delay 0 ms of u1: must be positive"),
        ([source("u1", retry=RetryDelays(5, 4))], "\\(5 ms\\) exceeds the maximum \\(4 ms\\)"),
        ([UpdateStorageConfiguration(0)], "invalid source_tick_ms 0"),
        ([source("u1", *"abcdef")], "dataflows_max: 6"),
        ([source("u1", *"abcd"), sink("k1"), oneshot()], "cannot run o1: too many objects: 7"),
        (
            [source("u1", *"abc"), sink("k1"), oneshot(), sink("k2")],
            "cannot run k2: too many objects: 7",
        ),
    ],
)
def test_what_cannot_be(commands: list[Command], rule: str) -> None:
    check(*START, *commands[:-1])
    with pytest.raises(InvalidUsage, match=rule):
        check(*START, *commands)


def test_what_was_refused_was_not_said() -> None:
    rules = check(*GO, source("u1", "e1"))
    with pytest.raises(InvalidUsage):
        rules.check(source("u1", "e2", remap_shard="r9"))
    rules.check(source("u1", "e1"))
    with pytest.raises(RemoteProtocolError, match="e1 is already an export of source u1"):
        rules.check(source("u2", "e1"))


def test_an_id_is_free_again_when_its_end_was_told() -> None:
    rules = check(*GO, source("u1", "e1"), drop("u1"))
    rules.ended("u1")
    with pytest.raises(RemoteProtocolError, match="e1 was dropped"):
        rules.check(source("u1", "e1"))
    rules.ended("e1")
    rules.check(source("e1", "u1"))
    check(*START, source("u1", "e1"), drop("u1"), sink("u1"), drop("u1"), source("u1"))


def test_a_uuid_is_free_again_when_it_was_answered_and_canceled() -> None:
    rules = check(*GO, oneshot(), oneshot("o2"))
    rules.ended("o1")
    with pytest.raises(RemoteProtocolError, match="choose a new"):
        rules.check(oneshot())
    rules.check(CancelOneshotIngestion("o1"))
    rules.check(oneshot())
    rules.check(CancelOneshotIngestion("o2"))
    rules.ended("o2")
    rules.check(oneshot("o2"))
    check(*START, oneshot(), CancelOneshotIngestion("o1"), oneshot())


def test_a_connection_steps_through_its_table() -> None:
    said: dict[str, Command] = {
        "Hello": Hello("a"),
        "InitializationComplete": InitializationComplete(),
        OTHER: AllowWrites(),
    }
    ways: dict[str, list[Command]] = {"opened": []}
    for (stage, event), following in STAGES.items():
        ways.setdefault(following, [*ways[stage], said[event]])
    for stage, way in ways.items():
        for event, command in said.items():
            if (stage, event) in STAGES:
                check(*way, command)
            else:
                with pytest.raises(RemoteProtocolError):
                    check(*way, command)


# -- responses -------------------------------------------------------------------------------------


def heard(*commands: Command) -> StorageResponseRules:
    rules = StorageResponseRules()
    for command in commands:
        rules.note_command(command)
    return rules


SAID: list[Command] = [
    Hello("a"),
    source("u1", "e1", "e2"),
    sink(),
    oneshot(),
    sink("k2"),
    drop("k2"),
    InitializationComplete(),
    source("u1", "e1"),
    drop("k1"),
    oneshot("o2"),
    CancelOneshotIngestion("o2"),
]
CANCELED = StagingFailed("OperationCanceled", "")


def test_good_responses() -> None:
    rules = heard(*SAID)
    for response in (
        FrontierUpper("u1", 3),
        FrontierUpper("e1", 3),
        FrontierUpper("e2", 3),
        FrontierUpper("e1", EMPTY),
        StatusUpdate("whoever", "running"),
        StatisticsUpdates(),
        DroppedId("e2"),
        FrontierUpper("k1", 3),
        DroppedId("k1"),
        StagedBatches("o1", FilesStaged()),
        StagedBatches("o2", CANCELED),
        ConnectionRefused("x", "y"),
    ):
        rules.check(response)
    assert rules.ended == ["e2", "k1", "o1", "o2"]
    rules.note_command(sink())
    rules.check(FrontierUpper("k1", 1))


@pytest.mark.parametrize(
    ("responses", "rule"),
    [
        ([FrontierUpper("x", 3)], "got an upper of x, which this connection does not run"),
        ([FrontierUpper("k2", 3)], "got an upper of k2"),
        ([FrontierUpper("e1", 3)] * 2, "the upper of e1 did not advance: from 3 to 3"),
        ([FrontierUpper("e1", 3), FrontierUpper("e1", 2)], "from 3 to 2"),
        ([DroppedId("u1")], "got the drop of u1, which was not dropped"),
        ([DroppedId("k1")] * 2, "got the drop of k1"),
        ([DroppedId("k1"), FrontierUpper("k1", 3)], "got an upper of k1"),
        ([StagedBatches("o1", FilesStaged())] * 2, "o1 was answered twice"),
        ([StagedBatches("o1", CANCELED)], "o1 was answered with OperationCanceled, but"),
    ],
)
def test_a_response_that_breaks_a_rule(responses: list[Response], rule: str) -> None:
    rules = heard(*SAID)
    for response in responses[:-1]:
        rules.check(response)
    with pytest.raises(RemoteProtocolError, match=rule):
        rules.check(responses[-1])


def test_nothing_is_answered_before_the_replay_is_complete() -> None:
    rules = heard(*SAID[:6])
    rules.check(ConnectionRefused("x", "y"))
    with pytest.raises(RemoteProtocolError, match="before InitializationComplete"):
        rules.check(FrontierUpper("u1", 3))
