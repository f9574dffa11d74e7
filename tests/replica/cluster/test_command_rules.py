"""What a client may say, in which order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Command,
    CopyToExport,
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
    ViewExport,
)
from actors.replica.cluster.rules import CommandRules, check_instance
from actors.runtime.errors import InvalidUsage, RemoteProtocolError
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings

SCHEMA = TableSchema((TableColumn("k", "bigint"),))
SOURCE = ShardImport("s1", SCHEMA)
FLOW = DataflowDescription("i1", "", (SOURCE,), IndexExport(("k",), SCHEMA), 0)
TALK = DataflowDescription("t1", "", (SOURCE,), SubscribeExport(SCHEMA), 0)
DROP = AllowCompaction("i1", EMPTY)
SETTINGS = Settings(frame_bytes_max=8192, dataflows_max=3, peeks_pending_max=2)
START: list[Command] = [Hello("a"), CreateInstance(2)]


def check(*commands: Command, ours: bool = False) -> CommandRules:
    rules = CommandRules(None if ours else CreateInstance(2), SETTINGS)
    for command in commands:
        rules.check(command)
    return rules


def test_a_good_conversation() -> None:
    rules = check(
        *START,
        UpdateConfiguration(),
        UpdateConfiguration(4096),
        CreateDataflow(FLOW),
        ScheduleDataflow("i1"),
        ScheduleDataflow("unknown"),
        Peek("p", IndexTarget("i1"), 5),
        InitializationComplete(),
        AllowWrites(),
        AllowCompaction("unknown", 5),
        AllowCompaction("i1", EMPTY),
    )
    assert rules.complete
    with pytest.raises(RemoteProtocolError, match="peek p is still pending"):
        rules.check(Peek("p", IndexTarget("i1"), 5))
    with pytest.raises(
        RemoteProtocolError, match="i1 was dropped but its end has not been reported"
    ):
        rules.check(CreateDataflow(FLOW))


@pytest.mark.parametrize(
    "commands",
    [
        [CreateInstance(2)],
        [Hello("")],
        [Hello("a"), Hello("b")],
        [Hello("a"), AllowWrites()],
        [*START, CreateInstance(2)],
        [*START, InitializationComplete(), InitializationComplete()],
        [*START, CreateDataflow(FLOW), CreateDataflow(FLOW)],
        [*START, CreateDataflow(msgspec.structs.replace(FLOW, id=""))],
        [*START, CreateDataflow(msgspec.structs.replace(FLOW, as_of=-1))],
        [*START, Peek("", IndexTarget("i1"), 5)],
        [*START, Peek("p", IndexTarget("i1"), EMPTY)],
        [Hello("n" * 65)],
        [*START, CreateDataflow(msgspec.structs.replace(FLOW, id="i" * 257))],
        [*START, Peek("p" * 65, IndexTarget("i1"), 5)],
        [*START, *(Peek(uuid, IndexTarget("i1"), 5) for uuid in "pp")],
        [*START, *(Peek(uuid, IndexTarget("i1"), 5) for uuid in "pqr")],
        [*START, *(AllowCompaction(id, 5) for id in "abcd")],
        [*START, *(AllowCompaction(id, EMPTY) for id in "abcd")],
        [*START, AllowCompaction("i" * 257, EMPTY)],
        [*START, Peek("p", IndexTarget("i1"), 5, ("k",), bytes(8192 * 4 + 1))],
        [*START, CreateDataflow(FLOW), InitializationComplete(), DROP, CreateDataflow(FLOW)],
    ],
)
def test_a_broken_order(commands: list[Command]) -> None:
    check(*commands[:-1])
    with pytest.raises(RemoteProtocolError):
        check(*commands)


def test_another_instance_is_refused_with_the_difference() -> None:
    with pytest.raises(InvalidUsage, match=r"3 workers.*2 workers"):
        check(Hello("a"), CreateInstance(3))
    with pytest.raises(InvalidUsage, match=r"version 9.*version 2"):
        check(Hello("a"), CreateInstance(2, 9))


def test_a_result_must_fit_a_frame() -> None:
    with pytest.raises(InvalidUsage, match="frame_bytes_max"):
        check(*START, UpdateConfiguration(4097))
    check(*START, UpdateConfiguration(4096))
    with pytest.raises(InvalidUsage, match="inline_bytes_max"):
        check(*START, UpdateConfiguration(inline_bytes_max=0))
    with pytest.raises(InvalidUsage, match="maintenance_ms"):
        check(*START, UpdateConfiguration(maintenance_ms=0))


def test_an_instance_may_expire_sooner_but_not_later() -> None:
    running = CreateInstance(2, expiration_ms=50)
    for wanted in (50, 49):
        check_instance(running, CreateInstance(2, expiration_ms=wanted))
        check_instance(CreateInstance(2), CreateInstance(2, expiration_ms=wanted))
    for later in (51, None):
        with pytest.raises(InvalidUsage, match="after 50 ms"):
            check_instance(running, CreateInstance(2, expiration_ms=later))


def test_an_id_is_free_again_when_its_end_was_told() -> None:
    start = [*START, CreateDataflow(FLOW), InitializationComplete()]
    rules = check(*start, DROP)
    rules.ended("i1")
    rules.check(CreateDataflow(FLOW))
    rules.check(DROP)
    with pytest.raises(RemoteProtocolError, match="end has not been reported"):
        rules.check(CreateDataflow(FLOW))
    rules = check(*start)
    rules.ended("i1")  # it has ended by itself, and is dropped afterwards
    rules.check(DROP)
    rules.check(CreateDataflow(FLOW))
    check(*START, CreateDataflow(FLOW), DROP, CreateDataflow(FLOW))  # nothing runs yet


def test_a_client_never_uses_the_id_of_a_subscribe_again() -> None:
    rules = check(*START, CreateDataflow(TALK), InitializationComplete(), ours=True)
    rules.check(AllowCompaction("t1", EMPTY))
    rules.ended("t1")
    with pytest.raises(RemoteProtocolError, match="t1 was already used for a subscribe"):
        rules.check(CreateDataflow(TALK))
    for number in range(2, 9):  # what is remembered is bounded
        rules.check(CreateDataflow(msgspec.structs.replace(TALK, id=f"t{number}")))
        rules.check(AllowCompaction(f"t{number}", EMPTY))
    rules.check(CreateDataflow(TALK))


def test_what_waits_is_bounded() -> None:
    flows = [CreateDataflow(msgspec.structs.replace(FLOW, id=f"i{n}")) for n in range(4)]
    with pytest.raises(InvalidUsage, match="dataflows_max: 3"):
        check(*START, *flows)
    rules = check(*START, InitializationComplete())
    for number in range(20):
        rules.check(Peek(f"p{number}", IndexTarget("i1"), 5, ("k",), bytes(8192 * 4)))
        rules.answered(f"p{number}")
    for number in range(4):
        rules.check(Peek(f"p{number}", IndexTarget("i1"), 5))
    with pytest.raises(RemoteProtocolError, match="too many unanswered peeks: 4"):
        rules.check(Peek("p5", IndexTarget("i1"), 5))


PLAN = DeltaPlan(("a", "b"), (SCHEMA, SCHEMA), SCHEMA, "select", "incremental", "")
OTHER = ShardImport("s2", TableSchema((TableColumn("k", "string"),)))
NESTED = TableSchema((TableColumn("l", "array<int>"),))
DEEP = ShardImport("s2", NESTED)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"export": IndexExport(("x",), SCHEMA)}, r"key \(x\).*columns from k"),
        ({"export": IndexExport((), SCHEMA)}, "key"),
        ({"export": IndexExport(("k", "k"), SCHEMA)}, "distinct"),
        ({"imports": (SOURCE, SOURCE)}, "needs 1 imports: got 2"),
        ({"imports": ()}, "needs 1 imports: got 0"),
        ({"imports": (OTHER,)}, "the import has columns `k` string: expected `k` bigint"),
        ({"imports": (OTHER,), "export": SubscribeExport(SCHEMA)}, "the import has columns"),
        ({"export": SubscribeExport(SCHEMA), "imports": ()}, "needs 1 imports"),
        ({"export": ViewExport(PLAN, "s3")}, "needs 2 imports: got 1"),
        ({"export": ViewExport(PLAN, "s3"), "imports": (SOURCE, OTHER)}, "import 1 has col"),
        (
            {"export": ViewExport(PLAN, "s3", ("h",)), "imports": (SOURCE, SOURCE)},
            "needs 0 hidden shards: got 1",
        ),
        ({"as_of": 5, "until": 5}, "ends at 5, not after its as_of 5"),
        ({"export": CopyToExport(SCHEMA, "x", "csv", 9)}, "file_bytes_max 9: expected at least"),
        ({"export": CopyToExport(SCHEMA, "s3:/b", "csv", 9_999)}, "expected s3://"),
        ({"export": CopyToExport(SCHEMA, "ftp://b", "csv", 9_999)}, "ftp: is not supported"),
        (
            {"export": CopyToExport(SCHEMA, "s3://box/x", "csv", 1 << 40)},
            "the limit in a bucket is",
        ),
        (
            {"export": CopyToExport(NESTED, "x", "csv", 9_999), "imports": (DEEP,)},
            "CSV does not support",
        ),
        ({"export": CopyToExport(SCHEMA, "x", "csv", 9_999), "imports": ()}, "needs 1 imports"),
        ({"export": CopyToExport(SCHEMA, "x", "csv", 9_999), "imports": (OTHER,)}, "has col"),
    ],
)
def test_a_description_must_fit_together(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidUsage, match=text):
        check(*START, CreateDataflow(msgspec.structs.replace(FLOW, **changes)))
